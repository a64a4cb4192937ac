"""The output of a tokenizing run in progress, from which a killed run continues.

Three files beside the final ones: PREFIX.bin.partial (tokens), PREFIX.sizes.partial (int32 lengths), PREFIX.dropped.partial (a
line of JSON for each one that was left out); and the journal PREFIX.partial.json (see `journal`). At the end, for a moment,
PREFIX.idx.partial.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megazero.data.journal import JournaledFiles
from megazero.data.jsonl import Position
from megazero.data.mmidx import publish, write_index
from megazero.data.sidecar import Sidecar, write_sidecar
from megazero.files import append_suffix

logger = logging.getLogger(__name__)

DROPPED_SUFFIX = ".dropped.jsonl"
JOURNAL_SUFFIX = ".partial.json"
INDEX_ASIDE_SUFFIX = ".idx.partial"


@dataclass
class CountedPosition(Position):
    """How far a run has come, and what has been counted up to there."""

    documents: int = 0
    tokens: int = 0
    lines: int = 0  # of all files, like all that follows
    text_bytes: int = 0
    empty: int = 0  # documents without text
    bad: int = 0  # lines that hold no document
    errors: list[str] = field(default_factory=list)  # the first of them: file, line, reason
    replaced: int = 0  # documents in which unpaired surrogates were replaced


class PartialOutput:
    """Appends to the files of a run in progress.

    Args:
        prefix: of the final files.
        dtype: of the tokens.
        key: identifies the run; what another run has left is started over.
    """

    def __init__(self, prefix: Path, dtype: np.dtype, key: str) -> None:
        self.prefix, self.dtype = prefix, dtype
        paths = [append_suffix(prefix, f".{name}.partial") for name in ("bin", "sizes", "dropped")]
        self._files = JournaledFiles(append_suffix(prefix, JOURNAL_SUFFIX), paths, key)
        self.position = CountedPosition(**self._files.state or {})
        if self.position.text_bytes:
            done = (prefix, self.position.documents, self.position.text_bytes / 1e6)
            logger.info("%s: continuing after %d documents, %.1f MB of text", *done)

    def append(self, tokens: np.ndarray, sizes: npt.NDArray[np.int32], dropped: bytes = b"") -> None:
        """Adds documents, and the record of lines left out; they count as done from the next `commit` on."""
        self._files.append(tokens.data, sizes.astype("<i4", copy=False).data, dropped)

    def commit(self, interval_s: float = 0.0) -> None:
        """Makes everything up to `position` survive a kill, unless the last commit is younger than `interval_s`."""
        self._files.commit(asdict(self.position), interval_s)

    def finish(self, sidecar: Sidecar) -> None:
        """Turns the partial files into PREFIX.json, .bin, .idx and, if lines were left out, .dropped.jsonl; the .idx last."""
        self.commit()
        self.close()
        tokens_aside, sizes_path, dropped_aside = self._files.paths
        has_sizes = self._files.sizes[1] > 0  # an empty file cannot be mapped
        sizes = np.memmap(sizes_path, "<i4", "r").view(np.ndarray) if has_sizes else np.empty(0, "<i4")
        index_aside = append_suffix(self.prefix, INDEX_ASIDE_SUFFIX)
        write_index(index_aside, self.dtype, [(sizes, None)])
        # An old .idx goes first: with it, the record of this run would vouch for the tokens of another.
        append_suffix(self.prefix, ".idx").unlink(missing_ok=True)
        write_sidecar(self.prefix, sidecar)
        if self._files.sizes[2]:
            os.replace(dropped_aside, append_suffix(self.prefix, DROPPED_SUFFIX))
        else:
            append_suffix(self.prefix, DROPPED_SUFFIX).unlink(missing_ok=True)
        publish(self.prefix, tokens_aside, index_aside)
        self.remove()

    def close(self) -> None:
        """Closes the files; what was committed stays."""
        self._files.close()

    def remove(self) -> None:
        """Removes what is left of the partial files."""
        append_suffix(self.prefix, INDEX_ASIDE_SUFFIX).unlink(missing_ok=True)
        self._files.remove()
