"""Colossal-AI's dynamic loss scale, as the engine's `LossScaler`."""

from __future__ import annotations

import logging

from megazero.optim.loss_scaler import LossScaler

logger = logging.getLogger(__name__)


class DynamicGradScaler(LossScaler):
    """A dynamic loss scale with configurable factors and bounds.

    An overflow resets the count of clean steps; from the `hysteresis`-th overflow on, each one multiplies the scale by
    `backoff_factor`, down to `min_scale`. After `growth_interval` clean steps in a row, the scale is multiplied by
    `growth_factor`, up to `max_scale`, and the count of overflows is reset. With factors 2 and 0.5 this matches DeepSpeed's
    scale, except that training continues at the smallest scale.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
    ) -> None:
        if not (0 < min_scale <= initial_scale <= max_scale < float("inf")):
            raise ValueError(
                f"The loss scales must be 0 < min_scale <= initial_scale <= max_scale, got {min_scale}, {initial_scale}, "
                f"{max_scale}."
            )
        if growth_factor <= 1 or not 0 < backoff_factor < 1 or growth_interval < 1 or hysteresis < 1:
            raise ValueError(
                "The loss scale needs growth_factor > 1, backoff_factor between 0 and 1, growth_interval and hysteresis of at "
                f"least 1, got {growth_factor}, {backoff_factor}, {growth_interval}, {hysteresis}."
            )
        super().__init__(
            float(initial_scale),
            dynamic=True,
            window=growth_interval,
            min_scale=float(min_scale),
            hysteresis=hysteresis,
        )
        self.growth_factor, self.backoff_factor, self.max_scale = growth_factor, backoff_factor, float(max_scale)

    def _after_clean_step(self) -> None:
        if self.clean_steps >= self.window:
            self.clean_steps, self.hysteresis_left = 0, self.hysteresis
            self.scale = min(self.scale * self.growth_factor, self.max_scale)

    def _after_overflow(self, where: str) -> None:
        old = self.scale
        if self.hysteresis_left <= 0:
            self.scale = max(self.scale * self.backoff_factor, self.min_scale)
        log = logger.warning if old <= self.min_scale else logger.info
        place = f" (first in {where})" if where else ""
        log("a gradient is inf or NaN%s: step skipped, loss scale %g -> %g", place, old, self.scale)
