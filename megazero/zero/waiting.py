"""Waiting for other ranks, with an error that says what they did not come to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Waiting:
    """Waits, and says in an error at which step of the optimizer that was."""

    def __init__(self) -> None:
        self.steps_done = 0

    def until(self, act: Callable[[], T], what: str) -> T:
        """What `act` returns, which waits for other ranks.

        Raises:
            RuntimeError: a collective failed; if there are other ranks, the message names rank, step and `what`.
        """
        try:
            return act()
        except RuntimeError as error:
            # Other subclasses are not of collectives: of a device, an optimizer's kernel, the script. Their messages say enough.
            is_collective = type(error) is RuntimeError or isinstance(error, dist.DistError)
            if not is_collective or dist.get_world_size() == 1:
                raise
            raise RuntimeError(
                f"rank {dist.get_rank()}, step {self.steps_done + 1}, {what} failed. If the other ranks did not "
                "come, they run another part of the model, have failed, or have left the loop; every rank must run the same "
                "units and the same number of steps. (A module that chooses what runs by its data, as a mixture of experts, has "
                f"to be one unit: zero_units=[...].) ({error})"
            ) from error
