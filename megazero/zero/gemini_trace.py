"""The trace that Gemini's planner plans from: what one iteration uses, and what else is on the device meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Meter(Protocol):
    """Measures a device's memory. Tests supply their own."""

    def used_bytes(self) -> int:
        """Most bytes in use on the device since the last call, counting everything that this process holds there."""

    def free_bytes(self) -> int:
        """Bytes that could still be allocated now."""


@dataclass(frozen=True)
class Moment:
    """One moment of an iteration: from the use of a unit to that of the next one."""

    unit: int  # must be on the device
    non_model: int  # most bytes of everything else there


@dataclass(frozen=True)
class Trace:
    """One recorded iteration."""

    moments: tuple[Moment, ...]
    nbytes: Mapping[int, int]  # bytes of each unit's parameters on the device


class Tracer:
    """Records the moments of one iteration: the engine calls `use` whenever it needs a unit.

    Args:
        meter: measures the device's memory.
        model_bytes: returns the bytes that the engine itself holds there: states, gathered parameters, gradients under way.
    """

    def __init__(self, meter: Meter, model_bytes: Callable[[], int]) -> None:
        self._meter, self._model_bytes = meter, model_bytes
        self._units: list[int] = []
        self._non_model: list[int] = []

    def use(self, unit: int) -> None:
        """Begins a moment with the use of `unit`, and ends the moment before."""
        before = self.sample()
        self._units.append(unit)
        # Memory used before the first moment, to build the engine or for an update, does not belong to the iteration.
        self._non_model.append(before if self._non_model else 0)

    def sample(self) -> int:
        """Measures within the current moment, which keeps its maximum. Returns the non-model bytes."""
        now = max(0, self._meter.used_bytes() - self._model_bytes())
        if self._non_model:
            self._non_model[-1] = max(self._non_model[-1], now)
        return now

    def finish(self) -> tuple[Moment, ...]:
        """Ends the iteration, and returns its moments."""
        self.sample()
        return tuple(map(Moment, self._units, self._non_model))
