"""How weights begin, and how drawing them is left out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from megazero.model.init import NoDraws


@pytest.mark.parametrize("init", [nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_, nn.init.kaiming_uniform_])
def test_no_draws_writes_zeros_whatever_initializer_is_called(init):
    weight = nn.Parameter(torch.full((3, 5), torch.nan))
    state = torch.get_rng_state()
    with NoDraws():
        assert init(weight) is weight
    assert not weight.any() and torch.equal(torch.get_rng_state(), state)
    assert init(weight).all(), "outside of the context, it draws"


def test_a_model_without_draws_has_zeros_for_matrices_and_the_other_initial_values(one_rank):
    config = GPT2Config(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=11, max_position_embeddings=4)
    drawn = GPT2Model(config).state_dict()
    with NoDraws():
        undrawn = GPT2Model(config).state_dict()
    assert undrawn.keys() == drawn.keys()
    for name, value in undrawn.items():
        assert torch.equal(value, torch.zeros_like(value) if value.ndim > 1 else drawn[name]), name
