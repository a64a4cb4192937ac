"""Regions of a swap file: which are in use, and what of the others may be used again. Arithmetic only: no file."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from weakref import WeakSet

from megazero.nvme.transfer import Transfer


@dataclass(frozen=True)
class Region:
    """A place in a swap file: `nbytes` (whole pages) at `offset`."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.nbytes


class Regions:
    """The regions of one file. `reuse` and `append` are called by one thread at a time, the others by any.

    Attributes:
        end: bytes of the file: regions in use and those freed.
    """

    def __init__(self) -> None:
        self.end = 0
        self._used: dict[Region, WeakSet[Transfer]] = {}  # and the transfers there: those under way exist
        self._freed: deque[tuple[Region, WeakSet[Transfer]]] = deque()
        self._holes: list[Region] = []  # by offset; no two of them touch

    def __contains__(self, region: Region) -> bool:
        """Whether it is in use."""
        return region in self._used

    def reuse(self, nbytes: int) -> Region | None:
        """A region of what was freed; None where there is no room."""
        self._collect_freed()
        for i, hole in enumerate(self._holes):
            if hole.nbytes >= nbytes:
                rest = Region(hole.offset + nbytes, hole.nbytes - nbytes)
                self._holes[i : i + 1] = [rest] if rest.nbytes else []
                return self._taken(Region(hole.offset, nbytes))
        return None

    def append(self, nbytes: int) -> Region:
        """A region behind all others."""
        region = Region(self.end, nbytes)
        self.end = region.end
        return self._taken(region)

    def hold(self, region: Region, transfer: Transfer) -> None:
        """Keeps the region, when it is freed, from being used again before `transfer` has ended."""
        self._used.get(region, WeakSet()).add(transfer)

    def free(self, region: Region) -> None:
        """Lets others have a region that is in use. No lock: a finalizer may run while its thread has one."""
        self._freed.append((region, self._used.pop(region)))

    def _taken(self, region: Region) -> Region:
        self._used[region] = WeakSet()
        return region

    def _collect_freed(self) -> None:
        for _ in range(len(self._freed)):
            region, under_way = self._freed.popleft()
            if all(transfer.done() for transfer in under_way):
                self._holes.append(region)
            else:
                self._freed.append((region, under_way))
        merged: list[Region] = []
        for hole in sorted(self._holes, key=lambda region: region.offset):
            if merged and merged[-1].end == hole.offset:
                hole = Region(merged[-1].offset, merged.pop().nbytes + hole.nbytes)
            merged.append(hole)
        self._holes = merged
