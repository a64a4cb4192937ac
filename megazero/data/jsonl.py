"""Loose JSON (one object a line) read in blocks of whole lines, and the documents inside a block."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megazero.files import DAMAGE, decompressed, is_compressed

logger = logging.getLogger(__name__)

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_KEYS_SHOWN = 8
_PIECE_BYTES = 1 << 20
_STRICT_HINT = "Mend or remove the line, or drop --strict to have such lines counted and left out."

ERRORS_KEPT = 20
"""Complaints about lines that are logged and kept."""

MAX_LINE_BYTES = 1 << 28
"""Longer lines are no documents but damage: they are never held whole."""


@dataclass(frozen=True)
class Block:
    """Whole lines of one file: the bytes [start, stop) of its (decompressed) text.

    Attributes:
        file: number of the file among the inputs.
        data: the bytes themselves, where only one reader can have them (compressed files); else None.
        disk_stop: how many bytes of the file on disk were read for it and for what lies before it.
        fault: why this block, a single line then, is not to be read: it is longer than allowed. Its `read` gives b"".
    """

    path: Path
    file: int
    start: int
    stop: int
    data: bytes | None = None
    disk_stop: int = 0
    fault: str | None = None

    def read(self) -> bytes:
        """The bytes of the block."""
        if self.fault is not None:
            return b""
        if self.data is not None:
            return self.data
        with open(self.path, "rb") as file:
            file.seek(self.start)
            return file.read(self.stop - self.start)


def read_blocks(
    path: Path, block_bytes: int, start: int = 0, file_number: int = 0, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Block]:
    """Blocks of about `block_bytes` that end with a line's end (or the file's), from the byte `start` on.

    No more than a block and a line is ever held. A line of more than `max_line_bytes` becomes a block with a `fault`: only its
    end is looked for.

    Raises:
        ValueError: a compressed file is damaged or cut off.
    """
    block_bytes = min(block_bytes, max_line_bytes)  # then every overlong line reaches over the end of its block
    keep_data = is_compressed(path)
    try:
        with open(path, "rb") as disk, decompressed(disk, path) as file:
            _skip(file, start, keep_data)
            while head := file.read(block_bytes):
                tail, tail_bytes = (b"", 0) if head[-1:] == b"\n" else _rest_of_line(file, max_line_bytes)
                stop = start + len(head) + tail_bytes
                cut = start + head.rfind(b"\n", 0, -1) + 1  # where the last line begins
                if stop - cut <= max_line_bytes:
                    yield Block(path, file_number, start, stop, head + tail if keep_data else None, disk.tell())
                else:
                    if cut > start:
                        data = head[: cut - start] if keep_data else None
                        yield Block(path, file_number, start, cut, data, disk.tell())
                    fault = f"a line of {stop - cut} bytes, more than the {max_line_bytes} allowed"
                    yield Block(path, file_number, cut, stop, None, disk.tell(), fault)
                start = stop
    except DAMAGE as error:
        raise ValueError(
            f"{path}: damaged or cut off: {error} (after {start} bytes of text). Get the file again."
        ) from error


def _skip(file: BinaryIO, count: int, is_compressed: bool) -> None:
    if not is_compressed:
        file.seek(count)
    while is_compressed and count > 0 and (skipped := len(file.read(min(count, _PIECE_BYTES)))):
        count -= skipped


def _rest_of_line(file: BinaryIO, limit: int) -> tuple[bytes, int]:
    """The bytes up to the line's end (b"" in place of more than `limit`) and their number."""
    pieces: list[bytes] = []
    count = 0
    while piece := file.readline(_PIECE_BYTES):
        count += len(piece)
        pieces = [*pieces, piece] if count <= limit else []
        if piece[-1:] == b"\n":
            break
    return b"".join(pieces), count


class LineError(ValueError):
    """A line that holds no document; the message says why."""


def complain(message: str, errors: list[str], strict: bool) -> None:
    """Logs that a line is left out, and adds it to `errors`, as long as these are few.

    Raises:
        ValueError: `strict` is set.
    """
    if strict:
        raise ValueError(f"{message}. {_STRICT_HINT}")
    if len(errors) < ERRORS_KEPT:
        logger.warning("left out: %s", message)
        errors.append(message)


def check_strict(errors: Sequence[str], strict: bool, found: str) -> None:
    """Raises a ValueError where `strict` is set and an earlier run has kept errors; `found` says when."""
    if strict and errors:
        raise ValueError(f"{errors[0]} (found {found}). {_STRICT_HINT}")


def read_object(line: bytes, key: str) -> dict[str, Any]:
    """The JSON object on a line, which has a string under `key`.

    Raises:
        LineError: the line is not valid UTF-8, not a JSON object, or has no string under `key`; the message says which.
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
    return content


def block_lines(block: Block) -> list[bytes]:
    """The lines of a block without their ends; a byte-order mark at the start of the file is dropped.

    Raises:
        LineError: the block has a fault.
    """
    if block.fault is not None:
        raise LineError(block.fault)
    data = block.read()
    if block.start == 0:
        data = data.removeprefix(_BYTE_ORDER_MARK)
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return lines
