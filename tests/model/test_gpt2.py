"""GPT2Model against a plain single-process GPT-2: losses, gradients, initial values, at several model-parallel sizes."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from megazero import mpu
from megazero.model import block as block_module
from megazero.model.attention import attend
from megazero.model.config import GPT2Config
from megazero.model.documents import document_positions
from megazero.model.gpt2 import GPT2Model
from megazero.model.state_dict import merge_full
from tests.model.plain_gpt2 import PlainGPT2, load_same, random_tokens, randomize
from tests.ranks import run_ranks

VOCAB = 131


def small_config(**options):
    return GPT2Config(
        **{
            "num_layers": 2,
            "hidden_size": 24,
            "num_attention_heads": 4,
            "max_position_embeddings": 11,
            "vocab_size": VOCAB,
            "make_vocab_size_divisible_by": 8,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            **options,
        }
    )


def same_model(config, **options):
    """A GPT2Model over all ranks and a plain one, with the same random values."""
    groups = mpu.initialize_model_parallel(torch.distributed.get_world_size())
    plain, model = PlainGPT2(config), GPT2Model(config, **options)
    load_same(model, plain)
    return model, plain, groups.model


def assert_same_gradients(model, plain, group, tolerance=1e-5):
    gradients = {name: p.grad for name, p in model.named_parameters()}
    merged = merge_full(gradients, mpu.partitions(model), group)
    want = {name: p.grad for name, p in plain.named_parameters()}
    assert_close(merged, want, atol=tolerance, rtol=tolerance)


def loss_and_gradients_case(config):
    model, plain, group = same_model(config)
    tokens = random_tokens(3, 10, VOCAB)
    want = plain.loss(tokens[:, :-1], tokens[:, 1:])  # [b, s]
    got = model(tokens[:, :-1], targets=tokens[:, 1:])
    assert got.dtype == torch.float32 and got.shape == (3, 9)
    assert_close(got, want, atol=1e-5, rtol=1e-5)
    weight = torch.rand(3, 9, generator=torch.Generator().manual_seed(2))  # so that no two tokens count alike
    (want * weight).sum().backward()
    (got * weight).sum().backward()
    assert_same_gradients(model, plain, group)
    logits = mpu.gather_from_model_parallel_region(model(tokens), group)
    assert_close(logits[..., :VOCAB], plain(tokens), atol=1e-5, rtol=1e-5)
    embedding = model.word_embeddings.weight
    padding_rows = slice(max(0, VOCAB - group.rank() * embedding.size(0)), None)
    assert not embedding.grad[padding_rows].any(), "padding rows of the vocabulary must get no gradient"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loss_logits_and_gradients_equal_plain_gpt2(world_size):
    run_ranks(world_size, loss_and_gradients_case, small_config())


def test_another_epsilon_of_the_norms_equals_plain_gpt2_with_it():
    run_ranks(2, loss_and_gradients_case, small_config(layernorm_epsilon=0.5))


LLAMA = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "rotary_base": 500,
    "group_query_attention": True,
    "num_query_groups": 2,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("more", [{}, {"recompute": "selective"}, {"checkpoint_activations": True}])
def test_a_llama_equals_a_plain_one(world_size, more):
    run_ranks(world_size, loss_and_gradients_case, small_config(**LLAMA, **more))


@pytest.mark.parametrize(
    ("device", "dtype", "mask", "heads"),
    [
        ("meta", torch.bfloat16, None, 2),
        ("meta", torch.bfloat16, "mask", 4),
        ("meta", torch.float32, None, 4),
        ("cpu", torch.bfloat16, None, 4),
    ],
)
def test_shared_keys_are_repeated_for_kernels_that_want_it(monkeypatch, device, dtype, mask, heads):
    q, k, v = (torch.empty(1, n, 3, 8, device=device, dtype=dtype) for n in (4, 2, 2))
    seen = []

    def kernel(q, k, v, *, enable_gqa, **_):
        seen.append((k.size(1), v.size(1), enable_gqa))

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    attend(q, k, v, mask, is_causal=mask is None, dropout=0.0, model_parallel_size=1)
    assert seen == [(heads, heads, heads == 2)]


@pytest.mark.parametrize(
    "architecture", [{}, {**LLAMA, "hidden_size": 36, "num_attention_heads": 6, "num_query_groups": 3}]
)
def test_three_ranks_with_three_heads_and_an_odd_mlp_equal_plain_gpt2(architecture):
    sizes = {"hidden_size": 21, "num_attention_heads": 3, "intermediate_size": 33}
    run_ranks(3, loss_and_gradients_case, small_config(**{**sizes, **architecture}))


@pytest.mark.parametrize(("world_size", "layers_at_once"), [(1, 1), (1, 2), (2, 2)])
def test_checkpointed_activations_equal_plain_gpt2(world_size, layers_at_once):
    config = small_config(num_layers=3, checkpoint_activations=True, checkpoint_num_layers=layers_at_once)
    run_ranks(world_size, loss_and_gradients_case, config)


def initial_values_case(architecture):
    torch.manual_seed(7)
    mpu.initialize_model_parallel(torch.distributed.get_world_size())
    model = GPT2Model(small_config(**architecture))
    following = torch.rand(3).tolist()  # the default generator stands at the same place afterwards
    group = mpu.get_model_parallel_group()
    merged = merge_full(dict(model.named_parameters()), mpu.partitions(model), group)
    return {name: value.tolist() for name, value in merged.items()}, following


@pytest.mark.parametrize(("architecture", "sizes"), [({}, (2, 4)), (LLAMA, (2,))], ids=["gpt2", "llama"])
def test_initial_values_do_not_depend_on_model_parallel_size(architecture, sizes):
    want = run_ranks(1, initial_values_case, architecture)[0]
    for world_size in sizes:
        for got in run_ranks(world_size, initial_values_case, architecture):
            assert got == want


def test_initial_values_have_gpt2s_spread(one_rank):
    config = small_config(num_layers=8, hidden_size=64, max_position_embeddings=64)
    state = GPT2Model(config).state_dict()
    scaled = 0.02 / (2 * 8) ** 0.5
    for name, tensor in state.items():
        if name.endswith("layernorm.weight"):
            assert (tensor == 1).all(), name
        elif name.endswith("bias"):
            assert (tensor == 0).all(), name
        else:
            values = tensor[:VOCAB] if name == "word_embeddings.weight" else tensor
            is_residual = name.endswith(("attention.dense.weight", "dense_4h_to_h.weight"))
            assert values.std().item() == pytest.approx(scaled if is_residual else 0.02, rel=0.05), name
            assert abs(values.mean().item()) < 1e-3, name


def documents_case():
    model, plain, group = same_model(small_config())
    eod = 5
    documents = [[7, 8, 9, eod], [eod], [3, 2, eod], [4, 6]]
    tokens = torch.tensor([sum(documents, [])])
    targets = random_tokens(1, tokens.size(1), VOCAB, seed=3)
    position_ids, document_ids = document_positions(tokens, eod)
    got = model(tokens, position_ids=position_ids, document_ids=document_ids, targets=targets)
    want, start = [], 0
    for document in documents:
        part = slice(start, start + len(document))
        want.append(plain.loss(tokens[:, part], targets[:, part]))
        start += len(document)
    want = torch.cat(want, dim=1)
    assert_close(got, want, atol=1e-5, rtol=1e-5)
    want.sum().backward()
    got.sum().backward()
    assert_same_gradients(model, plain, group)


@pytest.mark.parametrize("world_size", [1, 2])
def test_packed_documents_equal_each_document_alone(world_size):
    run_ranks(world_size, documents_case)


def test_documents_that_span_the_row_equal_no_documents(one_rank):
    model = GPT2Model(small_config())
    tokens = random_tokens(2, 9, VOCAB)
    assert_close(model(tokens, document_ids=torch.zeros_like(tokens)), model(tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_give_a_finite_fp32_loss_near_that_of_fp32(one_rank, dtype):
    config = small_config()
    plain, model = PlainGPT2(config), GPT2Model(config, dtype=dtype)
    assert all(p.dtype == dtype for p in model.parameters())
    load_same(model, plain)
    tokens = random_tokens(2, 10, VOCAB)
    loss = model(tokens[:, :-1], targets=tokens[:, 1:])
    assert loss.dtype == torch.float32
    assert_close(loss, plain.loss(tokens[:, :-1], tokens[:, 1:]), atol=0.2, rtol=0.05)
    loss.mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def dropout_case(hidden, attention):
    mpu.initialize_model_parallel(torch.distributed.get_world_size())
    torch.manual_seed(0)
    model = GPT2Model(small_config(hidden_dropout=hidden, attention_dropout=attention))
    randomize(model)
    mpu.model_parallel_cuda_manual_seed(11)
    tokens = random_tokens(2, 9, VOCAB)
    losses = [model(tokens, targets=tokens).mean().item() for _ in range(2)]
    model.eval()
    evaluated = [model(tokens, targets=tokens).mean().item() for _ in range(2)]
    return losses, evaluated


@pytest.mark.parametrize(("hidden", "attention"), [(0.5, 0.0), (0.0, 0.5)])
def test_dropout_acts_in_training_only_and_leaves_ranks_in_agreement(hidden, attention):
    results = run_ranks(2, dropout_case, hidden, attention)
    losses, evaluated = results[0]
    assert losses[0] != losses[1] and evaluated[0] == evaluated[1]
    assert results[1] == results[0]


def attention_dropout_of_heads_case():
    """Whether each rank's heads drop the same attention weights: with equal heads, equal outputs mean equal masks."""
    mpu.initialize_model_parallel(2)
    model = GPT2Model(small_config(num_layers=1, attention_dropout=0.5))
    mpu.model_parallel_cuda_manual_seed(11)
    attention, seen = model.transformer.layers[0].attention, []
    torch.nn.init.ones_(attention.query_key_value.weight)
    attention.dense.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    attention(torch.ones(9, 2, 24))
    return seen[0].tolist()


def test_attention_dropout_differs_between_model_parallel_ranks():
    first, second = run_ranks(2, attention_dropout_of_heads_case)
    assert first != second


def checkpointed_dropout_case():
    mpu.initialize_model_parallel(torch.distributed.get_world_size())
    results = []
    for is_checkpointed in (False, True):
        config = small_config(hidden_dropout=0.3, attention_dropout=0.3, checkpoint_activations=is_checkpointed)
        model = GPT2Model(config)
        randomize(model)
        mpu.model_parallel_cuda_manual_seed(11)
        tokens = random_tokens(2, 9, VOCAB)
        loss = model(tokens, targets=tokens).mean()
        loss.backward()
        results.append([loss.item(), *(p.grad.tolist() for p in model.parameters())])
    assert results[0] == results[1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_recomputation_repeats_dropout_exactly(world_size):
    run_ranks(world_size, checkpointed_dropout_case)


def refuse_case(size, message):
    mpu.initialize_model_parallel(size)
    with pytest.raises(ValueError, match=message):
        GPT2Model(small_config())


def test_heads_that_do_not_split_are_refused_on_every_rank():
    run_ranks(3, refuse_case, 3, "--num-attention-heads 4 .*--model-parallel-size 3")


def compiled_case(hidden, attention, is_checkpointed, architecture):
    """Losses and gradients of the same model, eager and compiled; returns the number of graph breaks."""
    names, compile_ = set(), torch.compile

    def trace(body):
        names.add(body.__name__)
        return compile_(body, backend="aot_eager")  # traces as any backend does, without a C++ compiler

    torch.compile = trace
    mpu.initialize_model_parallel(torch.distributed.get_world_size())
    tokens, results = random_tokens(2, 9, VOCAB), []
    for is_compiled in (False, True):
        model = GPT2Model(
            small_config(
                compile=is_compiled,
                hidden_dropout=hidden,
                attention_dropout=attention,
                checkpoint_activations=is_checkpointed,
                **architecture,
            )
        )
        randomize(model)
        mpu.model_parallel_cuda_manual_seed(11)
        loss = model(tokens, targets=tokens)
        loss.mean().backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert_close(*results, atol=1e-6, rtol=1e-5)
    counters = torch._dynamo.utils.counters
    assert names == {"_body", "vocab_parallel_cross_entropy"} and counters["frames"]["ok"] > 1, "not all was compiled"
    return sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    ("world_size", "attention_dropout", "is_checkpointed", "architecture"),
    [(1, 0.3, False, {}), (1, 0.0, True, LLAMA), pytest.param(2, 0.0, True, {}, marks=pytest.mark.slow)],
)
def test_compiled_blocks_and_loss_equal_eager_ones_without_graph_breaks(
    world_size, attention_dropout, is_checkpointed, architecture
):
    breaks = run_ranks(world_size, compiled_case, 0.3, attention_dropout, is_checkpointed, architecture)
    assert breaks == [0] * world_size


def test_compiled_blocks_and_loss_equal_eager_ones_where_heads_draw_from_the_model_parallel_stream():
    breaks = run_ranks(2, compiled_case, 0.3, 0.3, False, {})  # generators cannot be swapped inside of a graph
    assert min(breaks) > 0


def graphs_case(hidden_sizes, most):
    """How many graphs are compiled for several models in one process, of `most` for each function."""
    graphs, compile_ = [], torch.compile

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compile = partial(compile_, backend=count)
    block_module.MAX_GRAPHS = most
    mpu.initialize_model_parallel(1)
    tokens = random_tokens(2, 9, VOCAB)
    for hidden_size in hidden_sizes:
        model = GPT2Model(small_config(hidden_size=hidden_size, compile=True, checkpoint_activations=True))
        model(tokens, targets=tokens).mean().backward()
    return len(graphs)


def test_compiled_blocks_never_fall_back_to_running_without_a_graph():
    """Dropout draws other masks there: if only one of a block's two runs were compiled, its gradients would be wrong."""
    sizes = [8 * i for i in range(1, 6)]  # two graphs each: more than the 8 after which torch falls back by default
    assert run_ranks(1, graphs_case, sizes, block_module.MAX_GRAPHS)[0] >= 2 * len(sizes), (
        "each first run and each second"
    )
    with pytest.raises(AssertionError, match="FailOnRecompileLimitHit"):
        run_ranks(1, graphs_case, sizes, 3)


def test_the_first_block_may_have_another_attention(one_rank):
    model = GPT2Model(small_config())
    model.transformer.layers[0].attention = Last()
    assert model(torch.ones(1, 4, dtype=torch.long)).isfinite().all()


class Last(nn.Module):
    def forward(self, x, mask, cache, rotation):
        return x[-1:].expand_as(x)


def test_a_copy_of_the_model_is_independent_and_equal(one_rank):
    model = GPT2Model(small_config())
    twin = copy.deepcopy(model)
    tokens = random_tokens(2, 9, VOCAB)
    want = model(tokens)
    assert torch.equal(twin(tokens), want)
    torch.nn.init.zeros_(twin.word_embeddings.weight)
    assert torch.equal(model(tokens), want)
