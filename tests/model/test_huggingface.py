"""Hugging Face's state dicts, against their own model where transformers is installed."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from megazero import mpu
from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from megazero.model.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    from_huggingface,
    to_huggingface,
)
from megazero.model.state_dict import merge_full, slice_full
from tests.model.plain_gpt2 import random_state, random_tokens, randomize
from tests.model.test_gpt2 import LLAMA
from tests.ranks import run_ranks

CONFIG = GPT2Config(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    intermediate_size=40,
    max_position_embeddings=11,
    vocab_size=131,
    make_vocab_size_divisible_by=8,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
GROUPED = replace(CONFIG, **LLAMA)
TIED = replace(GROUPED, untie_embeddings_and_output_weights=False)
UNGROUPED = replace(GROUPED, group_query_attention=False, num_query_groups=None)
# A head's three wavelengths, 6, 6283 and 6 million positions, are of each kind: kept, between, and scaled.
SCALED = replace(TIED, rotary_base=10**9, use_rope_scaling=True, rope_scaling_factor=32.0)
CONFIGS = {"gpt2": CONFIG, "llama": UNGROUPED, "grouped": GROUPED, "tied": TIED, "scaled": SCALED}
LLAMA3 = config_to_huggingface(SCALED)["rope_scaling"]
of_each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def their_model(config):
    """transformers' own, with random numbers."""
    transformers = pytest.importorskip("transformers")
    described = transformers.AutoConfig.for_model(**config_to_huggingface(config))
    model = transformers.AutoModelForCausalLM.from_config(described)
    randomize(model)
    return model


def arrays(tensors):
    """numpy copies, which ranks can be sent."""
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def tensors(arrays):
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def parity_case(config, state, want):
    """Compares with what transformers computed; returns the model as exported again."""
    groups = mpu.initialize_model_parallel(torch.distributed.get_world_size())
    model = GPT2Model(config)
    full = from_huggingface(tensors(state), config)
    model.load_state_dict(slice_full(full, model, groups.model_parallel_rank, groups.model_parallel_size))
    tokens, want = random_tokens(3, 11, 131), tensors(want)

    logits = mpu.gather_from_model_parallel_region(model(tokens), groups.model)[..., :131]
    assert_close(logits, want.pop("logits"), atol=1e-5, rtol=1e-5)
    loss = model(tokens[:, :-1], targets=tokens[:, 1:]).mean()
    assert_close(loss, want.pop("loss"), atol=1e-5, rtol=1e-5)
    loss.backward()
    cuts = mpu.partitions(model)
    gradients = merge_full({name: p.grad for name, p in model.named_parameters()}, cuts, groups.model)
    gradients = to_huggingface(gradients, config)
    for name, gradient in want.items():
        assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    return arrays(to_huggingface(merge_full(dict(model.named_parameters()), cuts, groups.model), config))


@pytest.mark.parametrize(
    ("name", "world_size"),
    [("gpt2", 1), ("gpt2", 2), ("gpt2", 4), ("llama", 2), ("tied", 2), ("grouped", 1), ("grouped", 2), ("scaled", 2)],
)
def test_logits_loss_and_gradients_equal_transformers(name, world_size):
    theirs = their_model(CONFIGS[name])
    state, tokens = arrays(theirs.state_dict()), random_tokens(3, 11, 131)
    out = theirs(tokens, labels=tokens)  # shifts the labels itself and averages
    out.loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    want = arrays({"logits": out.logits, "loss": out.loss, **gradients})

    for exported in run_ranks(world_size, parity_case, CONFIGS[name], state, want):
        torch.nn.init.zeros_(theirs.get_input_embeddings().weight)
        theirs.load_state_dict(tensors(exported), strict=True)
        assert torch.equal(theirs(tokens).logits, out.logits)


@of_each
def test_round_trip_is_bitwise_and_keeps_the_tie(config):
    full = random_state(config)
    theirs = to_huggingface(full, config)
    embedding = theirs["transformer.wte.weight" if config is CONFIG else "model.embed_tokens.weight"]
    assert (theirs["lm_head.weight"] is embedding) != config.untie_embeddings_and_output_weights
    back = from_huggingface(theirs, config)
    assert list(back) == list(full) and all(torch.equal(back[name], full[name]) for name in full)


def test_a_gpt2_without_biases_gets_zeros_and_comes_back_with_them():
    config = replace(CONFIG, disable_bias_linear=True)
    full = random_state(config)
    assert config_from_huggingface(config_to_huggingface(config)) == replace(CONFIG, make_vocab_size_divisible_by=128)
    back = from_huggingface(to_huggingface(full, config), CONFIG)
    assert back.keys() > full.keys() and all(torch.equal(back[name], full[name]) for name in full)
    assert all(name.endswith(".bias") and not back[name].any() for name in back.keys() - full.keys())


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        ("gpt2", {"h.0.attn.bias": torch.ones(1, 1, 11, 11), "h.1.attn.masked_bias": torch.tensor(-1e4)}),
        ("tied", {"layers.1.self_attn.rotary_emb.inv_freq": torch.ones(3)}),
    ],
)
def test_prefix_head_and_buffers_are_optional(name, buffers):
    full = random_state(CONFIGS[name])
    theirs = {k.partition(".")[2]: v for k, v in to_huggingface(full, CONFIGS[name]).items() if k != "lm_head.weight"}
    back = from_huggingface({**theirs, **buffers}, CONFIGS[name])
    assert set(back) == set(full) and all(torch.equal(back[name], full[name]) for name in full)


def test_missing_and_unknown_names_are_listed():
    theirs = to_huggingface(random_state(CONFIG), CONFIG)
    del theirs["transformer.h.1.ln_2.bias"], theirs["transformer.wpe.weight"]
    theirs["transformer.h.2.ln_1.weight"] = torch.ones(24)
    with pytest.raises(ValueError, match=r"missing h\.1\.ln_2\.bias, wpe\.weight; unknown h\.2\.ln_1\.weight"):
        from_huggingface(theirs, CONFIG)
    with pytest.raises(ValueError, match="missing word_embeddings.weight"):
        to_huggingface({k: v for k, v in random_state(CONFIG).items() if k != "word_embeddings.weight"}, CONFIG)
    theirs = to_huggingface(random_state(UNGROUPED), UNGROUPED)
    del theirs["lm_head.weight"]
    theirs["model.layers.0.self_attn.q_norm.weight"] = torch.ones(6)
    with pytest.raises(ValueError, match=r"missing lm_head\.weight; unknown layers\.0\.self_attn\.q_norm\.weight"):
        from_huggingface(theirs, UNGROUPED)


def test_other_sizes_name_parameter_found_and_expected():
    theirs = to_huggingface(random_state(CONFIG), CONFIG)
    theirs["transformer.h.0.mlp.c_fc.weight"] = torch.zeros(24, 96)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.dense_h_to_4h\.weight has \[96, 24\], expected \[40, 24\]"):
        from_huggingface(theirs, CONFIG)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_proj\.weight has \[24, 24\], expected \[12, 24\]"):
        from_huggingface(to_huggingface(random_state(UNGROUPED), UNGROUPED), GROUPED)


@pytest.mark.parametrize("name", ["gpt2", "tied"])
def test_a_head_of_its_own_is_refused(name):
    theirs = to_huggingface(random_state(CONFIGS[name]), CONFIGS[name])
    theirs["lm_head.weight"] = theirs["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        from_huggingface(theirs, CONFIGS[name])


@of_each
def test_configurations_convert_both_ways(config):
    theirs = config_to_huggingface(config)
    config = replace(config, make_vocab_size_divisible_by=128)
    assert config_from_huggingface(theirs) == config
    saved = their_model(config).config.to_dict()  # as transformers spells it
    assert config_from_huggingface(saved) == config


@pytest.mark.parametrize(
    ("model_type", "parameters", "vocab_size"),
    [("gpt2", 124_439_808, 50257), ("llama", 6_738_415_616, 32000), ("mistral", 7_241_732_096, 32000)],
)
def test_keys_that_are_left_out_have_their_defaults(model_type, parameters, vocab_size):
    config = config_from_huggingface({"model_type": model_type, "sliding_window": None})
    assert (config.num_parameters(), config.vocab_size) == (parameters, vocab_size)


def test_llamas_from_3_1_on_are_what_their_config_json_says():
    shared = {"model_type": "llama", "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
    small = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False}
    for factor, sizes, parameters in ((32.0, small, 1_235_814_400), (8.0, large, 8_030_261_248)):
        config = config_from_huggingface({**shared, **sizes, "rope_scaling": {**LLAMA3, "factor": factor}})
        assert (config.use_rope_scaling, config.rope_scaling_factor) == (True, factor)
        assert config.num_parameters() == parameters


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral"])
def test_defaults_are_those_of_transformers(model_type):
    given = {"model_type": model_type, "sliding_window": None}
    theirs = pytest.importorskip("transformers").AutoConfig.for_model(**given).to_dict()
    assert config_from_huggingface(theirs) == config_from_huggingface(given)


def test_a_width_that_follows_from_the_hidden_size_is_written():
    assert config_to_huggingface(replace(GROUPED, intermediate_size=None))["intermediate_size"] == 64


def test_a_base_of_rotary_positions_is_found_where_each_version_has_it():
    for keys in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}):
        for others in ({}, {"rope_scaling": None}):
            assert config_from_huggingface({"model_type": "llama", **keys, **others}).rotary_base == 500_000


def test_a_model_between_the_layouts_is_refused():
    needs = "Llama's needs --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear"
    for config in (
        replace(GROUPED, disable_bias_linear=False),
        replace(CONFIG, untie_embeddings_and_output_weights=True),
    ):
        with pytest.raises(ValueError, match=rf"a model with --.*untie.*GPT-2 has none of these, and {needs}\."):
            config_to_huggingface(config)


def test_a_dropout_of_embeddings_alone_is_told(caplog):
    for dropouts in ({}, {"embd_pdrop": 0.2, "resid_pdrop": 0.2}):
        config_from_huggingface(dropouts)
    assert not caplog.messages
    assert config_from_huggingface({"embd_pdrop": 0.0}).hidden_dropout == 0.1
    assert "embd_pdrop=0.0 and resid_pdrop=0.1: --hidden-dropout, 0.1, is" in caplog.text


def test_another_gelu_is_told(caplog):
    for activation in ({}, {"activation_function": "gelu_new"}, {"activation_function": "gelu_pytorch_tanh"}):
        config_from_huggingface(activation)
    assert not caplog.messages
    assert config_from_huggingface({"activation_function": "gelu"}) == config_from_huggingface({})
    assert 'activation_function="gelu", was trained with the exact GELU' in caplog.text
    x = torch.linspace(-5, 5, 10001, dtype=torch.float64)
    difference = (F.gelu(x) - F.gelu(x, approximate="tanh")).abs().max()
    assert 4e-4 < difference < 5e-4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "qwen2"),
        ("activation_function", "relu"),
        ("tie_word_embeddings", False),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
    ],
)
def test_a_configuration_that_we_cannot_compute_is_refused(key, value):
    with pytest.raises(ValueError, match=key):
        config_from_huggingface({key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu', and this model supports only 'silu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"head_dim": 160}, "head_dim=160, and this model supports only None or 128"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
            "low_freq_factor=None, and .* only 1.0",
        ),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "factor=None, and .* only 'a number'"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 2.0}}, "high_freq_factor=2.0, and .* only 4.0"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 4096}}, "=4096, and .* only 8192"),
        ({"rope_theta": 10000.5}, "rope_theta=10000.5"),
        ({"model_type": "mistral"}, "sliding_window=4096 and max_position_embeddings=131072"),
    ],
)
def test_another_llama_than_ours_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_huggingface({"model_type": "llama", **changes})
    mistral = {"model_type": "mistral", "max_position_embeddings": 4096, "head_dim": None}
    assert config_from_huggingface(mistral).num_query_groups == 8
