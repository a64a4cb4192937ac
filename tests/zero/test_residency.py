"""What stage 3 gathers ahead and keeps: the limits as arithmetic, and each of them in what a real step gathers and holds."""

from __future__ import annotations

import pytest
import torch

from megazero import mpu
from megazero.activation_checkpointing import checkpoint
from megazero.zero.residency import GatherLimits, Residency
from tests.ranks import run_ranks
from tests.zero.models import Wide, compare, make_engine, token_batches, train


def test_one_unit_is_gathered_ahead_by_default_of_any_size():
    residency = Residency([5, 50, 500], GatherLimits())
    assert residency.ahead(-1, 1, live=0) == [0]
    assert residency.ahead(1, 1, live=10**9) == [2] and residency.ahead(2, 1, live=0) == []
    assert residency.ahead(2, -1, live=0) == [1] and residency.ahead(0, -1, live=0) == []
    assert [residency.stays(unit, live=0) for unit in range(3)] == [False, False, True], (
        "the last one's backward comes next"
    )


def test_units_without_sharded_parameters_are_passed_over():
    residency = Residency([100, 0, 100, 0, 0], GatherLimits())
    assert residency.ahead(0, 1, live=0) == [1, 2] and residency.ahead(2, 1, live=0) == [3, 4]


@pytest.mark.parametrize(("limit", "ahead"), [(0, []), (9, []), (10, [1]), (29, [1]), (30, [1, 2]), (10**9, [1, 2, 3])])
def test_units_are_gathered_ahead_up_to_the_prefetch_limit(limit, ahead):
    assert Residency([10, 10, 20, 30], GatherLimits(prefetch=limit)).ahead(0, 1, live=0) == ahead


def test_nothing_is_gathered_ahead_beyond_the_live_limit():
    residency = Residency([10, 10, 20, 30], GatherLimits(prefetch=100, live=45))
    assert residency.ahead(0, 1, live=10) == [1, 2]
    assert residency.ahead(0, 1, live=40) == []


def test_a_unit_stays_if_little_runs_until_its_backward():
    residency = Residency([10, 10, 20], GatherLimits(reuse=40))
    assert [residency.stays(unit, live=0) for unit in range(3)] == [False, True, True]
    limited = Residency([10, 10, 20], GatherLimits(reuse=40, live=10))
    assert limited.stays(1, live=10) and not limited.stays(1, live=11)


class Recomputed(Wide):
    """Keeps no activations of its blocks, whose forwards run under no_grad."""

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + checkpoint(block, x)
        return (x @ self.embedding.weight.t()).square().mean()


def gathers_case(options: dict, model: type[Wide]) -> tuple[int, int, int]:
    """Gathers of units in one step, elements that they brought, and the most that was live."""
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    engine = make_engine(model(), 3, zero=options)
    counted, live = [0, 0], [0]
    for bucket in engine.schedule._sharded:

        def gather(bucket=bucket, original=bucket.weights.gather):
            is_new = not bucket.weights.is_allocated
            original()
            counted[0] += is_new
            counted[1] += is_new * bucket.layout.numel
            live.append(sum(b.layout.numel for b in engine.schedule._sharded if b.weights.is_allocated))

        bucket.weights.gather = gather
    trace = dict(train(engine, token_batches(1, 1, 2)))
    torch.manual_seed(0)
    want = dict(train(make_engine(model(), 3), token_batches(1, 1, 2)))
    compare(trace, want, str(options), bitwise=True)
    return counted[0], counted[1], max(live)


@pytest.mark.parametrize("model", [Wide, Recomputed])
def test_every_limit_changes_what_a_step_gathers_and_none_its_numbers(model):
    def gathers(**options) -> tuple[int, int, int]:
        return run_ranks(2, gathers_case, options, model)[0]

    default = gathers()
    # 4 blocks forward and backward, the last one once; the root; and all for the state dictionary.
    assert default[0] == 7 + 1 + 5
    nothing_ahead = gathers(gather_limits=GatherLimits(prefetch=0))
    assert nothing_ahead[0] == default[0] and nothing_ahead[2] < default[2]
    further = gathers(gather_limits=GatherLimits(prefetch=60_000))
    assert further[2] > default[2]
    assert gathers(gather_limits=GatherLimits(prefetch=60_000, live=default[2]))[2] <= default[2]
    kept = gathers(gather_limits=GatherLimits(reuse=10**9))
    assert kept[0] == default[0] - 3  # each of the 4 blocks once; the last one is so by default
    persistent = gathers(param_persistence_threshold=200)
    assert persistent[1] < default[1]  # 8 biases are never gathered
    one_of_them = gathers(param_persistence_threshold=200, model_persistence_threshold=149)
    assert persistent[1] < one_of_them[1] < default[1]
