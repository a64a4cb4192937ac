"""Writes what torch.distributed.checkpoint writes, with its own classes, from one process that has every rank's pieces."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo


def write_torch_dist(
    folder: Path, tensors: Mapping[str, tuple[Tensor, Mapping[int, int]]], values: Mapping[str, Any]
) -> None:
    """One file per piece number, pieces in it one behind the other.

    Args:
        tensors: by name, the full tensor, and by dimension into how many pieces it was cut.
        values: what is no tensor.
    """
    folder.mkdir(parents=True, exist_ok=True)
    streams: dict[str, io.BytesIO] = {}
    storage: dict[m.MetadataIndex, _StorageInfo] = {}
    contents: dict[str, Any] = {}

    def store(index: m.MetadataIndex, value: Any, file: str) -> None:
        stream = streams.setdefault(file, io.BytesIO())
        start = stream.tell()
        torch.save(value, stream)
        stream.seek(0, io.SEEK_END)
        storage[index] = _StorageInfo(file, start, stream.tell() - start)

    for name, value in values.items():
        contents[name] = m.BytesStorageMetadata()
        store(m.MetadataIndex(name), value, "__0_0.distcp")
    for name, (tensor, cuts) in tensors.items():
        pieces = [(torch.Size([0] * tensor.ndim), tensor)]
        for dim, count in cuts.items():
            pieces = [
                (torch.Size([*place[:dim], place[dim] + offset, *place[dim + 1 :]]), part)
                for place, piece in pieces
                for offset, part in _cut(piece, dim, count)
            ]
        chunks = [m.ChunkStorageMetadata(place, part.size()) for place, part in pieces]
        contents[name] = m.TensorStorageMetadata(m.TensorProperties(dtype=tensor.dtype), tensor.size(), chunks)
        for i, (place, part) in enumerate(pieces):
            store(m.MetadataIndex(name, place, i), part.clone(), f"__{i}_0.distcp")
    for file, stream in streams.items():
        (folder / file).write_bytes(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(m.Metadata(contents, storage_data=storage)))


def _cut(piece: Tensor, dim: int, count: int) -> list[tuple[int, Tensor]]:
    parts = piece.chunk(count, dim)
    return [(i * parts[0].size(dim), part) for i, part in enumerate(parts)]
