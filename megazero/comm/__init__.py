"""Collectives of the library: the one package that calls torch.distributed's communication functions.

Ours return what has been reduced or gathered in NEW tensors (`all_reduced`), because autograd may share their input with
another branch; those with a trailing underscore work in place on buffers that the caller owns. All of a `Channel` do so, and
return at once, like `start_all_reduce`: what they give back has to be waited for.

Names of torch.distributed (`all_reduce`, `all_gather`, ...) do here what they do there, for scripts that were written for
`deepspeed.comm`: see `ported`.
"""

from megazero.comm import ported
from megazero.comm.channel import Channel, timeout_of
from megazero.comm.collectives import Readout, all_gathered, all_reduced, broadcast_, start_all_reduce
from megazero.comm.join import init_distributed, told_world
from megazero.comm.lane import Work
from megazero.comm.meeting import meet_world
from megazero.comm.ported import *  # noqa: F403
from megazero.comm.world import (
    OtherRankError,
    ProcessGroup,
    all_gathered_objects,
    broadcast_object,
    even_out_groups,
    has_streams,
    is_destroyed,
    local_device,
    new_object_group,
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
    "even_out_groups",
    "has_streams",
    "init_distributed",
    "is_destroyed",
    "local_device",
    "meet_world",
    "new_object_group",
    "start_all_reduce",
    "timeout_of",
    "together",
    "told_world",
    "world",
]
__all__ += ported.__all__
