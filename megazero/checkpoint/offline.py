"""Writes a checkpoint from one process, without ranks: what `commands.reshape` and the importers end in."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from megazero.checkpoint.folder import CheckpointFolder, Keep
from megazero.checkpoint.format import TensorEntry
from megazero.checkpoint.ranges import holders, shard_shape
from megazero.checkpoint.tags import checkpoint_path
from megazero.checkpoint.tensor_file import LazyTensor
from megazero.checkpoint.writer import Piece, Snapshot, States, whole_index, write_rank_file


def write_checkpoint(
    directory: str | Path,
    tag: str,
    index: dict[str, Any],
    blobs: dict[str, Tensor],
    read: Callable[[Piece, str], Tensor],
) -> Path:
    """The directory of a checkpoint that is written, whole, by this process alone; with a bar, where a person watches.

    One state of one piece is in memory at a time.

    Args:
        index: all of it but what `whole_index` adds; the sizes in it say how many files are written.
        blobs: tensors that are not of the model, for the first rank's file.
        read: of a piece, one of its states: 1-D, in the dtype that the index says.

    Raises:
        FileExistsError: `directory` has a checkpoint of this tag.
        DirectoryInUseError: a job is saving its checkpoints there.
        OSError: a file could not be written. Then, and when `read` raises, nothing is left.
    """

    def read_and_count(piece: Piece, state: str) -> Tensor:
        value = read(piece, state)
        bar.update(value.nbytes)
        return value

    def states_of(piece: Piece) -> States:
        shape, states = (piece.stop - piece.start,), index["tensors"][piece.name].states
        return {s: LazyTensor(dtype, shape, partial(read_and_count, piece, s)) for s, dtype in states.items()}

    folder = CheckpointFolder(directory)
    if checkpoint_path(folder.path, tag).exists():
        raise FileExistsError(f"{folder.path / tag} exists already: choose another directory.")
    plan = _plan(index["tensors"], index["model_parallel_size"], index["data_parallel_size"])
    snapshots = [Snapshot({p: states_of(p) for p in pieces}, {} if rank else blobs) for rank, pieces in enumerate(plan)]
    total = sum(state.nbytes for each in snapshots for states in each.pieces.values() for state in states.values())
    with tqdm(total=total, desc=f"writing {tag}", unit="B", unit_scale=True, disable=None) as bar:
        try:
            folder.claim()
            folder.prepare(tag)
            try:
                parts = [write_rank_file(folder.aside(tag), rank, each) for rank, each in enumerate(snapshots)]
                folder.publish(tag, whole_index(parts, index), save_latest=True, keep=Keep())
            except BaseException:
                folder.discard(tag)
                raise
        finally:
            folder.release()
    return folder.path / tag


def _plan(entries: dict[str, TensorEntry], model_parallel_size: int, data_parallel_size: int) -> list[list[Piece]]:
    """By rank, what it holds: the parameters of a tensor-parallel rank lie one behind the other and are cut into equal parts."""
    ranks: list[list[Piece]] = [[] for _ in range(model_parallel_size * data_parallel_size)]
    for rank in range(model_parallel_size):
        held = []
        for name, entry in entries.items():
            if rank < holders(entry.cut, model_parallel_size):  # the first saves what all have
                held.append((name, math.prod(shard_shape(entry.shape, entry.cut, model_parallel_size))))
        total, offset = sum(numel for _, numel in held), 0
        ends = [total * part // data_parallel_size for part in range(data_parallel_size + 1)]
        for name, numel in held:
            for part in range(data_parallel_size):
                start, stop = max(ends[part] - offset, 0), min(ends[part + 1] - offset, numel)
                if start < stop:
                    ranks[part * model_parallel_size + rank].append(Piece(name, rank, start, stop))
            offset += numel
    return ranks
