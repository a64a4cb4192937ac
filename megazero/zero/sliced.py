"""A torch optimizer that is given flat slices of buckets instead of parameters, and access to its state by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megazero import comm
from megazero.logging import some
from megazero.optim.optimizers import TORCH_ELEMENTWISE, OptimizerFactory
from megazero.zero.bucket import MASTER, Bucket, Tile
from megazero.zero.home import Vector
from megazero.zero.layout import NO_GROUP, Segment, Span
from megazero.zero.storage import is_same_memory, part_of

# Of the user's own optimizer: a step would find no gradients and return as if it had trained, and its state is this rank's, which
# on another rank would pass for that one's.
_NO_STEP = (
    "optimizer.step(): it was given to an engine, which has the gradients, so that it would train nothing. Call engine.step() "
    "after every engine.backward(loss)."
)
_NO_STATES = (
    "optimizer.state_dict() and load_state_dict(): it was given to an engine, which keeps its state in flat ranges, each rank "
    "its own. Call engine.save_checkpoint(directory) and engine.load_checkpoint(directory) on every rank."
)

Counters = dict[str, float]  # the optimizer's scalar state: Adam's "step"; an int where it is one, and not a tensor


@dataclass(frozen=True, eq=False)
class Slice:
    """A stretch of a tile that is one flat parameter to the torch optimizer."""

    tile: Tile
    span: Span
    master: nn.Parameter  # 1-D, fp32; the bucket's own memory, or empty while the tile is not at hand
    is_trained: bool  # False: it is frozen at present, and keeps the state that it had

    @property
    def bucket(self) -> Bucket:
        """The bucket whose owned range it is a part of."""
        return self.tile.bucket

    @property
    def start(self) -> int:
        """Offset of its first element in the owned range."""
        return self.span.start - self.bucket.owned_range.start

    @property
    def stop(self) -> int:
        """Offset of the first element after it in the owned range."""
        return self.span.stop - self.bucket.owned_range.start

    @property
    def in_tile(self) -> slice:
        """Its place in its tile."""
        return slice(self.start - self.tile.start, self.stop - self.tile.start)


class SlicedOptimizer:
    """Cuts the buckets' owned ranges into flat slices, and gives the torch optimizer those of each parameter group.

    The buckets hold all of O, wherever it rests. The torch optimizer's own state consists of views of the part at hand.

    Args:
        factory: makes the torch optimizer from a list of parameter-group dicts.
        group_settings: for each parameter group, its options other than "params" (weight_decay, ...).

    Attributes:
        torch_optimizer: the optimizer that `factory` returned.
        slices: the torch optimizer's parameters, and the slices of frozen parameters that have state.
        slices_of: the same by bucket.
        attributes: those that the torch optimizer has for the duration of each step.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        factory: OptimizerFactory,
        group_settings: list[dict[str, Any]],
    ) -> None:
        self.buckets = buckets
        self._frozen = self._frozen_now()
        self._cut({})
        self.torch_optimizer = factory(
            [{**settings, "params": self._masters(index)} for index, settings in enumerate(group_settings)]
        )
        if not hasattr(self.torch_optimizer, "_optimizer_step_pre_hooks"):
            raise TypeError(
                f"The optimizer is a {type(self.torch_optimizer).__name__} without the hooks of torch.optim.Optimizer, which the "
                "engine needs. Derive it from that class, and call super().__init__(params, defaults) in its __init__."
            )
        self._steps_slices = False  # step_slices() is under way
        self.attributes: dict[str, Any] = {}
        self._refusals: list[RemovableHandle] = []
        self._counts_in_group = type(self.torch_optimizer).__module__.startswith("apex")
        self._counts_in_tensors = isinstance(self.torch_optimizer, TORCH_ELEMENTWISE)
        states = list(self.state.values())  # Adagrad makes its state when it is built, and none for later parameters
        if states and any(bucket.is_swapped for bucket in buckets):
            raise ValueError(
                f"{type(self.torch_optimizer).__name__} makes its state when it is built, which needs all of it in memory. Use "
                "another optimizer (AdamW), or a home in memory: --offload-optimizer cpu (offload_optimizer.device)."
            )
        for piece in self.slices:
            self.adopt_state(piece)
        at_birth = states[0].items() if states else ()
        self._flat_at_birth = {key: float(value[0]) for key, value in at_birth if _is_flat(value)}
        self._scalars_at_birth = {key: _as_number(value) for key, value in at_birth if not _is_flat(value)}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's parameter groups (learning rates, weight decay)."""
        return self.torch_optimizer.param_groups

    @property
    def state(self) -> dict[Any, Any]:
        """The torch optimizer's state, by flat slice."""
        return self.torch_optimizer.state

    def step_slices(self, **attributes: Any) -> None:
        """Runs the torch optimizer's step over the slices that were given a gradient, with these attributes too until its end."""
        attributes |= self.attributes
        self._steps_slices = True
        vars(self.torch_optimizer).update(attributes)
        try:
            self.torch_optimizer.step()  # skips slices without gradient
        finally:
            self._steps_slices = False
            for name in attributes:
                delattr(self.torch_optimizer, name)

    def refuse_other_uses(self) -> None:
        """Makes the user's calls of the torch optimizer's step(), state_dict() and load_state_dict() errors, until `let_go`."""
        torchs, states = self.torch_optimizer, _refusal(ref(self), _NO_STATES)
        self._refusals = [
            torchs.register_step_pre_hook(_refusal(ref(self), _NO_STEP)),
            torchs.register_state_dict_pre_hook(states),
            torchs.register_load_state_dict_pre_hook(states),
        ]
        # torch's schedules do not see updates that are made of tiles, and would warn that they step before the optimizer.
        vars(self.torch_optimizer).update(_opt_called=True)

    def refuse_other_parameters(self) -> None:
        """Raises if the torch optimizer has parameters other than the slices, because it would step unreduced gradients.

        Raises:
            RuntimeError: parameters have come into its groups, or left them, since it was given the slices.
        """
        held = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        if held != {id(piece.master) for piece in self.slices if piece.is_trained}:
            raise RuntimeError(
                "Parameters have come into the optimizer's groups, or left them, since the engine was made (add_param_group). It "
                "reduces and steps what it was given then. Give it all parameters from the start, with requires_grad false until "
                "they are to be trained; or call engine.destroy() on every rank, and initialize again."
            )

    def let_go(self) -> None:
        """Returns the torch optimizer to its owner, with the model's parameters in place of the slices, and without state."""
        for refusal in self._refusals:
            refusal.remove()
        self.attributes.clear()  # of which Orthogonal refers to this object
        slices = {id(piece.master) for piece in self.slices}
        for index, group in enumerate(self.param_groups):
            mine = [b.parameters[s.name] for b in self.buckets for s in b.layout.segments if s.group == index]
            group["params"] = [*mine, *(p for p in group["params"] if id(p) not in slices)]
            if self._counts_in_group:
                group.pop("step", None)
        self.state.clear()

    def _cut(self, counters: dict[str, Counters]) -> None:
        """Makes the slices: of what this rank owns and trains now, and of what is frozen but has state.

        Args:
            counters: the scalar state of the parameters that have state. Parameters with different step counts get separate
                slices.
        """

        def key(segment: Segment) -> tuple[bool, Any] | None:
            is_trained, mine = self.is_trained(segment), counters.get(segment.name)  # None: it has no state
            if segment.group == NO_GROUP or (mine is None and not is_trained):
                return None
            return is_trained, (segment.group, segment.is_replicated, mine)

        def slices(bucket: Bucket) -> Iterator[Slice]:
            low, spans = bucket.owned_range.start, bucket.layout.spans_by(key)
            for tile in bucket.tiles:
                for (is_trained, _), span in spans:
                    part = span.clip(low + tile.start, low + tile.stop)
                    if part.start < part.stop:
                        memory = _part_in_memory(bucket, MASTER, part.start - low, part.stop - low)
                        yield Slice(tile, part, nn.Parameter(memory), is_trained)

        self.slices_of = {bucket: [*slices(bucket)] if bucket.is_trainable else [] for bucket in self.buckets}
        self.slices = [piece for of_bucket in self.slices_of.values() for piece in of_bucket]

    def _frozen_now(self) -> set[str]:
        """Names of the frozen parameters, determined only at the engine's refresh.

        A load in between must not cut slices by changes that the engine has not followed yet.
        """
        return {name for bucket in self.buckets for name, p in bucket.parameters.items() if not p.requires_grad}

    def is_trained(self, segment: Segment) -> bool:
        """Whether the optimizer steps this parameter, which it was given, as of the last `refresh`."""
        return segment.name not in self._frozen

    def trains_all_of(self, bucket: Bucket) -> bool:
        """Whether a step writes every element of the bucket's owned range."""
        return sum(p.stop - p.start for p in self.slices_of[bucket] if p.is_trained) == bucket.owned_numel

    def slices_in(self, tile: Tile) -> list[Slice]:
        """The slices in one tile."""
        return [piece for piece in self.slices_of[tile.bucket] if piece.tile == tile]

    def _masters(self, group: int) -> list[nn.Parameter]:
        return [piece.master for piece in self.slices if piece.is_trained and piece.span.group == group]

    def refresh(self) -> None:
        """Cuts the slices anew after a parameter's requires_grad has changed. Every parameter keeps its state, as in torch."""
        keys = {
            name: [key for key, value in self.state[piece.master].items() if _is_flat(value)]
            for piece in self.slices
            if piece.master in self.state
            for name in _names_in(piece)
        }
        self._frozen = self._frozen_now()
        self._recut(keys, self.counters())

    def _recut(self, keys: Mapping[str, Iterable[str]], counters: dict[str, Counters]) -> None:
        """Gives the torch optimizer new slices with their state, including state that it makes only at its construction.

        Args:
            keys, counters: as for `allocate_state`.
        """
        self.refuse_other_parameters()
        self.state.clear()
        self._cut(counters)
        for index, group in enumerate(self.param_groups):  # before memory may run out: another load finds its slices
            group["params"] = self._masters(index)
        for piece in self.slices:
            name = next((name for name in _names_in(piece) if name in counters), None)
            if name is not None:
                self._fill_state(piece, counters[name], keys.get(name, ()))
            elif self._flat_at_birth:
                for key, value in self._flat_at_birth.items():
                    with self._vector(piece.bucket, key).at_hand(piece.start, piece.stop, writes=True) as part:
                        part.fill_(value)
                self._fill_state(piece, self._scalars_at_birth, self._flat_at_birth)

    def _fill_state(self, piece: Slice, counters: Counters, keys: Iterable[str]) -> None:
        """Gives the torch optimizer a slice's state: the bucket's tensors under `keys`, else zeros, and scalars of `counters`."""
        state, bucket = self.state[piece.master], piece.bucket
        for key in keys:
            self._vector(bucket, key)
            state[key] = _part_in_memory(bucket, key, piece.start, piece.stop)
        for key, value in ({} if self._counts_in_group else counters).items():
            if isinstance(value, int) and not self._counts_in_tensors:
                state[key] = value
            else:
                state[key] = torch.full((), value, dtype=torch.float32, device=self._device_of(key, piece))

    def begin_adam(self, piece: Slice) -> None:
        """Gives a slice Adam's state before its first update: where it will rest, if O is in memory, so nothing is copied."""
        moments = ("exp_avg", "exp_avg_sq")
        is_in_memory = not piece.bucket.is_swapped
        self._fill_state(piece, {"step": 0.0}, moments if is_in_memory else ())
        state = self.state[piece.master]
        for key in moments:  # what is in O may be of a state that somebody has dropped
            state[key] = state[key].zero_() if is_in_memory else torch.zeros_like(piece.master, requires_grad=False)

    def _device_of(self, key: str, piece: Slice) -> torch.device:
        """Where a scalar of a slice's state lies: as in torch, the step count lies on the host unless a kernel reads it.

        To read it from a device, the host would have to wait for the device once per slice.
        """
        group = self.param_groups[piece.span.group]
        is_torchs = type(self.torch_optimizer).__module__.startswith("torch.optim")
        if is_torchs and key == "step" and not (group.get("fused") or group.get("capturable")):
            return torch.device("cpu")
        return piece.bucket.optimizer_home.device

    def adopt_state(self, piece: Slice, states: Mapping[str, Tensor] | None = None) -> None:
        """Moves state that the torch optimizer has allocated for a slice into the bucket's O.

        Args:
            states: O of the slice's tile if it is at hand, and so is written home without this method.

        Raises:
            ValueError: it has something else than one number for each element, or one for all of them.
        """
        bucket, state, numel = piece.bucket, self.state.get(piece.master, {}), piece.stop - piece.start
        for key, value in [*state.items()]:
            if not _is_per_element_or_one(value, numel):
                what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"{type(self.torch_optimizer).__name__} keeps {key!r} ({what}) for {numel} elements of "
                    f"{some(_names_in(piece))}: states have one number for each element, or one for all of them, so that "
                    "they can be cut and saved. Use another optimizer."
                )
            if _is_flat(value) and value.numel() == 1 < numel:
                state[key] = value = value.reshape(())  # one for all, which a vector would not be
            if not _is_flat(value) or _is_in_memory_of(bucket, key, piece, value):
                continue
            if states and key in states:
                part = states[key][piece.in_tile]
                if not is_same_memory(part, value):
                    part.copy_(value)
            else:
                with self._vector(bucket, key, value.dtype).at_hand(piece.start, piece.stop, writes=True) as part:
                    part.copy_(value)
            state[key] = _part_in_memory(bucket, key, piece.start, piece.stop)

    def _vector(self, bucket: Bucket, key: str, dtype: torch.dtype = torch.float32) -> Vector:
        """The bucket's state of that name; created with zeros if it does not exist yet."""
        if key not in bucket.states:
            vector = bucket.states[key] = bucket.optimizer_home.vector(bucket.owned_numel, dtype)
            for tile in bucket.tiles:
                with vector.at_hand(tile.start, tile.stop, reads=False, writes=True) as part:
                    part.zero_()
        return bucket.states[key]

    # ---- states by parameter

    @contextmanager
    def state_at_hand(self, tile: Tile, keys: Iterable[str], *, writes: bool = False) -> Iterator[dict[str, Tensor]]:
        """The states among `keys` that a tile's O has, each 1-D, for a `with` block; changes are kept if `writes`."""
        bucket, start, stop = tile
        with ExitStack() as stack:
            there = [key for key in keys if key in bucket.states]
            yield {key: stack.enter_context(bucket.states[key].at_hand(start, stop, writes=writes)) for key in there}

    def parts_of(
        self, states: Mapping[str, Tensor], tile: Tile, key: str, segment: Segment
    ) -> Iterator[tuple[Tensor, slice]]:
        """This rank's part of one parameter's state in a tile: 1-D views, and where they lie in the flattened parameter.

        Args:
            states: the dictionary that `state_at_hand` gave for the tile.
        """
        for piece in self.slices_in(tile):
            if key in states and key in self.state.get(piece.master, {}):
                part, place = part_of(states[key][piece.in_tile], piece.span.start, segment)
                if part.numel():
                    yield part, place

    def state_keys(self, bucket: Bucket, segment: Segment | None = None) -> list[str]:
        """Names of the optimizer's elementwise state tensors on this rank: ["exp_avg", "exp_avg_sq"] for Adam after a step.

        Args:
            segment: of this parameter alone.
        """
        pieces = self.slices_of[bucket]
        if segment is not None:
            pieces = [piece for piece in pieces if range(*segment.clip(piece.span.start, piece.span.stop))]
        states = (self.state.get(piece.master, {}) for piece in pieces)
        return sorted({key for state in states for key, value in state.items() if _is_flat(value)})

    def state_keys_everywhere(
        self, buckets: Sequence[Bucket], segment: Segment | None = None
    ) -> dict[Bucket, list[str]]:
        """`state_keys` of all ranks together: a rank that owns nothing has no state. Collective over the data-parallel group."""
        mine = [self.state_keys(bucket, segment) for bucket in buckets]
        of_ranks = zip(*comm.all_gathered_objects(mine, self.buckets[0].channel.group), strict=True)
        return {bucket: sorted(set().union(*keys)) for bucket, keys in zip(buckets, of_ranks, strict=True)}

    def counters(self) -> dict[str, Counters]:
        """The optimizer's scalar state, by name, of each parameter with any state on this rank; {} if none of it is scalar."""
        found: dict[str, Counters] = {}
        for piece in self.slices:
            state = self.state.get(piece.master)
            if state:
                values = {key: value for key, value in state.items() if not _is_flat(value) and value is not None}
                group = self.param_groups[piece.span.group]
                if self._counts_in_group and "step" in group:
                    values["step"] = float(group["step"])
                mine = {key: _as_number(value) for key, value in values.items()}
                found.update(dict.fromkeys(_names_in(piece), mine))
        return found

    def allocate_state(self, keys: Mapping[str, Iterable[str]], counters: dict[str, Counters]) -> None:
        """Makes the state anew, with zeros and the given counters, so that a checkpoint can be read into it.

        Args:
            keys: names of the optimizer's elementwise state tensors, by parameter.
            counters: by parameter, as `counters()` returns them; a parameter that is not named starts without state.
        """
        for bucket in self.buckets:
            for key in [key for key in bucket.states if key != MASTER]:
                bucket.states.pop(key).free()
        self._recut(keys, counters)
        if self._counts_in_group:
            saved = next(iter(counters.values()), {})
            for group in self.param_groups:
                group.pop("step", None)
                group.update({key: int(value) for key, value in saved.items()})


def _refusal(owner: ref[SlicedOptimizer], message: str) -> Callable:
    """A hook for the user's own optimizer, which raises wherever it is not the engine that steps it."""

    def refuse(*_: Any) -> None:
        sliced = owner()
        if sliced is not None and not sliced._steps_slices:
            raise RuntimeError(message)

    return refuse


def _part_in_memory(bucket: Bucket, key: str, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of a state; empty if the state is not in memory."""
    vector = bucket.states[key]
    if vector.resident is None:
        return torch.empty(0, dtype=vector.dtype, device=bucket.optimizer_home.device)
    return vector.resident[start:stop]


def _is_in_memory_of(bucket: Bucket, key: str, piece: Slice, value: Tensor) -> bool:
    """Whether `value` is the slice's part of a state in memory, as it is after every update but the first."""
    resident = bucket.states[key].resident if key in bucket.states else None
    return resident is not None and is_same_memory(value, resident, piece.start)


def _names_in(piece: Slice) -> list[str]:
    """Names of the parameters that a slice holds elements of."""
    span = piece.span
    return [s.name for s in piece.bucket.layout.segments if s.start < span.stop and span.start < s.stop]


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1


def _is_per_element_or_one(value: Any, numel: int) -> bool:
    if isinstance(value, Tensor):
        return value.numel() <= 1 or value.shape == (numel,)
    return value is None or isinstance(value, (int, float))


def _as_number(value: Any) -> float:
    return value if isinstance(value, int) else float(value)
