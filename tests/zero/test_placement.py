"""Placement by plan: the numbers are those of in-memory training, the plan is followed, and the budget is kept."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch

from megazero import comm, mpu
from megazero.zero.bucket import MASTER
from megazero.zero.config import ZeroConfig
from megazero.zero.gemini import LOST_BETWEEN_TENSORS, CudaMeter, Gemini
from megazero.zero.gemini_plan import plan_placement
from megazero.zero.placement import placed
from megazero.zero.residency import LIMIT_KEYS, GatherLimits
from megazero.zero.units import ROOT
from tests.ranks import run_ranks
from tests.zero.models import Wide, compare, make_engine, token_batches, train
from tests.zero.test_residency import Recomputed


class FakeDevice:
    """A device of `total` bytes on which the engine's gathered units and `activations` lie."""

    def __init__(self, total: int, activations: int = 0) -> None:
        self.total, self.activations = total, activations
        self.model_bytes = lambda: 0

    def used_bytes(self) -> int:
        return self.activations + self.model_bytes()

    def free_bytes(self) -> int:
        return self.total - self.used_bytes()


class Reordered(Wide):
    """Runs its blocks backwards on request."""

    is_reversed = False

    def forward(self, ids):
        x = self.embedding(ids)
        for block in reversed(self.blocks) if self.is_reversed else self.blocks:
            x = x + block(x)
        return (x @ self.embedding.weight.t()).square().mean()


class Backwards(Reordered):
    is_reversed = True


def placed_engine(blocks: float, model=Wide, dtype=None, micro=1, **zero):
    """An engine on a device that has room for so many blocks."""
    torch.manual_seed(0)
    device = FakeDevice(0)
    options = {"placement_meter": device, "dtype": dtype, "gradient_accumulation_steps": micro}
    engine = make_engine(model(), 3, zero={"placement": "auto", **zero}, **options)
    # What the engine holds there, and would be out of memory with.
    device.model_bytes, device.total = engine.placement.model_bytes, int(blocks * block_bytes(engine))
    return engine


def block_bytes(engine) -> int:
    return engine.schedule.residency.sizes[0] * engine.buckets[0].weights.flat.element_size()


def watched(engine, batches) -> tuple[dict, list[int], int]:
    """The trace, the gathers of units in each step, and the most bytes of units that were gathered."""
    gathers, most = [], [0]
    units = [bucket for bucket in engine.buckets if bucket.unit != ROOT]
    for bucket in units:

        def gather(bucket=bucket, original=bucket.weights.gather):
            is_new = not bucket.weights.is_allocated
            original()
            gathers[-1] += is_new
            most[0] = max(most[0], sum(b.weights.flat.nbytes for b in units if b.weights.is_allocated))

        bucket.weights.gather = gather
    trace = {}
    for index in range(len(batches)):
        gathers.append(-4)  # the state dictionary at the end of `train` gathers each unit once
        most[0] = 0 if index == 1 else most[0]
        trace.update({f"{index} {key}": value for key, value in train(engine, batches[index : index + 1])})
    return trace, gathers, most[0]


def placement_case(
    blocks: int, ratio: float, dtype: torch.dtype | None = None, model: type[Wide] = Wide, micro: int = 1
) -> tuple:
    mpu.initialize_model_parallel(1)
    batches = token_batches(4, micro, mpu.get_data_parallel_world_size())
    engine = placed_engine(blocks, model, dtype, micro, gpu_margin_mem_ratio=ratio)
    got, gathers, most = watched(engine, batches)
    torch.manual_seed(0)
    want, _, _ = watched(make_engine(model(), 3, dtype=dtype, gradient_accumulation_steps=micro), batches)
    compare(got, want, f"budget of {blocks} blocks", bitwise=True)
    plan = engine.placement.gemini.plan
    assert plan.peak_bytes <= plan.budget == blocks * block_bytes(engine)
    offloaded = {bucket.unit for bucket in engine.buckets if bucket.is_offloaded}
    on_device = [unit for unit in (*range(4), ROOT) if unit not in offloaded]
    assert on_device == list(plan.optimizer_units)
    for bucket in engine.buckets:
        assert bucket.gradient.home is bucket.optimizer_home and bucket.weights.is_offloaded == bucket.is_offloaded
        assert bucket.is_offloaded or bucket.weights.shard is bucket.states[MASTER], "is the shard where O is"
    return gathers, most / block_bytes(engine), on_device


@pytest.mark.parametrize("model", [Wide, Recomputed])
@pytest.mark.parametrize("world_size", [1, 2])
def test_more_memory_means_fewer_gathers_and_never_other_numbers(world_size, model):
    # Each step runs 4 units forward and backward; those that are there when forward ends need no second gather.
    for blocks in (2, 3, 9):
        for gathers, most, _ in run_ranks(world_size, placement_case, blocks, 0.0, None, model):
            assert gathers == [7, *[8 - min(blocks, 4)] * 3], blocks
            assert most <= blocks


@pytest.mark.parametrize("model", [Wide, Backwards])
def test_what_stays_for_the_next_micro_batch_is_what_runs_first_and_within_the_budget(model):
    for blocks in (2, 3, 9):
        for gathers, most, _ in run_ranks(2, placement_case, blocks, 0.0, None, model, 3):
            assert gathers[1:] == [3 * (8 - min(blocks, 4)) - 2] * 3, blocks  # between three micro-batches one stays
            assert most <= blocks


def test_optimizer_states_of_the_first_units_take_the_margin():
    # Beside two gathered blocks, 3 blocks of bytes each; and one for the gradients, from its backward on or all the time.
    for micro, units in ((1, [0, 1, 2]), (2, [0, 1])):
        for _, _, on_device in run_ranks(1, placement_case, 2 + 11, 1.0, None, Wide, micro):
            assert on_device == units


def more_micro_batches_case(blocks: float, whole_numel: int) -> list[list[int]]:
    mpu.initialize_model_parallel(1)
    engine = placed_engine(blocks, gpu_margin_mem_ratio=1.0, param_persistence_threshold=whole_numel)
    torch.manual_seed(0)
    other, placed = make_engine(Wide(), 3), []

    def step(micro: int) -> None:
        batches = token_batches(1, micro, mpu.get_data_parallel_world_size())
        got, want = (dict(train(one, batches)) for one in (engine, other))
        compare(got, want, f"{micro} micro-batches", bitwise=True)
        placed.append([bucket.unit for bucket in engine.buckets if not bucket.is_offloaded])

    step(1)
    for one in (engine, other):  # as with --rampup-batch-size
        one.set_gradient_accumulation_steps(2)
    placed.append([bucket.unit for bucket in engine.buckets if not bucket.is_offloaded])
    step(2)
    for one in (engine, other):
        one.set_gradient_accumulation_steps(1)
    step(1)
    return placed


@pytest.mark.parametrize(("blocks", "whole_numel"), [(2 + 11, 0), (2 + 11.5, 200)])  # 200: no rank shards a bias
def test_states_make_room_for_the_sums_of_more_micro_batches_before_they_come(blocks, whole_numel):
    for found in run_ranks(1, more_micro_batches_case, blocks, whole_numel):
        assert [sorted({*units}) for units in found] == [[0, 1, 2], [0, 1], [0, 1], [0, 1]]


@pytest.mark.parametrize(("dtype", "blocks"), [(None, 2 + 4 * 4 + 4), (torch.bfloat16, 2 + 4 * 8 + 4)], ids=str)
def test_where_all_optimizer_states_fit_nothing_rests_on_the_host(dtype, blocks):
    for gathers, most, on_device in run_ranks(2, placement_case, blocks, 1.0, dtype):
        # Of two ranks each has half of the states, and there is room for all of them, the root's included.
        assert on_device == [0, 1, 2, 3, ROOT] and gathers == [7] * 4 and most <= 2, "as without a plan"


class PartlyFrozen(Wide):
    """The first two blocks are not trained."""

    def __init__(self):
        super().__init__()
        self.blocks[:2].requires_grad_(False)


def frozen_case(blocks: float) -> tuple[list[int], list[int], list[int]]:
    mpu.initialize_model_parallel(1)
    batches = token_batches(4, 1, mpu.get_data_parallel_world_size())
    engine = placed_engine(blocks, PartlyFrozen, torch.bfloat16, gpu_margin_mem_ratio=1.0)
    torch.manual_seed(0)
    want = dict(train(make_engine(PartlyFrozen(), 3, dtype=torch.bfloat16), batches))
    compare(dict(train(engine, batches)), want, f"budget of {blocks} blocks", bitwise=True)
    plan = engine.placement.gemini.plan
    assert plan.peak_bytes <= plan.budget
    here = [bucket.unit for bucket in engine.buckets if not bucket.is_trainable and not bucket.weights.is_offloaded]
    return sorted(here), list(plan.shard_units), list(plan.optimizer_units)


def test_shards_of_frozen_parameters_follow_where_all_optimizer_states_fit():
    # Beside two gathered blocks of 2 bytes per element: on each of two ranks half of two trained blocks' 16 bytes, and of the
    # embedding's; and half of two frozen blocks' 2 bytes.
    for blocks, shards in ((2 + 2 * 4 + 0.5, []), (2 + 2 * 4 + 2, [0, 1])):
        for here, planned, optimizers in run_ranks(2, frozen_case, blocks):
            assert here == shards and set(planned) >= {*shards} and len(optimizers) == 5


def shrinking_case() -> list[list[int]]:
    mpu.initialize_model_parallel(1)
    batches = token_batches(5, 1, 2)
    engine = placed_engine(40, model=Reordered, gpu_margin_mem_ratio=1.0, sub_group_size=4096)
    torch.manual_seed(0)
    other, placed = make_engine(Reordered(), 3), []
    tiles = [len(bucket.tiles) for bucket in engine.buckets]
    for index in range(5):
        for one in (engine, other):
            one.module.is_reversed = index >= 2
        if index == 2:  # the plan is left, and other processes have taken memory when the next step is traced
            engine.placement.gemini._meter.total = 4 * block_bytes(engine) + engine.placement.model_bytes() // 2
        got, want = (dict(train(one, batches[index : index + 1])) for one in (engine, other))
        compare(got, want, f"step {index}", bitwise=True)
        here = [not bucket.is_offloaded for bucket in engine.buckets]
        placed.append(sum(here))
        plan = engine.placement.gemini.plan
        assert plan.peak_bytes <= plan.budget
        assert [len(b.tiles) for b in engine.buckets] == [1 if h else t for h, t in zip(here, tiles, strict=True)]
    return placed


def test_states_go_home_in_tiles_again_where_a_later_plan_has_less_memory():
    for first, second, third, fourth, last in run_ranks(2, shrinking_case):
        assert first == second == third == 5, "four blocks and the root"
        assert 0 < fourth == last < 5


class Scripted:
    """A meter that says what it is told to: the most since the last question, and what is in use now."""

    def __init__(self, total: int, peaks: list[int], now: int) -> None:
        self.total, self.peaks, self.now = total, peaks, now

    def used_bytes(self) -> int:
        return self.peaks.pop(0) if self.peaks else self.now

    def free_bytes(self) -> int:
        return self.total - self.now


def test_a_peak_in_the_last_moment_does_not_make_the_device_larger(one_rank):
    meter = Scripted(100, [0, 5, 60], now=5)
    settings = {"group": comm.world(), "model_bytes": lambda: 0, "accumulates": lambda: False}
    gemini = Gemini([1, 1], GatherLimits(), nbytes={0: 10, 1: 10}, meter=meter, make_plan=plan_placement, **settings)
    for unit in (0, 1):
        gemini.ahead(unit, 1, 0)
    gemini.finish()
    assert gemini.plan.budget == 100
    assert [moment.non_model for moment in gemini.plan.moments] == [5, 60]


def test_the_cuda_meter_counts_within_the_fraction_that_this_process_may_use(monkeypatch):
    statistics, fraction = {"allocated_bytes.all.peak": 30, "inactive_split_bytes.all.current": 3}, [1.0]
    cuda = {
        "memory_stats": lambda device: statistics,
        "reset_peak_memory_stats": lambda device: None,
        "mem_get_info": lambda device: (50, 100),  # free, in all: another process has 10
        "memory_reserved": lambda device: 40,
        "memory_allocated": lambda device: 30,
        "get_per_process_memory_fraction": lambda device: fraction[0],
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    meter = CudaMeter(torch.device("cuda", 0))
    for fraction[0], in_all in ((1.0, 90), (0.6, 60), (0.1, 40)):
        in_tensors = int(in_all * (1 - LOST_BETWEEN_TENSORS))
        assert meter.used_bytes() == 33 and meter.used_bytes() + meter.free_bytes() == in_tensors


def deviation_case() -> list[bool]:
    mpu.initialize_model_parallel(1)
    batches = token_batches(6, 1, 2)
    engine = placed_engine(3, model=Reordered)
    torch.manual_seed(0)
    other = make_engine(Reordered(), 3)
    follows = []
    for index in range(6):
        for one in (engine, other):
            one.module.is_reversed = index in (2, 3, 4)
        got, want = (dict(train(one, batches[index : index + 1])) for one in (engine, other))
        compare(got, want, f"step {index}", bitwise=True)
        follows.append(engine.schedule.residency.follows_plan)
        engine.eval()
        with torch.no_grad():
            engine(batches[0, 0, 0])  # an evaluation in between is no part of any iteration
        engine.train()
    return follows


def test_another_order_of_units_is_run_on_demand_and_traced_anew():
    for follows in run_ranks(2, deviation_case):
        # Traced, planned, left (2), traced in the new order (3), followed (4), left again (5).
        assert follows == [True, True, False, True, True, False]


def explicit_reduction_case() -> list[bool]:
    mpu.initialize_model_parallel(1)
    engine, follows = placed_engine(3), []
    for ids in token_batches(3, 1, 2)[:, 0, torch.distributed.get_rank()]:
        engine.backward(engine(ids))
        engine.allreduce_gradients()  # as a loop for DeepSpeed may call it itself
        follows.append(engine.schedule.residency.follows_plan)
        engine.step()
    return follows


def test_a_reduction_that_has_nothing_to_do_ends_no_iteration():
    assert run_ranks(2, explicit_reduction_case) == [[True] * 3] * 2


def too_small_case() -> None:
    mpu.initialize_model_parallel(1)
    engine = placed_engine(0.5)
    with pytest.raises(ValueError, match="Gemini's budget of .* is too small"):
        dict(train(engine, token_batches(1, 1, 1)))


def test_a_device_that_holds_no_unit_is_refused():
    run_ranks(1, too_small_case)


def dropped_case() -> None:
    mpu.initialize_model_parallel(1)
    for _ in range(2):  # the first step of a process leaves things of torch's own to the collector
        engine = make_engine(Wide(), 3, zero={"placement": "auto"}, placement_meter=FakeDevice(10**9))
        dict(train(engine, token_batches(1, 1, 1)))
        kept = [ref(bucket) for bucket in engine.buckets]
        gc.collect()
        gc.disable()
        engine.destroy()
        del engine
    assert [bucket() for bucket in kept] == [None] * len(kept)


def test_the_buckets_of_an_engine_that_was_destroyed_go_with_it():
    run_ranks(1, dropped_case)


def no_accelerator_case() -> None:
    mpu.initialize_model_parallel(1)
    engine = make_engine(Wide(), 3, zero={"placement": "auto"})
    assert engine.placement is None
    dict(train(engine, token_batches(1, 1, 1)))


def test_without_an_accelerator_there_is_nothing_to_place():
    run_ranks(1, no_accelerator_case)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"placement": "auto", "gather_limits": GatherLimits(0, 1, 1)}, [*LIMIT_KEYS.values()]),
        ({"placement": "auto", "gather_limits": GatherLimits(live=10**9)}, ["stage3_max_live_parameters"]),
        ({"placement": "auto"}, []),
        ({"gather_limits": GatherLimits(0, 1, 1)}, []),
    ],
    ids=str,
)
def test_limits_that_a_plan_does_not_look_at_are_named(options, named, caplog):
    placed(ZeroConfig(stage=3, **options), FakeDevice(0))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(named) and all(f"no effect: {', '.join(named)}. Drop them" in line for line in said)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 2, "placement": "auto"}, "--placement auto needs --zero-stage 3"),
        ({"stage": 3, "placement": "auto", "offload_param": "nvme", "nvme_path": "x"}, "drop --offload-... nvme"),
        ({"stage": 3, "placement": "auto", "gpu_margin_mem_ratio": 2.0}, "--gpu-margin-mem-ratio must lie in"),
        (
            {"stage": 3, "offload_optimizer": "cpu", "offload_optimizer_ratio": 0.5, "placement": "auto"},
            "or --placement auto decides it",
        ),
        ({"stage": 3, "placement": "gpu"}, "--placement must be one of static, auto"),
    ],
)
def test_placements_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ZeroConfig(**options)


def test_what_comes_to_stay_on_a_device_finds_torchs_cache_empty(one_rank, monkeypatch):
    """The first moments, and the states that a plan brings: a block of activations that they cut up is lost to activations."""
    engine, found = placed_engine(40, dtype=torch.bfloat16), []

    def empty_cache() -> None:
        moments = sum("exp_avg" in bucket.states for bucket in engine.buckets)
        found.append((moments, sum(not bucket.is_offloaded for bucket in engine.buckets)))

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    dict(train(engine, token_batches(3, 1, 1)))
    assert not any(bucket.is_offloaded for bucket in engine.buckets)
    assert found == [(0, 0), (len(engine.buckets), 0)]


def test_torchs_cache_is_emptied_once_for_an_optimizer_without_states_too(one_rank, monkeypatch):
    """To give memory back and to take it anew stops the device, which no step but the first one has a reason for."""
    engine, calls = make_engine(Wide(), 1, optimizer="sgd, no momentum"), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(engine.global_steps))
    dict(train(engine, token_batches(3, 1, 1)))
    assert calls == [0] and not engine.optimizer.state
