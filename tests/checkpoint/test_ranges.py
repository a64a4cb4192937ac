"""Any (tensor-parallel, data-parallel) cut into any other, as arithmetic on ranges: tested against `Partition`."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.checkpoint.format import TensorEntry
from megazero.checkpoint.ranges import Cut, RangeMap, shard_shape, shard_to_full, shards_to_full
from megazero.mpu.partition import Partition
from tests.traced import traced_peak

SIZES = (1, 2, 3, 4)


@st.composite
def cuts(draw):
    """A shape, how it is cut, and two tensor-parallel sizes with the padded sizes that they need."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = draw(st.none() | st.integers(0, len(shape) - 1))
    if dim is None:
        return (
            tuple(shape),
            None,
            [(size, None) for size in draw(st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)))],
        )
    stride = draw(st.integers(1, 3))
    sizes = draw(st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)))
    if stride > 1:  # no padding: every size must divide
        shape[dim] = stride * sizes[0] * sizes[1] * draw(st.integers(1, 2))
        padded = [shape[dim]] * 2
    else:
        padded = [-(-shape[dim] // size) * size + size * draw(st.integers(0, 2)) for size in sizes]
    return (
        tuple(shape),
        Partition(dim, stride, full_size=shape[dim]),
        [(size, Cut(dim, stride, p)) for size, p in zip(sizes, padded, strict=True)],
    )


def shards(full: torch.Tensor, partition: Partition | None, size: int, cut: Cut | None) -> list[torch.Tensor]:
    """What each tensor-parallel rank holds, flattened; by the library's other way of cutting."""
    if partition is None or cut is None:
        return [full.reshape(-1)] * size
    return [partition.slice(full, rank, size, cut.padded).reshape(-1) for rank in range(size)]


@settings(max_examples=300)
@given(cuts())
def test_a_shard_maps_to_where_partition_takes_it_from(case):
    shape, partition, sizes = case
    full = torch.arange(1, int(np.prod(shape)) + 1).view(shape)
    for size, cut in sizes:
        for rank, shard in enumerate(shards(full, partition, size, cut)):
            found = torch.zeros(int(np.prod(shard_shape(shape, cut, size))), dtype=full.dtype)
            ranges = shard_to_full(shape, cut, rank, size)
            for source, target, length in zip(ranges.source, ranges.target, ranges.length, strict=True):
                found[source : source + length] = full.view(-1)[target : target + length]
            assert torch.equal(found, shard)


@settings(max_examples=300)
@given(cuts(), st.data())
def test_any_range_of_any_shard_comes_from_any_pieces_of_other_shards(case, data):
    shape, partition, ((saved_size, saved_cut), (size, cut)) = case
    full = torch.arange(1, int(np.prod(shape)) + 1).view(shape)
    # Saved: every shard in pieces that begin anywhere, all behind one another in any order, with gaps.
    pieces = []
    saved = shards(full, partition, saved_size, saved_cut)[: None if saved_cut else 1]
    for rank, shard in enumerate(saved):
        ends = sorted(data.draw(st.sets(st.integers(1, shard.numel() - 1), max_size=3))) if shard.numel() > 1 else []
        pieces += [
            (rank * shard.numel() + a, shard[a:b]) for a, b in zip([0, *ends], [*ends, shard.numel()], strict=True)
        ]
    pieces = data.draw(st.permutations(pieces))
    lengths = [len(values) for _, values in pieces]
    bases = np.cumsum([0] + [length + 1 for length in lengths])
    file = torch.zeros(int(bases[-1]), dtype=full.dtype)
    for base, (_, values) in zip(bases, pieces, strict=False):
        file[base : base + len(values)] = values
    to_file = RangeMap.of([start for start, _ in pieces], bases[:-1].tolist(), lengths)
    to_full = shards_to_full(shape, saved_cut, saved_size)
    for rank, shard in enumerate(shards(full, partition, size, cut)):
        start = data.draw(st.integers(0, shard.numel() - 1))
        stop = data.draw(st.integers(start + 1, shard.numel()))
        wanted = shard_to_full(shape, cut, rank, size).sources_from(start, stop)
        plan = wanted.then(to_full.inverse().then(to_file))
        found = torch.zeros(stop - start, dtype=full.dtype)
        for source, target, length in zip(plan.source, plan.target, plan.length, strict=True):
            found[source : source + length] = file[target : target + length]
        assert torch.equal(found, shard[start:stop]) and plan.numel == wanted.numel


@st.composite
def tiled(draw) -> tuple[int, Cut]:
    """A number of ranks, and the cut of a parameter in tiles, each of which divides by it."""
    size, dims = draw(st.sampled_from(SIZES)), draw(st.integers(1, 3))
    dim = draw(st.none() | st.integers(0, dims - 1))
    lengths = [draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)) for _ in range(dims)]
    bounds = [np.cumsum([0, *of_dim]) * (size if d == dim else 1) for d, of_dim in enumerate(lengths)]
    padded = 0 if dim is None else int(bounds[dim][-1])
    return size, Cut(dim, 1, padded, tuple(tuple(map(int, each)) for each in bounds))


@settings(max_examples=200)
@given(tiled())
def test_a_rank_has_its_parts_of_tiles_one_behind_the_other(case):
    size, cut = case
    shape = tuple(bounds[-1] for bounds in cut.tiles)
    full = torch.arange(int(np.prod(shape))).view(shape)
    tiles = [full[tuple(slice(*span) for span in spans)] for spans in product(*map(pairwise, cut.tiles))]
    for rank in range(size):
        parts = [tile if cut.dim is None else tile.chunk(size, cut.dim)[rank] for tile in tiles]
        want = torch.cat([part.reshape(-1) for part in parts])
        ranges, found = shard_to_full(shape, cut, rank, size), torch.full_like(want, -1)
        for source, target, length in zip(ranges.source, ranges.target, ranges.length, strict=True):
            found[source : source + length] = full.view(-1)[target : target + length]
        assert torch.equal(found, want) and len(want) == int(np.prod(shard_shape(shape, cut, size)))


def test_ranges_that_go_on_are_joined_so_that_an_unchanged_cut_reads_one_range():
    shape, cut = (1000, 64), Cut(1, 1, 64)
    ranges = shard_to_full(shape, cut, 1, 2)
    assert len(ranges.source) == 1000
    assert len(ranges.then(ranges.inverse()).source) == 1


def test_rows_that_go_on_in_the_full_parameter_alone_are_not_joined():
    rows = shard_to_full((2, 3), Cut(1, 1, 4), 0, 1)  # with a column of padding after each
    found = rows.then(shard_to_full((2, 3), None, 0, 1))
    assert [column.tolist() for column in (found.source, found.target, found.length)] == [[0, 4], [0, 3], [3, 3]]


@pytest.mark.parametrize("cut", [Cut(0, 1, 7), Cut(0, 2, 9), Cut(0, 3, 12), Cut(0, 1, 4)], ids=str)
def test_a_cut_that_cannot_be_is_refused(cut):
    with pytest.raises(ValueError, match="cannot be cut for 2 ranks"):
        shard_to_full((6, 3) if cut.padded != 4 else (5, 3), cut, 0, 2)


@pytest.mark.parametrize("tiles", [((0, 6),), ((0, 7), (0, 3)), ((1, 6), (0, 3)), ((0, 4, 4, 6), (0, 3))], ids=str)
def test_tiles_that_cannot_be_are_refused(tiles):
    with pytest.raises(ValueError, match="cannot have the tiles"):
        shard_to_full((6, 3), Cut(0, 1, 6, tiles), 0, 2)
    with pytest.raises(ValueError, match="cannot be cut for 2 ranks"):
        shard_to_full((6, 3), Cut(0, 1, 6, ((0, 3, 6), (0, 3))), 0, 2)


@pytest.mark.parametrize("cut", [Cut(0, 2, 8, ((0, 4, 8), (0, 3))), Cut(0, 1, 16, ((0, 4, 8), (0, 3)))], ids=str)
def test_tiles_are_neither_stacked_nor_padded(cut):
    with pytest.raises(ValueError, match="a parameter of shape"):
        shard_shape((8, 3), cut, 2)


def test_an_entry_is_read_without_its_tiles_being_made():
    bounds = list(range(1001))
    cut = {"dim": 0, "stride": 1, "padded": 1000, "tiles": [bounds, bounds]}
    with traced_peak() as peak:
        entry = TensorEntry.from_json(
            {"kind": "frozen", "shape": [1000, 1000], "cut": cut, "states": {"constant": "F32"}}, 1
        )
        assert peak() < 1e6
    assert entry.cut == Cut(0, 1, 1000, (tuple(bounds),) * 2)
