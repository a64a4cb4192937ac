"""Index arrays on disk, found again by a hash of everything that determines them.

An entry is one .npy file per array and one .json with the full description and checksums, written last. Files are written aside
and renamed, so any number of jobs may build the same entry at once: they write the same bytes, and readers see whole files only.
"""

from __future__ import annotations

import glob
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from megazero.files import append_suffix, write_json, written_aside
from megazero.lines.contents import key_of

logger = logging.getLogger(__name__)

FORMAT = 2
_KEY_DIGITS = 32  # hexadecimal, of a description's hash in the names of its files
Arrays = Mapping[str, np.ndarray]


def is_record(path: Path) -> bool:
    """Whether a file is the description of an entry: it has such a name, and an array of the entry lies beside it."""
    has_name = re.fullmatch(rf".+-[0-9a-f]{{{_KEY_DIGITS}}}\.json", path.name) is not None
    return has_name and any(path.parent.glob(f"{glob.escape(path.stem)}-*.npy"))


class ArrayCache:
    """Entries in one folder.

    Args:
        folder: where they lie; made at the first write.
        is_expected: True where another rank has just built or checked everything: checksums are not taken again, and an entry
            that is absent all the same is reported once, since the folder then is not shared between the machines.
    """

    def __init__(self, folder: str | Path, is_expected: bool = False) -> None:
        self.folder = Path(folder)
        self._is_expected = is_expected

    def load_or_build(self, description: Mapping[str, Any], build: Callable[[], Arrays]) -> dict[str, np.ndarray]:
        """The arrays of `description`, memory-mapped and read-only; built and stored where they are absent.

        Args:
            description: JSON values; its "kind" and "name" begin the file names.
            build: returns the arrays by name, always the same names for one kind.

        Raises:
            ValueError: an entry is damaged, or the folder cannot be written.
        """
        description = {**description, "format": FORMAT}
        stem = self.folder / f"{description['kind']}-{description['name']}-{key_of(description)[:_KEY_DIGITS]}"
        if not append_suffix(stem, ".json").is_file():
            if self._is_expected:
                self._is_expected = False
                logger.warning(
                    "%s lacks what rank 0 has stored (is it not shared between the machines?): building it here too",
                    self.folder,
                )
            start = time.perf_counter()
            self._store(stem, description, build())
            logger.info("built %s in %.2f s", stem.name, time.perf_counter() - start)
        return self._load(stem, description)

    def _store(self, stem: Path, description: Mapping[str, Any], arrays: Arrays) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, array in arrays.items():
                with written_aside(append_suffix(stem, f"-{name}.npy")) as file:
                    np.save(file, array, allow_pickle=False)
            sums = {name: _checksum(array) for name, array in sorted(arrays.items())}
            write_json(append_suffix(stem, ".json"), {"description": description, "crc32": sums})
        except OSError as error:
            why = error.strerror or f"{error}, as on a full disk"  # numpy alone gives no number
            raise ValueError(
                f"cannot write the index cache {self.folder}: {why}. Choose a folder that this job can write with "
                "--data-cache-path."
            ) from error

    def _load(self, stem: Path, description: Mapping[str, Any]) -> dict[str, np.ndarray]:
        record = append_suffix(stem, ".json")
        try:
            content = json.loads(record.read_bytes())
            if key_of(content["description"]) != key_of(description):
                raise ValueError("it describes other data")
            arrays = {
                name: np.load(append_suffix(stem, f"-{name}.npy"), mmap_mode="r", allow_pickle=False)
                for name in content["crc32"]
            }
            for name, array in arrays.items():
                if not self._is_expected and _checksum(array) != content["crc32"][name]:
                    raise ValueError(f"the checksum of {name} is another one")
            return arrays
        except (ValueError, KeyError, TypeError, EOFError, FileNotFoundError) as error:
            raise ValueError(
                f"{record} or an array beside it is damaged ({error}). Delete {stem}* and start again."
            ) from error


def _checksum(array: np.ndarray) -> int:
    return crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
