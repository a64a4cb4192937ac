"""A safetensors file: written as a stream, and read by ranges that are checked against the checksums of its blocks.

The safetensors library writes from one block of bytes that holds all tensors; a rank's shards of the optimizer fill most of its
memory, so here they go from where they lie to the file, and are on the disk at the end.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.format import REMEDY, CheckpointError, bytes_of, crc32, dtype_code, is_count

BLOCK_BYTES = 1 << 20  # of a checksum
_CHUNK_BYTES = 1 << 24  # of a copy from a device
_WRITE_OUT_BYTES = 1 << 24  # written at a time by the disk, while the next are on their way into memory
_ALIGNMENT = 64  # bytes, of the first tensor
# Files at a time that are read: there is one of every rank, and a process may have 256 descriptors, or 1024.
MOST_OPEN = 128


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is not in memory, and is read or made when its turn to be written comes.

    Attributes:
        read: gives all of it.
        parts: gives it as flat parts, one behind the other, each for a moment, where all of it would be too much to hold.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    parts: Callable[[], Iterator[Tensor]] | None = None

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
        if error.filename not in (None, str(path)) or error.errno is None:
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor | LazyTensor]) -> Written:
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
                for values in _parts(name, tensor):
                    for part in _on_cpu(values.detach()):
                        stream.write(bytes_of(part).data)
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)  # a full disk needs the room
        raise
    return Written(stream.nbytes, stream.crc32, offsets)


def _header(tensors: Mapping[str, Tensor | LazyTensor]) -> tuple[bytes, dict[str, int]]:
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


def _parts(name: str, tensor: Tensor | LazyTensor) -> Iterator[Tensor]:
    """What is written of a tensor, in order; raises where that is not what was announced."""
    if isinstance(tensor, Tensor):
        yield tensor
    elif tensor.parts is None:
        values = tensor.read()
        if (values.dtype, values.shape) != (tensor.dtype, tensor.shape):
            found, announced = (f"{each.dtype} {tuple(each.shape)}" for each in (values, tensor))
            raise ValueError(f"{name} is {found}, announced as {announced}")
        yield values
    else:
        nbytes = 0
        for part in tensor.parts():
            nbytes += part.nbytes
            yield part
        if nbytes != tensor.nbytes:
            raise ValueError(f"{name} is {nbytes} bytes, announced as {tensor.nbytes}")


def _on_cpu(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor's memory in order, in chunks where it has to be copied."""
    flat = tensor.reshape(-1)  # a view of what lies in one piece
    if flat.device.type == "cpu" and flat.is_contiguous():
        return iter([flat])
    return (part.cpu() for part in flat.split(max(1, _CHUNK_BYTES // flat.element_size())))


class CheckedFile:
    """A file whose blocks are checked against their CRC-32 as they are read.

    Args:
        checksums: of every `block_bytes` of the file.
        opened: the files that are open for reading, the one that was read last at the end. Files that are read together share it,
            and at most MOST_OPEN of them stay open.

    Raises:
        ValueError: the number of checksums does not suit the size.
    """

    def __init__(
        self, path: Path, nbytes: int, checksums: list[int], block_bytes: int, opened: dict[Path, BufferedReader]
    ) -> None:
        self.path, self._opened = path, opened
        is_wrong = not is_count(nbytes) or not is_count(block_bytes) or not isinstance(checksums, list)
        if is_wrong or block_bytes < 1 or len(checksums) != -(-nbytes // block_bytes):
            found = f"the checksums {str(checksums)[:60]} for blocks of {block_bytes}"
            raise ValueError(f"{path.name} of {nbytes} bytes cannot have {found}")
        self.nbytes, self.checksums, self.block_bytes = nbytes, checksums, block_bytes
        self._held: dict[str, tuple[int, np.ndarray]] = {}  # by state, the last block that was needed in part

    def found_size(self) -> int | None:
        """The bytes that it has in fact; None if it is missing."""
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def check_size(self) -> None:
        """Returns if the file is there and as large as it should be. Reading asks before it opens the file.

        Raises:
            CheckpointError: it is not.
        """
        found = self.found_size()
        if found != self.nbytes:
            raise CheckpointError(
                f"Checkpoint file {self.path} has {'no' if found is None else found} bytes where the index says {self.nbytes}: "
                f"it is damaged. {REMEDY}"
            )

    def read_into(self, out: np.ndarray, start: int, what: str, state: str = "") -> None:
        """Fills `out`, [bytes] uint8, from the file's bytes at `start` on, which it has; `what` is in messages what is read.

        Args:
            state: parameters' states are read in turns, and those of one state lie together: of each, a block is kept.

        Raises:
            CheckpointError: a block is not what was written.
            OSError: the disk does not give it.
        """
        stop = start + len(out)
        for block in range(start // self.block_bytes, -(-stop // self.block_bytes)):
            low, high = self._bounds(block)
            if start <= low and high <= stop:
                self._read_block(block, what, out[low - start : high - start])
                continue
            held, content = self._held.get(state, (-1, out))
            if held != block:
                content = self._read_block(block, what)
                self._held[state] = block, content
            first, last = max(low, start), min(high, stop)
            out[first - start : last - start] = content[first - low : last - low]

    def verify(self) -> Iterator[tuple[int, int, bool]]:
        """Reads the whole file: of every block [low, high) in bytes, and whether it is as it was written."""
        for block in range(len(self.checksums)):
            low, high = self._bounds(block)
            try:
                self._read_block(block, "a check")
                yield low, high, True
            except CheckpointError:
                yield low, high, False

    def close(self) -> None:
        """Gives the descriptor back; a later read opens the file again."""
        if (file := self._opened.pop(self.path, None)) is not None:
            file.close()

    def __del__(self) -> None:
        self.close()

    def _bounds(self, block: int) -> tuple[int, int]:
        return block * self.block_bytes, min((block + 1) * self.block_bytes, self.nbytes)

    def _open(self) -> BufferedReader:
        """The file, which is open."""
        file = self._opened.pop(self.path, None)
        if file is None:
            self.check_size()
            if len(self._opened) >= MOST_OPEN:
                self._opened.pop(next(iter(self._opened))).close()
            file = open(self.path, "rb")  # noqa: SIM115 (until `close`)
        self._opened[self.path] = file
        return file

    def _read_block(self, block: int, what: str, out: np.ndarray | None = None) -> np.ndarray:
        low, high = self._bounds(block)
        out = np.empty(high - low, dtype=np.uint8) if out is None else out
        file = self._open()
        file.seek(low)
        try:
            count = file.readinto(out.data)
        except OSError as error:  # of a disk that fails; it does not say which file it was
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if count < high - low or crc32(out.data) != self.checksums[block]:
            raise CheckpointError(
                f"Checkpoint file {self.path} is damaged: bytes {low} to {high} are not what was written (read for "
                f"{what}). {REMEDY}"
            )
        return out
