"""Collectives through the shared memory of one host.

Each rank stages what the others need in its own area, all ranks sync once, each reads what the others staged for it, and so on
piece by piece, in pieces that stay in the caches between writer and readers.

An area has two halves, used in turn; that makes one sync per piece enough. A rank writes a half in step k, after its sync k-1
has returned. The others read the half's former content, that of step k-2, before they entered their sync k-1, and sync k-1
returned here only after all of them had entered it: nobody still reads what is overwritten. Steps count on from one
collective to the next, so this holds between collectives too.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from megazero.comm.links import Links
from megazero.comm.transport import describe, pieces, scratch_bytes, sum_

_ALIGNMENT = 64  # bytes: a cache line


def area_bytes(size: int) -> int:
    """The size of each rank's area in a group of `size` ranks: slots of 256 KB beyond 9 ranks, halves of 4 MiB beyond 17.

    Larger groups have smaller slots, or the memory of all areas would grow with the square of the ranks: 16 GiB for 128.

    Measured: on 2 ranks halves of 2 MiB are 5 % faster than halves of 1 MiB, which is less than 1/300 of a step; halves of
    512 KB are 25 % slower.
    """
    return 2 * min(max(min(size, 4) * (512 << 10), (size - 1) * (256 << 10)), 4 << 20)


class SharedMemoryTransport:
    """Synchronous collectives of the ranks that `links` connect, in shared memory."""

    def __init__(self, links: Links, rank: int) -> None:
        self.rank, self.size = rank, len(links.areas)
        self._links = links
        self._half_bytes = links.areas[rank].numel() // 2
        self._slot_bytes = self._half_bytes // (self.size - 1) // _ALIGNMENT * _ALIGNMENT
        self._step = 0

    def reduce_scatter_(self, buffer: Tensor, name: str = "") -> None:
        """Makes this rank's part of `buffer` [numel, a multiple of the size] the sum over the group, in rank order."""
        parts = buffer.view(self.size, -1)  # [size, n]
        what = describe("reduce_scatter", buffer, name)
        for start, stop in pieces(parts.size(1), self._slot_bytes // buffer.element_size()):
            for reader in range(self.size):
                if reader != self.rank:
                    self._slot(self.rank, reader, parts, stop - start).copy_(parts[reader, start:stop])
            self._links.sync(f"{what} from element {start}")
            terms = [
                parts[rank, start:stop] if rank == self.rank else self._slot(rank, self.rank, parts, stop - start)
                for rank in range(self.size)
            ]
            sum_(terms, self.rank, self._scratch)
            self._step += 1

    def all_gather_(self, buffer: Tensor, name: str = "") -> None:
        """Fills `buffer` with every rank's part of it."""
        parts = buffer.view(self.size, -1)  # [size, n]
        what = describe("all_gather", buffer, name)
        for start, stop in pieces(parts.size(1), self._half_bytes // buffer.element_size()):
            self._half(self.rank, parts, stop - start).copy_(parts[self.rank, start:stop])
            self._links.sync(f"{what} from element {start}")
            for rank in range(self.size):
                if rank != self.rank:
                    parts[rank, start:stop].copy_(self._half(rank, parts, stop - start))
            self._step += 1

    def close(self) -> None:
        """Ends the links, which lets ranks that wait for this one fail at once."""
        self._links.close()

    @cached_property
    def _scratch(self) -> Tensor:  # a lane that only gathers needs none
        return torch.empty(scratch_bytes(self._slot_bytes, self.size), dtype=torch.uint8, device="cpu")

    def _half(self, writer: int, like: Tensor, numel: int, offset: int = 0) -> Tensor:
        """[numel] of `writer`'s area, in the half of this step, `offset` bytes in."""
        start = self._step % 2 * self._half_bytes + offset
        return self._links.areas[writer][start : start + numel * like.element_size()].view(like.dtype)

    def _slot(self, writer: int, reader: int, like: Tensor, numel: int) -> Tensor:
        """[numel] of `writer`'s area that only `reader` reads, in the half of this step."""
        return self._half(writer, like, numel, (reader - (reader > writer)) * self._slot_bytes)
