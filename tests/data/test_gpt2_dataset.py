"""Samples: the right tokens in the right order, across documents, from memory or cache, in other processes too."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megazero.data import cache, gpt2_index, mmidx
from megazero.data.blend import BlendOrder
from megazero.data.cache import ArrayCache
from megazero.data.gpt2_dataset import GPT2Dataset
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter


def corpus(folder, sizes):
    """Documents of these sizes whose tokens are numbered through, so that a token says where it comes from."""
    token = 0
    with IndexedDatasetWriter(folder / "c", np.int32) as writer:
        for size in sizes:
            writer.add_document(np.arange(token, token + size))
            token += size
    return IndexedDataset(folder / "c")


def stream_of(dataset):
    """The tokens of all epochs end to end."""
    return np.concatenate([dataset.indexed.get(d) for d in dataset.index.doc_idx.tolist()])


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(sum),
    seq_length=st.integers(1, 12),
    num_samples=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_samples_are_pieces_of_the_stream(tmp_path_factory, sizes, seq_length, num_samples, seed):
    dataset = GPT2Dataset(
        corpus(tmp_path_factory.mktemp("c"), sizes), (0, len(sizes)), "train", num_samples, seq_length, seed
    )
    stream = stream_of(dataset)
    place = {int(sample): i for i, sample in enumerate(dataset.index.shuffle_idx)}
    for sample in range(len(dataset)):
        text = dataset[place[sample]]["text"]
        assert text.dtype == np.int64 and text.shape == (seq_length + 1,)
        assert np.array_equal(text, stream[sample * seq_length : sample * seq_length + seq_length + 1])
    assert len(dataset) >= num_samples


def test_the_documents_of_a_sample_are_those_of_its_tokens(tmp_path):
    """The second document has two sequences, which are shuffled like documents, and the third has none."""
    with IndexedDatasetWriter(tmp_path / "c", np.int32) as writer:
        for sequences in ([[0, 0, 0]], [[1, 1], [1]], [], [[3, 3, 3, 3]]):
            for sequence in sequences:
                writer.add_sequence(sequence)
            writer.end_document()
    dataset = GPT2Dataset(IndexedDataset(tmp_path / "c"), (0, 4), "train", 20, 2, 0)
    for i in range(len(dataset)):
        assert dataset.source_of(i) == (tmp_path / "c", list(dict.fromkeys(dataset[i]["text"].tolist())))


def test_more_samples_than_memory_has_room_for_are_refused_before_they_are_ordered(tmp_path, monkeypatch):
    indexed = corpus(tmp_path, [7] * 12)
    with pytest.raises(ValueError, match="^1000000000000000 valid samples .* GB are there. Lower --eval-iters"):
        GPT2Dataset(indexed, (2, 12), "valid", 10**15, 4, 0)
    with pytest.raises(ValueError, match="^1000000000000000 train samples .* GB are there. Lower --train-iters"):
        BlendOrder([1.0, 2.0], 10**15, "train", None)

    def ordered():
        return GPT2Dataset(indexed, (2, 12), "train", 16, 12, 0).index

    def blended():
        order = BlendOrder([1.0, 2.0], 16, "train")
        return order.dataset_index, order.sample_index

    # The order in memory is what is counted, or more: of 3 epochs of 10 documents and 16 samples of them; of 16 samples.
    for make, counted in ((ordered, 16 * 30 + 12 * 16), (blended, 10 * 16)):
        assert sum(array.nbytes for array in make()) <= counted
        with monkeypatch.context() as patch:
            patch.setattr(gpt2_index, "available_host_memory", lambda root, counted=counted: counted)
            make()
            patch.setattr(gpt2_index, "available_host_memory", lambda root, counted=counted: counted - 1)
            with pytest.raises(ValueError, match="^16 train samples"):
                make()


def test_split_parts_do_not_overlap(tmp_path):
    indexed = corpus(tmp_path, [7] * 10)
    train, valid = (
        GPT2Dataset(indexed, part, name, 20, 4, 0) for part, name in (((0, 8), "train"), ((8, 10), "valid"))
    )
    seen = [set(np.concatenate([d[i]["text"] for i in range(len(d))]).tolist()) for d in (train, valid)]
    assert seen[0] <= set(range(56)) and seen[1] <= set(range(56, 70)) and len(seen[0]) > 50


def test_cache_gives_the_same_samples_and_is_not_rebuilt(tmp_path, caplog):
    indexed = corpus(tmp_path, range(1, 30))
    cache = ArrayCache(tmp_path / "cache")
    with caplog.at_level(logging.INFO, "megazero"):
        first = GPT2Dataset(indexed, (0, 29), "train", 200, 5, 1, cache)
        assert "built gpt2-train" in caplog.text
        caplog.clear()
        second = GPT2Dataset(indexed, (0, 29), "train", 200, 5, 1, cache)
        assert caplog.text == ""
    memory = GPT2Dataset(indexed, (0, 29), "train", 200, 5, 1)
    for i in range(len(memory)):
        assert np.array_equal(first[i]["text"], memory[i]["text"])
        assert np.array_equal(second[i]["text"], memory[i]["text"])
    assert isinstance(second.index.doc_idx, np.memmap)


@pytest.mark.parametrize("change", ["documents", "name", "num_samples", "seq_length", "seed", "sizes"])
def test_cache_is_keyed_by_everything(tmp_path, change):
    arguments = {"documents": (0, 5), "name": "train", "num_samples": 9, "seq_length": 3, "seed": 1}
    cache = ArrayCache(tmp_path / "cache")
    GPT2Dataset(corpus(tmp_path, [4, 5, 6, 7, 8, 9]), cache=cache, **arguments)
    if change == "sizes":
        indexed = corpus(tmp_path, [5, 4, 6, 7, 8, 9])  # the same path and number of bytes
    else:
        indexed = IndexedDataset(tmp_path / "c")
        arguments[change] = {"documents": (0, 6), "name": "test"}.get(change, 11)
    changed = GPT2Dataset(indexed, cache=cache, **arguments)
    assert len(list((tmp_path / "cache").glob("*.json"))) == 2
    fresh = GPT2Dataset(indexed, **arguments)
    assert all(np.array_equal(a, b) for a, b in zip(changed.index, fresh.index, strict=True))


def test_pickled_dataset_maps_files_instead_of_copying_them(tmp_path):
    indexed = corpus(tmp_path, [1000] * 100)
    dataset = GPT2Dataset(indexed, (0, 100), "train", 90_000, 1, 0, ArrayCache(tmp_path / "cache"))
    content = pickle.dumps(dataset)
    assert len(content) < 2000
    assert np.array_equal(pickle.loads(content)[77]["text"], dataset[77]["text"])


def test_a_pickled_dataset_is_not_checked_again(tmp_path, monkeypatch):
    dataset = GPT2Dataset(corpus(tmp_path, [9] * 9), (0, 9), "train", 20, 3, 0, ArrayCache(tmp_path / "cache"))
    content = pickle.dumps(dataset)
    monkeypatch.setattr(mmidx, "_check", lambda *_: pytest.fail("the index is read through"))
    monkeypatch.setattr(cache, "_checksum", lambda *_: pytest.fail("an array is read through"))
    assert np.array_equal(pickle.loads(content)[7]["text"], dataset[7]["text"])
    assert "fingerprint" in vars(pickle.loads(pickle.dumps(dataset.indexed)))


def test_loader_processes_read_the_same(tmp_path):
    dataset = GPT2Dataset(corpus(tmp_path, [50] * 4), (0, 4), "train", 30, 5, 0, ArrayCache(tmp_path / "cache"))
    batches = [list(range(i, i + 3)) for i in range(0, 30, 3)]
    for context in ("fork", "forkserver"):
        loader = DataLoader(dataset, batch_sampler=batches, num_workers=1, multiprocessing_context=context)
        for batch, indices in zip(loader, batches, strict=True):
            assert np.array_equal(batch["text"].numpy(), np.stack([dataset[i]["text"] for i in indices]))


def test_split_without_tokens_names_the_flag(tmp_path):
    with pytest.raises(ValueError, match="documents 1 to 2, the valid part, hold no tokens. Change --split"):
        GPT2Dataset(corpus(tmp_path, [3, 0]), (1, 2), "valid", 4, 10, 0)
