"""The files of a shard while it is being made: a killed run goes on from the last commit, and nothing half-made looks whole.

Under the shard's record name there are RECORD.partial.N (output N so far), RECORD.dropped.partial (a JSON line for each one left
out), and RECORD.partial.json, the journal: how long these were at the last commit, and how far the inputs were done.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megazero.files import append_suffix, file_named, locked, read_whole, remove_asides, sync_file, write_whole
from megazero.lines.contents import check_unchanged
from megazero.lines.jsonl import Block
from megazero.lines.results import BlockResult, Counts, report

logger = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 15
"""Of each file where hundreds are written at once: by default Python takes a file system's block, 4 MB on Lustre."""

JOURNAL = ".partial.json"
"""Ends the name of the journal."""
DROPPED_SUFFIX = ".dropped.jsonl"
"""Ends the name of the list of lines left out."""
Place = Callable[[list[int], list[bytes]], list[bytes]]
"""(how long each output of a shard is so far, what a worker has made of the next block) -> what is appended to each."""


@dataclass(frozen=True)
class Shard:
    """A piece of work that is done or not: files in, files out.

    Attributes:
        record: where what is known of it lies (RECORD.dropped.jsonl, for one).
    """

    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    record: Path


@dataclass
class Position:
    """How far input files are done."""

    input: int = 0  # number of the file
    offset: int = 0  # bytes of its text that are done, after decompression
    line: int = 0  # lines of it that are done
    disk_bytes: int = 0  # of it, on disk, that are read

    def remaining(self, paths: Sequence[Path]) -> list[tuple[int, Path, int]]:
        """(number, path, byte of the text from which on to read) of each file that is not done."""
        rest = list(enumerate(paths))[self.input :]
        return [(number, path, self.offset if number == self.input else 0) for number, path in rest]

    def disk_bytes_of(self, paths: Sequence[Path]) -> int:
        """Bytes on disk that are read of all files."""
        return sum(path.stat().st_size for path in paths[: self.input]) + self.disk_bytes

    def advance(self, block: Block, lines: int) -> int:
        """Goes behind a block of so many lines; how many lines of the file lie before it."""
        if block.file != self.input:
            self.input, self.line, self.disk_bytes = block.file, 0, 0
        before = self.line
        self.offset, self.line, self.disk_bytes = block.stop, before + lines, self.disk_bytes + block.disk_bytes
        return before


class PartialShard:
    """Appends to the files of a shard; what was appended after the last `commit` is cut off when another run goes on.

    Args:
        key: hash of what determines the shard; what a run with another one has left is started over.

    Attributes:
        paths: of the outputs so far and, last, of what was left out.
        sizes: bytes of each of these.
        position: how far the inputs are done.
        counts: what was counted up to there.

    Raises:
        ValueError: another process makes the same shard.
    """

    def __init__(self, shard: Shard, key: str) -> None:
        self.shard, self._key = shard, key
        for path in (shard.record, *shard.outputs):
            path.parent.mkdir(parents=True, exist_ok=True)
        names = [*(f".partial.{number}" for number in range(len(shard.outputs))), ".dropped.partial"]
        self.paths = [append_suffix(shard.record, name) for name in names]
        self._journal = append_suffix(shard.record, JOURNAL)
        with ExitStack() as held:  # the lock and the files, until `close` or an error below
            _lock(shard.record, held)
            if self._journal.exists():  # of a run that was killed
                for path in (self._journal, *shard.outputs):
                    remove_asides(path)
            committed = self._committed()
            self.sizes, self.position, self.counts = committed or ([0] * len(self.paths), Position(), Counts())
            self._files = [_cut(path, size, held) for path, size in zip(self.paths, self.sizes, strict=True)]
            if committed is None:
                self._write_journal()  # from now on, these files are known to be ours
            self._held = held.pop_all()
        self._commit_time = time.monotonic()
        if self.counts.text_bytes_in:
            logger.info("%s: continuing after %.1f MB", shard.record, self.counts.text_bytes_in / 1e6)

    def take(self, block: Block, result: BlockResult, strict: bool, place: Place | None) -> None:
        """Appends what was made of the next block of the inputs; raises as `report` does."""
        before = self.position.advance(block, result.counts.lines)
        dropped = report(block, before, result, self.counts.errors, strict)
        self.append(*(place(self.sizes[:-1], result.frames) if place else result.frames), dropped)
        self.counts.add(result.counts)

    def append(self, *parts: bytes) -> None:
        """Adds bytes to each file; they count as done from the next `commit` on."""
        for number, (path, file, part) in enumerate(zip(self.paths, self._files, parts, strict=True)):
            with file_named(path):
                file.write(part)
            self.sizes[number] += len(part)

    def commit(self, interval_s: float = 0.0) -> None:
        """Makes all that was appended survive a kill, unless the last commit is younger than `interval_s`."""
        if time.monotonic() - self._commit_time < interval_s:
            return
        for path, file in zip(self.paths, self._files, strict=True):
            sync_file(file, path)
        self._write_journal()
        self._commit_time = time.monotonic()

    def check_unchanged(
        self, paths: Sequence[Path], contents: Sequence[dict[str, Any]], threads: int | None = None
    ) -> None:
        """Raises as `contents.check_unchanged` does; then the files, of nobody knows which version of the inputs, are removed."""
        try:
            check_unchanged(paths, contents, threads)
        except ValueError:
            self.remove()
            raise

    def remove(self) -> None:
        """Removes what is left of the files, and the journal last: as long as it is there, they are known to be ours."""
        self.close()
        for path in (*self.paths, self._journal):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the files; what was committed stays."""
        self._held.close()

    def _write_journal(self) -> None:
        state = {"position": asdict(self.position), "counts": asdict(self.counts)}
        content = {"key": self._key, "sizes": self.sizes, "state": state}
        write_whole(self._journal, json.dumps(content).encode())

    def _committed(self) -> tuple[list[int], Position, Counts] | None:
        try:
            content = json.loads(read_whole(self._journal))
            found = [path.stat().st_size for path in self.paths]
            key, state, sizes = content["key"], content["state"], list(map(int, content["sizes"]))
            position, counts = Position(**state["position"]), Counts(**state["counts"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s is damaged (%s): starting over", self._journal, error)
            return None
        if key != self._key:
            logger.info("%s is of another run (other input or settings), which is given up", self._journal)
            return None
        if len(sizes) != len(found) or any(have < want for have, want in zip(found, sizes, strict=True)):
            logger.warning("%s: the files beside it are shorter than it says: starting over", self._journal)
            return None
        return sizes, position, counts


def give_up(shard: Shard) -> None:
    """Removes what a run that was stopped has left, if anything, of a shard that another run has finished.

    Raises:
        ValueError: another process makes the same shard.
    """
    if append_suffix(shard.record, JOURNAL).exists():
        PartialShard(shard, "of no run").remove()


def _lock(record: Path, held: ExitStack) -> None:
    try:  # runs over different inputs can have some outputs in common, which their own locks do not show
        held.enter_context(locked(append_suffix(record, ".writing"), wait=False))
    except BlockingIOError as error:
        raise ValueError(
            f"--output {record}: another process is writing it, from other inputs or with other settings. Wait for its end, or "
            "choose another --output."
        ) from error


def _cut(path: Path, size: int, held: ExitStack) -> BinaryIO:
    """The file opened to append after its first `size` bytes, until `held` is closed."""
    path.touch()
    file = open(path, "r+b", BUFFER_BYTES)  # noqa: SIM115 (closed by `held`)
    held.callback(_close, file)
    file.truncate(size)
    file.seek(size)
    return file


def _close(file: BinaryIO) -> None:
    # What is not flushed yet was not committed and is not wanted; on a full disk it could not be written either.
    with suppress(OSError):
        file.close()
