"""Files that are whole or absent: written under another name, synced, then renamed; and one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import logging
import os
import re
import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import spawn
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

# What a file system says that has no locks; EINVAL is POSIX's word for it (fcntl).
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_SAMPLE_BYTES = 1 << 16
_MANY_FILES = 1 << 16  # not the most there is: programs that a process starts may close every number up to its limit


def append_suffix(prefix: str | Path, suffix: str) -> Path:
    """`prefix` + `suffix` as a path; unlike Path.with_suffix it never cuts off a part of the name ("corpus.v2" + ".bin")."""
    return Path(f"{prefix}{suffix}")


def aside_name(path: Path) -> Path:
    """A new name beside `path`, for what is to become it. Not of the process's id, which containers on one folder share."""
    return append_suffix(path, f".tmp{secrets.token_hex(4)}")


def is_aside(path: Path) -> bool:
    """Whether `aside_name` gave the file its name: it is being written, or a killed process has left it."""
    return re.fullmatch(r"\.tmp[0-9a-f]{8}", path.suffix) is not None


def remove_asides(path: Path) -> None:
    """Removes what killed processes have written aside for `path`, which no other process may be writing."""
    for aside in path.parent.glob(f"{glob.escape(path.name)}.tmp*"):
        if is_aside(aside) and not aside.is_dir():  # which is a user's, as a checkpoint under such a tag
            aside.unlink(missing_ok=True)


def is_there(path: Path) -> bool:
    """Whether there is something at `path`. Where that cannot be known now, an OSError: Path.exists says no, from 3.14 on."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def nearest_there(path: str | Path) -> Path:
    """The path itself, if it exists, or the nearest folder above it that does."""
    there = Path(path).absolute()
    while not os.path.exists(there):
        there = there.parent
    return there


def allow_many_files() -> None:
    """Raises this process's limit of open files, usually 1024, as far as it may (a mapped file counts as open)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    while soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return
        except ValueError:  # a kernel may allow less than the hard limit says: macOS, kern.maxfilesperproc
            most //= 2


@contextmanager
def file_named(path: Path) -> Iterator[None]:
    """Adds the file to an error of a call inside that knows only its descriptor: "Input/output error" alone helps nobody."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def sync_file(file: BinaryIO, path: Path) -> None:
    """Makes what was written to the open file survive a power failure; an error names it by `path`."""
    with file_named(path):
        try:
            file.flush()
        except OSError:
            with suppress(OSError):  # it would be the caller's close that fails again, in the place of this error
                file.close()
            raise
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` survive a power failure, if the file system can sync folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with file_named(folder):
            os.fsync(descriptor)
    except OSError as error:
        # Some network and shared folders refuse: they sync on their own, or not at all (fsync(2)).
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """A binary file that becomes `path` if the block succeeds, and leaves nothing behind if it raises.

    Readers and other writers of `path` see the old file or the whole new one, never a part of it.
    """
    aside = aside_name(path)
    try:
        with open(aside, "wb") as file:
            yield file
            sync_file(file, path)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Writes `content` to the file `path`, with `written_aside`."""
    with written_aside(path) as file, file_named(path):
        file.write(content)


def read_whole(path: Path) -> bytes:
    """What a small file holds; an error names it, also that of a disk that fails."""
    with file_named(path):
        return path.read_bytes()


def write_json(path: Path, content: Any, indent: int = 1) -> None:
    """Writes `content` to the file `path` as human-readable JSON, with `written_aside`."""
    write_whole(path, json.dumps(content, indent=indent).encode() + b"\n")


@contextmanager
def mapping(path: Path) -> Iterator[None]:
    """Tells with the error of a mapping inside what was to be mapped: "No such device" alone helps nobody."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        advice = "Its file system must let files be mapped: keep it on one that does"
        if error.errno in (errno.EMFILE, errno.ENOMEM):  # a mapped file counts as an open one
            advice = "Raise the limits of open files and of memory (ulimit -n, -v)"
        raise OSError(error.errno, f"could not map {path} into memory: {error.strerror}. {advice}") from error


def open_lock(path: Path) -> int:
    """A descriptor of the lock file `path`, made if it is not there, and neither changed nor reached through a link.

    Raises:
        OSError: it cannot be made or opened, or a link stands in its place, which might lead to a file of the user's.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if not path.is_symlink():
            raise
        raise OSError(error.errno, f"{path} is a link, which a lock must not be: remove it") from error


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Holds the lock file `path`, after waiting for any other process that holds it; a killed holder's lock is released.

    On a file system without locks it warns and continues; then no other process may write the same output.

    Args:
        wait: wait for another process; if False, raise instead.

    Raises:
        BlockingIOError: another process holds the file, and `wait` is False.
        RuntimeError: another process holds the file, and this one is a worker whose main script locks it unguarded.
    """
    while True:
        lock = open_lock(path)
        try:
            with file_named(path):
                _lock(lock, path, wait)
            if is_still(path, lock):
                break
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # the previous holder removed the file while we waited for it: lock the new one
    try:
        yield
    finally:
        with suppress(OSError):  # shares that keep open files in their places; who comes next locks what is left
            path.unlink()
        os.close(lock)


def _lock(lock: int, path: Path, wait: bool) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise
        # Raises where this process is just starting and runs the main script again: perhaps the holder waits for it.
        spawn.get_preparation_data("")
        logger.info("waiting for another process that holds %s", path)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warn_of_no_locks(path.parent)


@cache
def warn_of_no_locks(folder: Path) -> None:
    """Says once of a folder that nothing keeps a second writer away."""
    logger.warning("%s: this file system has no locks; make sure that no second process writes these outputs", folder)


def is_still(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one at `path`, which another process may have removed or replaced."""
    with suppress(FileNotFoundError):
        there, ours = os.stat(path), os.fstat(descriptor)
        # Some FUSE file systems number a file anew at each question, which then tells nothing.
        return os.path.samestat(there, ours) or not os.path.samestat(ours, os.fstat(descriptor))
    return False


def fingerprint(path: Path) -> dict[str, int | str]:
    """Size, time and a hash of three samples, which tell versions of a large file apart without reading all of it."""
    stat = path.stat()
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for start in (0, stat.st_size // 2, max(0, stat.st_size - _SAMPLE_BYTES)):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "samples_sha256": digest.hexdigest()}
