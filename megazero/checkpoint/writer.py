"""Writes a checkpoint: the file of each rank, and the index that makes the files of all ranks one checkpoint.

Ranks do it together through `saver`. `write_checkpoint` does it without ranks, from one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from megazero import __version__, comm
from megazero.checkpoint import tensor_file
from megazero.checkpoint.folder import CheckpointFolder
from megazero.checkpoint.format import FORMAT, FORMAT_VERSION, TensorEntry, dtype_code
from megazero.checkpoint.ranges import shard_shape
from megazero.checkpoint.tensor_file import LazyTensor, write_tensors
from megazero.nvme import aligned_empty
from megazero.zero.bucket import MASTER

_ALIGNMENT = 64  # bytes; a multiple of the size of any element

States = dict[str, Tensor | LazyTensor]
"""What is saved of a piece, by name: 1-D tensors, which are the rank's own memory and no copies, or read from where they rest."""


class Piece(NamedTuple):
    """Elements [start, stop) of the flattened part that a tensor-parallel rank has of a parameter."""

    name: str
    model_parallel_rank: int
    start: int
    stop: int

    def key(self, state: str) -> str:
        """What is saved of it under this name is called so in the rank's file."""
        return f"{state}/{self.name}"


@dataclass
class Snapshot:
    """What one rank has to write.

    Attributes:
        pieces: what is saved of each; there is one of a parameter at most.
        blobs: tensors of this rank, not of the model, by key; the index holds their places under "blobs", by rank.
    """

    pieces: dict[Piece, States]
    blobs: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor | LazyTensor]:
        """Everything by its key in the rank's file: weights first, so that reading them alone reads on."""
        found = [(state, piece.key(state), t) for piece, saved in self.pieces.items() for state, t in saved.items()]
        found.sort(key=lambda each: (each[0] != MASTER, each[0]))
        return {**{key: tensor for _, key, tensor in found}, **self.blobs}

    def staged(self) -> Snapshot:
        """A copy in host memory, which training does not change.

        It lies in pages of its own, which go back to the system with the last tensor on them. torch's pinned memory stays with
        the process, rounded up to a power of two for each tensor, and so may what it has freed of other memory.

        Raises:
            MemoryError: there is no room for it.
        """
        starts, ends = {}, {True: 0, False: 0}  # by whether it lies on the device: what does is copied to pinned pages
        for key, tensor in self.tensors().items():
            if isinstance(tensor, Tensor):
                pins = comm.has_streams(tensor.device)
                starts[key] = ends[pins]
                ends[pins] += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        pages = {pins: aligned_empty(end, pin=pins) for pins, end in ends.items()}

        def copy(key: str, tensor: Tensor | LazyTensor) -> Tensor:
            if isinstance(tensor, LazyTensor):
                return tensor.read()
            place = pages[comm.has_streams(tensor.device)][starts[key] : starts[key] + tensor.nbytes]
            return place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach(), non_blocking=True)

        try:
            pieces: dict[Piece, States] = {
                piece: {state: copy(piece.key(state), tensor) for state, tensor in saved.items()}
                for piece, saved in self.pieces.items()
            }
            return Snapshot(pieces, {key: copy(key, tensor) for key, tensor in self.blobs.items()})
        finally:  # also where one could not be read: the pages must not go while others are on their way into them
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()


def rank_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def write_rank_file(folder: Path, rank: int, snapshot: Snapshot) -> dict[str, Any]:
    """Writes one rank's file by `write_tensors`, and returns what `whole_index` has to know of it, as plain JSON."""
    written = write_tensors(folder / rank_file(rank), snapshot.tensors())
    at = written.offsets
    return {
        "file": {"bytes": written.nbytes, "crc32": written.crc32},
        "pieces": [
            [*piece, {state: at[piece.key(state)] for state in saved}] for piece, saved in snapshot.pieces.items()
        ],
        "blobs": {key: [rank, at[key], dtype_code(t.dtype), list(t.shape)] for key, t in snapshot.blobs.items()},
    }


def whole_index(parts: Iterable[dict[str, Any]], index: dict[str, Any]) -> dict[str, Any]:
    """The index, from what `write_rank_file` gave for every rank and all that does not depend on where things lie.

    Args:
        index: "tensors" are each a `TensorEntry`; the rest is as it will be.

    Raises:
        RuntimeError: together they have not written every parameter exactly once. It would be a fault of this library.
    """
    files, blobs = {}, []
    entries: dict[str, TensorEntry] = index["tensors"]
    pieces: dict[str, list[Any]] = {name: [] for name in entries}
    for rank, part in enumerate(parts):
        files[rank_file(rank)] = part["file"]
        blobs.append(part["blobs"])
        for name, model_parallel_rank, start, stop, offsets in part["pieces"]:
            at = [offsets[state] for state in entries[name].states]
            pieces[name].append([model_parallel_rank, start, stop, rank, at])
    for name, entry in entries.items():
        found = sum(stop - start for _, start, stop, _, _ in pieces[name])
        if found != entry.saved_numel:
            raise RuntimeError(f"the ranks have written {found} elements of {name}, which has {entry.saved_numel}")
    head = {
        **{"format": FORMAT, "format_version": FORMAT_VERSION, "block_bytes": tensor_file.BLOCK_BYTES},
        **{"megazero_version": __version__, "torch_version": torch.__version__},
    }
    tensors = {name: entry.as_json(pieces[name]) for name, entry in entries.items()}
    return {**index, **head, "files": files, "blobs": blobs, "tensors": tensors}


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
    if (folder.path / tag).exists():
        raise FileExistsError(f"{folder.path / tag} exists already: choose another directory, or delete this one.")
    plan = _plan(index["tensors"], index["model_parallel_size"], index["data_parallel_size"])
    snapshots = [Snapshot({p: states_of(p) for p in pieces}, {} if rank else blobs) for rank, pieces in enumerate(plan)]
    total = sum(state.nbytes for each in snapshots for states in each.pieces.values() for state in states.values())
    with tqdm(total=total, desc=f"writing {tag}", unit="B", unit_scale=True, disable=None) as bar:
        try:
            folder.prepare(tag)
            try:
                parts = [write_rank_file(folder.aside(tag), rank, each) for rank, each in enumerate(snapshots)]
                folder.publish(tag, whole_index(parts, index), save_latest=True, keep_last=0)
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
            if entry.cut is not None or rank == 0:  # what is not cut is the same on all ranks, and the first saves it
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
