"""Where DeepSpeed's ZeRO optimizer files keep each parameter's values.

Stages 1 and 2: the parameters of an optimizer group lie one after another in one vector, which is padded and cut into one
partition per data-parallel rank. A file has its rank's partition of every group:

    optimizer_state_dict/single_partition_of_fp32_groups[group]                    fp32 weights, often without the padding
    optimizer_state_dict/base_optimizer_state/state[group]/exp_avg, ...            with the padding
    optimizer_state_dict/base_optimizer_state[group]/exp_avg, ...                  "elastic" checkpoints: without the padding
    optimizer_state_dict/param_alignment_paddings[group][parameter]                since 0.19: a gap behind each parameter

Stage 3: every parameter is padded to whole shares and cut into one share per rank. A rank's shares lie one after another in
vectors ("sub-groups"):

    optimizer_state_dict/fp32_flat_groups[sub_group]                               fp32 weights
    optimizer_state_dict/optimizer_state_dict/state[sub_group]/exp_avg, ...

The order of the parameters is that of `param_shapes` in the model file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.checkpoint.importers.foreign import Read
from megazero.zero.bucket import MASTER

logger = logging.getLogger(__name__)

_SPLIT, _SHARES = "single_partition_of_fp32_groups", "fp32_flat_groups"
Shapes = Sequence[Mapping[str, torch.Size]]


class SavedOptimizer(NamedTuple):
    """What one model-parallel rank has saved of the trained parameters and their optimizer.

    Attributes:
        readers: by parameter and state ("master", "exp_avg", ...), a function that gives the full fp32 tensor.
        counters: the optimizer's scalar state; None where it has not run yet.
        groups: the optimizer's groups; None in "elastic" checkpoints, which have none.
        state: what data-parallel rank 0 has saved.
    """

    readers: dict[str, dict[str, Read]]
    counters: dict[str, float] | None
    groups: list[dict[str, Any]] | None
    state: dict[str, Any]


def read_optimizer_files(files: Sequence[dict[str, Any]], shapes: Shapes, where: str) -> SavedOptimizer:
    """Where the trained parameters' values lie in `files`; no value is read yet.

    Args:
        files: the `optimizer_state_dict` of each data-parallel rank.
        shapes: `param_shapes`, one dict per group, the parameters in their order in the file.
        where: names the checkpoint in messages.

    Raises:
        ValueError: the files do not hold what `shapes` says, or are of another kind.
    """
    key = next((key for key in (_SPLIT, _SHARES) if key in files[0]), None)
    if key is None:
        raise ValueError(
            f"{where}: the optimizer files have neither {_SPLIT!r} (ZeRO 1 and 2) nor {_SHARES!r} (ZeRO 3), but "
            f"{sorted(files[0])}. They are of a very old DeepSpeed or of another optimizer: load and save them with a "
            "newer one."
        )
    vectors, counters = _vectors(files, key, where)
    if key == _SPLIT:
        gaps = files[0].get("param_alignment_paddings")
        by_state = {state: _split_readers(flat, shapes, gaps, f"{where}: {state}") for state, flat in vectors.items()}
    else:
        by_state = {state: _share_readers(flat, shapes, f"{where}: {state}") for state, flat in vectors.items()}
    readers = {name: {state: by_state[state][name] for state in by_state} for name in by_state[MASTER]}
    base = _base_state(files[0], key)
    groups = base.get("param_groups", []) if isinstance(base, dict) else None
    return SavedOptimizer(readers, counters, groups, files[0])


def _base_state(file: dict[str, Any], key: str) -> Any:
    return file.get("optimizer_state_dict" if key == _SHARES else "base_optimizer_state")


def _vectors(
    files: Sequence[dict[str, Any]], key: str, where: str
) -> tuple[dict[str, list[list[Tensor]]], dict[str, float] | None]:
    """The flat vectors, [state][rank][group], and the optimizer's scalars."""
    vectors: dict[str, list[list[Tensor]]] = {MASTER: [[t.flatten() for t in file[key]] for file in files]}
    states = [_group_states(_base_state(file, key), len(file[key])) for file in files]
    if not any(state for rank in states for state in rank):
        return vectors, None
    names = {name for name, value in states[0][0].items() if is_vector(value) and name != "step"}
    for rank, groups in enumerate(states):
        for group, state in enumerate(groups):
            if not names <= state.keys():
                raise ValueError(
                    f"{where}: the optimizer of rank {rank} has {sorted(state)} for group {group}, and {sorted(names)} for the "
                    "others: a group that has never been updated. Make one more step in DeepSpeed and save again."
                )
    for name in sorted(names):
        vectors[name] = [[state[name].flatten() for state in groups] for groups in states]
    # Where the optimizer counts steps per group (apex), or where an "elastic" checkpoint has them; else None.
    base = _base_state(files[0], key)
    first = base["param_groups"][0] if isinstance(base, dict) and base.get("param_groups") else {}
    step = files[0].get("base_optimizer_state_step", first.get("step"))
    return vectors, common_counters([state for groups in states for state in groups], where, step)


def _group_states(base: Any, groups: int) -> list[dict[str, Any]]:
    """The optimizer's state of each flat vector: {"exp_avg": ..., "step": ...}."""
    if isinstance(base, list):
        return base
    state = base.get("state", {}) if isinstance(base, dict) else {}
    return [state.get(group, {}) for group in range(groups)]


def is_vector(value: Any) -> bool:
    """Whether an optimizer's state is one of a parameter's elements, like "exp_avg", and no scalar."""
    return isinstance(value, Tensor) and value.dim() > 0


def common_counters(states: Iterable[dict[str, Any]], where: str, step: Any = None) -> dict[str, float]:
    """The optimizer's scalars of all `states`, and `step` where they are saved apart."""
    found: dict[str, set[float]] = {} if step is None else {"step": {float(step)}}
    for state in states:
        for name, value in state.items():
            is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
            if is_number and (name == "step" or not is_vector(value)):
                found.setdefault(name, set()).add(float(value))
    for name, values in found.items():
        if len(values) > 1:
            message = "%s: the optimizer's %s is not the same for all parameters (%s); all get the largest."
            logger.warning(message, where, name, sorted(values))
    return {name: max(values) for name, values in found.items()}


def _cut(vector: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
    """Views of the elements [begin, end) of a vector that consists of pieces."""
    begins = accumulate((t.numel() for t in vector), initial=0)
    at = zip(vector, begins, strict=False)  # the last of which is the end
    return [t[max(begin - b, 0) : end - b] for t, b in at if b < end and begin < b + t.numel()]


def _read(vectors: Sequence[Sequence[Tensor]], begin: int, numel: int, shape: Sequence[int]) -> Tensor:
    """The elements [begin, begin + numel) of each of `vectors`, joined, without padding, in fp32."""
    pieces = [piece for vector in vectors for piece in _cut(vector, begin, begin + numel)]
    joined = torch.cat([piece.float() for piece in pieces]) if pieces else torch.empty(0, device="cpu")
    return joined[: math.prod(shape)].view(tuple(shape))


def _split_readers(flat: list[list[Tensor]], shapes: Shapes, gaps: Any, where: str) -> dict[str, Read]:
    """Stages 1 and 2."""
    readers: dict[str, Read] = {}
    world = len(flat)
    for rank, groups in enumerate(flat):
        if len(groups) != len(shapes):
            found = f"{len(groups)} parameter groups; the model file names {len(shapes)}"
            raise ValueError(f"{where} of rank {rank} has {found}.")
    for group, named in enumerate(shapes):
        partitions = [groups[group] for groups in flat]
        begin, size = 0, partitions[0].numel()
        for (name, shape), gap in zip(named.items(), gaps[group] if gaps else [0] * len(named), strict=True):
            readers[name] = partial(_read, [partitions], begin, math.prod(shape), shape)
            begin += math.prod(shape) + gap
        # All partitions are of one size, but files have those at the end without their padding, which may be all of them.
        covered = next((r * size + t.numel() for r, t in enumerate(partitions) if t.numel() != size), world * size)
        alignment = 2 * world  # what DeepSpeed pads a group to
        if begin > covered or -(-begin // alignment) != -(-covered // alignment):
            raise ValueError(_wrong_size(f"{where}, group {group}", covered, begin))
    return readers


def _share_readers(flat: list[list[Tensor]], shapes: Shapes, where: str) -> dict[str, Read]:
    """Stage 3."""
    readers: dict[str, Read] = {}
    begin = 0
    for name, shape in ((name, shape) for named in shapes for name, shape in named.items()):
        share = -(-math.prod(shape) // len(flat))
        readers[name] = partial(_read, flat, begin, share, shape)
        begin += share
    for rank, pieces in enumerate(flat):
        total = sum(piece.numel() for piece in pieces)
        if total != begin:
            raise ValueError(_wrong_size(f"{where} of rank {rank}", total, begin))
    return readers


def _wrong_size(where: str, found: int, needed: int) -> str:
    return (
        f"{where} has {found} elements where the parameters need {needed}. The files are of different saves, or the states were "
        "on NVMe and are not in them: save again without NVMe offload."
    )
