"""Reading DeepSpeed's checkpoints, ZeRO stages 0 to 3, without DeepSpeed and without running anything that is in them.

Checked against what DeepSpeed 0.19.8 and 0.14.4 wrote on 1 to 3 ranks, their zero_to_fp32 and optimizers in memory:
stages 1 to 3 in fp32, bf16 and fp16 with a dynamic loss scale, stage 0; tied and frozen parameters, buffers, two groups, odd
sizes; offload of the optimizer, bf16_ files, sub-groups, round-robin order, aligned parameters, "elastic" states; universal
checkpoints made of these (0.19.8). Not checked against files of their versions: one dict of shapes, no shared_params, no
underscore before optim_states, and model parallelism.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.checkpoint.format import CONSTANT
from megazero.checkpoint.importers.deepspeed_files import DeepSpeedFiles, find_deepspeed_files
from megazero.checkpoint.importers.deepspeed_partitions import (
    SavedOptimizer,
    common_counters,
    is_vector,
    read_optimizer_files,
)
from megazero.checkpoint.importers.deepspeed_universal import read_universal
from megazero.checkpoint.importers.foreign import (
    ForeignCheckpoint,
    ForeignTensor,
    Read,
    loss_scaler_state,
    type_of_states,
)
from megazero.checkpoint.importers.megatron_cuts import merge_model_parallel
from megazero.checkpoint.importers.torch_files import Record, as_saved_by, plain_data
from megazero.zero.bucket import MASTER

logger = logging.getLogger(__name__)

# What DeepSpeed itself writes at the top of a model file; every other key is the user's.
_OWN_KEYS = set(
    """
    module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments shared_params lr_scheduler data_sampler
    random_ltd sparse_tensor_module_names csr_tensor_module_names skipped_steps global_steps global_samples dp_world_size
    mp_world_size ds_config ds_version num_experts ds_autoep_layers autoep_layers universal_checkpoint_info folding
    checkpoint_parallel_dimensions
    """.split()
)


class _Rank(NamedTuple):
    """What the files of one model-parallel rank hold."""

    tensors: dict[str, ForeignTensor]
    aliases: dict[str, str]  # further names of tied parameters -> the name in `tensors`
    optimizer: SavedOptimizer


def read_deepspeed(directory: str | Path, tag: str | None = None) -> ForeignCheckpoint:
    """A DeepSpeed checkpoint in full parameters; a tensor is read from its files when it is asked for.

    Args:
        directory: the `save_dir` of DeepSpeed's `save_checkpoint`.
        tag: which checkpoint in it; by default the one that DIR/latest names.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the files do not belong together, are damaged, or are of a kind that is not supported.
    """
    files = find_deepspeed_files(directory, tag)
    with as_saved_by("DeepSpeed", files.folder):
        models = [files.load_model(rank) for rank in range(files.model_parallel)]
        ranks = [_read_rank(files, rank, model) for rank, model in enumerate(models)]
        model, first = models[0], ranks[0]
        tensors = first.tensors
        if len(ranks) > 1:
            tensors = merge_model_parallel([rank.tensors for rank in ranks], model.get("checkpoint_version", 0))
        logger.info("%s: written by DeepSpeed %s, %d tensors", files.folder, model.get("ds_version"), len(tensors))
        return ForeignCheckpoint(
            tensors=tensors,
            aliases={alias: name for alias, name in first.aliases.items() if name in tensors},
            global_steps=int(model.get("global_steps") or 0),
            skipped_steps=int(model.get("skipped_steps") or 0),
            global_samples=int(model.get("global_samples") or 0),
            optimizer_type=_optimizer_type(str(files.folder), model.get("ds_config"), first.optimizer),
            optimizer_counters=first.optimizer.counters,
            optimizer_groups=plain_data(first.optimizer.groups, "optimizer_groups"),
            lr_scheduler=plain_data(model["lr_scheduler"], "lr_scheduler") if model.get("lr_scheduler") else None,
            loss_scaler=_loss_scaler(first.optimizer.state),
            client_state=plain_data({k: v for k, v in model.items() if k not in _OWN_KEYS}, "client_state"),
        )


def _read_rank(files: DeepSpeedFiles, rank: int, model: dict[str, Any]) -> _Rank:
    where = str(files.model[rank, 0])
    module = {name: value for name, value in model["module"].items() if isinstance(value, Tensor)}
    if others := sorted(model["module"].keys() - module.keys()):
        logger.warning("%s: the entries %s of the module are no tensors and are left out", where, others)
    buffers = set(model.get("buffer_names") or ())
    aliases = model.get("shared_params") or _same_storage({n: t for n, t in module.items() if n not in buffers})
    shapes, is_stage_3 = model.get("param_shapes"), False
    if shapes is None:
        trained = {name: value for name, value in module.items() if name not in buffers and name not in aliases}
        sizes = {name: tuple(value.shape) for name, value in trained.items()}
        optimizer = _plain_optimizer(where, model.get("optimizer") or {}, trained)
    else:
        shapes = [shapes] if isinstance(shapes, Mapping) else shapes
        sizes = {name: tuple(shape) for group in shapes for name, shape in group.items()}
        if files.universal is None:
            states = files.load_optimizers(rank)
            optimizer, world = read_optimizer_files(states, shapes, str(files.folder)), len(states)
        else:
            optimizer, world = read_universal(files.universal, sizes), int(model["dp_world_size"])
        is_stage_3 = "fp32_flat_groups" in optimizer.state
    tensors = {name: ForeignTensor(size, "trained", optimizer.readers[name]) for name, size in sizes.items()}
    if is_stage_3:
        tensors |= _frozen_shares(files.load_models(rank, world))
    for name, value in module.items():
        if name in buffers:
            tensors[name] = _constant(value, "buffer")
        elif name not in tensors and name not in aliases and not is_stage_3:  # stage 3 has placeholders here
            tensors[name] = _constant(value, "frozen")
    return _Rank(tensors, aliases, optimizer)


def _constant(value: Tensor, kind: str) -> ForeignTensor:
    return ForeignTensor(tuple(value.shape), kind, {CONSTANT: value.clone}, value.dtype)


def _frozen_shares(models: Sequence[dict[str, Any]]) -> dict[str, ForeignTensor]:
    """The frozen parameters of a stage 3 checkpoint: the model file of each data-parallel rank has its share of them."""
    shapes = models[0].get("frozen_param_shapes") or {}
    shares = {name: [model["frozen_param_fragments"][name].flatten() for model in models] for name in shapes}

    def read(name: str) -> Tensor:
        return torch.cat(shares[name])[: math.prod(shapes[name])].view(tuple(shapes[name]))

    return {
        name: ForeignTensor(tuple(shape), "frozen", {CONSTANT: partial(read, name)}, shares[name][0].dtype)
        for name, shape in shapes.items()
    }


def _same_storage(module: dict[str, Tensor]) -> dict[str, str]:
    """Names of tied parameters -> the first name of the same tensor."""
    first: dict[Any, str] = {}
    return {
        name: original
        for name, value in module.items()
        if value.numel()
        and (original := first.setdefault((value.data_ptr(), value.shape, value.stride()), name)) != name
    }


def _plain_optimizer(where: str, state: dict[str, Any], trained: dict[str, Tensor]) -> SavedOptimizer:
    """Without ZeRO a plain optimizer's state is in the model file, under the number of each parameter."""
    groups = state.get("param_groups") or []
    order = [number for group in groups for number in group["params"]]
    states = [state["state"].get(number, {}) for number in order]
    readers: dict[str, dict[str, Read]] = {n: {MASTER: partial(_to_fp32, value)} for n, value in trained.items()}
    # The file has no names: one group lists every parameter, in the model's order as far as shapes tell.
    shapes = [value.shape for value in trained.values()]
    if len(groups) == 1 and [_shape_of(found) for found in states] == shapes:
        if len(set(shapes)) < len(shapes):
            logger.warning(
                "%s: the optimizer's states are given to the parameters in the model's order, that of model.parameters(). A "
                "checkpoint without ZeRO has no names for them, and shapes do not tell parameters of one shape apart. If the "
                "optimizer was made with another order, load and save the checkpoint with stage 1 first.",
                where,
            )
        for own, found in zip(readers.values(), states, strict=True):
            own |= {key: partial(_to_fp32, value) for key, value in found.items() if is_vector(value)}
        return SavedOptimizer(readers, common_counters(states, where), groups, state)
    if state:
        logger.warning(
            "%s: the optimizer's state is left out, because a checkpoint without ZeRO does not say which parameters it belongs "
            "to: that is clear only for one group of all parameters in fp32. To keep it, load and save the checkpoint "
            "with stage 1.",
            where,
        )
    return SavedOptimizer(readers, None, None, state)


def _shape_of(state: dict[str, Any]) -> Any:
    return next((value.shape for value in state.values() if is_vector(value)), None)


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32, copy=True)


def _optimizer_type(where: str, config: Any, saved: SavedOptimizer) -> str | None:
    """The class's name; DeepSpeed's "Adam" is AdamW unless adam_w_mode is off."""
    section = config.get("optimizer") if isinstance(config, dict) else None
    if not section or not section.get("type"):
        if saved.counters is None:
            return None
        keys = {key for states in saved.readers.values() for key in states} - {MASTER}
        return type_of_states(where, keys, saved.groups)
    is_coupled = not (section.get("params") or {}).get("adam_w_mode", True)
    return {"adam": "Adam" if is_coupled else "AdamW", "adamw": "AdamW"}.get(section["type"].lower(), section["type"])


def _loss_scaler(state: dict[str, Any]) -> dict[str, Any] | None:
    """The state of our `LossScaler`; None where the scale is fixed, as it is in fp32 and bf16."""
    scaler = state.get("loss_scaler", state)
    scaler = vars(scaler) if isinstance(scaler, Record) else scaler
    if not isinstance(scaler, dict) or {"cur_scale", "cur_iter", "last_overflow_iter"} - scaler.keys():
        return None
    # DeepSpeed doubles the scale one step after `scale_window` clean ones: it counts the clean steps before the present one.
    clean_steps = max(scaler["cur_iter"] - scaler["last_overflow_iter"] - 2, 0)
    return loss_scaler_state(scaler["cur_scale"], scaler.get("cur_hysteresis", 1), clean_steps)
