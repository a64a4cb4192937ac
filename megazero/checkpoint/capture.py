"""What of a training run goes into a checkpoint.

Every rank saves its shard of every bucket, whatever the stage shards: nothing is gathered, and nothing is copied but what a save
in the background needs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megazero import comm
from megazero.checkpoint.format import CONSTANT, RNG, SCHEDULE, TensorEntry
from megazero.checkpoint.plain import encode, plain_settings
from megazero.checkpoint.tensor_file import LazyTensor
from megazero.checkpoint.training_state import Place, TrainingState, rng_states
from megazero.checkpoint.writer import Piece, Snapshot, States
from megazero.zero.bucket import MASTER, Bucket
from megazero.zero.home import Vector
from megazero.zero.layout import ALIGNMENT, Segment
from megazero.zero.sliced import Counters

Keys = dict[Bucket, list[str]]  # the names of the optimizer's states; {} where none is saved
Places = dict[str, Place]  # of what is saved, by the name that a parameter has in the module


def capture(
    state: TrainingState, client_state: dict[str, Any], *, save_optimizer: bool, save_rng: bool, exclude_frozen: bool
) -> tuple[Snapshot, dict[str, Any]]:
    """What this rank has to write, and the index for `Saver.save`. Collective over the world.

    Raises:
        TypeError: `client_state` holds what is no plain data; the message has the path to it.
    """
    (client, client_tensors), (schedule, schedule_tensors) = comm.together(partial(_encoded, state, client_state))
    keys: Keys = state.optimizer.state_keys_everywhere(state.optimizer.buckets) if save_optimizer else {}
    counters = _counters(state) if save_optimizer else {}
    aliases = state.aliases()
    places = _places(state, keys, counters, aliases, exclude_frozen)
    index = {
        "model_parallel_size": state.groups.model_parallel_size,
        "data_parallel_size": state.groups.data_parallel_size,
        "zero_stage": state.stage,
        "device": comm.local_device().type,
        "global_steps": state.global_steps,
        "skipped_steps": state.skipped_steps,
        "counters": dict(state.counters),
        "loss_scaler": state.optimizer.loss_scaler.state_dict(),
        "aliases": aliases,
        "tensors": _described(state, keys, places),
        "optimizer": _optimizer(state, places, counters) if save_optimizer else None,
        "lr_scheduler": schedule,
        "client_state": client,
    }
    blobs = {RNG + name: value for name, value in rng_states().items()} if save_rng else {}
    if torch.distributed.get_rank() == 0:
        blobs = {**blobs, **client_tensors, **schedule_tensors}
    # States that a rank has not trained yet are made, and one rank's memory may have no room for them.
    pieces = comm.together(partial(_pieces, state, keys, places))
    return Snapshot(pieces, blobs), index


def _encoded(state: TrainingState, client_state: dict[str, Any]) -> tuple[tuple[Any, dict[str, Tensor]], ...]:
    """The client's state and the schedule's, which users make: they need not be plain on every rank.

    Nor need every rank's weights be such as can be saved, which is seen to first.
    """
    state.optimizer.refuse_torn()
    for bucket in state.buckets:
        bucket.adopt_written()
    schedule = None if state.lr_scheduler is None else state.lr_scheduler.state_dict()
    return encode(client_state), encode(schedule, path="lr_scheduler.state_dict()", prefix=SCHEDULE)


def _places(
    state: TrainingState, keys: Keys, counters: dict[str, Counters], aliases: dict[str, str], exclude_frozen: bool
) -> Places:
    """What is saved, and where. A layer's tiles are saved each by itself where they are not alike, or one is tied."""
    found = {segment.name: state.place(segment) for segment in state.segments()}
    own = {segment.name: state.own_place(segment) for segment in state.segments()}
    kept: set[str] = set()
    kinds: dict[str, list[Any]] = {}
    numels: Counter[str] = Counter()
    for bucket in state.buckets:
        kept |= {s.name for s in (bucket.trained_segments if exclude_frozen else bucket.layout.segments)}
        for name in (segment.name for segment in bucket.layout.segments):
            kind = bucket.is_trainable, bucket.weights.flat.dtype, keys.get(bucket), counters.get(name), name in kept
            kinds.setdefault(found[name].name, []).append(kind)
            numels[found[name].name] += math.prod(own[name].shape)
    apart = {place.name for place in found.values() if numels[place.name] != math.prod(place.shape)}
    apart |= {name for name, of_tiles in kinds.items() if any(kind != of_tiles[0] for kind in of_tiles)}
    apart |= {found[name].name for name in aliases.values() if name in found}
    return {name: own[name] if place.name in apart else place for name, place in found.items() if name in kept}


def _described(state: TrainingState, keys: Keys, places: Places) -> dict[str, TensorEntry]:
    """Everything that is saved of the module, in its order."""
    found = {}
    for bucket in state.buckets:
        kind = "trained" if bucket.is_trainable else "frozen"
        trained = dict.fromkeys((MASTER, *keys.get(bucket, ())), torch.float32)
        states = trained if bucket.is_trainable else {CONSTANT: bucket.weights.flat.dtype}
        for segment in (s for s in bucket.layout.segments if s.name in places):
            place = places[segment.name]
            found[place.name] = TensorEntry(kind, place.shape, place.cut, states)
    for name, value in state.buffers().items():
        found[name] = TensorEntry("buffer", tuple(value.shape), None, {CONSTANT: value.dtype})
    order = dict.fromkeys(places[n].name if n in places else n for n in state.state_dict())
    return {name: found[name] for name in [*(n for n in order if n in found), *found]}


def _pieces(state: TrainingState, keys: Keys, places: Places) -> dict[Piece, States]:
    """This rank's shard of every bucket; what tensor-parallel ranks hold in common, and buffers, are saved by the first rank."""
    rank, found = state.groups.model_parallel_rank, {}
    for bucket in state.buckets:
        for segment in (s for s in bucket.layout.segments if s.name in places):
            low, high = segment.clip(*bucket.channel.portion(bucket.layout.numel, ALIGNMENT))
            start, stop = low - segment.start, high - segment.start
            if start < stop and (rank == 0 or segment.name in state.partitions):
                name, _, _, first = places[segment.name]
                piece = Piece(name, rank, first + start, first + stop, segment.name)
                found[piece] = _states(bucket, segment, keys.get(bucket, []), start, stop)
    if torch.distributed.get_rank() == 0:
        buffers = {name: value.contiguous().view(-1) for name, value in state.buffers().items() if value.numel()}
        found |= {Piece(name, 0, 0, len(value)): {CONSTANT: value} for name, value in buffers.items()}
    return found


def _states(bucket: Bucket, segment: Segment, keys: list[str], start: int, stop: int) -> States:
    """What this rank holds of [start, stop) of a parameter, 1-D: its own memory, or what is read from where it rests."""
    low, high = segment.start + start, segment.start + stop
    begin, held = bucket.owned_range.start, bucket.states
    part = partial(_part, bucket, start=low - begin, stop=high - begin)
    if not bucket.is_trainable:
        flat, shard = bucket.weights.flat, bucket.weights.shard
        return {CONSTANT: flat[low:high] if shard is None else part(shard, flat.dtype)}
    return {  # zeros where this rank has not trained anything of the bucket yet
        key: part(held[key], torch.float32)
        if key in held
        else torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        for key in (MASTER, *keys)
    }


def _part(bucket: Bucket, vector: Vector, dtype: torch.dtype, start: int, stop: int) -> Tensor | LazyTensor:
    """Elements [start, stop) of a vector of the bucket's."""
    if vector.resident is not None:
        with vector.at_hand(start, stop) as part:
            return part.to(dtype)  # itself, but for optimizers that keep 16 bits

    def read() -> Tensor:
        out, filled = torch.empty(stop - start, dtype=dtype, device="cpu"), 0
        for part in parts():
            out[filled : filled + len(part)].copy_(part)
            filled += len(part)
        return out

    def parts() -> Iterator[Tensor]:
        clipped = [(max(start, tile.start), min(stop, tile.stop)) for tile in bucket.tiles]
        places = [(low, high) for low, high in clipped if low < high]
        for place, ahead in zip(places, [*places[1:], None], strict=True):
            with vector.at_hand(*place) as part:
                if ahead is not None:
                    vector.prefetch(*ahead)
                yield part.to(dtype)

    return LazyTensor(dtype, (stop - start,), read, parts)


def _counters(state: TrainingState) -> dict[str, Counters]:
    """The optimizer's scalar state of the parameters that have any. Collective."""
    found = state.optimizer.counters()
    if not any(bucket.sharding.optimizer for bucket in state.optimizer.buckets):
        return found  # all of it
    # By their names it would be tens of MB from thousands of ranks, with NCCL on the device; few of the values differ.
    mine = {name: json.dumps(values, sort_keys=True) for name, values in found.items()}
    kinds = sorted(set().union(*comm.all_gathered_objects(sorted(set(mine.values())), state.groups.data)))
    names = [s.name for bucket in state.optimizer.buckets for s in bucket.layout.segments]
    numbers = [kinds.index(mine[name]) if name in mine else -1 for name in names]
    of_all = comm.largest_of_each(numbers, state.groups.data)
    return {name: json.loads(kinds[number]) for name, number in zip(names, of_all, strict=True) if number >= 0}


def _optimizer(state: TrainingState, places: Places, found: dict[str, Counters]) -> dict[str, Any]:
    """Class and settings of the optimizer, the scalar state that most parameters have, and that of the others."""
    counts = Counter(tuple(sorted(counters.items())) for counters in found.values())
    common = dict(counts.most_common(1)[0][0]) if counts else {}
    trained = [s.name for bucket in state.buckets if bucket.is_trainable for s in bucket.layout.segments]
    by_name = {places[name].name: found.get(name) for name in trained if name in places}
    return {
        "type": type(state.optimizer.torch_optimizer).__name__,
        "counters": common,
        "counters_of": {name: counters for name, counters in by_name.items() if counters != common},
        "groups": [plain_settings(group) for group in state.optimizer.param_groups],
    }
