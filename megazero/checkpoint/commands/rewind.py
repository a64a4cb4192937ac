"""Makes an earlier checkpoint of a directory the one that jobs continue from, as after a loss that has gone up for good."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from megazero.checkpoint.commands.verify import verify
from megazero.checkpoint.folder import CheckpointFolder
from megazero.checkpoint.format import CheckpointError
from megazero.checkpoint.tags import latest_tag


def rewind(directory: str | Path, tag: str) -> str | None:
    """Writes `tag` into the directory's file `latest`, once every byte of that checkpoint is known to be what was written.

    Later checkpoints stay until a save replaces them, or deletes them for `keep_last`.

    Returns:
        What the file named before; None if it named nothing.

    Raises:
        ValueError: it names that checkpoint already.
        CheckpointError: that checkpoint is damaged.
        DirectoryInUseError: a job saves there.
    """
    folder, before = CheckpointFolder(directory), None
    folder.claim()
    try:
        with suppress(CheckpointError):
            before = latest_tag(directory)
        if before == tag:
            raise ValueError(
                f"{directory}: {tag} is the latest already. Name an earlier one by --tag; `ls` lists them."
            )
        found = verify(directory, tag)
        if found.problems:
            raise CheckpointError(f"{found.path} is damaged, so no job could continue from it: {found.problems[0]}")
        folder.name_latest(tag)
    finally:
        folder.release()
    return before
