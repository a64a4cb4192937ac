"""What an importer gives: another framework's checkpoint in full, logical parameters; and how it becomes one of ours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.format import CONSTANT, SCHEDULE, TensorEntry
from megazero.checkpoint.offline import write_checkpoint
from megazero.checkpoint.plain import encode, plain_settings
from megazero.checkpoint.tags import tag_of
from megazero.checkpoint.writer import Piece
from megazero.zero.bucket import MASTER

logger = logging.getLogger(__name__)

Read = Callable[[], Tensor]
"""Reads a whole tensor, when it is asked for."""


@dataclass(frozen=True)
class ForeignTensor:
    """One parameter or buffer, merged over all ranks that it was cut over.

    Attributes:
        shape: full and unpadded.
        kind: "trained", "frozen" (a parameter without optimizer state) or "buffer".
        states: by name, a function that reads the full tensor of `shape` (CPU). A trained parameter has "master" (fp32) and may
            have the optimizer's tensors ("exp_avg", "exp_avg_sq", fp32); others have "constant" alone.
        dtype: of "constant".
    """

    shape: tuple[int, ...]
    kind: str
    states: Mapping[str, Read]
    dtype: torch.dtype = torch.float32


@dataclass
class ForeignCheckpoint:
    """Another framework's checkpoint.

    Attributes:
        tensors: by name; tied parameters once.
        aliases: further names of tied parameters -> the name in `tensors`.
        optimizer_counters: the optimizer's scalar state of every trained parameter ({"step": 1000.0}); None where only weights
            were found, and then no tensor has optimizer states.
        client_state: what the user had saved beside the model: plain containers, numbers, strings and tensors.
    """

    tensors: dict[str, ForeignTensor]
    aliases: dict[str, str] = field(default_factory=dict)
    global_steps: int = 0
    skipped_steps: int = 0
    global_samples: int = 0
    optimizer_type: str | None = None  # class name, "AdamW"
    optimizer_counters: dict[str, float] | None = None
    optimizer_groups: list[dict[str, Any]] | None = None  # of which the settings are taken: lr, betas, ...
    lr_scheduler: dict[str, Any] | None = None
    loss_scaler: dict[str, Any] | None = None
    client_state: dict[str, Any] = field(default_factory=dict)


def loss_scaler_state(scale: Any, hysteresis_left: Any, clean_steps: Any) -> dict[str, Any]:
    """The state of our `LossScaler`, from which a dynamic loss scale continues."""
    return {"scale": float(scale), "hysteresis_left": int(hysteresis_left), "clean_steps": int(clean_steps)}


def type_of_states(where: str, keys: set[str], groups: Sequence[Mapping[str, Any]] | None = None) -> str | None:
    """The class of an optimizer whose tensors have these names, where files do not say it. None if they are not Adam's."""
    if keys != {"exp_avg", "exp_avg_sq"}:
        logger.warning(
            "%s does not say which optimizer has the states %s, and so no run can load them: load what is imported with "
            "--no-load-optim (load_optimizer_states=False)",
            *(where, ", ".join(sorted(keys)) or "none"),
        )
        return None
    # torch's groups say how weights decay, since 2.8; fused Adams, whose groups do not, decouple it by default.
    kind = "AdamW" if (groups or [{}])[0].get("decoupled_weight_decay", True) else "Adam"
    logger.warning(
        "%s does not say which optimizer has the states exp_avg and exp_avg_sq: they are imported as %s's. If they were "
        "another's, load what is imported with --no-load-optim (load_optimizer_states=False)",
        *(where, kind),
    )
    return kind


def write_foreign(foreign: ForeignCheckpoint, directory: str | Path) -> Path:
    """The directory of a checkpoint with what another framework has saved, from which any number of ranks can continue.

    Raises:
        ValueError: `foreign` has no tensors, or is inconsistent: a tensor is not as it was announced, or has no values at all; or
            its dtype cannot be saved.
        OSError: as `write_checkpoint`.
    """
    if not foreign.tensors:
        raise ValueError("What was read holds no tensor of a model, so nothing was written. Name what has the weights.")
    for name in (*foreign.tensors, *foreign.aliases):
        if not isinstance(name, str):
            raise ValueError(
                f"{str(name)[:60]} stands for the name of a tensor: what was read is damaged. Copy it again."
            )
    entries = {name: _entry(name, tensor) for name, tensor in foreign.tensors.items()}

    def read(piece: Piece, state: str) -> Tensor:
        tensor, dtype = foreign.tensors[piece.name], entries[piece.name].states[state]
        value = tensor.states[state]().detach()
        if tuple(value.shape) != tuple(tensor.shape):
            found, announced = list(value.shape), list(tensor.shape)
            raise ValueError(f"{state} of {piece.name} has shape {found}, announced as {announced}.")
        if state == CONSTANT and value.dtype != dtype:
            raise ValueError(f"{piece.name} is {value.dtype}, announced as {dtype}.")
        return value.to(dtype).reshape(-1)[piece.start : piece.stop]

    client_state, client_tensors = encode(foreign.client_state)
    schedule, schedule_tensors = encode(foreign.lr_scheduler, "lr_scheduler", SCHEDULE)
    index = {
        **{"model_parallel_size": 1, "data_parallel_size": 1, "zero_stage": 0, "device": "cpu"},
        "global_steps": foreign.global_steps,
        "skipped_steps": foreign.skipped_steps,
        "counters": {"global_samples": foreign.global_samples},
        "optimizer": _optimizer(foreign),
        "loss_scaler": foreign.loss_scaler,
        "lr_scheduler": schedule,
        "client_state": client_state,
        "aliases": foreign.aliases,
        "tensors": entries,
    }
    blobs = {**client_tensors, **schedule_tensors}
    return write_checkpoint(directory, tag_of(foreign.global_steps), index, blobs, read)


def _entry(name: str, tensor: ForeignTensor) -> TensorEntry:
    if tensor.kind == "trained" and MASTER in tensor.states:
        states = dict.fromkeys(tensor.states, torch.float32)
    elif tensor.kind in ("frozen", "buffer") and tensor.states.keys() == {CONSTANT}:
        states = {CONSTANT: tensor.dtype}
    else:
        found = ", ".join(tensor.states) or "none"
        raise ValueError(f"{name} is {tensor.kind!r} with the states {found}: it has no weights.")
    try:
        return TensorEntry(tensor.kind, tuple(tensor.shape), None, states)
    except TypeError as error:
        raise ValueError(f"{name}: {error}.") from error


def _optimizer(foreign: ForeignCheckpoint) -> dict[str, Any] | None:
    if foreign.optimizer_counters is None:
        return None
    groups = foreign.optimizer_groups
    return {
        "type": foreign.optimizer_type,
        "counters": foreign.optimizer_counters,
        "counters_of": {name: None for name, tensor in foreign.tensors.items() if tensor.states.keys() == {MASTER}},
        "groups": groups and [plain_settings(group) for group in groups],
    }
