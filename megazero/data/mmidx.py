"""The .idx file of Megatron's memory-mapped format, byte for byte.

Little-endian: 9 bytes `MMIDIDX\\0\\0`, u64 version 1, u8 dtype code, u64 number of sequences n, u64 length m of the document
index, i32 sizes[n] in tokens, i64 pointers[n] in bytes, i64 doc_idx[m] (document d is the sequences doc_idx[d] up to
doc_idx[d + 1]). The .bin file is the tokens alone.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megazero.data.arrays import mapped_array

logger = logging.getLogger(__name__)

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODE_OF = {dtype: code for code, dtype in DTYPE_CODES.items()}
_HEADER = struct.Struct("<9sQBQQ")
# Megatron's limit, a little below 2**16: other readers of these files choose the dtype by the same rule.
_LARGEST_UINT16_VOCAB = 65_500
MAX_SEQUENCE = 2**31 - 1

Part: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64] | None]
"""Sizes and document boundaries of one corpus; None where every sequence is a document of its own."""

_CHUNK = 1 << 20  # entries of an index in memory at a time


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype in which tokens of this vocabulary are stored: uint16 where it fits, else int32."""
    return np.dtype("<u2") if vocab_size < _LARGEST_UINT16_VOCAB else np.dtype("<i4")


def write_index(file: BinaryIO, dtype: np.dtype, parts: Sequence[Part]) -> None:
    """Writes the .idx of one corpus, or of several laid end to end: the sequences and the document boundaries of all of them.

    It is written in chunks; no array of the length of a corpus is made.
    """
    num_sequences = sum(len(sizes) for sizes, _ in parts)
    num_boundaries = 1 + sum(len(sizes) if doc_idx is None else len(doc_idx) - 1 for sizes, doc_idx in parts)
    file.write(_HEADER.pack(MAGIC, VERSION, CODE_OF[np.dtype(dtype)], num_sequences, num_boundaries))
    for sizes, _ in parts:
        for chunk in _chunks(sizes):
            file.write(np.ascontiguousarray(chunk, dtype="<i4").data)
    for pointers in _pointers((chunk for sizes, _ in parts for chunk in _chunks(sizes)), dtype):
        file.write(pointers.data)
    file.write(np.zeros(1, dtype="<i8").data)
    first = 0
    for sizes, doc_idx in parts:
        for ends in _document_ends(sizes, doc_idx):
            file.write((ends + first).data)
        first += len(sizes)


def _document_ends(sizes: np.ndarray, doc_idx: np.ndarray | None) -> Iterator[np.ndarray]:
    """Where each document of a part ends, in sequences, "<i8"."""
    if doc_idx is None:
        for begin in range(0, len(sizes), _CHUNK):
            yield np.arange(begin + 1, min(begin + _CHUNK, len(sizes)) + 1, dtype="<i8")
    else:
        for chunk in _chunks(doc_idx[1:]):
            yield np.asarray(chunk, dtype="<i8")


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    for begin in range(0, len(array), _CHUNK):
        yield array[begin : begin + _CHUNK]


def _pointers(sizes: Iterable[np.ndarray], dtype: np.dtype) -> Iterator[np.ndarray]:
    """Where in the .bin each sequence begins, in bytes, for chunks of their lengths that follow each other."""
    start = 0  # int64 all the way: a corpus is soon larger than 2**31 bytes
    for chunk in sizes:
        num_bytes = np.asarray(chunk, dtype="<i8") * dtype.itemsize
        ends = np.cumsum(num_bytes) + start
        yield ends - num_bytes
        start = int(ends[-1])


class Index(NamedTuple):
    """What an .idx file says."""

    dtype: np.dtype
    sizes: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    doc_idx: npt.NDArray[np.int64]


def read_index(path: Path, is_checked: bool = False) -> Index:
    """The index in `path`, memory-mapped and checked, unless it is known to be `is_checked`.

    Where the document boundaries end early, as merge_file_ of early Megatron-LM leaves them, every sequence is a document.

    Raises:
        ValueError: the file is truncated, damaged, or of another format.
    """
    dtype, num_sequences, num_boundaries = _header(path)
    raw = mapped_array(path, np.uint8)
    start = _HEADER.size
    index = Index(
        dtype,
        _section(raw, start, num_sequences, "<i4"),
        _section(raw, start + 4 * num_sequences, num_sequences, "<i8"),
        _section(raw, start + 12 * num_sequences, num_boundaries, "<i8"),
    )
    if not is_checked:
        _check(path, index)
    if index.doc_idx[-1] < num_sequences:
        if not is_checked:
            logger.warning("%s does not say where documents end: taking each of its sequences for one", path)
        return index._replace(doc_idx=np.arange(num_sequences + 1, dtype="<i8"))
    return index


def _check(path: Path, index: Index) -> None:
    sizes, pointers, boundaries = index.sizes, index.pointers, index.doc_idx
    n = len(sizes)
    if n and int(sizes.min()) < 0:
        raise ValueError(_damaged(path, f"sequence {int(sizes.argmin())} has a negative length"))
    expected = _pointers(_chunks(sizes), index.dtype)
    if not all(map(np.array_equal, _chunks(pointers), expected)):
        raise ValueError(_damaged(path, "its byte pointers do not follow from its lengths"))
    rises = (bool(np.all(np.diff(boundaries[i : i + _CHUNK + 1]) >= 0)) for i in range(0, len(boundaries), _CHUNK))
    if not len(boundaries) or boundaries[0] != 0 or boundaries[-1] > n or not all(rises):
        raise ValueError(_damaged(path, f"its document boundaries do not rise from 0 to {n}"))


def _section(raw: np.ndarray, start: int, count: int, dtype: str) -> np.ndarray:
    return raw[start : start + count * np.dtype(dtype).itemsize].view(dtype)


def _header(path: Path) -> tuple[np.dtype, int, int]:
    with open(path, "rb") as file:
        head = file.read(_HEADER.size)
    if head[: len(MAGIC)] != MAGIC:
        raise ValueError(
            f"{path} is not an MMIDIDX index (it starts with {head[: len(MAGIC)]!r}). Give the prefix of a .bin/.idx pair "
            "made by data_tools/preprocess_data.py or Megatron-LM (--dataset-impl mmap)."
        )
    if len(head) < _HEADER.size:
        raise ValueError(_damaged(path, f"it ends after {len(head)} bytes, inside the header"))
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(head)
    if version != VERSION:
        raise ValueError(_damaged(path, f"version {version}, only version {VERSION} is known"))
    if code not in DTYPE_CODES:
        raise ValueError(_damaged(path, f"dtype code {code} is not an integer type ({sorted(DTYPE_CODES)})"))
    want, found = _HEADER.size + 12 * num_sequences + 8 * num_boundaries, path.stat().st_size
    if want != found:
        raise ValueError(
            _damaged(
                path, f"{num_sequences} sequences and {num_boundaries} boundaries take {want} bytes, found {found}"
            )
        )
    return DTYPE_CODES[code], num_sequences, num_boundaries


def _damaged(path: Path, what: str) -> str:
    return f"{path} is damaged or foreign: {what}. Copy it again, or make it anew with data_tools/preprocess_data.py."
