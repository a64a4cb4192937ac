"""Index arrays on disk, found again by a hash of everything that determines them.

An entry is one .npy file per array and one .json with the full description and checksums, written last. Files are written aside
and renamed, so readers see whole files only. Of several processes that want the same entry one builds it, and the others wait.
Where the file system has no locks, or each host its own, several build it: they write the same bytes.
"""

from __future__ import annotations

import glob
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from megazero.data.arrays import DAMAGED_HEADER, save_array
from megazero.files import append_suffix, locked, mapping, read_whole, write_json, written_aside
from megazero.lines.contents import key_of

logger = logging.getLogger(__name__)

FORMAT = 3
_KEY_DIGITS = 32  # hexadecimal, of a description's hash in the names of its files
_LEFTOVER_S = 86400.0  # after this time without a write, no process writes a file any more
Arrays = Mapping[str, np.ndarray]


def is_record(path: Path) -> bool:
    """Whether a file is the description of an entry: it has such a name, and an array of the entry lies beside it."""
    has_name = re.fullmatch(rf".+-[0-9a-f]{{{_KEY_DIGITS}}}\.json", path.name) is not None
    return has_name and any(path.parent.glob(f"{glob.escape(path.stem)}-*.npy"))


class UnwritableCacheError(ValueError):
    """An entry could not be stored; says why, and which flag names another folder."""


class ArrayCache:
    """Entries in one folder.

    Args:
        folder: where they lie; made at the first write.
        is_expected: True where another rank has just built everything: an entry that is absent all the same is reported once,
            since the folder then is not shared between the machines.
        is_checked: True where another process of this machine takes the checksums.
    """

    def __init__(self, folder: str | Path, is_expected: bool = False, is_checked: bool = False) -> None:
        self.folder = Path(folder)
        self._is_expected, self._is_checked = is_expected, is_checked

    def __reduce__(self) -> tuple[type[ArrayCache], tuple[Path, bool, bool]]:
        return ArrayCache, (self.folder, True, True)  # a data-loader worker need not check what its process has

    def load_or_build(self, description: Mapping[str, Any], build: Callable[[], Arrays]) -> dict[str, np.ndarray]:
        """The arrays of `description`, memory-mapped and read-only; built and stored where they are absent.

        Args:
            description: JSON values; its "kind" and "name" begin the file names.
            build: returns the arrays by name, always the same names for one kind.

        Raises:
            ValueError: an entry is damaged. UnwritableCacheError: the folder cannot be written.
        """
        description = {**description, "format": FORMAT}
        stem = self.folder / f"{description['kind']}-{description['name']}-{key_of(description)[:_KEY_DIGITS]}"
        with suppress(FileNotFoundError, NotADirectoryError):
            return self._load(stem, description)
        if self._is_expected:
            self._is_expected = False
            logger.warning(
                "%s lacks what rank 0 has stored (is it not shared between the machines?): building it here too",
                self.folder,
            )
        with ExitStack() as held:  # one process at a time: `refuse_too_many` counts the memory of one
            with self._errors_named():
                self.folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(append_suffix(stem, ".lock")))
                _remove_leftovers(stem)
            with suppress(FileNotFoundError):  # another process has built it meanwhile
                return self._load(stem, description)
            start = time.perf_counter()
            arrays = build()
            with self._errors_named():
                _store(stem, description, arrays)
            logger.info("built %s in %.2f s", stem.name, time.perf_counter() - start)
        return self._load(stem, description)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnwritableCacheError(
                f"cannot write the index cache {self.folder}: {error.strerror}. Choose a folder that this job can write with "
                "--data-cache-path."
            ) from error

    def _load(self, stem: Path, description: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The stored arrays; a FileNotFoundError where the entry, or one of its files, is absent."""
        record = append_suffix(stem, ".json")
        try:
            content = json.loads(read_whole(record))
            if key_of(content["description"]) != key_of(description):
                raise ValueError("it describes other data")
            arrays = {}
            for name in content["crc32"]:
                with mapping(path := append_suffix(stem, f"-{name}.npy")):
                    arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
            for name, array in arrays.items():
                if not self._is_checked and _checksum(array) != content["crc32"][name]:
                    raise ValueError(f"the checksum of {name} is another one")
            return arrays
        except (*DAMAGED_HEADER, KeyError, TypeError, EOFError) as error:
            raise ValueError(
                f"{record} or an array beside it is damaged ({error}). Delete {stem}* and start again."
            ) from error


def _store(stem: Path, description: Mapping[str, Any], arrays: Arrays) -> None:
    for name, array in arrays.items():
        with written_aside(append_suffix(stem, f"-{name}.npy")) as file:
            save_array(file, array)
    sums = {name: _checksum(array) for name, array in sorted(arrays.items())}
    write_json(append_suffix(stem, ".json"), {"description": description, "crc32": sums})


def _remove_leftovers(stem: Path) -> None:
    """Removes what a process that was killed while it built this entry has written aside.

    What is new stays: another host may be writing it, where locks hold on one host only (Lustre's localflock) or not at all.
    """
    for path in stem.parent.glob(f"{glob.escape(stem.name)}*.tmp*"):
        with suppress(FileNotFoundError):  # another process removes it too
            if time.time() - path.stat().st_mtime > _LEFTOVER_S:
                path.unlink()


def _checksum(array: np.ndarray) -> int:
    """Of dtype and shape as well: one bit of the file's header can turn them into others of as many bytes."""
    header = f"{array.dtype.str} {array.shape}".encode()
    return crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, crc32(header))
