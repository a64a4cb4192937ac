"""Signatures on disk: of each input one file of rows and one of ids, in the order of the input; read where needed, never held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megazero.data.arrays import read_array
from megazero.files import append_suffix, file_named
from megazero.lines.progress import Progress

Rows = np.ndarray  # of `row_type`
Documents = npt.NDArray[np.int64]  # numbers of documents in the order of the input, from 0


def row_type(permutations: int) -> np.dtype:
    """What is stored of a document.

    Its hash and signature (see `dedup_minhash.signatures`), the byte of the text at which its line begins, and where in the file
    of ids its id begins and how long it is.
    """
    return np.dtype(
        [
            ("content", "<u8", (2,)),
            ("minima", "<u2", (permutations,)),
            ("line_start", "<i8"),
            ("id_start", "<i8"),
            ("id_bytes", "<i4"),
        ]
    )


def ids_path(rows_path: Path) -> Path:
    """The file of ids beside a file of rows."""
    return append_suffix(rows_path, ".ids")


class SignatureFiles:
    """The signatures of all documents.

    Args:
        paths: the files of rows, in the order of the input.

    Raises:
        ValueError: a file is damaged.
    """

    def __init__(self, paths: Sequence[Path], permutations: int) -> None:
        self.paths, self._type = list(paths), row_type(permutations)
        counts = [self._count(path) for path in self.paths]
        self.firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        """[files + 1] the number of the first document of each file, and the number of documents."""

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def chunks(self, size: int, purpose: str) -> Iterator[tuple[int, Rows]]:
        """All rows in order, `size` at a time at most, each chunk with the number of its first document.

        Args:
            purpose: for which they are read; what the progress is called.
        """
        with Progress(purpose, len(self) * self._type.itemsize) as progress:
            for number in range(len(self.paths)):
                for first, rows in self.chunks_of_file(number, size):
                    yield first, rows
                    progress.update(len(rows), rows.nbytes, rows.nbytes)

    def chunks_of_file(self, number: int, size: int) -> Iterator[tuple[int, Rows]]:
        """The rows of one file, in chunks."""
        first, stop = self.firsts[number : number + 2].tolist()
        for document in range(first, stop, size):
            place = (document - first) * self._type.itemsize
            yield document, read_array(self.paths[number], self._type, min(size, stop - document), place)

    def read(self, documents: Documents) -> Rows:
        """The rows [n] of any documents. Reads and does not map: pages of a mapped file would count as this process's memory."""
        unique, inverse = np.unique(documents, return_inverse=True)
        rows, size = np.empty(len(unique), dtype=self._type), self._type.itemsize
        view = rows.view(np.uint8).data
        for number, start, stop in self._by_file(unique):
            places = (unique[start:stop] - self.firsts[number]) * size
            # Buffered: a mount may give less than it is asked for.
            with file_named(self.paths[number]), open(self.paths[number], "rb", buffering=size) as file:
                for row, place in enumerate(places.tolist(), start):
                    file.seek(place)
                    content = file.read(size)
                    if len(content) != size:
                        raise ValueError(f"{self.paths[number]} has become shorter while it was read")
                    view[row * size : (row + 1) * size] = content
        return rows[inverse]

    def ids(self, documents: Documents, rows: Rows) -> list[str]:
        """The ids of documents, of which `rows` are the rows."""
        order = np.argsort(documents, kind="stable")
        ids = [""] * len(documents)
        for number, start, stop in self._by_file(documents[order]):
            path = ids_path(self.paths[number])
            with file_named(path), open(path, "rb") as file:
                for place in order[start:stop].tolist():
                    file.seek(int(rows[place]["id_start"]))
                    ids[place] = file.read(int(rows[place]["id_bytes"])).decode("utf-8", "surrogatepass")
        return ids

    def _by_file(self, documents: Documents) -> Iterator[tuple[int, int, int]]:
        """(number of the file, start, stop) of each range of sorted documents that lie in one file."""
        numbers = np.searchsorted(self.firsts, documents, side="right") - 1
        starts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
        for start, stop in pairwise([*starts, len(documents)]):
            yield int(numbers[start]), start, stop

    def _count(self, path: Path) -> int:
        """How many rows a file has."""
        count, rest = divmod(path.stat().st_size, self._type.itemsize)
        if rest:
            raise ValueError(f"{path} is damaged ({rest} bytes behind its {count} rows). Delete it and start again.")
        return count


def same_content(a: Rows, b: Rows) -> npt.NDArray[np.bool_]:
    """[n] whether the documents have the same words in the same order."""
    return (a["content"] == b["content"]).all(axis=1)


def similarity(a: Rows, b: Rows) -> npt.NDArray[np.float64]:
    """[n] estimated Jaccard similarity of the documents' sets of 5-grams; 1 where the content is the same."""
    return np.where(same_content(a, b), 1.0, (a["minima"] == b["minima"]).mean(axis=1))
