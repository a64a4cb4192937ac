"""The bucket: a unit's parameters (P), gradients (G), and fp32 master weights with optimizer states (O), whole or sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from megazero.comm import Channel
from megazero.zero.gradient import Gradient
from megazero.zero.home import Home, MemoryHome, Vector, moved
from megazero.zero.layout import NO_GROUP, Segment
from megazero.zero.link import Link
from megazero.zero.parameter import asked_directly
from megazero.zero.registry import set_bucket
from megazero.zero.storage import is_same_memory, part_of, storage_id, view_of
from megazero.zero.units import BucketPlan
from megazero.zero.weights import Weights

if TYPE_CHECKING:
    from megazero.zero.optimizer import BucketOptimizer
    from megazero.zero.schedule import Schedule

TRAINABLE = (torch.float32, torch.bfloat16, torch.float16)
MASTER = "master"  # the fp32 weights' name among the states of O


class Tile(NamedTuple):
    """Elements [start, stop) of a bucket's owned range, which are brought to hand together."""

    bucket: Bucket
    start: int
    stop: int


class Bucket:
    """P, G and O of one unit, or of several small ones, as planned.

    The owned range is the part of the bucket that this rank updates: its shard if O is sharded, else the whole bucket. If the
    owned range of P and O rest in the same memory, only one copy is kept. With fp32 parameters, P itself is the master weights:
    the optimizer writes it and the model reads it. With 16-bit parameters that are sharded, the master weights serve as the
    shard of P and are cast whenever they are gathered.

    Args:
        plan: its parameters must be whole, and equal on every rank. If a parameter is wider than P, the master weights keep its
            full precision.
        predivide: gradients are divided by this before they are summed over the group, to avoid overflow in 16 bits.
        param_home: where the shard of P rests; the device by default.
        optimizer_home: where O and the reduced shard of G rest; the device by default.
        separate_master: keeps the master weights separate from P, because the model reads P while they are updated.
        tile_numel: most elements of O that the optimizer brings to hand at a time while O is offloaded; all by default.
        device: the device that the model computes on; the parameters' own by default.

    Attributes:
        plan: the plan that the bucket was built from; a frozen bucket may have become trainable since.
        unit: index of the unit in forward order (of the first unit if several share the bucket), or ROOT.
        weights: P.
        states: O by name, each a vector of the owned range: the master weights, and what the optimizer adds.
    """

    def __init__(
        self,
        plan: BucketPlan,
        channel: Channel,
        *,
        predivide: float = 1.0,
        param_home: Home | None = None,
        optimizer_home: Home | None = None,
        tile_numel: int | None = None,
        separate_master: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.plan, parameters, layout = plan, plan.parameters, plan.layout
        first = next(iter(parameters.values()))
        self.name, self.unit, self.layout, self.sharding = plan.name, plan.unit, layout, plan.sharding
        self.channel, self._predivide = channel, predivide
        self._separate_master, self._tile_numel = separate_master, tile_numel
        device = device or first.device
        self._on_device = MemoryHome(device)
        self.optimizer_home: Home = optimizer_home or self._on_device
        self.owned_range, self.owned_numel = plan.owned_range(channel.rank), plan.owned_numel

        dtypes = {parameter.dtype for parameter in parameters.values()}
        # If the dtypes differ, the master weights keep the values of the wider one.
        source = first.dtype if len(dtypes) == 1 else torch.float32
        whole = torch.zeros(layout.numel, dtype=source, device=device)
        for segment in layout.segments:
            view_of(whole, segment).copy_(parameters[segment.name].detach())
        master_is_on_device = plan.is_trainable and not self.is_offloaded  # it will be the shard
        self.weights = Weights(plan, whole.to(plan.dtype), channel, None if master_is_on_device else param_home)
        for parameter in parameters.values():
            set_bucket(parameter, self)
            parameter.grad = None  # left from an earlier backward, not part of the first step
        # Set by the engine that owns the bucket: the schedule whose hooks act on it, and the optimizer that steps it.
        self.schedule: Schedule | None = None
        self.optimizer: BucketOptimizer | None = None
        # An update of it goes on in the background: a `DelayedUpdate`, or an `OverlappedUpdate`.
        self.is_delayed = self.is_updating = False
        self.states: dict[str, Vector] = {}
        self._gradient: Gradient | None = None
        if plan.is_trainable:
            self.make_trainable(whole)

    def __reduce__(self) -> tuple:
        """What pickle makes of it, of a parameter that keeps it without an engine: None, because a copy is not sharded."""
        return type(None), ()

    def make_trainable(self, whole: Tensor | None = None) -> None:
        """Gives the bucket G and O, unless it has them already. Master weights come from `whole` if given, else from P."""
        if self.is_trainable:
            return
        weights = self.weights
        if weights.flat.dtype not in TRAINABLE:
            raise ValueError(
                f"Unit {self.name!r} has trained parameters of {weights.flat.dtype}, and the optimizer works on fp32 "
                "weights. Convert the model to float32, bfloat16 or float16, or freeze them."
            )
        home = self.optimizer_home
        if whole is None or weights.flat.dtype == torch.float32:
            with weights.owned() as owned:  # becomes the master weights itself if it is fp32 and lies where O rests
                master = home.hold(owned.float(), copy=weights.resident is None or self._separate_master)
        else:
            master = home.hold(whole[self.owned_range].float(), copy=whole.dtype == torch.float32)
        self.states[MASTER] = master
        self._share_master()
        self._gradient = Gradient(self.plan, self.channel, self.device, home, self._predivide)

    def _share_master(self) -> None:
        """Has the master weights serve as the shard of P if O is on the device, where P is needed, or both rest in one memory."""
        shard, master = self.weights.shard, self.states[MASTER]
        if shard is None or self._separate_master:
            return
        if not self.is_offloaded or _is_one_memory(shard, master):
            self.weights.rest_in(master, is_offloaded=self.is_offloaded and self.weights.is_offloaded)

    @property
    def is_trainable(self) -> bool:
        """Whether the bucket has G and O; a frozen one has only P."""
        return self._gradient is not None

    @property
    def gradient(self) -> Gradient:
        """G of a trained bucket."""
        assert self._gradient is not None, "a frozen bucket has no G"
        return self._gradient

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return self.weights.flat.device

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters in this bucket, by name."""
        return self.weights.parameters

    def segment_of(self, parameter: Tensor) -> Segment:
        """The parameter's place in the bucket.

        Raises:
            KeyError: the parameter is not in this bucket.
        """
        for segment in self.layout.segments:
            if self.parameters.get(segment.name) is parameter:  # None: it has moved to another bucket
                return segment
        raise KeyError(f"the parameter does not lie in bucket {self.name}")

    # ---- P, and copies between it and the master weights
    #
    # P -> master weights, after the user has written to parameters:
    #     adopt_gathered      gathered parameters, through the shard
    #     adopt_written       P as this rank keeps it, if there is anything new
    # master weights -> P, after an update or after they were set:
    #     write_back          one tile of this rank; write_back_all: all its tiles
    #     p_to_write          a tile whose new values the caller writes there itself
    #     write_staged        all tiles at once, from `staging`
    #     publish             then, once: the other ranks' values, which `wait_gathered` waits for, or the next gather brings
    #     publish_master      write_back_all, and publish

    def adopt_gathered(self) -> None:
        """After the user has written to gathered parameters: keeps the new values in this rank's shard and master weights."""
        if self.weights.is_cast:
            self._adopt(self.weights.owned_view)
        elif self.weights.is_sharded:
            with self.weights.owned(reads=False, writes=True) as shard:
                shard.copy_(self.weights.owned_view)
        self._adopt_parameters()

    def _adopt_parameters(self) -> None:
        """Copies changed elements of P into the master weights. The other master weights keep what 16 bits cannot hold."""
        if self.is_trainable and not self.master_is_p:
            for _, start, stop in self.tiles:
                with self.weights.owned(start, stop) as owned:
                    self._adopt(owned, start, stop)
        self.weights.mark_unwritten()

    def _adopt(self, weights: Tensor, start: int = 0, stop: int | None = None) -> None:
        with self.states[MASTER].at_hand(start, stop, writes=True) as master:
            weights = weights.to(master.device)
            master.copy_(torch.where(weights == master.to(weights.dtype), master, weights.float()))

    def adopt_written(self) -> None:
        """Before P is overwritten: adopts what the user has written into parameters in place, so that it is not lost."""
        if self.weights.is_written:
            self._adopt_parameters()

    def refuse_written(self, why: str) -> None:
        """Raises if the user has written into whole parameters in place since the master weights last agreed with them."""
        if self.weights.is_written:
            raise RuntimeError(
                f"A parameter of unit {self.name!r} was written to while {why}; the change would be lost."
            )

    def refuse_if_held(self, what: str) -> None:
        """Raises if a GatheredParameters context is open, because leaving it would bring back the old values."""
        if self.weights.is_held:
            raise RuntimeError(
                f"{what} inside of GatheredParameters, which holds unit {self.name!r}: its end would undo it. Leave it first."
            )

    @property
    def tile_numel(self) -> int:
        """Most elements of O that the optimizer brings to hand at a time: all on the device, where they are at hand anyway."""
        return (self._tile_numel if self.is_offloaded else None) or self.owned_numel

    @property
    def tiles(self) -> list[Tile]:
        """The owned range, cut into the pieces that the optimizer brings to hand one at a time."""
        size = self.tile_numel
        starts = range(0, self.owned_numel, size)
        return [Tile(self, start, min(start + size, self.owned_numel)) for start in starts]

    @property
    def master_is_p(self) -> bool:
        """Whether the owned range of P, as this rank keeps it, and the master weights are the same memory."""
        master, p = self.states[MASTER].resident, self.weights.resident
        return master is not None and p is not None and is_same_memory(master, p)

    @property
    def has_16_bits_beside(self) -> bool:
        """Whether P keeps 16-bit values in addition to the master weights, so that an update must write both."""
        return self.weights.flat.dtype != torch.float32 and not self.weights.is_cast

    def write_back(self, start: int, stop: int, master: Tensor) -> None:
        """Writes new master weights, elements [start, stop) of the owned range, into P; `publish` comes after the last."""
        if not self.master_is_p:
            with self.p_to_write(start, stop) as weights:
                weights.copy_(master)  # casts on the fly, without a temporary copy

    def staging(self, is_all_written: bool) -> Tensor:
        """Memory beside O the size of the owned range of P, for new weights that are not written to P yet.

        Args:
            is_all_written: the caller overwrites all of it, so it is returned uninitialized. Else it holds P's values, and the
                host waits for them.
        """
        staged = self.optimizer_home.memory.empty(self.owned_numel, self.weights.flat.dtype)
        if not is_all_written:
            with self.weights.owned() as owned:
                staged.copy_(owned)
        return staged

    def write_staged(self, staged: Tensor) -> None:
        """Writes the new weights in `staging` into P; `publish` comes afterwards. The host does not wait for a link."""
        if (across := self._p_across) is None:
            for _, start, stop in self.tiles:
                self.write_back(start, stop, staged[start:stop])
            return
        p, link = across
        link.to_device.start(partial(p.copy_, staged, non_blocking=True), on_device=[p], on_host=[staged]).join()

    def p_to_write(
        self, start: int, stop: int, parts: Sequence[slice] = (slice(None),)
    ) -> AbstractContextManager[Tensor]:
        """Elements [start, stop) of the owned range of P, to be written where O is at hand; `publish` comes after the last.

        Args:
            parts: of these elements, what the caller writes: over a link, only that is sent.
        """
        if (across := self._p_across) is None:
            return self.weights.owned(start, stop, reads=False, writes=True)
        p, link = across
        return link.outbox.fill(p[start:stop], parts)

    @property
    def _p_across(self) -> tuple[Tensor, Link] | None:
        """The owned range of P on the device, and the link to it from O, if O does not lie there."""
        p, shard, link = self.weights.resident, self.weights.shard, self.optimizer_home.link
        is_away = shard is not None and shard.link is not None
        return None if p is None or link is None or is_away else (p, link)

    def await_update(self) -> None:
        """Before anything uses P: if an update goes on that the model is to compute with, waits for it, and publishes."""
        if self.is_updating:
            assert self.optimizer is not None, "it makes the updates"
            self.optimizer.await_update(self)

    def retire(self) -> None:
        """Before an update that goes on during the next forward: from here on nobody uses the old values of P."""
        self.weights.settle()
        self.weights.outdate()
        if self.weights.is_sharded:
            self.weights.release()
        else:
            self.weights.wait_when_touched()

    def publish(self) -> None:
        """After a step: starts to bring the other ranks' new weights to this rank.

        If P is sharded and still gathered, it is stale and is released; the next use gathers the new values.
        """
        self.weights.outdate()
        if self.weights.is_sharded:
            self.weights.release()
        elif self.sharding.optimizer:
            self.weights.exchange()

    def master_to_write(self, start: int = 0, stop: int | None = None) -> AbstractContextManager[Tensor]:
        """Master weights at hand for writing, once nothing reads them as the shard of P. Call `publish_master` after the last."""
        self.weights.settle()
        self.adopt_written()  # as `publish_master` writes all of P
        return self.states[MASTER].at_hand(start, stop, writes=True)

    def write_back_all(self) -> None:
        """Writes all master weights of this rank into P; `publish` comes after it."""
        if self.is_trainable:
            for _, start, stop in self.tiles:
                with self.states[MASTER].at_hand(start, stop) as master:
                    self.write_back(start, stop, master)

    def publish_master(self) -> None:
        """Writes all master weights into P, here and on the other ranks, after they were set. Collective."""
        self.write_back_all()
        self.publish()
        self.weights.wait_gathered()

    # ---- O

    @property
    def is_offloaded(self) -> bool:
        """Whether O was given a home other than the device's own; on a CPU that home may be the same memory."""
        return self.optimizer_home is not self._on_device

    @property
    def is_swapped(self) -> bool:
        """Whether O rests in a swap file, so that the torch optimizer has of it only what is at hand."""
        return self.is_trainable and self.states[MASTER].resident is None

    def move_states(self, home: Home | None) -> None:
        """Moves O to another home, and G too from the next reduction on; None is the device. The shard of P goes with O.

        Call it between an update and a backward, while P is released. Callers that hold views of the vectors must make them anew.
        """
        if home is not None and self.weights.shard is not None:
            self.weights.move(home)  # before the master weights go, which may be the shard
        for key, vector in self.states.items():
            self.states[key] = moved(vector, home or self._on_device)
        self.optimizer_home = self.gradient.home = home or self._on_device
        self._share_master()

    # ---- G

    @property
    def trained_segments(self) -> list[Segment]:
        """The parameters that were passed to the optimizer and that require a gradient now."""
        segments = self.layout.segments
        with asked_directly():
            return [s for s in segments if s.group != NO_GROUP and self.parameters[s.name].requires_grad]

    @property
    def has_untrained_gradients(self) -> bool:
        """Whether parameters that the optimizer was not given require gradients: nothing tells when the last one has come."""
        return any(s.group == NO_GROUP and self.parameters[s.name].requires_grad for s in self.layout.segments)

    def refuse_untaken_gradients(self) -> None:
        """Raises if a trained parameter has a `.grad` before an update: it would miss this update and be added to the next."""
        with asked_directly():
            name = next((s.name for s in self.trained_segments if self.parameters[s.name].grad is not None), None)
        if name is not None:
            raise RuntimeError(
                f"Parameter {name!r} has a .grad that engine.step() would not apply: engine.backward(loss) takes all that come, "
                "and leaves none. To change one write utils.safe_set_full_grad(parameter, values); to clip set "
                "gradient_clipping."
            )

    def drop_gradients(self) -> None:
        """Forgets this step's gradients, also one that a backward which has failed there has left in a parameter's `.grad`."""
        self.gradient.zero()
        with asked_directly():
            for segment in self.trained_segments:
                self.parameters[segment.name].grad = None

    def accumulate(self, segment: Segment) -> None:
        """Adds the parameter's `.grad` to G and drops it, so that `.grad` never outlives the hook."""
        parameter = self.parameters[segment.name]
        if parameter.grad is None:  # a node behind it gave None, as an autograd.Function may: a gradient of zero
            return
        if not is_same_memory(parameter, self.weights.views[segment.name]):
            raise RuntimeError(
                f"Parameter {segment.name!r} has been given other memory since the engine was made (p.data = ..., model.to(), "
                ".half(), .cpu(), or a layer that converts itself in its forward), so that it would not be trained. Write values "
                "in place, or through engine.load_module_state_dict(); move and convert a model before it is given to the engine."
            )
        grad = parameter.grad  # nn.Embedding(sparse=True) makes a sparse one; G is dense
        self.gradient.accumulate(segment, grad.to_dense() if grad.is_sparse else grad)
        parameter.grad = None

    # ---- all of it

    def whole(self, owned: Tensor) -> Tensor:
        """A new tensor of the whole bucket, from every rank's owned range of a state (master weights, moments, ...).

        It lies on the device that the model computes on, because NCCL cannot gather in host memory.
        """
        if not self.sharding.optimizer:
            return owned.detach().clone()
        out = torch.empty(self.layout.numel, dtype=owned.dtype, device=self.device)
        out[self.owned_range].copy_(owned.detach())
        self.channel.all_gather_(out, self.name).wait()
        return out

    def owned_part(self, owned: Tensor, segment: Segment) -> tuple[Tensor, slice]:
        """One parameter's part of a tensor of the owned range: a 1-D view, and where it lies in the flattened parameter."""
        return part_of(owned, self.owned_range.start, segment)

    def weight_parts(self, tile: Tile) -> Iterator[tuple[Segment, Tensor, int]]:
        """The views to fill when loading one of the `tiles`: segment, 1-D view of its part here, where that begins in it.

        Trained parameters are loaded into the fp32 master weights, frozen ones into P. Call `publish_master`, or its
        parts, after the last tile.
        """
        self.refuse_if_held("loading")
        at_hand = self.master_to_write if self.is_trainable else partial(self.weights.owned, writes=True)
        with at_hand(tile.start, tile.stop) as values:
            for segment in self.layout.segments:
                part, place = part_of(values, self.owned_range.start + tile.start, segment)
                if part.numel():
                    yield segment, part.detach(), place.start

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes in this rank's memory, counted from storages: P, G, O except what it shares with P, and other buffers.

        Master weights that serve as the shard of P count as O. "offloaded" is the part of P, G and O that rests in other homes
        than the device's.
        """
        weights, g = self.weights, self._gradient
        states: dict[str, list[Tensor | None]] = {
            "P": [] if weights.is_cast else [weights.flat if weights.shard is None else weights.shard.resident],
            "G": [] if g is None else [*g.held],
            "O": [vector.resident for vector in list(self.states.values())],
            "buffers": [*weights.buffers, *(() if g is None else g.buffers)],
        }
        seen: set[int] = set()
        held = dict.fromkeys(states, 0)
        for key, tensors in states.items():
            for tensor in tensors:
                if tensor is not None and storage_id(tensor) not in seen:
                    seen.add(storage_id(tensor))
                    held[key] += tensor.untyped_storage().nbytes()
        away = [
            ("P", weights.is_offloaded),
            ("G", self.is_offloaded and self.sharding.gradients),
            ("O", self.is_offloaded),
        ]
        return {**held, "offloaded": sum(held[key] for key, is_away in away if is_away)}


def _is_one_memory(shard: Vector, master: Vector) -> bool:
    """Whether both rest in the memory of one device, with no link to another that computes, so that one of them is enough."""
    here, there = shard.resident, master.resident
    is_linked = shard.link is not None or master.link is not None
    return not is_linked and here is not None and there is not None and here.device == there.device
