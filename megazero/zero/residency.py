"""Which units are gathered ahead of their turn, and which stay gathered until their backward; knows sizes, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

# The names of the limits in DeepSpeed's `zero_optimization`.
LIMIT_KEYS = {
    "prefetch": "stage3_prefetch_bucket_size",
    "live": "stage3_max_live_parameters",
    "reuse": "stage3_max_reuse_distance",
}


@dataclass(frozen=True)
class GatherLimits:
    """DeepSpeed's `stage3_*` limits, in elements of whole parameters. With the defaults the engine decides by itself.

    Attributes:
        prefetch: most elements gathered ahead of the unit that runs. None gathers one unit ahead, of any size, and passes over
            those without elements; 0 gathers none.
        live: most elements gathered at a time; the unit that runs is gathered regardless. None sets no further limit.
        reuse: a unit stays gathered after its forward if at most this many elements run until its backward. So the last unit
            always stays, because its backward comes next.
    """

    prefetch: int | None = None
    live: int | None = None
    reuse: int = 0


class Residency:
    """The limits applied to a model's units.

    Args:
        sizes: elements of each unit, in forward order.
    """

    def __init__(self, sizes: Sequence[int], limits: GatherLimits) -> None:
        self.sizes, self.limits = list(sizes), limits
        self._behind = [*accumulate(self.sizes[:0:-1], initial=0)][::-1]  # elements of all units after each

    def ahead(self, index: int, step: int, live: int, trains: bool = True) -> list[int]:
        """Units to gather while unit `index` runs, in the order of their turns.

        Args:
            index: -1 before the first unit.
            step: 1 in forward, -1 in backward.
            live: elements that are gathered now.
            trains: False in an evaluation, which no plan covers.
        """
        found: list[int] = []
        numel = 0  # of those found
        for unit in self.after(index, step):
            size = self.sizes[unit]
            is_too_far = numel > 0 if self.limits.prefetch is None else numel + size > self.limits.prefetch
            is_too_much = self.limits.live is not None and live + numel + size > self.limits.live
            if is_too_far or is_too_much:
                break
            found.append(unit)
            numel += size
        return found

    def finish(self) -> None:
        """Called when a backward is over."""

    def after(self, index: int, step: int) -> range:
        """The units whose turn comes after `index`."""
        return range(index + 1, len(self.sizes)) if step > 0 else range(index - 1, -1, -1)

    def stays(self, index: int, live: int) -> bool:
        """Whether a unit that has run forward stays gathered until its backward.

        Args:
            live: elements that are gathered now, including the unit's.
        """
        if self.limits.live is not None and live > self.limits.live:
            return False
        return 2 * self._behind[index] <= self.limits.reuse  # the units after it run forward and backward
