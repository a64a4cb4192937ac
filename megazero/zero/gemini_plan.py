"""Gemini's planner: from the uses in one traced iteration to what is on the device at each moment. Pure functions of numbers.

The host keeps the authoritative copy of every unit's parameters, so eviction drops a copy and costs nothing. A fetch costs a
transfer. The device sets the budget. The part of it that is left for parameters changes from moment to moment with the non-model
bytes (activations and temporaries). Since the sequence of uses is known, the unit to drop is the one whose next use is furthest
ahead (Belady 1966). With units of one size that is optimal even when the room changes (Peserico, arXiv:1304.6007). With unequal
sizes the optimum is NP-hard. The plan is then the cheapest, in bytes fetched, of these policies: furthest next use, least recent
use, and static splits that pin the first k units, for up to 16 k.

Memory is allotted in this order:

1. what each moment needs and the next one will need;
2. a share of what then remains: optimizer shards of the first units, whose master weights serve as the shards of their
   parameters, with the reduced gradients of these units, and after them shards of frozen parameters;
3. parameters that stay until they are used again;
4. fetches further ahead.

States come before stays because they save more per byte. 18 bytes that rest on the device save an element of a bf16 model some 30
bytes of host memory traffic, in an update that nothing hides, and the gradient's transfer to the host. The same bytes lent to
parameters save as many bytes of a fetch, which overlaps computing. A unit whose states all rest on the device needs no transfer.
It is gathered one moment ahead and dropped after its use, as without a plan, which leaves the room for stays to others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from megazero.zero.gemini_trace import Moment, Trace

NEVER = 1 << 62  # the moment of a use that never comes
MOST_SPLITS = 16  # static splits that are tried: each takes time quadratic in the units; more gain next to nothing

# ---- which units are on the device while they are needed


@dataclass(frozen=True)
class Stay:
    """One period that a unit is on the device: from moment `fetch` to moment `drop`, exclusive."""

    unit: int
    fetch: int  # the latest start of the transfer: the first use
    drop: int  # the moment after the last use


# A function of (unit, moment): the resident unit with the largest value is dropped first.
Key = Callable[[int, int], float]


def simulate(trace: Trace, budget: int, key: Key) -> list[Stay]:
    """The stays that result from fetching on demand, and dropping the resident unit with the largest `key` while room is short.

    A unit to be dropped is dropped as soon as its last use is over, because keeping it would gain nothing. Stays are returned in
    the order of their fetches.

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
    """Drops the unit that is needed again last, or never."""
    uses = _uses(trace)

    def next_use(unit: int, now: int) -> float:
        later = bisect_right(uses[unit], now)
        return uses[unit][later] if later < len(uses[unit]) else NEVER

    return next_use


def least_recent_use(trace: Trace) -> Key:
    """Drops the least recently used unit (LRU): the best that can be done without a trace."""
    uses = _uses(trace)
    return lambda unit, now: now - uses[unit][bisect_right(uses[unit], now) - 1]


def _uses(trace: Trace) -> dict[int, list[int]]:
    """The moments that use each unit."""
    uses: dict[int, list[int]] = {}
    for now, moment in enumerate(trace.moments):
        uses.setdefault(moment.unit, []).append(now)
    return uses


def static_split(trace: Trace, pinned: Iterable[int]) -> Key:
    """Drops units that are not `pinned`, least recently used first; drops pinned units only if nothing else makes room."""
    kept, recency = frozenset(pinned), least_recent_use(trace)
    return lambda unit, now: recency(unit, now) - (NEVER if unit in kept else 0)


def fetched_bytes(trace: Trace, stays: Iterable[Stay]) -> int:
    """Bytes that these stays transfer to the device."""
    return sum(trace.nbytes[stay.unit] for stay in stays)


def best_stays(trace: Trace, budget: int) -> list[Stay]:
    """The stays that fetch the fewest bytes: the optimum if all units have one size, else the best of the policies above."""
    stays, firsts = simulate(trace, budget, furthest_next_use(trace)), list(_uses(trace))
    if len({trace.nbytes[unit] for unit in firsts} - {0}) <= 1:
        return stays
    splits = sorted({len(firsts) * k // MOST_SPLITS for k in range(1, MOST_SPLITS + 1)})
    keys = [least_recent_use(trace), *(static_split(trace, firsts[:k]) for k in splits)]
    return min([stays, *(simulate(trace, budget, key) for key in keys)], key=lambda s: fetched_bytes(trace, s))


# ---- the plan


@dataclass(frozen=True)
class Plan:
    """What is on the device at each moment of an iteration. Between two iterations no parameters are.

    Attributes:
        moments: those of the traced iteration.
        fetch: for each moment, the units whose transfers start then, in this order.
        on_device: for each moment, the units there, including those on their way; others are dropped before anything is fetched.
        optimizer_units: units whose optimizer shards rest on the device, and with them the shards of their trained parameters.
        shard_units: units whose shards of frozen parameters rest there.
        fetches: number of fetches per iteration that are transfers: of units that do not rest on the device.
        fetched_bytes: bytes of these transfers.
        peak_bytes: most bytes on the device at any moment, everything included; at most `budget`.
    """

    moments: tuple[Moment, ...]
    fetch: tuple[tuple[int, ...], ...]
    on_device: tuple[frozenset[int], ...]
    optimizer_units: tuple[int, ...]
    shard_units: tuple[int, ...]
    budget: int
    fetches: int
    fetched_bytes: int
    peak_bytes: int


def plan_placement(
    trace: Trace,
    budget: int,
    *,
    optimizer_bytes: Mapping[int, int] | None = None,
    gradient_bytes: Mapping[int, int] | None = None,
    shard_bytes: Mapping[int, int] | None = None,
    gpu_margin_mem_ratio: float = 0.0,
    accumulates: bool = False,
) -> Plan:
    """The plan that fetches the fewest bytes, given the states on the device, and never has more than `budget` bytes there.

    Args:
        budget: bytes on the device that this process may use.
        optimizer_bytes: bytes of each unit's optimizer shard, in the order of the units; the first ones get the margin.
        gradient_bytes: bytes of each unit's reduced gradients, which lie beside its optimizer shard from its last use on.
        shard_bytes: bytes of each unit's shard of frozen parameters, in the same order; they get what is left when all optimizer
            shards fit.
        gpu_margin_mem_ratio: share of the margin that these states may take.
        accumulates: the gradients of an iteration are added to those of iterations before it, so they are there all the time.

    Raises:
        ValueError: a moment alone needs more than the budget, or the ratio is not in [0, 1].
    """
    if not 0 <= gpu_margin_mem_ratio <= 1:
        raise ValueError(f"gpu_margin_mem_ratio must lie in [0, 1], got {gpu_margin_mem_ratio}.")
    optimizer_bytes, gradient_bytes, shard_bytes = optimizer_bytes or {}, gradient_bytes or {}, shard_bytes or {}
    margins = [max(0, budget - needed) for needed in _working_sets(trace)]
    room = [margin * gpu_margin_mem_ratio for margin in margins or [budget]]
    optimizers, reserved = _resting(trace, room, optimizer_bytes, gradient_bytes, accumulates)
    left = min(most - taken for most, taken in zip(room, reserved, strict=True))
    shards = first_that_fit(shard_bytes, left) if len(optimizers) == len(optimizer_bytes) else ()
    reserved = [taken + sum(shard_bytes[unit] for unit in shards) for taken in reserved]
    at_rest = {unit for unit in optimizers if not shard_bytes.get(unit)} | (set(shards) & set(optimizers))
    # For the other units: what lies beside them, units at rest included.
    beside = Trace(
        tuple(
            Moment(moment.unit, moment.non_model + taken + (trace.nbytes[moment.unit] if moment.unit in at_rest else 0))
            for moment, taken in zip(trace.moments, reserved, strict=False)
        ),
        {unit: 0 if unit in at_rest else nbytes for unit, nbytes in trace.nbytes.items()},
    )
    stays = best_stays(beside, budget)
    free = [budget - held for held in _held(beside, stays)]
    uses = [Stay(moment.unit, now, now + 1) for now, moment in enumerate(trace.moments) if moment.unit in at_rest]
    stays = sorted([*uses, *(stay for stay in stays if stay.unit not in at_rest)], key=lambda stay: stay.fetch)
    stays = _ahead(trace, stays, free, at_rest)
    held = [taken + now for taken, now in zip(reserved, _held(trace, stays), strict=False)]
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
        sum(stay.unit not in at_rest for stay in stays),
        fetched_bytes(beside, stays),
        max(held, default=max(reserved)),
    )


def _resting(
    trace: Trace,
    room: list[float],
    optimizer_bytes: Mapping[int, int],
    gradient_bytes: Mapping[int, int],
    accumulates: bool,
) -> tuple[tuple[int, ...], list[int]]:
    """The first units whose optimizer shards and reduced gradients fit the room of every moment, and their bytes by moment.

    The gradients of a unit that is not used, such as the root, are reduced when the backward is over.
    """
    last, reserved, units = {unit: uses[-1] for unit, uses in _uses(trace).items()}, [0] * len(room), []
    for unit, nbytes in optimizer_bytes.items():
        gradient, comes = gradient_bytes.get(unit, 0), 0 if accumulates else last.get(unit, len(room) - 1)
        more = [taken + nbytes + (gradient if now >= comes else 0) for now, taken in enumerate(reserved)]
        if any(taken > most for taken, most in zip(more, room, strict=True)):
            break
        units.append(unit)
        reserved = more
    return tuple(units), reserved


def first_that_fit(sizes: Mapping[int, int], room: float) -> tuple[int, ...]:
    """The first keys, in the mapping's order, whose sizes add up to at most `room`.

    If all have one size, that is floor(room / size) of them (PatrickStar, arXiv:2108.05818).
    """
    kept: list[int] = []
    for each, nbytes in sizes.items():
        room -= nbytes
        if room < 0:
            break
        kept.append(each)
    return tuple(kept)


def _working_sets(trace: Trace) -> list[int]:
    """Bytes that each moment needs on the device, including the parameters of the next one, which arrive meanwhile."""
    needed = [{moment.unit for moment in trace.moments[now : now + 2]} for now in range(len(trace.moments))]
    return [
        moment.non_model + sum(trace.nbytes[unit] for unit in units)
        for moment, units in zip(trace.moments, needed, strict=True)
    ]


def _held(trace: Trace, stays: Iterable[Stay]) -> list[int]:
    """Bytes on the device at each moment, including non-model bytes."""
    held = [moment.non_model for moment in trace.moments]
    for stay in stays:
        for now in range(stay.fetch, stay.drop):
            held[now] += trace.nbytes[stay.unit]
    return held


def _ahead(trace: Trace, stays: Iterable[Stay], free: list[int], at_rest: Collection[int]) -> list[Stay]:
    """The stays with their fetches moved ahead, as far as the free bytes permit; units needed first choose first.

    Units at rest move by one moment: they have nothing to wait for but other ranks.

    If a fetch reaches back to the end of the unit's previous stay, the two stays become one, and the fetch is dropped. With
    unequal sizes that happens, because a drop can make more room than was needed.
    """
    moved: list[Stay] = []
    latest: dict[int, int] = {}  # index in `moved` of each unit's last stay
    for stay in stays:
        before = latest.get(stay.unit)
        end = 0 if before is None else moved[before].drop
        nbytes, start = trace.nbytes[stay.unit], stay.fetch
        earliest = max(end, start - 1) if stay.unit in at_rest else end
        while start > earliest and free[start - 1] >= nbytes:
            start -= 1
            free[start] -= nbytes
        if before is not None and start == end:
            moved[before] = Stay(stay.unit, moved[before].fetch, stay.drop)
        else:
            latest[stay.unit] = len(moved)
            moved.append(Stay(stay.unit, start, stay.drop))
    return moved
