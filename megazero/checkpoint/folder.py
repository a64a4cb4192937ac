"""The directory that a job saves in (docs/checkpoint_format.md): written so that nothing is lost, by one job at a time.

A checkpoint is written into a directory aside, made durable, and renamed; `latest` moves last. So a save that dies leaves
the previous checkpoint in place.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from megazero.checkpoint.format import CheckpointError, index_bytes
from megazero.checkpoint.standalone import SCRIPT, place_script, script_text
from megazero.checkpoint.tags import latest_tag, list_tags, replaced_path, step_of, tag_at, tags_of_jobs
from megazero.checkpoint.tensor_file import naming
from megazero.files import (
    NO_LOCKS,
    append_suffix,
    is_still,
    open_lock,
    remove_asides,
    sync_folder,
    warn_of_no_locks,
    write_whole,
)

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0  # a job that has been killed lets go when the system has taken its memory away


class DirectoryInUseError(OSError):
    """Another job saves its checkpoints in the same directory."""


class Keep(NamedTuple):
    """Which checkpoints with the tags of jobs stay after a save."""

    last: int = 0  # the newest ones; 0: all
    every: int = 0  # and those whose steps are multiples of this; 0: no others


class CheckpointFolder:
    """One directory of checkpoints, as seen by the process that writes there: the first rank of a job."""

    # Of all engines of this process, whose background saves the lock on the directory does not keep apart. They share it, too:
    # who closes a file gives up all locks that the process has on it.
    _being_written: ClassVar[set[Path]] = set()
    _users: ClassVar[Counter[int]] = Counter()  # of each lock, by its descriptor
    _one_at_a_time: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        self._lock: int | None = None
        self._deleting: threading.Thread | None = None

    def claim(self) -> bool:
        """Makes the directory this job's, until the process ends or `release`, and clears what saves that died have left.

        Returns:
            Whether it was not yet: a second time nothing is done.

        Raises:
            DirectoryInUseError: another job saves here.
            OSError: it cannot be created or written.
        """
        if self._lock is not None and is_still(self.path / ".lock", self._lock):
            self._acquire(self._lock)  # a copy of the directory, which reads and closes the file, has given it up
            return False
        self.release()  # if somebody has deleted the directory
        with self._one_at_a_time:
            shared = next((lock for lock in +self._users if is_still(self.path / ".lock", lock)), None)
            self._lock = self._take_lock() if shared is None else shared
            self._users[self._lock] += 1
            with naming(self.path / ".lock"):
                os.ftruncate(self._lock, 0)
                os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            self._clear()
            self._rehearse()
        script_text()  # is kept: by the first save, hours from now, the library's files may have moved
        return True

    def _take_lock(self) -> int:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = open_lock(self.path / ".lock")
        try:
            self._acquire(lock)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _acquire(self, lock: int) -> None:
        """Waits a while for a job that may be ending."""
        deadline: float | None = None
        while not self._has_got(lock):
            owner = "unknown"
            with suppress(PermissionError):  # an SMB share lets nobody else read what is locked
                owner = os.pread(lock, 200, 0).decode(errors="replace").strip() or owner
            if deadline is None:
                deadline = time.monotonic() + PATIENCE_S
                logger.info("%s: another job (%s) saves here; waiting in case it is ending", self.path, owner)
            elif time.monotonic() >= deadline:
                raise DirectoryInUseError(
                    f"{self.path}: another job ({owner}) is saving checkpoints here, and one would overwrite the other's. "
                    "Stop it, or give this job another --save."
                )
            time.sleep(0.1)

    def _has_got(self, lock: int) -> bool:
        """Whether this process has the lock now. Where the file system has no locks, it warns, and nobody has."""
        try:  # children do not inherit it, and NFS has it
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX leaves it to the system which of the two
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise OSError(error.errno, f"could not lock {self.path / '.lock'}: {error.strerror}") from error
            warn_of_no_locks(self.path)
        return True

    def _rehearse(self) -> None:
        """Does what a save ends with, and the mounts of some object stores cannot do: a job learns it before it trains."""
        aside, final = self.aside(uuid.uuid4().hex), self.aside(uuid.uuid4().hex)
        try:
            aside.mkdir()
            for _ in range(2):  # the second replaces the first
                write_whole(aside / "latest", b"")
            os.rename(aside, final)
        except OSError as error:
            text = f"replacing a file and renaming a folder in {self.path}, which every save does, failed: {error.strerror}"
            raise OSError(error.errno, f"{text}. Name a folder on a file system that can") from error
        finally:
            for left in (aside, final):
                shutil.rmtree(left, ignore_errors=True)

    def release(self) -> None:
        """Lets other jobs save here, when nothing is being deleted any more."""
        self.wait()
        lock, self._lock = self._lock, None
        if lock is not None:
            with self._one_at_a_time:
                self._users[lock] -= 1
                if not self._users[lock]:
                    os.close(lock)

    def wait(self) -> None:
        """Returns when what the last save has made superfluous is deleted."""
        if self._deleting is not None:
            self._deleting.join()
            self._deleting = None

    def aside(self, tag: str) -> Path:
        """Where the checkpoint `tag` is written before it is whole."""
        return self.path / f".{tag}.partial"

    def prepare(self, tag: str) -> None:
        """Makes the directory aside, in a claimed one, and clears what saves that died have left."""
        with self._one_at_a_time:
            self._clear()
            self.aside(tag).mkdir()
            self._being_written.add(self.aside(tag).resolve())

    def _clear(self) -> None:
        """Deletes what saves that died have left, and ends the one that died between its two renames."""
        for partial in self.path.glob(".*.partial"):
            if partial.resolve() not in self._being_written:
                _remove(partial)
        for name in ("latest", SCRIPT):
            remove_asides(self.path / name)
        for replaced in self.path.glob(".*.replaced"):
            final = self.path / tag_at(replaced)
            is_half = _is_ours(final) and not (final / "index.json").exists()  # `_move` died while it deleted it
            if final.exists() and not is_half:
                _remove(replaced)
            else:
                _remove(final)
                os.rename(replaced, final)

    def publish(self, tag: str, index: dict[str, Any], save_latest: bool, keep: Keep) -> None:
        """Makes the checkpoint aside, whose files are written and synced, the newest.

        What it replaces, and what is not to be kept, is out of the way then, and deleted in the background: until `wait`, the
        next save, `release` or the process's end. If the process dies before, the next job that claims the directory deletes it.
        """
        aside, final, replaced = self.aside(tag), self.path / tag, replaced_path(self.path, tag)
        with self._one_at_a_time:
            with naming(aside / "index.json"):
                write_whole(aside / "index.json", index_bytes(index))
            with naming(self.path / SCRIPT):
                place_script(self.path)
            if os.path.lexists(final) and not _is_ours(final):  # also a link to what is gone
                other = append_suffix(final, ".other")
                while os.path.lexists(other):
                    other = append_suffix(other, ".other")
                logger.warning("%s is no checkpoint that was saved by this library: it is %s from now on", final, other)
                _move(final, other)
            elif final.exists():  # the same step saved twice: the newer content wins
                _move(final, replaced)
            os.rename(aside, final)
            sync_folder(self.path)
            if save_latest:
                self.name_latest(tag)
            self._being_written.discard(aside.resolve())
            superfluous = [replaced] if os.path.lexists(replaced) else []
            try:
                superfluous += self._set_aside_older(tag, keep)
            except OSError as error:  # the next save looks again
                logger.warning("could not look for what is not to be kept beside %s: %s", final, error)
        if superfluous:  # deleting takes a fifth of the time of writing
            deleting = threading.Thread(target=self._delete, args=(superfluous,), name=f"delete before {tag}")
            try:
                deleting.start()
                self._deleting = deleting
            except RuntimeError:  # no more threads can be started
                self._delete(superfluous)

    def name_latest(self, tag: str) -> None:
        """Makes a checkpoint that is whole the one that jobs continue from."""
        with naming(self.path / "latest"):
            write_whole(self.path / "latest", tag.encode())

    def _delete(self, paths: list[Path]) -> None:
        with self._one_at_a_time:
            for path in paths:
                if path.resolve() not in self._being_written:  # another engine of this process may have taken the name
                    _remove(path)

    def discard(self, tag: str) -> None:
        """Frees the room of a save that has failed."""
        self._being_written.discard(self.aside(tag).resolve())
        _remove(self.aside(tag))

    def _set_aside_older(self, newest: str, keep: Keep) -> list[Path]:
        """Makes leftovers of the checkpoints that are not to be kept, and returns where they are.

        What `latest` names is never among them, nor what has just been written.
        """
        tags = tags_of_jobs(list_tags(self.path), newest) if keep.last else []
        kept, leftovers = {newest}, []
        with suppress(CheckpointError):
            kept.add(latest_tag(self.path) or newest)
        older = [tag for tag in tags if tag not in kept]
        for tag in older[: max(0, len(tags) - keep.last)]:
            stays = keep.every and step_of(tag) % keep.every == 0
            if not stays and not (self.path / tag).is_symlink():
                with suppress(OSError):  # if deleting dies halfway, nobody takes what is left for whole
                    os.rename(self.path / tag, self.aside(tag))
                    leftovers.append(self.aside(tag))
        return leftovers


def _is_ours(path: Path) -> bool:
    """Whether a save, and no other system and no user, has put there what is there, even if its index is lost."""
    if not path.is_dir():
        return False
    names = os.listdir(path)
    return not names or any(name == "index.json" or name.startswith("rank_") for name in names)


def _move(path: Path, to: Path) -> None:
    """Renames it. What lies in the image of a container, where overlayfs renames no folder, is copied and deleted."""
    try:
        os.rename(path, to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copytree(path, to, symlinks=True)
        _remove_folder(path)


def _remove_folder(path: Path) -> None:
    """Deletes it, the index first, so that nobody takes what is left for whole if the process dies meanwhile."""
    (path / "index.json").unlink(missing_ok=True)
    shutil.rmtree(path)


def _remove(path: Path) -> None:
    """Deletes what is there, whatever it is. Where that fails, a job goes on without the space; but the name is free.

    On NFS, a folder is not empty while a process of this machine reads a file that was in it.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            _remove_folder(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("could not delete %s: %s", path, error)
        with suppress(OSError):
            os.rename(path, path.with_name(f".{uuid.uuid4().hex}.partial"))  # which the next save tries to delete
