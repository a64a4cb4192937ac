"""Writes a checkpoint of ours again, in files for other numbers of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.format import CLIENT, SCHEDULE, TensorEntry
from megazero.checkpoint.offline import write_checkpoint
from megazero.checkpoint.ranges import Cut
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.tags import tag_at
from megazero.checkpoint.writer import Piece


def reshape(reader: Reader, directory: str | Path, model_parallel_size: int, data_parallel_size: int) -> Path:
    """The directory of a checkpoint with the same content and tag, in files as that many ranks would write them.

    States of random generators belong to the ranks that saved them and are left out. A job need not have a checkpoint reshaped
    to continue from it; it reads fewer bytes of fewer files where its ranks are those that the files are made for.

    Raises:
        ValueError: a parameter cannot be cut for `model_parallel_size` ranks.
        CheckpointError: what is read is damaged.
        OSError: as `write_checkpoint`.
    """
    size = model_parallel_size
    entries = {name: replace(old, cut=_new_cut(name, old, size)) for name, old in reader.tensors.items()}

    def read(piece: Piece, state: str) -> Tensor:
        entry, rank = entries[piece.name], piece.model_parallel_rank
        out = torch.empty(piece.stop - piece.start, dtype=entry.states[state], device="cpu")
        reader.read_part(piece.name, state, out, cut=entry.cut, rank=rank, size=size, start=piece.start)
        return out

    sizes = {"model_parallel_size": size, "data_parallel_size": data_parallel_size}
    blobs = reader.blobs(CLIENT, SCHEDULE)
    index = {**reader.index, **sizes, "tensors": entries}
    return write_checkpoint(directory, tag_at(reader.path), index, blobs, read)


def _new_cut(name: str, entry: TensorEntry, size: int) -> Cut | None:
    """The cut over `size` ranks, without tiles; where a vocabulary does not divide, with as little padding as possible."""
    cut, shape = entry.cut and replace(entry.cut, tiles=()), entry.shape
    if cut is None or cut.dim is None:
        return None
    if cut.padded % (size * cut.stride) == 0:
        return cut
    if cut.stride > 1:
        raise ValueError(
            f"--model-parallel-size {size}: {name} of shape {list(shape)} consists of {cut.stride} matrices, stacked along "
            f"dimension {cut.dim}, which do not divide into {size} equal parts. Choose a size that divides them."
        )
    return Cut(cut.dim, cut.stride, -(-shape[cut.dim] // size) * size)
