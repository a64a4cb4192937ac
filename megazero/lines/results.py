"""What a worker makes of a block of lines, and what is counted of many blocks."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megazero.lines.jsonl import Block, LineError, block_lines, read_object
from megazero.logging import some

logger = logging.getLogger(__name__)

BAD_LINE = "bad line"
"""The reason for leaving out a line that holds no document."""
NO_TEXT = "no text"
"""The reason for leaving out a document whose text is empty."""
DUPLICATE_ID = "duplicate id"
"""The reason for leaving out a document that has the id of an earlier one."""
_FAULTS = (BAD_LINE, DUPLICATE_ID)  # of the input: reported, and fatal under --strict
_ERRORS_KEPT = 20  # complaints about lines that are logged and kept
_STRICT_HINT = "Mend or remove the line, or drop --strict to have such lines counted and left out."


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
        self.errors = (self.errors + other.errors)[:_ERRORS_KEPT]

    def statistics(self, shards: int = 1, skipped: int = 0) -> dict[str, Any]:
        """The entries of a step's JSON line."""
        content = asdict(self)
        errors = content.pop("errors")
        return {"shards": shards, "shards_skipped": skipped, **content, "first_errors": errors}

    @classmethod
    def of(cls, statistics: Mapping[str, Any]) -> Counts:
        """What these `statistics` are of."""
        names = {each.name: each.name for each in fields(cls)} | {"errors": "first_errors"}
        return cls(**{name: statistics[entry] for name, entry in names.items()})


@dataclass
class BlockResult:
    """What a worker has made of a block.

    Attributes:
        frames: what to append to each output.
        removed: (line within the block, reason, identity, detail) of each line left out; a bad line mostly has no identity.
        tokens: how many there are in `frames`, for the progress.
    """

    frames: list[bytes] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    removed: list[tuple[int, str, str | None, str | None]] = field(default_factory=list)
    tokens: int = 0

    def drop(self, line: int, reason: str, identity: str | None, detail: str | None = None) -> None:
        """Counts and lists a document that is left out."""
        self.counts.documents += 1
        self.counts.dropped[reason] = self.counts.dropped.get(reason, 0) + 1
        self.removed.append((line, reason, identity, detail))

    def bad_line(self, line: int, fault: str, identity: str | None = None) -> None:
        """Counts and lists a line that holds no document."""
        self.counts.bad_lines += 1
        self.removed.append((line, BAD_LINE, identity, fault))


def filled_lines(block: Block, result: BlockResult) -> Iterator[tuple[int, int, bytes]]:
    """(number within the block, byte of the text at which it begins, line) of each line that is not blank; all are counted.

    A line that is too long to be read goes into `result`.
    """
    result.counts.text_bytes_in = block.stop - block.start
    if block.fault is not None:
        result.counts.lines = 1
        result.bad_line(0, block.fault)
        return
    for number, (offset, line) in enumerate(block_lines(block)):
        result.counts.lines += 1
        if not line or line.isspace():
            result.counts.blank_lines += 1
        else:
            yield number, offset, line


def read_documents(block: Block, key: str, result: BlockResult) -> Iterator[tuple[int, int, bytes, dict[str, Any]]]:
    """As `filled_lines`, with the document on each line; lines that hold none go into `result`."""
    for number, offset, line in filled_lines(block, result):
        try:
            document = read_object(line, key)
        except LineError as error:
            result.bad_line(number, str(error))
        else:
            yield number, offset, line, document


def report(block: Block, before: int, result: BlockResult, errors: list[str], strict: bool) -> bytes:
    """The lines of the dropped list for what was left out of a block that `before` lines of its file lie before.

    Args:
        errors: bad lines and duplicate ids are added to it and logged, as long as these are few.

    Raises:
        ValueError: `strict` is set, and there is one of these.
    """
    records = []
    for line, reason, identity, detail in result.removed:
        number = before + line + 1
        record = {"file": str(block.path), "line": number, "id": identity, "reason": reason}
        records.append(record if detail is None else {**record, "detail": detail})
        if reason in _FAULTS:
            what = detail if reason == BAD_LINE else f"{reason} {identity}"
            message = f"{block.path}:{number}: {what}"
            if strict:
                raise ValueError(f"{message}. {_STRICT_HINT}")
            if len(errors) < _ERRORS_KEPT:
                logger.warning("left out: %s", message)
                errors.append(message)
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def report_empty(paths: Iterable[Path]) -> int:
    """How many of the files have no byte, each of which is named in a warning: perhaps it was not downloaded."""
    empty = [path for path in paths if path.stat().st_size == 0]
    for path in empty:
        logger.warning("%s is empty", path)
    return len(empty)


def no_text(paths: Iterable[Path], key: str, counts: Counts, flag: str) -> ValueError:
    """The error where files that were counted hold no text; `flag` names the key."""
    why = f"; the first: {counts.errors[0]}" if counts.errors else ""
    return ValueError(
        f"no line of {some([*map(str, paths)])} holds a text under the key {key!r}: {counts.lines} lines, "
        f"{counts.bad_lines} bad, {counts.documents} without text{why}. Each line must be one JSON object, in UTF-8; name the "
        f"key of its text with {flag}."
    )


def check_strict(errors: Sequence[str], strict: bool, found: str) -> None:
    """Raises a ValueError where `strict` is set and an earlier run has kept errors; `found` says when."""
    if strict and errors:
        raise ValueError(f"{errors[0]} (found {found}). {_STRICT_HINT}")
