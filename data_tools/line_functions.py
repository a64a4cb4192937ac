"""Functions of a line or a document, and what a worker does with them: apply them to a block of lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from data_tools.documents import Document, compress, document_id, dump, lines_before
from megazero.lines.jsonl import LineError, read_object
from megazero.lines.results import BlockResult, filled_lines
from megazero.lines.resumable import Item


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


class Failed(Exception):
    """Raised by a function of a line: it can go no further, and nor can its step.

    Args:
        why: for the message, which begins with the place.
        identity: what names the document.
    """

    def __init__(self, why: str, identity: str) -> None:
        super().__init__(why, identity)
        self.why, self.identity = why, identity


class Kept(NamedTuple):
    """A line that stays: its bytes with their end, and to which of the outputs of its shard it goes."""

    line: bytes
    output: int = 0
    is_changed: bool = False


LineFunction = Callable[[bytes], Kept]
"""Picklable; takes a line without its end. Raises LineError if it holds no document, Dropped if it is unwanted."""


DocumentFunction = Callable[[Document], Document]
"""Returns the document itself if it stays as it is (never change it), or a new one; raises as a `LineFunction` does."""


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


def apply_to_block(function: LineFunction, item: Item) -> BlockResult:
    """The result of a function of a line for a block, given what an earlier pass drops of it.

    A function that has `identify`, as `DocumentLines` has, is asked what names the document on a line that is dropped unparsed.

    Raises:
        ValueError: the function has Failed; names file and line.
    """
    outputs, block, drops = item
    identify = getattr(function, "identify", lambda line: None)
    parts: list[list[bytes]] = [[] for _ in outputs]
    result = BlockResult()
    counts = result.counts
    for number, offset, line in filled_lines(block, result):
        try:
            if offset in drops:
                reason, identity, detail = drops[offset]
                raise Dropped(reason, identity or identify(line), detail)
            kept = function(line)
        except LineError as error:
            result.bad_line(number, str(error))
        except Dropped as drop:
            result.drop(number, drop.reason, drop.identity, drop.detail)
        except Failed as failed:
            place = f"{block.path}:{lines_before(block) + number + 1}"
            raise ValueError(f"{place}: document {failed.identity}: {failed.why}") from failed
        else:
            counts.documents += 1
            counts.kept += 1
            counts.changed += kept.is_changed
            counts.text_bytes_out += len(kept.line)
            parts[kept.output].append(kept.line)
    result.frames = [compress(b"".join(part), path) for part, path in zip(parts, outputs, strict=True)]
    return result
