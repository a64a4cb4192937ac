"""Reads a checkpoint: any range of any parameter, checked against checksums, whatever ranks have written it.

    SAVE/latest                           the tag of the newest whole checkpoint
    SAVE/global_step20/index.json         what is in it and where; docs/checkpoint_format.md
    SAVE/global_step20/rank_00000.safetensors, ...

Files are data: nothing in them is executed, and no name in them leads out of the directory. This module and `ranges` need
nothing but numpy and torch, because they are part of the zero_to_fp32.py that lies beside every checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.ranges import Cut, RangeMap, shard_shape, shard_to_full

FORMAT, FORMAT_VERSION = "megazero", 2
# As in safetensors.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_TAG = 200  # file systems have names of at most 255 bytes, and the directory aside has a longer one
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or of another format."""


def check_tag(tag: str) -> str:
    """The tag, if it can name a directory inside of another.

    Raises:
        ValueError: it cannot.
    """
    if not tag or len(tag) > _MAX_TAG or tag.startswith(".") or re.search(r"[/\\\x00-\x1f]", tag):
        raise ValueError(
            f"A checkpoint's tag becomes the name of its directory; {tag[:300]!r} cannot. Leave out slashes, control characters "
            f"and a dot in front, and take at most {_MAX_TAG} characters."
        )
    return tag


def latest_tag(directory: str | Path) -> str | None:
    """The tag of the newest whole checkpoint in `directory`; None where there is none.

    Raises:
        CheckpointError: the file `latest` holds something else.
    """
    pointer = Path(directory) / "latest"
    if not pointer.is_file():
        return None
    with open(pointer, "rb") as file:
        content = file.read(4096)
    try:
        return check_tag(content.decode().strip())
    except ValueError as error:  # UnicodeDecodeError too
        raise CheckpointError(
            f"{pointer} should hold the name of a checkpoint directory and holds {content[:60]!r}. Write the name of an intact "
            "one beside it into the file."
        ) from error


def replaced_path(directory: str | Path, tag: str) -> Path:
    """Where a checkpoint rests while a save of the same tag takes its place."""
    return Path(directory) / f".{tag}.replaced"


def index_bytes(index: dict[str, Any]) -> bytes:
    """The content of index.json: before all else "crc32", the checksum of the bytes behind the first comma and space."""
    rest = json.dumps({key: index[key] for key in index if key != "crc32"}, allow_nan=False).encode()[1:]
    return b'{"crc32": %d, ' % zlib.crc32(rest) + rest


def _has_own_checksum(content: bytes) -> bool:
    """Whether `content` is what `index_bytes` gave."""
    head, _, rest = content.partition(b", ")
    return head == b'{"crc32": %d' % zlib.crc32(rest)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number in JSON")


def is_count(value: Any) -> bool:
    """Whether it is an integer from 0 on that fits into 64 bits: no bool, no 2.0."""
    return type(value) is int and 0 <= value < 2**63


def _integers(values: Sequence[Any]) -> np.ndarray:
    """The values as int64, and no others: "1", 1.0 and what is too large are not what was written."""
    array = np.array(values)
    if len(values) and array.dtype.kind != "i":
        raise ValueError(f"{str(values)[:60]} are not all integers")
    return array.astype(np.int64)


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor, as [bytes] uint8."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


class CheckedFile:
    """A file whose blocks are checked against their CRC-32 as they are read.

    Args:
        checksums: of every `block_bytes` of the file.

    Attributes:
        bytes_read: from the file, in all.

    Raises:
        CheckpointError: the file is missing, or its size is not the expected one.
        ValueError: the number of checksums does not suit the size.
    """

    def __init__(self, path: Path, nbytes: int, checksums: Sequence[int], block_bytes: int) -> None:
        self._descriptor: int | None = None
        found = path.stat().st_size if path.is_file() else None
        if found != nbytes:
            raise CheckpointError(
                f"Checkpoint file {path} has {'no' if found is None else found} bytes where the index says {nbytes}: it is "
                "damaged. Copy the checkpoint again, or load another one: --load-fallback takes the newest whole one."
            )
        is_wrong = not is_count(nbytes) or not is_count(block_bytes) or not isinstance(checksums, (list, tuple))
        if is_wrong or block_bytes < 1 or len(checksums) != -(-nbytes // block_bytes):
            raise ValueError(
                f"{path.name} of {nbytes} bytes cannot have the checksums {str(checksums)[:60]} for blocks of {block_bytes}"
            )
        self.path, self.nbytes, self.checksums, self.block_bytes = path, nbytes, checksums, block_bytes
        self.bytes_read = 0
        self._block, self._content = -1, np.empty(0, dtype=np.uint8)  # the last one that was needed in part

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fills `out`, [bytes] uint8, from the file's bytes at `start` on.

        Raises:
            CheckpointError: a block is not what was written.
        """
        stop, size = start + len(out), self.block_bytes
        if not 0 <= start <= stop <= self.nbytes:
            raise CheckpointError(f"{self.path} has {self.nbytes} bytes, and its index points to {start}..{stop}")
        for block in range(start // size, -(-stop // size)):
            low, high = block * size, min((block + 1) * size, self.nbytes)
            if start <= low and high <= stop:
                self._read_block(block, out[low - start : high - start])
                continue
            if block != self._block:
                content = np.empty(high - low, dtype=np.uint8)
                self._read_block(block, content)
                self._block, self._content = block, content
            first, last = max(low, start), min(high, stop)
            out[first - start : last - start] = self._content[first - low : last - low]

    def verify(self) -> Iterator[tuple[int, CheckpointError | None]]:
        """Reads the whole file: for every block its bytes, and what is wrong with it."""
        for block in range(len(self.checksums)):
            content = np.empty(min(self.block_bytes, self.nbytes - block * self.block_bytes), dtype=np.uint8)
            try:
                self._read_block(block, content)
                yield len(content), None
            except CheckpointError as error:
                yield len(content), error

    def close(self) -> None:
        """Gives the descriptor back; a later read opens the file again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()

    def _read_block(self, block: int, out: np.ndarray) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        low, done = block * self.block_bytes, 0
        while done < len(out):
            count = os.preadv(self._descriptor, [out[done:].data], low + done)
            if count == 0:
                break
            done += count
        self.bytes_read += done
        if done < len(out) or zlib.crc32(out.data) != self.checksums[block]:
            raise CheckpointError(
                f"Checkpoint file {self.path} is damaged: bytes {low} to {low + len(out)} are not what was written"
            )


class Reader:
    """One checkpoint, open for reading.

    Attributes:
        path: its directory.
        index: the content of index.json.
        tensors: of the index: what is known of every parameter and buffer, by name.

    Raises:
        FileNotFoundError: there is no checkpoint of this tag.
        CheckpointError: it is damaged or of another format.
        ValueError: the tag cannot name a directory.
    """

    def __init__(self, directory: str | Path, tag: str | None = None) -> None:
        tag = latest_tag(directory) if tag is None else check_tag(tag)
        self.path = Path(directory) / (tag or "latest")
        if tag is not None and not self.path.exists() and replaced_path(directory, tag).exists():
            self.path = replaced_path(directory, tag)  # a save of the same tag died between its two renames
        if tag is None or not (self.path / "index.json").is_file():
            raise FileNotFoundError(f"No checkpoint at {self.path}: check --load; `latest` names the tag that is read.")
        content = (self.path / "index.json").read_bytes()
        with self.well_formed("its top level"):
            self.index: dict[str, Any] = json.loads(content, parse_constant=_no_number)
            found = (self.index.get("format"), self.index.get("format_version"))
        if found != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"{self.path} has format {found[0]}, version {found[1]}; this version reads {FORMAT}, version {FORMAT_VERSION}."
            )
        if not _has_own_checksum(content):
            raise CheckpointError(
                f"{self.path / 'index.json'} is damaged: its checksum is not that of what it holds. Copy the checkpoint again, "
                "or load another one: --load-fallback takes the newest whole one."
            )
        del content, self.index["crc32"]
        with self.well_formed("files"):
            self.files = [self._open(name, entry) for name, entry in self.index["files"].items()]
            self.tensors: dict[str, Any] = dict(self.index["tensors"])
            self.size: int = self.index["model_parallel_size"]
            if not is_count(self.size) or not 1 <= self.size <= len(self.files):
                raise ValueError(f"{len(self.files)} files cannot be those of {self.size} tensor-parallel ranks")

    @property
    def bytes_read(self) -> int:
        """From all files; a range is rounded to whole blocks."""
        return sum(file.bytes_read for file in self.files)

    def states(self, name: str) -> dict[str, torch.dtype]:
        """What is saved of a parameter or buffer: "master" and the optimizer's, or "constant" alone.

        Raises:
            CheckpointError: the index is malformed.
        """
        with self.well_formed(name):
            return {state: DTYPES[code] for state, code in self.tensors[name]["states"].items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Full and without padding."""
        with self.well_formed(name):
            shape = tuple(self.tensors[name]["shape"])
            if not all(map(is_count, shape)):
                raise ValueError(f"shape {shape}")
            return shape

    def cut(self, name: str) -> Cut | None:
        """How the ranks that saved it had cut it."""
        with self.well_formed(name):
            entry, shape = self.tensors[name]["cut"], self.shape(name)
            if entry is None:
                return None
            cut = Cut(entry["dim"], entry["stride"], entry["padded"])
            if not all(map(is_count, (cut.dim, cut.stride, cut.padded))) or not 1 <= cut.stride <= max(1, cut.padded):
                raise ValueError(f"{cut}")
            shard_shape(shape, cut, self.size)  # raises where it cannot be
            return cut

    def read(self, name: str, state: str) -> Tensor:
        """The full, unpadded tensor, in its saved dtype, on the CPU."""
        shape, dtype = self.shape(name), self._dtype(name, state)
        if math.prod(shape) * dtype.itemsize > sum(file.nbytes for file in self.files):
            raise CheckpointError(
                f"{self.path}: the index gives {name} the shape {shape}, for which its files are too small"
            )
        out = torch.empty(shape, dtype=dtype)
        self.read_part(name, {state: out.reshape(-1)})
        return out

    def _dtype(self, name: str, state: str) -> torch.dtype:
        states = self.states(name)
        if state not in states:
            raise CheckpointError(
                f"{self.path}: the index has no {state} of {name}, only {', '.join(states) or 'nothing'}"
            )
        return states[state]

    def weight_state(self, name: str) -> str:
        """The state that holds a parameter's values: "master", in fp32, or "constant" of what is not trained."""
        return "master" if "master" in self.states(name) else "constant"

    def read_weight(self, name: str) -> Tensor:
        """The full parameter or buffer: fp32 for what is trained."""
        return self.read(name, self.weight_state(name))

    def read_part(
        self,
        name: str,
        outs: Mapping[str, Tensor],
        *,
        cut: Cut | None = None,
        rank: int = 0,
        size: int = 1,
        start: int = 0,
    ) -> None:
        """Reads a range of the flattened part that a tensor-parallel rank holds; padding becomes zero.

        Args:
            outs: for each state a 1-D tensor, all of one length; on another device or of another dtype values are converted.
            cut, rank, size: of the rank that wants it; by default the full parameter.
            start: in the flattened shard, of the first element.

        Raises:
            CheckpointError: what is needed is damaged or not there.
        """
        numel = {out.numel() for out in outs.values()}
        if numel in (set(), {0}):
            return
        pieces = _Pieces(self, name)
        (length,) = numel
        wanted = shard_to_full(self.shape(name), cut, rank, size).sources_from(start, start + length)
        plan = wanted.then(pieces.full_to_saved)
        if plan.numel != wanted.numel:
            raise CheckpointError(f"{self.path}: the index lists {plan.numel} of {wanted.numel} elements of {name}")
        for state, out in outs.items():
            dtype = self._dtype(name, state)
            is_direct = out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
            target = out.detach() if is_direct else torch.empty(length, dtype=dtype)
            if wanted.numel < length:
                target.zero_()
            try:
                pieces.read(state, plan, bytes_of(target))
            except CheckpointError as error:
                raise CheckpointError(f"{error} (read for {state} of {name}).") from error
            if not is_direct:
                out.copy_(target)

    def blob(self, entry: Sequence[Any]) -> Tensor:
        """A tensor of one rank, not of the model, from its [file, offset, dtype, shape] in the index."""
        with self.well_formed("a blob"):
            file, offset, code, shape = entry
            nbytes = math.prod(shape) * DTYPES[code].itemsize
            if not all(map(is_count, (file, offset, *shape))) or offset + nbytes > self.files[file].nbytes:
                raise ValueError(f"{entry} points beyond its file")
            out = torch.empty(shape, dtype=DTYPES[code])
            if out.numel():
                self.files[file].read_into(bytes_of(out), offset)
            return out

    def close(self) -> None:
        """Gives all descriptors back."""
        for file in self.files:
            file.close()

    def _open(self, name: str, entry: dict[str, Any]) -> CheckedFile:
        if not _PLAIN_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a file in the checkpoint's own directory")
        return CheckedFile(self.path / name, entry["bytes"], entry["crc32"], self.index["block_bytes"])

    @contextmanager
    def well_formed(self, what: str) -> Iterator[None]:
        """Inside, only what the index says is looked at: whatever goes wrong is its fault.

        Raises:
            CheckpointError: it names `what`.
        """
        try:
            yield
        except (CheckpointError, OSError, MemoryError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.path / 'index.json'} is malformed at {what}: {type(error).__name__}: {error}. It is not what was "
                "written; copy the checkpoint again."
            ) from error


class _Pieces:
    """Where the elements of one parameter lie in the files. Saved order is that of its list of pieces."""

    def __init__(self, reader: Reader, name: str) -> None:
        self.files = reader.files
        shape, cut, size = reader.shape(name), reader.cut(name), reader.size
        self.dtypes = reader.states(name)
        with reader.well_formed(name):
            rows = reader.tensors[name]["pieces"]
            ranks, starts, stops, self._file = (_integers([row[i] for row in rows]) for i in range(4))
            offsets = _integers([row[4] for row in rows]).reshape(len(rows), len(self.dtypes))
            self._offset = dict(zip(self.dtypes, offsets.T, strict=True))
            numel = math.prod(shard_shape(shape, cut, size))
            if numel * (size if cut else 1) > sum(file.nbytes for file in self.files):
                raise ValueError(f"it would be larger than all files: shape {shape}, {cut}")
            is_wrong = (
                (ranks < 0) | (ranks >= (size if cut else 1)) | (starts < 0) | (stops > numel) | (starts >= stops)
            )
            is_wrong |= (self._file < 0) | (self._file >= len(self.files)) | (offsets < 0).any(axis=1)
            order = np.lexsort((starts, ranks))
            is_overlap = (ranks[order][1:] == ranks[order][:-1]) & (starts[order][1:] < stops[order][:-1])
            if is_wrong.any() or is_overlap.any():
                raise ValueError("a piece lies outside of the parameter or its files, or overlaps another")
        # The shards of all ranks, one behind the other; and all pieces, with a gap between them, so that no range runs on.
        in_shards, lengths = ranks * numel + starts, stops - starts
        self._base = np.cumsum(lengths + 1) - (lengths + 1)
        shards = [shard_to_full(shape, cut, rank, size) for rank in range(size if cut else 1)]
        to_full = RangeMap(
            np.concatenate([shard.source + rank * numel for rank, shard in enumerate(shards)]),
            np.concatenate([shard.target for shard in shards]),
            np.concatenate([shard.length for shard in shards]),
        )
        self.full_to_saved = to_full.inverse().then(RangeMap(in_shards, self._base, lengths))

    def read(self, state: str, plan: RangeMap, out: np.ndarray) -> None:
        """Fills the bytes `out` by `plan`, elements of it -> elements in saved order."""
        order = np.argsort(plan.target)
        piece = np.searchsorted(self._base, plan.target[order], "right") - 1
        for rows in np.split(order, np.flatnonzero(np.diff(piece)) + 1):
            if len(rows):
                at = int(np.searchsorted(self._base, plan.target[rows[0]], "right")) - 1
                starts = plan.target[rows] - self._base[at]
                self._read_piece(state, at, np.stack([plan.source[rows], starts, plan.length[rows]], axis=1), out)

    def _read_piece(self, state: str, piece: int, runs: np.ndarray, out: np.ndarray) -> None:
        """Args: runs: [n, 3], in elements: where to in `out`, where from in the piece, how many; in the order of the piece."""
        file, offset, itemsize = (
            self.files[self._file[piece]],
            int(self._offset[state][piece]),
            self.dtypes[state].itemsize,
        )
        low, high = int(runs[0, 1]) * itemsize, int(runs[-1, 1] + runs[-1, 2]) * itemsize
        if len(runs) == 1:
            to = int(runs[0, 0]) * itemsize
            file.read_into(out[to : to + high - low], offset + low)
            return
        # Rows of a matrix that is cut across: one read of all that lies between them, then a copy for each.
        content = np.empty(high - low, dtype=np.uint8)
        file.read_into(content, offset + low)
        for to, start, length in (runs * itemsize).tolist():
            out[to : to + length] = content[start - low : start - low + length]
