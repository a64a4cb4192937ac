"""Synchronous collectives on tensors of any shape: what tensor parallelism, norms and data loading stand on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.lane import Finished, Work
from megazero.comm.world import ProcessGroup, backend_of, has_streams, local_device


def all_reduced(x: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The reduction of `x` over `group`, in a new tensor (`x` itself for a group of one)."""
    if group.size() == 1:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=op, group=group)
    # In a compiled graph torch 2.11 gives a custom function whose result was made by an operation in place no gradient.
    return out.view_as(out) if torch.compiler.is_compiling() else out


def start_all_reduce(buffer: Tensor, group: ProcessGroup) -> Work:
    """Starts to sum `buffer` over `group` in place. Returns what to wait for."""
    return Finished() if group.size() == 1 else dist.all_reduce(buffer, group=group, async_op=True)


def all_gathered(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    """`x` of every rank of `group`, in rank order, on the device of `x`. The shape must be the same on every rank."""
    if group.size() == 1:
        return [x]
    own = x.contiguous()
    # NCCL takes no tensors in host memory. The backend is asked last, because under torch.compile torch 2.8 cannot tell it.
    if x.device.type != local_device().type and backend_of(group) == "nccl":
        own = own.to(local_device())
    out = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(out, own, group=group)
    return [part.to(x.device) for part in out]


def broadcast_(buffer: Tensor, group: ProcessGroup, source: int = 0) -> None:
    """Overwrites `buffer`, which is contiguous, with the buffer of rank `source` of the group."""
    if group.size() > 1:  # as bytes: every backend sends them, whatever the dtype
        dist.broadcast(buffer.view(-1).view(torch.uint8), group=group, group_src=source)


class Readout:
    """A copy of `x` on its way to host memory: it starts as soon as the device has computed `x`, and the host reads it later."""

    def __init__(self, x: Tensor) -> None:
        self._on_host = x.to("cpu", non_blocking=True)  # in pinned memory, of torch's own accord
        self._copied = torch.cuda.current_stream(x.device).record_event() if has_streams(x.device) else None

    def read(self) -> Tensor:
        """The copy. Waits for it, but not for anything that the device was given later."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._on_host
