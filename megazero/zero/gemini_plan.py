"""Gemini's planner: from the uses of one traced iteration to what lies on the device at each moment. Pure functions of numbers.

The host keeps the authoritative copy of every unit's parameters, so that eviction is a drop and costs nothing; a fetch costs a
transfer. The budget is the device's, and what it leaves for parameters changes from moment to moment with the non-model bytes
(activations and temporaries). Since the string of uses is known, the unit to drop is the one whose next use lies furthest
ahead (Belady 1966); that stays optimal when the room changes (Peserico, arXiv:1304.6007), as long as units have one size. With
unequal sizes the optimum is NP-hard: the plan is then the cheapest, in bytes fetched, of furthest next use, least recent use, and
every static split that pins the first k units.

Memory is given away in this order: to what each moment needs and the next one will; of the margin that is left, to optimizer
shards of the first units, and then to their parameters' shards; to parameters that stay until they are used again; and to
fetches further ahead. States come before stays because they save more per byte: 18 bytes that rest on the device spare an
element of a bf16 model some 30 bytes of host memory traffic, in an update that nothing hides, and the gradient's way to the
host; the same bytes lent to parameters spare as many of a fetch, which runs beside computing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from megazero.zero.gemini_trace import Moment, Trace

NEVER = 1 << 62  # the moment of a use that does not come

# ---- which units are on the device while they are needed


@dataclass(frozen=True)
class Stay:
    """One time that a unit lies on the device: from moment `fetch` to moment `drop`, exclusive."""

    unit: int
    fetch: int  # when the transfer starts at the latest: the first use
    drop: int  # just behind the last use


# Of (unit, moment): the resident unit with the largest is dropped first.
Key = Callable[[int, int], float]


def simulate(trace: Trace, budget: int, key: Key) -> list[Stay]:
    """The stays of fetching on demand, and dropping the resident unit with the largest `key` while there is no room.

    A unit that is dropped goes as soon as its last use is over: nothing would be gained by keeping it. Stays come in the order
    of their fetches.

    Raises:
        ValueError: a moment alone needs more than the budget.
    """
    since: dict[int, int] = {}  # moment of the fetch of each resident unit
    last_use: dict[int, int] = {}
    stays: list[Stay] = []
    for now, moment in enumerate(trace.moments):
        _check_room(trace, now, budget)
        since.setdefault(moment.unit, now)
        last_use[moment.unit] = now
        held = moment.non_model + sum(trace.nbytes[unit] for unit in since)
        while held > budget:
            victim = max((key(unit, now), unit) for unit in since if unit != moment.unit)[1]
            stays.append(Stay(victim, since.pop(victim), last_use[victim] + 1))
            held -= trace.nbytes[victim]
    stays += [Stay(unit, start, last_use[unit] + 1) for unit, start in since.items()]
    return sorted(stays, key=lambda stay: stay.fetch)


def _check_room(trace: Trace, now: int, budget: int) -> None:
    moment = trace.moments[now]
    needed = trace.nbytes[moment.unit]
    if needed + moment.non_model > budget:
        raise ValueError(
            f"Gemini's budget of {budget} bytes on the device is too small: moment {now} of the traced iteration needs {needed} "
            f"for the parameters of unit {moment.unit} beside {moment.non_model} of activations and temporaries. Use a smaller "
            "--batch-size, --checkpoint-activations, more ranks, or smaller units."
        )


def furthest_next_use(trace: Trace) -> Key:
    """Drops what is needed again last, or never."""
    uses = _uses(trace)

    def next_use(unit: int, now: int) -> float:
        later = bisect_right(uses[unit], now)
        return uses[unit][later] if later < len(uses[unit]) else NEVER

    return next_use


def least_recent_use(trace: Trace) -> Key:
    """Drops what has not been used for longest (LRU): the best that can be done without a trace."""
    uses = _uses(trace)
    return lambda unit, now: now - uses[unit][bisect_right(uses[unit], now) - 1]


def _uses(trace: Trace) -> dict[int, list[int]]:
    """The moments that use each unit."""
    uses: dict[int, list[int]] = {}
    for now, moment in enumerate(trace.moments):
        uses.setdefault(moment.unit, []).append(now)
    return uses


def static_split(trace: Trace, pinned: Iterable[int]) -> Key:
    """Drops what is not `pinned`, the least recent first; pinned units only where nothing else makes room."""
    kept, recency = frozenset(pinned), least_recent_use(trace)
    return lambda unit, now: recency(unit, now) - (NEVER if unit in kept else 0)


def fetched_bytes(trace: Trace, stays: Iterable[Stay]) -> int:
    """Bytes that these stays transfer to the device."""
    return sum(trace.nbytes[stay.unit] for stay in stays)


def best_stays(trace: Trace, budget: int) -> list[Stay]:
    """The stays that fetch fewest bytes: the optimum where all units have one size, else the best of the policies here."""
    stays, firsts = simulate(trace, budget, furthest_next_use(trace)), list(_uses(trace))
    if len({trace.nbytes[unit] for unit in firsts}) <= 1:
        return stays
    keys = [least_recent_use(trace), *(static_split(trace, firsts[:k]) for k in range(1, len(firsts) + 1))]
    return min([stays, *(simulate(trace, budget, key) for key in keys)], key=lambda s: fetched_bytes(trace, s))


# ---- the plan


@dataclass(frozen=True)
class Plan:
    """What lies on the device at each moment of an iteration; between two iterations no parameters do.

    Attributes:
        moments: of the traced iteration.
        fetch: the units whose transfer starts at each moment, in this order.
        on_device: the units there at each moment, those on their way included; the others are dropped before anything is fetched.
        optimizer_units: whose optimizer shards rest on the device.
        shard_units: whose shards of parameters rest there as well, and so have no transfer at all.
        margin: bytes beyond what each moment needs and the next one will.
        fetches: units fetched per iteration.
        fetched_bytes: of these.
        peak_bytes: the most on the device at any moment, all included; at most `budget`.
    """

    moments: tuple[Moment, ...]
    fetch: tuple[tuple[int, ...], ...]
    on_device: tuple[frozenset[int], ...]
    optimizer_units: tuple[int, ...]
    shard_units: tuple[int, ...]
    budget: int
    margin: int
    fetches: int
    fetched_bytes: int
    peak_bytes: int


def plan_placement(
    trace: Trace,
    budget: int,
    *,
    optimizer_bytes: Mapping[int, int] | None = None,
    shard_bytes: Mapping[int, int] | None = None,
    gpu_margin_mem_ratio: float = 0.0,
) -> Plan:
    """The plan that fetches fewest bytes beside the states on the device, and never has more than `budget` bytes there.

    Args:
        budget: bytes of the device that this process may use.
        optimizer_bytes: of each unit's optimizer shard, in the order of the units: the first ones get the margin.
        shard_bytes: of each unit's shard of parameters, in that order; they follow when all optimizer shards have a place.
        gpu_margin_mem_ratio: share of the margin that these states may take.

    Raises:
        ValueError: a moment alone needs more than the budget, or the ratio is not in [0, 1].
    """
    if not 0 <= gpu_margin_mem_ratio <= 1:
        raise ValueError(f"gpu_margin_mem_ratio must lie in [0, 1], got {gpu_margin_mem_ratio}.")
    optimizer_bytes, shard_bytes = optimizer_bytes or {}, shard_bytes or {}
    for now in range(len(trace.moments)):
        _check_room(trace, now, budget)
    margin = max(0, budget - max(_working_sets(trace), default=0))
    room = margin * gpu_margin_mem_ratio
    optimizers = first_that_fit(optimizer_bytes, room)
    reserved = sum(optimizer_bytes[unit] for unit in optimizers)
    shards = first_that_fit(shard_bytes, room - reserved) if len(optimizers) == len(optimizer_bytes) else ()
    reserved += sum(shard_bytes[unit] for unit in shards)
    stays = best_stays(trace, budget - reserved)
    held = _held(trace, stays)
    stays = _ahead(trace, stays, [budget - reserved - now for now in held])
    on_device = tuple(
        frozenset(stay.unit for stay in stays if stay.fetch <= now < stay.drop) for now in range(len(held))
    )
    return Plan(
        trace.moments,
        tuple(tuple(stay.unit for stay in stays if stay.fetch == now) for now in range(len(held))),
        on_device,
        optimizers,
        shards,
        budget,
        margin,
        len(stays),
        fetched_bytes(trace, stays),
        max(_held(trace, stays), default=0) + reserved,
    )


def first_that_fit(sizes: Mapping[int, int], room: float) -> tuple[int, ...]:
    """The first ones, in the mapping's order, whose states fit `room` bytes together.

    Of states of one size that is floor(room / bytes) of them (PatrickStar, arXiv:2108.05818).
    """
    kept: list[int] = []
    for each, nbytes in sizes.items():
        room -= nbytes
        if room < 0:
            break
        kept.append(each)
    return tuple(kept)


def _working_sets(trace: Trace) -> list[int]:
    """Bytes that each moment needs on the device, with the parameters of the next one, which come meanwhile."""
    needed = [{moment.unit for moment in trace.moments[now : now + 2]} for now in range(len(trace.moments))]
    return [
        moment.non_model + sum(trace.nbytes[unit] for unit in units)
        for moment, units in zip(trace.moments, needed, strict=True)
    ]


def _held(trace: Trace, stays: Iterable[Stay]) -> list[int]:
    """Bytes on the device at each moment, non-model ones included."""
    held = [moment.non_model for moment in trace.moments]
    for stay in stays:
        for now in range(stay.fetch, stay.drop):
            held[now] += trace.nbytes[stay.unit]
    return held


def _ahead(trace: Trace, stays: Iterable[Stay], free: list[int]) -> list[Stay]:
    """The stays with their fetches moved as far ahead as the free bytes permit; what is needed first chooses first.

    A fetch that reaches the end of the unit's last stay is none: with unequal sizes, a drop can make more room than was needed.
    """
    moved: list[Stay] = []
    latest: dict[int, int] = {}  # index in `moved` of each unit's last stay
    for stay in stays:
        before = latest.get(stay.unit)
        end = 0 if before is None else moved[before].drop
        nbytes, start = trace.nbytes[stay.unit], stay.fetch
        while start > end and free[start - 1] >= nbytes:
            start -= 1
            free[start] -= nbytes
        if before is not None and start == end:
            moved[before] = Stay(stay.unit, moved[before].fetch, stay.drop)
        else:
            latest[stay.unit] = len(moved)
            moved.append(Stay(stay.unit, start, stay.drop))
    return moved
