"""The file that each rank writes, and the index that makes the files of all ranks one checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero import __version__
from megazero.checkpoint import writer
from megazero.checkpoint.format import FORMAT, FORMAT_VERSION
from megazero.checkpoint.ranges import Cut, shard_shape
from megazero.checkpoint.writer import Stored, dtype_code, write_tensors
from megazero.zero.bucket import MASTER


@dataclass(frozen=True)
class Piece:
    """A range of one tensor-parallel rank's flattened part of a parameter, with all that is saved of it.

    Attributes:
        start: the first element.
        states: by name, 1-D tensors of one length: the rank's own memory, not copies; or what is read from where it rests.
    """

    name: str
    model_parallel_rank: int
    start: int
    states: Mapping[str, Tensor | Stored]

    @property
    def stop(self) -> int:
        """The element behind the last."""
        return self.start + next(iter(self.states.values())).shape[0]


@dataclass
class Snapshot:
    """What one rank has to write.

    Attributes:
        blobs: tensors of this rank, not of the model, by key; the index holds their places under "blobs", by rank.
    """

    pieces: list[Piece]
    blobs: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor | Stored]:
        """Everything by its key in the rank's file: weights first, so that reading them alone reads on."""
        states = sorted({s for piece in self.pieces for s in piece.states}, key=lambda state: (state != MASTER, state))
        found = {f"{s}/{piece.name}": piece.states[s] for s in states for piece in self.pieces if s in piece.states}
        return {**found, **self.blobs}

    def staged(self) -> Snapshot:
        """A copy in host memory, which training does not change."""

        def copy(tensor: Tensor | Stored) -> Tensor:
            if isinstance(tensor, Stored):
                return tensor.read()
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            return host.copy_(tensor.detach(), non_blocking=True)

        pieces = [replace(piece, states={s: copy(t) for s, t in piece.states.items()}) for piece in self.pieces]
        blobs = {key: copy(tensor) for key, tensor in self.blobs.items()}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return Snapshot(pieces, blobs)


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
            [p.name, p.model_parallel_rank, p.start, p.stop, {state: at[f"{state}/{p.name}"] for state in p.states}]
            for p in snapshot.pieces
        ],
        "blobs": {key: [rank, at[key], dtype_code(t.dtype), list(t.shape)] for key, t in snapshot.blobs.items()},
    }


def tensor_entry(kind: str, shape: Iterable[int], cut: Cut | None, states: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """A parameter or buffer as the index describes it; `whole_index` adds its pieces.

    Args:
        kind: "trained", "frozen" or "buffer".
        shape: full and unpadded.

    Raises:
        TypeError: a dtype cannot be saved.
    """
    codes = {state: dtype_code(dtype) for state, dtype in states.items()}
    return {"kind": kind, "shape": list(shape), "cut": cut and asdict(cut), "states": codes}


def whole_index(parts: Iterable[dict[str, Any]], index: dict[str, Any]) -> dict[str, Any]:
    """The index, from what `write_rank_file` gave for every rank and all that does not depend on where things lie.

    Raises:
        RuntimeError: together they have not written every parameter exactly once. It would be a fault of this library.
    """
    files, blobs = {}, []
    tensors = {name: {**entry, "pieces": []} for name, entry in index["tensors"].items()}
    for rank, part in enumerate(parts):
        files[rank_file(rank)] = part["file"]
        blobs.append(part["blobs"])
        for name, model_parallel_rank, start, stop, offsets in part["pieces"]:
            at = [offsets[state] for state in tensors[name]["states"]]
            tensors[name]["pieces"].append([model_parallel_rank, start, stop, rank, at])
    for name, entry in tensors.items():
        padded = shard_shape(entry["shape"], entry["cut"] and Cut(**entry["cut"]), size=1)
        numel, found = math.prod(padded), sum(stop - start for _, start, stop, _, _ in entry["pieces"])
        if found != numel:
            raise RuntimeError(f"the ranks have written {found} elements of {name}, which has {numel}")
    head = {
        **{"format": FORMAT, "format_version": FORMAT_VERSION, "block_bytes": writer.BLOCK_BYTES},
        **{"megazero_version": __version__, "torch_version": torch.__version__},
    }
    return {**index, **head, "files": files, "blobs": blobs, "tensors": tensors}
