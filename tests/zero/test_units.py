"""find_units: which modules are gathered and released together."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations

from megazero.zero.config import ZeroConfig
from megazero.zero.units import find_units, plan_buckets
from tests.zero.models import make_engine


def names_of_units(model: nn.Module) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in find_units(model)]


def entries(*items: nn.Module) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(items)
    return model


def test_lists_and_dicts_inside_of_a_list_are_looked_into():
    pair = lambda: nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])  # noqa: E731
    assert names_of_units(entries(pair(), pair())) == [f"layers.{i}.{j}" for i in range(2) for j in range(2)]
    named = nn.ModuleDict({"attn": nn.Linear(2, 2), "deep": nn.ModuleList([pair(), nn.Tanh()])})
    assert names_of_units(entries(named, nn.Linear(2, 2))) == [
        *("layers.0.attn", "layers.0.deep.0.0", "layers.0.deep.0.1", "layers.1"),
    ]
    one = nn.Linear(2, 2)
    assert names_of_units(entries(one, one, nn.ModuleList([one]))) == ["layers.0"]


def test_a_list_with_a_forward_of_its_own_is_a_unit():
    class Called(nn.ModuleList):
        def forward(self, x):
            return x

    assert names_of_units(entries(Called([nn.Linear(2, 2)]), nn.Linear(2, 2))) == ["layers.0", "layers.1"]


def test_parametrized_modules_stay_whole():
    normed = lambda n=2: parametrizations.weight_norm(nn.Linear(n, n))  # noqa: E731
    layers = nn.Sequential(*[normed() for _ in range(3)])
    assert names_of_units(layers) == ["0", "1", "2"]
    assert sorted(plan.name for plan in plan_buckets(layers, find_units(layers), 2, {}, [], ZeroConfig())) == [
        "0",
        "1",
        "2",
    ]
    assert names_of_units(nn.Sequential(nn.Sequential(normed()), entries(normed()))) == ["0", "1.layers.0"]
    model = nn.Module()
    with torch.device("meta"):
        model.small, model.large = normed(), normed(2049)
    assert names_of_units(model) == ["large"]
    assert names_of_units(normed()) == []


class Pairs(nn.Module):
    """Layers that are lists, of which the model calls the entries."""

    def __init__(self) -> None:
        super().__init__()
        normed = [parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(2)]
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), layer]) for layer in normed)
        self.heads = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 4)})])

    def forward(self, x):
        for first, second in self.layers:
            x = x + second(first(x))
        return self.heads[0]["a"](x).square().mean()


def test_a_model_of_lists_of_lists_trains_at_stage_3(one_rank):
    losses = []
    for stage in (0, 3):
        torch.manual_seed(0)
        engine = make_engine(Pairs(), stage)
        for _ in range(3):
            loss = engine(torch.ones(2, 4))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
    assert losses[:3] == losses[3:] and losses[2] < losses[0]
