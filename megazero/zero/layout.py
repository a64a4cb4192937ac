"""Where each parameter lies in a bucket's flat storage: pure arithmetic, no tensors and no communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TypeVar

ALIGNMENT = 64  # elements; in 16-bit dtypes a parameter then starts on a 128-byte boundary, as cuBLAS wants
NO_GROUP = -1  # the optimizer group of a parameter that was not passed to the optimizer
Key = TypeVar("Key")


@dataclass(frozen=True)
class Segment:
    """One parameter's place in a bucket."""

    name: str
    shape: tuple[int, ...]
    start: int  # offset in the bucket, elements
    group: int  # index of the optimizer's parameter group
    is_replicated: bool  # every tensor-parallel rank has the same values, so norms count it once

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbors in each dimension of the parameter."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @cached_property
    def stop(self) -> int:
        """Offset of the first element after the parameter."""
        return self.start + self.numel

    def clip(self, start: int, stop: int) -> tuple[int, int]:
        """[low, high) of the parameter's elements in [start, stop) of the bucket; low == high if it has none there."""
        return _overlap(self.start, self.stop, start, stop)


@dataclass(frozen=True)
class Span:
    """A contiguous range of a bucket whose parameters share optimizer group and tensor-parallel replication; includes padding."""

    start: int
    stop: int
    group: int
    is_replicated: bool

    def clip(self, start: int, stop: int) -> Span:
        """The part of this span in [start, stop); empty parts have start == stop."""
        return Span(*_overlap(self.start, self.stop, start, stop), self.group, self.is_replicated)


@dataclass(frozen=True)
class BucketLayout:
    """Segments in storage order, and the padded size of the storage."""

    segments: tuple[Segment, ...]
    numel: int
    num_shards: int

    @classmethod
    def build(cls, entries: Iterable[tuple[str, tuple[int, ...], int, bool]], num_shards: int) -> BucketLayout:
        """Lays out `(name, shape, group, is_replicated)` entries for `num_shards` equal shards.

        Entries are sorted by (group, is_replicated), so each optimizer group is one contiguous range and a shard holds at most
        one slice of it. Segments start on multiples of ALIGNMENT. The total is padded once, to whole aligned shards, one at
        least: the bucket of a unit whose parameters have no elements goes through each step as the others do.
        """
        segments, offset = [], 0
        for name, shape, group, is_replicated in sorted(entries, key=lambda entry: (entry[2], entry[3])):
            segment = Segment(name, tuple(shape), offset, group, is_replicated)
            segments.append(segment)
            offset = _round_up(segment.stop, ALIGNMENT)
        return cls(tuple(segments), _round_up(max(offset, 1), ALIGNMENT * num_shards), num_shards)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return self.numel // self.num_shards

    @cached_property
    def param_numel(self) -> int:
        """Elements without padding."""
        return sum(segment.numel for segment in self.segments)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """[start, stop) of the rank's shard."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    @property
    def _placed(self) -> Iterable[tuple[Segment, int]]:
        """Every segment, and where the padding after it ends."""
        ends = [segment.start for segment in self.segments[1:]] + [self.numel]
        return zip(self.segments, ends, strict=True)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of every stretch of padding, which belongs to no parameter and stays zero."""
        return tuple((segment.stop, end) for segment, end in self._placed if segment.stop < end)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The bucket cut by (group, is_replicated), in storage order; the last span includes the final padding."""
        return tuple(span for _, span in self.spans_by(lambda segment: (segment.group, segment.is_replicated)))

    def spans_by(self, key: Callable[[Segment], Key | None]) -> list[tuple[Key, Span]]:
        """Runs of adjacent segments with equal keys, by key, with the padding after them; segments of key None are left out."""
        spans: list[tuple[Key, Span]] = []
        for of_run, placed in groupby(self._placed, lambda each: key(each[0])):
            run = list(placed)
            first, end = run[0][0], run[-1][1]
            if of_run is not None:
                spans.append((of_run, Span(first.start, end, first.group, first.is_replicated)))
        return spans


def _overlap(start: int, stop: int, low: int, high: int) -> tuple[int, int]:
    """The overlap of [start, stop) and [low, high); an empty overlap has equal ends."""
    first = max(start, low)
    return first, max(first, min(stop, high))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
