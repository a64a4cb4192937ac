"""Which files a flag names: files of documents or of URLs, by themselves or in a folder; no records, and nothing unfinished."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from data_tools.done_marker import MARKER
from megazero.files import append_suffix, is_aside
from megazero.lines.compressed import uncompressed_name
from megazero.lines.partial_shard import DROPPED_SUFFIX, JOURNAL

logger = logging.getLogger(__name__)

OUTPUT_FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "json")
URL_FORMATS = ("txt", "txt.gz", "txt.zst")
_DOCUMENT_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".wet", ".warc")
_ENDS_BESIDE = (DROPPED_SUFFIX, MARKER, JOURNAL, ".lock", ".bin", ".idx")
_ENDS_UNFINISHED = (".partial", ".partial.0", ".partial.1", ".writing")  # of tokens, when no document is unfinished
_NAMES_SHOWN = 5


def list_inputs(
    values: Sequence[str | Path],
    formats: Sequence[str] = OUTPUT_FORMATS,
    flag: str = "--input",
    output: str | Path | None = None,
) -> list[Path]:
    """The files that a flag names: files as they are, folders as the files of documents in them, sorted by path.

    A warning names the other files of a folder, but for what these tools make beside documents.

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
            paths += _documents_in(value, suffixes, kinds, flag)
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


def _documents_in(folder: Path, suffixes: Sequence[str], kinds: str, flag: str) -> list[Path]:
    """The files of documents in a folder, none of which may be unfinished; a warning names the others."""
    files = _files_in(folder)
    for path in files:
        record = path.with_name(path.name.removesuffix(JOURNAL))
        if record != path and _is_known(record, suffixes):
            raise ValueError(
                f"{flag} {folder}: the step that makes {record} has not finished. Start it again, which goes on where it "
                f"stopped; or delete {record}.* to do without."
            )
    found = [path for path in files if _is_known(path, suffixes)]
    if not found:
        raise ValueError(f"{flag} {folder}: the folder holds no files of the kinds {kinds}")
    others = (path for path in files if uncompressed_name(path).suffix not in suffixes)
    if aside := [path for path in others if not (is_beside(path) or path.name.endswith(_ENDS_UNFINISHED))]:
        names = ", ".join(str(path.relative_to(folder)) for path in aside[:_NAMES_SHOWN])
        more = ", ..." if len(aside) > _NAMES_SHOWN else ""
        logger.warning("%s %s: left out %d files of other kinds: %s%s", flag, folder, len(aside), names, more)
    return found


def _files_in(folder: Path) -> list[Path]:
    """Sorted; also behind links to folders, and an OSError where a subfolder cannot be read: no document is lost silently.

    Without hidden folders, in which editors keep copies (.ipynb_checkpoints), as a pattern of a shell has it.
    """
    roots = [folder.resolve()]  # and the targets of links that were followed

    def fail(error: OSError) -> NoReturn:
        raise error

    def leads_back(path: Path) -> bool:
        """Whether it is a link to what is found anyway (`latest -> part7`), or around the folder, perhaps for ever."""
        if not path.is_symlink():
            return False
        target = path.resolve()
        if any(map(target.is_relative_to, roots)) or roots[0].is_relative_to(target):
            return True
        roots.append(target)
        return False

    paths: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [name for name in sorted(folders) if name[0] != "." and not leads_back(Path(parent, name))]
        paths += (Path(parent, name) for name in names)
    return sorted(filter(_is_to_be_read, paths))


def _is_to_be_read(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:  # a broken link is for its reader to report
        return path.is_symlink()


def _is_known(path: Path, suffixes: Sequence[str]) -> bool:
    return uncompressed_name(path).suffix in suffixes and not is_beside(path)


def is_beside(path: Path) -> bool:
    """Whether it is hidden, or no document but something that is made beside them."""
    is_ours = path.name == "manifest.json" or path.name.endswith(_ENDS_BESIDE) or is_aside(path)
    return path.name[0] == "." or is_ours or _is_record(path)


def _is_record(path: Path) -> bool:
    """Whether it is the record of tokens or of a job's index cache, or of a vocabulary, which are made beside the data."""
    if path.suffix != ".json":
        return False
    from megazero.data.cache import is_record  # these need numpy
    from megazero.data.gpt2_bpe import is_of_vocabulary
    from megazero.data.sidecar import read_sidecar

    prefix = path.with_suffix("")
    has_tokens = any(append_suffix(prefix, suffix).exists() for suffix in (".idx", JOURNAL))
    return is_record(path) or is_of_vocabulary(path) or (has_tokens and read_sidecar(prefix) is not None)
