"""Writes a checkpoint: the file of each rank, and the index that makes the files of all ranks one checkpoint.

Ranks do it together through `saver`; `offline` does it without ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero import __version__, comm
from megazero.checkpoint import tensor_file
from megazero.checkpoint.format import FORMAT, FORMAT_VERSION, TensorEntry, dtype_code
from megazero.checkpoint.tensor_file import LazyTensor, write_tensors
from megazero.nvme import aligned_empty
from megazero.zero.bucket import MASTER

_ALIGNMENT = 64  # bytes; a multiple of the size of any element

States = dict[str, Tensor | LazyTensor]
"""What is saved of a piece, by name: 1-D tensors, which are the rank's own memory and no copies, or read from where they rest."""


class Piece(NamedTuple):
    """Elements [start, stop) of the flattened part that a tensor-parallel rank has of a parameter.

    Attributes:
        own: the name in the module, where it is another one: that of a tile.
    """

    name: str
    model_parallel_rank: int
    start: int
    stop: int
    own: str = ""

    def key(self, state: str) -> str:
        """What is saved of it under this name is called so in the rank's file."""
        return f"{state}/{self.own or self.name}"


@dataclass
class Snapshot:
    """What one rank has to write.

    Attributes:
        pieces: what is saved of each; there is one of a parameter, or of a tile of it, at most.
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
        held = {key: tensor for key, tensor in self.tensors().items() if isinstance(tensor, Tensor)}
        places: dict[str, Tensor] = {}
        for pins in (True, False):  # what lies on a device is copied to pinned pages
            mine = {key: tensor for key, tensor in held.items() if comm.has_streams(tensor.device) == pins}
            sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in mine.values()]
            places |= zip(mine, aligned_empty(sum(sizes), pin=pins).split(sizes), strict=True)

        def copy(key: str, tensor: Tensor | LazyTensor) -> Tensor:
            if isinstance(tensor, LazyTensor):
                return tensor.read()
            place = places[key][: tensor.nbytes]
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
            [*piece[:4], {state: at[piece.key(state)] for state in saved}] for piece, saved in snapshot.pieces.items()
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
    return {
        **index,
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "block_bytes": tensor_file.BLOCK_BYTES,
        "megazero_version": __version__,
        "torch_version": torch.__version__,
        "files": files,
        "blobs": blobs,
        "tensors": {name: entry.as_json(pieces[name]) for name, entry in entries.items()},
    }
