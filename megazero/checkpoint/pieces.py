"""Where the elements of one parameter lie: the pieces that ranks have written of it, and the bytes of their files.

Like `reader` a part of the zero_to_fp32.py that lies beside every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from megazero.checkpoint.format import TensorEntry
from megazero.checkpoint.ranges import RangeMap, holders, shard_shape, shards_to_full
from megazero.checkpoint.tensor_file import CheckedFile


class Pieces:
    """The pieces of one parameter. Saved order is that of the list, piece by piece.

    Args:
        rows: [rank, start, stop, file, offsets] of every piece, as they are in the index.
        size: how many tensor-parallel ranks have saved it.

    Attributes:
        full_to_saved: elements of the flattened full parameter -> elements in saved order.

    Raises:
        ValueError: a piece is not what a writer could have written. Other errors mean the same.
    """

    def __init__(
        self, rows: Sequence[Sequence[Any]], entry: TensorEntry, size: int, files: Sequence[CheckedFile]
    ) -> None:
        self._files, self._dtypes, dtypes = files, entry.states, entry.states.values()
        shape, cut = entry.shape, entry.cut
        rank, start, stop, self._file = (_integers([row[i] for row in rows]) for i in range(4))
        offsets = _integers([row[4] for row in rows]).reshape(len(rows), len(dtypes))
        self._offset = dict(zip(entry.states, offsets.T, strict=True))
        ranks, numel, length = holders(cut, size), math.prod(shard_shape(shape, cut, size)), stop - start
        is_wrong = (rank < 0) | (rank >= ranks) | (start < 0) | (start >= stop) | (stop > numel)
        is_wrong |= (self._file < 0) | (self._file >= len(files))
        nbytes = np.array([file.nbytes for file in files])[np.clip(self._file, 0, len(files) - 1)]
        last = nbytes[:, None] - length[:, None] * [dtype.itemsize for dtype in dtypes]
        is_wrong |= ((offsets < 0) | (offsets > last)).any(axis=1)
        order = np.lexsort((start, rank))
        is_overlap = (rank[order][1:] == rank[order][:-1]) & (start[order][1:] < stop[order][:-1])
        if is_wrong.any() or is_overlap.any():
            raise ValueError("a piece lies outside of the parameter or its files, or overlaps another")
        # In saved order there is a gap between pieces, so that no range runs on from one to the next.
        self._base = np.cumsum(length + 1) - (length + 1)
        in_shards = RangeMap.of(rank * numel + start, self._base, length)
        self.full_to_saved = shards_to_full(shape, cut, size).inverse().then(in_shards)

    def read(self, state: str, plan: RangeMap, out: np.ndarray, what: str) -> None:
        """Fills the bytes `out` of a tensor by `plan`, elements of it -> elements in saved order; `what` is it in messages."""
        order = np.argsort(plan.target)
        source, target, length = (column[order] for column in (plan.source, plan.target, plan.length))
        piece = np.searchsorted(self._base, target, "right") - 1
        runs = np.stack([source, target - self._base[piece], length], axis=1) * self._dtypes[state].itemsize
        for number, pairs in groupby(zip(piece.tolist(), runs.tolist(), strict=True), itemgetter(0)):
            file, offset = self._files[self._file[number]], int(self._offset[state][number])
            _read_runs(file, offset, [run for _, run in pairs], out, what, state)


def _read_runs(file: CheckedFile, offset: int, runs: list[list[int]], out: np.ndarray, what: str, state: str) -> None:
    """Args: runs: in bytes, where to in `out`, where from in the piece at `offset`, how many; in the order of the piece."""
    low, high = runs[0][1], runs[-1][1] + runs[-1][2]
    if len(runs) == 1:
        to = runs[0][0]
        file.read_into(out[to : to + high - low], offset + low, what, state)
        return
    # Rows of a matrix that is cut across: one read of all that lies between them, then a copy for each.
    content = np.empty(high - low, dtype=np.uint8)
    file.read_into(content, offset + low, what, state)
    for to, start, length in runs:
        out[to : to + length] = content[start - low : start - low + length]


def _integers(values: Sequence[Any]) -> np.ndarray:
    """The values as int64, and no others: "1", 1.0 and what is too large are not what was written."""
    array = np.array(values)
    if len(values) and array.dtype.kind != "i":
        raise ValueError(f"{str(values)[:60]} are not all integers")
    return array.astype(np.int64)
