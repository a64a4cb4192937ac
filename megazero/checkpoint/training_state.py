"""What of a training run goes into a checkpoint, and comes back under any model-parallel size, data-parallel size and stage.

States are saved by logical parameter, whole over the data-parallel group: nothing in a file depends on how they were sharded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.checkpoint import store
from megazero.checkpoint.rng import rng_states, set_rng_states
from megazero.mpu.groups import ParallelGroups
from megazero.mpu.partition import Partition
from megazero.zero.access import MASTER, full_parameters, full_states
from megazero.zero.bucket import Bucket
from megazero.zero.optimizer import BucketOptimizer

logger = logging.getLogger(__name__)

CONSTANT = "constant"  # parameters that are not trained, and buffers: they have no optimizer state


@dataclass
class TrainingState:
    """The parts of an engine that a checkpoint is made of."""

    module: nn.Module
    groups: ParallelGroups
    partitions: dict[str, Partition]
    buckets: list[Bucket]
    optimizer: BucketOptimizer
    lr_scheduler: Any | None
    global_steps: int = 0
    skipped_steps: int = 0

    def save(
        self,
        directory: str,
        tag: str | None,
        client_state: dict[str, Any],
        *,
        save_optimizer: bool = True,
        save_rng: bool = True,
        keep_last: int = 0,
    ) -> Path:
        """Writes one checkpoint and returns its directory. Collective over the world."""
        writes = self.groups.data_parallel_rank == 0
        tensors: dict[str, Tensor] = {}
        for name, key, value in full_states(self.optimizer):
            if writes and (key == MASTER or save_optimizer):
                tensors[f"{key}/{name}"] = value.cpu().clone()
        for name, value in self._constants():
            if writes:
                tensors[f"{CONSTANT}/{name}"] = value.cpu().clone()
        common, others = self._counters()
        index = {
            "global_steps": self.global_steps,
            "skipped_steps": self.skipped_steps,
            "model_parallel_size": self.groups.model_parallel_size,
            "world_size": torch.distributed.get_world_size(),
            "device": comm.local_device().type,
            "shapes": self._full_shapes(),
            "partitions": {name: asdict(cut) for name, cut in self.partitions.items()},
            "optimizer": common if save_optimizer else None,
            "optimizer_counters": others if save_optimizer else None,
            "optimizer_groups": self._group_settings() if save_optimizer else None,
            "optimizer_type": type(self.optimizer.torch_optimizer).__name__,
            "loss_scaler": self.optimizer.loss_scaler.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler else None,
            "client_state": client_state,
        }
        rng = rng_states() if save_rng else {}
        return store.save(
            directory, tag or store.tag_of(self.global_steps), tensors, rng, index, self.groups, keep_last
        )

    def load(
        self,
        directory: str,
        tag: str | None,
        *,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_rng: bool = True,
        load_module_only: bool = False,
    ) -> store.Reader:
        """Reads a checkpoint into the parts, and returns its reader.

        Learning rates are the checkpoint's, as they come with the optimizer's state, unless the present scheduler starts anew.
        All other settings of parameter groups (weight decay, betas, ...) are those of this run.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it is damaged, or of a model of another shape.
        """
        reader = store.Reader(directory, tag)
        self._check_shapes(reader)
        with_optimizer = load_optimizer_states and not load_module_only and reader.index["optimizer"] is not None
        if with_optimizer:
            self._check_optimizer(reader)
            kinds = {key.partition("/")[0] for key in reader.tensors} - {MASTER, CONSTANT}
            self.optimizer.allocate_state(sorted(kinds), _saved_counters(reader))
        for bucket in self.buckets:
            self._load_bucket(reader, bucket, sorted(kinds) if with_optimizer else ())
        for name, buffer in self._buffers().items():
            buffer.copy_(self._cut(name, reader.read(f"{CONSTANT}/{name}"), tuple(buffer.shape)))
        if load_module_only:
            return reader
        if not with_optimizer:
            logger.warning("the optimizer starts with empty moments: its state was not loaded from %s", reader.path)
        self.global_steps, self.skipped_steps = reader.index["global_steps"], reader.index["skipped_steps"]
        self.optimizer.loss_scaler.load_state_dict(reader.index["loss_scaler"])
        continues = load_lr_scheduler_states and reader.index["lr_scheduler"] is not None
        if with_optimizer and (continues or self.lr_scheduler is None):
            self._load_learning_rates(reader)  # first: a scheduler may set its own
        if self.lr_scheduler is not None and continues:
            self.lr_scheduler.load_state_dict(reader.index["lr_scheduler"])
        if load_rng:
            self._load_rng(reader)
        return reader

    def _load_bucket(self, reader: store.Reader, bucket: Bucket, kinds: Iterable[str]) -> None:
        """Reads one tensor at a time and keeps this rank's part of it."""
        bucket.load(lambda segment: self._cut(segment.name, self._read_weight(reader, segment.name), segment.shape))
        for segment in bucket.layout.segments:
            for key in kinds:
                if f"{key}/{segment.name}" in reader.tensors:
                    values = self._cut(segment.name, reader.read(f"{key}/{segment.name}"), segment.shape).reshape(-1)
                    for view, place in self.optimizer.parts_of_state(bucket, key, segment):
                        view.copy_(values[place])

    def _counters(self) -> tuple[dict[str, float], dict[str, dict[str, float] | None]]:
        """The optimizer's scalar state that most parameters have, and that of the others; None for those without state."""
        found: dict[str, dict[str, float]] = {}
        for part in comm.all_gather_object(self.optimizer.counters(), self.groups.data):
            found.update(part)
        common = _most_frequent(found.values())
        names = [s.name for bucket in self.buckets if bucket.master is not None for s in bucket.layout.segments]
        return common, {name: found.get(name) for name in names if found.get(name) != common}

    def _group_settings(self) -> list[dict[str, Any]]:
        """What can be written as JSON of the settings of each parameter group."""
        groups = self.optimizer.param_groups
        plain = [{k: v.item() if isinstance(v, Tensor) and v.ndim == 0 else v for k, v in g.items()} for g in groups]
        return [{k: v for k, v in group.items() if k != "params" and _is_plain(v)} for group in plain]

    def _load_learning_rates(self, reader: store.Reader) -> None:
        saved, groups = reader.index.get("optimizer_groups"), self.optimizer.param_groups
        if saved is None or len(saved) != len(groups):
            found = "none" if saved is None else f"those of {len(saved)} parameter groups"
            logger.warning(
                "learning rates stay as this run sets them for its %d parameter groups: %s holds %s",
                len(groups),
                reader.path,
                found,
            )
            return
        for group, settings in zip(groups, saved, strict=True):
            for key in ("lr", "initial_lr"):
                if key in group and key in settings and isinstance(group[key], Tensor):
                    group[key].fill_(settings[key])
                elif key in group and key in settings:
                    group[key] = settings[key]

    @staticmethod
    def _read_weight(reader: store.Reader, name: str) -> Tensor:
        """A parameter may have been frozen when it was saved and be trained now, or the other way round."""
        return reader.read(next(key for key in (f"{MASTER}/{name}", f"{CONSTANT}/{name}") if key in reader.tensors))

    def _buffers(self) -> dict[str, Tensor]:
        state = self.module.state_dict(keep_vars=True)
        return {name: value.detach() for name, value in state.items() if not isinstance(value, nn.Parameter)}

    def _constants(self) -> Iterable[tuple[str, Tensor]]:
        """Frozen parameters, whole one bucket at a time, and persistent buffers."""
        yield from full_parameters([bucket for bucket in self.buckets if bucket.master is None])
        yield from self._buffers().items()

    def _full_shapes(self) -> dict[str, list[int]]:
        """The unpadded, uncut shape of everything that a checkpoint holds of the module."""
        local = {segment.name: segment.shape for bucket in self.buckets for segment in bucket.layout.segments}
        local.update({name: tuple(value.shape) for name, value in self._buffers().items()})
        cuts = self.partitions
        return {name: list(cuts[name].full_shape(shape) if name in cuts else shape) for name, shape in local.items()}

    def _check_shapes(self, reader: store.Reader) -> None:
        saved, wanted = reader.index["shapes"], self._full_shapes()
        different = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
        if different:
            first = different[0]
            raise ValueError(
                f"The checkpoint {reader.path} is of a model of another shape: {len(different)} parameters differ, the first is "
                f"{first}: saved {saved.get(first, 'nothing')}, model {wanted.get(first, 'nothing')}. Give the --num-layers, "
                "--hidden-size, --max-position-embeddings and vocabulary that it was trained with."
            )

    def _check_optimizer(self, reader: store.Reader) -> None:
        saved, wanted = reader.index["optimizer_type"], type(self.optimizer.torch_optimizer).__name__
        if saved != wanted:
            raise ValueError(
                f"The checkpoint {reader.path} holds the state of {saved}, and this run uses {wanted}. Use the same optimizer, "
                "or start it anew with --no-load-optim."
            )

    def _cut(self, name: str, full: Tensor, shape: tuple[int, ...]) -> Tensor:
        cut = self.partitions.get(name)
        if cut is None:
            return full
        return cut.slice_like(shape, full, self.groups.model_parallel_rank, self.groups.model_parallel_size)

    def _load_rng(self, reader: store.Reader) -> None:
        index, world_size = reader.index, torch.distributed.get_world_size()
        same_world = (index["world_size"], index["model_parallel_size"]) == (
            world_size,
            self.groups.model_parallel_size,
        )
        states = reader.rng(torch.distributed.get_rank()) if same_world else None
        if states is not None:
            set_rng_states(states)
        else:
            logger.info("random generators are seeded anew: the checkpoint has no states for these ranks and devices")


def _saved_counters(reader: store.Reader) -> dict[str, dict[str, float]]:
    """The optimizer's scalar state of every parameter that was saved with state."""
    common, others = reader.index["optimizer"], reader.index.get("optimizer_counters") or {}
    names = [name for kind, _, name in (key.partition("/") for key in reader.tensors) if kind == MASTER]
    return {name: others.get(name, common) for name in names if others.get(name, common) is not None}


def _most_frequent(values: Iterable[dict[str, float]]) -> dict[str, float]:
    counts = Counter(tuple(sorted(value.items())) for value in values)
    return dict(counts.most_common(1)[0][0]) if counts else {}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
