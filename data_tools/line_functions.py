"""Functions of a line or a document, and what a worker does with them: apply them to a block of lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from data_tools.counts import Counts
from data_tools.documents import Document, compress, document_id, dump
from data_tools.partial_shard import Shard
from megazero.data.jsonl import Block, LineError, block_lines, read_object

BAD_LINE = "bad line"
"""The reason for dropping a line that holds no document."""

Reason = str | tuple[str, str | None, str | None]
"""Why a line is dropped, or the three arguments of `Dropped`."""


class Dropped(Exception):
    """Raised by a function of a line: the document is fine but unwanted.

    Args:
        reason: one of a few, under which it is counted ("short").
        identity: what names the document.
        detail: what is worth recording ("57 tokens").
    """

    def __init__(self, reason: str, identity: str | None = None, detail: str | None = None) -> None:
        super().__init__(reason, identity, detail)
        self.reason, self.identity, self.detail = reason, identity, detail


class Kept(NamedTuple):
    """A line that stays: its bytes with their end, and to which of the outputs of its shard it goes."""

    line: bytes
    output: int = 0
    is_changed: bool = False


LineFunction = Callable[[bytes], Kept]
"""Picklable; takes a line without its end. Raises LineError if it holds no document, Dropped if it is unwanted."""


@dataclass
class BlockResult:
    """What a worker has made of a block.

    Attributes:
        frames: what to append to each output.
        removed: (line within the block, reason, identity, detail) of each line left out; a bad line has no identity.
    """

    frames: list[bytes]
    counts: Counts
    removed: list[tuple[int, str, str | None, str | None]] = field(default_factory=list)


DocumentFunction = Callable[[Document], Document]
"""Returns the document itself if it stays as it is (never change it), or a new one; raises Dropped(reason, detail=...)."""


class DocumentLines:
    """A line function that parses a document and hands it on; a document that is returned as it is keeps its line byte for byte.

    Args:
        function: picklable.
        key: which entry is the text.
    """

    def __init__(self, function: DocumentFunction, key: str) -> None:
        self.function, self.key = function, key

    def __call__(self, line: bytes) -> Kept:
        """Raises LineError or Dropped, as a line function does."""
        document = read_object(line, self.key)
        try:
            result = self.function(document)
        except Dropped as drop:
            drop.identity = drop.identity or document_id(document, self.key)
            raise
        if result is document:
            return Kept(line + b"\n")
        return Kept(dump(result), is_changed=True)

    def identify(self, line: bytes) -> str:
        """What names the document on a line; raises LineError if it holds none."""
        return document_id(read_object(line, self.key), self.key)


def unchanged(document: Document) -> Document:
    """The document function that keeps all."""
    return document


class BlockFunction:
    """A function of a line, applied to a block."""

    def __init__(self, function: LineFunction) -> None:
        self._function = function
        # (line) -> what names its document, for lines that are dropped unparsed; DocumentLines has it.
        self._identify = getattr(function, "identify", None)

    def __call__(self, item: tuple[Shard, Block, Mapping[int, Reason]]) -> BlockResult:
        """The result for a block of a shard, given what an earlier pass drops of it."""
        shard, block, drops = item
        parts: list[list[bytes]] = [[] for _ in shard.outputs]
        result = BlockResult([], Counts())
        counts = result.counts
        counts.text_bytes_in = block.stop - block.start
        for number, (offset, line) in enumerate(numbered_lines(block)):
            counts.lines += 1
            if not line and block.fault is None or line.isspace():
                counts.blank_lines += 1
                continue
            try:
                if block.fault is not None:
                    raise LineError(block.fault)
                if offset in drops:
                    raise _drop(drops[offset], self._identify, line)
                kept = self._function(line)
            except LineError as error:
                counts.bad_lines += 1
                result.removed.append((number, BAD_LINE, None, str(error)))
            except Dropped as drop:
                counts.documents += 1
                counts.drop(drop.reason)
                result.removed.append((number, drop.reason, drop.identity, drop.detail))
            else:
                counts.documents += 1
                counts.kept += 1
                counts.changed += kept.is_changed
                counts.text_bytes_out += len(kept.line)
                parts[kept.output].append(kept.line)
        result.frames = [compress(b"".join(part), path) for part, path in zip(parts, shard.outputs, strict=True)]
        return result


def _drop(reason: Reason, identify: Callable[[bytes], str] | None, line: bytes) -> Dropped:
    drop = Dropped(reason) if isinstance(reason, str) else Dropped(*reason)
    drop.identity = drop.identity or (identify(line) if identify else None)
    return drop


def numbered_lines(block: Block) -> Iterator[tuple[int, bytes]]:
    """(byte of the text at which it begins, the line without its end) of each line; one empty line for a block with a fault."""
    if block.fault is not None:
        yield block.start, b""
        return
    offset = block.start
    for line in block_lines(block):
        yield offset, line
        offset += len(line) + 1
