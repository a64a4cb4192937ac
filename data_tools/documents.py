"""Files of documents: which there are, their text in blocks of JSON lines, one document on a line, and lines back into files.

Everything is a stream of JSON lines: a .parquet or .wet file is turned into them when read, a .parquet file is made from them
when a shard is finished. So there is one way to name a place (file, byte of the text), to count and to resume.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from data_tools.done_marker import MARKER
from data_tools.optional import require
from megazero.files import append_suffix
from megazero.lines.compressed import uncompressed_name
from megazero.lines.jsonl import MAX_LINE_BYTES, Block, read_blocks
from megazero.lines.partial_shard import DROPPED_SUFFIX, JOURNAL

Document = dict[str, Any]
"""A JSON object (see `jsonl.read_object`)."""

OUTPUT_FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "json")
URL_FORMATS = ("txt", "txt.gz", "txt.zst")
_DOCUMENT_SUFFIXES = (".jsonl", ".json", ".parquet", ".wet", ".warc")
ID_KEYS = ("id", "url")
"""The entries that name a document."""
_PIECE_BYTES = 1 << 20
_SIDECAR_ENDS = (DROPPED_SUFFIX, MARKER, "manifest.json", JOURNAL)


def list_inputs(
    values: Sequence[str | Path],
    formats: Sequence[str] = OUTPUT_FORMATS,
    flag: str = "--input",
    output: str | Path | None = None,
) -> list[Path]:
    """The files that a flag names: files as they are, folders as the files of documents in them, sorted by path.

    Args:
        formats: `OUTPUT_FORMATS` for documents, `URL_FORMATS` for lists of URLs.
        flag: where they come from, for messages.
        output: what --output names, which may not lie in a folder of them.

    Raises:
        FileNotFoundError: a file or folder is missing. PermissionError: a folder cannot be read.
        ValueError: a folder holds no such files, or not yet all of them, or the output; or a file is of another kind or named
            twice.
    """
    suffixes = _DOCUMENT_SUFFIXES if formats == OUTPUT_FORMATS else (f".{formats[0]}",)
    kinds = f"{', '.join(suffixes)} (also with .gz, .xz or .zst)"
    paths: list[Path] = []
    for value in map(Path, values):
        if value.is_dir():
            if output is not None and Path(output).resolve().is_relative_to(value.resolve()):
                raise ValueError(
                    f"--output {output} lies in the folder {flag} {value}: the next run would read it as an input. Choose an "
                    f"--output outside of that folder, or name the files for {flag}."
                )
            files = _files_in(value)
            _check_finished(value, files, suffixes, flag)
            found = [path for path in files if _is_known(path, suffixes)]
            if not found:
                raise ValueError(f"{flag} {value}: the folder holds no files of the kinds {kinds}")
            paths += found
        elif not value.is_file():
            raise FileNotFoundError(f"{flag} {value}: there is no such file or folder")
        elif not _is_known(value, suffixes):
            raise ValueError(f"{flag} {value}: unknown kind of file, known are {kinds}")
        else:
            paths.append(value)
    check_named_once(paths, flag)
    return paths


def check_named_once(paths: Sequence[Path], flag: str = "--input") -> None:
    """Raises a ValueError where two of the paths are the same, however they are written."""
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise ValueError(f"{flag} {path} is named twice: its documents would be, too")
        seen.add(path.resolve())


def _files_in(folder: Path) -> list[Path]:
    """Sorted; also behind links to folders, and an OSError where a subfolder cannot be read: no document is lost silently."""

    def fail(error: OSError) -> NoReturn:
        raise error

    paths: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [name for name in folders if not _leads_back(Path(parent, name), folder)]
        paths += (Path(parent, name) for name in names)
    # A broken link is for its reader to report.
    return sorted(path for path in paths if path.is_file() or path.is_symlink())


def _leads_back(path: Path, folder: Path) -> bool:
    """Whether it is a link to what is found in the folder anyway (`latest -> part7`), or around it, perhaps for ever."""
    target = path.resolve()
    return path.is_symlink() and (target.is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(target))


def _check_finished(folder: Path, files: Sequence[Path], suffixes: Sequence[str], flag: str) -> None:
    for path in files:
        record = path.with_name(path.name.removesuffix(JOURNAL))
        if record != path and _is_known(record, suffixes):
            raise ValueError(
                f"{flag} {folder}: the step that makes {record} has not finished. Start it again, which goes on where it "
                f"stopped; or delete {record}.* to do without."
            )


def _is_known(path: Path, suffixes: Sequence[str]) -> bool:
    has_kind = uncompressed_name(path).suffix in suffixes
    is_document = has_kind and not path.name.endswith(_SIDECAR_ENDS) and path.name[0] != "."
    return is_document and not _is_token_record(path)


def _is_token_record(path: Path) -> bool:
    prefix = path.with_suffix("")
    if path.suffix != ".json" or not any(append_suffix(prefix, suffix).exists() for suffix in (".idx", JOURNAL)):
        return False
    from megazero.data.sidecar import read_sidecar  # which needs numpy

    return read_sidecar(prefix) is not None


def output_format(path: Path) -> str | None:
    """Which of `OUTPUT_FORMATS` and `URL_FORMATS` the name of a file asks for; None if none of them (a folder's name)."""
    return next((name for name in (*OUTPUT_FORMATS, *URL_FORMATS) if path.name.endswith(f".{name}")), None)


def document_blocks(
    path: Path, block_bytes: int, start: int = 0, file_number: int = 0, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Block]:
    """As `jsonl.read_blocks`, for all kinds of files; rows and records become lines, of any length.

    Raises:
        ValueError: the file is damaged, or a package that reads it is missing; names the pip command.
    """
    suffix = uncompressed_name(path).suffix
    if suffix == ".parquet":
        from data_tools.parquet import parquet_lines

        yield from _gathered(parquet_lines(path), path, block_bytes, start, file_number)
    elif suffix in (".wet", ".warc"):
        from data_tools.warc import warc_lines

        yield from _gathered(warc_lines(path), path, block_bytes, start, file_number)
    else:
        yield from read_blocks(path, block_bytes, start, file_number, max_line_bytes)


def _gathered(
    lines: Iterator[tuple[bytes, int]], path: Path, block_bytes: int, start: int, file_number: int
) -> Iterator[Block]:
    """Blocks of lines that come with the number of bytes read from disk so far."""
    position, data = 0, bytearray()
    disk = done = 0
    for line, disk in lines:
        data += line
        if len(data) >= block_bytes:
            if position >= start:
                yield Block(path, file_number, position, position + len(data), bytes(data), disk - done)
            position, done = position + len(data), disk
            data.clear()
    if data and position >= start:
        yield Block(path, file_number, position, position + len(data), bytes(data), disk - done)


def document_id(document: Document, key: str, id_keys: Sequence[str] = ID_KEYS) -> str:
    """What names a document: the first of the entries `id_keys` that it has, else a hash of its text."""
    for name in id_keys:
        if document.get(name) not in (None, ""):
            return str(document[name])
    return "sha256:" + hashlib.sha256(str(document.get(key)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def dump(document: Document) -> bytes:
    """The line of a document, with its end. Unpaired surrogates stay escaped, since no UTF-8 text can hold them."""
    try:
        return json.dumps(document, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(document).encode() + b"\n"


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
