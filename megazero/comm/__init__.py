"""Collectives of the library: the one package that calls torch.distributed's communication functions.

A function that is named for its result (`all_reduced`) returns it in a NEW tensor, because autograd may share the input with
another branch. A function with a trailing underscore works in place, on a buffer that the caller owns. A `Channel`'s collectives
and `start_all_reduce` work in place too, and return at once: call `wait` on what they return before you use the buffer.

For scripts written for `deepspeed.comm`, names of torch.distributed (`all_reduce`, `all_gather`, ...) mean the same here as
there: see `ported`.
"""

from megazero.comm import ported
from megazero.comm.channel import Channel, timeout_of
from megazero.comm.collectives import Readout, all_gathered, all_reduced, broadcast_, start_all_reduce
from megazero.comm.join import init_distributed, is_left_by_nodes, leave_distributed, told_world
from megazero.comm.lane import Work
from megazero.comm.meeting import meet_world
from megazero.comm.ported import *  # noqa: F403
from megazero.comm.world import (
    OtherRankError,
    ProcessGroup,
    all_gathered_objects,
    broadcast_object,
    differing_names,
    even_out_groups,
    has_streams,
    is_destroyed,
    largest,
    largest_of_each,
    local_device,
    new_object_group,
    refuse_differences,
    together,
    world,
)

__all__ = [
    "Channel",
    "OtherRankError",
    "ProcessGroup",
    "Readout",
    "Work",
    "all_gathered",
    "all_gathered_objects",
    "all_reduced",
    "broadcast_",
    "broadcast_object",
    "differing_names",
    "even_out_groups",
    "has_streams",
    "init_distributed",
    "is_destroyed",
    "is_left_by_nodes",
    "largest",
    "largest_of_each",
    "leave_distributed",
    "local_device",
    "meet_world",
    "new_object_group",
    "refuse_differences",
    "start_all_reduce",
    "timeout_of",
    "together",
    "told_world",
    "world",
]
__all__ += ported.__all__
