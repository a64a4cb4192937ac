"""BucketLayout is pure arithmetic: its properties hold for any parameters and any number of ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megazero.zero.layout import ALIGNMENT, BucketLayout

shapes = st.lists(st.integers(1, 70), min_size=1, max_size=3).map(tuple)
entries = st.lists(st.tuples(shapes, st.integers(0, 2), st.booleans()), min_size=1, max_size=9)


def build(items, world_size):
    return BucketLayout.build([(f"p{i}", *item) for i, item in enumerate(items)], world_size)


@given(entries, st.integers(1, 7))
def test_segments_are_aligned_disjoint_and_complete(items, world_size):
    layout = build(items, world_size)
    assert sorted(s.name for s in layout.segments) == sorted(f"p{i}" for i in range(len(items)))
    position = 0
    for segment in layout.segments:
        assert segment.start % ALIGNMENT == 0
        assert position <= segment.start < position + ALIGNMENT
        position = segment.stop
    assert position <= layout.numel


@given(entries, st.integers(1, 7))
def test_shards_are_equal_aligned_and_cover_the_bucket(items, world_size):
    layout = build(items, world_size)
    ranges = [layout.shard_range(rank) for rank in range(world_size)]
    assert [r[0] for r in ranges] == [rank * layout.shard_numel for rank in range(world_size)]
    assert ranges[-1][1] == layout.numel
    assert layout.shard_numel % ALIGNMENT == 0
    used = layout.segments[-1].stop
    assert layout.numel - used < ALIGNMENT * world_size  # padded once, by less than one aligned row of shards


@given(entries, st.integers(1, 7))
def test_spans_are_one_range_per_group_and_replication_and_cover_the_bucket(items, world_size):
    layout = build(items, world_size)
    keys = [(span.group, span.is_replicated) for span in layout.spans]
    assert len(set(keys)) == len(keys)
    assert layout.spans[0].start == 0 and layout.spans[-1].stop == layout.numel
    assert all(a.stop == b.start for a, b in zip(layout.spans, layout.spans[1:], strict=False))
    for segment in layout.segments:
        (span,) = [s for s in layout.spans if (s.group, s.is_replicated) == (segment.group, segment.is_replicated)]
        assert span.start <= segment.start and segment.stop <= span.stop


@given(entries, st.integers(1, 7))
def test_clipped_spans_partition_every_shard(items, world_size):
    layout = build(items, world_size)
    for rank in range(world_size):
        low, high = layout.shard_range(rank)
        parts = [span.clip(low, high) for span in layout.spans]
        assert sum(part.stop - part.start for part in parts) == layout.shard_numel


@given(entries, st.integers(1, 7))
def test_the_parts_of_a_segment_in_all_shards_are_the_segment(items, world_size):
    layout = build(items, world_size)
    for segment in layout.segments:
        position = segment.start
        for start, stop in map(layout.shard_range, range(world_size)):
            low, high = segment.clip(start, stop)
            if low < high:
                assert low == position and start <= low and high <= stop
                position = high
        assert position == segment.stop
