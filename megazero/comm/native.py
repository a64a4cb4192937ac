"""The backend's own asynchronous collectives: NCCL's.

Reductions and gathers share one process group, that is one communicator and one stream. With two, a gather could overlap a
reduction, but kernels of two communicators that run in another order on another rank can wait for each other for ever, and
NCCL asks for one order over all communicators. In one queue there is one order to keep: that in which the collectives are
issued, which is equal on all ranks as long as all of them run the same graph. Nothing compares the names of collectives here:
ranks that issue them in another order get a hang or each other's data.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from megazero.comm.work import Work
from megazero.comm.world import ProcessGroup, backend_of

# torch 2.13 renamed these, and warns at the old names.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class NativeLane:
    """Collectives in place on a process group of their own: in NCCL's terms a communicator and its stream."""

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        """Collective over the world where that is bound to devices, as `init_distributed` binds NCCL's.

        There torch splits the world's communicator, which all of its ranks must enter at the same time, each for its own group.
        """
        self._group = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timedelta(seconds=timeout_s),
            backend=backend_of(group),
            use_local_synchronization=True,
        )

    def issue(self, action: str, buffer: Tensor, name: str) -> Work:
        """Starts the collective; the `Work` is torch's, whose `wait` makes the current stream wait, not the host."""
        part = buffer.view(self._group.size(), -1)[self._group.rank()]
        if action == "all_reduce":
            return dist.all_reduce(buffer, group=self._group, async_op=True)
        if action == "reduce_scatter":
            return _reduce_scatter(part, buffer, group=self._group, async_op=True)
        return _all_gather(buffer, part, group=self._group, async_op=True)

    def close(self) -> None:
        """Leaves the group to `destroy_process_group`: torch names groups after how many exist, so none may go before."""
