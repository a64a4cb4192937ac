"""P: the parameters of one bucket, views of one flat storage that is whole on every rank, or sharded and gathered for use.

Parameters stay registered in their modules and become views of the storage. If P is sharded, `release` frees the storage's
memory and `gather` refills the same storage, because autograd saves views of weights, which must find them in backward. Only
what a script may have taken out of a GatheredParameters context (`is_lent`), or into numpy anywhere, keeps its memory: P then
takes another storage, and graphs from before keep the values.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge, increment_version

from megazero.comm import Channel, Work
from megazero.zero.arrival import Arrival
from megazero.zero.home import Home, MemoryHome, Vector, moved
from megazero.zero.layout import Segment
from megazero.zero.parameter import ArrivingParameter, ReleasedParameter, asked_directly
from megazero.zero.storage import view_of
from megazero.zero.units import BucketPlan

ON_THE_WAY = 2**31  # added to the versions of parameters that no backward may read now; other versions are lower


class Weights:
    """P of one bucket.

    Args:
        flat: [layout.numel], in the dtype to compute in; holds the parameters' values already.
        home: where the shard rests; the device by default.

    Attributes:
        name: the bucket's name, which ranks compare before they exchange anything.
        views: by parameter's name, its view of the storage: its data while P is whole.
        is_sharded: only this rank's shard is kept between uses.
        shard: this rank's shard if P is sharded, else None. If its dtype is wider than P's, it is the master weights, and is cast
            as it is gathered.
        is_gathered: P is whole on this rank.
        is_offloaded: the shard was given another home than the device's; on a CPU that home may be the same memory.
        is_held: P is sharded, and a GatheredParameters context is open on it.
        is_lent: a script may have views of P as it is gathered now, such as a state dictionary, whose memory `release` leaves.
    """

    def __init__(self, plan: BucketPlan, flat: Tensor, channel: Channel, home: Home | None = None) -> None:
        self.name, self.parameters, self.flat = plan.name, plan.parameters, flat
        self.is_sharded = plan.sharding.parameters
        self._channel, self._owned_range = channel, plan.owned_range(channel.rank)
        self._segments = plan.layout.segments
        self.views = self._views_of(flat)
        self._empty = flat.new_empty(0)
        self._kinds = {name: type(p) for name, p in self.parameters.items()}  # classes that release replaces
        self.shard: Vector | None = None
        if self.is_sharded:
            self.shard = (home or MemoryHome(flat.device)).hold(self.owned_view, copy=True)
        self.is_offloaded = self.is_sharded and home is not None
        self.is_gathered, self.is_held, self.is_lent, self._is_kept = True, False, False, False
        self._is_in_backward = False
        self._coming: Work | None = None  # a gather if P is sharded, else an exchange
        self._waits_when_touched = False
        self._arrival = Arrival(flat.device, comes_ahead=channel.size > 1)  # of the shard on the device
        self._point_parameters()
        self._versions = self._current_versions()

    # ---- whole or not

    @property
    def is_coming(self) -> bool:
        """Whether other ranks' values are on their way: in a gather, or in the exchange after an update."""
        return self._coming is not None

    @property
    def is_allocated(self) -> bool:
        """Whether the memory of the whole P is allocated: P is gathered, or on its way."""
        return self.is_gathered or self.is_coming

    def gather(self) -> None:
        """Starts to make P whole on this rank; `wait_gathered` finishes. Does nothing if P is whole or on its way already."""
        if self.is_allocated:
            return
        assert self.shard is not None, "only what is sharded is ever released"
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        gather = partial(self._channel.all_gather_, self.flat, self.name)
        self._coming = self._arrival.fill(self.shard, self.owned_view, gather)

    def refuse_reads(self) -> None:
        """Until P is whole, makes autograd refuse what saved P before: a backward that no hook has announced.

        Not in a forward, which may save a parameter that is not whole, as torch's checkpoint does with its arguments.
        """
        if self.is_sharded and not self.is_gathered:
            self._set_versions([version + ON_THE_WAY for version in self._versions])

    def begin_backward(self) -> None:
        """Has reads of a released P refused until `end_backward`: a kernel that reads freed memory ends the process."""
        self._is_in_backward = True
        self.refuse_reads()

    def end_backward(self) -> None:
        """Undoes `begin_backward`."""
        self._is_in_backward = False
        if not self.is_gathered:
            self._set_versions(self._versions)

    def graph_end(self, segment: Segment) -> Node:
        """The node at which graphs that read a sharded parameter end, made for gradients of its full shape.

        Autograd makes one where it finds none, and then refuses gradients of any other shape than the parameter has at that
        moment: (0,), if a function with a graph is given a parameter that is not gathered yet, as by torch's checkpoint. As long
        as the caller keeps this node, autograd takes it. It keeps the parameter.
        """
        parameter, kind = self.parameters[segment.name], type(self.parameters[segment.name])
        parameter.__class__ = self._kinds[segment.name]
        parameter.data = self._empty.new_empty(()).expand(segment.shape)  # one element
        node = get_gradient_edge(parameter).node
        parameter.data = self.views[segment.name] if self.is_gathered else self._empty
        parameter.__class__ = kind
        return node

    def prefetch(self) -> None:
        """Announces that `gather` comes soon, so that the shard starts on its way from its home."""
        if self.shard is not None and not self.is_allocated:
            self._arrival.prefetch(self.shard)

    def wait_gathered(self) -> None:
        """Finishes `gather` or `exchange`, so that the parameters have their values."""
        if (work := self._coming) is None:
            return
        if self.is_sharded:
            self._coming = None
            work.wait()
            self._set_versions(self._versions)
            self._point_parameters()
            self.is_gathered = True  # last: after an interrupt before it, the next use gathers again
        else:  # a failed exchange stays under way, so that nobody takes the old values for the new ones
            work.wait()
            self._coming = None
            if self._waits_when_touched:
                self.show_parameters()

    def release(self) -> None:
        """Frees all of P but this rank's shard. Does nothing if P is not sharded, or is held or kept.

        Raises:
            RuntimeError: a parameter was written to in place while it was gathered; that change is lost.
        """
        if not self.is_sharded or self.is_held or self._is_kept:
            return
        if self._arrival.ahead is not None:
            self._arrival.settle()
        self.wait_gathered()
        if not self.is_gathered:
            return
        self.is_gathered = False
        for parameter in self.parameters.values():
            parameter.data = self._empty
            parameter.__class__ = ReleasedParameter
        if self.is_lent or not self.flat.untyped_storage().resizable():  # as torch says where numpy has the memory
            self._take_other_storage()
        self.flat.untyped_storage().resize_(0)
        if self._versions != self._current_versions():
            raise RuntimeError(
                f"A parameter of unit {self.name!r} was written to in place while it was gathered. It is sharded, so the "
                "change is lost. Write inside of `with megazero.zero.GatheredParameters(params, modifier_rank=0):`, or use a "
                "stage below 3."
            )
        if self._is_in_backward:
            self.refuse_reads()

    def keep(self) -> None:
        """Has `release` do nothing until `let_go` or new values: a graph made by a backward (create_graph) reads P."""
        self._is_kept = True

    def let_go(self) -> None:
        """Ends `keep`, and releases P."""
        self._is_kept = False
        self.release()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take_other_storage(self) -> None:
        self.is_lent = False
        numel = self.flat.numel()
        # First, so that memory that nobody else has a view of is there for the other.
        self.flat, self.views = self._empty, {}
        self.flat = self._empty.new_empty(numel)
        self.views = self._views_of(self.flat)

    def _views_of(self, flat: Tensor) -> dict[str, Tensor]:
        return {segment.name: view_of(flat, segment) for segment in self._segments}

    def outdate(self) -> None:
        """Records that the values of P have changed: the backward of a graph that has read them then fails, as in plain torch."""
        self._is_kept = False
        with asked_directly():
            increment_version([parameter for parameter in self.parameters.values() if parameter.requires_grad])
        self.mark_unwritten()

    def exchange(self) -> None:
        """Starts to bring the other ranks' parts of a whole P to this rank; `wait_gathered` finishes."""
        self._coming = self._channel.all_gather_(self.flat, self.name)

    def wait_when_touched(self) -> None:
        """Has whatever touches a whole parameter wait for an update that goes on, and for the exchange after it."""
        assert not self.is_sharded, "a released parameter has a class for that already"
        self._waits_when_touched = True
        for parameter in self.parameters.values():
            parameter.__class__ = ArrivingParameter

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drops gathered parameters that another bucket holds from now on, and frees what the remaining ones do not need."""
        gone = {id(parameter) for parameter in parameters}
        self.parameters = {name: p for name, p in self.parameters.items() if id(p) not in gone}
        self.mark_unwritten()
        self.release()
        if not self.parameters:
            self.flat = self._empty
            if self.shard is not None:
                self._arrival.settle()
                self.shard.free()
                self.shard = None

    def _point_parameters(self) -> None:
        self.show_parameters()
        for name, parameter in self.parameters.items():  # without those that were forgotten
            parameter.data = self.views[name]

    def show_parameters(self) -> None:
        """Gives parameters their own classes again, whose values anybody may read."""
        self._waits_when_touched = False
        for name, parameter in self.parameters.items():
            parameter.__class__ = self._kinds[name]

    # ---- this rank's part

    @property
    def is_cast(self) -> bool:
        """Whether the shard is the fp32 master weights, of parameters in a narrower dtype."""
        return self.shard is not None and self.shard.dtype != self.flat.dtype

    @property
    def owned_view(self) -> Tensor:
        """The owned range as a view of the whole, while P is whole: of this rank's shard if P is sharded."""
        return self.flat[self._owned_range]

    @property
    def resident(self) -> Tensor | None:
        """The owned range of P in its home, if the home is memory; else None."""
        return self.owned_view if self.shard is None else self.shard.resident

    def owned(
        self, start: int = 0, stop: int | None = None, *, reads: bool = True, writes: bool = False
    ) -> AbstractContextManager[Tensor]:
        """Elements [start, stop) of the owned range of P; `reads` and `writes` as in `Vector.at_hand`."""
        if writes:
            self.settle()
        if self.shard is not None:
            return self.shard.at_hand(start, stop, reads=reads, writes=writes)
        return nullcontext(self.owned_view[start:stop])

    def settle(self) -> None:
        """Before the owned range is written to: waits until no device reads its shard and no exchange sends it."""
        self._arrival.settle()
        if not self.is_sharded:
            self.wait_gathered()

    @property
    def buffers(self) -> list[Tensor]:
        """Memory that a sharded P holds only while in use: the whole, and a shard that has come ahead of its gather."""
        ahead = self._arrival.ahead
        return [self.flat] if ahead is None else [self.flat, ahead]

    def move(self, home: Home | None) -> None:
        """Moves this rank's shard to another home, in P's dtype; None is the device.

        Call it between two steps, while P is released.
        """
        assert self.shard is not None, "P is whole"
        self.settle()
        self.shard = moved(self.shard, home or MemoryHome(self.flat.device), self.flat.dtype)
        self.is_offloaded = home is not None

    def rest_in(self, shard: Vector, is_offloaded: bool) -> None:
        """Makes `shard`, which has the same values, this rank's shard. The one so far is freed."""
        assert self.shard is not None, "P is whole"
        self.settle()
        self.shard.free()
        self.shard, self.is_offloaded = shard, is_offloaded

    # ---- in-place writes of the user into whole parameters

    @property
    def is_written(self) -> bool:
        """Whether whole parameters were written to in place since `mark_unwritten`."""
        return not self.is_sharded and self._versions != self._current_versions()

    def mark_unwritten(self) -> None:
        """Records that the master weights agree with P."""
        self._versions = self._current_versions()

    def _set_versions(self, versions: list[int]) -> None:
        torch._C._autograd._unsafe_set_version_counter(tuple(self.parameters.values()), tuple(versions))

    def _current_versions(self) -> list[int]:
        with asked_directly():
            return [parameter._version % ON_THE_WAY for parameter in self.parameters.values()]
