"""Hashes of the contents of files: whether an input is still what an output was made of, whatever its folder and time."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from megazero.cgroups import available_cores
from megazero.files import file_named
from megazero.lines.progress import Progress

_PIECE_BYTES = 1 << 26  # that one thread hashes; the hash of a file is that of its pieces' hashes
_READ_BYTES = 1 << 20
_TICK_NS = 2_000_000_000  # the coarsest clock of a file system


class _Identity(NamedTuple):
    """What changes when somebody writes to a file, or puts another one in its place."""

    path: str
    device: int
    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int

    @property
    def version(self) -> tuple[int, int, int]:
        """Of the content. Not the inode: some FUSE file systems number a file anew once the kernel has forgotten it."""
        return self.nbytes, self.modified_ns, self.changed_ns


# A pure cache: who writes to a file, or sets its times, changes the time of change, which no program can set back.
_known: dict[_Identity, str] = {}


def key_of(description: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a description that consists of JSON values."""
    return hashlib.sha256(json.dumps(description, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def describe_files(paths: Sequence[Path], threads: int | None = None) -> list[dict[str, Any]]:
    """{"name", "bytes", "pieces_sha256"} of each file, as JSON values; the hash covers every byte.

    A thread reads 1 to 2 GB/s; a file is read once in the life of the process unless somebody touches it.

    Args:
        threads: None takes one per core.

    Raises:
        ValueError: a file was changed while it was read.
    """
    before = [_identity(path) for path in paths]
    new = [identity for identity in dict.fromkeys(before) if identity not in _known]
    hashes = _hashes(new, threads or available_cores()) if new else ()
    found = dict(zip(new, hashes, strict=True))
    _check_same(paths, (each.version for each in before), (_identity(path).version for path in paths))
    for identity, content in found.items():
        if shows_changes(identity.changed_ns):
            _known[identity] = content
    return [
        {"name": path.name, "bytes": identity.nbytes, "pieces_sha256": found.get(identity) or _known[identity]}
        for path, identity in zip(paths, before, strict=True)
    ]


def shows_changes(changed_ns: int) -> bool:
    """Whether a file that was changed at this time would bear another one after a change from now on."""
    return time.time_ns() - changed_ns > _TICK_NS


def check_unchanged(paths: Sequence[Path], contents: Sequence[dict[str, Any]], threads: int | None = None) -> None:
    """Raises a ValueError where files are no longer what `describe_files` has said: what was made of them may be of both."""
    _check_same(paths, contents, describe_files(paths, threads))


def _check_same(paths: Sequence[Path], before: Iterable[object], now: Iterable[object]) -> None:
    for path, old, new in zip(paths, before, now, strict=True):
        if new != old:
            raise ValueError(f"{path} was changed while it was read. Wait until it is whole, and start again.")


def _identity(path: Path) -> _Identity:
    stat = path.stat()
    return _Identity(str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _hashes(files: Sequence[_Identity], threads: int) -> Iterator[str]:
    pieces = [(file.path, start) for file in files for start in range(0, file.nbytes, _PIECE_BYTES)]
    total = sum(file.nbytes for file in files)
    with Progress("checking input", total) as progress, ThreadPoolExecutor(threads) as pool:
        done = pool.map(_hash_piece, pieces)
        for file in files:
            whole = hashlib.sha256()
            for start in range(0, file.nbytes, _PIECE_BYTES):
                whole.update(next(done))
                length = min(_PIECE_BYTES, file.nbytes - start)
                progress.update(0, length, length)
            yield whole.hexdigest()


def _hash_piece(piece: tuple[str, int]) -> bytes:
    path, start = piece
    digest, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
    with file_named(Path(path)), open(path, "rb", buffering=0) as file:
        file.seek(start)
        left = _PIECE_BYTES
        while count := file.readinto(memoryview(buffer)[: min(left, _READ_BYTES)]):  # 0 at the end of file or piece
            digest.update(memoryview(buffer)[:count])
            left -= count
    return digest.digest()
