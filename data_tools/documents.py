"""Documents in files: their text in blocks of JSON lines, one document on a line, and lines back into files.

Everything is a stream of JSON lines: a .parquet or .wet file is turned into them when read, a .parquet file is made from them
when a shard is finished. So there is one way to name a place (file, byte of the text), to count and to resume.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_tools.optional import require
from megazero.lines.compressed import uncompressed_name
from megazero.lines.jsonl import ID_KEYS, MAX_LINE_BYTES, Block, name_of, overlong, read_blocks
from megazero.lines.results import BlockResult, Counts, no_text, read_documents

Document = dict[str, Any]
"""A JSON object (see `jsonl.read_object`)."""

_PIECE_BYTES = 1 << 20
_PEEK_BYTES = 1 << 16


def document_blocks(
    path: Path, block_bytes: int, start: int = 0, file_number: int = 0, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Block]:
    """As `jsonl.read_blocks`, for all kinds of files; rows and records become lines.

    Raises:
        ValueError: the file is damaged, or a package that reads it is missing; names the pip command.
    """
    suffix = uncompressed_name(path).suffix
    if suffix == ".parquet":
        from data_tools.parquet import parquet_lines

        lines = parquet_lines(path)
    elif suffix in (".wet", ".warc"):
        from data_tools.warc import warc_lines

        lines = warc_lines(path)
    else:
        return read_blocks(path, block_bytes, start, file_number, max_line_bytes)
    return _gathered(lines, path, block_bytes, start, file_number, max_line_bytes)


def _gathered(
    lines: Iterator[tuple[bytes, int]],
    path: Path,
    block_bytes: int,
    start: int,
    file_number: int,
    max_line_bytes: int,
) -> Iterator[Block]:
    """Blocks of lines that come with the number of bytes read from disk so far."""
    position, data = 0, bytearray()
    disk = done = 0

    def block(length: int, fault: str | None = None) -> Block:
        nonlocal position, done
        made = Block(path, file_number, position, position + length, bytes(data), disk - done, fault)
        position, done = made.stop, disk
        data.clear()
        return made

    for line, disk in lines:
        if position < start:
            position, done = position + len(line), disk
        elif len(line) > max_line_bytes:
            if data:
                yield block(len(data))
            yield block(len(line), overlong(len(line), max_line_bytes))
        else:
            data += line
            if len(data) >= block_bytes:
                yield block(len(data))
    if data:
        yield block(len(data))


def check_documents(paths: Iterable[Path], key: str, max_line_bytes: int, flag: str = "--json-key") -> None:
    """Reads each file up to its first document.

    Args:
        flag: names the key, for messages.

    Raises:
        ValueError: a file has lines, and a document on none of them. They would be left out one by one, and with them a whole
            source: its text has another key, or it is a JSON array. Or a file is damaged.
    """
    for path in paths:
        counts = Counts()
        for block in document_blocks(path, _PEEK_BYTES, max_line_bytes=max_line_bytes):
            result = BlockResult()
            if next(read_documents(block, key, result), None) is not None:
                break
            if result.removed and not counts.errors:
                line, _, _, fault = result.removed[0]
                counts.errors.append(f"{path}:{counts.lines + line + 1}: {fault}")
            counts.add(result.counts)
        else:
            if counts.bad_lines:
                raise no_text([path], key, counts, flag)


def lines_before(block: Block) -> int:
    """How many lines of its file a block comes after; they are read again."""
    count = 0
    for earlier in document_blocks(block.path, _PIECE_BYTES):
        if earlier.start >= block.start:
            break
        count += 1 if earlier.fault else earlier.read()[: block.start - earlier.start].count(b"\n")
    return count


def document_id(document: Document, key: str, id_keys: Sequence[str] = ID_KEYS) -> str:
    """What names a document: the first of the entries `id_keys` that it has, else a hash of its text."""
    if (name := name_of(document, id_keys)) is not None:
        return name
    return "sha256:" + hashlib.sha256(str(document.get(key)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def dump(document: Document, allow_nan: bool = True, default: Callable[[Any], Any] | None = None) -> bytes:
    """The line of a document, with its end. Unpaired surrogates stay escaped, since no UTF-8 text can hold them.

    Args:
        allow_nan: write NaN and Infinity, which JSON has not but Python reads; if False, they are a ValueError.
        default: what to write in place of a value that JSON has not; as for `json.dumps`.
    """
    try:
        return json.dumps(document, ensure_ascii=False, allow_nan=allow_nan, default=default).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(document, allow_nan=allow_nan, default=default).encode() + b"\n"


def compress(data: bytes, path: Path) -> bytes:
    """`data` as one member of a .gz file or one frame of a .zst file, as the name of `path` asks; a file is any number of them.

    The result depends on nothing but the data, so workers can compress blocks and the file is the same for any number of them.
    """
    if path.suffix == ".gz":
        return gzip.compress(data, 6, mtime=0) if data else b""
    if path.suffix == ".zst":
        zstandard = require("zstandard", f"writing {path.name}")
        return zstandard.ZstdCompressor(level=3).compress(data) if data else b""
    return data


def in_pieces(lines: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """What to write to `path`: the lines, in pieces of about a megabyte, each compressed as the name asks."""
    piece = bytearray()
    for line in lines:
        piece += line
        if len(piece) >= _PIECE_BYTES:
            yield compress(bytes(piece), path)
            piece.clear()
    yield compress(bytes(piece), path)
