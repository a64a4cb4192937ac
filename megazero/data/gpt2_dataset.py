"""Samples of seq_length + 1 tokens cut from an indexed corpus, across document boundaries, in the order of gpt2_index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megazero.data.cache import ArrayCache
from megazero.data.gpt2_index import GPT2Index, build_index, num_epochs, refuse_too_many, shuffled_epochs
from megazero.data.indexed_dataset import IndexedDataset


class GPT2Dataset:
    """Map-style dataset: item i is `{"text": int64 [seq_length + 1]}`; inputs are text[:-1], targets text[1:].

    Neighbours in the stream share one token. There may be more samples than were asked for, because epochs are not cut.

    Args:
        indexed: the corpus.
        documents: the range [start, stop) of its sequences that belongs to this split.
        name: "train", "valid" or "test"; part of the names in the cache and of messages.
        num_samples: samples needed at least; the documents are repeated for as many epochs as that takes.
        seq_length: tokens per sample, without the one that neighbours share.
        seed: of the orders of documents and samples.
        cache: where the index arrays are stored; None keeps them in memory.

    Raises:
        ValueError: the range has no tokens.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: tuple[int, int],
        name: str,
        num_samples: int,
        seq_length: int,
        seed: int,
        cache: ArrayCache | None = None,
    ) -> None:
        self.indexed, self.seq_length = indexed, seq_length
        description: dict[str, Any] = {
            "kind": "gpt2",
            "name": name,
            "corpus": str(indexed.prefix.resolve()),
            "corpus_bytes": indexed.num_tokens * indexed.dtype.itemsize,
            "corpus_index": indexed.fingerprint,
            "documents": list(documents),
            "num_samples": num_samples,
            "seq_length": seq_length,
            "seed": seed,
        }
        self._arguments = (indexed, documents, name, num_samples, seq_length, seed, cache)
        self.tokens_per_epoch = int(indexed.sizes[documents[0] : documents[1]].sum(dtype=np.int64))
        if self.tokens_per_epoch == 0:
            raise ValueError(
                f"{indexed.prefix}: documents {documents[0]} to {documents[1]}, the {name} part, hold no tokens. Change --split."
            )

        def build() -> dict[str, np.ndarray]:
            epochs = num_epochs(self.tokens_per_epoch, seq_length, num_samples)
            # doc_idx, the sizes of its documents and their ends; sample_idx and shuffle_idx.
            nbytes = (4 + 4 + 8) * epochs * (documents[1] - documents[0]) + (8 + 4) * num_samples
            refuse_too_many(name, num_samples, nbytes)
            return build_index(indexed.sizes, documents, num_samples, seq_length, seed)._asdict()

        self.index = GPT2Index(**(build() if cache is None else cache.load_or_build(description, build)))

    @property
    def corpora(self) -> list[str]:
        """Which documents of the corpus these are, and a fingerprint of it: of the lengths of all its documents."""
        _, (start, stop), *_ = self._arguments
        return [f"{start}-{stop} of {self.indexed.fingerprint}"]

    @property
    def shuffled_epochs(self) -> list[list[int]]:
        """What `gpt2_index.shuffled_epochs` says: if it is the same for two numbers of samples, their order is."""
        _, _, _, num_samples, *_ = self._arguments
        return [[*shuffled_epochs(self.tokens_per_epoch, self.seq_length, num_samples)]]

    def __len__(self) -> int:
        return len(self.index.shuffle_idx)

    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]:
        sample = int(self.index.shuffle_idx[i])
        (position, offset), (last_position, last_offset) = self.index.sample_idx[sample : sample + 2].tolist()
        text = np.empty(self.seq_length + 1, dtype=np.int64)
        filled = 0
        for document in self.index.doc_idx[position : last_position + 1].tolist():
            is_last = position == last_position
            piece = self.indexed.get(document, offset, last_offset + 1 - offset if is_last else None)
            text[filled : filled + len(piece)] = piece
            filled += len(piece)
            position, offset = position + 1, 0
        return {"text": text}

    def source_of(self, i: int) -> tuple[Path, list[int]]:
        """The corpus of an item, and the numbers there of the documents that it is cut from, as `data_tools inspect` counts."""
        sample = int(self.index.shuffle_idx[i])
        (position, _), (last_position, _) = self.index.sample_idx[sample : sample + 2].tolist()
        sequences = self.index.doc_idx[position : last_position + 1]
        documents = np.searchsorted(self.indexed.doc_idx, sequences, side="right") - 1
        return self.indexed.prefix, list(dict.fromkeys(documents.tolist()))

    def __reduce__(self) -> tuple[Callable[..., GPT2Dataset], tuple]:
        return GPT2Dataset, self._arguments  # a data-loader worker maps the files itself
