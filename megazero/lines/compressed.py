"""Compressed files: which they are, what they are called without the ending that says so, and the bytes in them."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, cast

COMPRESSED = (".gz", ".xz", ".zst")

_PIECE_BYTES = 1 << 16
# Of a .zst file, decompressed at a time: to 16 MB at most, as a block of 128 KB takes 4 bytes if all its letters are the same.
_ZSTD_BYTES = 1 << 9
# Of `zstd --long=31`, as dumps of Reddit are; such a file takes as much memory wherever it is read.
_LARGEST_WINDOW = 1 << 31

DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""What reading a damaged or cut off compressed file raises."""


def is_compressed(path: Path) -> bool:
    """Whether `open_bytes` decompresses this file."""
    return path.suffix in COMPRESSED


def uncompressed_name(path: Path) -> Path:
    """The path without the ending that says how the file is compressed: "a.jsonl" of "a.jsonl.gz"."""
    return path.with_suffix("") if is_compressed(path) else path


def open_bytes(path: Path) -> BinaryIO:
    """The (decompressed) bytes of a plain, .gz, .xz or .zst file; reading a damaged one raises one of `DAMAGE`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a .zst file, and the package zstandard is not installed.
    """
    return decompressed(open(path, "rb"), path)


def decompressed(file: BinaryIO, path: Path) -> BinaryIO:
    """What `open_bytes(path)` gives, from the open file `file`, whose position then says how much of it was read."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file, mode="rb"))
    if path.suffix == ".xz":
        return cast(BinaryIO, io.BufferedReader(_Pieces(_xz_pieces(file)), _PIECE_BYTES))
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(f"{path}: reading .zst needs the package zstandard (pip install zstandard)") from error
        return cast(BinaryIO, io.BufferedReader(_Pieces(_zstd_pieces(file, zstandard)), _PIECE_BYTES))
    return file


class _Pieces(io.RawIOBase):
    """The pieces of a text as a file to read. It can tell how far it was read, which fastwarc asks."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._text, self._position = pieces, memoryview(b""), 0

    def readable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """How many bytes of the text were read."""
        return self._position

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 (any writable buffer)
        """Fills a part of `buffer` with the next bytes of the text and returns their number; 0 at the end."""
        self._text = self._text or memoryview(next(filter(None, self._pieces), b""))
        count = min(len(buffer), len(self._text))
        buffer[:count], self._text = self._text[:count], self._text[count:]
        self._position += count
        return count


def _xz_pieces(file: BinaryIO) -> Iterator[bytes]:
    """The text of all streams of an .xz file, one after another; the format allows zero bytes as padding between and after them.

    lzma.LZMAFile takes whatever follows the first stream for padding if it does not begin a stream: where the header of the
    second one is damaged, the rest of the file would be lost without a word.
    """
    pending = file.read(_PIECE_BYTES)  # what is read and not decompressed yet
    while True:
        stream = lzma.LZMADecompressor()
        while not stream.eof:
            if stream.needs_input and not pending and not (pending := file.read(_PIECE_BYTES)):
                raise EOFError("the file ends before its compressed stream does")
            yield stream.decompress(pending, _PIECE_BYTES)
            pending = b""  # the stream keeps what it has not used, until its end
        pending = stream.unused_data.lstrip(b"\0")
        while not pending:
            if not (piece := file.read(_PIECE_BYTES)):
                return
            pending = piece.lstrip(b"\0")


def _zstd_pieces(file: BinaryIO, zstandard: ModuleType) -> Iterator[bytes]:
    """The text of all frames of a .zst file, one after another; one that is cut off is an error, as it is with gzip."""
    pending = file.read(_ZSTD_BYTES)
    while pending:
        frame = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
        while not frame.eof:
            if not pending and not (pending := file.read(_ZSTD_BYTES)):
                raise EOFError("the file ends inside of a compressed frame")
            try:
                text = frame.decompress(pending)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            yield text
            pending = b""
        pending = frame.unused_data or file.read(_ZSTD_BYTES)
