"""Loose JSON (one object a line) read in blocks of whole lines, the documents inside a block, and the lines that hold none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megazero.files import file_named
from megazero.lines.compressed import COMPRESSED, DAMAGE, decompressed, is_compressed

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_KEYS_SHOWN = 8
# Python reads some 900 to 990 levels, the fewer the more calls it is in: so a worker would read more than a step without workers.
_DEEPEST = 500
_PIECE_BYTES = 1 << 20
_COMPRESSION = 4  # of text, when guessing how much a file holds
_COMPRESSING = (*COMPRESSED, ".parquet")

MAX_LINE_BYTES = 1 << 28
"""Longer lines are no documents but damage: they are never held whole."""
ID_KEYS = ("id", "url")
"""The entries that name a document."""


@dataclass(frozen=True)
class Block:
    """Whole lines of one file: the bytes [start, stop) of its (decompressed) text.

    Attributes:
        file: number of the file among the inputs.
        data: the bytes themselves, where only one reader can have them (compressed files); else None.
        disk_bytes: how many bytes of the file on disk were read for it.
        fault: why this block, a single line then, is not to be read: it is longer than allowed. Its `data` is b"".
    """

    path: Path
    file: int
    start: int
    stop: int
    data: bytes | None = None
    disk_bytes: int = 0
    fault: str | None = None

    def read(self) -> bytes:
        """The bytes of the block.

        Raises:
            ValueError: the file ends before.
        """
        if self.data is not None:
            return self.data
        with file_named(self.path), open(self.path, "rb") as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
        if len(data) < self.stop - self.start:
            raise ValueError(f"{self.path} has become shorter while it was read")
        return data


def read_blocks(
    path: Path, block_bytes: int, start: int = 0, file_number: int = 0, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Block]:
    """Blocks of about `block_bytes` that end with a line's end (or the file's), from the byte `start` on.

    No more than a block and a line is ever held, and of a plain file only what lies around the ends of blocks is read. A line of
    more than `max_line_bytes` becomes a block with a `fault`: only its end is looked for.

    Raises:
        ValueError: a compressed file is damaged or cut off.
    """
    block_bytes = min(block_bytes, max_line_bytes)  # then every overlong line reaches over the end of its block
    is_plain = not is_compressed(path)
    next_block = _find_block if is_plain else _read_block
    try:
        with file_named(path), open(path, "rb") as disk, decompressed(disk, path) as file:
            if not is_plain:
                _skip(file, start)
            done = start if is_plain else disk.tell()
            while True:
                data, cut, stop = next_block(file, start, block_bytes, max_line_bytes)
                if stop <= start:
                    return
                fault = None
                if stop - cut > max_line_bytes:
                    if cut > start:
                        yield Block(path, file_number, start, cut, data and data[: cut - start])
                    start, data = cut, b""
                    fault = overlong(stop - cut, max_line_bytes)
                position = stop if is_plain else disk.tell()
                yield Block(path, file_number, start, stop, data, position - done, fault)
                start, done = stop, position
    except DAMAGE as error:
        where = f" (after {start} bytes of text)" if start else ""  # of the blocks before
        raise ValueError(f"{path}: damaged or cut off: {error}{where}. Get the file again.") from error


def overlong(line_bytes: int, max_line_bytes: int) -> str:
    """The `fault` of a line that is too long to be read."""
    return f"a line of {line_bytes} bytes, more than the {max_line_bytes} allowed (--max-line-mb of data_tools)"


def _skip(file: BinaryIO, count: int) -> None:
    while count > 0 and (skipped := len(file.read(min(count, _PIECE_BYTES)))):
        count -= skipped


def _read_block(file: BinaryIO, start: int, block_bytes: int, max_line_bytes: int) -> tuple[bytes | None, int, int]:
    """The next block of a compressed file, without a rest that is overlong; where its last line begins, and where it ends."""
    head = file.read(block_bytes)
    tail, rest = (b"", 0) if head[-1:] in (b"", b"\n") else _rest_of_line(file, max_line_bytes)
    return head + tail, start + head.rfind(b"\n", 0, -1) + 1, start + len(head) + rest


def _find_block(file: BinaryIO, start: int, block_bytes: int, max_line_bytes: int) -> tuple[bytes | None, int, int]:
    """As `_read_block`, but of a plain file, and without the bytes; in a block of no more bytes than a line no line is sought."""
    file.seek(start + block_bytes - 1)
    rest = _rest_of_line(file, 0)[1]
    stop = min(start + block_bytes - 1 + rest, file.seek(0, os.SEEK_END))
    if stop - start <= max_line_bytes:
        return None, start, stop
    file.seek(start)
    return None, start + file.read(block_bytes).rfind(b"\n", 0, -1) + 1, stop


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


def block_lines(block: Block) -> Iterator[tuple[int, bytes]]:
    """(byte of the text at which it begins, the line without its end) of each line of a block without a fault.

    A byte-order mark at the start of the file is dropped, and not counted.
    """
    offset, data = block.start, block.read()
    lines = (data.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else data).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for line in lines:
        yield offset, line
        offset += len(line) + 1


def expected_text_bytes(paths: Sequence[Path]) -> int:
    """About how much text files hold, by their sizes and the endings of those that are compressed."""
    return sum(path.stat().st_size * (_COMPRESSION if path.suffix in _COMPRESSING else 1) for path in paths)


class LineError(ValueError):
    """A line that holds no document; the message says why."""


def decoded(line: bytes) -> str:
    """The text of a line; a LineError where it is not valid UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineError(f"invalid UTF-8 at byte {error.start} of the line") from error


def read_object(line: bytes, key: str) -> dict[str, Any]:
    """The JSON object on a line, which has a string under `key`.

    Raises:
        LineError: the line is not valid UTF-8, not a JSON object, or has no string under `key`; says which.
    """
    text = decoded(line)
    try:
        content = json.loads(text)
        is_too_deep = line.count(b"[") + line.count(b"{") > _DEEPEST and _depth(content) > _DEEPEST
    except RecursionError:
        is_too_deep = True
    except ValueError as error:
        raise LineError(f"bad JSON: {error}") from error
    if is_too_deep:
        raise LineError(f"bad JSON: more than {_DEEPEST} lists and objects inside of each other")
    if not isinstance(content, dict):
        raise LineError(f"not a JSON object but {type(content).__name__}")
    if key not in content:
        keys = ", ".join(list(content)[:_KEYS_SHOWN]) or "none"
        keys = keys.encode("utf-8", "backslashreplace").decode()  # an unpaired surrogate fits into no log
        raise LineError(f"no key {key!r} (its keys: {keys})")
    if not isinstance(content[key], str):
        raise LineError(f"the value of {key!r} is not a string but {type(content[key]).__name__}")
    return content


def _depth(content: Any) -> int:  # noqa: ANN401 (any JSON value)
    """How many lists and objects lie inside of each other."""
    depth, level = 0, [content]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def name_of(document: Mapping[str, Any], keys: Sequence[str] = ID_KEYS) -> str | None:
    """What names a document: the first of the entries `keys` that it has; None where it has none."""
    return next((str(document[key]) for key in keys if document.get(key) not in (None, "")), None)
