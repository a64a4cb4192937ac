"""Schedules of "A disciplined approach to neural network hyper-parameters" (Smith, arXiv:1803.09820)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from megazero.logging import ALIKE
from megazero.optim.schedule_base import Schedule, count, flag, number, per_group

logger = logging.getLogger(__name__)

SECOND_BETA = 0.99  # what OneCycle sets beside the momentum that it cycles


class LRRangeTest(Schedule):
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


class OneCycle(Schedule):
    """The learning rate goes up and down once, the momentum down and up; then both decay (Smith, arXiv:1803.09820).

    With n = i + 1 steps: n / first_step_size of the way from minimum to maximum while n is in the first half, then back over
    `second_step_size` steps; in `stair_count` stairs where that is not 0. After the cycle, k steps later:
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
        return self.last_batch_iteration - self.total_size + 1 if self.last_batch_iteration >= self.total_size else 0

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
