"""Saves a checkpoint from all ranks, at once or in the background: each writes what it owns, the first makes it one."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from megazero import comm
from megazero.checkpoint.folder import CheckpointFolder, Keep
from megazero.checkpoint.tensor_file import naming
from megazero.checkpoint.writer import Snapshot, rank_file, whole_index, write_rank_file

logger = logging.getLogger(__name__)

# Network file systems remember for up to a minute that a directory, which ranks have looked for at their start, was not there.
SEEN_WITHIN_S = 60.0
# Directories at a time: a lock takes a descriptor, and a script may save in a new directory every time.
MOST_CLAIMED = 64


@dataclass
class _Line:
    """Carries what ranks tell each other of saves, apart from training: one line for all savers, as groups stay with the world.

    They take turns, in an order that is the same on every rank: what two of them say at once would mix.
    """

    group: comm.ProcessGroup
    in_background: threading.Thread | None = None  # whose turn it is


_lines: WeakKeyDictionary[comm.ProcessGroup, _Line] = WeakKeyDictionary()  # by world


class Saver:
    """Saves the checkpoints of one engine. Every method is a collective over the world."""

    _line: _Line  # of the world, from the first claim on

    def __init__(self) -> None:
        self._folders: dict[Path, CheckpointFolder] = {}  # those that are claimed, the last one last
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None  # of the save in the background

    def save(
        self,
        snapshot: Snapshot,
        index: dict[str, Any],
        directory: str | Path,
        tag: str,
        *,
        save_latest: bool,
        keep: Keep,
        in_background: bool,
    ) -> Path:
        """Writes one checkpoint and returns its directory, where it will be when a save in the background is done.

        Args:
            index: all of it but what `whole_index` adds. That of the first rank counts.
            keep: afterwards the other checkpoints are deleted.
            in_background: copy to host memory now and write while training goes on. `wait` waits for it, and so does the next
                save, of whichever engine.

        Raises:
            OSError: a file could not be written, on whichever rank; the checkpoint before stays the latest.
            DirectoryInUseError: another job saves there.
            Exception: what went wrong in the background since the last call.
        """
        self.wait()
        folder, path = self.claim(directory), Path(directory) / tag
        write = partial(self._write, folder, tag, index, save_latest, keep)
        try:
            if in_background:
                staged = comm.together(snapshot.staged, self._line.group)  # one rank's host may have no room for it
                thread = threading.Thread(target=self._behind, args=(write, staged, path), name=f"save {tag}")
                try:
                    thread.start()
                    self._thread = self._line.in_background = thread
                except RuntimeError:  # no more threads can be started; the other ranks save
                    self._behind(write, staged, path)
            else:
                write(snapshot)
        except comm.OtherRankError as error:
            raise OSError(f"the checkpoint {folder.path / tag} was not saved: {error}") from error
        return path

    def claim(self, directory: str | Path) -> CheckpointFolder:
        """Makes the directory this job's, before hours are spent on what could not be saved.

        It stays so until `close`, or until `MOST_CLAIMED` others have been claimed since.

        Raises:
            OSError: it cannot be written, a rank does not see it, or another job has it (DirectoryInUseError on the first rank).
        """
        self._line = _free_line()
        path = Path(directory).absolute()  # a job may change its working directory
        self._folders[path] = folder = self._folders.pop(path, CheckpointFolder(path))
        if len(self._folders) > MOST_CLAIMED:
            self._folders.pop(next(iter(self._folders))).release()
        try:
            sign = self._on_first_rank(partial(_claim, folder))
            if (name := comm.all_gathered_objects(sign, self._line.group)[0]) is not None:
                self._refuse_unshared(path, name)
        except BaseException as error:
            folder.release()  # who tries again is checked again
            if isinstance(error, comm.OtherRankError):
                raise OSError(f"{path}: no checkpoint can be saved there: {error}") from error
            raise
        return folder

    def _refuse_unshared(self, path: Path, sign: str) -> None:
        """Returns if every rank sees the file `sign` of the first rank in its own `path`, and deletes it."""
        found = comm.all_gathered_objects((_is_seen(path / sign), socket.gethostname(), str(path)), self._line.group)
        if self._is_first:
            with suppress(OSError):  # the next job clears it
                (path / sign).unlink()
        blind = [(rank, host, where) for rank, (sees, host, where) in enumerate(found) if not sees]
        if blind:
            (_, host_0, path_0), (rank, host, where) = found[0], blind[0]
            more = f", nor do {len(blind) - 1} more ranks" if len(blind) > 1 else ""
            raise OSError(
                f"rank {rank} on {host} does not see in {where} what rank 0 on {host_0} has just put into {path_0}{more}. "
                "All ranks write their parts of a checkpoint there: choose a directory on a file system that all nodes share."
            )

    def wait(self) -> None:
        """Returns when nothing is being written or deleted in the background.

        Raises:
            Exception: what went wrong there.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        for folder in self._folders.values():
            folder.wait()
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits, and lets other jobs save in the directory."""
        try:
            self.wait()
        finally:
            for folder in self._folders.values():
                folder.release()
            self._folders.clear()

    def _write(
        self,
        folder: CheckpointFolder,
        tag: str,
        index: dict[str, Any],
        save_latest: bool,
        keep: Keep,
        snapshot: Snapshot,
    ) -> None:
        aside = folder.aside(tag)
        self._on_first_rank(lambda: folder.prepare(tag))
        try:
            comm.together(partial(_write_part, aside, snapshot), self._line.group)
            self._on_first_rank(lambda: folder.publish(tag, whole_index(_parts(aside), index), save_latest, keep))
        except BaseException:
            if self._is_first:
                folder.discard(tag)
            raise

    def _behind(self, write: Callable[[Snapshot], None], snapshot: Snapshot, path: Path) -> None:
        try:
            write(snapshot)
        except BaseException as error:
            del snapshot
            _forget_frames(error)  # which refer to it, too
            # Without a lost rank, there may be a next save, on all ranks.
            has_lost_rank = isinstance(error, RuntimeError) and not isinstance(error, comm.OtherRankError)
            kind = RuntimeError if has_lost_rank else OSError
            why = f"{type(error).__name__}: {error}"
            if comm.is_destroyed(self._line.group):
                why = "its process group was destroyed meanwhile. Call wait_for_checkpoint() before"
            self._error = kind(f"the checkpoint {path} was not saved: {why}")
            self._error.__cause__ = error
            if self._is_first:  # where the other ranks' errors arrive, too
                logger.error("%s", self._error)

    def on_first_rank(self, action: Callable[[], None]) -> None:
        """Runs `action`, which may write for long, on the first rank. The others wait as for a save, not in a collective of NCCL.

        Raises:
            OtherRankError: the first rank's error, which is raised there.
        """
        self._line = _free_line()
        self._on_first_rank(action)

    def _on_first_rank(self, action: Callable[[], Any]) -> Any:
        return comm.together(action if self._is_first else None, self._line.group)

    @property
    def _is_first(self) -> bool:
        return self._line.group.rank() == 0  # also after a script has destroyed the world


def _free_line() -> _Line:
    """The line of this world, when nothing is saved in the background any more. Collective over the world."""
    line = _lines.get(world := comm.world())
    if line is None:
        line = _lines[world] = _Line(comm.new_object_group())
    if line.in_background is not None:
        line.in_background.join()
        line.in_background = None
    return line


def _claim(folder: CheckpointFolder) -> str | None:
    """Claims the directory, and returns the name of a new file by which other ranks know it; None where it has been claimed."""
    if not folder.claim():
        return None
    sign = folder.aside(uuid.uuid4().hex)  # nobody has looked for it, and it is cleared where this rank dies
    sign.touch()
    return sign.name


def _forget_frames(error: BaseException) -> None:
    """Frees what the calls that an error has ended were working on, also those of the errors that led to it.

    What a lambda refers to stays with its frame.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__


def _is_seen(path: Path) -> bool:
    """Whether a file is there, or comes while a network file system may not know of it yet."""
    end = time.monotonic() + SEEN_WITHIN_S
    while not (is_there := os.path.exists(path)) and time.monotonic() < end:
        time.sleep(0.1)
    return is_there


def _note(aside: Path, rank: int) -> Path:
    """Where a rank tells the first one what the index has to know of its file."""
    return (aside / rank_file(rank)).with_suffix(".json")


def _write_part(aside: Path, snapshot: Snapshot) -> None:
    rank = torch.distributed.get_rank()
    aside.mkdir(exist_ok=True)  # the first rank has made it; some network file systems show that late
    part, note = write_rank_file(aside, rank, snapshot), _note(aside, rank)
    with naming(note):
        note.write_text(json.dumps(part))


def _parts(aside: Path) -> Iterator[dict[str, Any]]:
    """What `_write_part` has noted on every rank; the notes are deleted."""
    for rank in range(torch.distributed.get_world_size()):
        note = _note(aside, rank)
        if not note.is_file():
            raise OSError(
                f"rank {rank} has written its part of the checkpoint, but {note} is not there: every node must see --save."
            )
        part = json.loads(note.read_text())
        note.unlink()
        yield part
