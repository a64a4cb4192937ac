"""The delayed parameter update of ZeRO-Offload (arXiv:2101.06840, sec. 5.2): the host updates while the next step computes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from megazero import comm
from megazero.zero.bucket import Bucket
from megazero.zero.sliced import SlicedOptimizer
from megazero.zero.update import Update


class DelayedUpdate:
    """An `Update` that runs in a thread of its own, on gradients that are its own, and keeps new weights back until `finish`.

    Args:
        optimizer: Adam, which steps tile by tile.
        buckets: what it trains. Their gradients are taken from them.
        factor: by which mean gradients are multiplied.
    """

    def __init__(self, optimizer: SlicedOptimizer, buckets: Sequence[Bucket], factor: float) -> None:
        self._gradients = {bucket: bucket.gradient.take() for bucket in buckets}
        # New weights of the owned range.
        self._staged = {bucket: bucket.staging(optimizer.trains_all_of(bucket)) for bucket in buckets}
        self._update = Update(
            optimizer, self._gradients, factor, scales_itself=False, steps_apart=True, staged=self._staged
        )
        self._error: BaseException | None = None
        for bucket in buckets:
            bucket.is_pending = True
        self._thread = threading.Thread(target=self._run, name="delayed update")
        self._thread.start()

    def _run(self) -> None:
        device = next(iter(self._gradients)).weights.flat.device
        try:
            # A new thread is on the first CUDA device, and would lock pages there.
            with torch.cuda.device(device if comm.has_streams(device) else -1):
                self._update.run()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Waits, and makes the new weights the model's, here and on the other ranks. Collective.

        Raises:
            Exception: what went wrong in the thread.
        """
        self._thread.join()
        for bucket, gradient in self._gradients.items():
            bucket.is_pending = False
            gradient.free()
        if self._error is not None:
            raise self._error
        for bucket in self._staged:
            bucket.refuse_written("a delayed update of it went on. Call engine.optimizer.finish() before")
        for bucket, weights in self._staged.items():
            for _, start, stop in bucket.tiles:
                bucket.write_back(start, stop, weights[start:stop])
            bucket.publish()
        for bucket in self._staged:
            bucket.weights.wait_gathered()
