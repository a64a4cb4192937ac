"""Where each parameter lies in a bucket's flat storage: pure arithmetic, no tensors and no communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

ALIGNMENT = 64  # elements; in 16-bit dtypes a parameter then starts on a 128-byte boundary, as cuBLAS wants
NO_GROUP = -1  # the optimizer group of a parameter that was not passed to the optimizer


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

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of every stretch of padding, which belongs to no parameter and stays zero."""
        starts = [segment.start for segment in self.segments[1:]] + [self.numel]
        ends = [segment.stop for segment in self.segments]
        return tuple((stop, start) for stop, start in zip(ends, starts, strict=True) if stop < start)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The bucket cut by (group, is_replicated), in storage order; the last span includes the final padding."""
        return self.spans_by(lambda segment: (segment.group, segment.is_replicated))

    def spans_by(self, key: Callable[[Segment], object]) -> tuple[Span, ...]:
        """Runs of adjacent segments with equal keys, each with the padding after it; segments whose key is None are left out."""
        spans: list[Span] = []
        last: object = None
        starts = [segment.start for segment in self.segments[1:]] + [self.numel]
        for segment, stop in zip(self.segments, starts, strict=True):
            now = key(segment)
            if now is not None and now == last:
                spans[-1] = replace(spans[-1], stop=stop)
            elif now is not None:
                spans.append(Span(segment.start, stop, segment.group, segment.is_replicated))
            last = now
        return tuple(spans)


def _overlap(start: int, stop: int, low: int, high: int) -> tuple[int, int]:
    """The overlap of [start, stop) and [low, high); an empty overlap has equal ends."""
    first = max(start, low)
    return first, max(first, min(stop, high))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
