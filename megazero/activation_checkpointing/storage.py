"""Where the inputs of checkpointed calls rest until the backward, if not simply where they are.

What is kept of one call lies in one flat buffer of bytes, whichever way it is kept: whole or this rank's 1/t of each tensor
(ZeRO, arXiv:1910.02054, sec. 6.1), in memory of its own or in a slot of an `_Arena`, on the device, in pinned host memory or in a
swap file. So a call costs one copy to put away, and one copy and one all-gather to get back, started ahead of their use.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megazero import comm
from megazero.activation_checkpointing.options import CheckpointSettings
from megazero.comm import Channel, Work
from megazero.nvme import SwapFile, Transfer, aligned_empty, padded

# Bytes. cuBLAS chooses its algorithm by the alignment of its operands up to this, and another one may round differently.
_ALIGNMENT = 256


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
    """One storage with a slot for each of `count` calls that keep `nbytes` each. It lives as long as what lies in it."""

    def __init__(self, count: int, nbytes: int, device: torch.device, is_pinned: bool) -> None:
        self.nbytes, self.count = nbytes, count
        self.memory = torch.empty(count * nbytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)
        self.free = list(range(count))[::-1]

    def take(self) -> tuple[int, Tensor]:
        """A free slot: its number and its bytes.

        Raises:
            RuntimeError: all slots are in use.
        """
        if not self.free:
            raise RuntimeError(
                f"contiguous checkpointing has room for num_checkpoints={self.count} calls that keep {self.nbytes} bytes each, "
                "and this is one more before their backward. Raise num_checkpoints (--num-checkpoints; number_checkpoints in the "
                "file); after forwards without a backward call reset(); a second model can have an ActivationCheckpointer of its "
                "own."
            )
        index = self.free.pop()
        return index, self.memory[index * self.nbytes : (index + 1) * self.nbytes]


class _InMemory:
    """The bytes of one call in memory, on the device or, over a side stream, in pinned memory of the host."""

    def __init__(self, home: Tensor, storage: Storage, arena: _Arena | None = None, slot: int = 0) -> None:
        self.home, self._storage = home, storage
        self._arena, self._slot = arena, slot

    def buffer(self) -> Tensor:
        """Where the bytes are written to, on the device."""
        if self._storage.side_stream is None:
            return self.home
        return torch.empty_like(self.home, device=self._storage.device)

    def put(self, buffer: Tensor) -> None:
        """Starts to copy them to where they rest, if that is somewhere else."""
        side = self._storage.side_stream
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.home.copy_(buffer, non_blocking=True)
            buffer.record_stream(side)

    def bring(self) -> Tensor:
        """The bytes, where they rest."""
        return self.home

    def free(self) -> None:
        """Gives the slot back."""
        if self._arena is not None:
            self._arena.free.append(self._slot)


class _OnDrive:
    """The bytes of one call in the swap file; in memory while they are written and from `start` on."""

    def __init__(self, swap: SwapFile, nbytes: int) -> None:
        self._swap, self._region, self._nbytes = swap, swap.allocate(nbytes), nbytes
        self._write: Transfer | None = None
        self._read: tuple[Tensor, Transfer] | None = None

    def buffer(self) -> Tensor:
        """Whole pages of host memory for the bytes."""
        return aligned_empty(padded(self._nbytes), pin=True)

    def put(self, buffer: Tensor) -> None:
        """Starts to write; the transfer holds the memory until it has ended."""
        self._write = self._swap.write(self._region, buffer)

    def start(self) -> None:
        """Starts to read, behind the write, unless that has been done."""
        if self._read is None:
            buffer = self.buffer()
            self._read = buffer, self._swap.read(self._region, buffer, after=self._write)

    def bring(self) -> Tensor:
        """The bytes.

        Raises:
            OSError: they could not be written or read.
        """
        self.start()
        assert self._read is not None
        (buffer, transfer), self._read = self._read, None
        transfer.wait()
        return buffer[: self._nbytes]

    def free(self) -> None:
        """Gives the place back, when what is under way there has ended."""
        if not self._swap.is_closed:
            self._swap.free(self._region)


class Kept:
    """What is kept of one call, on its way out, at rest, or on its way back."""

    def __init__(self, storage: Storage, tensors: Sequence[Tensor], channel: Channel | None) -> None:
        """Puts the tensors away: all floating-point, on this process's device, and equal on all ranks of the channel.

        Raises:
            RuntimeError: there are more than `num_checkpoints` at a time.
            OSError: the swap file cannot be made, or the disk is full; the message names rank and directory.
        """
        self._rest: _InMemory | _OnDrive | None = None  # stays None if there is no room; None again when it is given up
        self._back: tuple[Tensor, Work | None] | None = None
        self._storage, self._channel = storage, channel
        self._parts, self._part = (channel.size, channel.rank) if channel else (1, 0)
        self._places: list[_Place] = []
        end = 0
        for x in tensors:
            place = _Place.of(x, self._parts, -(-end // _ALIGNMENT) * _ALIGNMENT)
            self._places.append(place)
            end = place.stop
        self.nbytes = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._rest = rest = storage.rest(self.nbytes)
        storage.kept_bytes += self.nbytes
        buffer = rest.buffer()
        for place, x in zip(self._places, tensors, strict=True):
            place.write(x, buffer, self._part)
        rest.put(buffer)

    def start(self) -> None:
        """Starts the way back, unless that has been done: copies, and asks the other ranks for their parts."""
        if isinstance(self._rest, _OnDrive):
            self._rest.start()
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
        if work is not None:
            work.wait()
        if self._storage.side_stream is not None:
            torch.cuda.current_stream().wait_stream(self._storage.side_stream)
            whole.record_stream(torch.cuda.current_stream())
        return [place.read(whole.view(self._parts, -1)) for place in self._places]

    def _gathered(self, rest: _InMemory | _OnDrive) -> tuple[Tensor, Work | None]:
        """The buffers of all ranks on the device, when the work is done."""
        own, side = rest.bring(), self._storage.side_stream
        with nullcontext() if side is None else torch.cuda.stream(side):
            whole = torch.empty(self._parts * self.nbytes, dtype=torch.uint8, device=self._storage.device)
            # From a drive it came into a buffer that goes now: the copy must have ended.
            whole.view(self._parts, -1)[self._part].copy_(own, non_blocking=isinstance(rest, _InMemory))
            if self._channel is None:
                return whole, None
            self._storage.gathers += 1
            return whole, self._channel.all_gather_(whole, "activation checkpoint")

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
        gathers: all-gathers that were started.
        side_stream: what copies to and from the host go through, in order; None where nothing rests there.
    """

    def __init__(self, settings: CheckpointSettings) -> None:
        self.settings = settings
        self.device = comm.local_device()
        self.kept_bytes = self.gathers = 0
        # Calls that keep equally much share an arena; nothing but the calls themselves holds on to it.
        self._arenas: WeakValueDictionary[int, _Arena] = WeakValueDictionary()
        self._swap: SwapFile | None = None  # made when it is needed
        is_offloaded = settings.checkpoint_in_cpu and comm.has_streams(self.device)
        self.side_stream = torch.cuda.Stream() if is_offloaded else None

    def copies(self, channel: Channel | None) -> bool:
        """Whether a `Kept` would keep other memory than the tensors themselves."""
        settings = self.settings
        is_elsewhere = self.side_stream is not None or settings.checkpoint_nvme_path is not None
        return channel is not None or settings.contiguous_checkpointing or is_elsewhere

    def rest(self, nbytes: int) -> _InMemory | _OnDrive:
        """A place for what a call keeps; errors as of `Kept`."""
        settings = self.settings
        if settings.checkpoint_nvme_path is not None:
            if self._swap is None:
                rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
                self._swap = SwapFile(settings.checkpoint_nvme_path, rank)
            return _OnDrive(self._swap, nbytes)
        is_pinned = self.side_stream is not None
        device = torch.device("cpu") if is_pinned else self.device
        if not settings.contiguous_checkpointing:
            return _InMemory(torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=is_pinned), self)
        arena = self._arenas.get(nbytes)
        if arena is None:
            assert settings.num_checkpoints is not None  # the settings were checked
            arena = self._arenas[nbytes] = _Arena(settings.num_checkpoints, nbytes, device, is_pinned)
        slot, home = arena.take()
        return _InMemory(home, self, arena, slot)

    def reset(self) -> None:
        """Forgets the arenas: new calls take new ones. What lies in the old ones stays valid."""
        self._arenas.clear()
