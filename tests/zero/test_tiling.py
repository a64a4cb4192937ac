"""Tiled linear layers: equal to whole ones in values, outputs and gradients; under stage 3 one tile is whole at a time."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import set_checkpoint_early_stop

from megazero import comm, mpu, zero
from megazero.engine import Engine
from megazero.zero import TiledLinear, TiledLinearReturnBias, ZeroConfig
from tests.model.test_sequence_parallel import Counter
from tests.ranks import run_ranks
from tests.zero.models import STEPS, Toy, compare, make_engine, my_batch, one_step, run
from tests.zero.test_memory import check_peak, sampled
from tests.zero.test_units import names_of_units

SPLITS = [(1, 1), (2, 1), (1, 3), (3, 2), (5, 7), (7, 11)]  # of 7 inputs and 11 outputs
where = {"dtype": torch.float64}


def tiles_of(layer: TiledLinear) -> list[list[nn.Module]]:
    return [list(row) for row in layer.linears]


def joined(tiles: list[list[Tensor]]) -> Tensor:
    return torch.cat([torch.cat(row, dim=1) for row in tiles])


def whole(layer: TiledLinear, name: str = "weight", of_grad: bool = False) -> Tensor:
    """The full weight or bias (or its gradient) of tiles that are not cut over ranks."""
    value = lambda tile: getattr(tile, name).grad if of_grad else getattr(tile, name).detach()  # noqa: E731
    if name == "bias":
        return torch.cat([value(row[-1]) for row in tiles_of(layer)])
    return joined([[value(tile) for tile in row] for row in tiles_of(layer)])


# ---- one process


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_splits, out_splits", SPLITS)
def test_outputs_and_gradients_equal_a_linear_layers(in_splits, out_splits, bias):
    linear = nn.Linear(7, 11, bias=bias, **where)
    tiled = TiledLinear(7, 11, bias, in_splits, out_splits, init_linear=linear, **where)
    x = torch.randn(2, 3, 7, requires_grad=True, **where)
    ours = x.detach().clone().requires_grad_()
    want, got = linear(x), tiled(ours)
    assert_close(got, want)
    upstream = torch.randn_like(want)
    want.backward(upstream)
    got.backward(upstream)
    assert_close(ours.grad, x.grad)
    assert_close(whole(tiled, of_grad=True), linear.weight.grad)
    if bias:
        assert_close(whole(tiled, "bias", of_grad=True), linear.bias.grad)
    has_bias = [[tile.bias is not None for tile in row] for row in tiles_of(tiled)]
    assert has_bias == [[False] * (in_splits - 1) + [bias]] * out_splits


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_splits, out_splits", SPLITS)
def test_initial_values_and_the_generator_are_those_of_the_whole_layer(in_splits, out_splits, bias):
    torch.manual_seed(3)
    linear, after = nn.Linear(7, 11, bias=bias), torch.rand(1)
    torch.manual_seed(3)
    tiled = TiledLinear(7, 11, bias, in_splits, out_splits)
    assert torch.equal(whole(tiled), linear.weight) and torch.equal(torch.rand(1), after)
    assert not bias or torch.equal(whole(tiled, "bias"), linear.bias)


def test_tiles_differ_by_one_at_most_and_have_stable_names():
    tiled = TiledLinear(7, 11, in_splits=3, out_splits=2)
    assert tiled.in_parts == [0, 3, 5, 7] and tiled.out_parts == [0, 6, 11]
    shapes = {name: tuple(value.shape) for name, value in tiled.state_dict().items()}
    tiles = {f"linears.{o}.{i}.weight": (h, w) for (o, h), (i, w) in product(enumerate((6, 5)), enumerate((3, 2, 2)))}
    assert shapes == {**tiles, "linears.0.2.bias": (6,), "linears.1.2.bias": (5,)}


def test_pieces_go_in_and_come_out():
    tiled = TiledLinear(7, 11, in_splits=2, out_splits=3, **where)
    x = torch.randn(4, 7, **where)
    want = tiled(x)
    tiled.input_is_already_split = True
    assert torch.equal(tiled([x[:, :4], x[:, 4:]]), want)
    tiled.combine_out_splits = False
    pieces = tiled((x[:, :4], x[:, 4:]))
    assert [piece.shape for piece in pieces] == [(4, 4), (4, 4), (4, 3)] and torch.equal(torch.cat(pieces, 1), want)
    for wrong in ([x], x):
        for kind in (ValueError, AssertionError):
            with pytest.raises(kind, match="in_splits=2"):
                tiled(wrong)


def test_what_does_not_fit_is_refused():
    for splits in ({"in_splits": 0}, {"out_splits": -1}, {"in_splits": 8}, {"out_splits": 12}):
        with pytest.raises(RuntimeError, match=f"{next(iter(splits))}={next(iter(splits.values()))}"):
            TiledLinear(7, 11, **splits)
    tiled = TiledLinear(7, 11, in_splits=2, out_splits=2)
    for width in (6, 14, 0, 2):
        with pytest.raises(ValueError, match=f"last dimension is {width}, in_features is 7"):
            tiled(torch.randn(2, width))
    with pytest.raises(ValueError, match="takes one tensor"):
        tiled([torch.randn(2, 4), torch.randn(2, 3)])
    for linear in (nn.Linear(7, 12), nn.Linear(8, 11), nn.Linear(7, 11, bias=False)):
        with pytest.raises(ValueError, match="Both must agree"):
            tiled.copy_params_from(linear)
        with pytest.raises(ValueError, match="Both must agree"):
            TiledLinear(7, 11, init_linear=linear)


def test_copy_params_from_takes_values_and_not_memory():
    linear, tiled = nn.Linear(7, 11), TiledLinear(7, 11, in_splits=3, out_splits=2)
    tiled.copy_params_from(linear)
    assert torch.equal(whole(tiled), linear.weight) and torch.equal(whole(tiled, "bias"), linear.bias)
    nn.init.zeros_(linear.weight)
    assert whole(tiled).any() and all(p.requires_grad and p.grad_fn is None for p in tiled.parameters())
    assert torch.equal(whole(copy.deepcopy(tiled)), whole(tiled))


class Returning(nn.Linear):
    """A layer that leaves its bias to the caller, as Megatron's do."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        return F.linear(x, self.weight), self.bias


def test_the_state_of_a_whole_layer_is_loaded_and_that_of_tiles():
    whole, tiled = nn.Sequential(nn.Linear(5, 7)), nn.Sequential(TiledLinear(5, 7, in_splits=2, out_splits=3))
    given = whole.state_dict()
    tiled.load_state_dict(given)
    assert list(given) == ["0.weight", "0.bias"], "the caller's stays as it is"
    x = torch.randn(3, 5)
    assert_close(tiled(x), whole(x))
    tiled.load_state_dict(tiled.state_dict())
    assert_close(tiled(x), whole(x))
    for features in ((5, 6), (5, 8), (6, 7)):
        with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight: .* the whole layer's has \(7, 5\)"):
            tiled.load_state_dict(nn.Sequential(nn.Linear(*features)).state_dict(), strict=False)
    with pytest.raises(RuntimeError, match=r"Missing key.*0.linears.0.1.bias"):
        tiled.load_state_dict({"0.weight": whole[0].weight})
    with pytest.raises(RuntimeError, match=r"Missing key.*0.linears.0.0.weight"):
        tiled.load_state_dict({**given, "0.weight": None})


def test_a_layer_that_returns_its_bias_returns_all_of_it_once():
    for bias in (True, False):
        linear = nn.Linear(7, 11, bias=bias, **where)
        make = partial(TiledLinearReturnBias, 7, 11, bias, 3, 2, linear_cls=Returning, init_linear=linear, **where)
        x = torch.randn(2, 7, **where)
        out, found = make()(x)
        assert_close(out, F.linear(x, linear.weight))
        assert torch.equal(found, linear.bias) if bias else found is None
        pairs = make(combine_out_splits=False)(x)
        assert [(y.shape, None if b is None else b.shape) for y, b in pairs] == [
            ((2, n), (n,) if bias else None) for n in (6, 5)
        ]
    out, found = TiledLinearReturnBias(7, 11, in_splits=2)(torch.ones(2, 7))  # tiles that add it themselves
    assert out.shape == (2, 11) and found is None
    with pytest.raises(TypeError, match="TiledLinearReturnBias"):
        TiledLinear(7, 11, linear_cls=Returning)(torch.ones(2, 7))


# ---- Megatron's layers


def mlp_case(in_splits: int, out_splits: int) -> list[list]:
    """A column- and a row-parallel layer, each tiled, against one process; returns what must not depend on the ranks."""
    mpu.initialize_model_parallel(torch.distributed.get_world_size())
    torch.manual_seed(5)
    w1, w2 = torch.empty(24, 7), torch.empty(7, 24)
    up = TiledLinearReturnBias(
        *(7, 24, True, in_splits, out_splits),
        linear_cls=mpu.ColumnParallelLinear,
        gather_output=False,
        skip_bias_add=True,
    )
    down = TiledLinearReturnBias(
        *(24, 7, True, out_splits, in_splits),
        linear_cls=mpu.RowParallelLinear,
        input_is_parallel=True,
        skip_bias_add=True,
    )
    after = torch.rand(1).item()
    torch.manual_seed(5)
    for weight, cls, sizes in ((w1, mpu.ColumnParallelLinear, (7, 24)), (w2, mpu.RowParallelLinear, (24, 7))):
        weight.copy_(cls(*sizes, keep_master_weight_for_test=True).master_weight)
    assert after == torch.rand(1).item()
    b1, b2 = torch.randn(24, requires_grad=True), torch.randn(7, requires_grad=True)
    full_up, full_down = mpu.ColumnParallelLinear(7, 24), mpu.RowParallelLinear(24, 7)
    rank, size = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
    with torch.no_grad():  # whole layers that are cut over the ranks are copied from, too
        full_up.weight.copy_(w1.chunk(size)[rank])
        full_up.bias.copy_(b1.chunk(size)[rank])
        full_down.weight.copy_(w2.chunk(size, 1)[rank])
        full_down.bias.copy_(b2)
    initial = [tile.weight.detach().clone() for layer in (up, down) for row in layer.linears for tile in row]
    up.copy_params_from(full_up)
    down.copy_params_from(full_down)
    values = [tile.weight.detach() for layer in (up, down) for row in layer.linears for tile in row]
    assert all(torch.equal(a, b) for a, b in zip(initial, values, strict=True)), "initial values differ"

    w1.requires_grad_()
    w2.requires_grad_()
    x = torch.randn(3, 2, 7, requires_grad=True)
    ours = x.detach().clone().requires_grad_()
    want = F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
    hidden, bias = up(ours)
    out, last = down(F.gelu(hidden + bias))
    got = out + last
    upstream = torch.randn_like(want)
    want.backward(upstream)
    got.backward(upstream)
    close = partial(assert_close, rtol=1e-5, atol=1e-5)  # sums in another order
    close(got, want)
    close(ours.grad, x.grad)
    cuts = {
        **{f"0.{k}": v for k, v in mpu.partitions(up).items()},
        **{f"1.{k}": v for k, v in mpu.partitions(down).items()},
    }
    for number, (layer, weight, bias) in enumerate(((up, w1, b1), (down, w2, b2))):
        weights, biases = [], []
        for o, row in enumerate(layer.linears):
            merged = []
            for i, tile in enumerate(row):
                shards = from_all_ranks(tile.weight.grad)
                merged.append(cuts[f"{number}.linears.{o}.{i}.weight"].merge(shards))
            weights.append(merged)
            cut = cuts.get(f"{number}.linears.{o}.{len(row) - 1}.bias")
            biases.append(cut.merge(from_all_ranks(row[-1].bias.grad)) if cut else row[-1].bias.grad)
        close(joined(weights), weight.grad)
        close(torch.cat(biases), bias.grad)
    return [got.tolist(), after]


def sequence_case() -> None:
    """Tiles of sequence-parallel layers equal tiles of the others on whole sequences."""
    groups = mpu.initialize_model_parallel(2)
    s, b, found = 6, 2, []
    whole = torch.randn(s, b, 7, generator=torch.Generator().manual_seed(1))
    upstream = torch.randn(s, b, 7, generator=torch.Generator().manual_seed(2))
    own = slice(3 * groups.model_parallel_rank, 3 * groups.model_parallel_rank + 3)
    for is_sliced, skips in product((False, True), (False, True)):
        torch.manual_seed(3)
        tiled = TiledLinearReturnBias if skips else TiledLinear
        where = {"sequence_parallel": is_sliced, "skip_bias_add": skips}
        up = tiled(7, 24, True, 2, 4, linear_cls=mpu.ColumnParallelLinear, gather_output=False, **where)
        down = tiled(24, 7, True, 4, 2, linear_cls=mpu.RowParallelLinear, input_is_parallel=True, **where)
        for p in [*up.parameters(), *down.parameters()]:  # biases start at zero
            p.data.add_(0.1)
        x = (whole[own] if is_sliced else whole).clone().requires_grad_()
        hidden = up(x)
        out = down(F.gelu(hidden[0] + hidden[1] if skips else hidden))
        if skips:
            (bias,) = mpu.copy_parameters_to_sequence_parallel_region([out[1]]) if is_sliced else (out[1],)
            out = out[0] + bias
        (out * (upstream[own] if is_sliced else upstream)).sum().backward()
        grad_x = x.grad if is_sliced else x.grad[own]
        found.append(
            [out if is_sliced else out[own], grad_x, *(p.grad for p in [*up.parameters(), *down.parameters()])]
        )
    for other in found[1:]:
        assert_close(other, found[0], rtol=1e-5, atol=1e-5)


def test_tiles_of_slices_of_the_sequence_equal_tiles_of_all_of_it():
    run_ranks(2, sequence_case)


def traffic_case() -> None:
    """However many tiles there are, an input enters once and an output leaves once."""
    groups = mpu.initialize_model_parallel(2)
    counter, n = Counter(groups.model), 6 * 2 * 8
    for is_sliced, splits in product((False, True), (1, 4)):
        where = {"sequence_parallel": is_sliced}
        up = TiledLinear(8, 24, True, splits, 4, linear_cls=mpu.ColumnParallelLinear, gather_output=False, **where)
        down = TiledLinear(24, 8, False, 4, splits, linear_cls=mpu.RowParallelLinear, input_is_parallel=True, **where)
        x = torch.randn(3 if is_sliced else 6, 2, 8, requires_grad=True)
        counter.read()
        out = down(up(x))
        forward = counter.read()
        out.sum().backward()
        backward = counter.read()
        sent = n if is_sliced else 0
        for moved, reduced in (forward, backward):
            assert moved == {"all_gather": sent, "reduce_scatter": sent}
            assert sum(reduced) == (0 if is_sliced else n) and len(reduced) == (0 if is_sliced else splits)


def test_what_tiles_send_does_not_depend_on_their_number():
    run_ranks(2, traffic_case)


def test_what_enters_and_leaves_under_autocast_travels_in_its_dtype(one_rank):
    layer, x = mpu.ColumnParallelLinear(4, 4, gather_output=False), torch.ones(2, 4)
    assert layer.enter(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.enter(x).dtype == torch.bfloat16 and layer.enter(x.double()).dtype == torch.float64
        assert layer.leave(layer.enter(x), layer.bias).dtype == torch.bfloat16


def from_all_ranks(shard: Tensor) -> list[Tensor]:
    return comm.all_gathered(shard, mpu.get_model_parallel_group())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("in_splits, out_splits", [(1, 1), (2, 4), (3, 6)])
def test_tiled_parallel_layers_equal_one_process(world_size, in_splits, out_splits):
    run_ranks(world_size, mlp_case, in_splits, out_splits)


def gathered_case() -> None:
    """With gathered outputs and whole inputs, each rank's are those of the whole layer; tiles need not match each other."""
    mpu.initialize_model_parallel(2)
    for cls, sizes, options in (
        (mpu.ColumnParallelLinear, (7, 16), {}),
        (mpu.ColumnParallelLinear, (7, 16), {"stride": 2}),
        (mpu.RowParallelLinear, (16, 7), {}),
    ):
        splits = (3, 2) if cls is mpu.ColumnParallelLinear else (2, 3)
        torch.manual_seed(1)
        linear = cls(*sizes, **options)
        torch.manual_seed(1)
        tiled = TiledLinear(*sizes, True, *splits, linear_cls=cls, **options)
        x = torch.randn(4, sizes[0])
        assert_close(tiled(x), linear(x))
        on_meta = TiledLinear(*sizes, True, *splits, linear_cls=cls, device="meta", **options)
        assert all(p.is_meta for p in on_meta.parameters())
        by_function = TiledLinear(*sizes, True, *splits, linear_cls=partial(cls, **options), init_linear=linear)
        assert_close(by_function(x), linear(x))


def test_tiled_parallel_layers_equal_whole_ones_where_nothing_stays_cut():
    run_ranks(2, gathered_case)


# ---- under ZeRO


class TiledBlock(nn.Module):
    """`tests.zero.models.Block`, tiled: one layer of each kind."""

    def __init__(self, h: int = 5) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(h), TiledLinear(h, 3 * h, in_splits=2, out_splits=4)
        self.down = TiledLinearReturnBias(3 * h, h, in_splits=4, out_splits=2, linear_cls=Returning)

    def forward(self, x: Tensor) -> Tensor:
        out, bias = self.down(F.gelu(self.up(self.norm(x))))
        return x + out + bias


def test_tiles_are_units_in_their_order_wherever_they_lie():
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.tiled, self.act = nn.Linear(2, 2), TiledLinear(4, 4, out_splits=2), nn.GELU()
            self.many = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    parts = ["first", "tiled.linears.0.0", "tiled.linears.1.0", "many.0", "many.1"]
    assert names_of_units(nn.ModuleList([Inner(), nn.Linear(2, 2)])) == [*(f"0.{part}" for part in parts), "1"]
    assert names_of_units(nn.Sequential(nn.Tanh(), Inner())) == [f"1.{part}" for part in parts]
    assert names_of_units(Inner()) == ["tiled.linears.0.0", "tiled.linears.1.0", "many.0", "many.1"]
    assert names_of_units(nn.ModuleList([TiledLinear(4, 4, in_splits=2)])) == ["0.linears.0.0", "0.linears.0.1"]
    pair = nn.ModuleList([TiledLinear(4, 4, out_splits=2, linear_cls=TiledLinear, in_splits=1)])
    assert names_of_units(pair) == ["0.linears.0.0.linears.0.0", "0.linears.1.0.linears.0.0"]


def parts_of(trace: dict[str, Tensor], name: str) -> Tensor:
    """A parameter of the whole layer from its tiles in a trace."""
    start, _, kind = name.rpartition(".")
    tiles = {key: value for key, value in trace.items() if key.startswith(f"{start}.linears.") and f".{kind}" in key}
    if not tiles:
        return trace[name]
    rows: dict[str, list[Tensor]] = {}
    for key, value in tiles.items():
        rows.setdefault(key[len(f"{start}.linears.") :].split(".")[0], []).append(value)
    return torch.cat([torch.cat(row, dim=-1) for row in rows.values()])


def stages_case() -> None:
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    dense = run(Toy, 0, steps=STEPS)
    want = run(lambda: Toy(block=TiledBlock), 0, steps=STEPS)
    for key in dense:
        if key.startswith(("loss", "norm", "weight")):
            assert_close(parts_of(want, key), dense[key], rtol=1e-4, atol=1e-5, msg=key)  # as sums in another order
    for stage in (1, 2, 3):
        for how in ("plain", "reentrant", "nonreentrant", "ours") if stage == 3 else ("plain",):
            with set_checkpoint_early_stop(False):  # else torch leaves out the end of what it recomputes
                got = run(lambda how=how: Toy(how, block=TiledBlock), stage, steps=STEPS)
            compare(got, want, f"stage {stage}, {how}", bitwise=True)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_tiled_model_trains_as_the_whole_one_in_every_stage(world_size):
    run_ranks(world_size, stages_case)


class TiledDeep(Toy):
    """Enough tiles, and large ones beside small blocks."""

    def __init__(self, run: str = "plain") -> None:
        super().__init__(run, block=TiledBlock)
        for block in self.blocks:
            block.up = TiledLinear(5, 64, in_splits=2, out_splits=5)
            block.down = TiledLinearReturnBias(64, 5, in_splits=5, linear_cls=Returning)
        self.positions = nn.Parameter(torch.zeros(400))


def whole_tiles(engine: Engine) -> int:
    """Bytes of tiles that are whole or on their way to it, counted from storages."""
    return sum(b.weights.flat.untyped_storage().nbytes() for b in engine.buckets if ".linears." in b.name)


def live_case(runs: tuple[str, ...]) -> None:
    n = mpu.initialize_model_parallel(1).data_parallel_size
    mpu.model_parallel_cuda_manual_seed(1)
    for how, overlap in product(runs, (False, True)):
        engine = make_engine(TiledDeep(how), 3, zero={"overlap_comm": overlap}, dtype=torch.bfloat16)
        sizes = sorted(2 * b.layout.numel for b in engine.buckets if ".linears." in b.name)
        assert len(sizes) == 3 * (10 + 5) and sum(sizes) > 20 * sizes[-1]
        at_once = sampled(engine, lambda engine=engine: one_step(engine, my_batch()), whole_tiles)
        # Without reentry the recomputation begins in the middle of a tile's backward, and that tile stays.
        expected = sum(sizes[-1 - overlap - (how == "nonreentrant") :])
        assert at_once == expected, f"{how}, overlap {overlap}, {n} ranks: {at_once} of {sum(sizes)}"
        with torch.no_grad():
            seen = sampled(engine, lambda engine=engine: engine(torch.arange(4)[None]), whole_tiles)
            assert seen == sum(sizes[-1 - overlap :])
        assert whole_tiles(engine) == 0
        engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_tile_is_whole_at_a_time_and_with_overlap_the_next_one_is_on_its_way(world_size):
    run_ranks(world_size, live_case, ("plain", "reentrant", "nonreentrant", "ours"))


def planned_case() -> None:
    mpu.initialize_model_parallel(1)
    for settings in ({}, {"overlap_comm": False}):
        check_peak(TiledDeep(), 3, settings)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_of_a_tiled_model_holds_what_was_planned(world_size):
    run_ranks(world_size, planned_case)


@pytest.mark.parametrize("how", ["plain", "reentrant", "nonreentrant", "ours"])
def test_tiles_on_a_drive_are_read_into_the_buffers_that_are_there_for_them(one_rank, tmp_path, how):
    options = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": str(tmp_path)}
    engine = make_engine(TiledDeep(how), 3, zero=options)
    one_step(engine, my_batch())
    assert engine.homes.param.nbytes <= engine.homes.param.buffer_nbytes * ZeroConfig().param_buffer_count


def test_frozen_tiles_are_released_one_by_one_too(one_rank):
    model = TiledDeep()
    for block in model.blocks:
        block.up.requires_grad_(False)
        block.down.requires_grad_(False)
    engine = make_engine(model, 3, zero={"overlap_comm": False})
    seen: list[int] = []
    for module in engine.module.blocks.modules():
        module.register_forward_hook(lambda *_: seen.append(whole_tiles(engine)))
        module.register_full_backward_hook(lambda *_: seen.append(whole_tiles(engine)))
    one_step(engine, my_batch())
    assert max(seen) == max(4 * b.layout.numel for b in engine.buckets if ".linears." in b.name)


def init_case() -> list[Tensor]:
    """Built sharded, tiled layers start with the same values; `copy_params_from` reads and writes what is sharded."""
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    plain = Toy(block=TiledBlock)
    torch.manual_seed(0)
    with zero.Init():
        model = Toy(block=TiledBlock)
    tile = model.blocks[0].up.linears[1][0]
    assert tile.weight.shape == (0,) and tuple(tile.weight.ds_shape) == (4, 3)
    with zero.GatheredParameters(model.parameters()):
        for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(got, want), name
    torch.manual_seed(7)
    with zero.Init():
        source = nn.Module()
        source.linear = nn.Linear(5, 15)
        whole_source = nn.Sequential(source)
    given = whole_source[0].linear
    assert given.weight.shape == (0,)
    engine = make_engine(model, 3)
    for layer in (engine.module.blocks[1].up, TiledLinear(5, 15, in_splits=2, out_splits=4, init_linear=given)):
        layer.copy_params_from(given)
        with zero.GatheredParameters([given.weight, given.bias, *layer.parameters()]):
            assert torch.equal(whole(layer), given.weight) and torch.equal(whole(layer, "bias"), given.bias)
    one_step(engine, my_batch())
    engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2])
def test_tiles_are_built_and_copied_to_while_sharded(world_size):
    run_ranks(world_size, init_case)
