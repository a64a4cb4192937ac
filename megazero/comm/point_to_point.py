"""Collectives from messages between pairs of ranks: for groups that have no shared memory.

gloo's own reduce-scatter sends what an all-reduce sends, and its all-gather is slow too; each rank sending every other its part
directly is two to four times faster.

Unlike links, gloo's connections are shared with forked children: the death of a rank whose children live on shows as a timeout.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import cached_property
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.transport import MESSAGE_BYTES, check, describe, message, pieces, scratch_bytes, sum_
from megazero.comm.world import ProcessGroup

INBOX_BYTES = 8 << 20  # memory of a rank, in one lane, for what has arrived and is not summed yet


class PointToPointTransport:
    """Synchronous collectives over isend and irecv on `group`, told apart from its other messages by `tag`."""

    def __init__(self, group: ProcessGroup, tag: int, timeout_s: float) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._ranks = dist.get_process_group_ranks(group)  # of the world, for messages
        self._group, self._tag, self._timeout = group, tag, timedelta(seconds=timeout_s)
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._piece_bytes = INBOX_BYTES // 2 // self.size // 64 * 64

    def reduce_scatter_(self, buffer: Tensor, name: str = "") -> None:
        """Makes this rank's part of `buffer` [numel, a multiple of the size] the sum over the group, in rank order."""
        self._agree(describe("reduce_scatter", buffer, name))
        parts, inbox = buffer.view(self.size, -1), self._inbox.view(buffer.dtype)  # [size, n], [2, size, piece]
        spans = pieces(parts.size(1), inbox.size(2))
        inboxes = [inbox[number % 2, :, : stop - start] for number, (start, stop) in enumerate(spans)]  # [size, piece]
        sends = [self._send(parts[rank, start:stop], rank) for start, stop in spans for rank in self._others]
        following = self._receive_all(inboxes[0])
        for number, (start, stop) in enumerate(spans):
            arriving = following
            if number + 1 < len(spans):
                following = self._receive_all(inboxes[number + 1])
            self._wait(arriving)
            terms = list(inboxes[number])
            terms[self.rank] = parts[self.rank, start:stop]
            sum_(terms, self.rank, self._scratch)
        self._wait(sends)

    def all_gather_(self, buffer: Tensor, name: str = "") -> None:
        """Fills `buffer` with every rank's part of it."""
        self._agree(describe("all_gather", buffer, name))
        parts = buffer.view(torch.uint8).view(self.size, -1)  # [size, bytes]: gloo does not send every dtype
        self._exchange(parts[self.rank], parts)

    def close(self) -> None:
        """Does nothing: the group is the caller's."""

    @cached_property
    def _inbox(self) -> Tensor:  # one piece arrives, one is summed; a lane that only gathers needs none, nor scratch
        return torch.empty(2, self.size, self._piece_bytes, dtype=torch.uint8, device="cpu")

    @cached_property
    def _scratch(self) -> Tensor:
        return torch.empty(scratch_bytes(self._piece_bytes, self.size), dtype=torch.uint8, device="cpu")

    def _agree(self, what: str) -> None:
        """Returns when every rank has come here with the same `what`: no data moves before that."""
        mine = torch.tensor(list(message(what).ljust(MESSAGE_BYTES, b"\0")), dtype=torch.uint8, device="cpu")
        theirs = torch.empty(self.size, MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        self._exchange(mine, theirs)
        for rank in self._others:
            check(bytes(theirs[rank].tolist()).rstrip(b"\0"), what, self._ranks[rank])

    def _exchange(self, own: Tensor, rows: Tensor) -> None:
        """Sends `own` to every other rank, and returns when theirs are in their rows of `rows` [size, n]."""
        sends = [self._send(own, rank) for rank in self._others]
        self._wait(self._receive_all(rows))
        self._wait(sends)

    def _send(self, part: Tensor, rank: int) -> dist.Work | None:
        return dist.isend(part, group=self._group, tag=self._tag, group_dst=rank)

    def _receive_all(self, rows: Tensor) -> list[dist.Work | None]:
        """Lets what every other rank sends arrive in its row of `rows` [size, n]."""
        return [dist.irecv(rows[rank], group=self._group, tag=self._tag, group_src=rank) for rank in self._others]

    def _wait(self, works: Iterable[dist.Work | None]) -> None:
        """Returns when `works` are done, which go through `self._others` in order, once or several times."""
        for work, rank in zip(works, cycle(self._others), strict=False):
            assert work is not None  # torch returns None to ranks outside the group only
            try:
                work.wait(self._timeout)
            except RuntimeError as error:  # gloo names no rank, and after a timeout not even an address
                raise RuntimeError(f"rank {self._ranks[rank]}: {error}") from error
