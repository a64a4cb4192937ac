"""What one iteration uses, and what else lay on the device meanwhile: what Gemini's planner plans from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Meter(Protocol):
    """Measures a device's memory; a test brings its own."""

    def used_bytes(self) -> int:
        """The most that has been in use since the last call, by whatever this process holds there."""
        ...

    def free_bytes(self) -> int:
        """What could still be allocated now."""
        ...


@dataclass(frozen=True)
class Moment:
    """One moment of an iteration: from the use of a unit to that of the next one."""

    unit: int  # must lie on the device
    non_model: int  # bytes of all else there, at most


@dataclass(frozen=True)
class Trace:
    """One recorded iteration."""

    moments: tuple[Moment, ...]
    nbytes: Mapping[int, int]  # of each unit's parameters, as they lie on the device


class Tracer:
    """Records the moments of one iteration: the engine calls `use` whenever it needs a unit.

    Args:
        meter: of the device.
        model_bytes: says what the engine itself holds there: states, gathered parameters, gradients under way.
    """

    def __init__(self, meter: Meter, model_bytes: Callable[[], int]) -> None:
        self._meter, self._model_bytes = meter, model_bytes
        self._units: list[int] = []
        self._non_model: list[int] = []

    def use(self, unit: int) -> None:
        """A moment begins, with the use of `unit`; the one before has ended."""
        before = self.sample()
        self._units.append(unit)
        # What was there before the first one, from building the engine or an update, is none of the iteration's.
        self._non_model.append(before if self._non_model else 0)

    def sample(self) -> int:
        """Measures within the current moment, which keeps the most that was seen; returns the non-model bytes."""
        now = max(0, self._meter.used_bytes() - self._model_bytes())
        if self._non_model:
            self._non_model[-1] = max(self._non_model[-1], now)
        return now

    def finish(self) -> tuple[Moment, ...]:
        """The moments; the iteration is over."""
        self.sample()
        return tuple(map(Moment, self._units, self._non_model))
