"""How gradients and parameters travel: while the model computes, divided in two steps, in the dtype that is asked for."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from megazero import mpu
from megazero.zero.gradient import Gradient
from tests.ranks import run_ranks
from tests.zero.models import Toy, full_grad, make_engine, my_batch, run


def wait_for(path: Path) -> None:
    for _ in range(2000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError("rank 0 waits for a reduction in the middle of its backward")


def overlap_case(folder: str) -> None:
    """Rank 1 begins its backward when rank 0 is in a later unit of its own: which does not wait for rank 1.

    In the second unit if a reduction holds memory beside G, else in the third. Unless nothing is to overlap.
    """
    mpu.initialize_model_parallel(1)
    cases = ((0, "same", 2), (1, "same", 2), (1, "compute", 1), (2, "same", 1))
    for case, overlaps in itertools.product(cases, (True, False)):
        stage, wire, later = case
        engine = make_engine(Toy(), stage, dtype=torch.bfloat16, zero={"overlap_comm": overlaps, "reduce_dtype": wire})
        gradient = next(bucket for bucket in engine.buckets if bucket.name == "blocks.2").gradient
        signal = Path(folder) / str(case)

        def later_unit(
            _: torch.Tensor, gradient: Gradient = gradient, overlaps: bool = overlaps, signal: Path = signal
        ) -> None:
            assert not gradient.has_unreduced and gradient.is_reduced == (not overlaps)
            assert gradient.buffers or not overlaps, "it is on its way"
            signal.touch()

        up = engine.module.blocks[2 - later].up
        up.register_forward_hook(lambda _, __, output, hook=later_unit: output.register_hook(hook) and None)
        loss = engine(my_batch())
        if overlaps and mpu.get_data_parallel_rank() == 1:
            wait_for(signal)
        engine.backward(loss)
        engine.step()
        engine.destroy()


def test_gradients_are_on_their_way_while_backward_goes_on(tmp_path):
    run_ranks(2, overlap_case, str(tmp_path))


def wires_case() -> None:
    mpu.initialize_model_parallel(1)
    for stage, wire, most in ((1, "same", 0), (1, "compute", 1), (2, "same", 1)):
        engine = make_engine(Toy(), stage, dtype=torch.bfloat16, zero={"reduce_dtype": wire})
        reduce, held = Gradient.reduce, []

        def counted(gradient: Gradient, engine=engine, reduce=reduce, held=held) -> None:
            reduce(gradient)
            held.append(sum(bucket.gradient.has_wire for bucket in engine.buckets))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Gradient, "reduce", counted)
            engine.backward(engine(my_batch()))
        assert len(held) == len(engine.buckets) and set(held) == {most}


def test_one_reduction_at_a_time_holds_memory_beside_the_gradients():
    run_ranks(2, wires_case)


def ahead_case() -> None:
    mpu.initialize_model_parallel(1)
    for overlap in (True, False):
        check_what_is_gathered(overlap)


def check_what_is_gathered(overlap: bool) -> None:
    engine = make_engine(Toy(), 3, zero={"overlap_comm": overlap})
    buckets = {bucket.name: bucket for bucket in engine.buckets}
    seen: list[tuple[str, list[str]]] = []

    def look(what: str) -> None:
        names = [name for name, b in buckets.items() if name != "root" and b.weights.is_allocated]
        seen.append((what, sorted(names)))

    for index, block in enumerate(engine.module.blocks):
        block.up.register_forward_pre_hook(lambda _, __, i=index: look(f"forward {i}"))
        block.up.register_forward_hook(
            lambda _, __, output, i=index: output.register_hook(lambda _: look(f"backward {i}")) and None
        )
    engine.backward(engine(my_batch()))
    one_ahead = [[0, 1], [1, 2], [2], [1, 2], [0, 1], [0]]
    want = one_ahead if overlap else [[0], [1], [2], [2], [1], [0]]
    whats = [*(f"forward {i}" for i in range(3)), *(f"backward {i}" for i in (2, 1, 0))]
    assert seen == [(what, [f"blocks.{i}" for i in names]) for what, names in zip(whats, want, strict=True)]


def test_the_next_unit_is_gathered_while_one_computes():
    run_ranks(2, ahead_case)


class Branches(nn.Module):
    """Two units, of which a loss reaches those that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, wanted: list[int]) -> torch.Tensor:
        return torch.stack([self.branches[index](x).sum() for index in wanted]).sum()


def second_loss_case() -> None:
    mpu.initialize_model_parallel(1)
    rank = mpu.get_data_parallel_rank()
    x = torch.tensor([[1.0, 2.0, 4.0]]) * (1 + rank)
    for stage in (0, 1, 2):
        engine = make_engine(Branches(), stage, zero_units=[nn.Linear])
        engine.backward(engine(x, [0, 1]))
        engine.backward(engine(x, [rank]))  # the other branch's sum is there already, and nothing is to be added here
        for index in (0, 1):
            factor = ((1 + 2) + (1 + index)) / 2  # both ranks' first loss, and the second of one of them
            got = full_grad(engine, f"branches.{index}.weight")
            assert torch.equal(got, factor * torch.tensor([[1.0, 2.0, 4.0]])), stage


def test_a_second_loss_before_the_step_is_added_once_on_whichever_ranks_it_reaches_a_unit():
    run_ranks(2, second_loss_case)


class AllShared(nn.Sequential):
    """Layers that share all their weights, so that the root has nothing else."""

    def __init__(self) -> None:
        layers = [nn.Linear(5, 5) for _ in range(3)]
        for layer in layers[1:]:
            layer.weight, layer.bias = layers[0].weight, layers[0].bias
        super().__init__(*layers)


def all_shared_case() -> None:
    mpu.initialize_model_parallel(1)
    for stage in (0, 1, 2, 3):
        engine = make_engine(AllShared(), stage)
        engine.channel.reset_traffic()
        engine.backward(engine(torch.ones(2, 5)).mean())
        traffic = engine.channel.traffic
        assert sum(traffic[kind].collectives for kind in ("all_reduce", "reduce_scatter")) == 1, stage
        engine.destroy()


def test_weights_that_units_share_are_reduced_once():
    run_ranks(2, all_shared_case)


def test_a_gradient_waits_for_the_others_unless_it_keeps_a_larger_tensor_alive(one_rank):
    engine = make_engine(nn.Linear(64, 64), 0, zero_units=[], decay=0.0)
    (bucket,) = engine.buckets
    segment = bucket.segment_of(engine.module.bias)
    for grad, waits in ((torch.ones(64), True), (torch.ones(64, 64)[0], False)):
        bucket.gradient.accumulate(segment, grad)
        assert (bucket.gradient.whole is None) == waits
        bucket.gradient.zero()


def division_case() -> None:
    """Divisions by powers of two are exact; else the mean is the same to round-off."""
    mpu.initialize_model_parallel(1)
    want = run(Toy, 0, clip_grad=0.5)
    for stage in (0, 1, 2, 3):
        for zero in (
            {"gradient_predivide_factor": 4.0},
            {"gradient_predivide_factor": 0.3},
            {"prescale_gradients": True},
        ):
            got = run(Toy, stage, clip_grad=0.5, zero=zero)
            for key, value in want.items():
                if zero.get("gradient_predivide_factor") != 0.3:
                    assert torch.equal(got[key], value), f"{zero}, stage {stage}: {key}"
                else:
                    torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-6)


def test_gradients_divided_before_the_sum_have_the_same_mean():
    run_ranks(2, division_case)


def overflow_case() -> None:
    """Two gradients of 40,000 have no sum in fp16, and half of each do."""
    mpu.initialize_model_parallel(1)
    for zero, overflows in (
        ({}, True),
        ({"prescale_gradients": True}, False),
        ({"gradient_predivide_factor": 2.0}, False),
    ):
        engine = make_engine(
            torch.nn.Linear(3, 1), 1, dtype=torch.float16, optimizer="sgd", zero={"grad_dtype": "compute", **zero}
        )
        engine.backward(40000.0 * engine(torch.ones(1, 3).half()).sum())
        engine.step()
        assert engine.optimizer.overflow == overflows, zero
        engine.destroy()


def test_dividing_before_the_sum_prevents_an_overflow_in_16_bits():
    run_ranks(2, overflow_case)


def wire_case() -> None:
    mpu.initialize_model_parallel(1)
    for zero, want in (
        ({}, torch.float32),
        ({"reduce_dtype": "compute"}, torch.bfloat16),
        ({"grad_dtype": "compute"}, torch.bfloat16),
        ({"grad_dtype": "compute", "reduce_dtype": "fp32"}, torch.float32),
    ):
        for stage in (0, 2):
            engine = make_engine(Toy(), stage, dtype=torch.bfloat16, zero=zero)
            seen = set()
            for name in ("all_reduce_", "reduce_scatter_"):
                function = getattr(engine.channel, name)

                def spy(flat: torch.Tensor, *args, function=function, seen: set = seen):
                    seen.add(flat.dtype)
                    return function(flat, *args)

                setattr(engine.channel, name, spy)
            engine.backward(engine(my_batch()))
            assert seen == {want}, f"{zero}, stage {stage}: {seen}"
            engine.step()
            engine.destroy()


def test_gradients_travel_in_the_dtype_that_is_asked_for():
    run_ranks(2, wire_case)
