"""Writes safetensors files as a stream, with checksums: no tensor is copied as a whole, and the file is on the disk at the end.

The safetensors library writes from one block of bytes that holds all tensors; a rank's shards of the optimizer fill most of its
memory, so here they go from where they lie to the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megazero.checkpoint.format import DTYPES, bytes_of, crc32

BLOCK_BYTES = 1 << 20  # of a checksum
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_CHUNK_BYTES = 1 << 24  # of a copy from a device
_WRITE_OUT_BYTES = 1 << 24  # written at a time by the disk, while the next are on their way into memory
_ALIGNMENT = 64  # bytes, of the first tensor


def dtype_code(dtype: torch.dtype) -> str:
    """The dtype as safetensors writes it: "F32".

    Raises:
        TypeError: the format has none for it.
    """
    if dtype not in _CODES:
        raise TypeError(f"tensors of {dtype} cannot be saved: safetensors files hold {', '.join(map(str, _CODES))}")
    return _CODES[dtype]


@dataclass(frozen=True)
class Stored:
    """A tensor that is not in memory, and is read or made when its turn to be written comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """A file that has been written: its size, the CRC-32 of each block, and where each tensor begins."""

    nbytes: int
    crc32: list[int]
    offsets: dict[str, int]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Tells with the error of a write inside what was written: "No space left on device" alone helps nobody."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, f"could not write {path}: {error.strerror}") from error


class ChecksummedStream:
    """Writes to a file, keeps the CRC-32 of every BLOCK_BYTES, and sets the disk to work meanwhile.

    Left alone, the kernel keeps what is written in memory for seconds, and fsync at the end would have to wait for all of it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.nbytes = file, 0
        self.crc32: list[int] = []
        self._begun = 0  # bytes that are on the way to the disk

    def write(self, data: memoryview) -> None:
        """Appends `data`, which is bytes."""
        while len(data):
            if self.nbytes == len(self.crc32) * BLOCK_BYTES:
                self.crc32.append(0)
            room = len(self.crc32) * BLOCK_BYTES - self.nbytes
            # No more than a block at a time, so that its checksum finds it in the cache.
            count = self.file.write(data[:room]) or 0
            self.crc32[-1] = crc32(data[:count], self.crc32[-1])
            self.nbytes += count
            data = data[count:]
            if self.nbytes - self._begun >= _WRITE_OUT_BYTES and hasattr(os, "posix_fadvise"):
                # Begins to write the range's pages, which is all that matters here: as they are dirty, they stay in memory.
                os.posix_fadvise(self.file.fileno(), self._begun, self.nbytes - self._begun, os.POSIX_FADV_DONTNEED)
                self._begun = self.nbytes


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Stored]) -> Written:
    """Writes `tensors`, from any device, into a new safetensors file, in their order, and syncs it.

    Raises:
        OSError: the disk is full, or the like; what had been written is gone.
        TypeError: a dtype cannot be saved.
        ValueError: a tensor that was read is not as announced.
    """
    header, offsets = _header(tensors)
    try:
        with naming(path), open(path, "wb", buffering=0) as file:
            stream = ChecksummedStream(file)
            stream.write(memoryview(header))
            for name, tensor in tensors.items():
                values = tensor.read() if isinstance(tensor, Stored) else tensor
                if (values.dtype, values.shape) != (tensor.dtype, tensor.shape):
                    found, announced = (f"{each.dtype} {tuple(each.shape)}" for each in (values, tensor))
                    raise ValueError(f"{name} is {found}, announced as {announced}")
                for part in _on_cpu(values.detach()):
                    stream.write(bytes_of(part).data)
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)  # a full disk needs the room
        raise
    return Written(stream.nbytes, stream.crc32, offsets)


def _header(tensors: Mapping[str, Tensor | Stored]) -> tuple[bytes, dict[str, int]]:
    """The file's beginning, and where in the file each tensor comes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name, tensor in tensors.items():
        begins[name], end = end, end + tensor.nbytes
        code, shape = dtype_code(tensor.dtype), list(tensor.shape)
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [begins[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + begin for name, begin in begins.items()}


def _on_cpu(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor's memory in order, in chunks where it has to be copied."""
    flat = tensor.reshape(-1)  # a view of what lies in one piece
    if flat.device.type == "cpu" and flat.is_contiguous():
        return iter([flat])
    return (part.cpu() for part in flat.split(max(1, _CHUNK_BYTES // flat.element_size())))


def sharded(stem: str, suffix: str, tensors: Mapping[str, Stored], limit: int) -> dict[str, dict[str, Stored]]:
    """By the names of files, as transformers has them, the tensors in each, in order.

    Args:
        limit: of the bytes in a file; a single larger tensor has one of its own.
    """
    shards: list[dict[str, Stored]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.nbytes > limit:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += tensor.nbytes
    if len(shards) == 1:
        return {stem + suffix: shards[0]}
    return {f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}": shard for number, shard in enumerate(shards, 1)}


def shard_index(shards: Mapping[str, Mapping[str, Stored]]) -> dict[str, dict[str, Any]]:
    """What the .index.json beside several files holds: in which of them each tensor is, and the bytes of all."""
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}
