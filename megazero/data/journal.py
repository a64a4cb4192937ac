"""Files that grow together, and a journal of how far they are done: a killed run goes on from its last commit."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from megazero.files import written_aside

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FullDiskError(OSError):
    """The disk is full; the message says what was written and what to do."""


@contextmanager
def full_disk_named(what: str, kept: str = "what is done is kept") -> Iterator[None]:
    """Turns the error of a full disk into a FullDiskError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, FullDiskError):
            raise
        message = f"{error.strerror} while writing {what}: make room and start again, {kept}"
        raise FullDiskError(error.errno, message) from error


def check_ours(outputs: Sequence[Path], flag: str, *vouchers: Path) -> None:
    """Raises a ValueError where an output exists that no run of these tools has made: it would be overwritten.

    Args:
        flag: that names the output, for the message.
        vouchers: records of finished runs, and journals of unfinished ones: where one of them is there, the outputs are ours.
    """
    found = [path for path in outputs if path.exists()]
    if found and not any(path.exists() for path in vouchers):
        raise ValueError(
            f"{flag} {found[0]} exists and was not made by this tool. Move it away, or choose another name."
        )


class JournaledFiles:
    """Appends to files; what was appended after the last `commit` is cut off when another run goes on.

    Args:
        journal: says how long the files were at the last commit, and what its caller wanted to know of it.
        key: hash of the input and settings; what a run with another one has left is started over.

    Attributes:
        state: what the last commit has recorded; None where there is nothing to go on from.
        sizes: bytes of each file.
    """

    def __init__(self, journal: Path, paths: Sequence[Path], key: str) -> None:
        self.journal, self.paths, self._key = journal, list(paths), key
        self.state: dict[str, Any] | None = None
        self.sizes = [0] * len(self.paths)
        if (committed := self._committed()) is not None:
            self.state, self.sizes = committed
        self._files: list[BinaryIO] = [_cut(path, size) for path, size in zip(self.paths, self.sizes, strict=True)]
        self._write_journal()  # from now on, these files are known to be ours
        self._commit_time = time.monotonic()

    def append(self, *parts: Any) -> None:  # noqa: ANN401 (anything with bytes in it)
        """Adds bytes to each file; they count as done from the next `commit` on."""
        for number, (file, part) in enumerate(zip(self._files, parts, strict=True)):
            file.write(part)
            self.sizes[number] += memoryview(part).nbytes

    def commit(self, state: dict[str, Any], interval_s: float = 0.0) -> None:
        """Makes all that was appended survive a kill, unless the last commit is younger than `interval_s`.

        Args:
            state: JSON values; what the next run is told.
        """
        if time.monotonic() - self._commit_time < interval_s:
            return
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        self.state = state
        self._write_journal()
        self._commit_time = time.monotonic()

    def close(self) -> None:
        """Closes the files; what was committed stays."""
        for file in self._files:
            # What is not flushed yet was not committed and is not wanted; on a full disk it could not be written either.
            with suppress(OSError):
                file.close()

    def remove(self) -> None:
        """Removes what is left of the files, and the journal last: as long as it is there, they are known to be ours."""
        self.close()
        for path in (*self.paths, self.journal):
            path.unlink(missing_ok=True)

    def _write_journal(self) -> None:
        content = {"key": self._key, "sizes": self.sizes, "state": self.state}
        with written_aside(self.journal) as file:
            file.write(json.dumps(content).encode())

    def _committed(self) -> tuple[dict[str, Any], list[int]] | None:
        try:
            content = json.loads(self.journal.read_bytes())
            found = [path.stat().st_size for path in self.paths]
            key, state, sizes = content["key"], content["state"], list(map(int, content["sizes"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s is damaged (%s): starting over", self.journal, error)
            return None
        if key != self._key:
            logger.info("%s is of another run (other input or settings): starting over", self.journal)
            return None
        if len(sizes) != len(found) or any(have < want for have, want in zip(found, sizes, strict=True)):
            logger.warning("%s: the files beside it are shorter than it says: starting over", self.journal)
            return None
        return None if state is None else (state, sizes)


def _cut(path: Path, size: int) -> BinaryIO:
    """The file opened to append after its first `size` bytes."""
    path.touch()
    file = open(path, "r+b")  # noqa: SIM115 (closed by JournaledFiles.close)
    file.truncate(size)
    file.seek(size)
    return file
