"""Token sequences in two memory-mapped files: PREFIX.bin holds the tokens, PREFIX.idx says where each sequence lies.

Files written here are byte-identical to Megatron-LM's for the same tokens, and Megatron-LM's are read; the format is in mmidx.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from megazero.data import mmidx
from megazero.data.arrays import mapped_array, read_array
from megazero.data.sidecar import remove_sidecar
from megazero.files import (
    allow_many_files,
    append_suffix,
    aside_name,
    file_named,
    sync_file,
    sync_folder,
    written_aside,
)
from megazero.lines.partial_shard import JOURNAL


class IndexedDatasetWriter:
    """Writes PREFIX.bin and PREFIX.idx; a context manager, whose files appear, whole, when its block ends well.

    Args:
        prefix: path of the two files without their endings; the folder is made where it is missing.
        dtype: integer dtype of the tokens, see `mmidx.token_dtype`.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in mmidx.CODE_OF:
            raise ValueError(f"dtype={self.dtype} cannot hold tokens; use one of {[str(d) for d in mmidx.CODE_OF]}")
        self._limits = np.iinfo(self.dtype)
        self._sizes, self._doc_idx = array("i"), array("q", [0])  # lists would take nine times the memory
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._aside = aside_name(append_suffix(self.prefix, ".bin"))
        self._bin = open(self._aside, "wb")  # noqa: SIM115 (closed by __exit__)

    def add_sequence(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends one sequence to the current document.

        Raises:
            ValueError: a token is no integer or does not fit the dtype; `tokens` has more than one dimension, or more tokens than
                the format's 2**31 - 1.
        """
        ids = np.asarray(tokens, dtype=np.int64 if len(tokens) == 0 else None)
        if ids.dtype.kind not in "iu":
            raise ValueError(f"tokens of dtype {ids.dtype} are not integers ({self.prefix}.bin)")
        if ids.ndim != 1:
            raise ValueError(
                f"tokens of shape {list(ids.shape)} are not one sequence ({self.prefix}.bin): add each of its rows"
            )
        if len(ids) > mmidx.MAX_SEQUENCE:
            raise ValueError(
                f"a sequence of {len(ids)} tokens: the .idx format stores lengths up to {mmidx.MAX_SEQUENCE}"
            )
        if len(ids) and (ids.min() < self._limits.min or ids.max() > self._limits.max):
            raise ValueError(
                f"token ids from {ids.min()} to {ids.max()} do not fit {self.dtype} ({self.prefix}.bin); "
                "open the writer with a wider dtype"
            )
        self._bin.write(np.ascontiguousarray(ids, dtype=self.dtype).data)
        self._sizes.append(len(ids))

    def end_document(self) -> None:
        """Ends the current document after the sequences added so far."""
        self._doc_idx.append(len(self._sizes))

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends a document that is one sequence."""
        self.add_sequence(tokens)
        self.end_document()

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                sync_file(self._bin, append_suffix(self.prefix, ".bin"))
                sizes, doc_idx = np.asarray(self._sizes, dtype=np.int32), np.asarray(self._doc_idx, dtype=np.int64)
                with published(self.prefix, self._aside, self.dtype, [(sizes, doc_idx)]):
                    remove_sidecar(self.prefix)
        finally:
            self._aside.unlink(missing_ok=True)  # where the block has failed, or the disk is full
            self._bin.close()


@contextmanager
def published(prefix: Path, tokens: Path, dtype: np.dtype, parts: Sequence[mmidx.Part]) -> Iterator[None]:
    """Makes PREFIX.bin of the finished file `tokens`, and PREFIX.idx of the `parts` of the index.

    The .idx comes last, and an old one goes first: at no moment do an index and the tokens of another run stand side by side. In
    between, in the block, records of the corpus are replaced, which thus never vouch for other tokens.
    """
    index = append_suffix(prefix, ".idx")
    with written_aside(index) as file:
        with file_named(index):
            mmidx.write_index(file, dtype, parts)
        sync_file(file, index)  # on a full disk it fails here, where nothing has changed yet
        index.unlink(missing_ok=True)
        yield
        os.replace(tokens, append_suffix(prefix, ".bin"))
        sync_folder(prefix.parent)


class IndexedDataset:
    """Read access to PREFIX.bin and PREFIX.idx, memory-mapped; opens Megatron's files and our own.

    Args:
        prefix: path of the two files without their endings.
        fingerprint: known where another process has checked the same index, which is then not read through again.

    Attributes:
        sizes: [sequences] int32, length of each sequence in tokens.
        doc_idx: [documents + 1] int64, where each document starts, counted in sequences.
        dtype: dtype of the stored tokens.
        tokens: [num_tokens], all of them, read-only and mapped: of the file no more is read than is looked at.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: a file is truncated, damaged, or of another format.
    """

    def __init__(self, prefix: str | Path, fingerprint: str | None = None) -> None:
        allow_many_files()  # a blend of a hundred corpora has more than a thousand, those in the cache included
        self.prefix = Path(prefix)
        self.index_path = append_suffix(self.prefix, ".idx")
        self.bin_path = append_suffix(self.prefix, ".bin")
        for path in (self.index_path, self.bin_path):
            if not path.is_file():
                raise FileNotFoundError(_missing(self.prefix, path))
        self.dtype, self.sizes, self._pointers, self.doc_idx = mmidx.read_index(
            self.index_path, is_checked=fingerprint is not None
        )
        if fingerprint is not None:
            self.fingerprint = fingerprint
        self.num_tokens = int(self.sizes.sum(dtype=np.int64))
        self._check_size()
        self.tokens = mapped_array(self.bin_path, self.dtype)

    def __len__(self) -> int:
        return len(self.sizes)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens of sequence `i` from `offset` on (all, or `length` of them): a read-only view into the mapped file.

        Raises:
            IndexError: sequence `i` has no such tokens.
        """
        size = int(self.sizes[i])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"{self.prefix}: sequence {i} has {size} tokens, asked for {length} from token {offset} on"
            )
        start = int(self._pointers[i]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def token_starts(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[n] int64, the place in the .bin, in tokens, where each of these sequences begins; where `len(self)` would, its end."""
        starts = np.full(len(sequences), self.num_tokens, np.int64)
        is_there = sequences < len(self)
        starts[is_there] = self._pointers[sequences[is_there]] // self.dtype.itemsize
        return starts

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of dtype, sizes and document boundaries: equal for equal indices, wherever and whenever they were written."""
        digest = hashlib.sha256(f"{self.dtype.str} {len(self.sizes)} {len(self.doc_idx)} ".encode())
        digest.update(np.ascontiguousarray(self.sizes).data)
        digest.update(np.ascontiguousarray(self.doc_idx).data)
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens [start, stop) of the .bin, not from the mapping, whose pages count as this process's memory from then on."""
        return read_array(self.bin_path, self.dtype, stop - start, start * self.dtype.itemsize)

    def token_range(self) -> tuple[int, int]:
        """The smallest and the largest token id, from one pass over the whole .bin; (0, -1) without tokens."""
        low, high = 0, -1
        for start in range(0, self.num_tokens, 1 << 24):
            chunk = self.read(start, min(start + (1 << 24), self.num_tokens))
            smallest, largest = int(chunk.min()), int(chunk.max())
            low, high = (smallest, largest) if high < low else (min(low, smallest), max(high, largest))
        return low, high

    def _check_size(self) -> None:
        want, found = self.num_tokens * self.dtype.itemsize, self.bin_path.stat().st_size
        if want != found:
            state = "truncated" if found < want else "of another run"
            raise ValueError(
                f"{self.bin_path} has {found} bytes, {self.index_path.name} describes {want} ({self.num_tokens} tokens of "
                f"{self.dtype}): the .bin is {state}. Copy both files again, or make them anew with "
                "data_tools/preprocess_data.py."
            )

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str, str]]:
        return IndexedDataset, (str(self.prefix), self.fingerprint)  # a data-loader worker maps the files itself


def _missing(prefix: Path, path: Path) -> str:
    if append_suffix(prefix, JOURNAL).exists():
        return (
            f"{path} is not there yet: an unfinished preprocessing run is. Start it again, it goes on where it stopped."
        )
    return (
        f"{path} is missing. A corpus is a .bin and an .idx of one prefix: data_tools/preprocess_data.py makes them of text, "
        "python -m data_tools import_tokens of the tokens of other trainers (nanoGPT, llm.c)."
    )
