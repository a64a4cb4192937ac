"""Which gradients have come in a backward, and the order in which buckets are reduced.

Reductions are issued in one order on every rank (last unit first, the root at the end), never in order of arrival: that may
differ between ranks, and would then pair one rank's bucket with another's. Reductions are on their way while the next units'
gradients are filled in: any number within G, but one at a time that holds memory beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megazero.logging import ALIKE, get_logger
from megazero.zero.bucket import Bucket
from megazero.zero.layout import Segment
from megazero.zero.waiting import Waiting

logger = get_logger(__name__)


class Reductions:
    """Fills the buckets' G as gradients come, and reduces each bucket when it is complete and its turn has come.

    If gradients are whole (stages 0 and 1), only the last micro-batch reduces.

    Args:
        buckets: in backward order.
        overlaps_comm: reductions travel while the backward continues.

    Attributes:
        is_last_micro_batch: the next backward is the last one before an update.
        is_open: the engine's own backward runs; gradients at other times are somebody else's.
    """

    def __init__(self, buckets: Sequence[Bucket], overlaps_comm: bool, waiting: Waiting) -> None:
        self._buckets, self._waiting = buckets, waiting
        # A single rank has nothing to wait for: its reduced gradients leave for their home before the next unit's are made.
        self._overlaps = overlaps_comm and any(bucket.channel.num_ranks > 1 for bucket in buckets)
        self.is_last_micro_batch = True
        self.is_open = False
        self._has_told_of_others = False
        self._last: Bucket | None = None  # the bucket reduced last, which may be on its way
        self.restart()

    def restart(self) -> None:
        """Forgets the unfinished state of an earlier backward, and follows which parameters are trained."""
        self._order = [bucket for bucket in self._buckets if bucket.is_trainable]
        self._missing = {bucket: {s.name for s in bucket.trained_segments} for bucket in self._order}
        self._seen: set[str] = set()  # parameters with a gradient
        self._got_second: set[Bucket] = set()  # buckets with a parameter that has got a second gradient
        self._to_reduce = deque(self._order)

    def take(self, bucket: Bucket, segment: Segment) -> None:
        """Adds the gradient that a parameter has received to its bucket's G."""
        if self.is_open:
            bucket.accumulate(segment)
        else:
            self._drop(bucket, segment)
        self._missing[bucket].discard(segment.name)
        if segment.name in self._seen:
            self._got_second.add(bucket)
        self._seen.add(segment.name)

    def _drop(self, bucket: Bucket, segment: Segment) -> None:
        """Drops a gradient from somebody else's backward, such as that of a generator's loss in its discriminator.

        Such a gradient has another scale, and in G no torch function that the script calls, such as `module.zero_grad()`, could
        reach it.
        """
        bucket.parameters[segment.name].grad = None
        if self._has_told_of_others:
            return
        self._has_told_of_others = True
        logger.warning(
            "a backward that is not this engine's (loss.backward(), or another engine's whose loss goes through this model) has "
            "reached %s: its gradients of this model are not kept. To train with them, call engine.backward(loss)",
            segment.name,
            extra=ALIKE,
        )

    def skip(self, bucket: Bucket, names: set[str]) -> None:
        """Counts parameters as done, whether or not a gradient has come for them."""
        if bucket.is_trainable:
            self._missing[bucket] -= names

    def expect_again(self, bucket: Bucket) -> None:
        """If all gradients of the bucket have come, expects them once more: its module ran twice."""
        if bucket.is_trainable and not self._missing[bucket]:
            self._missing[bucket] = {segment.name for segment in bucket.trained_segments}

    @property
    def trains(self) -> bool:
        """Whether any bucket gets gradients: else no backward is this engine's."""
        return bool(self._order)

    def missing(self, bucket: Bucket) -> set[str]:
        """Names of the bucket's parameters whose gradients have not come yet in this backward."""
        return self._missing.get(bucket, set())  # a frozen bucket gets none

    def reduce_ready(self) -> None:
        """Starts the reductions whose turn has come: of complete buckets that follow each other in the order."""
        while self.is_open and self._to_reduce and not self.missing(self._to_reduce[0]):
            bucket = self._to_reduce.popleft()
            if self._is_due(bucket):
                self._reduce(bucket)

    def finish(self) -> None:
        """After a backward: reduces what is left (unused parameters, late gradients), and waits for every reduction.

        A second gradient, from a unit that ran twice under a reentrant checkpoint, is late on a rank that has reduced the bucket
        by then. Another rank may not have, because it did not use some parameters: it reduces once more all the same.
        """
        for bucket in filter(self._is_due, self._to_reduce):
            self._reduce(bucket)
        for bucket in filter(self._is_due, self._order):
            if bucket in self._got_second or bucket.gradient.has_unreduced:
                self._reduce(bucket)
        for bucket in self._order:
            self._wait_for(bucket)

    @property
    def is_done(self) -> bool:
        """Whether every gradient of the step is the sum over the group."""
        return all(bucket.gradient.is_reduced for bucket in self._order)

    def _is_due(self, bucket: Bucket) -> bool:
        return self.is_last_micro_batch or bucket.sharding.gradients

    def _reduce(self, bucket: Bucket) -> None:
        if self._last is not None and self._last.gradient.has_wire:
            self._wait_for(self._last)
        self._last = bucket
        bucket.gradient.reduce()
        if not self._overlaps:
            self._wait_for(bucket)

    def _wait_for(self, bucket: Bucket) -> None:
        self._waiting.until(bucket.gradient.wait, f"unit {bucket.name!r}: waiting for the sum of the gradients")
