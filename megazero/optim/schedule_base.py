"""What learning-rate schedules share: counting, setting the rates, and checking parameters that come from a file."""

from __future__ import annotations

import math
from typing import Any


class LRSchedule:
    """Counts optimizer steps, and sets the learning rates of the optimizer's parameter groups; `get_lr` says which.

    Args:
        optimizer: anything with `param_groups`, a list of dicts that hold "lr".
        last_batch_iteration: where to continue; -1 is the start.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = count("last_batch_iteration", last_batch_iteration, -1)
        self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group at `last_batch_iteration`."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The learning rates that this schedule has set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advances by one optimizer step, or to the one that is given."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """What `load_state_dict` needs to continue."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues after the steps in `state`, under this object's own parameters."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self._apply()

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


def per_group(optimizer: Any, name: str, value: Any) -> list[float]:
    """One number for each parameter group, from one for all or a list. Raises ValueError otherwise, as all checks here do."""
    groups = len(optimizer.param_groups)
    if not isinstance(value, (list, tuple)):
        return [number(name, value)] * groups
    if len(value) != groups:
        raise ValueError(f"{name} has {len(value)} values, but the optimizer has {groups} parameter groups.")
    return [number(name, item) for item in value]


def number(name: str, value: Any) -> float:
    """`value`, a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}.")
    return value


def count(name: str, value: Any, at_least: int = 1, default: int | None = None) -> int:
    """`value` as an int, from an int or an integral float such as 1e3; `default` in place of None."""
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1 != 0 or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}.")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """`value`, a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}.")
    return value
