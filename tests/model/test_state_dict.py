"""Cutting full state dicts and merging them again."""

import pytest
import torch

from megazero import mpu
from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from megazero.model.state_dict import merge_full, slice_full
from tests.model.plain_gpt2 import random_state
from tests.ranks import run_ranks

CONFIG = GPT2Config(
    num_layers=1,
    hidden_size=12,
    num_attention_heads=4,
    max_position_embeddings=5,
    vocab_size=37,
    make_vocab_size_divisible_by=3,
)


def round_trip_case():
    groups = mpu.initialize_model_parallel(torch.distributed.get_world_size())
    model, full = GPT2Model(CONFIG), random_state(CONFIG)
    mine = slice_full(full, model, groups.model_parallel_rank, groups.model_parallel_size)
    model.load_state_dict(mine, strict=True)
    merged = merge_full(dict(model.named_parameters()), mpu.partitions(model), groups.model)
    assert list(merged) == list(full)
    assert all(torch.equal(merged[name], full[name]) for name in full)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_slices_merge_to_the_full_state_dict_bitwise(world_size):
    run_ranks(world_size, round_trip_case)


def test_missing_and_unknown_names_are_listed(one_rank):
    full = random_state(CONFIG)
    full["h.0.ln_1.weight"] = full.pop("transformer.layers.0.input_layernorm.weight")
    with pytest.raises(ValueError) as error:
        slice_full(full, GPT2Model(CONFIG, device="meta"), 0, 1)
    assert "missing transformer.layers.0.input_layernorm.weight" in str(error.value)
    assert "unknown h.0.ln_1.weight" in str(error.value)


@pytest.mark.parametrize("name", ["word_embeddings.weight", "transformer.layers.0.mlp.dense_4h_to_h.weight"])
def test_a_wrong_shape_names_parameter_found_and_expected(one_rank, name):
    full = random_state(CONFIG)
    expected = list(full[name].shape)
    full[name] = full[name][:-1]
    with pytest.raises(ValueError) as error:
        slice_full(full, GPT2Model(CONFIG, device="meta"), 0, 1)
    assert f"parameter {name}" in str(error.value)
    assert str(list(full[name].shape)) in str(error.value) and str(expected) in str(error.value)
