"""Writes whole checkpoints from one process: one of ours again for other numbers of ranks, or another framework's.

One state of one piece of a parameter is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from megazero.checkpoint.format import DTYPES
from megazero.checkpoint.importers.foreign import ForeignCheckpoint, ForeignTensor
from megazero.checkpoint.plain import encode, plain_settings
from megazero.checkpoint.ranges import Cut, shard_shape
from megazero.checkpoint.rank_files import Piece, Snapshot, tensor_entry, whole_index, write_rank_file
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.store import CheckpointFolder, tag_of
from megazero.checkpoint.training_state import CLIENT, CONSTANT, RNG, SCHEDULE
from megazero.checkpoint.writer import Stored
from megazero.zero.bucket import MASTER


def reshape(reader: Reader, directory: str | Path, model_parallel_size: int, data_parallel_size: int) -> Path:
    """The directory of a checkpoint with the same content and tag, in files as that many ranks would write them.

    States of random generators belong to the ranks that saved them and are left out. A job need not have a checkpoint reshaped
    to continue from it; it reads fewer bytes of fewer files where its ranks are those that the files are made for.

    Raises:
        ValueError: a parameter cannot be cut for `model_parallel_size` ranks.
        CheckpointError: what is read is damaged.
        OSError: as `write_checkpoint`.
    """
    cuts = {name: _new_cut(reader, name, model_parallel_size) for name in reader.tensors}
    entries = {
        name: tensor_entry(old["kind"], reader.shape(name), cuts[name], reader.states(name))
        for name, old in reader.tensors.items()
    }

    def read(piece: RankPiece, state: str) -> Tensor:
        out = torch.empty(piece.stop - piece.start, dtype=reader.states(piece.name)[state])
        cut, rank = cuts[piece.name], piece.model_parallel_rank
        reader.read_part(piece.name, {state: out}, cut=cut, rank=rank, size=model_parallel_size, start=piece.start)
        return out

    sizes = {"model_parallel_size": model_parallel_size, "data_parallel_size": data_parallel_size}
    blobs = {key: reader.blob(at) for key, at in reader.index["blobs"][0].items() if not key.startswith(RNG)}
    tag = reader.path.name.removeprefix(".").removesuffix(".replaced")
    index = {**reader.index, **sizes, "tensors": entries}
    return write_checkpoint(directory, tag, index, blobs, read)


def write_foreign(foreign: ForeignCheckpoint, directory: str | Path) -> Path:
    """The directory of a checkpoint with what another framework has saved, from which any number of ranks can continue.

    Raises:
        ValueError: `foreign` is inconsistent: a tensor is not of the shape that was announced, or has no values at all.
        OSError: as `write_checkpoint`.
    """
    entries = {name: _foreign_entry(name, tensor) for name, tensor in foreign.tensors.items()}

    def read(piece: RankPiece, state: str) -> Tensor:
        tensor, code = foreign.tensors[piece.name], entries[piece.name]["states"][state]
        value = tensor.states[state]().detach()
        if tuple(value.shape) != tuple(tensor.shape):
            found, announced = list(value.shape), list(tensor.shape)
            raise ValueError(f"{state} of {piece.name} has shape {found}, announced as {announced}.")
        return value.to(DTYPES[code]).reshape(-1)[piece.start : piece.stop]

    client_state, client_tensors = encode(foreign.client_state, prefix=CLIENT)
    schedule, schedule_tensors = encode(foreign.lr_scheduler, "lr_scheduler", SCHEDULE)
    blobs = {**client_tensors, **schedule_tensors}
    index = {
        **{"model_parallel_size": 1, "data_parallel_size": 1, "zero_stage": 0},
        "device": "cpu",
        "global_steps": foreign.global_steps,
        "skipped_steps": foreign.skipped_steps,
        "counters": {},
        "optimizer": _foreign_optimizer(foreign),
        "loss_scaler": foreign.loss_scaler,
        "lr_scheduler": schedule,
        "client_state": client_state,
        "aliases": foreign.aliases,
        "tensors": entries,
    }
    return write_checkpoint(directory, tag_of(foreign.global_steps), index, blobs, read)


def _foreign_entry(name: str, tensor: ForeignTensor) -> dict[str, Any]:
    if tensor.kind == "trained" and MASTER in tensor.states:
        states = dict.fromkeys(sorted(tensor.states, key=lambda state: (state != MASTER, state)), torch.float32)
    elif tensor.kind in ("frozen", "buffer") and tensor.states.keys() == {CONSTANT}:
        states = {CONSTANT: tensor.states[CONSTANT]().dtype}
    else:
        found = ", ".join(tensor.states) or "none"
        raise ValueError(f"{name} is {tensor.kind!r} with the states {found}: it has no weights.")
    return tensor_entry(tensor.kind, tensor.shape, None, states)


def _foreign_optimizer(foreign: ForeignCheckpoint) -> dict[str, Any] | None:
    if foreign.optimizer_counters is None:
        return None
    without = [name for name, tensor in foreign.tensors.items() if tensor.states.keys() == {MASTER}]
    groups = foreign.optimizer_groups
    return {
        "type": foreign.optimizer_type,
        "counters": foreign.optimizer_counters,
        "counters_of": dict.fromkeys(without),
        "groups": groups and [plain_settings(group) for group in groups],
    }


def _new_cut(reader: Reader, name: str, size: int) -> Cut | None:
    """The cut over `size` ranks; where a vocabulary does not divide, with as little padding as possible."""
    cut, rows = reader.cut(name), reader.shape(name)
    if cut is None:
        return None
    if cut.padded % (size * cut.stride) == 0:
        return cut
    if cut.stride > 1:
        raise ValueError(
            f"--model-parallel-size {size}: {name} of shape {list(rows)} consists of {cut.stride} matrices, stacked along "
            f"dimension {cut.dim}, which do not divide into {size} equal parts. Choose a size that divides them."
        )
    return Cut(cut.dim, cut.stride, -(-rows[cut.dim] // size) * size)


class RankPiece(NamedTuple):
    """Elements [start, stop) of the flattened part that a tensor-parallel rank has of a parameter."""

    name: str
    model_parallel_rank: int
    start: int
    stop: int


def write_checkpoint(
    directory: str | Path,
    tag: str,
    index: dict[str, Any],
    blobs: dict[str, Tensor],
    read: Callable[[RankPiece, str], Tensor],
) -> Path:
    """The directory of a checkpoint that is written, whole, by this process alone; with a bar, where a person watches.

    Args:
        index: all of it but what `whole_index` adds; the sizes in it say how many files are written.
        blobs: tensors that are not of the model, for the first rank's file.
        read: of a piece, one of its states: 1-D, in the dtype that the index says.

    Raises:
        FileExistsError: `directory` has a checkpoint of this tag.
        DirectoryInUseError: a job is saving its checkpoints there.
        OSError: a file could not be written. Then, and when `read` raises, nothing is left.
    """

    def read_and_count(piece: RankPiece, state: str) -> Tensor:
        value = read(piece, state)
        bar.update(value.nbytes)
        return value

    def to_write(piece: RankPiece) -> Piece:
        shape, codes = (piece.stop - piece.start,), index["tensors"][piece.name]["states"]
        states = {s: Stored(DTYPES[code], shape, partial(read_and_count, piece, s)) for s, code in codes.items()}
        return Piece(piece.name, piece.model_parallel_rank, piece.start, states)

    plan = _plan(index["tensors"], index["model_parallel_size"], index["data_parallel_size"])
    snapshots = [Snapshot([to_write(p) for p in pieces], {} if rank else blobs) for rank, pieces in enumerate(plan)]
    total = sum(
        tensor.nbytes for snapshot in snapshots for piece in snapshot.pieces for tensor in piece.states.values()
    )
    bar = tqdm(total=total, desc=f"writing {tag}", unit="B", unit_scale=True, disable=None)
    with bar, _new_checkpoint(directory, tag) as folder:
        parts = [write_rank_file(folder.aside(tag), rank, snapshot) for rank, snapshot in enumerate(snapshots)]
        folder.publish(tag, whole_index(parts, index), True, 0)
    return folder.path / tag


@contextmanager
def _new_checkpoint(directory: str | Path, tag: str) -> Iterator[CheckpointFolder]:
    """The directory, for as long as this process may write the checkpoint in it; what is there when it fails is deleted."""
    folder = CheckpointFolder(directory)
    if (folder.path / tag).exists():
        raise FileExistsError(f"{folder.path / tag} exists already: choose another directory, or delete this one.")
    try:
        folder.prepare(tag)
        try:
            yield folder
        except BaseException:
            folder.discard(tag)
            raise
    finally:
        folder.release()


def _plan(entries: dict[str, Any], model_parallel_size: int, data_parallel_size: int) -> list[list[RankPiece]]:
    """By rank, what it holds: the parameters of a tensor-parallel rank lie one behind the other and are cut into equal parts."""
    ranks: list[list[RankPiece]] = [[] for _ in range(model_parallel_size * data_parallel_size)]
    for rank in range(model_parallel_size):
        held = []
        for name, entry in entries.items():
            cut = entry["cut"] and Cut(**entry["cut"])
            if cut is not None or rank == 0:  # what is not cut is the same on all ranks, and the first saves it
                held.append((name, math.prod(shard_shape(entry["shape"], cut, model_parallel_size))))
        total, offset = sum(numel for _, numel in held), 0
        ends = [total * part // data_parallel_size for part in range(data_parallel_size + 1)]
        for name, numel in held:
            for part in range(data_parallel_size):
                start, stop = max(ends[part] - offset, 0), min(ends[part + 1] - offset, numel)
                if start < stop:
                    ranks[part * model_parallel_size + rank].append(RankPiece(name, rank, start, stop))
            offset += numel
    return ranks
