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
    """An `Update` that runs in its own thread, on gradients that it owns, and holds new weights back until `finish`.

    Args:
        optimizer: Adam, stepped tile by tile.
        buckets: the buckets to update; the update takes their gradients from them.
        factor: multiplies the mean gradients.
    """

    def __init__(self, optimizer: SlicedOptimizer, buckets: Sequence[Bucket], factor: float) -> None:
        for link in {bucket.optimizer_home.link for bucket in buckets}:
            if link is not None:
                link.to_device.finish()  # the last update's weights have come, and the next ones get the same memory
        self._gradients = {bucket: bucket.gradient.take() for bucket in buckets}
        # The owned ranges' new weights.
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
            # A new thread starts on the first CUDA device, and would page-lock memory there.
            with torch.cuda.device(device if comm.has_streams(device) else -1):
                self._update.run()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Waits for the update, then writes the new weights into the model, here and on the other ranks. Collective.

        Raises:
            Exception: the error that ended the thread.
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
            bucket.write_staged(weights)
            bucket.publish()
        for bucket in self._staged:
            bucket.weights.wait_gathered()
