"""Arrays in files, whole or with an error: numpy's `fromfile` and `save` go through C's streams and miss errors of the disk."""

from __future__ import annotations

import os
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megazero.files import file_named, mapping

DAMAGED_HEADER = (ValueError, SyntaxError, TokenError)
"""What numpy raises at the damaged header of an .npy file."""


def read_array(path: Path, dtype: npt.DTypeLike, count: int | None = None, offset: int = 0) -> np.ndarray:
    """[count] from the file, or all that is there; np.fromfile gives what was in memory before where the disk gives nothing.

    Args:
        offset: bytes to leave out before.

    Raises:
        OSError: the disk does not give it.
        ValueError: the file ends before.
    """
    dtype = np.dtype(dtype)
    with file_named(path), open(path, "rb", buffering=0) as file:
        count = (os.fstat(file.fileno()).st_size - offset) // dtype.itemsize if count is None else count
        array = np.empty(count, dtype)
        view = array.view(np.uint8).data
        file.seek(offset)
        while read := file.readinto(view):  # 0 also where nothing is left to ask for
            view = view[read:]
    if len(view):
        raise ValueError(f"{path} has become shorter while it was read")
    return array


def mapped_array(path: Path, dtype: npt.DTypeLike) -> np.ndarray:
    """All of the file, mapped into memory and read-only: as a plain array, which is faster to slice than a np.memmap."""
    if path.stat().st_size == 0:  # it cannot be mapped
        return np.empty(0, dtype)
    with mapping(path):
        return np.memmap(path, dtype, "r").view(np.ndarray)


def save_array(file: BinaryIO, array: np.ndarray) -> None:
    """Writes what np.save writes, which loses what does not fit on the disk if it is less than a page."""
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(array.data)
