"""An offloaded update that goes on during the next forward: the same bits, each unit as soon as it is done, no torn weights."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megazero import mpu, zero
from megazero.engine import Engine
from megazero.utils import safe_get_full_fp32_param
from megazero.zero.config import ZeroConfig
from megazero.zero.homes import TILE_MULTIPLE
from megazero.zero.parameter import ArrivingParameter, ReleasedParameter
from megazero.zero.residency import GatherLimits
from megazero.zero.update import Update
from tests.ranks import run_ranks
from tests.zero.models import Wide, compare, make_engine, one_step, run, token_batches
from tests.zero.streams import slow_link

CASES = {  # stage and homes; over a link, except where the states are in a file
    "2, host": (2, {"offload_optimizer": "cpu", "overlap_param_gather": True}),
    "2, nvme": (2, {"offload_optimizer": "nvme", "overlap_param_gather": True}),
    "3, host": (3, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    "3, O on the host": (3, {"offload_optimizer": "cpu", "param_persistence_threshold": 200}),
    "3, O on nvme": (
        3,
        {"offload_optimizer": "nvme", "offload_param": "cpu", "gather_limits": GatherLimits(prefetch=1 << 30)},
    ),
}


def fresh(path: str, case: str, **options: Any) -> Engine:
    stage, homes = CASES[case]
    torch.manual_seed(0)
    settings = {**homes, "nvme_path": path, "sub_group_size": TILE_MULTIPLE, **options.pop("zero", {})}
    return make_engine(Wide(), stage, clip_grad=0.5, zero=settings, **options)


def step(engine: Engine, batch: torch.Tensor) -> float:
    return float(one_step(engine, batch[0][mpu.get_data_parallel_rank()]))


class Gate:
    """Lets tiles of updates pass one by one, when told, in whatever thread; and notes those that came."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passes, self.came = threading.Semaphore(0), 0
        step_tiles = Update._step_tiles

        def gated(update: Update, tiles: list) -> None:
            self.came += 1
            assert self.passes.acquire(timeout=60), "nobody opened the gate"
            step_tiles(update, tiles)

        patch.setattr(Update, "_step_tiles", gated)


def numbers_case(path: str, options: dict) -> None:
    mpu.initialize_model_parallel(1)
    common = {"nvme_path": path, "sub_group_size": TILE_MULTIPLE, **options.get("zero", {})}
    rest = {"steps": 4, "clip_grad": 0.5, **{k: v for k, v in options.items() if k != "zero"}}
    want = {stage: run(Wide, stage, zero=common, **rest) for stage in (2, 3)}
    for case, (stage, homes) in CASES.items():
        with slow_link():
            got = run(Wide, stage, zero={**common, **homes}, **rest)
        compare(got, want[stage], f"{case}, {options}", bitwise=True)


def scheduled(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer.torch_optimizer, 1, gamma=0.3)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_overlapped_update_trains_as_the_accelerator_bit_for_bit(world_size, tmp_path):
    run_ranks(world_size, numbers_case, str(tmp_path), {})


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16, "lr_scheduler": scheduled},
        {"dtype": torch.bfloat16, "micro": 2, "zero": {"grad_dtype": "compute"}},
        {"lr_scheduler": scheduled, "micro": 2},
    ],
    ids=["16 bits", "16 bits, gradients too", "fp32"],
)
def test_an_overlapped_update_trains_as_the_accelerator_bit_for_bit_with(options, tmp_path):
    """The learning rate of the next step is set while the update goes on."""
    run_ranks(2, numbers_case, str(tmp_path), options)


def overlap_case(path: str, case: str) -> None:
    mpu.initialize_model_parallel(1)
    batches = token_batches(3, 1, mpu.get_data_parallel_world_size())
    with slow_link():
        engine = fresh(path, case, dtype=torch.bfloat16)
        step(engine, batches[0])
        late = [bucket for bucket in engine.buckets if bucket.weights.is_sharded or CASES[case][0] == 2]
        at_once = sum(len(bucket.tiles) for bucket in engine.buckets if bucket not in late)
        assert bool(at_once) == (case == "3, O on the host"), "small parameters stay whole, and come in the step"
        tiles = [0] * (1 + len(engine.module.blocks))  # of the root, and of each block, as they are updated
        for bucket in engine.buckets:
            tiles[1 + bucket.unit] += len(bucket.tiles) if bucket in late else 0
        with pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch)
            gate.passes.release(at_once or 1)
            step(engine, batches[1])  # returns although nothing passes
            assert gate.came <= at_once + 2 and all(bucket.is_updating for bucket in late)
            gate.passes.release(sum(tiles[:3]))  # the root, and blocks 0 and 1
            reached: list[tuple[int, int]] = []

            def before(index: int) -> Callable:
                def note(*_: Any) -> None:
                    reached.append((index, gate.came))
                    written = [bucket for bucket in late if bucket.is_updating]
                    assert all(len(bucket.weights.buffers) == 1 for bucket in written), "a shard has come ahead of it"
                    if index < 2:
                        gate.passes.release(tiles[index + 3])  # the block after the next

                return note

            for index, block in enumerate(engine.module.blocks):
                block.register_forward_pre_hook(before(index))
            loss = engine(batches[2][0][mpu.get_data_parallel_rank()])
            assert [index for index, _ in reached] == [0, 1, 2, 3]
            assert reached[0][1] <= at_once + sum(tiles[:3]) + 2, "the first block has run before the third's update"
            engine.backward(loss)
            assert not any(bucket.is_updating for bucket in engine.buckets)
            gate.passes.release(100)
            engine.step()
            engine.optimizer.finish()
        engine.destroy()


@pytest.mark.parametrize("case", CASES)
def test_a_unit_runs_while_the_units_after_the_next_are_updated(case, tmp_path):
    run_ranks(2, overlap_case, str(tmp_path), case)


def reading_case(path: str, case: str) -> None:
    """Whatever looks at values after a step sees those of the update."""
    mpu.initialize_model_parallel(1)
    batches = token_batches(3, 1, mpu.get_data_parallel_world_size())
    with slow_link(), pytest.MonkeyPatch.context() as patch:
        step_tiles = Update._step_tiles

        def slowly(update: Update, tiles: list) -> None:
            time.sleep(0.01)
            step_tiles(update, tiles)

        def weights(engine: Engine) -> dict[str, torch.Tensor]:
            return {name: value.clone() for name, value in engine.state_dict().items()}

        inline = fresh(path, case, zero={"overlap_comm": False})
        for batch in batches[:2]:
            step(inline, batch)
        assert not inline.buckets[0].is_updating
        want, part_of = weights(inline), lambda engine: getattr(engine.module.blocks[2][0].weight, "ds_tensor", None)
        part = part_of(inline)
        inline.destroy()
        patch.setattr(Update, "_step_tiles", slowly)

        def updating() -> tuple[Engine, torch.nn.Parameter]:
            engine = fresh(path, case)
            for batch in batches[:2]:
                step(engine, batch)
            parameter = engine.module.blocks[2][0].weight
            assert any(bucket.is_updating for bucket in engine.buckets)
            assert isinstance(parameter, ReleasedParameter if CASES[case][0] == 3 else ArrivingParameter)
            return engine, parameter

        name = "blocks.2.0.weight"
        engine, parameter = updating()
        assert all(torch.equal(value, want[key]) for key, value in weights(engine).items())
        assert torch.equal(safe_get_full_fp32_param(parameter), want[name])
        engine.destroy()
        engine, parameter = updating()
        with zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            assert torch.equal(parameter, want[name])
            parameter.mul_(2)
        assert torch.equal(engine.state_dict()[name], want[name] * 2)
        assert torch.equal(safe_get_full_fp32_param(parameter), want[name] * 2)
        engine.destroy()
        engine, parameter = updating()
        if CASES[case][0] == 2:
            assert torch.equal(parameter.detach(), want[name]) and not isinstance(parameter, ArrivingParameter)
        else:
            assert torch.equal(part_of(engine), part)
        with torch.no_grad():  # a forward that no engine calls
            engine.module(batches[2][0][0])
        engine.save_checkpoint(path, "saved")
        assert engine.module_state_dict().keys() == want.keys()
        engine.destroy()


@pytest.mark.parametrize("case", CASES)
def test_who_looks_at_values_sees_those_of_the_update(case, tmp_path):
    run_ranks(2, reading_case, str(tmp_path), case)


def lonely_case(path: str, case: str, name: str) -> str:
    mpu.initialize_model_parallel(1, timeout_s=4)
    batches = token_batches(2, 1, mpu.get_data_parallel_world_size())
    with slow_link():
        engine = fresh(path, case)
        for batch in batches:
            step(engine, batch)
        assert any(bucket.is_updating for bucket in engine.buckets)
        if mpu.get_data_parallel_rank() == 1:
            time.sleep(6)
            return ""
        try:
            engine.module.get_parameter(name).sum()
        except RuntimeError as error:
            return str(error)
        return "it is there"


def test_a_rank_that_looks_alone_is_told_who_is_missing(tmp_path):
    message = run_ranks(2, lonely_case, str(tmp_path), "2, host", "blocks.2.0.weight")[0]
    assert "first look at a parameter after engine.step()" in message and "1" in message, message


def test_a_rank_that_looks_alone_at_what_stays_whole_in_stage_3_needs_no_other(tmp_path):
    assert run_ranks(2, lonely_case, str(tmp_path), "3, O on the host", "blocks.2.0.bias")[0] == "it is there"


def failing_case(path: str, case: str) -> None:
    mpu.initialize_model_parallel(1)
    batches = token_batches(4, 1, mpu.get_data_parallel_world_size())
    with slow_link():
        engine = fresh(path, case)
        step(engine, batches[0])
        engine.save_checkpoint(path, "good")
        with pytest.MonkeyPatch.context() as patch:
            step_tiles, count = Update._step_tiles, [0]

            def failing(update: Update, tiles: list) -> None:
                count[0] += threading.current_thread().name == "background update"
                if count[0] == 4:
                    raise OSError("the drive is gone")
                step_tiles(update, tiles)

            patch.setattr(Update, "_step_tiles", failing)
            step(engine, batches[1])
            with pytest.raises(OSError, match="the drive is gone"):
                engine(batches[2][0][0])
        with pytest.raises(RuntimeError, match="cut short by an error"):
            engine.save_checkpoint(path, "bad")
        if CASES[case][0] == 2:
            with pytest.raises(RuntimeError, match="cut short by an error"):
                engine.module.blocks[3][0].weight.sum()
        engine.load_checkpoint(path, "good")
        got = [step(engine, batch) for batch in batches[1:]]
        engine.destroy()
        engine = fresh(path, case)
        assert got == [step(engine, batch) for batch in batches][1:]
        engine.destroy()


@pytest.mark.parametrize("case", CASES)
def test_an_update_that_fails_is_told_by_the_forward_and_a_checkpoint_continues_bit_for_bit(case, tmp_path):
    run_ranks(2, failing_case, str(tmp_path), case)


def stale_case(path: str, case: str) -> None:
    """Graphs and aliases from before the step are as useless as after any other step, and say so."""
    mpu.initialize_model_parallel(1)
    batches = token_batches(3, 1, mpu.get_data_parallel_world_size())
    with slow_link():
        engine = fresh(path, case)
        step(engine, batches[0])
        engine.save_checkpoint(path, "good")
        old = engine(batches[1][0][mpu.get_data_parallel_rank()])
        alias = engine.module.blocks[3][0].weight.detach() if CASES[case][0] == 2 else None
        step(engine, batches[1])
        assert any(bucket.is_updating for bucket in engine.buckets)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(old, list(engine.module.blocks[0].parameters()))
        if alias is not None:
            alias.fill_(7.0)
            with pytest.raises(RuntimeError, match="was written to while its update went on"):
                engine.optimizer.finish()
            with pytest.raises(RuntimeError, match="cut short by an error"):
                engine.save_checkpoint(path, "bad")
            engine.load_checkpoint(path, "good")
        step(engine, batches[2])
        engine.destroy()


@pytest.mark.parametrize("case", CASES)
def test_graphs_and_aliases_from_before_the_step_are_refused(case, tmp_path):
    run_ranks(2, stale_case, str(tmp_path), case)


def interrupt_finish() -> None:
    """Ctrl-C for the main thread, once it waits in an update's `finish`: just before, the wait would not notice it."""
    main = threading.main_thread().ident
    names: set[str] = set()
    while "finish" not in names:
        time.sleep(0.01)
        names = {frame.name for frame in traceback.extract_stack(sys._current_frames()[main])}
    time.sleep(0.3)
    signal.pthread_kill(main, signal.SIGINT)


def interrupted_case(path: str) -> None:
    """The update goes on, and whoever comes next waits for it."""
    mpu.initialize_model_parallel(1)
    batches = token_batches(4, 1, 1)
    with slow_link():
        for case in CASES:
            engine = fresh(path, case)
            want = [step(engine, batch) for batch in batches]
            engine.destroy()
            engine = fresh(path, case)
            got = [step(engine, batch) for batch in batches[:1]]
            with pytest.MonkeyPatch.context() as patch:
                gate = Gate(patch)
                if whole := sum(len(b.tiles) for b in engine.buckets if b not in engine.optimizer._overlapped):
                    gate.passes.release(whole)
                got.append(step(engine, batches[1]))
                interrupt = threading.Thread(target=interrupt_finish, daemon=True)
                interrupt.start()
                with pytest.raises(KeyboardInterrupt):
                    engine(batches[2][0][0])
                interrupt.join()
                gate.passes.release(100)
                got += [step(engine, batch) for batch in batches[2:]]
                engine.optimizer.finish()
            assert got == want, case
            engine.destroy()


def test_an_interrupted_wait_loses_nothing(tmp_path):
    run_ranks(1, interrupted_case, str(tmp_path))


def thread_case(path: str) -> None:
    """If no thread can start, or it fails and the next thing is destroy(), no half-made step is trained on."""
    mpu.initialize_model_parallel(1)
    batches = token_batches(3, 1, 1)
    with slow_link():
        for case in CASES:
            engine = fresh(path, case)
            step(engine, batches[0])
            engine.save_checkpoint(path, case.replace(" ", ""))
            with pytest.MonkeyPatch.context() as patch:

                def start(_: threading.Thread) -> None:
                    raise RuntimeError("can't start new thread")

                patch.setattr(threading.Thread, "start", start)
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    step(engine, batches[1])
            with pytest.raises(RuntimeError, match="cut short by an error"):
                step(engine, batches[1])
            engine.load_checkpoint(path, case.replace(" ", ""))
            got = [step(engine, batch) for batch in batches[1:]]
            engine.optimizer.finish()
            with pytest.MonkeyPatch.context() as patch:

                def fail(*_: Any) -> None:
                    if threading.current_thread() is not threading.main_thread():
                        raise OSError("the drive is gone")

                patch.setattr(Update, "_step_tiles", fail)
                step(engine, batches[0])
                with pytest.raises(OSError, match="the drive is gone"):
                    engine.destroy()
            assert all(type(p) is torch.nn.Parameter and p.numel() for p in engine.module.parameters())
            engine = fresh(path, case)
            assert [step(engine, batch) for batch in batches][1:] == got
            engine.destroy()


def test_a_thread_that_cannot_start_or_fails_before_destroy_is_told_and_leaves_a_plain_module(tmp_path):
    run_ranks(1, thread_case, str(tmp_path))


@pytest.mark.parametrize(
    "options, overlaps",
    [
        ({"stage": 3}, True),
        ({"stage": 3, "offload_param": "cpu"}, True),
        ({"stage": 3, "offload_param": "nvme"}, False),  # the update would share its home with the gathers
        ({"stage": 2, "overlap_param_gather": True}, True),
        ({"stage": 2}, False),  # whole parameters must not arrive late unless asked to
        ({"stage": 1, "overlap_param_gather": True}, False),  # whole gradients would go to the host all at once
        ({"stage": 3, "offload_optimizer_ratio": 0.5}, False),
        ({"stage": 3, "delayed_param_update": 1}, False),
        ({"stage": 3, "overlap_comm": False}, False),
        ({"stage": 3, "placement": "auto"}, False),
        ({"stage": 3, "offload_optimizer": "none"}, False),
    ],
    ids=str,
)
def test_which_updates_go_on_during_the_next_forward(options, overlaps):
    assert ZeroConfig(**{"offload_optimizer": "cpu", "nvme_path": "x", **options}).overlaps_update == overlaps


def in_place_case() -> None:
    """Where the host computes both, and for an optimizer that is not Adam, the update is over with the step."""
    mpu.initialize_model_parallel(1)
    batches = token_batches(2, 1, 1)
    for optimizer, link in (("adamw", False), ("sgd", True)):
        with slow_link() if link else nullcontext():
            engine = make_engine(Wide(), 3, optimizer=optimizer, zero={"offload_optimizer": "cpu"})
            for batch in batches:
                step(engine, batch)
            assert not engine.buckets[0].is_updating, optimizer
            engine.destroy()


def test_an_update_that_has_nothing_to_overlap_or_is_not_adams_is_over_with_the_step():
    run_ranks(1, in_place_case)


def threads_case(options: dict) -> None:
    """Another thread sets one for itself, as a data loader does that page-locks batches: new threads then start with one too."""
    mpu.initialize_model_parallel(1)
    torch.set_num_threads(3)
    found = []
    with slow_link(), pytest.MonkeyPatch.context() as patch:
        step_tiles = Update._step_tiles
        patch.setattr(Update, "_step_tiles", lambda *args: (found.append(torch.get_num_threads()), step_tiles(*args)))
        engine = make_engine(Wide(), 2, zero={"offload_optimizer": "cpu", **options})
        other = threading.Thread(target=torch.set_num_threads, args=(1,))
        other.start()
        other.join()
        for batch in token_batches(3, 1, 1):
            step(engine, batch)
        engine.destroy()
    assert found and set(found) == {3}, found


@pytest.mark.parametrize("options", [{"overlap_param_gather": True}, {"delayed_param_update": 1}], ids=str)
def test_an_update_in_the_background_has_as_many_threads_as_one_in_the_step(options):
    run_ranks(1, threads_case, options)
