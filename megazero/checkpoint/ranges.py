"""Which elements of a saved parameter are which elements of a wanted one: arithmetic on ranges, no tensors and no files.

A checkpoint holds pieces of shards: element ranges of the flattened part that one tensor-parallel rank has of a parameter.
Everything is a map between ranges of integers, so a rank that loads composes three of them:

    its own part -> the full parameter -> the saved shards -> the pieces that hold them
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cut:
    """How a full parameter is cut over the tensor-parallel ranks: `mpu.Partition` with the padded size.

    Where it is that of a `TiledLinear`, its tiles are cut on their own, and a rank's parts of them lie one behind the other.

    Attributes:
        dim: the dimension that is cut; None for tiles that every rank has all of.
        stride: number of matrices that are stacked along it, each cut on its own. 1 with tiles.
        padded: size of the dimension that is cut; rows beyond the parameter's own are padding. With tiles there is none.
        tiles: where tiles begin along every dimension, and its size; () for a parameter in one piece.
    """

    dim: int | None
    stride: int
    padded: int
    tiles: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class RangeMap:
    """[source, source + length) -> [target, target + length) for every row; no two rows overlap, on either side.

    Attributes:
        source, target, length: [rows] int64, in ascending order of `source`.
    """

    source: Integers
    target: Integers
    length: Integers

    @classmethod
    def of(cls, source: npt.ArrayLike, target: npt.ArrayLike, length: npt.ArrayLike) -> RangeMap:
        """The map of these rows, which may be in any order."""
        columns = [np.asarray(column, dtype=np.int64).reshape(-1) for column in (source, target, length)]
        order = np.argsort(columns[0])
        return cls(*(column[order] for column in columns))

    @property
    def numel(self) -> int:
        """How many integers are mapped."""
        return int(self.length.sum())

    def inverse(self) -> RangeMap:
        """Targets to sources."""
        return RangeMap.of(self.target, self.source, self.length)

    def sources_from(self, start: int, stop: int) -> RangeMap:
        """The part of the map whose sources lie in [start, stop), counted from `start`."""
        near = self._near(start, stop)
        low, high = np.maximum(near.source, start), np.minimum(near.source + near.length, stop)
        part = RangeMap(low - start, near.target + low - near.source, high - low)
        return part._rows(low < high)

    def then(self, other: RangeMap) -> RangeMap:
        """This map followed by `other`, where both are defined; neighbours joined."""
        if not len(self.target):
            return self
        # Most of `other` is of no interest to a small part of a large parameter.
        b = other._near(int(self.target.min()), int((self.target + self.length).max()))
        if not len(b.source):
            return b
        a = self.inverse()
        # Between two neighbouring ends of ranges, every integer has the same row on both sides, or none.
        points = np.unique(np.concatenate([a.source, a.source + a.length, b.source, b.source + b.length]))
        start, length = points[:-1], np.diff(points)
        i, j = np.searchsorted(a.source, start, "right") - 1, np.searchsorted(b.source, start, "right") - 1
        is_mapped = (i >= 0) & (start < a.source[i] + a.length[i]) & (j >= 0) & (start < b.source[j] + b.length[j])
        i, j, start, length = i[is_mapped], j[is_mapped], start[is_mapped], length[is_mapped]
        found = RangeMap.of(a.target[i] + start - a.source[i], b.target[j] + start - b.source[j], length)
        return found._joined()

    def _near(self, start: int, stop: int) -> RangeMap:
        """The rows whose sources overlap [start, stop), and perhaps the one before them."""
        first, end = np.searchsorted(self.source, start, "right") - 1, np.searchsorted(self.source, stop)
        return self._rows(slice(max(0, first), end))

    def _rows(self, wanted: npt.NDArray[np.bool_] | slice) -> RangeMap:
        return RangeMap(self.source[wanted], self.target[wanted], self.length[wanted])

    def _joined(self) -> RangeMap:
        source, target, length = self.source, self.target, self.length
        if not len(source):
            return self
        goes_on = (source[1:] == source[:-1] + length[:-1]) & (target[1:] == target[:-1] + length[:-1])
        first = np.concatenate([[0], np.flatnonzero(~goes_on) + 1])
        return RangeMap(source[first], target[first], np.add.reduceat(length, first))


def holders(cut: Cut | None, size: int) -> int:
    """How many of `size` tensor-parallel ranks have parts of their own: one, where all of them have everything."""
    return 1 if cut is None or cut.dim is None else size


def shard_shape(shape: Sequence[int], cut: Cut | None, size: int) -> tuple[int, ...]:
    """The shape of what each of `size` tensor-parallel ranks holds of a parameter of the full `shape`.

    Raises:
        ValueError: it cannot be cut so, or not have these tiles.
    """
    if cut is not None and cut.tiles:
        _check_tiles(shape, cut)
    if cut is None or cut.dim is None:
        return tuple(shape)
    parts = [stop - start for start, stop in pairwise(cut.tiles[cut.dim])] if cut.tiles else [cut.padded]
    rest = any(part % (size * cut.stride) for part in parts)
    if rest or cut.padded < shape[cut.dim] or (cut.padded > shape[cut.dim] and (cut.stride > 1 or cut.tiles)):
        raise ValueError(f"a parameter of shape {tuple(shape)} cannot be cut for {size} ranks by {cut}")
    return (*shape[: cut.dim], cut.padded // size, *shape[cut.dim + 1 :])


def _check_tiles(shape: Sequence[int], cut: Cut) -> None:
    """Raises a ValueError where they are not those of a parameter of this shape. Makes none: there may be absurdly many."""
    is_whole = len(cut.tiles) == len(shape) and all(
        (bounds[0], bounds[-1]) == (0, length) and all(a < b for a, b in pairwise(bounds))
        for bounds, length in zip(cut.tiles, shape, strict=True)
    )
    if not is_whole or cut.stride > 1:
        raise ValueError(f"a parameter of shape {tuple(shape)} cannot have the tiles of {cut}")


def shard_to_full(shape: Sequence[int], cut: Cut | None, rank: int, size: int) -> RangeMap:
    """Elements of the flattened shard of `rank` -> elements of the flattened full parameter; padding has no image.

    Raises:
        ValueError: the parameter cannot be cut so.
    """
    if cut is None:
        return RangeMap.of([0], [0], [math.prod(shape)])
    part = shard_shape(shape, cut, size)
    if cut.tiles:
        tiles = _tiles_of(cut)
        maps = [shard_to_full(tile, own, rank, size).then(_tile_to_full(shape, at, tile)) for at, tile, own in tiles]
        return _one_behind_the_other(maps, [math.prod(shard_shape(tile, own, size)) for _, tile, own in tiles])
    assert cut.dim is not None, "only tiles may be whole"
    rows_of_shard = part[cut.dim]
    outer, rows, inner = math.prod(shape[: cut.dim]), shape[cut.dim], math.prod(shape[cut.dim + 1 :])
    chunk = rows_of_shard // cut.stride
    k = np.arange(cut.stride)
    first = (k * size + rank) * chunk  # row of the full parameter where the k-th stacked matrix's part begins
    length = np.clip(rows - first, 0, chunk)  # fewer where padding begins
    before = np.arange(outer)[:, None]
    source, target = (before * rows_of_shard + k * chunk) * inner, (before * rows + first) * inner
    lengths = np.broadcast_to(length * inner, source.shape)
    return RangeMap(*(column[lengths > 0] for column in (source, target, lengths)))


def shards_to_full(shape: Sequence[int], cut: Cut | None, size: int) -> RangeMap:
    """The same of all shards, which lie one behind the other; of a parameter that is not cut there is one.

    Raises:
        ValueError: the parameter cannot be cut so.
    """
    maps = [shard_to_full(shape, cut, rank, size) for rank in range(holders(cut, size))]
    return _one_behind_the_other(maps, [math.prod(shard_shape(shape, cut, size))] * len(maps))


def _tiles_of(cut: Cut) -> list[tuple[tuple[int, ...], tuple[int, ...], Cut | None]]:
    """The tiles in their order, the last dimension's first: where each begins, its shape, and how it is cut."""
    found = []
    for spans in product(*map(pairwise, cut.tiles)):
        tile = tuple(stop - start for start, stop in spans)
        own = None if cut.dim is None else Cut(cut.dim, 1, tile[cut.dim])
        found.append((tuple(start for start, _ in spans), tile, own))
    return found


def _tile_to_full(shape: Sequence[int], at: Sequence[int], tile: Sequence[int]) -> RangeMap:
    """Elements of a flattened tile that begins at `at` -> elements of the flattened parameter, a row of the tile at a time."""
    width, rows = tile[-1], np.arange(math.prod(tile[:-1]))
    target, step, rest = np.full(rows.shape, at[-1]), shape[-1], rows
    for first, length, whole in zip(at[-2::-1], tile[-2::-1], shape[-2::-1], strict=True):
        target, rest, step = target + (first + rest % length) * step, rest // length, step * whole
    return RangeMap(rows * width, target, np.full(rows.shape, width))


def _one_behind_the_other(maps: Sequence[RangeMap], numels: Sequence[int]) -> RangeMap:
    """The maps as one, whose sources are those of the first, of `numels[0]` elements, then those of the second, ..."""
    starts = np.cumsum(numels) - numels
    source = [each.source + start for each, start in zip(maps, starts, strict=True)]
    return RangeMap(*map(np.concatenate, (source, [each.target for each in maps], [each.length for each in maps])))
