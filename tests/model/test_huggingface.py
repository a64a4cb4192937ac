"""Hugging Face's state dicts, against their own model where transformers is installed."""

import pytest
import torch
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


def arrays(tensors):
    """numpy copies, which ranks can be sent."""
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def tensors(arrays):
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def parity_case(state, want):
    """Compares with what transformers computed; returns the model as exported again."""
    groups = mpu.initialize_model_parallel(torch.distributed.get_world_size())
    model = GPT2Model(CONFIG)
    full = from_huggingface(tensors(state), CONFIG)
    model.load_state_dict(slice_full(full, model, groups.model_parallel_rank, groups.model_parallel_size))
    tokens, want = random_tokens(3, 11, 131), tensors(want)

    logits = mpu.gather_from_model_parallel_region(model(tokens), groups.model)[..., :131]
    assert_close(logits, want.pop("logits"), atol=1e-5, rtol=1e-5)
    loss = model(tokens[:, :-1], targets=tokens[:, 1:]).mean()
    assert_close(loss, want.pop("loss"), atol=1e-5, rtol=1e-5)
    loss.backward()
    cuts = mpu.partitions(model)
    gradients = merge_full({name: p.grad for name, p in model.named_parameters()}, cuts, groups.model)
    gradients = to_huggingface(gradients, CONFIG)
    for name, gradient in want.items():
        assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    return arrays(to_huggingface(merge_full(dict(model.named_parameters()), cuts, groups.model), CONFIG))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_logits_loss_and_gradients_equal_transformers(world_size):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config_to_huggingface(CONFIG)))
    randomize(theirs)
    state, tokens = arrays(theirs.state_dict()), random_tokens(3, 11, 131)
    out = theirs(tokens, labels=tokens)  # shifts the labels itself and averages
    out.loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    want = arrays({"logits": out.logits, "loss": out.loss, **gradients})

    for exported in run_ranks(world_size, parity_case, state, want):
        torch.nn.init.zeros_(theirs.transformer.wte.weight)
        theirs.load_state_dict(tensors(exported), strict=True)
        assert torch.equal(theirs(tokens).logits, out.logits)


def test_round_trip_is_bitwise_and_keeps_the_tie():
    full = random_state(CONFIG)
    theirs = to_huggingface(full, CONFIG)
    assert theirs["lm_head.weight"] is theirs["transformer.wte.weight"]
    assert theirs["transformer.h.1.mlp.c_fc.weight"].shape == (24, 40)
    back = from_huggingface(theirs, CONFIG)
    assert set(back) == set(full) and all(torch.equal(back[name], full[name]) for name in full)


def test_prefix_head_and_mask_buffers_are_optional():
    full = random_state(CONFIG)
    theirs = {k.removeprefix("transformer."): v for k, v in to_huggingface(full, CONFIG).items()}
    del theirs["lm_head.weight"]
    theirs["h.0.attn.bias"] = torch.ones(1, 1, 11, 11)
    theirs["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    back = from_huggingface(theirs, CONFIG)
    assert set(back) == set(full) and all(torch.equal(back[name], full[name]) for name in full)


def test_missing_and_unknown_names_are_listed():
    theirs = to_huggingface(random_state(CONFIG), CONFIG)
    del theirs["transformer.h.1.ln_2.bias"], theirs["transformer.wpe.weight"]
    theirs["transformer.h.2.ln_1.weight"] = torch.ones(24)
    with pytest.raises(ValueError, match=r"missing h\.1\.ln_2\.bias, wpe\.weight; unknown h\.2\.ln_1\.weight"):
        from_huggingface(theirs, CONFIG)
    with pytest.raises(ValueError, match="missing word_embeddings.weight"):
        to_huggingface({k: v for k, v in random_state(CONFIG).items() if k != "word_embeddings.weight"}, CONFIG)


def test_other_sizes_name_parameter_found_and_expected():
    theirs = to_huggingface(random_state(CONFIG), CONFIG)
    theirs["transformer.h.0.mlp.c_fc.weight"] = torch.zeros(24, 96)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.dense_h_to_4h\.weight has \[96, 24\], expected \[40, 24\]"):
        from_huggingface(theirs, CONFIG)


def test_a_head_of_its_own_is_refused():
    theirs = to_huggingface(random_state(CONFIG), CONFIG)
    theirs["lm_head.weight"] = theirs["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        from_huggingface(theirs, CONFIG)


def test_configurations_convert_both_ways():
    assert config_from_huggingface(config_to_huggingface(CONFIG)) == GPT2Config(
        **{**CONFIG.__dict__, "make_vocab_size_divisible_by": 128}
    )
    small = config_from_huggingface({"model_type": "gpt2"})
    assert (small.num_parameters(), small.vocab_size) == (124_439_808, 50257)


def test_a_dropout_of_embeddings_alone_is_told(caplog):
    for dropouts in ({}, {"embd_pdrop": 0.2, "resid_pdrop": 0.2}):
        config_from_huggingface(dropouts)
    assert not caplog.messages
    assert config_from_huggingface({"embd_pdrop": 0.0}).hidden_dropout == 0.1
    assert "embd_pdrop=0.0 and resid_pdrop=0.1: --hidden-dropout, 0.1, is" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"), [("model_type", "llama"), ("activation_function", "relu"), ("tie_word_embeddings", False)]
)
def test_a_configuration_that_we_cannot_compute_is_refused(key, value):
    with pytest.raises(ValueError, match=key):
        config_from_huggingface({key: value})
