"""Reads every byte of a checkpoint, and says which files and which tensors are not what was written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from megazero.checkpoint.format import DTYPES, RNG, CheckpointError
from megazero.checkpoint.plain import client_state
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.tags import checkpoint_path, read_bytes
from megazero.checkpoint.tensor_file import CheckedFile
from megazero.logging import some


class _Extent(NamedTuple):
    """Bytes [low, high) of a file, and what is in them."""

    low: int
    high: int
    what: str


@dataclass
class Verification:
    """What was found.

    Attributes:
        reader: None where the index itself is damaged.
        problems: a sentence each; none where all is as it was written.
    """

    path: Path
    reader: Reader | None = None
    problems: list[str] = field(default_factory=list)


def verify(directory: str | Path, tag: str) -> Verification:
    """What is wrong with a checkpoint: sizes and checksums of its files, and whether they hold every parameter exactly once.

    Raises:
        FileNotFoundError: there is no such checkpoint, or it has been deleted meanwhile.
        OSError: a file cannot be read.
    """
    found = Verification(checkpoint_path(directory, tag))
    with _noting(found):
        found.reader = reader = Reader(directory, tag, read_bytes(found.path / "index.json"))
        with reader.well_formed("what lies in its files"):
            extents = _extents(reader)
        _check_files(found, reader, extents)
        for name in reader.tensors:
            with _noting(found):
                if missing := reader.missing(name):
                    numel = reader.tensors[name].numel
                    found.problems.append(f"{name}: {missing:,} of its {numel:,} elements are in no file")
        if not found.problems:
            client_state(reader)
    if found.problems and not found.path.exists():
        raise FileNotFoundError(f"{found.path} was deleted while it was read, as by a job with --keep-last.")
    return found


@contextmanager
def _noting(found: Verification) -> Iterator[None]:
    """Ends the block at the first damage that it meets, which becomes one of the problems."""
    try:
        yield
    except CheckpointError as error:
        found.problems.append(str(error))


def _extents(reader: Reader) -> list[list[_Extent]]:
    """What lies where in each file, in order."""
    extents: list[list[_Extent]] = [[] for _ in reader.files]
    for name, entry in reader.tensors.items():
        for _, start, stop, file, offsets in reader.index["tensors"][name]["pieces"]:
            for (state, dtype), low in zip(entry.states.items(), offsets, strict=True):
                extents[file].append(_Extent(low, low + (stop - start) * dtype.itemsize, f"{state} of {name}"))
    for rank, blobs in enumerate(reader.index["blobs"]):
        for key, (file, low, code, shape) in blobs.items():
            what = f"the state of {key.partition('/')[0]}"
            what = f"the random generators of rank {rank}" if key.startswith(RNG) else what
            extents[file].append(_Extent(low, low + math.prod(shape) * DTYPES[code].itemsize, what))
    return [sorted(each) for each in extents]


def _check_files(found: Verification, reader: Reader, extents: list[list[_Extent]]) -> None:
    with tqdm(total=reader.nbytes, desc="verifying", unit="B", unit_scale=True, disable=None) as bar:
        for file, held in zip(reader.files, extents, strict=True):
            nbytes, name = file.found_size(), file.path.name
            for one, next_one in pairwise(held):
                if next_one.low < one.high:
                    found.problems.append(f"{name}: {one.what} and {next_one.what} overlap in it")
            if nbytes != file.nbytes:
                state = "is missing" if nbytes is None else f"has {nbytes:,} bytes where {file.nbytes:,} were written"
                found.problems.append(f"{name} {state}. In it: {_names(held)}")
                bar.update(file.nbytes)
                continue
            for low, high in _damaged(file, bar):
                inside = _names(extent for extent in held if extent.low < high and low < extent.high)
                found.problems.append(f"{name}: bytes {low:,} to {high:,} are not what was written. In them: {inside}")
            file.close()


def _damaged(file: CheckedFile, bar: tqdm) -> list[tuple[int, int]]:
    """[low, high) of what is not as it was written, neighbouring blocks together."""
    ranges: list[tuple[int, int]] = []
    for low, high, is_whole in file.verify():
        if not is_whole and ranges and ranges[-1][1] == low:
            ranges[-1] = (ranges[-1][0], high)
        elif not is_whole:
            ranges.append((low, high))
        bar.update(high - low)
    return ranges


def _names(extents: Iterable[_Extent]) -> str:
    names = list(dict.fromkeys(extent.what for extent in extents))
    return some(names, 4) or "no tensor, only the file's header"
