"""Compressed files: which they are, what they are called without the ending that says so, and the bytes in them."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

COMPRESSED = (".gz", ".xz", ".zst")

_PIECE_BYTES = 1 << 16
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
        return cast(BinaryIO, io.BufferedReader(_XzReader(file), _PIECE_BYTES))
    if path.suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstdReader(file, path), _PIECE_BYTES))
    return file


class _Text(io.RawIOBase):
    """A decompressed text, read from its beginning to its end. It can tell how far, which fastwarc asks of a file."""

    _position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """How many bytes of the text were read."""
        return self._position

    def _fill(self, buffer: Any, text: bytes) -> int:  # noqa: ANN401 (any writable buffer)
        buffer[: len(text)] = text
        self._position += len(text)
        return len(text)


class _XzReader(_Text):
    """All streams of an .xz file, one after another, with zero bytes between and after them, which the format allows as padding.

    lzma.LZMAFile takes whatever follows the first stream for padding if it does not begin a stream: where the header of the
    second one is damaged, the rest of the file would be lost without a word.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._pending = file, b""  # what is read and not decompressed yet
        self._stream: lzma.LZMADecompressor | None = None  # the one being read
        self._is_first = True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 (any writable buffer)
        """Fills a part of `buffer` with the next bytes of the text and returns their number; 0 at the end."""
        while True:
            if not self._pending and (self._stream is None or self._stream.needs_input):
                self._pending = self._file.read(_PIECE_BYTES)
                if not self._pending and (self._is_first or self._stream is not None):
                    raise EOFError("the file ends before its compressed stream does")
                if not self._pending:
                    return 0
            if self._stream is None:
                if not self._is_first:
                    self._pending = self._pending.lstrip(b"\0")
                if not self._pending:
                    continue
                self._stream, self._is_first = lzma.LZMADecompressor(), False
            text = self._stream.decompress(self._pending, len(buffer))
            self._pending = b""  # the stream keeps what it has not used, until its end
            if self._stream.eof:
                self._pending, self._stream = self._stream.unused_data, None
            if text:
                return self._fill(buffer, text)


class _ZstdReader(_Text):
    """All frames of a .zst file, one after another; one that is cut off is an error, as it is with gzip."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(f"{path}: reading .zst needs the package zstandard (pip install zstandard)") from error
        self._file, self._package, self._text = file, zstandard, b""
        self._frame: Any = None  # the one being read

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 (any writable buffer)
        """Fills a part of `buffer` with the next bytes of the text and returns their number; 0 at the end."""
        while not self._text:
            if not (pending := self._file.read(_PIECE_BYTES)):
                if self._frame is not None:
                    raise EOFError("the file ends inside of a compressed frame")
                return 0
            if self._frame is None:
                self._frame = self._package.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
            try:
                self._text = self._frame.decompress(pending)
            except self._package.ZstdError as error:
                raise EOFError(str(error)) from error
            if self._frame.eof:
                self._file.seek(-len(self._frame.unused_data), os.SEEK_CUR)  # where the next frame begins
                self._frame = None
        count = self._fill(buffer, self._text[: len(buffer)])
        self._text = self._text[count:]
        return count
