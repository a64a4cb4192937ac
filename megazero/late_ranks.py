"""Which ranks the others wait for: the last to come to a collective waits least."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Sequence
from itertools import pairwise

from megazero import comm
from megazero.logging import some

ENOUGH = 300  # iterations: over fewer, on a host that is busy with something else, any rank may be late
NOTABLE = 0.1  # of the time


class LateRanks:
    """Notes how long this rank waits for others, and says now and then, from what all ranks have noted, who is late."""

    def __init__(self) -> None:
        self._iterations, self._seconds = 0, 0.0
        self._waits_s: list[float] = []  # per iteration, of each log line

    def line(self, iterations: int, seconds: float, waited_s: float) -> str | None:
        """What the log says if, over ENOUGH iterations, some ranks were late nearly all the time. Collective then.

        Args:
            iterations, seconds: since the last call.
            waited_s: how much of this time this rank has waited for others.
        """
        self._iterations += iterations
        self._seconds += seconds
        self._waits_s.append(waited_s / iterations)
        if self._iterations < ENOUGH:
            return None
        # What it waits in nine lines of ten: next to nothing, if ranks are late by turns.
        least_s = sorted(self._waits_s)[len(self._waits_s) // 10]
        notes = comm.all_gathered_objects((least_s, socket.gethostname()))
        late, longer_s = late_ranks([wait_s for wait_s, _ in notes], NOTABLE * self._seconds / self._iterations)
        self._iterations, self._seconds, self._waits_s = 0, 0.0, []
        names = some([f"rank {rank} on {notes[rank][1]}" for rank in late], 8)
        return f"the other ranks wait {longer_s * 1e3:.2f} ms longer per iteration, for {names}" if late else None


def late_ranks(waits_s: Sequence[float], notable_s: float) -> tuple[list[int], float]:
    """The ranks that wait notably less than all others, at most half of all ranks, and how much longer the others wait.

    It is one rank, or those of a slow host, or all that share a slow one's layers.

    Args:
        waits_s: of each rank.
    """
    order = sorted(range(len(waits_s)), key=waits_s.__getitem__)
    gaps = [waits_s[longer] - waits_s[shorter] for shorter, longer in pairwise(order)][: len(order) // 2]
    if max(gaps, default=0.0) <= notable_s:
        return [], 0.0
    count = gaps.index(max(gaps)) + 1
    late, others = order[:count], order[count:]
    longer_s = statistics.median(waits_s[rank] for rank in others) - statistics.median(waits_s[rank] for rank in late)
    return sorted(late), longer_s
