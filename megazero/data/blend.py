"""Several datasets as one, in fixed proportions and a fixed order.

Rule: sample j (0, 1, ...) of the dataset with share w is due at time (j + 1/2) / w, and samples are taken in the order of
their due times, equal times in the order of the datasets. So at every moment each dataset has given its share, rounded: after
n samples of k datasets its count is within 1/2 + w * k / 2 of w * n. Megatron-LM picks the dataset that lags most, one sample
after the other; this rule needs no loop over samples, and its order is not Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megazero.data.cache import ArrayCache
from megazero.data.gpt2_dataset import GPT2Dataset
from megazero.data.gpt2_index import refuse_too_many

_CHUNK = 1 << 20  # samples that are merged at a time: this takes several times the memory that their places do


def blend_indices(weights: Sequence[float], num_samples: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """For each sample of the blend, the dataset it comes from [num_samples] and its number there [num_samples].

    Raises:
        ValueError: a weight is not a positive number.
    """
    array = np.asarray(weights, dtype=np.float64)
    if len(array) == 0 or not np.all(np.isfinite(array)) or np.any(array <= 0):
        raise ValueError(f"the weights of a blend must be positive numbers, got {list(weights)}")
    shares = array / array.sum()
    dataset_index, sample_index = np.empty(num_samples, dtype=np.int16), np.empty(num_samples, dtype=np.int64)
    taken = np.zeros(len(shares), dtype=np.int64)  # samples of each dataset
    for start in range(0, num_samples, _CHUNK):
        stop = min(start + _CHUNK, num_samples)
        # Due times up to stop + k / 2 hold every sample that can be among the first `stop`, see the bound above.
        ends = ((stop + len(shares) / 2) * shares).astype(np.int64) + 1
        # Divided by the weight, not by the share: times that are equal, like 4.5 / 60 and 7.5 / 100, then round alike.
        due = [(np.arange(*own) + 0.5) / weight for *own, weight in zip(taken, ends, array, strict=True)]
        # A stable sort merges runs that are sorted already: linear, and equal times stay in the order of the datasets.
        order = np.argsort(np.concatenate(due), kind="stable")[: stop - start]
        lengths = ends - taken
        chosen = np.repeat(np.arange(len(shares), dtype=np.int16), lengths)[order]
        dataset_index[start:stop] = chosen
        sample_index[start:stop] = order + (taken - (np.cumsum(lengths) - lengths))[chosen]
        taken += np.bincount(chosen, minlength=len(shares))
    return dataset_index, sample_index


class BlendOrder:
    """The order of a blend, stored in a cache like the orders of its datasets.

    Attributes:
        dataset_index: [num_samples] int16, which dataset each sample comes from.
        sample_index: [num_samples] int64, its number there.
        counts: how many samples each dataset gives.

    Raises:
        ValueError: a weight is not a positive number.
    """

    def __init__(self, weights: Sequence[float], num_samples: int, name: str, cache: ArrayCache | None = None) -> None:
        self._arguments = (weights, num_samples, name, cache)

        def build() -> dict[str, np.ndarray]:
            refuse_too_many(name, num_samples, (2 + 8) * num_samples)
            return dict(zip(("dataset_index", "sample_index"), blend_indices(weights, num_samples), strict=True))

        numbers = {"weights": [float(w) for w in weights], "num_samples": num_samples}
        arrays = build() if cache is None else cache.load_or_build({"kind": "blend", "name": name, **numbers}, build)
        self.dataset_index, self.sample_index = arrays["dataset_index"], arrays["sample_index"]
        # In chunks, because bincount makes int64 of what it counts.
        chunks = (self.dataset_index[i : i + _CHUNK] for i in range(0, num_samples, _CHUNK))
        counts = sum((np.bincount(chunk, minlength=len(weights)) for chunk in chunks), np.zeros(len(weights), np.int64))
        self.counts: list[int] = counts.tolist()

    def __reduce__(self) -> tuple[Callable[..., BlendOrder], tuple]:
        return BlendOrder, self._arguments  # a data-loader worker maps the files itself


class BlendedDataset:
    """Map-style dataset that mixes others; item i is an item of one of them.

    Args:
        datasets: dataset d has at least `order.counts[d]` samples.
        order: which of them gives each sample.

    Raises:
        ValueError: a dataset is missing or too short.
    """

    def __init__(self, datasets: Sequence[GPT2Dataset], order: BlendOrder) -> None:
        if len(datasets) != len(order.counts):
            raise ValueError(f"{len(datasets)} datasets, but weights for {len(order.counts)}")
        for dataset, count in zip(datasets, order.counts, strict=True):
            if len(dataset) < count:
                raise ValueError(f"{dataset.indexed.prefix} has {len(dataset)} samples, the blend needs {count} of it")
        self.datasets, self.order = list(datasets), order

    @property
    def corpora(self) -> list[str]:
        """What `GPT2Dataset.corpora` says, of each corpus."""
        return [fingerprint for dataset in self.datasets for fingerprint in dataset.corpora]

    @property
    def shuffled_epochs(self) -> list[list[int]]:
        """What `GPT2Dataset.shuffled_epochs` says, of each corpus: the blend's own order does not depend on its length."""
        return [epochs for dataset in self.datasets for epochs in dataset.shuffled_epochs]

    def __len__(self) -> int:
        return len(self.order.dataset_index)

    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]:
        return self.datasets[self.order.dataset_index[i]][int(self.order.sample_index[i])]

    def source_of(self, i: int) -> tuple[Path, list[int]]:
        """What `GPT2Dataset.source_of` says, of the item's dataset."""
        return self.datasets[self.order.dataset_index[i]].source_of(int(self.order.sample_index[i]))
