"""How weights begin, and how drawing them is left out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megazero.model import init
from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from megazero.model.init import NoDraws


@pytest.mark.parametrize(
    "initializer", [nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_, nn.init.kaiming_uniform_]
)
def test_no_draws_leaves_initializers_of_other_models_alone(initializer):
    """They may fill a buffer that no checkpoint has, or advance the generator for one."""
    state, (drawn, undrawn) = torch.get_rng_state(), torch.full((2, 3, 5), torch.nan)
    initializer(drawn)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    with NoDraws():
        assert initializer(undrawn) is undrawn
    assert drawn.all() and torch.equal(drawn, undrawn) and torch.equal(torch.get_rng_state(), after)


@pytest.fixture
def pieces_of_1000(monkeypatch) -> None:
    monkeypatch.setattr(init, "PIECE_NUMEL", 1000)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_large_weight_has_the_same_values_by_any_number_of_threads(pieces_of_1000, threads):
    before, values = torch.get_num_threads(), []
    for number in (2, threads):
        torch.set_num_threads(number)
        torch.manual_seed(5)
        values.append(torch.empty(70, 100))
        init.draw_normal_(values[-1], std=0.1)
        generator = torch.get_rng_state()
    torch.set_num_threads(before)
    assert torch.equal(*values)
    assert abs(values[0].std() - 0.1) < 0.005 and abs(values[0].mean()) < 0.005
    assert values[0].unique().numel() > 6990, "each piece has values of its own"
    torch.manual_seed(5)
    assert not torch.equal(generator, torch.get_rng_state()), "the next weight has others"


def test_a_small_weight_has_the_values_of_torchs_initializer(pieces_of_1000):
    for fill in (
        lambda weight: init.draw_normal_(weight, std=0.1),
        lambda weight: torch.nn.init.normal_(weight, std=0.1),
    ):
        torch.manual_seed(5)
        fill(weight := torch.empty(10, 100))
        assert weight[3, 7] == torch.empty(10, 100).normal_(0, 0.1, generator=torch.Generator().manual_seed(5))[3, 7]


@pytest.mark.parametrize(
    "device",
    [
        "meta",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_a_large_weight_on_a_device_is_drawn_by_the_generator_of_that_device(pieces_of_1000, device):
    state = torch.get_rng_state()
    init.draw_normal_(torch.empty(70, 100, device=device), std=0.1)
    assert torch.equal(torch.get_rng_state(), state), "the CPU's is left alone"


def test_no_draws_writes_zeros_into_a_large_weight(pieces_of_1000):
    with NoDraws():
        init.draw_normal_(weight := torch.ones(70, 100), std=0.1)
    assert not weight.any()


def test_a_model_without_draws_has_zeros_for_matrices_and_the_other_initial_values(one_rank):
    config = GPT2Config(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=11, max_position_embeddings=4)
    drawn = GPT2Model(config).state_dict()
    with NoDraws():
        undrawn = GPT2Model(config).state_dict()
    assert undrawn.keys() == drawn.keys()
    for name, value in undrawn.items():
        assert torch.equal(value, torch.zeros_like(value) if value.ndim > 1 else drawn[name]), name
