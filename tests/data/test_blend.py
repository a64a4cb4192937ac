"""Blending: exact proportions at every moment, in one fixed order, without a loop."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megazero.data import blend
from megazero.data.blend import BlendedDataset, BlendOrder, blend_indices
from megazero.data.cache import ArrayCache
from megazero.data.gpt2_dataset import GPT2Dataset
from tests.data.test_gpt2_dataset import corpus
from tests.lines_run import lines_run
from tests.traced import traced_peak

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=7)


def literal_blend(weights, num_samples):
    """The rule, one sample after the other: whoever's next sample is due first."""
    given = [0] * len(weights)
    order = []
    for _ in range(num_samples):
        due = [(count + 0.5) / w for count, w in zip(given, weights, strict=True)]
        first = due.index(min(due))
        order.append((first, given[first]))
        given[first] += 1
    return order


@settings(max_examples=150)
@given(weights=WEIGHTS, num_samples=st.integers(0, 200))
@example(weights=[60.0, 25.453, 71.621, 100.0], num_samples=19)  # 4.5 / 60 = 7.5 / 100: an exact tie
def test_order_equals_the_literal_rule(weights, num_samples):
    dataset_index, sample_index = blend_indices(weights, num_samples)
    assert dataset_index.dtype == np.int16 and sample_index.dtype == np.int64
    assert list(zip(dataset_index.tolist(), sample_index.tolist(), strict=True)) == literal_blend(weights, num_samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "_CHUNK", 7)
        assert all(map(np.array_equal, blend_indices(weights, num_samples), (dataset_index, sample_index)))


def test_building_an_order_takes_little_more_memory_than_it_has(monkeypatch):
    monkeypatch.setattr(blend, "_CHUNK", 1000)
    with traced_peak() as peak:
        arrays = blend_indices([0.3, 0.6, 0.1], 100_000)
        assert peak() < 1.2 * sum(array.nbytes for array in arrays)


def test_loading_an_order_takes_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(blend, "_CHUNK", 1000)
    BlendOrder([0.3, 0.6, 0.1], 1_000_000, "train", ArrayCache(tmp_path))
    with traced_peak() as peak:
        order = BlendOrder([0.3, 0.6, 0.1], 1_000_000, "train", ArrayCache(tmp_path, is_expected=True))
        assert peak() < 1_000_000, "less than a byte a sample"
    assert order.counts == [300_000, 600_000, 100_000]


@settings(max_examples=150)
@given(weights=WEIGHTS, num_samples=st.integers(1, 500))
def test_proportions_hold_at_every_moment(weights, num_samples):
    dataset_index, sample_index = blend_indices(weights, num_samples)
    shares = np.asarray(weights) / sum(weights)
    counts = np.cumsum(dataset_index[:, None] == np.arange(len(weights)), axis=0)
    target = np.arange(1, num_samples + 1)[:, None] * shares
    assert np.all(np.abs(counts - target) <= 0.5 + shares * len(weights) / 2 + 1e-6)
    for d in range(len(weights)):
        assert sample_index[dataset_index == d].tolist() == list(range(counts[-1, d])), "each dataset in its own order"


def test_ten_million_samples_are_no_loop_over_samples():
    (dataset_index, _), lines = lines_run(lambda: blend_indices([0.5, 0.3, 0.2], 10_000_000))
    assert np.bincount(dataset_index).tolist() == [5_000_000, 3_000_000, 2_000_000]
    assert lines < 1000


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0]])
def test_bad_weights_are_refused(weights):
    with pytest.raises(ValueError, match="must be positive numbers"):
        blend_indices(weights, 3)


def make_blend(tmp_path, cache):
    order = BlendOrder([1.0, 3.0], 20, "train", cache)
    datasets = []
    for name, count in zip("ab", order.counts, strict=True):
        (tmp_path / name).mkdir(exist_ok=True)
        datasets.append(GPT2Dataset(corpus(tmp_path / name, [40, 9]), (0, 2), "train", count, 4, 0, cache))
    return BlendedDataset(datasets, order)


def test_items_come_from_the_datasets_in_order(tmp_path):
    blend = make_blend(tmp_path, ArrayCache(tmp_path / "cache"))
    assert len(blend) == 20 and blend.order.counts == [5, 15]
    taken = [0, 0]
    for i in range(20):
        d = int(blend.order.dataset_index[i])
        assert np.array_equal(blend[i]["text"], blend.datasets[d][taken[d]]["text"])
        taken[d] += 1
    copy = pickle.loads(pickle.dumps(blend))
    assert all(np.array_equal(copy[i]["text"], blend[i]["text"]) for i in range(20))
    assert len(list((tmp_path / "cache").glob("blend-train-*.json"))) == 1


@pytest.mark.parametrize(("weights", "num_samples"), [([3.0, 1.0], 20), ([1.0, 3.0], 40)])
def test_other_weights_or_more_samples_are_another_order_in_the_cache(tmp_path, weights, num_samples):
    BlendOrder([1.0, 3.0], 20, "train", ArrayCache(tmp_path))
    order = BlendOrder(weights, num_samples, "train", ArrayCache(tmp_path))
    assert np.array_equal(order.dataset_index, blend_indices(weights, num_samples)[0])


def test_a_dataset_whose_first_sample_is_due_later_gives_none():
    assert BlendOrder([100.0, 1.0], 20, "valid").counts == [20, 0]


def test_too_short_datasets_are_refused(tmp_path):
    short = make_blend(tmp_path, None).datasets
    with pytest.raises(ValueError, match="samples, the blend needs 25 of it"):
        BlendedDataset(short, BlendOrder([1.0, 3.0], 100, "train"))
    order = BlendOrder([1.0, 3.0], 100, "train")
    order.counts = [len(dataset) for dataset in short]
    BlendedDataset(short, order)  # just long enough
    with pytest.raises(ValueError, match="1 datasets, but weights for 2"):
        BlendedDataset(short[:1], BlendOrder([1.0, 3.0], 4, "train"))
