"""The configuration's arithmetic and its checks."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from megazero import mpu
from megazero.activation_checkpointing import CheckpointSettings
from megazero.model.cache import KeyValueCache
from megazero.model.config import SEEN_IN_SHAPES, UNSEEN_IN_SHAPES, GPT2Config
from megazero.model.gpt2 import GPT2Model
from megazero.model.huggingface import config_to_huggingface
from megazero.model.norm import build_layernorm
from megazero.plan import Shape, plan_activations
from tests.model.plain_gpt2 import PlainGPT2, load_same, random_tokens, randomize
from tests.model.test_gpt2 import LLAMA, assert_same_gradients
from tests.plan.test_activations import saved_bytes
from tests.ranks import run_ranks

ODD = {
    "num_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 6,
    "intermediate_size": 20,
    "max_position_embeddings": 7,
    "vocab_size": 11,
}


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [
        ((22, 2048, 5632, 32, 4, 32000, True), 1_100_048_384),  # TinyLlama 1.1B
        ((30, 576, 1536, 9, 3, 49152, False), 134_515_008),  # SmolLM 135M
        ((32, 4096, 11008, 32, 32, 32000, True), 6_738_415_616),  # Llama 2 7B
        ((32, 4096, 14336, 32, 8, 128256, True), 8_030_261_248),  # Llama 3 8B
    ],
)
def test_llamas_have_the_published_number_of_parameters(sizes, parameters):
    layers, hidden, intermediate, heads, groups, vocabulary, is_untied = sizes
    config = GPT2Config(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        **{**LLAMA, "num_query_groups": groups, "untie_embeddings_and_output_weights": is_untied},
    )
    assert config.num_parameters() == parameters


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "parameters"),
    [
        (12, 768, 12, 124_439_808),
        (24, 1024, 16, 354_823_168),  # sold as 345M
        (48, 1600, 16, 1_557_611_200),
        (50, 4096, 32, 10_279_047_168),
    ],
)
def test_tutorial_sizes_have_the_published_number_of_parameters(one_rank, layers, hidden, heads, parameters):
    config = GPT2Config(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=50257,
        max_position_embeddings=1024,
        make_vocab_size_divisible_by=1,
    )
    model = GPT2Model(config, device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters() == parameters


@pytest.mark.parametrize(("hidden", "wide"), [(768, 2048), (1000, 2624), (4096, 10880), (16, 64)])
def test_the_default_width_of_swiglu_is_megatrons(hidden, wide):
    assert GPT2Config(hidden_size=hidden, num_attention_heads=8, swiglu=True).mlp_size == wide


def test_full_shapes_are_those_of_the_model_and_of_a_plain_gpt2(one_rank):
    config = GPT2Config(**ODD)
    plain = {name: tuple(p.shape) for name, p in PlainGPT2(config).named_parameters()}
    assert config.full_shapes() == plain
    ours = {name: tuple(p.shape) for name, p in GPT2Model(config, device="meta").named_parameters()}
    assert ours == {**plain, "word_embeddings.weight": (128, 12)}


# Splits over two ranks.
EVEN = {
    **ODD,
    "make_vocab_size_divisible_by": 1,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}

# Fields of which every value computes the same of the same weights, dropout aside: those with another value than the default,
ALIKE = {
    "make_vocab_size_divisible_by": 3,
    "vocab_chunk_size": 4,
    "sequence_chunk_size": 2,
    "attention_dropout": 0.5,
    "hidden_dropout": 0.5,
    "init_method_std": 0.5,
    "checkpoint_activations": True,
    "checkpoint_num_layers": 2,
    "recompute": "selective",
    "sequence_parallel": True,
}
# and those whose other values need a package, a compiler, other names of parameters or a further field.
TESTED_ELSEWHERE = "recompute_budget_gb layernorm compile memory_centric_tiled_linear tile_factor".split()
TESTED_ELSEWHERE += ["group_query_attention"]
# All others, each with a value that makes another model.
OTHERS = {
    "num_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 8,
    "vocab_size": 12,
    "layernorm_epsilon": 1e-6,
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "rotary_base": 500,
    "use_rope_scaling": True,
    "rope_scaling_factor": 4.0,
    "num_query_groups": 2,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
# What both models have, as the field means nothing without.
BOTH = {
    "rotary_base": {"position_embedding_type": "rope"},
    "use_rope_scaling": {"position_embedding_type": "rope"},
    "rope_scaling_factor": {"position_embedding_type": "rope", "use_rope_scaling": True},
    "num_query_groups": {"group_query_attention": True, "num_query_groups": 6},
}


def two_models(name, **options):
    """Of the same options, with ODD's or EVEN's sizes, but for one of OTHERS."""
    config = GPT2Config(**options, **BOTH.get(name, {}))
    return config, replace(config, **{name: OTHERS[name]})


def test_what_makes_another_model_is_compared_on_resume_kept_for_inference_and_told_to_hugging_face(one_rank):
    unsorted = {field.name for field in fields(GPT2Config)} ^ {*ALIKE, *TESTED_ELSEWHERE, *OTHERS}
    assert not unsorted, "OTHERS has what makes another model of the same weights, ALIKE what does not"
    for name, value in OTHERS.items():
        config, other = two_models(name, **ODD)
        assert name in (UNSEEN_IN_SHAPES if other.full_shapes() == config.full_shapes() else SEEN_IN_SHAPES), name
        assert config.differences(other) == {name: (getattr(config, name), value)}
        assert getattr(other.for_inference(), name) == value, name
        if name != "disable_bias_linear":  # for which their GPT-2 has zeros
            assert told_to_huggingface(other) != told_to_huggingface(config), name


@pytest.mark.parametrize("name", ALIKE)
def test_what_makes_no_other_model_computes_the_same(one_rank, name):
    config = GPT2Config(**ODD)
    model = GPT2Model(replace(config, **{name: ALIKE[name]})).eval()
    plain = PlainGPT2(config)
    load_same(model, plain)
    tokens = random_tokens(2, 7, config.vocab_size)
    losses = model(tokens[:, :-1], targets=tokens[:, 1:]), plain.eval().loss(tokens[:, :-1], tokens[:, 1:])
    assert_close(*losses, atol=1e-5, rtol=1e-5)
    for loss in losses:
        loss.sum().backward()
    assert_same_gradients(model, plain, model.group)


def test_a_width_of_the_mlp_that_is_not_given_differs_from_no_equal_one():
    default = GPT2Config(hidden_size=12, num_attention_heads=3)
    assert not default.differences(replace(default, intermediate_size=48))
    assert default.differences(replace(default, intermediate_size=20)) == {"intermediate_size": (48, 20)}


def told_to_huggingface(config):
    """What their config.json says, or why there is none."""
    try:
        return config_to_huggingface(config)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", OTHERS)
def test_what_makes_another_model_is_counted(one_rank, name):
    """In parameters, FLOPs, and the bytes that the planner says are saved for the backward."""
    _, config = two_models(name, **ODD, make_vocab_size_divisible_by=1, attention_dropout=0.0, hidden_dropout=0.0)
    model, s = GPT2Model(config), config.max_position_embeddings
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == config.full_shapes()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # flash attention's are not counted
        model(torch.zeros(2, s, dtype=torch.int64))
    assert config.flops_per_token(s) == 3 * counter.get_total_flops() // (2 * s)
    plan = plan_activations(config, Shape(3, s, 1, torch.float32, "cpu"), CheckpointSettings())
    assert saved_bytes(model, 3, s) == plan.saved


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_what_makes_another_model_reads_the_same_with_a_cache_and_beside_other_documents(one_rank, name):
    _, config = two_models(name, **EVEN)
    model = GPT2Model(config)
    randomize(model)
    tokens, cache = random_tokens(2, 7, config.vocab_size), KeyValueCache(config, 2, 7)
    pieces = [model(part, cache=cache) for part in tokens.split([4, 1, 2], dim=1)]
    assert_close(torch.cat(pieces, dim=1), model(tokens), atol=1e-5, rtol=1e-5)
    alone = [model(part) for part in tokens.split([3, 4], dim=1)]
    positions, documents = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    packed = model(tokens, position_ids=positions, document_ids=documents.expand(2, -1))
    assert_close(packed, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)


def split_case(others):
    groups = mpu.initialize_model_parallel(2)
    for name in others:
        _, config = two_models(name, **EVEN)
        tokens = random_tokens(3, 7, config.vocab_size)
        weight = torch.rand(3, 6, generator=torch.Generator().manual_seed(2))  # so that no two tokens count alike
        for sequence_parallel in (False, True):
            whole = GPT2Model(config, group=groups.data)  # of one rank
            split = GPT2Model(replace(config, sequence_parallel=sequence_parallel))
            load_same(split, whole)
            want, got = (model(tokens[:, :-1], targets=tokens[:, 1:]) for model in (whole, split))
            assert_close(got, want, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
            (want * weight).sum().backward()
            (got * weight).sum().backward()
            assert_same_gradients(split, whole, groups.model)


def test_what_makes_another_model_computes_the_same_over_two_ranks_and_in_slices_of_the_sequence():
    run_ranks(2, split_case, OTHERS)


@pytest.mark.parametrize(("size", "padded"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200)])
def test_vocabulary_is_padded_to_a_multiple_of_128_times_ranks(size, padded):
    assert GPT2Config(vocab_size=50257).padded_vocab_size(size) == padded


def test_a_vocabulary_that_fits_is_not_padded():
    assert GPT2Config(vocab_size=512).padded_vocab_size(4) == 512


def test_flops_per_token_are_three_times_what_torch_counts_in_the_forward_pass():
    config = GPT2Config(
        num_layers=3,
        hidden_size=24,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=16,
        vocab_size=31,
    )
    plain, s = PlainGPT2(config), 16
    with FlopCounterMode(display=False) as counter:
        plain(torch.zeros(2, s, dtype=torch.int64))
    assert config.flops_per_token(s) == 3 * counter.get_total_flops() // (2 * s)


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (3, ("--num-attention-heads 16", "--model-parallel-size 3")),
        (32, ("--num-attention-heads 16", "--model-parallel-size 32")),
    ],
)
def test_heads_that_do_not_split_are_refused(size, flags):
    with pytest.raises(ValueError) as error:
        GPT2Config().check_parallel(size)
    assert all(flag in str(error.value) for flag in flags)


def test_an_mlp_that_does_not_split_is_refused():
    with pytest.raises(ValueError, match="--intermediate-size 1001 .*--model-parallel-size 2"):
        GPT2Config(intermediate_size=1001).check_parallel(2)


def test_groups_that_do_not_split_are_refused():
    config = GPT2Config(group_query_attention=True, num_query_groups=2)
    config.check_parallel(2)
    with pytest.raises(ValueError, match=r"--num-query-groups 2 .* --model-parallel-size of 1, 2\."):
        config.check_parallel(4)


def test_as_many_groups_as_heads_make_no_other_model():
    config = GPT2Config(hidden_size=12, num_attention_heads=6, vocab_size=11)
    other = replace(config, group_query_attention=True, num_query_groups=6)
    assert not config.differences(other) and config.full_shapes() == other.full_shapes() and not other.architecture
    fewer = replace(other, num_query_groups=3)
    assert config.differences(fewer) == {"num_query_groups": (6, 3)}
    assert fewer.differences(config) == {"num_query_groups": (3, 6), "group_query_attention": (True, False)}
    assert fewer.architecture == "--group-query-attention --num-query-groups 3"


def test_only_rotary_positions_may_be_more_in_the_same_model():
    learned = GPT2Config(hidden_size=12, num_attention_heads=3, vocab_size=11)
    rotary = replace(learned, position_embedding_type="rope")
    assert learned.differences(replace(learned, max_position_embeddings=513)) == {"max_position_embeddings": (512, 513)}
    assert not rotary.differences(replace(rotary, max_position_embeddings=513))


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"hidden_size": 100, "num_attention_heads": 3}, "--hidden-size 100 .*--num-attention-heads 3"),
        ({"num_layers": 0}, "--num-layers must be at least 1, got 0"),
        ({"num_layers": 10**12}, "--num-layers must be at most 10,000, got 1000000000000"),
        ({"hidden_size": 10**12}, "--hidden-size must be at most 1,000,000, got 1000000000000"),
        ({"intermediate_size": 10**22}, "--intermediate-size must be at most 10,000,000, got"),
        ({"max_position_embeddings": 10**22}, "--max-position-embeddings must be at most 1,000,000,000, got"),
        ({"vocab_size": 10**22}, "--vocab-size must be at most 1,000,000,000, got"),
        ({"attention_dropout": 1.0}, "--attention-dropout must lie in .0, 1., got 1.0"),
        ({"hidden_dropout": -0.1}, "--hidden-dropout must lie in .0, 1., got -0.1"),
        ({"layernorm": "fused"}, "--layernorm must be one of torch, apex, got 'fused'"),
        ({"recompute": "half"}, "--recompute must be one of none, selective, full, auto, got 'half'"),
        ({"num_query_groups": 4}, "--group-query-attention is not given and --num-query-groups is 4.* Give both, or"),
        ({"group_query_attention": True}, "--group-query-attention is given and --num-query-groups is not given"),
        ({"group_query_attention": True, "num_query_groups": 5}, "--num-attention-heads 16 .* --num-query-groups 5"),
        ({"rotary_base": 500}, "--rotary-base 500 is of --position-embedding-type rope, which is not given"),
        ({"use_rope_scaling": True}, "--use-rope-scaling is of --position-embedding-type rope, which is not given"),
        ({"rope_scaling_factor": 4.0}, "--rope-scaling-factor 4.0 is of --use-rope-scaling, which is not given"),
        ({"position_embedding_type": "rope", "hidden_size": 48}, "heads have 3: --hidden-size 48 / --num-attention"),
        ({"position_embedding_type": "alibi"}, "must be one of learned_absolute, rope, got 'alibi'"),
        ({"normalization": "RMSNorm", "layernorm": "apex"}, "--layernorm apex .* --normalization is RMSNorm"),
    ],
)
def test_impossible_values_are_refused(options, flag):
    with pytest.raises(ValueError, match=flag):
        GPT2Config(**options)


def test_no_size_that_is_accepted_overflows_a_tensor(one_rank):
    most = {f.name: f.metadata["at_most"] for f in fields(GPT2Config) if f.metadata["at_most"]}
    GPT2Model(GPT2Config(**{**most, "num_layers": 1}, num_attention_heads=1), device="meta")


def test_a_model_of_another_version_or_of_none_is_refused_by_its_checkpoints_name():
    assert GPT2Config.of_saved({"model": {"num_layers": 3}}, "here") == GPT2Config(num_layers=3), "older: all defaults"
    with pytest.raises(ValueError, match="here is of a model that this version does not know: .*depth"):
        GPT2Config.of_saved({"model": {"depth": 3}}, "here")
    for client_state in ({}, {"model": "mine"}, [1]):
        with pytest.raises(
            ValueError, match=r"here does not say what model it is of.* a Hugging Face model can be imported beside"
        ):
            GPT2Config.of_saved(client_state, "here")


def test_a_missing_vocabulary_size_says_what_to_pass(one_rank):
    with pytest.raises(ValueError, match="--vocab-size"):
        GPT2Model(GPT2Config(num_layers=1), device="meta")


@pytest.mark.parametrize(
    ("positions", "why"), [("learned_absolute", ": positions are learned, one vector each"), ("rope", "")]
)
def test_a_sequence_longer_than_the_positions_is_refused(one_rank, positions, why):
    sizes = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 11,
        "max_position_embeddings": 6,
    }
    model = GPT2Model(GPT2Config(**sizes, position_embedding_type=positions))
    with pytest.raises(ValueError, match=rf"7 tokens .*--max-position-embeddings 6{why}\. Shorten"):
        model(torch.zeros(1, 7, dtype=torch.int64))


@pytest.mark.parametrize("kernel", GPT2Config.__dataclass_fields__["layernorm"].metadata["choices"])
def test_every_kernel_computes_the_same_layernorm(kernel):
    """Another norm makes another model: a field of its own, in OTHERS."""
    if kernel == "apex":
        pytest.importorskip("apex.normalization")
    norm, x = build_layernorm(GPT2Config(**ODD, layernorm=kernel)), torch.randn(3, 12)
    randomize(norm)
    same = nn.LayerNorm(12, 1e-5)
    same.load_state_dict(norm.state_dict())
    assert_close(norm(x), same(x))


def test_apex_layernorm_without_apex_says_so(one_rank):
    config = GPT2Config(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=11, layernorm="apex")
    try:
        import apex.normalization  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="--layernorm apex"):
            GPT2Model(config)
    else:
        assert not isinstance(GPT2Model(config).transformer.final_layernorm, nn.LayerNorm)
