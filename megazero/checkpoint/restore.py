"""What of a checkpoint goes where in a training run: each rank for itself, whatever ranks have saved it.

A rank reads the ranges that it needs (`ranges` translates), tile by tile, so that states on a drive pass through the buffers that
they have for a step. Nothing communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero import comm
from megazero.checkpoint.format import RNG, SCHEDULE, is_count
from megazero.checkpoint.plain import decode
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.training_state import Place, TrainingState, set_rng_states
from megazero.logging import ALIKE, get_logger, some
from megazero.optim.muon import MOMENTUM, Muon
from megazero.zero.bucket import Tile
from megazero.zero.layout import NO_GROUP, Segment
from megazero.zero.sliced import Counters

logger = get_logger(__name__)

_RATES = ("lr", "initial_lr")
_MOMENTA = ("betas", "momentum")

# Classes whose state is the same: Adam's moments and its steps. Where they rest, and how fast, is up to the run.
_ADAMS = ("Adam", "AdamW", "CPUAdam", "DeepSpeedCPUAdam", "FusedAdam", "HybridAdam")
_MAXIMUM = "max_exp_avg_sq"  # the third moment, of those with amsgrad


def read_states(state: TrainingState, reader: Reader, with_optimizer: bool, strict: bool) -> None:
    """Fills this rank's master weights, optimizer states and buffers. The optimizer is torn from the first of them on.

    Args:
        with_optimizer: the checkpoint has the optimizer's state, and it is to be loaded.
        strict: every parameter must be in the checkpoint; else what is not there keeps its values.

    Raises:
        CheckpointError: it is damaged.
        ValueError: it is of another model, or of another optimizer.
    """
    places = {segment.name: _place(state, reader, segment) for segment in state.segments()}
    buffers = [(_saved_name(reader, name), buffer) for name, buffer in state.buffers().items()]
    shapes = [(place.name, place.shape) for place in places.values()]
    check_tensors(reader, [*shapes, *((name, tuple(buffer.shape)) for name, buffer in buffers)], strict)
    keys_of, counters = _saved_optimizer(state, reader, places) if with_optimizer else ({}, {})
    state.optimizer.is_torn = True
    if with_optimizer:
        _warn_of_frozen(state, keys_of)
        state.optimizer.allocate_state(keys_of, counters)
    keys = sorted({key for of_one in keys_of.values() for key in of_one})
    for bucket in state.buckets:
        for tile in bucket.tiles:
            _read_tile(state, reader, places, tile, keys)
    for name, buffer in buffers:
        if name in reader.tensors:
            values = buffer.reshape(-1)  # its own memory, unless it is not contiguous
            # It may have been a parameter when it was saved.
            reader.read_part(name, reader.entry(name).weight_state, values)
            buffer.copy_(values.view(buffer.shape))


def _read_tile(state: TrainingState, reader: Reader, places: dict[str, Place], tile: Tile, keys: Sequence[str]) -> None:
    """Fills the weights of a tile, and what of the optimizer's tensors `keys` is saved of its parameters."""
    rank, size = state.groups.model_parallel_rank, state.groups.model_parallel_size
    with state.optimizer.state_at_hand(tile, keys, writes=True) as states:
        for segment, part, start in tile.bucket.weight_parts(tile):
            place = places[segment.name]
            entry = reader.tensors.get(place.name)
            if entry is None:
                continue
            # A parameter may have been frozen when it was saved and be trained now, or the other way round.
            to_read = [(start, entry.weight_state, part)]
            for key in (key for key in keys if key in entry.states):
                parts = state.optimizer.parts_of(states, tile, key, segment)
                to_read += [(here.start, key, view) for view, here in parts]
            to_read.sort(key=lambda each: (each[0], len(each[2])))  # the reader locates what lies alike once
            for first, key, out in to_read:
                at = place.start + first
                reader.read_part(place.name, key, out, cut=place.cut, rank=rank, size=size, start=at)


def _warn_of_frozen(state: TrainingState, keys_of: dict[str, list[str]]) -> None:
    """Warns of saved states that have no place, as what is frozen has none: it may be trained again after the load."""
    names = [
        segment.name
        for bucket in state.buckets
        if not bucket.is_trainable
        for segment in bucket.layout.segments
        if keys_of.get(segment.name)
    ]
    if names:
        logger.warning(
            "not loaded: the optimizer's states of %s, which the checkpoint's run has trained and this one has frozen. If this "
            "one unfreezes them later, they start with empty moments: set requires_grad before the load",
            some(names),
            extra=ALIKE,
        )


def _saved_optimizer(
    state: TrainingState, reader: Reader, places: dict[str, Place]
) -> tuple[dict[str, list[str]], dict[str, Counters]]:
    """By parameter, the names under which the optimizer's tensors are saved, and its scalar state."""
    optimizer = state.optimizer.torch_optimizer
    with reader.well_formed("optimizer"):
        saved, wanted = reader.index["optimizer"]["type"], type(optimizer).__name__
    entries = {name: reader.tensors[place.name] for name, place in places.items() if place.name in reader.tensors}
    keys_of = {name: sorted(entry.states.keys() - {entry.weight_state}) for name, entry in entries.items()}
    keys = {key for of_one in keys_of.values() for key in of_one}
    was_amsgrad, is_amsgrad = _MAXIMUM in keys, any(group.get("amsgrad") for group in optimizer.param_groups)
    is_alike = saved == wanted or (saved in _ADAMS and wanted in _ADAMS)
    if not is_alike or (keys and was_amsgrad != is_amsgrad):
        raise ValueError(
            f"The checkpoint {reader.path} holds the state of {saved}{' with amsgrad' * was_amsgrad}, and this run uses "
            f"{wanted}{' with amsgrad' * is_amsgrad}. Use the same optimizer, or start it anew with --no-load-optim "
            "(load_optimizer_states=False)."
        )
    if wanted == Muon.__name__:
        _check_matrices(state, reader, keys_of)
    saved_counters = _saved_counters(reader)
    return keys_of, {name: saved_counters[at.name] for name, at in places.items() if at.name in saved_counters}


def continue_run(
    state: TrainingState, reader: Reader, with_optimizer: bool, continue_schedule: bool, load_rng: bool
) -> None:
    """Sets counters, loss scale, schedule, learning rates and random generators to the saved ones.

    An optimizer whose state is not loaded starts anew.

    Raises:
        CheckpointError: it is damaged.
        ValueError: the run's schedule cannot continue that of the checkpoint.
    """
    index = reader.index
    with reader.well_formed("its counters"):
        counters = {**index.get("counters", {}), **{key: index[key] for key in ("global_steps", "skipped_steps")}}
        if not all(map(is_count, counters.values())):
            raise ValueError(f"{counters}")
    state.global_steps, state.skipped_steps = counters.pop("global_steps"), counters.pop("skipped_steps")
    state.counters = counters  # without those of before the load that the checkpoint does not have
    state.optimizer.loss_scaler.cur_iter = state.global_steps
    with reader.well_formed("loss_scaler"):
        if index["loss_scaler"] is not None:
            state.optimizer.loss_scaler.load_state_dict(_numbers(index["loss_scaler"]))
    with reader.well_formed("lr_scheduler"):
        schedule = decode(index["lr_scheduler"], reader.blobs(SCHEDULE)) if continue_schedule else None
    if continue_schedule and (schedule is None) != (state.lr_scheduler is None):
        what = "starts anew" if schedule is None else "is not continued, as this run has none"
        logger.warning(
            "the learning-rate schedule %s: %s was saved %s one",
            *(what, reader.path, "without" if schedule is None else "with"),
            extra=ALIKE,
        )
    if not with_optimizer:
        state.optimizer.allocate_state({}, {})  # what it has is of other weights, or of a damaged checkpoint
        logger.warning(
            "the optimizer starts with empty moments: its state was not loaded from %s", reader.path, extra=ALIKE
        )
    elif schedule is not None or state.lr_scheduler is None:
        with reader.well_formed("optimizer"):  # before the schedule, which may set its own
            cycles = schedule is not None and _cycles_momentum(state.lr_scheduler)  # else momenta are this run's own
            _load_settings(state, reader, (*_RATES, *_MOMENTA) if cycles else _RATES)
    if state.lr_scheduler is not None and schedule is not None:
        _continue_schedule(state.lr_scheduler, schedule, reader.path)
    if load_rng:
        with reader.well_formed("its random generators"):
            _load_rng(state, reader)


def _continue_schedule(schedule: Any, saved: Any, path: Path) -> None:
    try:
        # torch's take anything, and would begin anew without a word.
        if isinstance(saved, dict) and saved and not saved.keys() & schedule.state_dict().keys():
            raise ValueError(f"that is of another kind, and has {', '.join(map(str, saved))}")
        schedule.load_state_dict(saved)
    except Exception as error:  # its class may be the user's
        raise ValueError(
            f"The learning-rate schedule of {path} cannot be continued by this run's {type(schedule).__name__}: "
            f"{type(error).__name__}: {error}. Use the one that it was trained with, or start it anew with "
            "load_lr_scheduler_states=False."
        ) from error


def _cycles_momentum(schedule: Any) -> bool:
    """Whether a schedule, or a part of it, drives momenta: OneCycle, and torch's OneCycleLR and CyclicLR."""
    parts = getattr(schedule, "_schedulers", ())  # of torch's SequentialLR and ChainedScheduler
    return getattr(schedule, "cycle_momentum", False) or any(map(_cycles_momentum, parts))


def _load_settings(state: TrainingState, reader: Reader, keys: Sequence[str]) -> None:
    """Sets these settings of every parameter group to the saved ones, where both have them."""
    saved, groups = reader.index["optimizer"].get("groups"), state.optimizer.param_groups
    if saved is None or len(saved) != len(groups):
        found = "none" if saved is None else f"those of {len(saved)} parameter groups"
        logger.warning(
            "learning rates stay as this run sets them for its %d parameter groups: %s holds %s",
            *(len(groups), reader.path, found),
            extra=ALIKE,
        )
        return
    for group, settings in zip(groups, saved, strict=True):
        for key in group.keys() & set(keys):
            value = settings.get(key)
            if value is None:
                continue
            _numbers(dict(enumerate(value if isinstance(value, list) else [value])))
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _load_rng(state: TrainingState, reader: Reader) -> None:
    index, groups = reader.index, state.groups
    saved = index["model_parallel_size"], index["data_parallel_size"], index["device"]
    here = groups.model_parallel_size, groups.data_parallel_size, comm.local_device().type
    blobs = reader.blobs(RNG, rank=torch.distributed.get_rank()) if saved == here else {}
    states = {key.removeprefix(RNG): state for key, state in blobs.items()}
    if states:
        set_rng_states(states)
    else:
        logger.info(
            "random generators stay as this run has seeded them: the checkpoint has no states for these ranks and devices"
        )


def _saved_name(reader: Reader, name: str) -> str:
    """The name under which the checkpoint has a parameter or buffer: of what is tied, only one name is saved."""
    return reader.aliases[name] if name not in reader.tensors and reader.aliases.get(name) in reader.tensors else name


def _place(state: TrainingState, reader: Reader, segment: Segment) -> Place:
    """Where the checkpoint has a parameter: a tile in the whole layer's, unless it was saved by itself."""
    places = [
        place._replace(name=_saved_name(reader, place.name))
        for place in (state.place(segment), state.own_place(segment))
    ]
    return next((place for place in places if place.name in reader.tensors), places[0])


def check_tensors(reader: Reader, wanted: list[tuple[str, tuple[int, ...]]], strict: bool = True) -> None:
    """Raises if the checkpoint has other shapes than are wanted, or (`strict`) other names. Otherwise logs which names differ."""
    saved = {name: entry.shape for name, entry in reader.tensors.items()}
    different = [(name, shape) for name, shape in wanted if saved.get(name, shape) != shape]
    if different:
        name, shape = different[0]
        raise ValueError(
            f"The checkpoint {reader.path} is of a model of another shape: {len(different)} parameters differ, the first is "
            f"{name}: saved {list(saved[name])}, model {list(shape)}. Make the model of the sizes that it was trained with."
        )
    names = dict(wanted)
    lacks = {
        "the checkpoint": [name for name in names if name not in saved],
        "the model": [name for name in saved if name not in names],
    }
    told = "; ".join(f"{who} has no {some(found)}" for who, found in lacks.items() if found)
    if told and strict:
        raise ValueError(
            f"The checkpoint {reader.path} is not of this model: {told}. Make the model that was saved; or load what both have, "
            "as where it was saved with exclude_frozen_parameters, by strict=False (load_module_strict=False)."
        )
    if told:
        logger.warning("%s is loaded in part: %s", reader.path, told, extra=ALIKE)


def _check_matrices(state: TrainingState, reader: Reader, keys_of: dict[str, list[str]]) -> None:
    """Raises where Muon updates other parameters than it did: what it keeps of them, AdamW does not, and the other way round."""
    groups = state.optimizer.param_groups
    for segment in [segment for segment in state.segments() if segment.group != NO_GROUP]:
        is_matrix, keys = bool(groups[segment.group].get("use_muon")), keys_of.get(segment.name)
        if keys and (MOMENTUM in keys) != is_matrix:
            now, then = ("Muon", "AdamW") if is_matrix else ("AdamW", "Muon")
            raise ValueError(
                f"{segment.name} is {now}'s in this run, and the checkpoint {reader.path} has the state of {then}. Let the same "
                "parameters be Muon's (use_muon), or start the optimizer anew with --no-load-optim "
                "(load_optimizer_states=False)."
            )


def _saved_counters(reader: Reader) -> dict[str, Counters]:
    """The optimizer's scalar state of every parameter that was saved with state."""
    with reader.well_formed("optimizer"):
        common, others = reader.index["optimizer"]["counters"], reader.index["optimizer"].get("counters_of") or {}
        for values in (common, *(value for value in others.values() if value is not None)):
            _numbers(values)
        names = [name for name, entry in reader.tensors.items() if entry.kind == "trained"]
        return {name: values for name in names if (values := others.get(name, common)) is not None}


def _numbers(values: dict[Any, Any]) -> dict[Any, Any]:
    """The values, if they are numbers that fit into 64 bits.

    Raises:
        ValueError: one is not.
    """

    def is_number(value: Any) -> bool:
        return type(value) in (float, bool) or (type(value) is int and value.bit_length() < 64)

    wrong = {key: value for key, value in values.items() if not is_number(value)}
    if wrong:
        raise ValueError(f"{wrong} should be a number of 64 bits")
    return values
