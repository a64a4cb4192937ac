"""The plan of --recompute auto against every assignment of modes to blocks, and against a backward that is played through."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.model.config import BLOCK_MODES
from megazero.model.recompute import BlockCost, peak_bytes, plan_recompute


def played_peak(modes, costs):
    """Bytes after each event of a forward and a backward: what is kept comes, is completed, and goes."""
    held, most = 0, 0
    for mode in modes:
        most = max(most, held + costs["none"].nbytes)  # a forward has all of its activations before it lets go of some
        held += costs[mode].nbytes
    for mode in reversed(modes):
        held += costs["none"].nbytes - costs[mode].nbytes  # run again
        most = max(most, held)
        held -= costs["none"].nbytes
    assert held == 0
    return most


def costs_of(sizes, times):
    return {mode: BlockCost(size, time) for mode, size, time in zip(BLOCK_MODES, sizes, times, strict=True)}


@st.composite
def some_costs(draw):
    sizes = sorted(draw(st.lists(st.integers(1, 30), min_size=3, max_size=3)), reverse=True)
    times = [0, *draw(st.lists(st.integers(0, 9), min_size=2, max_size=2))]  # selective may be slower than full
    return costs_of(sizes, times)


@given(some_costs(), st.integers(1, 6), st.integers(1, 150))
def test_the_plan_is_as_fast_as_the_best_of_all_assignments(costs, num_blocks, budget):
    fitting = [m for m in itertools.product(BLOCK_MODES, repeat=num_blocks) if played_peak(m, costs) <= budget]
    if not fitting:
        with pytest.raises(ValueError, match="--recompute-budget-gb"):
            plan_recompute(costs, num_blocks, budget)
        return
    plan = plan_recompute(costs, num_blocks, budget)
    assert len(plan) == num_blocks and played_peak(plan, costs) == peak_bytes(plan, costs) <= budget
    want = min((sum(costs[mode].seconds for mode in modes), played_peak(modes, costs)) for modes in fitting)
    assert (sum(costs[mode].seconds for mode in plan), peak_bytes(plan, costs)) == want


def test_one_budget_after_another():
    costs = costs_of((100, 60, 10), (0.0, 1.0, 5.0))
    assert plan_recompute(costs, 4, 400) == ["none"] * 4
    assert plan_recompute(costs, 4, 399) == ["selective", "none", "none", "none"]
    assert plan_recompute(costs, 4, 280) == ["selective"] * 3 + ["none"]
    assert plan_recompute(costs, 4, 279) == ["full", "selective", "none", "none"], "not three selective ones"
    assert plan_recompute(costs, 4, 130) == ["full"] * 3 + ["none"]
    with pytest.raises(ValueError, match="129 bytes, and 4 blocks need 130 even if .* one block alone has 100"):
        plan_recompute(costs, 4, 129)
