"""The parts of a training run that its checkpoints are made of, and their shapes beyond what one rank holds of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from megazero.checkpoint.ranges import Cut, holders
from megazero.mpu.groups import ParallelGroups
from megazero.mpu.partition import Partition
from megazero.mpu.random import RngState
from megazero.zero.access import ids_of_parameters
from megazero.zero.bucket import Bucket
from megazero.zero.layout import Segment
from megazero.zero.optimizer import BucketOptimizer
from megazero.zero.tiling import TilePlace

_TRACKED = "tracker/"  # what the names of the tracker's streams begin with


class Place(NamedTuple):
    """Where a parameter of the module lies in a checkpoint.

    Attributes:
        name: of what is saved: its own, or a whole layer's parameter that it is a tile of.
        shape: of that, uncut and without padding.
        cut: of that.
        start: where it begins in what a tensor-parallel rank has of that, flattened.
    """

    name: str
    shape: tuple[int, ...]
    cut: Cut | None
    start: int


@dataclass
class TrainingState:
    """The parts of an engine that a checkpoint is made of."""

    module: nn.Module
    groups: ParallelGroups
    partitions: dict[str, Partition]
    tiles: dict[str, TilePlace]
    buckets: list[Bucket]
    optimizer: BucketOptimizer
    lr_scheduler: Any | None
    stage: int
    global_steps: int = 0
    skipped_steps: int = 0
    counters: dict[str, int] = field(default_factory=dict)  # the engine's others, by name

    def state_dict(self) -> dict[str, Any]:
        """The module's `state_dict` with the parameters themselves, as it is at this moment.

        Scripts replace that of a module, for files of their own, by one that nests, renames or leaves out what it has
        (Megatron-LM's `state_dict_for_save_checkpoint`, or a LoRA's adapters). A checkpoint has everything by its name in the
        module, as the class knows it.
        """
        return type(self.module).state_dict(self.module, keep_vars=True)

    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers, and what else modules keep and put into their state dictionaries, each once.

        Raises:
            TypeError: a module makes what it puts there, or has an extra state: it could not be given back by writing to it.
        """
        parameters, again = ids_of_parameters(self.buckets), self.state_dict()
        found: dict[int, tuple[str, Tensor]] = {}
        for name, value in self.state_dict().items():
            is_made = value is not again[name]
            if id(value) in parameters or (is_made and isinstance(value, Tensor) and not value.numel()):
                continue  # the latter is an extra state that says nothing
            if is_made or not isinstance(value, Tensor):
                raise TypeError(
                    f"{name}: neither a parameter nor a buffer, but what a module's get_extra_state() returns or a hook makes. "
                    "That is not saved. Hand it to save_checkpoint in client_state."
                )
            found.setdefault(id(value), (name, value.detach()))
        return dict(found.values())

    def segments(self) -> list[Segment]:
        """Every parameter, bucket by bucket."""
        return [segment for bucket in self.buckets for segment in bucket.layout.segments]

    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters and buffers -> the name under which they are saved."""
        saved = {name for bucket in self.buckets for name in bucket.parameters}
        names: dict[int, list[str]] = {}
        for name, value in self.state_dict().items():
            names.setdefault(id(value), []).append(name)
        first = {id_: next((n for n in same if n in saved), same[0]) for id_, same in names.items()}
        return {name: first[id_] for id_, same in names.items() for name in same if name != first[id_]}

    def own_place(self, segment: Segment) -> Place:
        """Where a parameter lies in a checkpoint that has it as the module has it."""
        partition, size = self.partitions.get(segment.name), self.groups.model_parallel_size
        shape = segment.shape if partition is None else partition.full_shape(segment.shape)
        return Place(segment.name, shape, cut_of(partition, segment.shape, size), 0)

    def place(self, segment: Segment) -> Place:
        """As `own_place`, but a tile's place is in the whole layer's parameter."""
        own, tile = self.own_place(segment), self.tiles.get(segment.name)
        if tile is None:
            return own
        dim = None if own.cut is None else own.cut.dim
        is_plain = dim is None or own.cut == Cut(dim, 1, own.shape[dim])
        spans, shape = tile.spans, tile.shape
        if not is_plain or own.shape != tile.tile_shape:
            return own  # of a layer that keeps its parameters in another way
        cut = Cut(dim, 1, 0 if dim is None else shape[dim], tile.bounds)
        before = sum(math.prod(own.shape[:d]) * spans[d][0] * math.prod(shape[d + 1 :]) for d in range(len(shape)))
        return Place(tile.whole, shape, cut, before // holders(cut, self.groups.model_parallel_size))


def cut_of(partition: Partition | None, shard_shape: tuple[int, ...], size: int) -> Cut | None:
    """A parameter's cut over `size` tensor-parallel ranks, from the shape that each of them has of it."""
    if partition is None:
        return None
    return Cut(partition.dim, partition.stride, shard_shape[partition.dim] * size)


def rng_states() -> dict[str, Tensor]:
    """The states of this rank's generators, of the CPU, of the CUDA device and every stream of the tracker; uint8."""
    state = RngState.capture()
    tensors = {"cpu": state.cpu, **{_TRACKED + name: stream for name, stream in state.tracker.items()}}
    return tensors if state.cuda is None else {**tensors, "cuda": state.cuda}


def set_rng_states(states: dict[str, Tensor]) -> None:
    """Puts every generator back to what `rng_states` returned."""
    tracker = {name.removeprefix(_TRACKED): stream for name, stream in states.items() if name.startswith(_TRACKED)}
    # Forks belong to the code that runs, not to the checkpoint.
    replace(RngState.capture(), cpu=states["cpu"], cuda=states.get("cuda"), tracker=tracker).restore()
