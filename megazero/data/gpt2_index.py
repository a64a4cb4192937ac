"""The order of GPT-2 training samples: three index arrays over the documents of a split, as Megatron-core builds them.

Documents are repeated for E epochs and shuffled (`doc_idx`), laid end to end as one stream of tokens, and cut every L tokens
(`sample_idx`); the samples are then shuffled (`shuffle_idx`). Sample i covers the L + 1 tokens from i * L on, so neighbours share
one token: the last target of one is the first input of the next. For the same seed the arrays equal Megatron-core's.
"Document" means a sequence of the indexed files here, as it does there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megazero.cgroups import available_host_memory

# The last epoch is shuffled apart from the others when less than this share of its samples is needed.
_WHOLE_EPOCH_SHARE = 0.80
_CHUNK = 1 << 20  # samples whose places are sought at a time: this takes several times the memory that these do
_MAX_INT32 = np.iinfo(np.int32).max
_MAX_UINT32 = np.iinfo(np.uint32).max


class GPT2Index(NamedTuple):
    """The index arrays of one split.

    Attributes:
        doc_idx: [epochs * documents] int32, numbers of documents in the order of the stream.
        sample_idx: [samples + 1, 2] int32 (int64 where positions need it), position in doc_idx and offset in tokens where
            sample i starts; row i + 1 is where it ends (inclusive).
        shuffle_idx: [samples] uint32 (int64 from 2**32 - 2 samples on), the sample shown at each place of the training order.
    """

    doc_idx: npt.NDArray[np.int32]
    sample_idx: npt.NDArray[np.integer]
    shuffle_idx: npt.NDArray[np.integer]


def parse_split(split: str) -> tuple[float, float, float]:
    """The weights of train, validation and test in "949,50,1" (also with `/`; missing ones are 0), normalised to sum 1.

    Raises:
        ValueError: not one to three non-negative numbers with a positive sum.
    """
    parts = [part for part in re.split(r"[,/\s]+", split.strip()) if part]
    try:
        weights = np.array([float(part) for part in parts])
    except ValueError:
        weights = np.array([-1.0])
    if not 1 <= len(weights) <= 3 or not np.all(np.isfinite(weights)) or np.any(weights < 0) or weights.sum() == 0:
        raise ValueError(
            f"--split {split!r} should be the weights of training, validation and test data: one to three numbers, none "
            "negative, not all 0, for example 949,50,1"
        )
    train, valid, test = [*(weights / weights.sum()).tolist(), 0.0, 0.0][:3]
    return train, valid, test


def split_ranges(weights: Sequence[float], num_documents: int) -> list[tuple[int, int]]:
    """Which documents [start, stop) train, validation and test get.

    Boundaries are the rounded cumulative weights times the number of documents (Python's round, half to even). A range is empty
    for a weight of 0, and may be when there are few documents: that is for the caller to refuse.
    """
    bounds = [round(share * num_documents) for share in accumulate(weights, initial=0.0)]
    return list(pairwise(bounds))


def num_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """The smallest E >= 1 with E * tokens_per_epoch >= num_samples * seq_length + 1."""
    return -(-(num_samples * seq_length + 1) // tokens_per_epoch)


def shuffled_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> tuple[int, int]:
    """How many epochs are shuffled together, and how many, one or none, apart from them and behind.

    With the seed, these are all that the order of the samples depends on.
    """
    epochs = num_epochs(tokens_per_epoch, seq_length, num_samples)
    before_last = samples_of(epochs - 1, tokens_per_epoch, seq_length)
    per_epoch = samples_of(1, tokens_per_epoch, seq_length)
    is_last_apart = epochs > 1 and num_samples - before_last < int(_WHOLE_EPOCH_SHARE * per_epoch)
    return (epochs - 1, 1) if is_last_apart else (epochs, 0)


def samples_of(epochs: int, tokens_per_epoch: int, seq_length: int) -> int:
    """Samples that end within so many epochs: each needs one token more than its length."""
    return (epochs * tokens_per_epoch - 1) // seq_length


def refuse_too_many(name: str, num_samples: int, nbytes: int) -> None:
    """Raises if the order of the samples of a split takes more than the host's memory: it is in memory while it is built.

    Args:
        nbytes: what the order takes at least.

    Raises:
        ValueError: there is less.
    """
    free = available_host_memory(Path("/"))
    if free is not None and nbytes > free:
        flags = "--train-iters, --global-batch-size or --batch-size"
        if name != "train":
            flags = "--eval-iters, --eval-batch-size or --batch-size"
        raise ValueError(
            f"{num_samples} {name} samples were asked for: their order alone takes {nbytes / 1e9:.1f} GB of host memory, and "
            f"{free / 1e9:.1f} GB are there. Lower {flags}."
        )


def build_index(
    sizes: npt.NDArray[np.int32], documents: tuple[int, int], num_samples: int, seq_length: int, seed: int
) -> GPT2Index:
    """The index arrays for at least `num_samples` samples from the documents [start, stop).

    Args:
        sizes: lengths in tokens of all documents of the corpus, int32; not only of those in the range, which hold some.
    """
    start, stop = documents
    tokens_per_epoch = int(sizes[start:stop].sum(dtype=np.int64))
    together, apart = shuffled_epochs(tokens_per_epoch, seq_length, num_samples)
    samples = samples_of(together + apart, tokens_per_epoch, seq_length)

    random = np.random.RandomState(seed)  # the one source, consumed in this order: documents, then samples
    doc_idx = np.concatenate(
        [_shuffled_documents(start, stop, epochs, random) for epochs in (together, apart) if epochs]
    )
    sample_idx = build_sample_idx(sizes[doc_idx], seq_length, samples)
    shuffle_idx = _shuffled_samples(samples_of(together, tokens_per_epoch, seq_length), samples, random)
    return GPT2Index(doc_idx, sample_idx, shuffle_idx)


def build_sample_idx(sizes: npt.NDArray[np.int32], seq_length: int, num_samples: int) -> npt.NDArray[np.integer]:
    """Where each sample starts, [num_samples + 1, 2], for documents of these sizes in the order of the stream.

    Token k of the stream lies in the first document whose end is beyond k: one binary search per sample over the ends.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    index = np.empty((num_samples + 1, 2), dtype=np.int64 if len(sizes) > _MAX_INT32 else np.int32)
    for first in range(0, len(index), _CHUNK):
        rows = index[first : first + _CHUNK]
        first_tokens = np.arange(first, first + len(rows), dtype=np.int64) * seq_length
        positions = np.searchsorted(ends, first_tokens, side="right")
        rows[:, 0] = positions
        rows[:, 1] = first_tokens - (ends[positions] - sizes[positions])
    index[0] = 0  # also when the stream begins with empty documents
    return index


def _shuffled_documents(start: int, stop: int, epochs: int, random: np.random.RandomState) -> npt.NDArray[np.int32]:
    documents = np.tile(np.arange(start, stop, dtype=np.int32), epochs)
    random.shuffle(documents)
    return documents


def _shuffled_samples(first: int, total: int, random: np.random.RandomState) -> npt.NDArray[np.integer]:
    """0..total in random order, the samples before `first` among themselves and the rest among themselves."""
    dtype: type[np.integer] = np.uint32 if total < _MAX_UINT32 - 1 else np.int64
    order = np.arange(total, dtype=dtype)
    random.shuffle(order[:first])
    random.shuffle(order[first:])
    return order
