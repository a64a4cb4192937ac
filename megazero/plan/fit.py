"""Whether a plan fits what a machine offers, what to change if it does not, and the largest batch and model that fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megazero.plan.change import Change, at_lower_stages, changes, last_resorts
from megazero.plan.job_plan import JobPlan, Setup, activation_modes, plan_job
from megazero.plan.limits import Limits
from megazero.zero.memory import size

MOST_ERROR = 10  # an estimate of activations is not wrong by this factor
# The most that are tried: a plan of so many layers takes seconds.
MOST_BATCH, MOST_LAYERS, MOST_BUDGET_GB = 1 << 16, 1 << 12, 1 << 12


@dataclass(frozen=True)
class Problem:
    """A resource of which a job needs more than there is."""

    resource: str  # with the unit that shares it, as in "device memory per rank"
    needed: int  # bytes
    available: int
    setting: str  # what to change
    is_certain: bool  # otherwise only a job that reaches its peak needs it

    def __str__(self) -> str:
        """One sentence."""
        verb = "needs" if self.is_certain else "will need about"
        return f"the job {verb} {size(self.needed)} of {self.resource}, and {size(self.available)} are there. {self.setting}"


@dataclass(frozen=True)
class _Need:
    """What a job takes of one resource."""

    resource: str
    certain: int  # bytes of the states alone
    in_all: int  # bytes, activations included
    available: int | None
    setting: Callable[[bool], str]  # what to change; its argument: whether the states alone are too large
    limit_flag: str | None = None  # flag of `python -m megazero.plan` that sets `available`

    @property
    def excess(self) -> int:
        return 0 if self.available is None else max(0, self.in_all - self.available)


def _needs(plan: JobPlan, limits: Limits) -> list[_Need]:
    setup, ranks = plan.setup, plan.setup.ranks_per_node
    states, activations = plan.per_node(plan.states.disk), plan.per_node(plan.activations.kept_on_disk)

    def disk(certain: int, in_all: int, available: int | None, flag: str) -> _Need:
        larger = f"Name a larger disk by {flag}, or use more nodes."
        return _Need("disk per node", certain, in_all, available, lambda _: larger, "--nvme")

    if limits.checkpoint_disk is None:
        flag = "--nvme-path" if states else "--checkpoint-nvme-path"
        on_disk = [disk(states, states + activations, limits.disk, flag)]
    else:
        on_disk = [
            disk(states, states, limits.disk, "--nvme-path"),
            disk(0, activations, limits.checkpoint_disk, "--checkpoint-nvme-path"),
        ]
    if setup.shape.device_type == "cpu":
        where = f"host memory for {ranks} ranks" if ranks > 1 else "host memory"
        certain, in_all = plan.per_node(plan.device_states + plan.states.host), plan.per_node(plan.device + plan.host)
        return [_Need(where, certain, in_all, limits.host, partial(_for_device, setup), "--host-memory"), *on_disk]
    host_states, host = plan.per_node(plan.states.host), plan.per_node(plan.host)
    unlock = "Raise the limit (ulimit -l), or give --no-use-pin-memory."
    locked = _Need("locked memory per rank", plan.states.states_at("cpu"), plan.host, limits.memlock, lambda _: unlock)
    less = partial(_for_device, setup)
    return [
        _Need("device memory per rank", plan.device_states, plan.device, limits.device, less, "--gpu-memory"),
        _Need("host memory per node", host_states, host, limits.host, lambda _: _for_host(plan), "--host-memory"),
        *([locked] if setup.states.zero.pin_memory else []),
        *on_disk,
    ]


def check_fits(plan: JobPlan, limits: Limits) -> list[Problem]:
    """What does not fit; empty if everything does, as far as the limits are known.

    A problem is certain if the states alone, counted to the byte, are too large, or if all of it is, by far; activations are an
    estimate.
    """
    problems = []
    for need in _needs(plan, limits):
        if need.excess and need.available is not None:
            is_of_states = need.certain > need.available
            needed = need.certain if is_of_states else need.in_all
            is_certain = is_of_states or needed > MOST_ERROR * need.available
            problems.append(Problem(need.resource, needed, need.available, need.setting(is_of_states), is_certain))
    return problems


def unchecked(plan: JobPlan, limits: Limits) -> list[tuple[str, int, str]]:
    """Resources without a known limit: name as in `Problem`, bytes that the job needs, and the flag that sets the limit."""
    unknown = (need for need in _needs(plan, limits) if need.available is None and need.in_all)
    return [(need.resource, need.in_all, need.limit_flag) for need in unknown if need.limit_flag is not None]


def _for_device(setup: Setup, is_of_states: bool) -> str:
    ways = [change.flags for change in what_takes_less(setup, is_of_states)]
    what = "Its states alone need that much. " if is_of_states else ""
    return what + (f"{', or '.join(ways)} takes less." if ways else "Use more ranks, or a smaller model.")


def what_takes_less(setup: Setup, of_states: bool = False) -> list[Change]:
    """The single changes that lower what a device holds at its peak, or what it then holds of the states alone."""

    def held(setup: Setup) -> int:
        plan = plan_job(setup)
        on_device, on_host = (plan.device_states, plan.states.host) if of_states else (plan.device, plan.host)
        return on_device + (on_host if setup.shape.device_type == "cpu" else 0)  # which is one memory

    now = held(setup)
    return [change for change in changes(setup) if held(change.setup) < now]


def _for_host(plan: JobPlan) -> str:
    flags = [change.flags for change in last_resorts(plan.setup) if plan_job(change.setup).host < plan.host]
    flags += ["no --async-save"] if plan.setup.config.checkpoint.async_save else []
    return f"Use {', '.join([*flags, 'fewer ranks per node'])}, or more nodes."


def what_to_change(setup: Setup, limits: Limits) -> list[Change]:
    """Ways to make the job fit: every single change that is enough; if there is none, changes combined until it fits.

    Of these, each is the one that saves most beside those before it; in the end, the stage is as low as the others permit.

    Empty if it fits already, or if nothing helps.
    """
    if _fits(setup, limits):
        return []
    for single in (changes(setup), last_resorts(setup)):
        if ways := [change for change in single if _fits(change.setup, limits)]:
            return [each for change in ways for each in (*_recomputing_less(setup, change, limits), change)]
    start, values = setup, dict[str, Any]()
    while True:
        steps = (*changes(setup), *last_resorts(setup))
        best = min(steps, key=lambda change: _excess(change.setup, limits), default=None)
        if best is None or _excess(best.setup, limits) >= _excess(setup, limits):
            return []
        values = {name: value for name, value in values.items() if name not in best.values} | dict(best.values)
        setup = best.setup
        if _fits(setup, limits):
            lower = (change for change in at_lower_stages(start, values) if _fits(change.setup, limits))
            return [next(lower, Change(values, setup))]


def _recomputing_less(setup: Setup, change: Change, limits: Limits) -> list[Change]:
    """Where `change` is to recompute everything: --recompute auto with the most whole GB that fit, if some block need not."""
    if setup.model.recompute_mode == "full" or change.setup.model.recompute_mode != "full":
        return []
    all_of_it = activation_modes(setup)["--checkpoint-activations"]
    budget = _largest(setup, limits, "recompute_budget_gb", MOST_BUDGET_GB, recompute="auto")
    if budget * 1e9 < all_of_it.kept + 2 * all_of_it.block:  # the last block recomputes nothing in any case
        return []
    values = {"recompute": "auto", "recompute_budget_gb": budget}
    return [Change(values, setup.changed(**values))]


def _excess(setup: Setup, limits: Limits) -> int:
    """Missing bytes, summed over all resources except locked memory, which other flags could not save."""
    return sum(need.excess for need in _needs(plan_job(setup), replace(limits, memlock=None)))


def _fits(setup: Setup, limits: Limits) -> bool:
    return _excess(setup, limits) == 0


def largest_batch(setup: Setup, limits: Limits) -> int:
    """The largest micro-batch that fits, everything else being equal; 0 if none does. It divides a global batch that is set."""
    training = setup.config.training
    if training.global_batch_size is None:
        return _largest(setup, limits, "batch_size", MOST_BATCH)
    start_and_increment = (training.rampup_batch_size or ())[:2]
    per_rank = math.gcd(training.global_batch_size, *start_and_increment) // setup.data_parallel_size
    # one by one, as the largest may need least: gradients of one micro-batch need not wait for those of others
    sizes = (n for n in range(min(per_rank, MOST_BATCH), 0, -1) if per_rank % n == 0)
    return next((n for n in sizes if _fits_with(setup, limits, batch_size=n)), 0)


def largest_model(setup: Setup, limits: Limits) -> int:
    """The largest number of layers of this width that fits, everything else being equal; 0 if none does."""
    return _largest(setup, limits, "num_layers", MOST_LAYERS)


def _fits_with(setup: Setup, limits: Limits, **values: Any) -> bool:
    """Whether the job accepts these values of fields and then fits."""
    try:
        return _fits(setup.changed(**values), limits)
    except ValueError:
        return False


def _largest(setup: Setup, limits: Limits, field: str, most: int, **others: Any) -> int:
    low, high = 0, 1
    while high <= most and _fits_with(setup, limits, **{field: high}, **others):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits_with(setup, limits, **{field: middle}, **others) else (low, middle)
    return low
