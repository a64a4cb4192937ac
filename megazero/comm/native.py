"""The backend's own asynchronous collectives: NCCL's.

Reductions and gathers share one process group, that is one communicator and one stream. With two, a gather could overlap a
reduction, but kernels of two communicators that run in another order on another rank can wait for each other for ever, and
NCCL asks for one order over all communicators. In one queue there is one order to keep: that in which the collectives are
issued, which is equal on all ranks as long as all of them run the same graph. Nothing compares the names of collectives here:
ranks that issue them in another order get a hang or each other's data.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.work import Work
from megazero.comm.world import ProcessGroup

# torch 2.13 renamed these, and warns at the old names.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class NativeLane:
    """Collectives in place on process groups of its own: in NCCL's terms a communicator and its stream, or two."""

    def __init__(self, group: ProcessGroup, across: ProcessGroup | None = None) -> None:
        """Communicates nothing; nobody else uses the groups.

        Args:
            group: the ranks that a buffer is cut over.
            across: the ranks that have the same part in other such groups, whose sums are added up; None where there are none.
        """
        self._group, self._across = group, across
        self._beside: torch.cuda.Stream | None = None  # on which a step waits for the one before it

    def issue(self, action: str, buffer: Tensor, name: str) -> Work:
        """Starts the collective; the `Work` is torch's, whose `wait` makes the current stream wait, not the host."""
        if self._across is None or action == "all_gather":
            return self._start(action, buffer)
        if buffer.is_cuda:
            self._beside = self._beside or torch.cuda.Stream(buffer.device)
            self._beside.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._beside):
            self._start("reduce_scatter", buffer).wait()
            work = dist.all_reduce(self._part(buffer), group=self._across, async_op=True)
            if action == "all_reduce":
                work.wait()
                work = self._start("all_gather", buffer)
        return work

    def _start(self, action: str, buffer: Tensor) -> Work:
        if action == "all_reduce":
            return dist.all_reduce(buffer, group=self._group, async_op=True)
        if action == "reduce_scatter":
            return _reduce_scatter(self._part(buffer), buffer, group=self._group, async_op=True)
        return _all_gather(buffer, self._part(buffer), group=self._group, async_op=True)

    def _part(self, buffer: Tensor) -> Tensor:
        return buffer.view(self._group.size(), -1)[self._group.rank()]

    def close(self) -> None:
        """Leaves the groups to `destroy_process_group`: torch names groups after how many exist, so none may go before."""
