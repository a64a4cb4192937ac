"""Channels whose data goes the way that a test names, in pieces small enough that small buffers take many."""

from __future__ import annotations

import torch.distributed as dist

from megazero.comm import Channel, channel, point_to_point

# "native" is NCCL's; on gloo it shows that torch's operations are called rightly.
WAYS = ["shared memory", "point to point"]
PIECE_BYTES = 768  # a multiple of 64 for any number of ranks that divides 12


def open_channel(way: str, group: dist.ProcessGroup | None = None, **options) -> Channel:
    """A channel over `group` or the world. Changes modules of this process: a rank of the test's own, that harms nobody."""
    group = group or dist.group.WORLD
    channel.area_bytes = lambda size: 2 * (size - 1) * PIECE_BYTES
    point_to_point.INBOX_BYTES = 2 * group.size() * (PIECE_BYTES + 1)  # pieces are cut to multiples of 64 bytes
    if way == "point to point":
        channel.link = lambda *_: None
    if way == "native":
        channel.backend_of = lambda _: "native"
    opened = Channel(group, **options)
    assert opened.transport.startswith(way) or group.size() == 1
    return opened


def use_one_lane() -> None:
    """From here on channels of this process have one order of all collectives, as over NCCL, and gloo still compares each."""
    open_lanes = channel._open_lanes

    def one_lane(*how) -> tuple[str, list]:
        kind, lanes = open_lanes(*how)
        return kind, [lanes[0]] * len(lanes)

    channel._open_lanes = one_lane
