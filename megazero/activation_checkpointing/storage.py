"""Where the inputs of checkpointed calls rest until the backward, if not simply where they are.

What is kept of one call lies in one flat buffer of bytes, whichever way it is kept: whole or this rank's 1/t of each tensor
(ZeRO, arXiv:1910.02054, sec. 6.1), in memory of its own or in a slot of an `_Arena`, on the device, in pinned host memory or in a
swap file. So a call costs one copy to put away, and one copy and one all-gather to get back, started ahead of their use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megazero import comm
from megazero.activation_checkpointing.options import CheckpointSettings
from megazero.comm import Channel, Work
from megazero.comm.lane import Finished
from megazero.nvme import PagePool, SwapFile
from megazero.zero.arrival import Arrival
from megazero.zero.home import MemoryVector
from megazero.zero.link import Link
from megazero.zero.nvme_home import NvmeHome, SwappedVector

# Bytes. cuBLAS chooses its algorithm by the alignment of its operands up to this, and another one may round differently.
_ALIGNMENT = 256
# In host memory, through which calls go to a drive and come back: a forward waits if the drive is so many calls behind.
BUFFERS = 4


@dataclass(frozen=True)
class _Place:
    """Where one tensor lies in a buffer, or its parts in the buffers of all ranks."""

    shape: torch.Size  # of the tensor with its dimensions in `order`
    order: tuple[int, ...]  # its dimensions as they lie in memory, outermost first
    dtype: torch.dtype
    part_numel: int  # on every rank; what the last parts have beyond the tensor is never read
    start: int  # bytes
    stop: int

    @classmethod
    def of(cls, x: Tensor, parts: int, start: int) -> _Place:
        """The place for `x`, cut into `parts`, behind `start` bytes."""
        order = tuple(sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True))
        if not x.permute(order).is_contiguous():  # it has gaps or overlaps: it comes back contiguous
            order = tuple(range(x.dim()))
        part_numel = -(-x.numel() // parts)
        stop = start + part_numel * x.element_size()
        return cls(x.permute(order).shape, order, x.dtype, part_numel, start, stop)

    def write(self, x: Tensor, buffer: Tensor, part: int) -> None:
        """Copies the part of `x` into `buffer`."""
        own = x.detach().permute(self.order).reshape(-1)[part * self.part_numel : (part + 1) * self.part_numel]
        buffer[self.start : self.stop].view(self.dtype)[: own.numel()].copy_(own)

    def read(self, buffers: Tensor) -> Tensor:
        """The tensor again, from the buffers of all ranks [parts, bytes]; a view of them where it is not cut by others."""
        flat = buffers[:, self.start : self.stop].reshape(-1).view(self.dtype)
        x = flat[: self.shape.numel()].view(self.shape)
        return x.permute(sorted(range(len(self.order)), key=self.order.__getitem__))


class _Arena:
    """One storage [calls, bytes] with a slot for each call, all of which keep as much. It lives as long as what lies in it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.free = list(range(memory.size(0)))[::-1]

    def take(self) -> tuple[Tensor, Callable[[], None]]:
        """The bytes of a free slot, and what gives the slot back.

        Raises:
            RuntimeError: all slots are in use.
        """
        if not self.free:
            count, nbytes = self.memory.shape
            raise RuntimeError(
                f"contiguous checkpointing has room for num_checkpoints={count} calls that keep {nbytes} bytes each, "
                "and this is one more before their backward. Raise num_checkpoints (--num-checkpoints; number_checkpoints in the "
                "file); after forwards without a backward call reset(); a second model can have an ActivationCheckpointer of its "
                "own."
            )
        index = self.free.pop()
        return self.memory[index], lambda: self.free.append(index)


class _InMemory(MemoryVector):
    """The bytes of one call in memory: where the device computes, or on the host, beyond a link."""

    def __init__(self, home: Tensor, link: Link | None, give_back: Callable[[], None]) -> None:
        """`give_back` is called when `home` is free again."""
        super().__init__(home, link)
        self._give_back = give_back

    @contextmanager
    def filled(self) -> Iterator[Tensor]:
        """Memory on the device for the bytes, which start on their way to where they rest at the end of the block."""
        if self.link is None:
            yield self.resident
        else:
            buffer = torch.empty_like(self.resident, device=self.link.device)
            yield buffer
            self.send(buffer)

    def free(self) -> None:
        """Gives the memory back."""
        self._give_back()


class _OnDrive(SwappedVector):
    """The bytes of one call in the swap file; in memory while they are written, and from `prefetch` on."""

    def filled(self) -> AbstractContextManager[Tensor]:
        """Host memory for the bytes, which start on their way to the file at the end of the block."""
        return self.at_hand(reads=False, writes=True)


class Kept:
    """What is kept of one call, on its way out, at rest, or on its way back."""

    def __init__(self, storage: Storage, tensors: Sequence[Tensor], channel: Channel | None) -> None:
        """Puts the tensors away: all floating-point, on this process's device, and equal on all ranks of the channel.

        Raises:
            RuntimeError: there are more than `num_checkpoints` at a time.
            OSError: the swap file cannot be made, or the disk is full; the message names rank and directory.
        """
        self._rest: _InMemory | _OnDrive | None = None  # stays None if there is no room; None again when it is given up
        self._back: tuple[Tensor, Work] | None = None
        self._storage, self._channel = storage, channel
        self._parts, self._part = (channel.size, channel.rank) if channel else (1, 0)
        self._places: list[_Place] = []
        self.nbytes = 0
        for x in tensors:
            place = _Place.of(x, self._parts, self.nbytes)
            self._places.append(place)
            self.nbytes = -(-place.stop // _ALIGNMENT) * _ALIGNMENT
        self._rest = rest = storage.rest(self.nbytes)
        storage.kept_bytes += self.nbytes
        with rest.filled() as buffer:
            for place, x in zip(self._places, tensors, strict=True):
                place.write(x, buffer, self._part)

    def start(self) -> None:
        """Starts the way back, unless that has been done: copies, and asks the other ranks for their parts."""
        if isinstance(self._rest, _OnDrive):
            self._rest.prefetch()
        elif self._rest is not None and self._back is None:
            self._back = self._gathered(self._rest)

    def fetch(self) -> list[Tensor]:
        """New tensors with the values that were kept.

        Raises:
            RuntimeError: they were released.
            OSError: the swap file could not be written or read.
        """
        if self._rest is None:
            raise RuntimeError(
                "checkpoint: the backward runs a second time through a checkpointed function whose inputs were given up after "
                "the first time. Use backward(retain_graph=True) the first time."
            )
        (whole, work), self._back = self._back or self._gathered(self._rest), None
        work.wait()
        # By `.data`: views of one buffer share their version, and autograd would refuse all if the function changes one in place.
        return [place.read(whole.view(self._parts, -1)).data for place in self._places]

    def _gathered(self, rest: _InMemory | _OnDrive) -> tuple[Tensor, Work]:
        """The buffers of all ranks on the device, when the work is done."""
        whole = torch.empty(self._parts * self.nbytes, dtype=torch.uint8, device=self._storage.device)
        part, gather = whole.view(self._parts, -1)[self._part], partial(self._gather, whole)
        return whole, Arrival(whole.device, comes_ahead=False).fill(rest, part, gather)

    def _gather(self, whole: Tensor) -> Work:
        """Starts to bring the other ranks' parts."""
        if self._channel is None:
            return Finished()
        return self._channel.all_gather_(whole, "activation checkpoint")

    def release(self) -> None:
        """Gives up what is kept, and its place."""
        if self._rest is not None:
            rest, self._rest, self._back = self._rest, None, None
            self._storage.kept_bytes -= self.nbytes
            rest.free()

    def __del__(self) -> None:
        self.release()


class Storage:
    """Where calls keep their tensors, as the settings say.

    Attributes:
        kept_bytes: that this rank keeps now, in copies, wherever they rest. What is held by reference is not counted.
        link: between the host's memory and the device; None where nothing rests there.
    """

    def __init__(self, settings: CheckpointSettings) -> None:
        self.settings = settings
        self.device = comm.local_device()
        self.kept_bytes = 0
        # Calls that keep equally much share an arena; nothing but the calls themselves holds on to it.
        self._arenas: WeakValueDictionary[int, _Arena] = WeakValueDictionary()
        # Made when they are needed, the home anew for larger calls.
        self._swap: SwapFile | None = None
        self._on_drive: NvmeHome | None = None
        is_offloaded = settings.checkpoint_in_cpu and comm.has_streams(self.device)
        self.link = Link.to(self.device, pin=True) if is_offloaded else None
        self._pages = PagePool(sizes_vary=True)

    @property
    def is_elsewhere(self) -> bool:
        """Whether calls rest outside the memory of the device that computes."""
        return self.link is not None or self.settings.checkpoint_nvme_path is not None

    def copies(self, channel: Channel | None) -> bool:
        """Whether a `Kept` would keep other memory than the tensors themselves."""
        return channel is not None or self.settings.contiguous_checkpointing or self.is_elsewhere

    def rest(self, nbytes: int) -> _InMemory | _OnDrive:
        """A place for what a call keeps; errors as of `Kept`."""
        settings = self.settings
        if settings.checkpoint_nvme_path is not None:
            if self._swap is None:
                rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
                self._swap = SwapFile(settings.checkpoint_nvme_path, rank)
            if self._on_drive is None or nbytes > self._on_drive.buffer_nbytes:
                self._on_drive = NvmeHome(self._swap, nbytes, BUFFERS, pin=comm.has_streams(self.device))
            return _OnDrive(self._on_drive, nbytes, torch.uint8)
        if self.link is not None:
            self.link.to_device.finish()  # of the backward before, so that its pages are there again
            self.link.to_host.make_room()  # before the device's memory is taken that the next ones are sent from
        if settings.contiguous_checkpointing:
            home, give_back = self._arena(nbytes).take()
        else:
            home, give_back = self._memory(nbytes), lambda: None
        return _InMemory(home, self.link, give_back)

    def _arena(self, nbytes: int) -> _Arena:
        arena = self._arenas.get(nbytes)
        if arena is None:
            count = self.settings.num_checkpoints
            assert count is not None  # the settings were checked
            arena = self._arenas[nbytes] = _Arena(self._memory(count * nbytes).view(count, nbytes))
        return arena

    def _memory(self, nbytes: int) -> Tensor:
        """A uint8 tensor [nbytes] where calls rest."""
        if self.link is not None:
            return self._pages.empty(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def reset(self) -> None:
        """Forgets the arenas: new calls take new ones. What lies in the old ones stays valid."""
        self._arenas.clear()
