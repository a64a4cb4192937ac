"""Writes a whole checkpoint, of any number of ranks, from one process: one state of one piece of a parameter at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from megazero.checkpoint.format import DTYPES
from megazero.checkpoint.ranges import Cut, shard_shape
from megazero.checkpoint.saver import in_file_order, rank_file, rank_part, whole_index
from megazero.checkpoint.store import CheckpointFolder
from megazero.checkpoint.writer import TensorSpec, Written, stream_tensors


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
    show_progress: bool,
) -> Path:
    """The directory of a checkpoint that is written, whole, by this process alone.

    Args:
        index: all of the index but files, pieces and blobs; the sizes in it say how many files are written.
        blobs: tensors that are not of the model, for the first rank's file.
        read: of a piece, one of its states: 1-D, in the dtype that the index says.
        show_progress: on standard error, if that is a terminal.

    Raises:
        FileExistsError: `directory` has a checkpoint of this tag.
        DirectoryInUseError: a job is saving its checkpoints there.
        OSError: a file could not be written. Then, and when `read` raises, nothing is left.
    """
    entries = index["tensors"]
    plan = _plan(entries, index["model_parallel_size"], index["data_parallel_size"])
    total = sum(
        (p.stop - p.start) * dtype.itemsize for pieces in plan for p in pieces for dtype in _dtypes(entries[p.name])
    )
    bar = tqdm(total=total, desc=f"writing {tag}", unit="B", unit_scale=True, disable=None if show_progress else True)

    def counted(piece: RankPiece, state: str) -> Tensor:
        value = read(piece, state)
        bar.update(value.nbytes)
        return value

    parts = []
    with bar, _new_checkpoint(directory, tag) as folder:
        for number, pieces in enumerate(plan):
            own = blobs if number == 0 else {}
            written = _write_rank(folder.aside(tag) / rank_file(number), pieces, entries, own, counted)
            parts.append(rank_part(number, written, [(*p, entries[p.name]["states"]) for p in pieces], own))
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


def _dtypes(entry: dict[str, Any]) -> list[torch.dtype]:
    return [DTYPES[code] for code in entry["states"].values()]


def _write_rank(
    path: Path,
    pieces: list[RankPiece],
    entries: dict[str, Any],
    blobs: dict[str, Tensor],
    read: Callable[[RankPiece, str], Tensor],
) -> Written:
    """Writes one rank's file: weights first, as jobs write it, so that reading them alone reads on."""
    order = in_file_order({state for entry in entries.values() for state in entry["states"]})
    keys = {f"{s}/{p.name}": (p, s) for s in order for p in pieces if s in entries[p.name]["states"]}
    specs = {
        key: TensorSpec(DTYPES[entries[piece.name]["states"][state]], (piece.stop - piece.start,))
        for key, (piece, state) in keys.items()
    }
    specs.update({key: TensorSpec(blob.dtype, tuple(blob.shape)) for key, blob in blobs.items()})

    def tensor_of(key: str) -> Tensor:
        return read(*keys[key]) if key in keys else blobs[key]

    return stream_tensors(path, specs, tensor_of)


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
