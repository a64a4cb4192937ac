"""What of a training run goes into a checkpoint, and comes back under any tensor-parallel size, data-parallel size and stage.

Every rank saves its shard of every bucket, whatever the stage shards, and loads the ranges that it needs, wherever they were
saved: `ranges` translates. Nothing is gathered, and nothing is held but the rank's own shards and one parameter beside them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megazero import __version__, comm
from megazero.checkpoint.plain import decode, encode
from megazero.checkpoint.ranges import Cut
from megazero.checkpoint.reader import CheckpointError, Reader, is_count, latest_tag
from megazero.checkpoint.rng import rng_states, set_rng_states
from megazero.checkpoint.saver import Piece, Saver, Snapshot, tensor_entry
from megazero.checkpoint.store import list_tags, tag_of
from megazero.mpu.groups import ParallelGroups
from megazero.mpu.partition import Partition
from megazero.zero.access import MASTER
from megazero.zero.bucket import Bucket
from megazero.zero.layout import Segment
from megazero.zero.optimizer import BucketOptimizer

logger = logging.getLogger(__name__)

CONSTANT = "constant"  # parameters that are not trained, and buffers: they have no optimizer state
_RNG = "rng/"


@dataclass
class TrainingState:
    """The parts of an engine that a checkpoint is made of."""

    module: nn.Module
    groups: ParallelGroups
    partitions: dict[str, Partition]
    buckets: list[Bucket]
    optimizer: BucketOptimizer
    lr_scheduler: Any | None
    stage: int
    global_steps: int = 0
    skipped_steps: int = 0
    counters: dict[str, int] = field(default_factory=dict)  # the engine's others, by name
    saver: Saver = field(default_factory=Saver)

    # ---- saving

    def save(
        self,
        directory: str | Path,
        tag: str | None,
        client_state: dict[str, Any],
        *,
        save_optimizer: bool = True,
        save_rng: bool = True,
        save_latest: bool = True,
        exclude_frozen: bool = False,
        keep_last: int = 0,
        in_background: bool = False,
    ) -> Path:
        """Writes one checkpoint and returns its directory. Collective over the world.

        Raises:
            TypeError: `client_state` holds what is no plain data; the message has the path to it.
            Exception: as `Saver.save`.
        """
        client, client_tensors = comm.together(lambda: encode(client_state))  # it need not be plain on every rank
        keys = self.optimizer.state_keys_everywhere() if save_optimizer else []
        index = {**self._index(keys if save_optimizer else None, exclude_frozen), "client_state": client}
        blobs = {_RNG + name: state for name, state in rng_states().items()} if save_rng else {}
        pieces = list(self._pieces(keys, exclude_frozen))
        if torch.distributed.get_rank() == 0:
            blobs.update(client_tensors)
            buffers = self._buffers().items()
            pieces += [Piece(name, 0, 0, {CONSTANT: value.reshape(-1)}) for name, value in buffers if value.numel()]
        return self.saver.save(
            Snapshot(pieces, blobs, index),
            directory,
            tag_of(self.global_steps) if tag is None else tag,
            save_latest=save_latest,
            keep_last=keep_last,
            in_background=in_background,
        )

    def _index(self, keys: list[str] | None, exclude_frozen: bool) -> dict[str, Any]:
        """All of the index that does not depend on where things lie. Collective.

        Args:
            keys: of the optimizer's states; None does not save the optimizer.
        """
        common, others = self._optimizer_counters()
        schedule = None if self.lr_scheduler is None else encode(self.lr_scheduler.state_dict(), "lr_scheduler")[0]
        optimizer = {
            "type": type(self.optimizer.torch_optimizer).__name__,
            "counters": common,
            "counters_of": others,
            "groups": self._group_settings(),
        }
        return {
            "megazero_version": __version__,
            "torch_version": torch.__version__,
            "model_parallel_size": self.groups.model_parallel_size,
            "data_parallel_size": self.groups.data_parallel_size,
            "zero_stage": self.stage,
            "device": comm.local_device().type,
            "global_steps": self.global_steps,
            "skipped_steps": self.skipped_steps,
            "counters": self.counters,
            "optimizer": None if keys is None else optimizer,
            "loss_scaler": self.optimizer.loss_scaler.state_dict(),
            "lr_scheduler": schedule,
            "aliases": self._aliases(),
            "tensors": self._described(keys or [], exclude_frozen),
        }

    def _described(self, keys: list[str], exclude_frozen: bool) -> dict[str, dict[str, Any]]:
        """Everything that is saved of the module, in its order."""
        found = {}
        for bucket in self.buckets:
            trained = {MASTER: torch.float32, **dict.fromkeys(keys, torch.float32)}
            states = trained if bucket.master is not None else {CONSTANT: bucket.flat.dtype}
            for segment in bucket.layout.segments if bucket.master is not None or not exclude_frozen else ():
                kind = "frozen" if bucket.master is None else "trained"
                shape, cut = self._full_shape(segment.name, segment.shape), self._cut(segment.name, segment.shape)
                entry = None if cut is None else {"dim": cut.dim, "stride": cut.stride, "padded": cut.padded}
                found[segment.name] = tensor_entry(kind, shape, entry, states)
        for name, value in self._buffers().items():
            found[name] = tensor_entry("buffer", value.shape, None, {CONSTANT: value.dtype})
        order = self.module.state_dict(keep_vars=True)
        return {name: found[name] for name in [*(n for n in order if n in found), *(found.keys() - order.keys())]}

    def _pieces(self, keys: list[str], exclude_frozen: bool) -> Iterator[Piece]:
        """This rank's shard of every bucket; what tensor-parallel ranks hold in common is saved by the first of them."""
        rank = self.groups.model_parallel_rank
        for bucket in self.buckets:
            if bucket.master is None and exclude_frozen:
                continue
            for segment in bucket.layout.segments:
                start, stop = bucket.saved_part(segment)
                if start < stop and (rank == 0 or segment.name in self.partitions):
                    yield Piece(segment.name, rank, start, self._states(bucket, segment, keys, start, stop))

    def _states(self, bucket: Bucket, segment: Segment, keys: list[str], start: int, stop: int) -> dict[str, Tensor]:
        """1-D views of what this rank holds of [start, stop) of a parameter."""
        if bucket.master is None:
            held, origin = (bucket.shard, bucket.shard_range.start) if bucket.sharding.parameters else (bucket.flat, 0)
            return {CONSTANT: held[segment.start + start - origin : segment.start + stop - origin]}
        origin = bucket.owned_range.start - segment.start
        states = {MASTER: bucket.master[start - origin : stop - origin]}
        for key in keys:
            parts = list(self.optimizer.parts_of_state(bucket, key, segment))
            whole = next((view[start - at.start :][: stop - start] for view, at in parts if at.start <= start), None)
            if whole is None or whole.numel() < stop - start:  # it was cut where parameters have been frozen
                whole = torch.zeros(stop - start, device=bucket.master.device)
                for view, at in parts:
                    low, high = max(at.start, start), min(at.stop, stop)
                    if low < high:
                        whole[low - start : high - start] = view[low - at.start : high - at.start]
            states[key] = whole
        return states

    def _optimizer_counters(self) -> tuple[dict[str, float], dict[str, dict[str, float] | None]]:
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

    def _aliases(self) -> dict[str, str]:
        """Further names of tied parameters and buffers -> the name under which they are saved."""
        saved = {name for bucket in self.buckets for name in bucket.parameters}
        names: dict[int, list[str]] = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            names.setdefault(id(value), []).append(name)
        first = {id_: next((n for n in same if n in saved), same[0]) for id_, same in names.items()}
        return {name: first[id_] for id_, same in names.items() for name in same if name != first[id_]}

    # ---- loading

    def load(
        self,
        directory: str | Path,
        tag: str | None,
        *,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_rng: bool = True,
        load_module_only: bool = False,
        strict: bool = True,
        fallback: bool = False,
        prepare: Callable[[Reader], None] | None = None,
    ) -> Reader:
        """Reads a checkpoint into the parts, and returns its reader. Collective over the world.

        Learning rates are the checkpoint's, as they come with the optimizer's state, unless the present scheduler starts anew.
        All other settings of parameter groups (weight decay, betas, ...) are those of this run.

        Args:
            strict: every parameter must be in the checkpoint; else what is not there keeps its values.
            fallback: where it is damaged, take the newest older one that is not.
            prepare: called on every rank before anything is read; what it raises ends the load on all of them.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            CheckpointError: it is damaged. Some of this rank's state may have been overwritten.
            OSError: it cannot be read.
            ValueError: it is of a model of another shape, or of another optimizer.
        """
        self.saver.wait()
        with_optimizer = load_optimizer_states and not load_module_only
        readers = [lambda tag=tag: Reader(directory, tag) for tag in _candidates(directory, tag, fallback)]

        def read(reader: Reader) -> None:
            if prepare is not None:
                prepare(reader)
            self._read(reader, with_optimizer, strict)
            if not load_module_only:
                self._continue(reader, with_optimizer, load_lr_scheduler_states, load_rng)
            client_state(reader)  # here already, where damage that only some rank meets is told to the others
            reader.close()

        reader = _first_intact(readers, read)
        for bucket in self.buckets:
            bucket.adopt_parts()
        return reader

    def _read(self, reader: Reader, with_optimizer: bool, strict: bool) -> None:
        """Fills this rank's master weights, optimizer states and buffers. Communicates nothing."""
        self._check_shapes(reader, strict)
        kinds: list[str] = []
        if with_optimizer and reader.index.get("optimizer") is not None:
            self._check_optimizer(reader)
            kinds = sorted({state for name in reader.tensors for state in reader.states(name)} - {MASTER, CONSTANT})
            self.optimizer.allocate_state(kinds, _saved_counters(reader))
        for bucket in self.buckets:
            for segment, part, start in bucket.weight_parts():
                if segment.name in reader.tensors:
                    self._read_segment(reader, bucket, segment, part, start, kinds)
        for name, buffer in self._buffers().items():
            if name in reader.tensors:
                reader.read_part(name, {CONSTANT: buffer.view(-1) if buffer.is_contiguous() else buffer.reshape(-1)})

    def _read_segment(
        self, reader: Reader, bucket: Bucket, segment: Segment, weights: Tensor, start: int, kinds: list[str]
    ) -> None:
        """Reads what belongs to the same elements together: their places are worked out once."""
        saved = reader.states(segment.name)
        # A parameter may have been frozen when it was saved and be trained now, or the other way round.
        wanted = [(reader.weight_state(segment.name), weights, start)]
        for key in kinds:
            if key in saved:
                wanted += [(key, view, at.start) for view, at in self.optimizer.parts_of_state(bucket, key, segment)]
        together: dict[tuple[int, int], dict[str, Tensor]] = {}
        for state, out, first in wanted:
            together.setdefault((first, out.numel()), {})[state] = out
        cut = self._cut(segment.name, segment.shape)
        rank, size = self.groups.model_parallel_rank, self.groups.model_parallel_size
        for (first, _), outs in together.items():
            reader.read_part(segment.name, outs, cut=cut, rank=rank, size=size, start=first)

    def _continue(self, reader: Reader, with_optimizer: bool, continue_schedule: bool, load_rng: bool) -> None:
        """Counters, loss scale, schedule and random generators. Communicates nothing."""
        index = reader.index
        with reader.well_formed("its counters"):
            counters = {**index.get("counters", {}), **{key: index[key] for key in ("global_steps", "skipped_steps")}}
            if not all(map(is_count, counters.values())):
                raise ValueError(f"{counters}")
        if not with_optimizer or index.get("optimizer") is None:
            with_optimizer = False
            logger.warning("the optimizer starts with empty moments: its state was not loaded from %s", reader.path)
        self.global_steps, self.skipped_steps = counters.pop("global_steps"), counters.pop("skipped_steps")
        self.counters.update(counters)
        with reader.well_formed("loss_scaler"):
            if index["loss_scaler"] is not None:
                self.optimizer.loss_scaler.load_state_dict(_numbers(index["loss_scaler"]))
        with reader.well_formed("lr_scheduler"):
            schedule = decode(index["lr_scheduler"], {}) if continue_schedule else None
        if with_optimizer and (schedule is not None or self.lr_scheduler is None):
            with reader.well_formed("optimizer"):
                self._load_learning_rates(reader)  # first: a scheduler may set its own
        if self.lr_scheduler is not None and schedule is not None:
            _continue_schedule(self.lr_scheduler, schedule, reader.path)
        if load_rng:
            with reader.well_formed("its random generators"):
                self._load_rng(reader)

    def _load_learning_rates(self, reader: Reader) -> None:
        saved, groups = reader.index["optimizer"].get("groups"), self.optimizer.param_groups
        if saved is None or len(saved) != len(groups):
            found = "none" if saved is None else f"those of {len(saved)} parameter groups"
            logger.warning(
                "learning rates stay as this run sets them for its %d parameter groups: %s holds %s",
                *(len(groups), reader.path, found),
            )
            return
        for group, settings in zip(groups, saved, strict=True):
            _numbers({key: settings[key] for key in ("lr", "initial_lr") if settings.get(key) is not None})
            for key in ("lr", "initial_lr"):
                if key in group and key in settings and isinstance(group[key], Tensor):
                    group[key].fill_(settings[key])
                elif key in group and key in settings:
                    group[key] = settings[key]

    def _load_rng(self, reader: Reader) -> None:
        index, groups = reader.index, self.groups
        same_world = (index["model_parallel_size"], index["data_parallel_size"]) == (
            groups.model_parallel_size,
            groups.data_parallel_size,
        )
        blobs = index["blobs"][torch.distributed.get_rank()] if same_world else {}
        states = {key.removeprefix(_RNG): reader.blob(at) for key, at in blobs.items() if key.startswith(_RNG)}
        if states:
            set_rng_states(states)
        else:
            logger.info("random generators are seeded anew: the checkpoint has no states for these ranks and devices")

    # ---- the module's shapes

    def _buffers(self) -> dict[str, Tensor]:
        """Persistent buffers, each once."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if not isinstance(value, nn.Parameter):
                found.setdefault(id(value), (name, value.detach()))
        return dict(found.values())

    def _cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        return cut_of(self.partitions.get(name), shape, self.groups.model_parallel_size)

    def _full_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Uncut and without padding."""
        return self.partitions[name].full_shape(shape) if name in self.partitions else tuple(shape)

    def _check_shapes(self, reader: Reader, strict: bool) -> None:
        segments = [segment for bucket in self.buckets for segment in bucket.layout.segments]
        wanted = {s.name: self._full_shape(s.name, s.shape) for s in segments}
        wanted.update({name: tuple(value.shape) for name, value in self._buffers().items()})
        saved = {name: reader.shape(name) for name in reader.tensors}
        names = {**saved, **wanted} if strict else saved.keys() & wanted.keys()
        different = [name for name in names if saved.get(name) != wanted.get(name)]
        if different:
            first = different[0]
            raise ValueError(
                f"The checkpoint {reader.path} is of a model of another shape: {len(different)} parameters differ, the first is "
                f"{first}: saved {list(saved[first]) if first in saved else 'nothing'}, model "
                f"{list(wanted[first]) if first in wanted else 'nothing'}. Give the --num-layers, --hidden-size, "
                "--max-position-embeddings and vocabulary that it was trained with."
            )

    def _check_optimizer(self, reader: Reader) -> None:
        with reader.well_formed("optimizer"):
            saved, wanted = reader.index["optimizer"]["type"], type(self.optimizer.torch_optimizer).__name__
        if saved != wanted:
            raise ValueError(
                f"The checkpoint {reader.path} holds the state of {saved}, and this run uses {wanted}. Use the same optimizer, "
                "or start it anew with --no-load-optim."
            )


def cut_of(partition: Partition | None, shard_shape: tuple[int, ...], size: int) -> Cut | None:
    """A parameter's cut over `size` tensor-parallel ranks, from the shape that each of them has of it."""
    if partition is None:
        return None
    return Cut(partition.dim, partition.stride, shard_shape[partition.dim] * size)


def client_state(reader: Reader) -> dict[str, Any]:
    """What the user had saved beside the model.

    Raises:
        CheckpointError: it is damaged.
    """
    with reader.well_formed("blobs"):
        blobs = reader.index["blobs"][0]
        tensors = {key: reader.blob(at) for key, at in blobs.items() if not key.startswith(_RNG)}
        encoded = reader.index["client_state"]
    try:
        return decode(encoded, tensors)
    except (ValueError, RecursionError, SyntaxError) as error:
        raise CheckpointError(f"{reader.path}: {error}") from error


def _first_intact(readers: Sequence[Callable[[], Reader]], read: Callable[[Reader], None]) -> Reader:
    """The first checkpoint that `read` can read on every rank. Collective."""
    for number, open_reader in enumerate(readers):
        reader, error = None, None
        try:
            reader = open_reader()
            read(reader)
        except Exception as caught:  # told to the others first, who would wait for this rank
            error = caught
        mine = None if error is None else (isinstance(error, (CheckpointError, OSError)), str(error))
        found = [(rank, *each) for rank, each in enumerate(comm.all_gather_object(mine)) if each is not None]
        if not found and reader is not None:
            return reader
        rank, is_damaged, message = found[0]
        if not is_damaged or number + 1 == len(readers):
            kind = CheckpointError if is_damaged else comm.OtherRankError
            raise error or kind(f"rank {rank} cannot load: {message}")
        logger.warning("%s Going back to the checkpoint before it.", message)
    raise AssertionError("there is at least one")


def _candidates(directory: str | Path, tag: str | None, fallback: bool) -> list[str | None]:
    """The tag to load, and those to go back to, newest first; as the first rank sees them. Collective."""

    def found() -> list[str | None]:
        older = [other for other in reversed(list_tags(directory)) if other != tag] if fallback else []
        try:
            newest = tag or latest_tag(directory)
        except CheckpointError:
            if not older:
                raise
            return [*older]
        return [newest, *(other for other in older if other != newest)]

    tags = comm.together(found if torch.distributed.get_rank() == 0 else None)
    return comm.all_gather_object(tags)[0]


def _saved_counters(reader: Reader) -> dict[str, dict[str, float]]:
    """The optimizer's scalar state of every parameter that was saved with state."""
    with reader.well_formed("optimizer"):
        common, others = reader.index["optimizer"]["counters"], reader.index["optimizer"].get("counters_of") or {}
        for values in (common, *(value for value in others.values() if value is not None)):
            _numbers(values)
        names = [name for name, entry in reader.tensors.items() if entry["kind"] == "trained"]
        return {name: others.get(name, common) for name in names if others.get(name, common) is not None}


def _continue_schedule(lr_scheduler: Any, state: dict[str, Any], path: Path) -> None:
    """Its class may be the user's, and raise anything."""
    try:
        lr_scheduler.load_state_dict(state)
    except Exception as error:
        raise ValueError(
            f"The learning-rate schedule of {path} cannot be continued by this run's {type(lr_scheduler).__name__}: "
            f"{type(error).__name__}: {error}. Use the one that it was trained with, or start it anew with "
            "load_lr_scheduler_states=False."
        ) from error


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """The values, if they are numbers.

    Raises:
        ValueError: one is not.
    """
    wrong = {key: value for key, value in values.items() if type(value) not in (int, float)}
    if wrong:
        raise ValueError(f"{wrong} should be a number")
    return values


def _most_frequent(values: Iterable[dict[str, float]]) -> dict[str, float]:
    counts = Counter(tuple(sorted(value.items())) for value in values)
    return dict(counts.most_common(1)[0][0]) if counts else {}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
