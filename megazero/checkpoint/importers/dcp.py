"""Reads what torch.distributed.checkpoint has saved of any model, as FSDP2, DDP and torchtitan do.

    model.layers.0.weight                   before a parameter's own name there may be anything, or nothing
    optim.state.layers.0.weight.exp_avg     as `get_state_dict` names it; or "optimizer.", "optimizer_0."

An optimizer's own `state_dict` has numbers in place of names: of a folder with these, only the weights are read. So are they if
the optimizer has kept anything but a step and tensors of the parameters' shapes.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megazero.checkpoint.format import CONSTANT, bytes_of
from megazero.checkpoint.importers.foreign import ForeignCheckpoint, ForeignTensor, type_of_states
from megazero.checkpoint.importers.torch_dist import SavedTensor, is_torch_dist, read_torch_dist
from megazero.zero.bucket import MASTER

logger = logging.getLogger(__name__)

_OPTIMIZER = r"(.*\.)?optim(izer)?(_\d+)?\."
_STATE = re.compile(_OPTIMIZER + r"state\.(?P<parameter>.+)\.(?P<state>\w+)")
_OF_OPTIMIZER = re.compile(_OPTIMIZER + r"(state|param_groups)\..*")
_OF_MODEL = re.compile(r"(\w+\.)?model\.")
_STEP = "step"

States = Mapping[str, Mapping[str, SavedTensor]]  # by parameter, and by the state's name


def read_dcp(folder: str | Path) -> ForeignCheckpoint:
    """The weights, and the optimizer's states where they have the parameters' names.

    They may be in a folder each, side by side in `folder`, as Hugging Face's accelerate saves them.
    A tensor without states is frozen, or a buffer: the folder does not say which. One whose values are those of another is a
    further name of that. Tensors are read when they are asked for, these two kinds also at once.

    Raises:
        FileNotFoundError: the folder is none that `dcp.save` has written, or lacks a file.
        ValueError: it is damaged, or has states of a parameter without weights.
    """
    folder = Path(folder)
    parts = [folder] if is_torch_dist(folder) else sorted(filter(is_torch_dist, folder.glob("*/")))
    if not parts:
        raise FileNotFoundError(
            f"{folder} has neither .metadata nor *.distcp files. Give the folder that torch.distributed.checkpoint.save wrote, "
            "with all of its files."
        )
    saved: dict[str, SavedTensor] = {}
    for part in parts:
        found = read_torch_dist(part)
        if twice := saved.keys() & found.keys():
            names = ", ".join(each.name for each in parts)
            raise ValueError(f"{folder} holds several checkpoints with a {min(twice)}: {names}. Give one of them.")
        saved |= found
    weights = {name: tensor for name, tensor in saved.items() if not _OF_OPTIMIZER.fullmatch(name)}
    if not weights:
        raise ValueError(
            f"{folder} holds no tensor of a model. torch saves an object that has state_dict() and no load_state_dict() as a "
            "pickle, which is not read: save what its state_dict() returns."
        )
    states: dict[str, dict[str, SavedTensor]] = defaultdict(dict)
    for name, tensor in saved.items():
        if match := _STATE.fullmatch(name):
            states[match["parameter"]][match["state"]] = tensor
    weights = _by_own_name(folder, weights, {name for name in states if not name.isdecimal()})
    counters = None
    try:
        counters = _counters(states, weights)
    except ValueError as error:
        logger.warning("%s: weights only, the optimizer would start anew: %s", folder, error)
        states.clear()
    tensors = {}
    for name, of_one in states.items():
        readers = {key: tensor.read for key, tensor in of_one.items() if key != _STEP}
        tensors[name] = ForeignTensor(weights[name].shape, "trained", {MASTER: weights[name].read, **readers})
    aliases = _add_constants(tensors, weights)
    keys = {key for of_one in states.values() for key in of_one} - {_STEP}
    return ForeignCheckpoint(
        tensors,
        aliases,
        global_steps=int((counters or {}).get(_STEP, 0)),
        optimizer_type=type_of_states(str(folder), keys) if states else None,
        optimizer_counters=counters,
    )


def _by_own_name(folder: Path, weights: Mapping[str, SavedTensor], parameters: set[str]) -> dict[str, SavedTensor]:
    """The weights without what precedes the names that the model has for them, by which the optimizer's states are known."""
    if parameters:
        longest = max(parameters, key=len)
        found = [name.removesuffix(longest) for name in weights if name.endswith(longest)]
        prefix = next((start for start in found if all(start + name in weights for name in parameters)), None)
        if prefix is None:
            raise ValueError(
                f"{folder} has states of the optimizer for {longest} and others, and no weights of all of these."
            )
    else:
        start = _OF_MODEL.match(next(iter(weights)))
        prefix = start[0] if start and all(name.startswith(start[0]) for name in weights) else ""
    if others := [name for name in weights if not name.startswith(prefix)]:
        logger.warning("%s: left out, as they are not in the model %r: %s", folder, prefix, ", ".join(others))
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _counters(states: States, weights: Mapping[str, SavedTensor]) -> dict[str, float] | None:
    """The optimizer's scalar state of every parameter; None if it has none at all.

    Raises:
        ValueError: it is not as a checkpoint can hold it.
    """
    if not states:
        return None
    if any(name.isdecimal() for name in states):
        raise ValueError(
            "its states have numbers in place of the parameters' names. Save them again, by torch's get_optimizer_state_dict"
        )
    for name, of_one in states.items():
        if wrong := [key for key, x in of_one.items() if key != _STEP and x.shape != weights[name].shape]:
            raise ValueError(f"{wrong[0]} of {name} has not the parameter's shape")
    steps = {float(of_one[_STEP].read()) for of_one in states.values() if _STEP in of_one}
    if len(steps) > 1:
        raise ValueError(f"parameters have taken between {min(steps):.0f} and {max(steps):.0f} steps")
    return dict.fromkeys([_STEP], *steps) if steps else {}


def _add_constants(tensors: dict[str, ForeignTensor], weights: Mapping[str, SavedTensor]) -> dict[str, str]:
    """Adds the weights that have no states, and returns further names of tied ones: whose values another tensor has, too."""
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}  # by dtype, shape and values
    rest = [name for name in weights if name not in tensors]
    shapes = {weights[name].shape for name in rest}
    for name in [*tensors, *rest]:
        if weights[name].shape not in shapes:
            continue
        value = weights[name].read()
        digest = hashlib.sha256(bytes_of(value.contiguous()).data).digest()
        original = first.setdefault((value.dtype, value.shape, digest), name)
        if name in tensors:
            continue
        if original != name:
            aliases[name] = original
            continue
        kind = "frozen" if value.is_floating_point() else "buffer"
        tensors[name] = ForeignTensor(weights[name].shape, kind, {CONSTANT: weights[name].read}, value.dtype)
    return aliases
