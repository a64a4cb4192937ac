"""Learning-rate schedules by name: DeepSpeed's, with its parameters and arithmetic, and torch's.

DeepSpeed's schedules count optimizer steps in `last_batch_iteration`: -1 before the first `step()`, then 0, 1, 2, ... A schedule
sets the learning rate when it is made, and again at every step. So the rate of iteration 0 is that of the second optimizer step.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from megazero.logging import ALIKE, get_logger
from megazero.optim.schedule_base import LRSchedule, count, flag, number, per_group
from megazero.option import check_known

logger = get_logger(__name__)

WARMUP_TYPES = ("log", "linear")
SECOND_BETA = 0.99  # OneCycle sets it together with the first beta, the momentum


class WarmupLR(LRSchedule):
    """The learning rate rises from `warmup_min_lr` to `warmup_max_lr` (None: the optimizer's own) and stays.

    lr(i) = min + (max - min) * g with g = log(i + 1) / log(warmup_num_steps) or, linear, i / warmup_num_steps; 1 afterwards.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = _own_rates(optimizer)
        self.min_lrs = per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps, self.warmup_type = _warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group at `last_batch_iteration`."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        rise = self._rise()
        return [low + (high - low) * rise for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _rise(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return _risen(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then linearly down to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _rise(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._rise()
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(LRSchedule):
    """The optimizer's own learning rate times a ratio: up from `warmup_min_ratio` to 1, then a half cosine to `cos_min_ratio`.

    After the warm-up, with x = (i - warmup_num_steps + 1) / (total_num_steps - warmup_num_steps), at most 1:
    ratio = cos_min_ratio + (1 - cos_min_ratio) * (1 + cos(pi x)) / 2. Before the first step the rate is 0.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total(total_num_steps, warmup_num_steps)
        self.warmup_num_steps, self.warmup_type = _warmup(warmup_num_steps, warmup_type)
        self.warmup_min_ratio = number("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = number("cos_min_ratio", cos_min_ratio)
        self.base_lrs = _own_rates(optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group at `last_batch_iteration`."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """The factor on the optimizer's own learning rates at `last_batch_iteration`."""
        i, warmup = self.last_batch_iteration, self.warmup_num_steps
        if i < 0:
            return 0.0
        if i < warmup:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * _risen(i, warmup, self.warmup_type)
        done = min(1.0, (i - warmup + 1) / max(1, self.total_num_steps - warmup))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)


class LRRangeTest(LRSchedule):
    """The learning rate rises from `min_lr`, to find the largest one that trains (Smith, arXiv:1803.09820).

    lr(i) = min_lr * (1 + step_rate * (i + 1) / step_size), the fraction rounded down if `staircase`.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lr = per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = count("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = flag("lr_range_test_staircase", lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group at `last_batch_iteration`."""
        interval = (self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * increase for lr in self.min_lr]


class OneCycle(LRSchedule):
    """The learning rate goes up and down once, the momentum down and up; then both decay (Smith, arXiv:1803.09820).

    With n = i + 1: n / first_step_size of the way from minimum to maximum, then the way back over `second_step_size` steps; if a
    half's `stair_count` is not 0, in that many stairs. k steps after the cycle:
    lr = min_lr / (1 + decay_lr_rate * k / decay_step_size), momentum = max_mom * (1 + decay_mom_rate * k / decay_step_size).
    The momentum is Adam's first beta; its second becomes 0.99. Optimizers without "betas" keep their momentum.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.first_step_size = count("cycle_first_step_size", cycle_first_step_size)
        self.second_step_size = count("cycle_second_step_size", cycle_second_step_size, 0, self.first_step_size)
        self.first_stair_count = count("cycle_first_stair_count", cycle_first_stair_count, 0)
        self.second_stair_count = count("cycle_second_stair_count", cycle_second_stair_count, 0, self.first_stair_count)
        self.decay_step_size = count("decay_step_size", decay_step_size, 0)
        self.decay_lr_rate = number("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = number("decay_mom_rate", decay_mom_rate)
        self.min_moms = per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = flag("cycle_momentum", cycle_momentum)
        if self.cycle_momentum and not all("betas" in group for group in optimizer.param_groups):
            logger.warning(
                "OneCycle leaves the momentum as it is: %s has no betas", type(optimizer).__name__, extra=ALIKE
            )
            self.cycle_momentum = False
        super().__init__(optimizer, last_batch_iteration)

    @property
    def total_size(self) -> int:
        """Steps of the cycle."""
        return self.first_step_size + self.second_step_size

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group at `last_batch_iteration`."""
        if self._steps_of_decay() > 0:
            return [low / (1 + self.decay_lr_rate * self._decay_intervals()) for low in self.min_lrs]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of every parameter group at `last_batch_iteration`; None if the momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < 0:  # the minimum, for the first optimizer step alone: as DeepSpeed has it
            return [(low, SECOND_BETA) for low in self.min_moms]
        if self._steps_of_decay() > 0:
            factor = 1 + self.decay_mom_rate * self._decay_intervals()
            return [(high * factor, SECOND_BETA) for high in self.max_moms]
        height = self._height()
        return [
            (high - (high - low) * height, SECOND_BETA) for low, high in zip(self.min_moms, self.max_moms, strict=True)
        ]

    def _steps_of_decay(self) -> int:
        return self.last_batch_iteration - self.total_size + 1

    def _decay_intervals(self) -> float:
        return self._steps_of_decay() / self.decay_step_size if self.decay_step_size else 0.0

    def _height(self) -> float:
        """How far between minimum (0) and maximum (1)."""
        steps = (self.last_batch_iteration + 1) % self.total_size
        if steps <= self.first_step_size:
            done, size, stairs = steps, self.first_step_size, self.first_stair_count
        else:
            done, size, stairs = self.total_size - steps, self.second_step_size, self.second_stair_count
        return math.floor(done * stairs / size) / stairs if stairs else done / size

    def _apply(self) -> None:
        super()._apply()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas


SCHEDULES: dict[str, type[LRSchedule]] = {
    c.__name__: c for c in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
# torch's schedules whose parameters JSON can hold: not those that take a function, or other schedules.
TORCH_SCHEDULES: dict[str, type] = {
    name: found
    for name, found in vars(lr_scheduler).items()
    if isinstance(found, type)
    and issubclass(found, lr_scheduler.LRScheduler)
    and not (found is lr_scheduler.LRScheduler or name.startswith("_"))
    and not inspect.signature(found).parameters.keys() & {"lr_lambda", "schedulers"}
}
# Of the state of torch's schedules: how far they have come. The rest are parameters.
_PROGRESS = ("last_epoch", "_step_count", "_last_lr", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter")


def scheduler_by_name(type: str, params: Mapping[str, Any]) -> Callable[[Any], Any]:
    """A callable that makes the schedule named `type`, DeepSpeed's or a class of torch.optim.lr_scheduler, for an optimizer.

    Raises:
        ValueError: the name or a parameter is unknown, a parameter is missing, or one has a bad value.
    """
    schedules: dict[str, Any] = {**TORCH_SCHEDULES, **SCHEDULES}
    check_known("there is no learning-rate schedule", [type], schedules)
    schedule, known = schedules[type], dict(inspect.signature(schedules[type]).parameters)
    del known["optimizer"]
    check_known(f"{type} has no parameter", params, known)
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in params:
            raise ValueError(f"{type} needs the parameter {name!r}.")
        if type in TORCH_SCHEDULES and isinstance(params.get(name), str) and not isinstance(parameter.default, str):
            wanted = "true or false" if isinstance(parameter.default, bool) else "a number"
            raise ValueError(f"{type}: {name} must be {wanted}, got {params[name]!r}, a string.")
    if type in TORCH_SCHEDULES:
        schedule = _with_its_own_parameters(schedule)
    # A trial of one step, so that bad values show before anything is built. It has as many groups as a list of rates in `params`
    # has items.
    groups = next(
        (len(params[key]) for key in params if key != "milestones" and isinstance(params[key], (list, tuple))), 1
    )
    trial = [{"params": [torch.zeros(1, device="cpu", requires_grad=True)]} for _ in range(groups)]
    try:
        optimizer = torch.optim.Adam(trial, lr=1.0)
        tried = schedule(optimizer, **params)
        optimizer.step()  # torch's warn of a schedule that is stepped first
        tried.step(**({"metrics": 1.0} if _follows_metric(tried) else {}))
    except (TypeError, AttributeError, KeyError, ZeroDivisionError) as error:  # from torch's; our own are ValueErrors
        raise ValueError(f"{type} does not take {dict(params)}: {error}.") from error
    return lambda optimizer: schedule(optimizer, **params)


def _follows_metric(schedule: Any) -> bool:
    return "metrics" in inspect.signature(schedule.step).parameters


def _with_its_own_parameters(schedule: Any) -> Any:
    """A torch schedule that continues as DeepSpeed's do: after the steps of a saved state, under this object's own parameters."""

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        own = self.state_dict()
        is_same = all(own[key] == state[key] for key in own.keys() & state.keys() - set(_PROGRESS))
        if is_same or _follows_metric(self):
            done = {key: state[key] for key in state.keys() & set(_PROGRESS)}
            schedule.load_state_dict(self, {**own, **done})
            return
        # Not from the saved rates: a LinearLR that takes longer now would rise from them beyond the optimizer's own.
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["initial_lr"] = base
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would rather have as many steps without a number
            self.step(state["last_epoch"])

    return type(schedule.__name__, (schedule,), {"load_state_dict": load_state_dict})


def _own_rates(optimizer: Any) -> list[float]:
    """The optimizer's learning rates; torch's optimizers also take tensors of one element."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def _risen(step: int, num_steps: int, kind: str) -> float:
    """How far the warm-up has come, from 0 to 1."""
    return math.log(step + 1) / math.log(num_steps) if kind == "log" else step / num_steps


def _warmup(num_steps: Any, kind: str) -> tuple[int, str]:
    if kind not in WARMUP_TYPES:
        raise ValueError(f"warmup_type must be one of {', '.join(WARMUP_TYPES)}, got {kind!r}.")
    return max(2, count("warmup_num_steps", num_steps)), kind  # 2: log(1) is 0


def _total(total_num_steps: Any, warmup_num_steps: Any) -> int:
    total = count("total_num_steps", total_num_steps)
    if total < count("warmup_num_steps", warmup_num_steps):
        _warn_of_no_decay(total, warmup_num_steps)
    return total


@functools.cache  # to warn once, although a schedule is also made on trial
def _warn_of_no_decay(total_num_steps: int, warmup_num_steps: int) -> None:
    logger.warning(
        "total_num_steps %s is less than warmup_num_steps %s", total_num_steps, warmup_num_steps, extra=ALIKE
    )
