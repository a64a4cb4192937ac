"""Reads GPT-2 checkpoints of Megatron-LM, whatever number of ranks wrote them.

All releases are read, from the first (2019) to megatron-core. Its format "torch_dist" is in megatron_dist.py, "torch" here. Of
the distributed optimizer, which saves apart in this one, only the weights are read.

    DIR/latest_checkpointed_iteration.txt            an iteration, or "release"
    DIR/iter_0000500/mp_rank_00/model_optim_rng.pt   one file for each model-parallel rank; or DIR/release/mp_rank_00/...

The first release saves weights by flat names ("transformer.layers.0. ...") and neither its arguments nor a version; later ones
nest them ("language_model", "embedding", ...) and save "args" and "checkpoint_version"; megatron-core has flat names again
("decoder.layers.0. ..."). The version says in which order each rank has the rows of query_key_value, for its heads of size d:

    0  [3, heads, d], which is ours            1  [heads, d, 3]            2 and 3  [heads, 3, d]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.format import is_count
from megazero.checkpoint.importers.foreign import ForeignCheckpoint, ForeignTensor
from megazero.checkpoint.importers.megatron_config import WORD_EMBEDDINGS, megatron_config
from megazero.checkpoint.importers.megatron_cuts import cut_dimension
from megazero.checkpoint.importers.megatron_dist import read_megatron_dist
from megazero.checkpoint.importers.megatron_files import MegatronFiles, optimizer_or_none, our_name
from megazero.checkpoint.importers.megatron_optimizer import read_optimizer
from megazero.checkpoint.importers.torch_dist import is_torch_dist
from megazero.checkpoint.importers.torch_files import as_saved_by, load_torch_dict, plain_data
from megazero.files import read_whole
from megazero.model.huggingface import check_names
from megazero.mpu.partition import Partition
from megazero.zero.bucket import MASTER

_TRACKER = "latest_checkpointed_iteration.txt"
_QUERY_KEY_VALUE = ".attention.query_key_value."
_EXTRA_STATE = "_extra_state"  # of Transformer Engine's layers: scales of fp8


def read_megatron(
    directory: str | Path,
    iteration: int | None = None,
    *,
    vocab_size: int | None = None,
    num_attention_heads: int | None = None,
) -> ForeignCheckpoint:
    """A GPT-2 by our names, with Adam's moments where they are saved; its GPT2Config is in client_state["model"].

    With the moments, client_state also has the place from which the GPT-2 job continues, if the run read its samples in turn.

    Tensors are read when they are asked for, from all ranks' files (which torch before 1.6 wrote in a form that has to be read
    whole). States of random generators are not taken.

    Args:
        iteration: which of the directory's checkpoints; by default the one that it names as the latest.
        vocab_size: without padding. Only the padded size is saved.
        num_attention_heads: needed where arguments are not saved, as the first release did not.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: a size is not known, or the checkpoint is damaged, not complete or of another model.
    """
    folder = _folder(Path(directory), iteration)
    with as_saved_by("Megatron-LM", folder):
        saved = read_megatron_dist(folder) if is_torch_dist(folder) else _read_ranks(folder)
        args = plain_data(saved.common.get("args", {}), "args")
        config = megatron_config(saved.shards, args, vocab_size, num_attention_heads, folder)
        version = float(saved.common.get("checkpoint_version") or 0)
        steps = 0 if folder.name == "release" else int(saved.common.get("iteration", 0))
    shapes = config.full_shapes()
    cuts = _checked_cuts(saved.shards, shapes, folder)

    def read(name: str, state: str) -> Tensor:
        parts = [rank[name][state]() for rank in saved.states]
        if _QUERY_KEY_VALUE in name:
            parts = [_stacked(part, version, config.head_size) for part in parts]
        full = cuts[name].merge(parts) if name in cuts else parts[0]
        return full.to(torch.float32, copy=name not in cuts)  # never a view of the file

    tensors = {
        name: ForeignTensor(shape, "trained", {state: partial(read, name, state) for state in saved.states[0][name]})
        for name, shape in shapes.items()
    }
    weights = ForeignCheckpoint(tensors, global_steps=steps, client_state={"model": asdict(config)})
    if saved.optimizer is None:
        return weights
    return replace(
        weights,
        optimizer_type="AdamW",  # apex's FusedAdam, whose weight decay is decoupled
        optimizer_counters={"step": saved.optimizer.step},
        optimizer_groups=saved.optimizer.groups,
        lr_scheduler=_schedule(saved.common, steps, saved.optimizer.step),
        loss_scaler=saved.optimizer.loss_scaler,
        client_state=weights.client_state | _place(args, steps),
    )


def _folder(directory: Path, iteration: int | None) -> Path:
    if iteration is not None:
        return directory / f"iter_{iteration:07d}"
    tracker = directory / _TRACKER
    if not tracker.is_file():
        raise FileNotFoundError(
            f"{tracker} is missing: it names the latest checkpoint of a Megatron-LM directory. Give the directory that was "
            "Megatron's --save, or an iteration."
        )
    text = read_whole(tracker).decode(errors="replace").strip()
    if text != "release" and not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{tracker} says {text[:40]!r}, where a number or 'release' is expected. Give an iteration.")
    return directory / ("release" if text == "release" else f"iter_{int(text):07d}")


def _read_ranks(folder: Path) -> MegatronFiles:
    files = [load_torch_dict(path, "model", "checkpoint of Megatron-LM") for path in _rank_files(folder)]
    shards = [_flat(file["model"]) for file in files]
    found = optimizer_or_none(folder, files[0], lambda: read_optimizer([file["optimizer"] for file in files], shards))
    states, optimizer = found or ([{name: {MASTER: x} for name, x in shard.items()} for shard in shards], None)
    return MegatronFiles(
        shards,
        [{name: {key: x.detach for key, x in tensors.items()} for name, tensors in rank.items()} for rank in states],
        files[0],
        optimizer,
    )


def _rank_files(folder: Path) -> list[Path]:
    found = {path.name: path / "model_optim_rng.pt" for path in folder.glob("mp_rank_*")}
    wanted = [f"mp_rank_{rank:02d}" for rank in range(len(found))]
    if not found:
        raise FileNotFoundError(f"{folder} holds no checkpoint: there is no {folder / 'mp_rank_00'}.")
    if found.keys() != set(wanted):
        raise ValueError(
            f"{folder} holds {', '.join(sorted(found))}, where {', '.join(wanted)} are expected. Checkpoints of "
            "pipeline-parallel runs (mp_rank_00_000) cannot be read; of others, copy the directories of all ranks."
        )
    return [found[name] for name in wanted]


def _flat(model: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The weights by our names, whatever is nested."""
    flat: dict[str, Tensor] = {}
    for key, value in model.items():
        if key.endswith(_EXTRA_STATE):
            continue
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        elif isinstance(value, Tensor):
            flat[our_name(f"{prefix}{key}")] = value.detach()
        else:
            raise ValueError(f"'model' holds no tensor at {prefix}{key}, but a value of type {type(value).__name__}.")
    return flat


def _checked_cuts(
    shards: Sequence[Mapping[str, Tensor]], shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> dict[str, Partition]:
    """How each parameter is cut, if what every rank holds has a shape that suits it."""
    ranks, cuts = len(shards), {}
    for name, shape in shapes.items():
        if (dim := cut_dimension(name, ranks)) is not None:
            cuts[name] = Partition(dim, 3 if _QUERY_KEY_VALUE in name else 1, full_size=shape[dim])
    for rank, shard in enumerate(shards):
        check_names(shard, shapes, f"{folder}, rank {rank},")
        for name, full in shapes.items():
            wanted = list(full)
            if name == WORD_EMBEDDINGS:
                wanted[0] = len(shards[0][WORD_EMBEDDINGS])  # padded
            elif name in cuts:
                wanted[cuts[name].dim] = full[cuts[name].dim] // ranks
            if list(shard[name].shape) != wanted:
                raise ValueError(
                    f"{folder}, rank {rank}: {name} has shape {list(shard[name].shape)}, expected {wanted} on each of {ranks} "
                    "model-parallel ranks."
                )
    return cuts


def _stacked(part: Tensor, version: float, head_size: int) -> Tensor:
    """One rank's rows of query_key_value (weight or bias) as [3, heads, d]."""
    if version < 1:
        return part
    if version < 2:
        rows = part.unflatten(0, (-1, head_size, 3)).movedim(2, 0)
    else:
        rows = part.unflatten(0, (-1, 3, head_size)).movedim(1, 0)
    return rows.reshape(part.shape)


def _schedule(common: Mapping[str, Any], iteration: int, updates: float) -> dict[str, Any] | None:
    """The state of `AnnealingLR`. Later releases count samples, and those of each update; Adam counts the updates."""
    saved = common.get("opt_param_scheduler", common.get("lr_scheduler"))
    if not isinstance(saved, dict):
        return None
    steps = saved.get("num_steps", saved.get("num_iters"))
    is_of_iterations = isinstance(steps, int) and 0 <= steps <= iteration
    return {"num_steps": steps if is_of_iterations else int(updates)}


def _place(args: Mapping[str, Any], iteration: int) -> dict[str, int]:
    """Where a run that read its samples in turn was; {} if it did not, or before iterations were saved with their samples."""
    samples = args.get("consumed_train_samples", -1)
    if not is_count(samples) or args.get("dataloader_type") not in (None, "single"):
        return {}
    return {"iteration": iteration, "consumed_samples": samples}
