"""Vectors in a swap file (ZeRO-Infinity, arXiv:2104.07857, sec. 6.3), read ahead of use and written in the background."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.nvme import PAGE, Region, SwapFile, Transfer, aligned_empty, padded
from megazero.zero.home import MemoryHome
from megazero.zero.link import Link


class _Place(NamedTuple):
    """A range of bytes of a vector's region, in whole pages."""

    low: int
    high: int

    def overlaps(self, other: _Place) -> bool:
        return self.low < other.high and other.low < self.high


class NvmeHome:
    """A home whose vectors lie in a swap file. Parts at hand lie in host memory, in page-aligned buffers that are reused.

    Args:
        swap: the file.
        buffer_nbytes: size of a buffer; larger pieces get memory of their own.
        buffer_count: most buffers, unless more are at hand at the same time.
        reads_ahead: whether `prefetch` starts to read; else every read is waited for.
        writes_behind: whether a write continues after its `with` block; else the block ends when the write has finished.
        pin: page-lock the buffers for a CUDA device.
        link: the link to the device that computes, if that is not the host; without a link copies are waited for.
    """

    def __init__(
        self,
        swap: SwapFile,
        buffer_nbytes: int,
        buffer_count: int,
        *,
        reads_ahead: bool = True,
        writes_behind: bool = True,
        pin: bool = False,
        link: Link | None = None,
    ) -> None:
        self.swap, self.reads_ahead, self.writes_behind, self.pin = swap, reads_ahead, writes_behind, pin
        self.device, self.link = torch.device("cpu"), link
        self.memory = MemoryHome(self.device, pin, link)  # for what goes to no file
        self.buffer_nbytes = padded(max(1, buffer_nbytes))
        self._most, self._made = buffer_count, 0
        self._spare: deque[Tensor] = deque()  # buffers; the swap file's threads call `give_back`
        self._writes: deque[Transfer] = deque()  # oldest first
        self._lock = threading.Lock()  # a delayed update also reads and writes here, in its own thread

    def vector(self, numel: int, dtype: torch.dtype) -> SwappedVector:
        """A place in the file."""
        return SwappedVector(self, numel, dtype)

    def hold(self, values: Tensor, copy: bool = False) -> SwappedVector:
        """A place in the file, with these values on their way to it."""
        values = values.detach()
        is_across = self.link is not None and values.device == self.link.device
        if self.link is not None and is_across and copy:
            self.link.to_host.make_room()
            values = values.clone()
        vector = self.vector(values.numel(), values.dtype)
        # In pieces of whole pages: a buffer for all of it would take the memory that is to be saved.
        most = self.buffer_nbytes // values.element_size()
        for start in range(0, vector.numel, most):
            piece = values[start : start + most]
            if is_across:
                vector.send(piece, start)
            else:
                with vector.at_hand(start, start + piece.numel(), reads=False, writes=True) as place:
                    place.copy_(piece)
        return vector

    def flush(self) -> None:
        """Returns when everything that was written has arrived.

        Raises:
            OSError: a write has failed, now or earlier; the message names file, offset and rank.
        """
        while True:
            with self._lock:
                if not self._writes:
                    break
                write = self._writes[0]
            self._await(write)
        self.swap.raise_failure()

    def _await(self, write: Transfer) -> None:
        """Waits for a write, which a `flush` in another thread finds until it is over."""
        try:
            write.wait()
        finally:
            with self._lock:
                if write.done() and write in self._writes:  # not after an interrupt, nor if another thread was first
                    self._writes.remove(write)

    @property
    def nbytes(self) -> int:
        """Host memory of the buffers, and pinned memory of `memory` that no vector uses at the moment."""
        return self._made * self.buffer_nbytes + self.memory.nbytes

    def take(self, nbytes: int) -> Tensor:
        """A buffer of at least `nbytes`, uint8; waits for older writes if all buffers are in use."""
        if nbytes > self.buffer_nbytes:
            self.flush()  # so that no second one is in use
            return aligned_empty(nbytes, self.pin)
        while True:
            with self._lock:
                if self._spare:
                    return self._spare.pop()
                if self._made < self._most or not self._writes:  # no write: more are at hand than buffer_count
                    self._made += 1
                    break
                write = self._writes[0]
            self._await(write)
        return aligned_empty(self.buffer_nbytes, self.pin)

    def give_back(self, buffer: Tensor) -> None:
        """Returns a buffer for reuse; a larger one than the others is freed instead."""
        if buffer.nbytes == self.buffer_nbytes:
            self._spare.append(buffer)  # no lock: a finalizer may run while this thread has it

    def written(self, transfer: Transfer) -> None:
        """Records a write that has begun; waits for it unless `writes_behind`."""
        if not self.writes_behind:
            transfer.wait()
            return
        with self._lock:
            while self._writes and self._writes[0].done():  # the file tells if it failed
                self._writes.popleft()
            self._writes.append(transfer)


class SwappedVector:
    """A vector in a swap file. `at_hand` gives a copy, which is written back at the end of the block if `writes`."""

    resident = None  # nothing of it stays in memory

    def __init__(self, home: NvmeHome, numel: int, dtype: torch.dtype) -> None:
        self.home, self.numel, self.dtype, self.link = home, numel, dtype, home.link
        self._region = home.swap.allocate(numel * dtype.itemsize)
        self._ahead: dict[_Place, tuple[Tensor, Transfer]] = {}
        self._behind: dict[_Place, Transfer] = {}
        self._finalizer = weakref.finalize(self, _free, home, self._region, self._ahead)
        self._finalizer.atexit = False  # the file ends with the process anyway

    @property
    def is_here(self) -> bool:
        """Whether all of it has been read ahead."""
        _, read = self._ahead.get(self._place(0, None), (None, None))
        return read is not None and read.done()

    def prefetch(self, start: int = 0, stop: int | None = None) -> None:
        """Starts to read this part for a later `at_hand` of the same part."""
        place = self._place(start, stop)
        if self.home.reads_ahead and place.low < place.high and place not in self._ahead:
            self._ahead[place] = self._read(place)

    @contextmanager
    def at_hand(
        self, start: int = 0, stop: int | None = None, *, reads: bool = True, writes: bool = False
    ) -> Iterator[Tensor]:
        """This part in host memory; see `Vector.at_hand`. Parts that share its pages must not be written at the same time.

        Raises:
            OSError: it could not be read, or an earlier write to the file failed.
        """
        self.home.swap.raise_failure()  # even if this part was read ahead, or is overwritten
        place, stop, size = self._place(start, stop), self.numel if stop is None else stop, self.dtype.itemsize
        if place.low == place.high:
            yield torch.empty(0, dtype=self.dtype, device="cpu")
            return
        has_others = place.low < start * size or stop * size < min(place.high, self.numel * size)
        buffer = self._bring(place) if reads or has_others else self._blank(place)
        first = start - place.low // size
        part = buffer[: place.high - place.low].view(self.dtype)[first : first + stop - start]
        vector, give_back, is_kept = self if writes else None, _giving_back_to(self.home), False
        del self  # a copy over the link keeps this block open until it is over
        try:
            yield part
            if vector is not None:
                is_kept = True  # until it has been written: an interrupt may come when that has begun
                vector.home.written(vector._write(place, buffer))
        finally:
            if not is_kept:
                give_back(buffer)

    def send(self, values: Tensor, start: int) -> None:
        """Starts to write values on the device, at most one buffer of them, to the elements from `start` on.

        `start` must begin a page. Nobody may write to `values` from now on.
        """
        assert self.link is not None
        place = self._place(start, start + values.numel())
        buffer = self._blank(place)
        part = buffer[: values.nbytes].view(self.dtype)
        copy = partial(part.copy_, values, non_blocking=True)
        crossing = self.link.to_host.start(copy, on_device=[values], on_host=[part])
        self.home.written(self._write(place, buffer, crossing.wait))

    def free(self) -> None:
        """Returns the place in the file."""
        self._finalizer()

    def _place(self, start: int, stop: int | None) -> _Place:
        size = self.dtype.itemsize
        stop = self.numel if stop is None else stop
        if start >= stop:
            return _Place(0, 0)
        return _Place(start * size // PAGE * PAGE, padded(stop * size))

    def _bring(self, place: _Place) -> Tensor:
        buffer, transfer = self._ahead.pop(place) if place in self._ahead else self._read(place)
        try:
            transfer.wait()
        except BaseException:
            self._give_back_after(transfer, buffer)  # after a KeyboardInterrupt the read still runs
            raise
        return buffer

    def _blank(self, place: _Place) -> Tensor:
        self._drop_ahead(place)
        return self.home.take(place.high - place.low)

    def _read(self, place: _Place) -> tuple[Tensor, Transfer]:
        self._await_writes(place)
        buffer = self.home.take(place.high - place.low)
        return buffer, self.home.swap.read(self._region, buffer[: place.high - place.low], place.low)

    def _write(self, place: _Place, buffer: Tensor, filled: Callable[[], None] | None = None) -> Transfer:
        self._drop_ahead(place)
        self._await_writes(place)
        transfer = self.home.swap.write(self._region, buffer[: place.high - place.low], place.low, filled=filled)
        self._behind[place] = transfer
        self._give_back_after(transfer, buffer)
        return transfer

    def _give_back_after(self, transfer: Transfer, buffer: Tensor) -> None:
        give_back = _giving_back_to(self.home)
        transfer.then(lambda _: give_back(buffer))

    def _await_writes(self, place: _Place) -> None:
        for other, transfer in list(self._behind.items()):
            if transfer.done() or other.overlaps(place):
                del self._behind[other]
                transfer.wait()

    def _drop_ahead(self, place: _Place) -> None:
        """Discards parts read ahead that overlap the place, which is about to be written."""
        for other in [other for other in self._ahead if other.overlaps(place)]:
            buffer, transfer = self._ahead.pop(other)
            self._give_back_after(transfer, buffer)


def _giving_back_to(home: NvmeHome) -> Callable[[Tensor], None]:
    """`home.give_back` for transfers and copies under way, which must hold neither vectors nor their home.

    Vectors and home refer to what is under way (the home through its writes and its link), and finalizers refer to them. The
    garbage collector does not see such a cycle, so none of them would ever be freed.
    """
    there = weakref.ref(home)

    def give_back(buffer: Tensor) -> None:
        if (home := there()) is not None:
            home.give_back(buffer)

    return give_back


def _free(home: NvmeHome, region: Region, ahead: dict) -> None:
    """Frees a region; its place is reused once the transfers under way there have ended."""
    for buffer, transfer in ahead.values():
        transfer.then(lambda _, buffer=buffer: home.give_back(buffer))
    home.swap.free(region)
