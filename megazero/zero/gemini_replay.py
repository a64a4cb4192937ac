"""Follows a plan of Gemini's, use by use, and notices where an iteration is another one than the traced."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.zero.gemini_plan import Actions, Plan


class Deviation(RuntimeError):
    """The iteration uses another unit than the traced one did: from here on fetch on demand, and trace again.

    Attributes:
        moment: where in the plan.
        found: the unit that was used; None where the iteration ended early.
        on_device: what the replay has brought there.
    """

    def __init__(self, moment: int, expected: int | None, found: int | None, on_device: frozenset[int]) -> None:
        what = "the iteration ends" if found is None else f"unit {found} is used"
        want = "the end of the iteration" if expected is None else f"unit {expected}"
        super().__init__(f"moment {moment}: {what}, and the plan expects {want}.")
        self.moment, self.found, self.on_device = moment, found, on_device


@dataclass
class Replay:
    """Follows a plan, iteration by iteration."""

    plan: Plan
    _moment: int = -1

    @property
    def on_device(self) -> frozenset[int]:
        """The units on the device now, or on their way there."""
        return self.plan.on_device[self._moment] if self._moment >= 0 else frozenset()

    def advance(self, unit: int) -> Actions:
        """What to do before `unit` is used, whose fetch has then been started, now or before.

        Raises:
            Deviation: the plan has another use here. The replay starts anew with the next call.
        """
        if unit != self._expected:
            raise self._deviation(unit)
        self._moment += 1
        return self.plan.actions[self._moment]

    def stays(self, unit: int) -> bool:
        """Whether a unit whose use is over lies on the device at the next moment too."""
        return self._expected is not None and unit in self.plan.on_device[self._moment + 1]

    def finish(self) -> frozenset[int]:
        """Ends the iteration, before parameters change: returns what is to be dropped.

        Raises:
            Deviation: the plan has further uses.
        """
        if self._expected is not None:
            raise self._deviation(None)
        held, self._moment = self.on_device, -1
        return held

    @property
    def _expected(self) -> int | None:
        """The unit whose use comes next; None at the end."""
        moments = self.plan.moments[self._moment + 1 : self._moment + 2]
        return moments[0].unit if moments else None

    def _deviation(self, found: int | None) -> Deviation:
        deviation = Deviation(max(self._moment, 0), self._expected, found, self.on_device)
        self._moment = -1
        return deviation
