"""Which lines of a corpus repeat an earlier one: exact, in bounded memory, whatever the number of lines.

Each line gives a 128-bit digest and its place. They go to files by the first bits of the digest, so that all equal digests lie
in one file; each file is then sorted by itself. The places that are found go to files as well, one for each stretch of the text,
of which one at a time is looked at when the lines are dropped.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_tools.divided import divided
from data_tools.documents import document_blocks
from data_tools.options import RunOptions, open_files
from megazero.data.arrays import read_array
from megazero.files import append_suffix, is_there
from megazero.lines.contents import describe_files, key_of
from megazero.lines.jsonl import Block, LineError, expected_text_bytes
from megazero.lines.partial_shard import Shard
from megazero.lines.progress import Progress
from megazero.lines.results import BlockResult, filled_lines
from megazero.lines.resumable import Reason, useful_workers
from megazero.lines.workers import ordered_map

RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("place", "<i8")])
Places = npt.NDArray[np.int64]
"""File number and byte at which a line begins, in one number each."""

_MOST_FILES = 256  # of digests
_COPIES = 4  # of a file of digests while it is sorted
_OFFSET_BITS = 44  # 16 TB of text in a file, and half a million files
_STRETCH_BITS = 24  # 16 MB of text, hence 64 MB of places at most, where every line is a single character

DigestFunction = Callable[[bytes], bytes | None]
"""Picklable: a line -> what must not repeat, or None for a line that takes no part. What raises a LineError is listed too."""


def repeats_in(path: Path) -> Places:
    """The places of the `RECORD`s in a file that repeat one of a lower place; rising."""
    records = read_array(path, RECORD)
    records = records[np.lexsort((records["place"], records["low"], records["high"]))]
    same = (records["high"][1:] == records["high"][:-1]) & (records["low"][1:] == records["low"][:-1])
    return np.sort(records["place"][1:][same])


class RepeatedLines:
    """Lines to drop because they repeat an earlier one, and lines that hold no document: the drops of `run_blocks`.

    Args:
        folder: of the places, in a file for each stretch of the text that has any.
        reason: for which they are dropped.
    """

    def __init__(self, folder: Path, paths: Sequence[Path], reason: str) -> None:
        self._folder, self._reason = folder, (reason, None, None)
        self._numbers = {path: number for number, path in enumerate(paths)}
        self._stretch, self._places = -1, np.empty(0, np.int64)

    def add(self, places: Places) -> None:
        """Adds places, in rising order."""
        stretches = places >> _STRETCH_BITS
        starts = np.flatnonzero(np.diff(stretches, prepend=-1))
        for start, stop in pairwise([*starts.tolist(), len(places)]):
            with open(self._path(int(stretches[start])), "ab") as file:
                file.write(places[start:stop].tobytes())

    def __call__(self, block: Block) -> Mapping[int, Reason]:
        """The repeated lines of a block: {byte at which a line begins: reason}."""
        base = self._numbers[block.path] << _OFFSET_BITS
        found: dict[int, Reason] = {}
        for stretch in range(base + block.start >> _STRETCH_BITS, (base + block.stop - 1 >> _STRETCH_BITS) + 1):
            if stretch != self._stretch:
                path = self._path(stretch)
                places = read_array(path, np.int64) if is_there(path) else np.empty(0, np.int64)
                self._stretch, self._places = stretch, np.sort(places)
            first, last = np.searchsorted(self._places, (base + block.start, base + block.stop))
            found |= dict.fromkeys((self._places[first:last] - base).tolist(), self._reason)
        return found

    def _path(self, stretch: int) -> Path:
        return self._folder / f"{stretch}.places"


def corpus_key(paths: Sequence[Path], options: RunOptions) -> str:
    """A hash of all files. It belongs to the settings of every shard: a line may repeat one of any file."""
    return key_of({"inputs": describe_files(paths, options.workers)})


@contextmanager
def repeated_lines(
    step: str, shards: Sequence[Shard], digest: DigestFunction, reason: str, options: RunOptions
) -> Iterator[RepeatedLines]:
    """The lines of all files whose digest is that of an earlier line; what is known of them lies beside the first shard."""
    paths = list(dict.fromkeys(path for shard in shards for path in shard.inputs))
    folder = append_suffix(min(shard.record for shard in shards), ".repeats")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    (folder / "places").mkdir(parents=True)
    found = RepeatedLines(folder / "places", paths, reason)
    most_lines = expected_text_bytes(paths) // 2  # a letter and an end
    files = 1 + _COPIES * most_lines * RECORD.itemsize // options.memory_bytes
    workers = useful_workers(paths, options.block_bytes, options.workers_in_memory)

    def blocks() -> Iterator[Block]:
        for number, path in enumerate(paths):
            yield from document_blocks(path, options.block_bytes, 0, number, options.max_line_bytes)

    def records() -> Generator[np.ndarray, None, None]:
        with Progress(f"{step}: looking for repeats", sum(path.stat().st_size for path in paths)) as progress:
            with closing(ordered_map(partial(_digests, digest), blocks(), workers)) as results:
                for block, (part, bad) in results:
                    yield part
                    found.add(bad)
                    progress.update(len(part), block.stop - block.start, block.disk_bytes)

    try:
        with closing(records()) as parts:  # on a full disk the workers end at once
            with divided(folder / "digests", parts, "high", open_files(min(files, _MOST_FILES))) as made:
                for path in made:
                    found.add(repeats_in(path))
        yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _digests(digest: DigestFunction, block: Block) -> tuple[np.ndarray, Places]:
    """The `RECORD`s of the lines of a block, and the places of those that hold no document."""
    digests, places, bad = [], [], []
    for _, offset, line in filled_lines(block, BlockResult()):
        place = (block.file << _OFFSET_BITS) + offset
        try:
            content = digest(line)
        except LineError:
            bad.append(place)
            continue
        if content is not None:
            digests.append(hashlib.blake2b(content, digest_size=16).digest())
            places.append(place)
    records = np.empty(len(places), RECORD)
    pairs = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
    records["high"], records["low"], records["place"] = pairs[:, 0], pairs[:, 1], places
    return records, np.array(bad, np.int64)
