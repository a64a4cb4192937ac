"""Sums over several sets of ranks: first within each set, whose ranks are close to each other, then between the sets."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.comm.transport import Transport


class TwoLevelTransport:
    """Combines the transport `within` a set of ranks with that `across`, between the ranks of all sets that hold the same part.

    Between sets, reductions send only this part of a buffer, and gathers send nothing.
    """

    def __init__(self, within: Transport, across: Transport, *, rank: int, size: int, num_sets: int) -> None:
        """`rank` of `size` in its set."""
        self._within, self._across = within, across
        self._rank, self._size, self._num_sets = rank, size, num_sets

    def reduce_scatter_(self, buffer: Tensor, name: str) -> None:
        """Makes this rank's part of `buffer` [size * n] the sum over all ranks of all sets."""
        self._within.reduce_scatter_(buffer, name)
        part = buffer.view(self._size, -1)[self._rank]
        odd = part.numel() % self._num_sets
        even, rest = part.split([part.numel() - odd, odd])
        if even.numel():
            self._all_reduce_across(even, name)
        if odd:
            padded = torch.cat([rest, rest.new_zeros(self._num_sets - odd)])
            self._all_reduce_across(padded, name)
            rest.copy_(padded[:odd])

    def all_gather_(self, buffer: Tensor, name: str) -> None:
        """Fills `buffer` with the part of every rank of the set."""
        self._within.all_gather_(buffer, name)

    def close(self) -> None:
        """Lets ranks that wait for this one fail at once."""
        self._within.close()
        self._across.close()

    def _all_reduce_across(self, buffer: Tensor, name: str) -> None:
        self._across.reduce_scatter_(buffer, name)
        self._across.all_gather_(buffer, name)
