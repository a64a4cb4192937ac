"""Host memory in whole pages, as IO that bypasses the page cache needs it."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for the devices of all contexts


class _Pages(mmap.mmap):
    """A mapping whose finalizers run before it is unmapped; those of `mmap.mmap` itself run afterwards."""


_mapped: weakref.WeakSet[_Pages] = weakref.WeakSet()
_of_the_parent: list[_Pages] = []

# A forked child (a worker of a DataLoader) lacks the pages and may have memory of its own at their addresses, so it keeps what it
# inherits: its collector would unmap that memory with them.
os.register_at_fork(after_in_child=lambda: _of_the_parent.extend(_mapped))


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def aligned_empty(nbytes: int, pin: bool = False) -> Tensor:
    """A uint8 tensor [nbytes] that starts at a page and has its pages to itself; all zero.

    torch's own pinned memory is rounded up to a power of two and never goes back to the system, so pages are mapped here and
    pinned by cudaHostRegister; both end with the tensor and its views. Wait for copies to or from a device before you drop it.

    Args:
        pin: page-lock it for CUDA; without a CUDA device there is nothing to pin it for.

    Raises:
        ValueError: `nbytes` is negative.
        MemoryError: the system refuses so much memory, or to pin it.
    """
    if nbytes < 0:
        raise ValueError(f"aligned_empty needs 0 bytes or more, got {nbytes}.")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(_map(nbytes, pin), dtype=torch.uint8, count=nbytes)


class PagePool:
    """Makes buffers as `aligned_empty(pin=True)` does, and uses them again for others of the same size: to lock pages takes long.

    A buffer comes back by itself, with the last tensor on it.

    Args:
        sizes_vary: a buffer is used for smaller ones too. Those that have become too small go when nobody has any.
    """

    def __init__(self, sizes_vary: bool = False) -> None:
        self._sizes_vary = sizes_vary
        self._spare: dict[int, list[_Pages]] = {}  # by bytes
        self._mapped = 0  # buffers

    @property
    def spare_nbytes(self) -> int:
        """Bytes that nobody uses now."""
        return sum(nbytes * len(pages) for nbytes, pages in self._spare.items())

    def empty(self, nbytes: int) -> Tensor:
        """A uint8 tensor [nbytes], uninitialised; errors as of `aligned_empty`."""
        if nbytes <= 0:
            return aligned_empty(nbytes)
        spare = self._spare.setdefault(self._size_for(nbytes), [])
        pages = spare.pop() if spare else self._map(nbytes)
        # An object that ends with the tensor, where the pages do not.
        lent = (ctypes.c_char * nbytes).from_buffer(pages)
        weakref.finalize(lent, spare.append, pages).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8)

    def _size_for(self, nbytes: int) -> int:
        """Of the smallest buffer there is for so many bytes; their own number where there is none."""
        if not self._sizes_vary:
            return nbytes
        size = min((size for size, spare in self._spare.items() if spare and size >= nbytes), default=None)
        if size is None and sum(map(len, self._spare.values())) == self._mapped:
            self._spare.clear()
            self._mapped = 0
        return nbytes if size is None else size

    def _map(self, nbytes: int) -> _Pages:
        pages = _map(nbytes, pin=True)
        self._mapped += 1
        return pages


def _map(nbytes: int, pin: bool) -> _Pages:
    try:
        pages = _Pages(-1, padded(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # Python's default is shared
    except OSError as error:
        raise MemoryError(f"no host memory for a buffer of {nbytes} bytes: {error.strerror}.") from error
    if hasattr(mmap, "MADV_DONTFORK"):  # open(2): a child must not share pages that O_DIRECT is reading into
        pages.madvise(mmap.MADV_DONTFORK)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer faults, and fewer misses of the translation cache
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    _mapped.add(pages)
    if pin and torch.cuda.is_available():
        _fault_in(pages)
        _pin(pages)
    return pages


def _fault_in(pages: _Pages) -> None:
    """Has the system supply the pages now, to all of torch's threads: cudaHostRegister would ask for them one by one."""
    torch.frombuffer(pages, dtype=torch.uint8)[::PAGE].fill_(0)


def _pin(pages: _Pages) -> None:
    runtime, address = torch.cuda.cudart(), ctypes.addressof(ctypes.c_char.from_buffer(pages))
    code = int(runtime.cudaHostRegister(address, len(pages), _PORTABLE))
    if code:
        with suppress(RuntimeError):  # CUDA tells its last error to whoever looks next: let that be this kernel
            torch.zeros(1, device="cuda")
        raise MemoryError(
            f"CUDA could not pin a buffer of {len(pages)} bytes of host memory (cudaHostRegister returned {code}). Free host "
            "memory, use smaller or fewer buffers (buffer_count, sub_group_size), or set pin_memory to false."
        )
    weakref.finalize(pages, _unpin, torch.cuda.current_device(), address).atexit = False  # at exit the driver does it


def _unpin(device: int, address: int) -> None:
    """In whatever thread the last tensor goes: a new one is on the first device, and would start CUDA there."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)
