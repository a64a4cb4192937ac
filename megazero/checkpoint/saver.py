"""Saves a checkpoint from all ranks, at once or in the background: each writes what it owns, the first makes it one."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megazero import comm
from megazero.checkpoint.rank_files import Snapshot, whole_index, write_rank_file
from megazero.checkpoint.store import CheckpointFolder
from megazero.checkpoint.writer import naming

logger = logging.getLogger(__name__)


class Saver:
    """Saves the checkpoints of one job. Every method is a collective over the world.

    Its own group of processes carries what the ranks tell each other, so that a save in the background does not meet training.
    """

    def __init__(self) -> None:
        self._group: comm.ProcessGroup | None = None
        self._folders: dict[Path, CheckpointFolder] = {}  # all that have been claimed
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._what = ""

    def save(
        self,
        snapshot: Snapshot,
        index: dict[str, Any],
        directory: str | Path,
        tag: str,
        *,
        save_latest: bool = True,
        keep_last: int = 0,
        in_background: bool = False,
    ) -> Path:
        """Writes one checkpoint and returns its directory, where it will be when a save in the background is done.

        Args:
            index: all of it but what `whole_index` adds. That of the first rank counts.
            keep_last: afterwards delete all but this many newest checkpoints; 0 keeps all.
            in_background: copy to host memory now and write while training goes on. `wait`, and the next save, wait for it.

        Raises:
            OSError: a file could not be written, on whichever rank; the checkpoint before stays the latest.
            DirectoryInUseError: another job saves there.
            Exception: what went wrong in the background since the last call.
        """
        self.wait()
        folder, path = self.claim(directory), Path(directory) / tag

        def publish() -> None:
            parts = _parts(folder.aside(tag), torch.distributed.get_world_size())
            folder.publish(tag, whole_index(parts, index), save_latest, keep_last)

        try:
            if in_background:
                staged = comm.together(snapshot.staged, self._group)  # one rank's host may have no room for it
                self._what = str(path)
                arguments = (staged, folder, tag, publish)
                self._thread = threading.Thread(target=self._write_behind, args=arguments, name=f"save {tag}")
                self._thread.start()
            else:
                self._write(snapshot, folder, tag, publish)
        except comm.OtherRankError as error:
            raise OSError(f"the checkpoint {folder.path / tag} was not saved: {error}") from error
        return path

    def claim(self, directory: str | Path) -> CheckpointFolder:
        """Makes the directory this job's, before hours are spent on what could not be saved.

        Raises:
            OSError: it cannot be written, or is another job's (DirectoryInUseError on the first rank).
        """
        if self._group is None:
            self._group = comm.new_object_group()
        path = Path(directory).absolute()  # a job may change its working directory
        folder = self._folders.setdefault(path, CheckpointFolder(path))
        try:
            comm.together(folder.claim if torch.distributed.get_rank() == 0 else None, self._group)
        except comm.OtherRankError as error:
            raise OSError(f"{path}: no checkpoint can be saved there: {error}") from error
        return folder

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
            kind = OSError if isinstance(error, (OSError, comm.OtherRankError)) else RuntimeError
            raise kind(f"the checkpoint {self._what} was not saved: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Waits, and lets other jobs save in the directory."""
        try:
            self.wait()
        finally:
            for folder in self._folders.values():
                folder.release()
            self._folders.clear()

    def _write_behind(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except BaseException as error:
            logger.error("the checkpoint %s was not saved: %s: %s", self._what, type(error).__name__, error)
            self._error = error

    def _write(self, snapshot: Snapshot, folder: CheckpointFolder, tag: str, publish: Callable[[], None]) -> None:
        rank, group = torch.distributed.get_rank(), self._group
        is_first = rank == 0
        comm.together((lambda: folder.prepare(tag)) if is_first else None, group)
        try:
            comm.together(lambda: _write_part(folder.aside(tag), rank, snapshot), group)
            comm.together(publish if is_first else None, group)
        except BaseException:
            if is_first:
                folder.discard(tag)
            raise


def _note(aside: Path, rank: int) -> Path:
    """Where a rank tells the first one what the index has to know of its file."""
    return aside / f"rank_{rank:05d}.json"


def _write_part(aside: Path, rank: int, snapshot: Snapshot) -> None:
    aside.mkdir(exist_ok=True)  # the first rank has made it; some network file systems show that late
    part, note = write_rank_file(aside, rank, snapshot), _note(aside, rank)
    with naming(note):
        note.write_text(json.dumps(part))


def _parts(aside: Path, world_size: int) -> Iterator[dict[str, Any]]:
    """What `_write_part` has noted on every rank; the notes are deleted."""
    for rank in range(world_size):
        note = _note(aside, rank)
        if not note.is_file():
            raise OSError(
                f"rank {rank} has written its part of the checkpoint, but {note} is not there: every node must see --save."
            )
        part = json.loads(note.read_text())
        note.unlink()
        yield part
