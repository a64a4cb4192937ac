"""Where a bucket's states rest between their uses: on the accelerator or in host memory (here), or on NVMe (`nvme_home`).

A home holds flat vectors: a shard of P, the reduced part of G, the master weights and every tensor of the optimizer. Code that
needs a vector, or a part of one, asks for it with `at_hand`. A vector in memory is returned itself, at no cost. A vector in a
file is read before the `with` block and, if it is written to, written back after it. The tensor at hand lies on the home's
`device`, where the optimizer computes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megazero.nvme import PagePool
from megazero.zero.link import Crossing, Link

SUM_NUMEL = 1 << 24  # elements of a sum in host memory that go to the device at a time: enough to use the link fully


class Vector(Protocol):
    """A flat tensor that rests in a home.

    Attributes:
        link: the link to the device that computes, if the vector rests on the other side of one.
    """

    numel: int
    dtype: torch.dtype
    link: Link | None

    @property
    def resident(self) -> Tensor | None:
        """All of the vector if it rests in memory, else None."""

    @property
    def is_here(self) -> bool:
        """Whether `at_hand` would return all of it without waiting."""

    def prefetch(self, start: int = 0, stop: int | None = None) -> None:
        """Announces that this part will be asked for soon."""

    def at_hand(
        self, start: int = 0, stop: int | None = None, *, reads: bool = True, writes: bool = False
    ) -> AbstractContextManager[Tensor]:
        """Elements [start, stop) as a 1-D tensor on the home's device, for the `with` block.

        Args:
            reads: whether the values are needed; False if all of them will be overwritten.
            writes: keeps the values that the tensor has at the end of the block. If False, a change may or may not be lost,
                depending on the home.
        """

    def free(self) -> None:
        """Returns the memory, or the place in the file."""


class Home(Protocol):
    """A place for vectors.

    Attributes:
        device: that of tensors at hand.
        link: the link to the device that computes, if the home is on the other side of one.
    """

    device: torch.device
    link: Link | None

    @property
    def memory(self) -> MemoryHome:
        """The home itself, or one in memory beside it, for what does not rest here."""

    @property
    def nbytes(self) -> int:
        """Host memory that the home uses in addition to its vectors: buffers, and memory that vectors have returned."""

    def vector(self, numel: int, dtype: torch.dtype) -> Vector:
        """A new vector, uninitialized."""

    def hold(self, values: Tensor, copy: bool = False) -> Vector:
        """A vector of these 1-D values, which may still be on their way to it when this returns.

        Args:
            copy: the caller will write to `values`. If False, and `values` lie in the home's memory, the vector is that memory.
        """

    def flush(self) -> None:
        """Returns when everything that was written has arrived.

        Raises:
            OSError: a write has failed.
        """


class MemoryVector:
    """A vector that is always at hand, once its values have come over the link.

    Args:
        resident: its memory.
        link: the link to the device that computes, if that is on the other side of one.
    """

    def __init__(self, resident: Tensor, link: Link | None = None) -> None:
        self.resident, self.link = resident, link
        self.numel, self.dtype = resident.numel(), resident.dtype
        self._coming: Crossing | None = None

    @property
    def is_here(self) -> bool:
        """Whether its values have come."""
        return self._coming is None or self._coming.is_over

    def prefetch(self, start: int = 0, stop: int | None = None) -> None:
        """Does nothing: the vector is in memory."""

    def at_hand(
        self, start: int = 0, stop: int | None = None, *, reads: bool = True, writes: bool = False
    ) -> AbstractContextManager[Tensor]:
        """The memory itself."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        return nullcontext(self.resident[start:stop])

    def send(self, values: Tensor) -> None:
        """Starts to fill it with values on the device. Nobody may write to `values` from now on."""
        assert self.link is not None
        copy = partial(self.resident.copy_, values, non_blocking=True)
        self._coming = self.link.to_host.start(copy, on_device=[values], on_host=[self.resident])

    def add(self, values: Tensor) -> None:
        """Starts to add values on the device. Nobody may write to `values` from now on.

        The device adds, concurrently with other work, piece by piece, so that it never holds a copy of the whole sum.
        """
        assert self.link is not None
        total = self.resident

        def add() -> None:
            for here, there in zip(total.split(SUM_NUMEL), values.split(SUM_NUMEL), strict=True):
                here.copy_(here.to(there.device, non_blocking=True).add_(there), non_blocking=True)

        self._coming = self.link.to_host.start(add, on_device=[values], on_host=[total])

    def free(self) -> None:
        """Does nothing: Python frees the memory with the last tensor that uses it."""


class MemoryHome:
    """A home in the memory of one device: the accelerator's, or the host's for ZeRO-Offload (arXiv:2101.06840).

    Args:
        pin: page-lock the memory, so that a CUDA device can copy from and to it while it computes.
        link: the link to the device that computes, if this is its host's memory; without a link copies are waited for.
    """

    def __init__(self, device: torch.device, pin: bool = False, link: Link | None = None) -> None:
        self.device, self.link = device, link
        is_pinned = pin and device.type == "cpu" and torch.cuda.is_available()
        self._pages = PagePool() if is_pinned else None

    @property
    def memory(self) -> MemoryHome:
        """See `Home.memory`."""
        return self

    @property
    def nbytes(self) -> int:
        """Pinned memory that no vector uses at the moment: gradients come back to it in every step."""
        return 0 if self._pages is None else self._pages.spare_nbytes

    def vector(self, numel: int, dtype: torch.dtype) -> MemoryVector:
        """A new vector, uninitialized."""
        return MemoryVector(self.empty(numel, dtype), self.link)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Uninitialized memory, 1-D. Pages that are locked for it stay so, and are used again."""
        if self._pages is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return self._pages.empty(numel * dtype.itemsize).view(dtype)

    def hold(self, values: Tensor, copy: bool = False, room: int | None = None) -> MemoryVector:
        """A vector of the values' own memory if they lie here, else of a copy, which crosses a link while the device computes.

        Args:
            room: elements to take memory for beyond a link, if not `values.numel()`: memory of equal size is soon used again.
        """
        values = values.detach()
        if self.link is not None and values.device == self.link.device:
            self.link.to_host.make_room()
            vector = MemoryVector(self.empty(room or values.numel(), values.dtype)[: values.numel()], self.link)
            vector.send(values.clone() if copy else values)
        elif values.device == self.device:
            vector = MemoryVector(values.clone() if copy else values, self.link)
        else:
            vector = self.vector(values.numel(), values.dtype)
            vector.resident.copy_(values)
        return vector

    def flush(self) -> None:
        """Does nothing: `at_hand` waits for whatever is under way."""


def moved(vector: Vector, home: Home, dtype: torch.dtype | None = None) -> Vector:
    """A vector of the same values in another home, cast to `dtype` if given; the old vector is freed."""
    with vector.at_hand() as values:
        there = home.hold(values if dtype is None else values.to(dtype), copy=vector.resident is None)
    vector.free()
    return there
