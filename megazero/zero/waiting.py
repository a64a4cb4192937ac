"""Waiting for a bucket's collectives, with an error that says which one the other ranks did not come to."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megazero.zero.bucket import Bucket


class Waiting:
    """Waits, and says in an error at which step of the optimizer that was."""

    def __init__(self) -> None:
        self.steps_done = 0

    def until(self, arrived: Callable[[], None], bucket: Bucket, what: str) -> None:
        """Calls `arrived`, which waits until `what` of the bucket is here.

        Raises:
            RuntimeError: it failed; the message names rank, step and unit.
        """
        try:
            arrived()
        except torch.OutOfMemoryError:
            raise  # its message says enough
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {torch.distributed.get_rank()}, step {self.steps_done + 1}, unit {bucket.name!r}: waiting for {what} "
                "failed. If the other ranks did not come, they run another part of the model, have failed, or have left the "
                "loop; every data-parallel rank must run the same units and the same number of steps. (A module that chooses "
                f"what runs by its data, as a mixture of experts, has to be one unit: zero_units=[...].) ({error})"
            ) from error
