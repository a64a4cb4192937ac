"""Reads a checkpoint: any range of any parameter, checked against checksums, whatever ranks have written it.

docs/checkpoint_format.md describes the files. They are data: nothing in them is executed, and no name in them leads out of the
directory. This module, `format`, `ranges` and `writer` need nothing but numpy and torch, because they are part of the
zero_to_fp32.py that lies beside every checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.format import (
    DTYPES,
    FORMAT,
    FORMAT_VERSION,
    PLAIN_NAME,
    REMEDY,
    CheckedFile,
    CheckpointError,
    bytes_of,
    check_tag,
    checkpoint_path,
    has_own_checksum,
    integers,
    is_count,
    latest_tag,
    no_number,
)
from megazero.checkpoint.ranges import Cut, RangeMap, shard_shape, shard_to_full


class Reader:
    """One checkpoint, open for reading.

    Args:
        tag: None takes the newest.
        content: of its index.json, where another process has read it and found all files there; a file's size is then looked
            at when it is first read.

    Attributes:
        path: its directory.
        index: the content of index.json.
        tensors: of the index: what is known of every parameter and buffer, by name.

    Raises:
        FileNotFoundError: there is no checkpoint of this tag.
        CheckpointError: it is damaged or of another format.
        ValueError: the tag cannot name a directory.
    """

    def __init__(self, directory: str | Path, tag: str | None = None, content: bytes | None = None) -> None:
        is_first = content is None
        tag = latest_tag(directory) if tag is None else check_tag(tag)
        self.path = Path(directory) / "latest" if tag is None else checkpoint_path(directory, tag)
        if content is None:
            if tag is None or not (self.path / "index.json").is_file():
                raise FileNotFoundError(f"No checkpoint at {self.path}: check --load; `latest` names the one to read.")
            content = (self.path / "index.json").read_bytes()
        with self.well_formed("its top level"):
            self.index: dict[str, Any] = json.loads(content, parse_constant=no_number)
            found = (self.index.get("format"), self.index.get("format_version"))
        if found != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"{self.path} has format {found[0]}, version {found[1]}; this version reads {FORMAT}, version {FORMAT_VERSION}."
            )
        if not has_own_checksum(content):
            path = self.path / "index.json"
            raise CheckpointError(f"{path} is damaged: its checksum is not that of what it holds. {REMEDY}")
        del content, self.index["crc32"]
        with self.well_formed("files"):
            self.files = [self._open(name, entry) for name, entry in self.index["files"].items()]
            self.tensors: dict[str, Any] = dict(self.index["tensors"])
            self.size: int = self.index["model_parallel_size"]
            if not is_count(self.size) or not 1 <= self.size <= len(self.files):
                raise ValueError(f"{len(self.files)} files cannot be those of {self.size} tensor-parallel ranks")
        for file in self.files if is_first else ():
            file.check_size()

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

    def dtype(self, name: str, state: str) -> torch.dtype:
        """In which a state is saved.

        Raises:
            CheckpointError: it is not.
        """
        states = self.states(name)
        if state not in states:
            found = ", ".join(states) or "nothing"
            raise CheckpointError(f"{self.path}: the index has no {state} of {name}, only {found}")
        return states[state]

    def read(self, name: str, state: str) -> Tensor:
        """The full, unpadded tensor, in its saved dtype, on the CPU."""
        shape, dtype = self.shape(name), self.dtype(name, state)
        if math.prod(shape) * dtype.itemsize > sum(file.nbytes for file in self.files):
            raise CheckpointError(f"{self.path}: {name} has shape {shape}, for which the files are too small")
        out = torch.empty(shape, dtype=dtype)
        self.read_part(name, {state: out.reshape(-1)})
        return out

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
            dtype = self.dtype(name, state)
            is_direct = out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
            target = out.detach() if is_direct else torch.empty(length, dtype=dtype)
            if wanted.numel < length:
                target.zero_()
            pieces.read(state, plan, bytes_of(target))
            if not is_direct:
                out.copy_(target)

    def missing(self, name: str) -> int:
        """How many elements of a parameter the index does not list.

        Raises:
            CheckpointError: it lists others, or some twice.
        """
        return math.prod(self.shape(name)) - _Pieces(self, name).full_to_saved.numel

    def blob(self, entry: Sequence[Any]) -> Tensor:
        """A tensor of one rank, not of the model, from its [file, offset, dtype, shape] in the index."""
        with self.well_formed("a blob"):
            file, offset, code, shape = entry
            nbytes = math.prod(shape) * DTYPES[code].itemsize
            if not all(map(is_count, (file, offset, *shape))) or offset + nbytes > self.files[file].nbytes:
                raise ValueError(f"{entry} points beyond its file")
            out = torch.empty(shape, dtype=DTYPES[code])
            if out.numel():
                self.files[file].read_into(bytes_of(out), offset, "what was saved beside the model")
            return out

    def close(self) -> None:
        """Gives all descriptors back."""
        for file in self.files:
            file.close()

    def _open(self, name: str, entry: dict[str, Any]) -> CheckedFile:
        if not PLAIN_NAME.fullmatch(name):
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
        self.name, self.files = name, reader.files
        shape, cut, size = reader.shape(name), reader.cut(name), reader.size
        self.dtypes = reader.states(name)
        with reader.well_formed(name):
            rows = reader.tensors[name]["pieces"]
            ranks, starts, stops, self._file = (integers([row[i] for row in rows]) for i in range(4))
            offsets = integers([row[4] for row in rows]).reshape(len(rows), len(self.dtypes))
            self._offset = dict(zip(self.dtypes, offsets.T, strict=True))
            numel = math.prod(shard_shape(shape, cut, size))
            if numel * (size if cut else 1) > sum(file.nbytes for file in self.files):
                raise ValueError(f"it would be larger than all files: shape {shape}, {cut}")
            is_wrong = (
                (ranks < 0) | (ranks >= (size if cut else 1)) | (self._file < 0) | (self._file >= len(self.files))
            )
            is_wrong |= (starts < 0) | (stops > numel) | (starts >= stops) | (offsets < 0).any(axis=1)
            ends = offsets + (stops - starts)[:, None] * [dtype.itemsize for dtype in self.dtypes.values()]
            if not is_wrong.any():
                is_wrong |= (ends > np.array([[file.nbytes] for file in self.files])[self._file]).any(axis=1)
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
        file, offset, itemsize = self.files[self._file[piece]], self._offset[state][piece], self.dtypes[state].itemsize
        what = f"{state} of {self.name}"
        low, high = int(runs[0, 1]) * itemsize, int(runs[-1, 1] + runs[-1, 2]) * itemsize
        if len(runs) == 1:
            to = int(runs[0, 0]) * itemsize
            file.read_into(out[to : to + high - low], int(offset) + low, what)
            return
        # Rows of a matrix that is cut across: one read of all that lies between them, then a copy for each.
        content = np.empty(high - low, dtype=np.uint8)
        file.read_into(content, int(offset) + low, what)
        for to, start, length in (runs * itemsize).tolist():
            out[to : to + length] = content[start - low : start - low + length]
