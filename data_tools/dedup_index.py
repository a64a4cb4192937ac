"""Which documents are copies of which: equal content first, then signatures that share a band and agree in enough places.

Keys (of contents, of bands) go to files on disk, divided by their highest bits such that each file can be sorted in the memory of
one process. Documents with the same key are compared by their signatures, and those that agree are joined into groups, of which
the first document stays. Neither the groups nor anything else depends on the number of files or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data_tools.dedup_minhash import U64, band_keys
from data_tools.dedup_signatures import Documents, Rows, SignatureFiles, same_content, similarity
from data_tools.divided import divided
from data_tools.options import open_files
from megazero.data.arrays import read_array
from megazero.lines.progress import Progress
from megazero.lines.workers import ordered_map

Pairs = npt.NDArray[np.int64]  # [n, 2] documents that are copies of each other
Keys = Iterator[np.ndarray]  # of _RECORD
Agree = Callable[[Rows, Rows], npt.NDArray[np.bool_]]

_RECORD = np.dtype([("key", "<u8"), ("document", "<i8")])
_BYTES_PER_RECORD = 64  # needed at most to sort and compare the records of a file
_FIXED_BYTES = 100 << 20  # of a process, for everything else: interpreter, packages, a chunk of rows
_BYTES_PER_DOCUMENT = 8  # of `Groups`
_MOST_FILES = 512  # that are open at once
CHUNK = 1 << 14
"""Documents or pairs at a time, some 10 MB."""
_THOROUGH_TURNS = 50
_MOST_TURNS = 150  # in those beyond _THOROUGH_TURNS, documents that agree with one of their key are compared no more


@dataclass(frozen=True)
class Search:
    """How copies are found.

    Attributes:
        bands: the signature is cut into so many; documents that agree in a whole band are compared.
        similarity: share of places of the signature in which copies agree at least.
        memory_bytes: for all processes together.
        folder: for temporary files; made, and removed at the end.
    """

    bands: int
    similarity: float
    memory_bytes: int
    workers: int
    folder: Path


class Found(NamedTuple):
    """What a search has found.

    Attributes:
        first: [documents] the first document of the group of each; itself, where no earlier one is like it.
        compared: pairs of signatures that were compared.
        uncompared: documents, counted once a key, that were left alone after being compared with _MOST_TURNS others of their key.
    """

    first: Documents
    compared: int
    uncompared: int


def find_copies(files: SignatureFiles, search: Search) -> Found:
    """Groups of documents with the same content, or with signatures like another one's of the group.

    Raises:
        ValueError: search.memory_bytes is too small.
        RuntimeError: a worker process died.
    """
    groups = Groups(len(files))
    compared = uncompared = 0
    passes: list[tuple[Keys, int, Agree]] = [
        (_content_keys(files), 1, same_content),
        (_band_keys(files, search, groups), search.bands, partial(_are_similar, search.similarity)),
    ]
    for keys, keys_per_document, agree in passes:
        count = _file_count(search, len(files), keys_per_document)
        with divided(search.folder, keys, "key", count) as paths:
            for pairs, tried, left_out in _pairs(files, agree, paths, search):
                groups.join(pairs)
                compared += tried
                uncompared += left_out
    return Found(groups.finish(), compared, uncompared)


def copies_in(first: Documents) -> Iterator[Documents]:
    """Of `Found.first`, a chunk at a time: the documents that are copies of an earlier one."""
    for start in range(0, len(first), CHUNK):
        own = np.arange(start, min(start + CHUNK, len(first)))
        yield own[first[own] != own]


def _content_keys(files: SignatureFiles) -> Keys:
    for first, rows in files.chunks(CHUNK, "dedup: dividing by content"):
        yield _records(rows["content"][:, 0], np.arange(first, first + len(rows)))


def _band_keys(files: SignatureFiles, search: Search, groups: Groups) -> Keys:
    """Of the first document of each content alone: a page that was copied a million times costs as much as any other."""
    for first, rows in files.chunks(CHUNK, "dedup: dividing by bands"):
        documents = np.arange(first, first + len(rows))
        is_first = groups.first(documents) == documents
        keys = band_keys(rows["minima"][is_first], search.bands)
        yield _records(keys.ravel(), np.repeat(documents[is_first], search.bands))


def _records(keys: U64, documents: Documents) -> np.ndarray:
    records = np.empty(len(keys), _RECORD)
    records["key"], records["document"] = keys, documents
    return records


def _are_similar(least: float, a: Rows, b: Rows) -> npt.NDArray[np.bool_]:
    return similarity(a, b) >= least


def _file_count(search: Search, documents: int, keys_per_document: int) -> int:
    """How many files the keys must be divided into."""
    records = documents * keys_per_document
    processes = search.workers + 1 if search.workers > 1 else 1
    memory = (search.memory_bytes - _BYTES_PER_DOCUMENT * documents) // processes - _FIXED_BYTES
    most = open_files(_MOST_FILES)
    if memory * most < records * _BYTES_PER_RECORD or memory <= 0:
        least = _BYTES_PER_DOCUMENT * documents + processes * (_FIXED_BYTES + records * _BYTES_PER_RECORD // most)
        raise ValueError(
            f"--memory {search.memory_bytes >> 20}M is too little for {documents} documents, {keys_per_document} keys each, and "
            f"{search.workers} workers: give at least {(least >> 20) + 1}M, or fewer --workers"
        )
    return max(1, -(-records * _BYTES_PER_RECORD // memory))


def _pairs(
    files: SignatureFiles, agree: Agree, paths: Sequence[Path], search: Search
) -> Iterator[tuple[Pairs, int, int]]:
    sizes = [path.stat().st_size for path in paths]
    workers = min(search.workers, max(1, len(paths)))
    with Progress("dedup: comparing", sum(sizes)) as progress:
        with closing(ordered_map(partial(pairs_of, files, agree), paths, workers)) as results:
            for size, (_, result) in zip(sizes, results, strict=True):
                yield result
                progress.update(0, 0, size)


def pairs_of(files: SignatureFiles, agree: Agree, path: Path) -> tuple[Pairs, int, int]:
    """Pairs of documents that have a key of this file in common and agree, how many were compared, and how many left out.

    Among the documents of a key, the first one is compared with all others; those that agree are compared, one after the other,
    with those that are still alone; when none of these is like them, the first of these begins anew. So all connections are
    found without comparing all with all: n copies of a page take n - 1 comparisons.
    """
    records = read_array(path, _RECORD)
    records = records[np.argsort(records["key"], kind="stable")]  # the documents of one key stay in order
    keys, documents = records["key"].copy(), records["document"].copy()
    del records
    connected = np.zeros(len(keys), dtype=bool)  # to one that was compared with all
    found, compared = [np.empty((0, 2), dtype=np.int64)], 0
    for turn in range(_MOST_TURNS):
        is_open = _is_open(keys, connected)
        keys, documents, connected = keys[is_open], documents[is_open], connected[is_open]
        if not len(keys):
            break
        is_first = _is_first(keys)
        alone = ~is_first & ~connected
        pivots, others = documents[is_first][np.cumsum(is_first)[alone] - 1], documents[alone]
        connected[alone] = agrees = _compare(files, agree, pivots, others)
        found.append(np.stack([pivots, others], axis=1)[agrees])
        compared += len(others)
        stay = np.flatnonzero(~is_first if turn < _THOROUGH_TURNS else ~is_first & ~connected)
        stay = stay[np.lexsort((~connected[stay], keys[stay]))]  # of each key those that are connected come first
        keys, documents, connected = keys[stay], documents[stay], connected[stay]
    return np.concatenate(found), compared, int((~connected).sum())


def _is_first(keys: U64) -> npt.NDArray[np.bool_]:
    """Of each of the sorted keys, whether it is the first of its value."""
    is_first = np.ones(len(keys), dtype=bool)
    is_first[1:] = keys[1:] != keys[:-1]
    return is_first


def _is_open(keys: U64, connected: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Of each record, whether a record of its key, beside the first, is not connected yet."""
    is_first = _is_first(keys)
    number = np.cumsum(is_first) - 1
    counts = np.bincount(number[~is_first & ~connected], minlength=int(is_first.sum()))
    is_open: npt.NDArray[np.bool_] = counts[number] > 0
    return is_open


def _compare(files: SignatureFiles, agree: Agree, a: Documents, b: Documents) -> npt.NDArray[np.bool_]:
    result = np.empty(len(a), dtype=bool)
    for start in range(0, len(a), CHUNK):
        part = slice(start, start + CHUNK)
        result[part] = agree(files.read(a[part]), files.read(b[part]))
    return result


class Groups:
    """Union-find over documents, for many pairs at a time; the first document of a group stands for it. 8 bytes a document."""

    def __init__(self, count: int) -> None:
        self._parent = np.arange(count)  # never larger than the document itself

    def first(self, documents: Documents) -> Documents:
        """The first document of the group of each."""
        above = self._parent[documents]
        while not np.array_equal(higher := self._parent[above], above):
            above = higher
        return above

    def join(self, pairs: npt.NDArray[np.int64]) -> None:
        """Joins the groups of the two documents of each pair [n, 2]."""
        while len(pairs):
            firsts = self.first(pairs)
            self._parent[pairs] = firsts
            pairs = np.sort(firsts[firsts[:, 0] != firsts[:, 1]], axis=1)
            # Of several pairs with one document that with the least one wins here; the others come again in the next round, when
            # that document has another first one.
            np.minimum.at(self._parent, pairs[:, 1], pairs[:, 0])
            joined = np.unique(pairs[:, 1])
            # These links can make a long chain. Each turn halves the way to its first document.
            while not np.array_equal(higher := self._parent[self._parent[joined]], self._parent[joined]):
                self._parent[joined] = higher

    def finish(self) -> Documents:
        """For each document the first one of its group; this object is used up."""
        for start in range(0, len(self._parent), CHUNK):
            part = self._parent[start : start + CHUNK]
            part[:] = self.first(part)
        return self._parent
