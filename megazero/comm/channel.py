"""Asynchronous in-place collectives on flat buffers: what the engine moves gradients and parameters with."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from megazero.comm.lane import Finished, NativeLane, ThreadLane, Timed, Work
from megazero.comm.links import link
from megazero.comm.meeting import Meeting, named
from megazero.comm.point_to_point import PointToPointTransport
from megazero.comm.shared_memory import SharedMemoryTransport, area_bytes
from megazero.comm.transport import Transport
from megazero.comm.two_level import TwoLevelTransport
from megazero.comm.world import ProcessGroup, backend_of, even_out_groups, largest, new_group_like
from megazero.timers import Timers

# For each group, the further groups that its channels share, by shard size. They last as long as the world.
_levels: WeakKeyDictionary[ProcessGroup, dict[int, list[ProcessGroup]]] = WeakKeyDictionary()


@dataclass
class Traffic:
    """How many collectives of one kind this rank has issued, and how many elements of their buffers it has sent."""

    collectives: int = 0
    elements: int = 0


class Channel:
    """Asynchronous in-place collectives on flat buffers over one data-parallel group.

    All ranks must issue the reductions (`all_reduce_`, `reduce_scatter_`) in one order, and the gathers in one order. On gloo,
    reductions and gathers have a lane each, so the two may interleave differently on different ranks; ranks that meet with
    collectives of different name, kind, numel or dtype get an error. On NCCL, everything shares one lane, so there must be one
    order of all collectives, which `compare_first` checks once. A buffer belongs to the channel from the call until `wait`
    returns.

    On gloo, sums are taken in ascending rank order, in fp32 for 16-bit buffers, so that an all-reduce equals a reduce-scatter and
    an all-gather bit for bit. Data moves through shared memory if all ranks run on one host, else point to point. On NCCL, the
    collectives are NCCL's own. All channels of a group share one communicator, which nothing else uses: each communicator takes
    some 500 MB of a GPU (NVIDIA/nccl#964), and NCCL wants one order of collectives anyway.

    With `shard_size`, the group is divided into sets of that many neighboring ranks, such as those of a node (MiCS,
    arXiv:2205.00119, sec. 3). Buffers are cut and gathered within a set. Sums are over the whole group: first within each set,
    then between the ranks that have the same part, so that every set gets the same bits.

    Attributes:
        name: the same on all ranks of the group, and no other channel's; empty if there is only one rank.
        group, num_ranks: the whole group, and its number of ranks.
        rank, size: this rank's place in its set, and the number of ranks in a set.
        set_rank, num_sets: which set this is, and the number of sets.
        timeout_s: seconds without progress after which a collective or `meet` fails: the group's.
        traffic: what this rank has sent since `reset_traffic`, by kind: "all_reduce", "reduce_scatter", "all_gather".
        timers: receive how long results are waited for, as "allreduce" those of reductions, as "allgather" those of gathers; None
            by default.
    """

    def __init__(self, group: ProcessGroup, *, shard_size: int | None = None) -> None:
        """On gloo, collective over `group`. On NCCL, collective over the world: all of its ranks make a channel at the same time,
        each for its own group (see `new_group_like`).

        Args:
            group: the ranks that take part, including this one.
            shard_size: number of ranks that a buffer is cut over: a divisor of the group's size, not 1. None: all ranks.

        Raises:
            ValueError: `shard_size` does not divide the group's size, or is 1.
        """
        self.group, self.num_ranks, self.size = group, group.size(), shard_size or group.size()
        if self.num_ranks % self.size or shard_size == 1 < self.num_ranks:
            raise ValueError(
                f"shard_size={shard_size} does not divide a group of {self.num_ranks} ranks into sets of several."
            )
        self.num_sets = self.num_ranks // self.size
        self.set_rank, self.rank = divmod(group.rank(), self.size)
        self.timeout_s = timeout_of(group)
        self.timers: Timers | None = None
        self.traffic: dict[str, Traffic] = {}
        self.reset_traffic()
        self.name, self.transport = "", "none"  # what moves the data
        if self.num_ranks == 1:
            return
        ranks = dist.get_process_group_ranks(group)
        self.name = f"{largest(secrets.randbits(63), group):016x}"  # a group may have several channels
        store = dist.PrefixStore(f"megazero/channel/{self.name}/", dist.distributed_c10d._get_default_store())
        self._meeting = Meeting(store, ranks, group.rank(), self.timeout_s)
        self.transport, lanes = _open_lanes(group, self.size, self.name)
        self._reductions, self._gathers = lanes

    def all_reduce_(self, buffer: Tensor, name: str = "") -> Work:
        """Starts to replace `buffer` by its sum over the group, on every rank.

        Args:
            buffer: [numel], contiguous, numel a multiple of `size`; dtype and numel equal on every rank.
            name: what errors call it. On gloo, ranks that give different names get an error instead of each other's data.
        """
        return self._issue("all_reduce", buffer, name)

    def reduce_scatter_(self, buffer: Tensor, name: str = "") -> Work:
        """Starts to replace this rank's part of `buffer` by its sum over the group; the other parts become undefined.

        Args:
            buffer: [size * n], contiguous; the part is buffer[rank * n : (rank + 1) * n].
            name: as for `all_reduce_`.
        """
        return self._issue("reduce_scatter", buffer, name)

    def all_gather_(self, buffer: Tensor, name: str = "") -> Work:
        """Starts to fill `buffer` [size * n] with every rank's part of it; this rank's own must be there.

        Args:
            buffer: [size * n], contiguous.
            name: as for `all_reduce_`.
        """
        return self._issue("all_gather", buffer, name)

    def portion(self, numel: int, multiple: int) -> tuple[int, int]:
        """[start, stop) of the elements of a buffer [numel] that this rank alone counts (in a norm) and saves.

        They are a portion of its part of the buffer, which one rank of every other set has as well.

        Args:
            multiple: a part's size is a multiple of this, and so are start and stop.
        """
        part = numel // self.size
        start, stop = (
            part // multiple * place // self.num_sets * multiple for place in (self.set_rank, self.set_rank + 1)
        )
        return self.rank * part + start, self.rank * part + stop

    def meet(self, what: str) -> None:
        """Returns when every rank of the group has come here with the same `what`.

        Raises:
            RuntimeError: some did not come within the timeout, or came with another `what`.
        """
        if self.num_ranks > 1:
            self._meeting.hold(what)

    def compare_first(self) -> None:
        """Raises if ranks have issued different collectives so far, or in different orders; on gloo each collective checks this.

        Only the first call compares. It goes through the store, and so works even while the ranks' devices wait for each other.

        Raises:
            RuntimeError: on every rank, naming the first difference; or some ranks did not come within the timeout.
        """
        if self.num_ranks > 1 and (noted := self._reductions.take_noted()) is not None:
            self._meeting.compare("the first engine.step()", noted)

    def reset_traffic(self) -> None:
        """Sets all counters to zero."""
        self.traffic.update({kind: Traffic() for kind in ("all_reduce", "reduce_scatter", "all_gather")})

    def close(self) -> None:
        """Ends the channel once everything issued is done, or after a few seconds."""
        if self.num_ranks > 1:
            self._reductions.close()
            self._gathers.close()

    def _issue(self, action: str, buffer: Tensor, name: str) -> Work:
        if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.numel() % self.size:
            raise ValueError(
                f"{action} needs a contiguous 1-D buffer of a multiple of {self.size} elements (the ranks that share it), got "
                f"shape {tuple(buffer.shape)}, strides {buffer.stride()}. Flatten it and pad it to whole parts."
            )
        if self.num_ranks == 1 or buffer.numel() == 0:
            return Finished()
        traffic, part = self.traffic[action], buffer.numel() // self.size
        traffic.collectives += 1
        traffic.elements += part * (self.size - 1) * (2 if action == "all_reduce" else 1)
        if action != "all_gather":
            traffic.elements += 2 * part * (self.num_sets - 1) // self.num_sets
        lane, phase = (self._gathers, "allgather") if action == "all_gather" else (self._reductions, "allreduce")
        work = lane.issue(action, buffer, name)
        return work if self.timers is None else Timed(work, self.timers, phase)


def _open_lanes(group: ProcessGroup, size: int, name: str) -> tuple[str, Sequence[ThreadLane | NativeLane]]:
    """What moves the data, and the lanes of reductions and of gathers. Collective: every rank decides alike."""
    ranks, (first, rank) = dist.get_process_group_ranks(group), divmod(group.rank(), size)
    mine, across = ranks[first * size :][:size], ranks[rank::size]
    if backend_of(group) != "gloo":
        return "native", [NativeLane(*_groups_of_levels(group, mine, across))] * 2
    levels = [group] if len(across) == 1 else _groups_of_levels(group, mine, across)
    where = f"rank {ranks[group.rank()]} of ranks {named(ranks)}"
    kind, transports = _open_transports(levels[0], 2, name)
    if len(across) > 1:
        between, (bridge,) = _open_transports(levels[1], 1, name)
        kind = f"{kind} in sets of {size}, {between} between them"
        transports[0] = TwoLevelTransport(transports[0], bridge, rank=rank, size=size, num_sets=len(across))
    return kind, [ThreadLane(transport, where) for transport in transports]


def _groups_of_levels(group: ProcessGroup, mine: list[int], across: list[int]) -> list[ProcessGroup]:
    """The group of this rank's set, and that of the ranks with the same part; those of a single rank are left out.

    Collective if they do not exist yet.
    """
    known, size = _levels.setdefault(group, {}), len(mine)
    if size not in known:
        even_out_groups(group)
        known[size] = [new_group_like(group, part, timeout_of(group)) for part in (mine, across) if len(part) > 1]
    return known[size]


def _open_transports(group: ProcessGroup, count: int, name: str) -> tuple[str, list[Transport]]:
    """`count` independent transports: shared memory if all ranks of `group` are on one host, else point to point. Collective."""
    timeout_s = timeout_of(group)
    if opened := link(group, area_bytes(group.size()), timeout_s, count):
        return "shared memory", [SharedMemoryTransport(links, group.rank()) for links in opened]
    tag = int(name[-7:], 16) * 2  # that no other messages of the group carry
    return "point to point", [PointToPointTransport(group, tag + lane, timeout_s) for lane in range(count)]


def timeout_of(group: ProcessGroup) -> float:
    """Seconds after which a collective of `group` fails; torch's default for a backend without options, such as its fake one."""
    # torch has no public function for that; up to 2.8 its fake backend lacks the attribute.
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return (default_pg_timeout if options is None else options._timeout).total_seconds()
