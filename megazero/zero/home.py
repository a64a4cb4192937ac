"""Where a bucket's states rest between their uses: on the accelerator or in host memory (here), or on NVMe (`nvme_home`).

A home holds flat vectors: a shard of P, the reduced part of G, the master weights and every tensor of the optimizer. Whoever
needs one asks for it, or for a part of it, with `at_hand`. In memory that is the vector itself and costs nothing; a vector in a
file comes and goes with the `with` block. What is at hand lies on the home's `device`, and there the optimizer computes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megazero.nvme import PagePool
from megazero.zero.link import Crossing, Link

SUM_NUMEL = 1 << 24  # elements of a sum in host memory that come to the device at a time: enough to fill the link


class Vector(Protocol):
    """A flat tensor that rests in a home.

    Attributes:
        link: to the device that computes, where the vector rests on the other side of one.
    """

    numel: int
    dtype: torch.dtype
    link: Link | None

    @property
    def resident(self) -> Tensor | None:
        """All of it where it is in memory, None where it is not."""
        ...

    @property
    def is_here(self) -> bool:
        """Whether `at_hand` would give all of it without waiting."""
        ...

    def prefetch(self, start: int = 0, stop: int | None = None) -> None:
        """Says that this part will soon be asked for."""
        ...

    def at_hand(
        self, start: int = 0, stop: int | None = None, *, reads: bool = True, writes: bool = False
    ) -> AbstractContextManager[Tensor]:
        """Elements [start, stop) as a 1-D tensor on the home's device, for the `with` block.

        Args:
            reads: the values are wanted; False where all of them will be overwritten.
            writes: what the tensor holds at the end of the block is kept; a change is lost otherwise, or not, as the home has it.
        """
        ...

    def free(self) -> None:
        """Gives the memory or the place in the file back."""
        ...


class Home(Protocol):
    """A place for vectors.

    Attributes:
        link: to the device that computes, where the home is on the other side of one.
    """

    link: Link | None

    @property
    def device(self) -> torch.device:
        """Of what is at hand."""
        ...

    @property
    def nbytes(self) -> int:
        """Host memory that it has beside its vectors: buffers, and what vectors have given back."""
        ...

    def vector(self, numel: int, dtype: torch.dtype) -> Vector:
        """A new vector, uninitialised."""
        ...

    def bring(self, values: Tensor, room: int) -> Vector:
        """A vector in memory, for a moment, of values on the link's device, 1-D, which are on their way when this returns.

        Args:
            room: elements that memory is taken for, at least as many as there are: in equal pieces it is soon used again.
        """
        ...

    def hold(self, values: Tensor, copy: bool = False) -> Vector:
        """A vector of these values, 1-D, which may still be on their way there when this returns.

        Args:
            copy: the caller will write to `values`. Else the vector is their very memory, where that is the home's.
        """
        ...

    def flush(self) -> None:
        """Returns when everything that was written has arrived.

        Raises:
            OSError: something has not.
        """
        ...


class MemoryVector:
    """A vector that always is at hand, once its values have come over the link.

    Args:
        tensor: its memory.
        link: where the device that computes is on the other side of one.
    """

    def __init__(self, tensor: Tensor, link: Link | None = None) -> None:
        self._tensor, self.link = tensor, link
        self.numel, self.dtype = tensor.numel(), tensor.dtype
        self._coming: Crossing | None = None

    @property
    def resident(self) -> Tensor:
        """All of it."""
        return self._tensor

    @property
    def is_here(self) -> bool:
        """Whether its values have come."""
        return self._coming is None or self._coming.is_over

    def prefetch(self, start: int = 0, stop: int | None = None) -> None:
        """Nothing to bring."""

    def at_hand(
        self, start: int = 0, stop: int | None = None, *, reads: bool = True, writes: bool = False
    ) -> AbstractContextManager[Tensor]:
        """The memory itself."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        return nullcontext(self._tensor[start:stop])

    def send(self, values: Tensor) -> None:
        """Starts to fill it with values on the device, which nobody writes to from now on."""
        assert self.link is not None
        copy = partial(self._tensor.copy_, values, non_blocking=True)
        self._coming = self.link.to_host.start(copy, on_device=[values], on_host=[self._tensor])

    def add(self, values: Tensor) -> None:
        """Starts to add values on the device, which nobody writes to any more; it makes the sum, beside what it computes.

        Piece by piece, so that it never has a copy of the whole sum.
        """
        assert self.link is not None
        total = self._tensor

        def add() -> None:
            for here, there in zip(total.split(SUM_NUMEL), values.split(SUM_NUMEL), strict=True):
                here.copy_(here.to(there.device, non_blocking=True).add_(there), non_blocking=True)

        self._coming = self.link.to_host.start(add, on_device=[values], on_host=[total])

    def free(self) -> None:
        """Python frees it with the last tensor on it."""


class MemoryHome:
    """Vectors lie in the memory of one device: the accelerator's, or the host's for ZeRO-Offload (arXiv:2101.06840).

    Args:
        pin: pages are locked, so that a CUDA device copies from and to them while it computes.
        link: to the device that computes, where this is the host beside it; without it copies are waited for.
    """

    def __init__(self, device: torch.device, pin: bool = False, link: Link | None = None) -> None:
        self.device, self.link = device, link
        is_pinned = pin and device.type == "cpu" and torch.cuda.is_available()
        self._pages = PagePool() if is_pinned else None

    @property
    def nbytes(self) -> int:
        """Pinned memory that no vector has now: gradients come back to it in every step."""
        return 0 if self._pages is None else self._pages.spare_nbytes

    def vector(self, numel: int, dtype: torch.dtype) -> MemoryVector:
        """A new vector, uninitialised."""
        if self._pages is None:
            return MemoryVector(torch.empty(numel, dtype=dtype, device=self.device), self.link)
        return MemoryVector(self._pages.empty(numel * dtype.itemsize).view(dtype), self.link)

    def bring(self, values: Tensor, room: int) -> MemoryVector:
        """As `Home.bring`."""
        assert self.link is not None
        self.link.to_host.make_room()
        vector = MemoryVector(self.vector(room, values.dtype).resident[: values.numel()], self.link)
        vector.send(values)
        return vector

    def hold(self, values: Tensor, copy: bool = False) -> MemoryVector:
        """The values themselves where they lie here, else a copy, which comes while the device goes on where there is a link."""
        values = values.detach()
        if self.link is not None and values.device == self.link.device:
            self.link.to_host.make_room()
            vector = self.vector(values.numel(), values.dtype)
            vector.send(values.clone() if copy else values)
        elif values.device == self.device:
            vector = MemoryVector(values.clone() if copy else values, self.link)
        else:
            vector = self.vector(values.numel(), values.dtype)
            vector.resident.copy_(values)
        return vector

    def flush(self) -> None:
        """Nothing is under way but what `at_hand` waits for."""


def moved(vector: Vector, home: Home) -> Vector:
    """A vector of the same values in another home; the old one is given back."""
    with vector.at_hand() as values:
        there = home.hold(values, copy=vector.resident is None)
    vector.free()
    return there
