"""Updates on the host in a thread of their own, beside what the device computes: in time for the next forward, or a step late."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megazero import comm
from megazero.zero.bucket import Bucket
from megazero.zero.update import Update

if TYPE_CHECKING:
    from megazero.zero.optimizer import BucketOptimizer


class BackgroundUpdate:
    """An `Update` in its own thread, on gradients that it owns.

    Args:
        optimizer: Adam, stepped tile by tile.
        buckets: the buckets to update, in this order; the update takes their gradients from them.
        factor: multiplies the mean gradients.
        staged: receives the new weights of each bucket; without it they go to P.
        stream: for the copies that it starts; by default the one that a thread has anyway.
        done: called in the thread with each bucket that has its new weights.

    Attributes:
        has_failed: `finish` may not be called again: it has raised, or was interrupted where it cannot go on.
    """

    def __init__(
        self,
        optimizer: BucketOptimizer,
        buckets: Sequence[Bucket],
        factor: float,
        *,
        staged: Mapping[Bucket, Tensor] | None = None,
        stream: torch.cuda.Stream | None = None,
        done: Callable[[Bucket], None] = lambda _: None,
    ) -> None:
        self._gradients = {bucket: bucket.gradient.take() for bucket in buckets}
        self._device, self._stream = buckets[0].device, stream
        update = Update(optimizer, self._gradients, factor, in_background=True, staged=staged, done=done)
        self.has_failed = False
        self._error: BaseException | None = None
        # Of the caller: a new thread starts with what was set last in any thread, and a data loader's, which page-locks, sets 1.
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=partial(self._run, update), name="background update")
        self._thread.start()

    def _run(self, update: Update) -> None:
        try:
            torch.set_num_threads(self._num_threads)
            # A new thread starts on the first CUDA device, and would page-lock memory there.
            device = self._device if comm.has_streams(self._device) else -1
            stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
            with torch.cuda.device(device), stream:
                update.run()
        except BaseException as error:
            self._error = error

    def _join(self) -> None:
        """Returns when the thread is over and its gradients are freed.

        Raises:
            Exception: the error that ended the thread.
        """
        self._thread.join()
        for bucket, gradient in self._gradients.items():
            bucket.is_delayed = bucket.is_updating = False
            gradient.free()
        self._gradients.clear()  # the update has them too
        error, self._error = self._error, None
        if error is not None:
            self.has_failed = True
            try:
                raise error
            finally:
                del error  # which refers to this frame, and so to all that the update holds

    def finish(self, until: Bucket | None = None) -> bool:
        """Brings new weights into the model, here and on the other ranks. Collective.

        After an interrupt, call it again.

        Args:
            until: a bucket after which the rest may follow later.

        Returns:
            Whether nothing is left to do.

        Raises:
            Exception: the error that ended the thread.
        """
        raise NotImplementedError


class DelayedUpdate(BackgroundUpdate):
    """The delayed parameter update of ZeRO-Offload (arXiv:2101.06840, sec. 5.2): runs while the next step computes.

    New weights are held back until `finish`.
    """

    def __init__(self, optimizer: BucketOptimizer, buckets: Sequence[Bucket], factor: float) -> None:
        for link in {bucket.optimizer_home.link for bucket in buckets}:
            if link is not None:
                link.to_device.finish()  # the last update's weights have come, and the next ones get the same memory
        # The owned ranges' new weights.
        self._staged = {bucket: bucket.staging(optimizer.trains_all_of(bucket)) for bucket in buckets}
        super().__init__(optimizer, buckets, factor, staged=self._staged)
        for bucket in buckets:
            bucket.is_delayed = True

    def finish(self, until: Bucket | None = None) -> bool:
        """See `BackgroundUpdate.finish`. Always brings all."""
        self._join()
        self.has_failed = True  # until all is done
        for bucket in self._staged:
            bucket.refuse_written("a delayed update of it went on. Call engine.optimizer.finish() before")
        for bucket, weights in self._staged.items():
            bucket.write_staged(weights)
            bucket.publish()
        for bucket in self._staged:
            bucket.weights.wait_gathered()
        self.has_failed = False
        return True


class OverlappedUpdate(BackgroundUpdate):
    """Runs while the next forward computes with the units that it has updated already. The numbers are those of any other update.

    Each bucket is finished before anything uses its parameters, in the order of the update: that of the forward.

    Args:
        stream: on CUDA, a stream for the copies of new weights. They wait for what the device was given before this update, and
            not for the forward that goes on beside it.
    """

    def __init__(
        self, optimizer: BucketOptimizer, buckets: Sequence[Bucket], factor: float, stream: torch.cuda.Stream | None
    ) -> None:
        self._left = deque(buckets)
        self._done: queue.SimpleQueue[tuple[Bucket, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        for bucket in buckets:
            bucket.retire()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        super().__init__(optimizer, buckets, factor, stream=stream, done=self._tell)
        for bucket in buckets:
            bucket.is_updating = True

    def _run(self, update: Update) -> None:
        super()._run(update)
        self._done.put(None)

    def _tell(self, bucket: Bucket) -> None:
        self._done.put((bucket, self._sent_so_far()))

    def _sent_so_far(self) -> torch.cuda.Event | None:
        """On CUDA, the end of the copies of new weights that have been started."""
        return None if self._stream is None else self._stream.record_event()

    def finish(self, until: Bucket | None = None) -> bool:
        """See `BackgroundUpdate.finish`."""
        while self._left and (until is None or until in self._left):
            done = self._done.get()
            if done is None:
                self._join()  # raises if the thread has failed; else an interrupt has lost what it told last
            bucket, sent = done or (self._left[-1], self._sent_so_far())
            if sent is not None:
                torch.cuda.current_stream(self._device).wait_event(sent)
            while bucket in self._left:
                self._bring(self._left.popleft())
        if not self._left:
            self._join()
        return not self._left

    def _bring(self, bucket: Bucket) -> None:
        bucket.is_updating = False
        try:
            bucket.refuse_written("its update went on. Call engine.optimizer.finish() before")
        finally:
            bucket.publish()
