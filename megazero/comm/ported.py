"""torch.distributed's functions as `deepspeed.comm` offers them: in place, over the world by default. For scripts, not for us.

`isend` and `irecv` are torch's very own, without DeepSpeed's profiling arguments: `P2POp` knows them by identity.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import (
    P2POp,
    ReduceOp,
    destroy_process_group,
    get_backend,
    get_global_rank,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    new_group,
)
from torch.distributed import get_process_group_ranks as get_all_ranks_from_group

from megazero.comm.join import get_local_rank
from megazero.comm.world import barrier as _barrier
from megazero.comm.world import world as get_world_group

__all__ = [
    "P2POp",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_backend",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]


def _ported(function: Callable[..., Any], **names: str) -> Callable[..., Any]:
    """A function of torch's that takes DeepSpeed's `names` of its arguments too, and those of its profiler without effect."""

    @wraps(function)
    def call(*args: Any, prof: bool = False, log_name: str = "", debug: str = "", **kwargs: Any) -> Any:
        return function(*args, **{names.get(name, name): value for name, value in kwargs.items()})

    return call


all_gather = _ported(dist.all_gather)
all_gather_into_tensor = allgather_fn = _ported(dist.all_gather_into_tensor, tensor="input_tensor")
all_gather_object = _ported(dist.all_gather_object)
all_reduce = _ported(dist.all_reduce)
all_to_all = _ported(dist.all_to_all)
all_to_all_single = _ported(dist.all_to_all_single, tensor="input")
barrier = _ported(_barrier)
batch_isend_irecv = _ported(dist.batch_isend_irecv)
broadcast = _ported(dist.broadcast)
broadcast_object_list = _ported(dist.broadcast_object_list)
gather = _ported(dist.gather)
monitored_barrier = _ported(dist.monitored_barrier)
recv = _ported(dist.recv)
reduce = _ported(dist.reduce)
reduce_scatter = _ported(dist.reduce_scatter)
reduce_scatter_tensor = reduce_scatter_fn = _ported(dist.reduce_scatter_tensor, output_tensor="output", tensor="input")
scatter = _ported(dist.scatter)
send = _ported(dist.send)
