"""What a rank sends in a step: the engine's own count, what its buckets ask for, and what leaves the rank, against the design."""

from __future__ import annotations

from collections import Counter
from threading import Lock

import pytest
import torch
from torch import Tensor

from megazero import mpu, zero
from megazero.comm import channel as channel_module
from megazero.comm import collectives, point_to_point
from megazero.engine import Engine
from megazero.zero.units import ROOT
from tests.ranks import run_ranks
from tests.zero.models import MODELS, FrozenToy, Toy, make_engine, step, token_batches

KINDS = ("all_reduce", "reduce_scatter", "all_gather")
Count = dict[str, tuple[int, int]]  # by kind: collectives, elements sent


class Spy:
    """Counts what the buckets of an engine ask its channel for, without the channel's help."""

    def __init__(self, engine: Engine) -> None:
        self.channel, self.calls = engine.channel, []
        for kind in KINDS:
            setattr(self.channel, f"{kind}_", self.wrap(kind, getattr(self.channel, f"{kind}_")))

    def wrap(self, kind: str, issue):
        def counting(buffer: Tensor, name: str = ""):
            self.calls.append((kind, buffer.numel()))
            return issue(buffer, name)

        return counting

    def count(self) -> Count:
        """Since the last call. A ring sends (N - 1)/N of a buffer, and twice that to reduce it for all."""
        n, found = self.channel.size, dict.fromkeys(KINDS, (0, 0))
        for kind, numel in self.calls:
            number, elements = found[kind]
            found[kind] = (number + 1, elements + numel * (n - 1) // n * (2 if kind == "all_reduce" else 1))
        self.calls.clear()
        return found


def own_count(engine: Engine) -> Count:
    """The channel's counters since the last call."""
    found = {kind: (traffic.collectives, traffic.elements) for kind, traffic in engine.channel.traffic.items()}
    engine.channel.reset_traffic()
    return found


def table_of_the_design(engine: Engine, micro: int) -> Count:
    """Collectives and elements of a step: m micro-batches, psi with padding, each times (N - 1)/N."""
    n, stage = engine.channel.size, engine.zero.stage
    trained = [bucket.layout.numel for bucket in engine.buckets if bucket.is_trainable]
    m = micro

    def times(factor: int, numels: list[int]) -> tuple[int, int]:
        return factor * len(numels), factor * sum(numels) * (n - 1) // n

    none = (0, 0)
    if stage == 0:
        return {"all_reduce": (len(trained), times(2, trained)[1]), "reduce_scatter": none, "all_gather": none}
    if stage == 1:
        return {"all_reduce": none, "reduce_scatter": times(1, trained), "all_gather": times(1, trained)}
    if stage == 2:
        return {"all_reduce": none, "reduce_scatter": times(m, trained), "all_gather": times(1, trained)}
    last = max(bucket.unit for bucket in engine.buckets)
    gathers = [0, 0]
    for bucket in engine.buckets:
        stays_for_backward, stays_for_forward = bucket.unit in (ROOT, last), bucket.unit in (ROOT, 0)
        number, elements = times(2 * m - m * stays_for_backward - (m - 1) * stays_for_forward, [bucket.layout.numel])
        gathers = [gathers[0] + number, gathers[1] + elements]
    gathers = tuple(gathers)
    return {"all_reduce": none, "reduce_scatter": times(m, trained), "all_gather": gathers}


# In these every unit runs once per forward, and what it returns needs a gradient.
ONE_OF_EACH = ["tied head, unused parameter", "reentrant checkpointing", "frozen layers"]
MORE = [
    "non-reentrant checkpointing",
    "our checkpointing",
    "unused parameter in every block",
    "dataclass outputs",
    "mlp 256-128-10",
]


def steps_case(names: list[str]) -> None:
    n = mpu.initialize_model_parallel(1).data_parallel_size
    mpu.model_parallel_cuda_manual_seed(1)
    for stage in (0, 1, 2, 3):
        for micro in (1, 3):
            for name in names:
                engine = make_engine(MODELS[name](), stage, gradient_accumulation_steps=micro)
                own_count(engine)  # the check of equal weights
                spy = Spy(engine)
                want = table_of_the_design(engine, micro)
                for number in (1, 2):
                    step(engine, micro)
                    what = f"{name}, stage {stage}, {micro} micro-batches, {n} ranks, step {number}"
                    got = own_count(engine)
                    assert got == want, f"{what}: {got}, by the table {want}"
                    assert spy.count() == want, what
                engine.destroy()


@pytest.mark.parametrize("world_size, names", [(2, ONE_OF_EACH + MORE), (3, ONE_OF_EACH)], ids=["2", "3"])
def test_a_step_sends_what_the_table_says(world_size, names):
    run_ranks(world_size, steps_case, names)


def formula_case() -> dict[int, list[int]]:
    """Elements sent per step, in units of psi (N - 1)/N, for a model whose root and units are all one size with padding."""
    mpu.initialize_model_parallel(1)
    found = {}
    for stage in (0, 1, 2, 3):
        for micro in (1, 3):
            engine = make_engine(Toy(), stage, gradient_accumulation_steps=micro)
            own_count(engine)
            step(engine, micro)
            psi = sum(bucket.layout.numel for bucket in engine.buckets)
            share = psi * (engine.channel.size - 1) // engine.channel.size
            sent = sum(elements for _, elements in own_count(engine).values())
            found.setdefault(stage, []).append(sent / share)
            engine.destroy()
    return found


def test_the_sums_are_2_psi_then_m_psi_plus_psi_and_at_most_3_m_psi():
    for found in run_ranks(2, formula_case):
        assert found[0] == [2, 2] and found[1] == [2, 2] and found[2] == [2, 4]
        assert 2 < found[3][0] < 3 and 6 < found[3][1] < 9  # the root is gathered once, the units twice


class Reversed(Toy):
    """Runs its blocks in another order than they have in the model."""

    def hidden(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


def reversed_case() -> None:
    mpu.initialize_model_parallel(1)
    counts = []
    for model in (Toy, Reversed):
        torch.manual_seed(0)
        engine = make_engine(model(), 3)
        own_count(engine)
        step(engine)
        counts.append(own_count(engine))
        engine.destroy()
    assert counts[1] == counts[0]


def test_units_in_another_order_are_gathered_as_often():
    run_ranks(2, reversed_case)


# ---- what leaves the rank


def wire_case() -> None:
    """Point to point every byte that is sent is in a message to one rank. Changes modules of this rank's own process."""
    n = mpu.initialize_model_parallel(1).data_parallel_size
    channel_module.link = lambda *_: None  # as if the ranks were on several hosts
    sent, scalars, one_at_a_time = Counter(), Counter(), Lock()
    transport, all_reduce = point_to_point.PointToPointTransport, collectives.dist.all_reduce
    send, agree = transport._send, transport._agree

    def counting_send(self, part, rank):
        with one_at_a_time:  # lanes are threads
            sent["bytes"] += part.nbytes
        return send(self, part, rank)

    def counting_agree(self, what):
        with one_at_a_time:  # messages that say which collective this is
            sent["bytes"] -= (n - 1) * point_to_point.MESSAGE_BYTES
        agree(self, what)

    def counting_all_reduce(tensor, *args, **kwargs):
        scalars["collectives"] += 1
        scalars["elements"] += tensor.numel()
        return all_reduce(tensor, *args, **kwargs)

    transport._send, transport._agree = counting_send, counting_agree
    collectives.dist.all_reduce = counting_all_reduce
    for stage in (0, 1, 2, 3):
        engine = make_engine(FrozenToy(), stage, gradient_accumulation_steps=3)
        assert engine.channel.transport == "point to point"
        step(engine, 3)
        own_count(engine)
        sent.clear()
        scalars.clear()
        step(engine, 3)
        engine.channel.meet("the count")  # everything issued has been waited for
        want = sum(elements for _, elements in table_of_the_design(engine, 3).values())
        assert sent["bytes"] == 4 * want, f"stage {stage}, {n} ranks: {sent['bytes']} bytes, by the table {4 * want}"
        assert scalars == {"collectives": 1, "elements": 1}, "beside the channel only the norm is communicated"
        engine.destroy()


@pytest.mark.parametrize("world_size", [2, 3])
def test_elements_that_leave_a_rank_are_those_of_the_table(world_size):
    run_ranks(world_size, wire_case)


# ---- without a step


def evaluation_case() -> None:
    mpu.initialize_model_parallel(1)
    for stage in (0, 1, 2, 3):
        for run in ("plain", "reentrant"):
            engine = make_engine(Toy(run), stage)
            step(engine, 1)
            own_count(engine)
            spy = Spy(engine)
            with torch.no_grad():
                for _ in range(2):
                    engine(token_batches(1, 1, 1)[0, 0, 0])
                    numels = [bucket.layout.numel for bucket in engine.buckets] if stage == 3 else []
                    n = engine.channel.size
                    want = {**dict.fromkeys(KINDS, (0, 0)), "all_gather": (len(numels), sum(numels) * (n - 1) // n)}
                    assert own_count(engine) == spy.count() == want, f"stage {stage}, {run}"
            assert all(bucket.weights.is_gathered == (stage < 3) for bucket in engine.buckets)
            step(engine, 1)
            assert own_count(engine) == table_of_the_design(engine, 1), f"the step after an evaluation, stage {stage}"
            engine.destroy()


def test_an_evaluation_gathers_each_unit_once():
    run_ranks(2, evaluation_case)


def gathered_case() -> None:
    mpu.initialize_model_parallel(1)
    with zero.Init() as context:
        model = Toy()
    found = {kind: traffic.collectives for kind, traffic in context.channel.traffic.items()}
    assert found == dict.fromkeys(KINDS, 0), "rank 0's values are broadcast, and nothing is gathered"
    engine = make_engine(model, 3)
    own_count(engine)
    spy = Spy(engine)
    block = model.blocks[1]
    (bucket,) = (bucket for bucket in engine.buckets if bucket.name == "blocks.1")
    for modifier in (None, 0):
        with zero.GatheredParameters(block.parameters(), modifier_rank=modifier):
            assert [b.name for b in engine.buckets if b.weights.is_gathered] == ["blocks.1"]
            assert [p.shape for p in block.parameters()] == [p.shape for p in Toy().blocks[1].parameters()]
        n, numel = engine.channel.size, bucket.layout.numel
        want = {**dict.fromkeys(KINDS, (0, 0)), "all_gather": (1, numel * (n - 1) // n)}
        assert own_count(engine) == spy.count() == want, "one gather of the one unit that holds them"
        assert not any(b.weights.is_gathered for b in engine.buckets)
    step(engine, 1)
    assert own_count(engine) == table_of_the_design(engine, 1)


def test_gathered_parameters_gather_their_units_once_and_release_them():
    run_ranks(2, gathered_case)
