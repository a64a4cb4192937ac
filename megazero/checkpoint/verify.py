"""Reads every byte of a checkpoint, and says which files and which tensors are not what was written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from megazero.checkpoint.format import DTYPES, FORMAT, FORMAT_VERSION, CheckedFile, CheckpointError, checkpoint_path
from megazero.checkpoint.loading import client_state
from megazero.checkpoint.ranges import Cut, RangeMap, shard_shape, shard_to_full
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.training_state import RNG

_MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)


class _Extent(NamedTuple):
    """Bytes [low, high) of a file, and what is in them."""

    low: int
    high: int
    what: str


@dataclass
class Verification:
    """What was found.

    Attributes:
        problems: a sentence each; none where all is as it was written.
    """

    path: Path
    num_files: int = 0
    num_tensors: int = 0
    nbytes: int = 0
    problems: list[str] = field(default_factory=list)


def verify(directory: str | Path, tag: str, *, show_progress: bool = False) -> Verification:
    """What is wrong with a checkpoint: sizes and checksums of its files, and whether they hold every parameter exactly once.

    Args:
        show_progress: on standard error, if that is a terminal.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        OSError: a file cannot be read.
    """
    found = Verification(checkpoint_path(directory, tag))
    try:
        index = json.loads((found.path / "index.json").read_bytes())
        if (index.get("format"), index.get("format_version")) != (FORMAT, FORMAT_VERSION):
            kind = f"{index.get('format')}, version {index.get('format_version')}"
            found.problems.append(
                f"index.json: the format is {kind}; this version reads {FORMAT}, version {FORMAT_VERSION}"
            )
            return found
        found.num_files, found.num_tensors = len(index["files"]), len(index["tensors"])
        found.nbytes = sum(entry["bytes"] for entry in index["files"].values())
        extents = _extents(index)
        _check_files(found, index, extents, show_progress)
        _check_extents(found, index, extents)
        for name, entry in index["tensors"].items():
            problem = _coverage(entry, index["model_parallel_size"])
            if problem:
                found.problems.append(f"{name}: {problem}")
    except _MALFORMED as error:
        found.problems.append(f"index.json is malformed, and not what was written ({type(error).__name__}: {error})")
    if not found.problems:
        _open(found, directory, tag)
    return found


def _extents(index: dict[str, Any]) -> list[list[_Extent]]:
    """What lies where in each file, in order."""
    extents: list[list[_Extent]] = [[] for _ in index["files"]]
    for name, entry in index["tensors"].items():
        for _, start, stop, file, offsets in entry["pieces"]:
            for (state, code), low in zip(entry["states"].items(), offsets, strict=True):
                extents[file].append(_Extent(low, low + (stop - start) * DTYPES[code].itemsize, f"{state} of {name}"))
    for rank, blobs in enumerate(index["blobs"]):
        for key, (file, low, code, shape) in blobs.items():
            what = (
                f"the random generators of rank {rank}"
                if key.startswith(RNG)
                else f"the state of {key.partition('/')[0]}"
            )
            extents[file].append(_Extent(low, low + math.prod(shape) * DTYPES[code].itemsize, what))
    return [sorted(each) for each in extents]


def _check_files(found: Verification, index: dict[str, Any], extents: list[list[_Extent]], show_progress: bool) -> None:
    bar = tqdm(total=found.nbytes, desc="verifying", unit="B", unit_scale=True, disable=None if show_progress else True)
    with bar:
        for (name, entry), held in zip(index["files"].items(), extents, strict=True):
            path = found.path / name
            if path.parent != found.path:
                found.problems.append(f"index.json: {name!r} is no name of a file in the checkpoint's own directory")
                continue
            nbytes = path.stat().st_size if path.is_file() else None
            if nbytes != entry["bytes"]:
                state = (
                    "is missing" if nbytes is None else f"has {nbytes:,} bytes where {entry['bytes']:,} were written"
                )
                found.problems.append(f"{name} {state}. In it: {_names(held)}")
                bar.update(entry["bytes"])
                continue
            file = CheckedFile(path, entry["bytes"], entry["crc32"], index["block_bytes"])
            for low, high in _damaged(file, bar):
                inside = [extent for extent in held if extent.low < high and low < extent.high]
                found.problems.append(
                    f"{name}: bytes {low:,} to {high:,} are not what was written. In them: {_names(inside)}"
                )
            file.close()


def _damaged(file: CheckedFile, bar: tqdm) -> list[tuple[int, int]]:
    """[low, high) of what is not as it was written, neighbouring blocks together."""
    ranges: list[tuple[int, int]] = []
    position = 0
    for nbytes, error in file.verify():
        if error is not None and ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + nbytes)
        elif error is not None:
            ranges.append((position, position + nbytes))
        position += nbytes
        bar.update(nbytes)
    return ranges


def _names(extents: Iterable[_Extent], most: int = 4) -> str:
    names = list(dict.fromkeys(extent.what for extent in extents))
    rest = f", and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "no tensor, only the file's header") + rest


def _check_extents(found: Verification, index: dict[str, Any], extents: list[list[_Extent]]) -> None:
    for (name, entry), held in zip(index["files"].items(), extents, strict=True):
        for extent in held:
            if extent.low < 0 or extent.high > entry["bytes"]:
                found.problems.append(f"{extent.what} should lie in {name} at {extent.low:,}, beyond its end")
        for first, second in zip(held, held[1:], strict=False):
            if second.low < first.high:
                found.problems.append(f"{first.what} and {second.what} overlap in {name}")


def _coverage(entry: dict[str, Any], size: int) -> str | None:
    """What is wrong with the pieces of a parameter: together they must be all of it, and nothing twice."""
    shape, cut = entry["shape"], None if entry["cut"] is None else Cut(**entry["cut"])
    ranks, numel, held = size if cut else 1, math.prod(shard_shape(shape, cut, size)), 0
    for rank in range(ranks):
        pieces = sorted((start, stop) for at, start, stop, *_ in entry["pieces"] if at == rank)
        if any(start < 0 or start >= stop or stop > numel for start, stop in pieces):
            return f"a piece lies outside of the {numel:,} elements that rank {rank} has of it"
        if any(stop > start for (_, stop), (start, _) in zip(pieces, pieces[1:], strict=False)):
            return "some elements are there twice"
        starts, lengths = [start for start, _ in pieces], [stop - start for start, stop in pieces]
        held += RangeMap.of(starts, starts, lengths).then(shard_to_full(shape, cut, rank, size)).numel
    if any(not 0 <= piece[0] < ranks for piece in entry["pieces"]):
        return f"a piece belongs to a rank that is none of its {ranks}"
    total = math.prod(shape)
    return None if held == total else f"{total - held:,} of its {total:,} elements are in no file"


def _open(found: Verification, directory: str | Path, tag: str) -> None:
    """What only the readers of a checkpoint see."""
    try:
        reader = Reader(directory, tag)
        for name in reader.tensors:
            reader.states(name)
        client_state(reader)
    except CheckpointError as error:
        found.problems.append(str(error))
    except _MALFORMED as error:
        found.problems.append(f"the client state cannot be read ({type(error).__name__}: {error})")
