"""Gemini's planner against brute force, LRU and static splits; its budget; and the replay of its plans."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.zero import gemini_plan
from megazero.zero.gemini import Deviation, Replay
from megazero.zero.gemini_plan import (
    Plan,
    _working_sets,
    best_stays,
    fetched_bytes,
    first_that_fit,
    furthest_next_use,
    least_recent_use,
    plan_placement,
    simulate,
    static_split,
)
from megazero.zero.gemini_trace import Moment, Trace, Tracer


def forward_and_backward(units: int, nbytes: int, non_model: list[int] | int = 0) -> Trace:
    """The string of a model of equal units: each in forward, and in reverse order in backward."""
    string = [*range(units), *reversed(range(units))]
    each = non_model if isinstance(non_model, list) else [non_model] * len(string)
    return trace_of(zip(string, each, strict=True), dict.fromkeys(range(units), nbytes))


def trace_of(moments: Iterable[tuple[int, int]], nbytes: dict[int, int]) -> Trace:
    return Trace(tuple(Moment(*moment) for moment in moments), nbytes)


@st.composite
def traces(draw: st.DrawFn, equal: bool = False, most_moments: int = 30, most_units: int = 8) -> tuple[Trace, int]:
    """A trace and a budget in which every single moment fits."""
    units = draw(st.integers(1, most_units))
    sizes = (
        [draw(st.integers(1, 9))] * units
        if equal
        else draw(st.lists(st.integers(0, 9), min_size=units, max_size=units))
    )
    moments = draw(st.lists(st.tuples(st.integers(0, units - 1), st.integers(0, 12)), max_size=most_moments))
    trace = trace_of(moments, dict(enumerate(sizes)))
    least = max((sizes[m.unit] + m.non_model for m in trace.moments), default=0)
    return trace, least + draw(st.integers(0, 40))


def held_at(trace: Trace, plan: Plan, now: int) -> int:
    return sum(trace.nbytes[unit] for unit in plan.on_device[now]) + trace.moments[now].non_model


def optimum(trace: Trace, budget: int, at_rest: frozenset[int] = frozenset()) -> int:
    """Fewest bytes that any schedule fetches: all subsets that could stay at each moment, tried one by one."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for moment in trace.moments:
        following: dict[frozenset[int], int] = {}
        for resident, cost in best.items():
            for keep in _subsets(resident - {moment.unit}):
                now = keep | {moment.unit}
                if sum(trace.nbytes[unit] for unit in now) + moment.non_model <= budget:
                    is_there = moment.unit in resident or moment.unit in at_rest
                    total = cost + (0 if is_there else trace.nbytes[moment.unit])
                    following[now] = min(total, following.get(now, total))
        best = following
    return min(best.values())


def _subsets(items: frozenset[int]) -> list[frozenset[int]]:
    result = [frozenset()]
    for item in items:
        result += [subset | {item} for subset in result]
    return result


# ---- properties


@given(traces(), st.floats(0, 1), st.integers(0, 5), st.integers(0, 4), st.integers(0, 3), st.booleans())
@settings(max_examples=300)
def test_the_budget_is_never_exceeded_and_what_is_used_is_there(case, ratio, optimizer, gradient, shard, accumulates):
    trace, budget = case
    optimizers, gradients, shards = (dict.fromkeys(trace.nbytes, nbytes) for nbytes in (optimizer, gradient, shard))
    plan = plan_placement(
        trace,
        budget,
        optimizer_bytes=optimizers,
        gradient_bytes=gradients,
        shard_bytes=shards,
        gpu_margin_mem_ratio=ratio,
        accumulates=accumulates,
    )
    reserved = optimizer * len(plan.optimizer_units) + shard * len(plan.shard_units)
    assert reserved <= max(0, budget - max(_working_sets(trace), default=0)) * ratio
    assert not plan.shard_units or len(plan.optimizer_units) == len(trace.nbytes)
    last = len(trace.moments) - 1
    held = []
    for now in range(len(trace.moments)):
        later = {moment.unit for moment in trace.moments[now + 1 :]}
        used = {moment.unit for moment in trace.moments}
        summed = [u for u in plan.optimizer_units if accumulates or (u not in later if u in used else now == last)]
        held.append(held_at(trace, plan, now) + reserved + gradient * len(summed))
    assert all(value <= budget for value in held)
    at_the_end = reserved + gradient * len(plan.optimizer_units)  # all there is where nothing runs
    assert plan.peak_bytes == max(held, default=at_the_end) <= budget
    for now, moment in enumerate(trace.moments):
        assert moment.unit in plan.on_device[now]


@given(traces())
@settings(max_examples=200)
def test_what_comes_to_the_device_is_fetched_once(case):
    trace, budget = case
    plan = plan_placement(trace, budget)
    before: frozenset[int] = frozenset()
    for fetched, there in zip(plan.fetch, plan.on_device, strict=True):
        assert sorted(fetched) == sorted(there - before)
        before = there
    assert sum(map(len, plan.fetch)) == plan.fetches


@given(traces(equal=True, most_moments=10, most_units=5))
@settings(max_examples=150)
def test_with_equal_sizes_the_plan_is_brute_forces_optimum(case):
    trace, budget = case
    assert plan_placement(trace, budget).fetched_bytes == optimum(trace, budget)


@given(traces(equal=True, most_moments=10, most_units=5), st.integers(0, 5))
@settings(max_examples=150)
def test_with_equal_sizes_the_plan_is_the_optimum_too_where_the_first_units_need_no_transfer(case, count):
    trace, budget = case
    states = {unit: 0 if unit < count else 10**6 for unit in trace.nbytes}  # those of the others do not fit
    plan = plan_placement(trace, budget, optimizer_bytes=states, gpu_margin_mem_ratio=1.0)
    at_rest = frozenset(plan.optimizer_units)
    assert at_rest == {*list(trace.nbytes)[:count]}
    assert plan.fetched_bytes == optimum(trace, budget, at_rest)
    for now, moment in enumerate(trace.moments):
        soon = {other.unit for other in trace.moments[now : now + 2]}
        assert moment.unit in plan.on_device[now] and plan.on_device[now] & at_rest <= soon


@given(traces(equal=True))
@settings(max_examples=150)
def test_with_equal_sizes_furthest_next_use_fetches_no_more_often_than_lru_and_every_static_split(case):
    trace, budget = case
    fetches = plan_placement(trace, budget).fetches
    assert fetches == len(simulate(trace, budget, furthest_next_use(trace)))
    assert fetches <= len(simulate(trace, budget, least_recent_use(trace)))
    for pinned in _subsets(frozenset(list(trace.nbytes)[:4])):
        assert fetches <= len(simulate(trace, budget, static_split(trace, pinned)))


@given(traces())
@settings(max_examples=150)
def test_with_unequal_sizes_no_more_bytes_are_fetched_than_by_lru_and_static_splits_of_the_first_units(case):
    trace, budget = case
    plan = plan_placement(trace, budget)
    firsts = list(dict.fromkeys(moment.unit for moment in trace.moments))
    keys = [least_recent_use(trace), *(static_split(trace, firsts[:k]) for k in range(len(firsts) + 1))]
    assert all(plan.fetched_bytes <= fetched_bytes(trace, simulate(trace, budget, key)) for key in keys)


def test_with_unequal_sizes_furthest_next_use_alone_can_be_beaten():
    # The large unit is needed last, so it is dropped for a small one; keeping it costs two small fetches instead.
    trace = trace_of([(unit, 0) for unit in (0, 1, 2, 1, 2, 0)], {0: 10, 1: 1, 2: 1})
    furthest = fetched_bytes(trace, simulate(trace, 11, furthest_next_use(trace)))
    best = fetched_bytes(trace, best_stays(trace, 11))
    assert (furthest, best, optimum(trace, 11)) == (22, 14, 14)


def test_planning_takes_no_more_simulations_for_more_units(monkeypatch):
    asked = []
    monkeypatch.setattr(gemini_plan, "simulate", lambda *args: asked.append(args) or simulate(*args))
    trace = trace_of(
        [(unit, 0) for unit in (*range(40), *reversed(range(40)))], {0: 2} | dict.fromkeys(range(1, 40), 1)
    )
    plan_placement(trace, 20)
    assert len(asked) == 2 + gemini_plan.MOST_SPLITS


# ---- what it means for a model


def test_backward_finds_the_last_units_in_place_and_a_cycle_one_short_of_memory_is_fetched_once_not_always():
    trace = forward_and_backward(units=10, nbytes=1)
    for room in range(1, 11):
        plan = plan_placement(trace, room)
        assert plan.fetches == 20 - room  # what backward needs first has stayed: `room` units are fetched once
    cyclic = trace_of([(now % 5, 0) for now in range(20)], dict.fromkeys(range(5), 1))
    assert len(simulate(cyclic, 4, least_recent_use(cyclic))) == 20
    assert plan_placement(cyclic, 4).fetches == 5 + 3  # each later round fetches one: what was dropped for the last


def test_activations_push_parameters_out_and_fetches_go_ahead_as_far_as_there_is_room():
    activations = [0, 2, 4, 6, 6, 4, 2, 0]
    trace = forward_and_backward(units=4, nbytes=3, non_model=activations)
    plan = plan_placement(trace, 12)
    assert plan.peak_bytes <= 12
    assert plan.fetch[0] == (0, 1, 2, 3)[: len(plan.fetch[0])]
    assert len(plan.fetch[0]) > 1, "there is room for more than the first unit before the activations come"
    first = [next(now for now, fetched in enumerate(plan.fetch) if unit in fetched) for unit in range(4)]
    assert first == sorted(first)


def test_the_margin_takes_the_first_units_optimizer_shards_and_then_shards_of_parameters():
    trace = forward_and_backward(units=4, nbytes=10, non_model=20)
    sizes = {"optimizer_bytes": dict.fromkeys(range(4), 15), "shard_bytes": dict.fromkeys(range(4), 5)}
    plan = plan_placement(trace, 100, **sizes, gpu_margin_mem_ratio=0.8)
    # floor(60 x 0.8 / 15): beyond the unit that runs and the next
    assert (plan.optimizer_units, plan.shard_units) == ((0, 1, 2), ())
    assert plan.fetches == 5 and plan.peak_bytes == 95  # three units at a time beside 45 bytes of states
    plan = plan_placement(trace, 145, **sizes, gpu_margin_mem_ratio=0.7)
    assert (plan.optimizer_units, plan.shard_units) == ((0, 1, 2, 3), (0, 1))  # 60 + 10 of 0.7 x 105
    assert plan.fetch[0] == (0, 1, 2, 3) and (plan.fetches, plan.peak_bytes) == (2, 130)  # units 0 and 1 are there
    none = plan_placement(trace, 100, **sizes)
    assert none.optimizer_units == none.shard_units == () and none.fetches == 4


def test_states_never_take_the_room_in_which_the_next_unit_comes():
    trace = forward_and_backward(units=6, nbytes=10, non_model=[0, 4, 8, 8, 9, 9, 9, 9, 8, 8, 4, 0])
    for budget in range(29, 120):
        plan = plan_placement(trace, budget, optimizer_bytes=dict.fromkeys(range(6), 7), gpu_margin_mem_ratio=1.0)
        ahead = [later for later, moment in enumerate(trace.moments[1:]) if moment.unit in plan.on_device[later]]
        assert len(ahead) == 11, f"budget {budget}: every unit is there a moment before its turn"


def test_states_of_the_first_units_that_fit():
    assert first_that_fit(dict.fromkeys("abcd", 12), 12 * 2.9) == ("a", "b")
    assert first_that_fit({0: 5, 1: 7, 2: 1}, 11) == (0,)  # in order: no later, smaller one jumps the queue
    assert first_that_fit({}, 100) == ()


def test_a_budget_that_one_moment_exceeds_is_refused_with_what_to_change():
    trace = forward_and_backward(units=2, nbytes=10, non_model=[0, 5, 5, 0])
    with pytest.raises(ValueError, match="moment 1 .* needs 10 .* beside 5 .*--checkpoint-activations"):
        plan_placement(trace, 14)
    with pytest.raises(ValueError, match="gpu_margin_mem_ratio"):
        plan_placement(trace, 100, gpu_margin_mem_ratio=1.5)


# ---- tracing and replaying


class FakeMeter:
    """A device whose use a test writes down."""

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0

    def used_bytes(self) -> int:
        return self.used

    def free_bytes(self) -> int:
        return self.total - self.used


def test_a_moments_non_model_bytes_are_the_most_that_was_seen_in_it():
    meter, model = FakeMeter(1000), [0]
    tracer = Tracer(meter, lambda: model[0])
    for unit, before, within, after in ((0, 10, 10, 30), (1, 30, 80, 50), (0, 50, 20, 0)):
        model[0] = 100  # fetched by hand
        meter.used = 100 + before
        tracer.use(unit)
        meter.used = 100 + within
        tracer.sample()
        meter.used = 100 + after
    assert tracer.finish() == (Moment(0, 30), Moment(1, 80), Moment(0, 50))


def test_a_replay_gives_what_the_plan_fetches_and_keeps_in_every_iteration():
    plan = plan_placement(forward_and_backward(units=3, nbytes=1), 2)
    replay = Replay(plan)
    for _ in range(2):
        for unit, fetched, after in zip((0, 1, 2, 2, 1, 0), plan.fetch, [*plan.on_device[1:], set()], strict=True):
            assert replay.advance(unit) == fetched
            assert {unit for unit in range(3) if replay.stays(unit)} == after
        replay.finish()


@pytest.mark.parametrize(
    ("string", "moment", "what"),
    [
        ((1,), 0, "unit 1 is used, and the plan expects unit 0"),
        ((0, 2), 0, "unit 2 is used, and the plan expects unit 1"),
        ((0, 1, 2, 2, 1, 0, 0), 5, "unit 0 is used, and the plan expects the end of the iteration"),
        ((0, 1, 2), 2, "the iteration ends, and the plan expects unit 2"),
        ((0, 0), 0, "unit 0 is used, and the plan expects unit 1"),
    ],
)
def test_another_string_is_a_deviation_that_says_where(string, moment, what):
    replay = Replay(plan_placement(forward_and_backward(units=3, nbytes=1), 2))
    with pytest.raises(Deviation, match=f"moment {moment}: {what}"):
        for unit in string:
            replay.advance(unit)
        replay.finish()
