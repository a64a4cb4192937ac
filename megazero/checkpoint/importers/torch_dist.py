"""Reads folders of torch.distributed.checkpoint (Megatron-LM's "torch_dist", FSDP2) without running anything in them.

    .metadata       a pickle: the shape of each tensor, and of each of its pieces the place, the file and the bytes in it
    __0_0.distcp    pieces, each as `torch.save` writes it, one behind the other

Places are in full, logical coordinates, so it does not matter how many ranks wrote the pieces.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.importers.torch_files import Record, load_torch_bytes

_METADATA = ".metadata"


class _Unpickler(pickle.Unpickler):
    """Every class and function that the pickle names is an inert `Record`, but for the shapes: nothing is imported."""

    def find_class(self, module: str, name: str) -> type:
        return tuple if (module, name) == ("torch", "Size") else Record


@dataclass(frozen=True)
class _Piece:
    place: tuple[int, ...]  # of its first element in the tensor
    shape: tuple[int, ...]
    path: Path
    start: int  # of its bytes in the file
    length: int

    def read(self) -> Tensor:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(min(self.start, size))  # damaged, they may be any numbers
            data = file.read(min(self.length, size))
        tensor = load_torch_bytes(data, f"{self.path}, {self.length} bytes from byte {self.start} on,")
        if not isinstance(tensor, Tensor) or tensor.numel() != math.prod(self.shape):
            raise ValueError(
                f"{self.path} has no tensor of shape {list(self.shape)} at byte {self.start}: it is damaged."
            )
        return tensor.detach().reshape(self.shape)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of which only the shape has been read.

    Attributes:
        shape: full.
        pieces: that together cover it.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]

    def read(self) -> Tensor:
        """The tensor, on the CPU.

        Raises:
            OSError: a file is missing or cannot be read.
            ValueError: a piece is missing or damaged.
        """
        damaged = ValueError(
            f"{self.name} of shape {list(self.shape)} is not complete: it has {len(self.pieces)} pieces, not side by side."
        )
        if not self.pieces or sum(math.prod(piece.shape) for piece in self.pieces) != math.prod(self.shape):
            raise damaged
        parts = (piece.read() for piece in self.pieces)
        first = next(parts)
        if len(self.pieces) == 1:
            return first.reshape(self.shape)
        full, is_filled = torch.empty(self.shape, dtype=first.dtype), torch.zeros(self.shape, dtype=torch.bool)
        for piece, tensor in zip(self.pieces, chain([first], parts), strict=True):
            place = tuple(slice(a, a + n) for a, n in zip(piece.place, piece.shape, strict=True))
            full[place], is_filled[place] = tensor, True
        if not is_filled.all():  # elsewhere two of them overlap
            raise damaged
        return full

    def unstacked(self) -> list[SavedTensor]:
        """The tensors of which it consists along its first dimension.

        Raises:
            ValueError: a piece belongs to several of them, or one of them has none.
        """
        if any(piece.shape[:1] != (1,) for piece in self.pieces):
            raise ValueError(f"{self.name} of shape {list(self.shape)} has pieces of several layers.")
        rows: dict[int, list[_Piece]] = defaultdict(list)
        for piece in self.pieces:
            rows[piece.place[0]].append(replace(piece, place=piece.place[1:], shape=piece.shape[1:]))
        if self.shape[:1] != (len(rows),):
            raise ValueError(f"{self.name} of shape {list(self.shape)} is not complete: it has {len(rows)} layers.")
        return [SavedTensor(f"{self.name}[{row}]", self.shape[1:], tuple(rows[row])) for row in sorted(rows)]


def is_torch_dist(folder: Path) -> bool:
    """Whether torch.distributed.checkpoint has written the folder."""
    return (folder / _METADATA).is_file() or any(folder.glob("*.distcp"))  # a copy may have left out the hidden file


def read_torch_dist(folder: Path) -> dict[str, SavedTensor]:
    """The tensors of the folder by name; what else it holds is left out.

    Raises:
        OSError: its list of contents cannot be read.
        ValueError: the list is damaged, or of another kind.
    """
    path = folder / _METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        stored = {
            (key.fqn, key.offset): place for key, place in metadata.storage_data.items() if hasattr(key, "offset")
        }
        return {
            name: SavedTensor(
                name,
                _numbers(tensor.size),
                tuple(_piece(folder, tensor.size, chunk, stored[name, chunk.offsets]) for chunk in tensor.chunks),
            )
            for name, tensor in metadata.state_dict_metadata.items()
            if hasattr(tensor, "chunks")
        }
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything, and ask for any amount of memory
        raise ValueError(
            f"{path} cannot be read as the list of what a distributed checkpoint holds ({error!r}). It is damaged, not "
            "complete, or of another version; copy the folder again."
        ) from error


def _piece(folder: Path, full: Any, chunk: Any, stored: Any) -> _Piece:
    if Path(stored.relative_path).name != stored.relative_path:
        raise ValueError(f"{stored.relative_path!r} is no file of the folder")
    if getattr(stored, "transform_descriptors", None):
        raise ValueError(f"{stored.relative_path} is compressed: {stored.transform_descriptors}")
    place, shape = _numbers(chunk.offsets), _numbers(chunk.sizes)
    if any(a + n > size for a, n, size in zip(place, shape, full, strict=True)):
        raise ValueError(f"a piece of shape {list(shape)} at {list(place)} is outside of {list(full)}")
    return _Piece(place, shape, folder / stored.relative_path, *_numbers((stored.offset, stored.length)))


def _numbers(sizes: Iterable[int]) -> tuple[int, ...]:
    """Sizes or places, which a damaged list may have made anything."""
    numbers = torch.Size(sizes)
    if any(number < 0 for number in numbers):
        raise ValueError(f"{list(numbers)} are no sizes")
    return numbers
