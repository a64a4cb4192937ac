"""How a bucket's shard of P comes to the device that computes: when it is gathered, or ahead of that, overlapping compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from megazero.comm import Work
from megazero.zero.home import Vector
from megazero.zero.link import Crossing


class Arrival:
    """The way of one shard to the device. Every call takes the vector, because it may move to another home.

    Args:
        device: the device that computes.
        comes_ahead: whether a shard is brought there before its gather, so that the copy of one overlaps the gather of another.
            A rank that has nobody to gather from copies the shard in its gather; to bring it ahead would take memory for one
            more unit.
    """

    def __init__(self, device: torch.device, comes_ahead: bool) -> None:
        self._device, self._comes_ahead = device, comes_ahead
        self.ahead: Tensor | None = None  # the shard on the device, or on its way there
        self._crossing: Crossing | None = None  # the last one

    def prefetch(self, shard: Vector) -> None:
        """Announces that `fill` comes soon. Each call advances the shard one step: from drive to host, from host to device."""
        if self.ahead is None and self._comes_ahead and shard.link is not None and shard.is_here:
            self.ahead = torch.empty(shard.numel, dtype=shard.dtype, device=self._device)
            self._copy(shard, self.ahead)
        elif self.ahead is None:
            shard.prefetch()

    def fill(self, shard: Vector, part: Tensor, gather: Callable[[], Work]) -> Work:
        """Starts to copy the shard to `part`, its place in the whole, and to gather the whole after that."""
        if shard.link is None:
            with shard.at_hand() as values:
                part.copy_(values)
            return gather()
        works: list[Work] = []
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return _Gathering(self._copy(shard, part, lambda: works.append(gather())), works)

        def place() -> None:
            part.copy_(ahead)
            works.append(gather())

        self._crossing = shard.link.to_device.start(place, on_device=[part, ahead])
        return _Gathering(self._crossing, works)

    def settle(self) -> None:
        """Before the shard is written to: waits until nothing reads it, and drops a shard that came ahead of its gather."""
        if self._crossing is not None:
            self._crossing.wait()
        self._crossing = self.ahead = None

    def _copy(self, shard: Vector, target: Tensor, issue: Callable[[], object] = lambda: None) -> Crossing:
        """Starts to copy the shard, then calls `issue` for what follows the copy; the shard stays at hand until it is over."""
        assert shard.link is not None
        at_hand = ExitStack()
        values = at_hand.enter_context(shard.at_hand())

        def copy() -> None:
            target.copy_(values, non_blocking=True)
            issue()

        self._crossing = shard.link.to_device.start(copy, on_device=[target], on_host=[values], then=at_hand.close)
        return self._crossing


class _Gathering:
    """A copy and the collective after it, as one `Work`."""

    def __init__(self, crossing: Crossing, works: list[Work]) -> None:
        self._crossing, self._works = crossing, works

    def wait(self) -> None:
        """Returns when it is certain that what the device computes next finds the whole."""
        self._crossing.join()
        for work in self._works:
            work.wait()
