"""The files of one shard while it is being made: a killed run goes on from the last commit, and nothing half-made looks whole.

Beside the outputs, under the shard's record name: RECORD.partial.N (output N so far), RECORD.dropped.partial (what was left out)
and their journal RECORD.partial.json. At the end the outputs and RECORD.dropped.jsonl get their names, then RECORD.done.json is
written: without it, nothing counts as made.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_tools.counts import Counts
from data_tools.documents import JOURNAL, output_format
from data_tools.done_marker import marker_path, read_marker, write_marker
from megazero.data.journal import JournaledFiles, check_ours
from megazero.data.jsonl import Position
from megazero.files import append_suffix, locked, sync_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shard:
    """A piece of work that is done or not: files in, files out.

    Attributes:
        record: where its sidecar and its done-marker lie (RECORD.dropped.jsonl, RECORD.done.json).
    """

    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    record: Path


class PartialShard:
    """Appends to the files of a shard.

    Args:
        key: hash of input and settings, for the done-marker.
        journal_key: the same, with what only matters on the way; what a run with another one has left is started over.

    Attributes:
        is_new: whether there was nothing to go on from.

    Raises:
        ValueError: another process makes the same shard.
    """

    def __init__(self, shard: Shard, key: str, journal_key: str | None = None) -> None:
        self.shard, self._key = shard, key
        for path in (shard.record, *shard.outputs):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = ExitStack()
        try:  # runs over different inputs can have some outputs in common, which their own locks do not show
            self._lock.enter_context(locked(append_suffix(shard.record, ".writing"), wait=False))
        except BlockingIOError as error:
            raise ValueError(
                f"--output {shard.record}: another process is writing it, from other inputs or with other settings. Wait for its "
                "end, or choose another --output."
            ) from error
        names = [*(f".partial.{number}" for number in range(len(shard.outputs))), ".dropped.partial"]
        paths = [append_suffix(shard.record, name) for name in names]
        self._files = JournaledFiles(append_suffix(shard.record, JOURNAL), paths, journal_key or key)
        self.is_new = self._files.state is None
        state = self._files.state or {"position": {}, "counts": {}}
        self.position, self.counts = Position(**state["position"]), Counts(**state["counts"])
        if self.counts.lines:
            logger.info("%s: continuing after %d lines", shard.record, self.counts.lines)

    @property
    def output_bytes(self) -> list[int]:
        """How long each output is so far."""
        return self._files.sizes[:-1]

    def append(self, frames: list[bytes], dropped: bytes) -> None:
        """Adds to each output, and to the sidecar; it counts as done from the next `commit` on."""
        self._files.append(*frames, dropped)

    def commit(self, interval_s: float = 0.0) -> None:
        """Makes everything up to `position` survive a kill, unless the last commit is younger than `interval_s`."""
        self._files.commit({"position": asdict(self.position), "counts": asdict(self.counts)}, interval_s)

    def finish(self, description: dict[str, Any]) -> None:
        """Gives the outputs their names and writes the done-marker, which counts from then on."""
        self.commit()
        self._files.close()
        # An old one would vouch for the files of this run.
        marker_path(self.shard.record).unlink(missing_ok=True)
        *partials, dropped = self._files.paths
        for partial, output in zip(partials, self.shard.outputs, strict=True):
            if output_format(output) == "parquet":
                from data_tools.parquet import write_parquet

                write_parquet(partial, output)
            else:
                os.replace(partial, output)
        os.replace(dropped, append_suffix(self.shard.record, ".dropped.jsonl"))
        for folder in {path.parent for path in (*self.shard.outputs, self.shard.record)}:
            sync_folder(folder)
        content = {"description": description, "counts": asdict(self.counts)}
        write_marker(self.shard.record, self._key, self.shard.outputs, content)
        self._files.remove()
        self._lock.close()

    def close(self) -> None:
        """Closes the files; what was committed stays."""
        self._files.close()
        self._lock.close()


def finished(shard: Shard, key: str) -> Counts | None:
    """What was counted when the shard was made, if it is there, whole, and of the same input and settings; else None.

    Raises:
        ValueError: an output exists that no run of a step has made: it would be overwritten.
    """
    content = read_marker(shard.record, key, shard.outputs)
    if content is not None:
        return Counts(**content["counts"])
    check_ours(shard.outputs, "--output", marker_path(shard.record), append_suffix(shard.record, JOURNAL))
    return None
