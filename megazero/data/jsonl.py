"""Loose JSON (one object a line) read in blocks of whole lines, and the documents inside a block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megazero.files import is_compressed, open_bytes

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_KEYS_SHOWN = 8


@dataclass(frozen=True)
class Block:
    """Whole lines of one file: the bytes [start, stop) of its (decompressed) text.

    Attributes:
        file: number of the file among the inputs.
        data: the bytes themselves, where only one reader can have them (compressed files); else None.
    """

    path: Path
    file: int
    start: int
    stop: int
    data: bytes | None = None

    def read(self) -> bytes:
        """The bytes of the block."""
        if self.data is not None:
            return self.data
        with open(self.path, "rb") as file:
            file.seek(self.start)
            return file.read(self.stop - self.start)


def read_blocks(path: Path, block_bytes: int, start: int = 0, file_number: int = 0) -> Iterator[Block]:
    """Blocks of about `block_bytes` that end with a line's end (or the file's), from the byte `start` on.

    A compressed file is decompressed here, by one process; of a plain file only the places of the blocks are found.
    """
    if not is_compressed(path):
        yield from _plain_blocks(path, block_bytes, start, file_number)
        return
    with open_bytes(path) as file:
        _skip(file, start)
        while data := file.read(block_bytes):
            data += file.readline()
            yield Block(path, file_number, start, start + len(data), data)
            start += len(data)


def _plain_blocks(path: Path, block_bytes: int, start: int, file_number: int) -> Iterator[Block]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        while start < size:
            file.seek(start + block_bytes)
            file.readline()
            stop = min(file.tell(), size)
            yield Block(path, file_number, start, stop)
            start = stop


def _skip(file: BinaryIO, count: int) -> None:
    while count > 0 and (skipped := len(file.read(min(count, 1 << 20)))):
        count -= skipped


class LineError(ValueError):
    """A line that holds no document; the message says why."""


def read_document(line: bytes, key: str) -> str:
    """The text under `key` of the JSON object on a line.

    Raises:
        LineError: the line is not valid UTF-8, not a JSON object, or has no string under `key`.
    """
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise LineError(f"invalid UTF-8 at byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise LineError(f"bad JSON: {error}") from error
    if not isinstance(content, dict):
        raise LineError(f"not a JSON object but {type(content).__name__}")
    if key not in content:
        keys = ", ".join(list(content)[:_KEYS_SHOWN]) or "none"
        raise LineError(f"no key {key!r} (its keys: {keys})")
    if not isinstance(content[key], str):
        raise LineError(f"the value of {key!r} is not a string but {type(content[key]).__name__}")
    return content[key]


def block_lines(block: Block) -> list[bytes]:
    """The lines of a block without their ends; a byte-order mark at the start of the file is dropped."""
    data = block.read()
    if block.start == 0:
        data = data.removeprefix(_BYTE_ORDER_MARK)
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return lines
