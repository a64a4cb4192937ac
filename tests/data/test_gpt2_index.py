"""The order of samples: equal to a literal walk of Megatron-core's rules, and properties that any order must have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data import gpt2_index
from megazero.data.gpt2_index import build_index, build_sample_idx, num_epochs, parse_split, split_ranges
from tests.lines_run import lines_run
from tests.traced import traced_peak


def walk_samples(sizes, doc_idx, seq_length, num_samples):
    """Where samples start, token by token of the rules: fill seq_length + 1 tokens, the last one is used again."""
    position, offset = 0, 0
    rows = [(0, 0)]
    for _ in range(num_samples):
        remaining = seq_length + 1
        while remaining:
            available = sizes[doc_idx[position]] - offset
            remaining -= available
            if remaining <= 0:
                offset += remaining + available - 1
                remaining = 0
            else:
                position, offset = position + 1, 0
        rows.append((position, offset))
    return rows


def literal_index(sizes, documents, num_samples, seq_length, seed):
    """The three arrays by the rules, in loops."""
    start, stop = documents
    tokens = int(sum(sizes[start:stop]))
    epochs = 1
    while (epochs * tokens - 1) // seq_length < num_samples:
        epochs += 1
    sans_last = ((epochs - 1) * tokens - 1) // seq_length
    separate = epochs > 1 and num_samples - sans_last < int(0.80 * ((tokens - 1) // seq_length))
    random = np.random.RandomState(seed)
    parts = []
    for count in (epochs - 1, 1) if separate else (epochs,):
        part = np.array([d for _ in range(count) for d in range(start, stop)], dtype=np.int32)
        random.shuffle(part)
        parts.append(part)
    doc_idx = np.concatenate(parts)
    total = (epochs * tokens - 1) // seq_length
    orders = []
    for low, high in ((0, sans_last), (sans_last, total)) if separate else ((0, total),):
        order = np.arange(low, high, dtype=np.uint32)
        random.shuffle(order)
        orders.append(order)
    return doc_idx, walk_samples(sizes, doc_idx, seq_length, total), np.concatenate(orders), separate


CORPORA = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 0)


@settings(max_examples=300)
@given(
    sizes=CORPORA,
    seq_length=st.integers(1, 9),
    num_samples=st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_index_equals_the_literal_rules(sizes, seq_length, num_samples, seed, data):
    start = data.draw(st.integers(0, len(sizes) - 1))
    stop = data.draw(st.integers(start + 1, len(sizes)))
    if sum(sizes[start:stop]) == 0:
        start, stop = 0, len(sizes)
    array = np.array(sizes, dtype=np.int32)
    index = build_index(array, (start, stop), num_samples, seq_length, seed)
    doc_idx, rows, shuffle_idx, _ = literal_index(sizes, (start, stop), num_samples, seq_length, seed)
    assert index.doc_idx.tolist() == doc_idx.tolist()
    assert index.sample_idx.tolist() == [list(row) for row in rows]
    assert index.shuffle_idx.tolist() == shuffle_idx.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt2_index, "_CHUNK", 7)
        again = build_index(array, (start, stop), num_samples, seq_length, seed)
        assert np.array_equal(again.sample_idx, index.sample_idx)
    assert (index.doc_idx.dtype, index.sample_idx.dtype, index.shuffle_idx.dtype) == (np.int32, np.int32, np.uint32)
    assert len(shuffle_idx) >= num_samples


@settings(max_examples=200)
@given(sizes=CORPORA, seq_length=st.integers(1, 9), num_samples=st.integers(1, 60), seed=st.integers(0, 9))
def test_every_token_of_the_epochs_is_covered_and_neighbours_share_one(sizes, seq_length, num_samples, seed):
    array = np.array(sizes, dtype=np.int32)
    index = build_index(array, (0, len(sizes)), num_samples, seq_length, seed)
    epochs = num_epochs(sum(sizes), seq_length, num_samples)
    assert sorted(index.doc_idx.tolist()) == sorted(list(range(len(sizes))) * epochs), "each document once an epoch"
    samples = len(index.sample_idx) - 1
    assert sorted(index.shuffle_idx.tolist()) == list(range(samples)), "each sample once"
    ends = np.cumsum(array[index.doc_idx])
    starts = [
        int(ends[position] - array[index.doc_idx[position]] + offset) for position, offset in index.sample_idx.tolist()
    ]
    assert starts == list(range(0, samples * seq_length + 1, seq_length)), "sample i starts at token i * seq_length"
    assert all(offset < max(array[index.doc_idx[p]], 1) for p, offset in index.sample_idx.tolist())
    assert sum(sizes) * epochs - starts[-1] <= seq_length, "less than one sample is left over"


@settings(max_examples=200)
@given(tokens=st.integers(1, 500), seq_length=st.integers(1, 60), num_samples=st.integers(1, 200))
def test_epochs_are_the_fewest_that_are_enough(tokens, seq_length, num_samples):
    epochs = num_epochs(tokens, seq_length, num_samples)
    assert (epochs * tokens - 1) // seq_length >= num_samples
    assert epochs == 1 or ((epochs - 1) * tokens - 1) // seq_length < num_samples


@pytest.mark.parametrize(
    "num_samples, is_apart",
    [(10, False), (11, True), (17, True), (18, False), (21, False), (22, True), (28, True), (29, False)],
)
def test_last_epoch_is_shuffled_apart_when_little_of_it_is_needed(num_samples, is_apart):
    # 10 documents of 11 tokens, 10 samples of 10 tokens an epoch: apart below int(0.8 * 10) = 8 samples of the last one.
    sizes = np.full(10, 11, dtype=np.int32)
    index = build_index(sizes, (0, 10), num_samples, 10, seed=3)
    assert literal_index(sizes, (0, 10), num_samples, 10, 3)[3] == is_apart
    epochs = len(index.doc_idx) // 10
    last = index.doc_idx[-10:].tolist()
    assert epochs == -(-(num_samples * 10 + 1) // 110)
    if is_apart:
        assert sorted(last) == list(range(10))
        before = ((epochs - 1) * 110 - 1) // 10
        assert sorted(index.shuffle_idx[:before].tolist()) == list(range(before))
    elif epochs > 1:
        assert sorted(last) != list(range(10)), "documents of all epochs are mixed"


def test_orders_depend_on_the_seed_alone():
    sizes = np.arange(1, 60, dtype=np.int32)
    one, same, other = (build_index(sizes, (0, 59), 100, 7, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not np.array_equal(one.doc_idx, other.doc_idx) and not np.array_equal(one.shuffle_idx, other.shuffle_idx)


def test_long_documents_need_wide_positions():
    # Positions fit int32 as long as documents do; the stream of tokens needs 64 bits here.
    index = build_sample_idx(np.full(3, 2**31 - 1, dtype=np.int32), 2**30, 5)
    assert index.dtype == np.int32
    assert index.tolist() == [
        [0, 0],
        [0, 2**30],
        [1, 1],
        [1, 2**30 + 1],
        [2, 2],
        [2, 2**30 + 2],
    ]


def test_building_an_index_takes_little_more_memory_than_it_has(monkeypatch):
    monkeypatch.setattr(gpt2_index, "_CHUNK", 1000)
    sizes = np.full(100, 20_000, dtype=np.int32)
    with traced_peak() as peak:
        index = build_index(sizes, (0, 100), 190_000, 10, 0)
        assert peak() < 1.2 * sum(array.nbytes for array in index)


def test_a_million_documents_are_no_loop_over_documents_or_samples():
    sizes = np.random.RandomState(0).randint(1, 200, size=1_000_000).astype(np.int32)
    index, lines = lines_run(lambda: build_index(sizes, (0, len(sizes)), 97_000, 1024, 1))
    assert len(index.shuffle_idx) > 97_000 and lines < 1000


@pytest.mark.parametrize(
    "split, count, ranges",
    [
        ("949,50,1", 1000, [(0, 949), (949, 999), (999, 1000)]),
        ("949/50/1", 1000, [(0, 949), (949, 999), (999, 1000)]),
        ("1000,1,1", 124, [(0, 124), (124, 124), (124, 124)]),
        ("90,10", 55, [(0, 50), (50, 55), (55, 55)]),  # 49.5 rounds to even
        ("1,0,1", 5, [(0, 2), (2, 2), (2, 5)]),  # 2.5 rounds to even
        ("1", 7, [(0, 7), (7, 7), (7, 7)]),
        ("0,1,0", 7, [(0, 0), (0, 7), (7, 7)]),
        ("0.98, 0.02", 100, [(0, 98), (98, 100), (100, 100)]),
    ],
)
def test_split_boundaries(split, count, ranges):
    assert split_ranges(parse_split(split), count) == ranges


@settings(max_examples=200)
@given(
    weights=st.tuples(*[st.floats(0, 1e6) for _ in range(3)]).filter(lambda w: sum(w) > 1e-3),
    count=st.integers(0, 10**7),
)
def test_splits_are_adjacent_and_cover_all(weights, count):
    parsed = parse_split(",".join(map(repr, weights)))
    ranges = split_ranges(parsed, count)
    assert ranges[0][0] == 0 and abs(ranges[-1][1] - count) == 0
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False)) and all(a <= b for a, b in ranges)


@pytest.mark.parametrize("split", ["", "0,0,0", "1,-1,1", "1,2,3,4", "a,b", "1,nan,1", "inf"])
def test_bad_split_names_the_flag(split):
    with pytest.raises(ValueError, match="--split"):
        parse_split(split)
