"""What a step has counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from megazero.data.jsonl import ERRORS_KEPT


@dataclass
class Counts:
    """What happened to the lines of a shard, or of several.

    Attributes:
        dropped: documents left out, by reason.
        errors: the first lines that hold no document: file, line, reason.
    """

    lines: int = 0
    blank_lines: int = 0
    bad_lines: int = 0
    documents: int = 0
    kept: int = 0
    changed: int = 0
    text_bytes_in: int = 0
    text_bytes_out: int = 0
    empty_files: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Adds what another one has counted."""
        for name, value in asdict(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        self.dropped = dict(sorted((Counter(self.dropped) + Counter(other.dropped)).items()))
        self.errors = (self.errors + other.errors)[:ERRORS_KEPT]

    def drop(self, reason: str) -> None:
        """Counts one document that is left out."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def statistics(self, shards: int = 1, skipped: int = 0) -> dict[str, Any]:
        """The entries of a step's JSON line."""
        content = asdict(self)
        errors = content.pop("errors")
        return {"shards": shards, "shards_skipped": skipped, **content, "first_errors": errors}
