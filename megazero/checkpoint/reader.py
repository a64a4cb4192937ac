"""Reads a checkpoint: any range of any parameter, checked against checksums, whatever ranks have written it.

docs/checkpoint_format.md describes the files. They are data: nothing in them is executed, and no name in them leads out of the
directory. This module, `format`, `tags`, `ranges` and `tensor_file` need nothing but numpy and torch, because they are part of
the zero_to_fp32.py that lies beside every checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.format import (
    ANOTHER,
    DTYPES,
    FORMAT,
    FORMAT_VERSION,
    PLAIN_NAME,
    REMEDY,
    CheckpointError,
    TensorEntry,
    bytes_of,
    has_own_checksum,
    is_count,
)
from megazero.checkpoint.ranges import Cut, RangeMap, shard_shape, shard_to_full, shards_to_full
from megazero.checkpoint.tags import check_tag, checkpoint_path, latest_tag
from megazero.checkpoint.tensor_file import CheckedFile


class Reader:
    """One checkpoint, open for reading. Every method raises CheckpointError where what it needs is damaged or not there.

    Args:
        tag: None takes the newest.
        content: of its index.json, where another process has read it and found all files there; a file's size is then looked
            at when it is first read.

    Attributes:
        path: its directory.
        index: the content of index.json.
        tensors: what the index says of every parameter and buffer, by name.
        nbytes: of all files together.

    Raises:
        FileNotFoundError: there is no checkpoint of this tag.
        CheckpointError: it is damaged or of another format.
        ValueError: the tag cannot name a directory.
    """

    def __init__(self, directory: str | Path, tag: str | None = None, content: bytes | None = None) -> None:
        looks_for_files = content is None
        # What was located last, and what was wanted: the states of a parameter lie alike.
        self._located: tuple[tuple[Any, ...], Pieces, RangeMap] | None = None
        tag = latest_tag(directory) if tag is None else check_tag(tag)
        self.path = Path(directory) / "latest" if tag is None else checkpoint_path(directory, tag)
        if content is None:
            if tag is None or not (self.path / "index.json").is_file():
                if tag is not None and any(self.path.glob("*_model_states.pt")):
                    raise FileNotFoundError(
                        f"{self.path} is a checkpoint of DeepSpeed's. Make one of it that can be loaded: `python -m "
                        f"megazero.checkpoint import --from deepspeed {directory} OUT`."
                    )
                missing = "it has no file `latest`" if tag is None else "the tag or the file `latest` names it"
                where = directory if tag is None else self.path
                raise FileNotFoundError(
                    f"No checkpoint at {where}: {missing}. Name one that is there in `latest`, or take {ANOTHER}"
                )
            content = (self.path / "index.json").read_bytes()
        with self.well_formed("its top level"):
            self.index: dict[str, Any] = json.loads(content, parse_constant=_no_number)
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
            self.nbytes = sum(file.nbytes for file in self.files)
            self.size: int = self.index["model_parallel_size"]
            if not is_count(self.size) or not 1 <= self.size <= len(self.files):
                raise ValueError(f"{len(self.files)} files cannot be those of {self.size} tensor-parallel ranks")
        with self.well_formed("tensors"):
            self.tensors = {name: self._parse(name, saved) for name, saved in self.index["tensors"].items()}
        for file in self.files if looks_for_files else ():
            file.check_size()

    def entry(self, name: str) -> TensorEntry:
        """What is saved of a parameter or buffer."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: the index has no {name}")
        return self.tensors[name]

    def read(self, name: str, state: str) -> Tensor:
        """The full, unpadded tensor, in its saved dtype, on the CPU."""
        out = torch.empty(self.entry(name).shape, dtype=self._dtype(name, state))
        self.read_part(name, state, out.reshape(-1))
        return out

    def read_weight(self, name: str) -> Tensor:
        """The full parameter or buffer: fp32 for what is trained."""
        return self.read(name, self.entry(name).weight_state)

    def read_part(
        self,
        name: str,
        state: str,
        out: Tensor,
        *,
        cut: Cut | None = None,
        rank: int = 0,
        size: int = 1,
        start: int = 0,
    ) -> None:
        """Reads a range of the flattened part that a tensor-parallel rank holds; padding becomes zero.

        Args:
            out: 1-D; on another device or of another dtype values are converted.
            cut, rank, size: of the rank that wants it; by default the full parameter.
            start: in the flattened shard, of the first element.
        """
        if not out.numel():
            return
        dtype = self._dtype(name, state)
        wanted = (name, cut, rank, size, start, out.numel())
        if self._located is None or self._located[0] != wanted:
            self._located = (wanted, *self._locate(*wanted))
        _, pieces, plan = self._located
        is_direct = out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
        target = out.detach() if is_direct else torch.empty(out.shape, dtype=dtype)
        if plan.numel < out.numel():
            target.zero_()
        pieces.read(state, plan, bytes_of(target), f"{state} of {name}")
        if not is_direct:
            out.copy_(target)

    def missing(self, name: str) -> int:
        """How many elements of a parameter the index does not list."""
        return self.entry(name).numel - self._pieces(name).full_to_saved.numel

    def blobs(self, prefix: str, rank: int = 0) -> dict[str, Tensor]:
        """The tensors that a rank has saved beside the model, by key: those whose key begins with `prefix`."""
        with self.well_formed("blobs"):
            entries = self.index["blobs"][rank].items()
            return {key: self._blob(*entry) for key, entry in entries if key.startswith(prefix)}

    def _blob(self, file: int, offset: int, code: str, shape: Sequence[int]) -> Tensor:
        nbytes = math.prod(shape) * DTYPES[code].itemsize
        if not all(map(is_count, (file, offset, *shape))) or offset + nbytes > self.files[file].nbytes:
            raise ValueError(f"{nbytes} bytes of {shape} at {offset} of file {file} lie beyond it")
        out = torch.empty(shape, dtype=DTYPES[code])
        if out.numel():
            self.files[file].read_into(bytes_of(out), offset, "what was saved beside the model")
        return out

    def close(self) -> None:
        """Gives all descriptors back."""
        for file in self.files:
            file.close()

    def _parse(self, name: str, saved: Any) -> TensorEntry:
        with self.well_formed(name):
            entry = TensorEntry.from_json(saved, self.size)
            if entry.saved_numel * max(dtype.itemsize for dtype in entry.states.values()) > self.nbytes:
                raise ValueError(f"it would be larger than all files: shape {entry.shape}, {entry.cut}")
            return entry

    def _dtype(self, name: str, state: str) -> torch.dtype:
        states = self.entry(name).states
        if state not in states:
            found = ", ".join(states) or "nothing"
            raise CheckpointError(f"{self.path}: the index has no {state} of {name}, only {found}")
        return states[state]

    def _pieces(self, name: str) -> Pieces:
        entry = self.entry(name)
        with self.well_formed(name):
            return Pieces(self.index["tensors"][name]["pieces"], entry, self.size, self.files)

    def _locate(
        self, name: str, cut: Cut | None, rank: int, size: int, start: int, length: int
    ) -> tuple[Pieces, RangeMap]:
        """A parameter's pieces, and where they hold what `read_part` is asked for."""
        pieces = self._pieces(name)
        wanted = shard_to_full(self.entry(name).shape, cut, rank, size).sources_from(start, start + length)
        plan = wanted.then(pieces.full_to_saved)
        if plan.numel != wanted.numel:
            raise CheckpointError(f"{self.path}: the index lists {plan.numel} of {wanted.numel} elements of {name}")
        return pieces, plan

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
                f"written. {REMEDY}"
            ) from error


class Pieces:
    """The pieces of one parameter. Saved order is that of the list, piece by piece.

    Args:
        rows: [rank, start, stop, file, offsets] of every piece, as they are in the index.
        size: how many tensor-parallel ranks have saved it.

    Attributes:
        full_to_saved: elements of the flattened full parameter -> elements in saved order.

    Raises:
        ValueError: a piece is not what a writer could have written. Other errors mean the same.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Any]],
        entry: TensorEntry,
        size: int,
        files: Sequence[CheckedFile],
    ) -> None:
        self._files, self._dtypes, dtypes = files, entry.states, entry.states.values()
        shape, cut = entry.shape, entry.cut
        rank, start, stop, self._file = (_integers([row[i] for row in rows]) for i in range(4))
        offsets = _integers([row[4] for row in rows]).reshape(len(rows), len(dtypes))
        self._offset = dict(zip(entry.states, offsets.T, strict=True))
        ranks, numel, length = size if cut else 1, math.prod(shard_shape(shape, cut, size)), stop - start
        is_wrong = (rank < 0) | (rank >= ranks) | (start < 0) | (start >= stop) | (stop > numel)
        is_wrong |= (self._file < 0) | (self._file >= len(files))
        nbytes = np.array([file.nbytes for file in files])[np.clip(self._file, 0, len(files) - 1)]
        last = nbytes[:, None] - length[:, None] * [dtype.itemsize for dtype in dtypes]
        is_wrong |= ((offsets < 0) | (offsets > last)).any(axis=1)
        order = np.lexsort((start, rank))
        is_overlap = (rank[order][1:] == rank[order][:-1]) & (start[order][1:] < stop[order][:-1])
        if is_wrong.any() or is_overlap.any():
            raise ValueError("a piece lies outside of the parameter or its files, or overlaps another")
        # In saved order there is a gap between pieces, so that no range runs on from one to the next.
        self._base = np.cumsum(length + 1) - (length + 1)
        in_shards = RangeMap(rank * numel + start, self._base, length)
        self.full_to_saved = shards_to_full(shape, cut, size).inverse().then(in_shards)

    def read(self, state: str, plan: RangeMap, out: np.ndarray, what: str) -> None:
        """Fills the bytes `out` of a tensor by `plan`, elements of it -> elements in saved order; `what` is it in messages."""
        order = np.argsort(plan.target)
        source, target, length = (column[order] for column in (plan.source, plan.target, plan.length))
        piece = np.searchsorted(self._base, target, "right") - 1
        runs = np.stack([source, target - self._base[piece], length], axis=1) * self._dtypes[state].itemsize
        for number, pairs in groupby(zip(piece.tolist(), runs.tolist(), strict=True), itemgetter(0)):
            file, offset = self._files[self._file[number]], int(self._offset[state][number])
            _read_runs(file, offset, [run for _, run in pairs], out, what)


def _read_runs(file: CheckedFile, offset: int, runs: list[list[int]], out: np.ndarray, what: str) -> None:
    """Args: runs: in bytes, where to in `out`, where from in the piece at `offset`, how many; in the order of the piece."""
    low, high = runs[0][1], runs[-1][1] + runs[-1][2]
    if len(runs) == 1:
        to = runs[0][0]
        file.read_into(out[to : to + high - low], offset + low, what)
        return
    # Rows of a matrix that is cut across: one read of all that lies between them, then a copy for each.
    content = np.empty(high - low, dtype=np.uint8)
    file.read_into(content, offset + low, what)
    for to, start, length in runs:
        out[to : to + length] = content[start - low : start - low + length]


def _integers(values: Sequence[Any]) -> np.ndarray:
    """The values as int64, and no others: "1", 1.0 and what is too large are not what was written."""
    array = np.array(values)
    if len(values) and array.dtype.kind != "i":
        raise ValueError(f"{str(values)[:60]} are not all integers")
    return array.astype(np.int64)


def _no_number(text: str) -> None:
    """For json.loads: refuses NaN and Infinity."""
    raise ValueError(f"{text} is no number in JSON")
