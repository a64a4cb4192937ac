"""find_units: which modules are gathered and released together."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations

from megazero import zero
from megazero.zero.config import ZeroConfig
from megazero.zero.units import BucketPlan, find_units, plan_buckets, share_buckets
from tests.zero.models import Block, Toy, make_engine, one_step


def names_of_units(model: nn.Module) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in find_units(model)]


def entries(*items: nn.Module) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(items)
    return model


def test_units_are_found_in_lists_sequentials_and_large_leaves():
    model = nn.Module()
    with torch.device("meta"):
        model.encoder = nn.ModuleList([Block(), Block()])
        model.middle = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), Toy())
        model.large = nn.Linear(4096, 1025, bias=False)
        model.table = nn.Embedding(4096, 1025)
        model.tied = nn.Linear(4096, 1025, bias=False)
        model.again = nn.Linear(4096, 1025, bias=False)
        model.again.weight = model.tied.weight
    of_toy = [f"middle.2.blocks.{i}" for i in range(3)]
    assert names_of_units(model) == ["encoder.0", "encoder.1", "middle.0", *of_toy, "large"]


def test_lists_and_dicts_inside_of_a_list_are_looked_into():
    pair = lambda: nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])  # noqa: E731
    assert names_of_units(entries(pair(), pair())) == [f"layers.{i}.{j}" for i in range(2) for j in range(2)]
    named = nn.ModuleDict({"attn": nn.Linear(2, 2), "deep": nn.ModuleList([pair(), nn.Tanh()])})
    assert names_of_units(entries(named, nn.Linear(2, 2))) == [
        *("layers.0.attn", "layers.0.deep.0.0", "layers.0.deep.0.1", "layers.1"),
    ]
    one = nn.Linear(2, 2)
    assert names_of_units(entries(one, one, nn.ModuleList([one]))) == ["layers.0"]


def test_a_module_with_several_names_is_a_unit_once_and_none_inside_of_another():
    model, critic = nn.Module(), nn.Module()
    with torch.device("meta"):
        model.body = entries(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2049, 2049)))
    model.critic, critic.body = critic, model.body
    model.last = model.body.layers[1][0]
    assert names_of_units(model) == ["body.layers.0", "body.layers.1"]
    plans = plan_buckets(model, find_units(model), 2, {}, ZeroConfig())
    assert [plan.name for plan in plans] == ["body.layers.1", "body.layers.0"], "nothing is left to the root"


def test_a_list_with_a_forward_of_its_own_is_a_unit():
    class Called(nn.ModuleList):
        def forward(self, x):
            return x

    assert names_of_units(entries(Called([nn.Linear(2, 2)]), nn.Linear(2, 2))) == ["layers.0", "layers.1"]


def test_parametrized_modules_stay_whole():
    normed = lambda n=2: parametrizations.weight_norm(nn.Linear(n, n))  # noqa: E731
    layers = nn.Sequential(*[normed() for _ in range(3)])
    assert names_of_units(layers) == ["0", "1", "2"]
    assert sorted(plan.name for plan in plan_buckets(layers, find_units(layers), 2, {}, ZeroConfig())) == [
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


def test_a_large_layer_is_a_unit_also_of_a_model_that_was_built_sharded(one_rank):
    with zero.Init():
        model = nn.Module()
        model.small, model.large = nn.Linear(2, 2), nn.Linear(2049, 2049)
    assert model.large.weight.shape == (0,) and names_of_units(model) == ["large"]


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
            losses.append(one_step(engine, torch.ones(2, 4)).item())
        engine.destroy()
    assert losses[:3] == losses[3:] and losses[2] < losses[0]


class GraphLayer(nn.Module):
    """Hands a sparse matrix on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair):
        x, edges = pair
        return torch.sparse.mm(edges, self.linear(x)), edges


def test_units_may_return_sparse_tensors(one_rank):
    losses = []
    for stage in (0, 3):
        torch.manual_seed(0)
        engine = make_engine(nn.Sequential(GraphLayer(), GraphLayer()), stage)
        for _ in range(2):
            loss = engine((torch.ones(4, 4), torch.eye(4).to_sparse()))[0].square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
    assert losses[:2] == losses[2:]


def shared(layers: nn.Module, most_numel: int, matrices: tuple[str, ...] = ()) -> list[BucketPlan]:
    groups = dict.fromkeys((name for name, _ in layers.named_parameters()), 0)
    plans = plan_buckets(layers, find_units(layers), 1, groups, ZeroConfig(1), matrices=matrices)
    return share_buckets(plans, most_numel)


def names_of(plans: list[BucketPlan]) -> list[str]:
    return [plan.name for plan in plans]


def test_units_share_buckets_from_the_last_one_on_as_long_as_they_fit():
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))  # 64 elements each
    apart = ["4", "3", "2", "1", "0"]
    assert names_of(shared(layers, 0)) == names_of(shared(layers, 127)) == apart
    assert names_of(shared(layers, 128)) == ["3 to 4", "1 to 2", "0"]
    assert names_of(shared(layers, 319)) == ["1 to 4", "0"]
    (plan,) = shared(layers, 320)
    assert (plan.name, plan.unit, plan.num_units, plan.layout.numel) == ("0 to 4", 0, 5, 320)
    assert (
        list(plan.parameters) == [segment.name for segment in plan.layout.segments] == [f"{i}.weight" for i in range(5)]
    )


def test_a_unit_that_is_too_large_has_a_bucket_of_its_own_and_parts_the_others():
    layers = nn.Sequential(*(nn.Linear(n, 8, bias=False) for n in (8, 8, 80, 8, 8)))
    assert names_of(shared(layers, 200)) == ["3 to 4", "2", "0 to 1"]


def test_what_is_not_trained_and_the_root_share_nothing():
    model = entries(*(nn.Linear(8, 8) for _ in range(4)))
    model.root = nn.Linear(8, 8)
    for layer in model.layers[:2]:
        layer.weight.requires_grad_(False)
    names = names_of(shared(model, 10_000))
    assert sorted(names) == ["layers.0", "layers.0 to layers.3", "layers.1", "root"] and names[-1] == "root"


def test_what_muon_updates_is_apart_from_the_rest_of_the_same_units():
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    matrices, rest = shared(layers, 10_000, matrices=("0.weight", "1.weight", "2.weight"))[::-1]
    assert matrices.has_matrices != rest.has_matrices and matrices.name == rest.name == "0 to 2"
    assert {matrices.layout.param_numel, rest.layout.param_numel} == {192, 24}


def test_buckets_grow_with_the_ranks_where_gradients_are_whole_and_never_where_parameters_are_cut():
    most = {stage: [ZeroConfig(stage).shared_numel(n) for n in (1, 8, 64, 4096)] for stage in range(4)}
    assert most[0] == most[1] == [2**23, 2**23, 2**26, 2**27]
    assert most[2] == [2**23] * 4 and most[3] == [0] * 4
    assert [ZeroConfig(1, reduce_bucket_size=most).shared_numel(4096) for most in (1000, 0)] == [1000, 0]
