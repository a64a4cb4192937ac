"""What a tokenized corpus consists of: lengths of documents, ends of text, use of the vocabulary; and a histogram.

All of it comes from one pass over the index and one over the tokens, a piece at a time: the memory is the same for any size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_tools.optional import require
from megazero.data.indexed_dataset import IndexedDataset
from megazero.files import written_aside
from megazero.lines.progress import Progress

PERCENTILES = (5, 25, 50, 75, 95, 99)
_CHUNK = 1 << 20  # tokens, or documents, in memory at a time
_LARGEST_COUNTED_ID = 1 << 24  # beyond any vocabulary: ids of a damaged file must not size an array


@dataclass(frozen=True)
class Lengths:
    """How many documents have which length: values [n], int64 and rising, and their counts [n]."""

    values: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @property
    def documents(self) -> int:
        """How many there are."""
        return int(self.counts.sum())

    def percentile(self, percent: int) -> int:
        """The length of the document at this place of all, rounded down, in the order of their lengths."""
        place = math.floor((self.documents - 1) * (percent / 100))
        return int(self.values[np.searchsorted(np.cumsum(self.counts), place, side="right")])


def document_lengths(data: IndexedDataset) -> Lengths:
    """The lengths of all documents, in tokens."""
    total: Counter[int] = Counter()
    for ends in _document_ends(data):
        values, counts = np.unique(np.diff(ends), return_counts=True)
        total.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    values, counts = np.array(sorted(total.items()), np.int64).reshape(-1, 2).T
    return Lengths(values, counts)


def _document_ends(data: IndexedDataset) -> Iterator[npt.NDArray[np.int64]]:
    """In pieces: the token at which a document begins, and those at which it and each of the next ones end."""
    for first in range(0, len(data.doc_idx) - 1, _CHUNK):
        yield data.token_starts(data.doc_idx[first : first + _CHUNK + 1])


@dataclass(frozen=True)
class TokenCounts:
    """What one pass over the tokens counts.

    Attributes:
        counts: [largest id + 1] int64, how often each id occurs; empty where ids are negative or too large to be real.
        low: the smallest id; 0 without tokens.
        high: the largest id; -1 without tokens.
        ending_in_eod: documents whose last token is the end of text.
    """

    counts: npt.NDArray[np.int64]
    low: int
    high: int
    ending_in_eod: int


def count_tokens(data: IndexedDataset, eod: int | None) -> TokenCounts:
    """Counts ids in one pass over the .bin."""
    low, high, ending = 0, -1, 0
    counts = np.zeros(0, dtype=np.int64)
    with Progress("counting", data.num_tokens * data.dtype.itemsize) as progress:
        for ends in _document_ends(data):
            last = ends[1:][np.diff(ends) > 0] - 1  # position of the last token of each document, rising
            for start in range(int(ends[0]), int(ends[-1]), _CHUNK):
                stop = min(start + _CHUNK, int(ends[-1]))
                chunk = data.read(start, stop)
                smallest, largest = int(chunk.min()), int(chunk.max())
                low, high = (smallest, largest) if high < low else (min(low, smallest), max(high, largest))
                if low >= 0 and high < _LARGEST_COUNTED_ID:
                    counts = np.concatenate([counts, np.zeros(max(0, high + 1 - len(counts)), dtype=np.int64)])
                    counts += np.bincount(chunk, minlength=len(counts))
                else:
                    counts = counts[:0]
                here = last[np.searchsorted(last, start) : np.searchsorted(last, stop)]
                if eod is not None:
                    ending += int(np.count_nonzero(chunk[here - start] == eod))
                progress.update(len(here), chunk.nbytes, chunk.nbytes)
    return TokenCounts(counts, low, high, ending)


def describe(
    data: IndexedDataset, lengths: Lengths, vocab_size: int | None = None, eod: int | None = None
) -> dict[str, Any]:
    """The statistics of a corpus as JSON values.

    Args:
        lengths: its `document_lengths`.
        vocab_size: entries of the vocabulary; ids beyond it are counted as `unknown_ids`. None leaves that out.
        eod: id of the end of text; None leaves out what depends on it.
    """
    result: dict[str, Any] = {
        "documents": lengths.documents,
        "sequences": len(data),
        "tokens": data.num_tokens,
        "dtype": str(data.dtype),
        "bytes": data.bin_path.stat().st_size + data.index_path.stat().st_size,
        "empty_documents": int(lengths.counts[lengths.values == 0].sum()),
    }
    if lengths.documents:
        result["length"] = {
            "min": int(lengths.values[0]),
            **{f"p{percent}": lengths.percentile(percent) for percent in PERCENTILES},
            "max": int(lengths.values[-1]),
            "mean": round(data.num_tokens / lengths.documents, 1),
        }
    found = count_tokens(data, eod)
    result |= {"smallest_id": found.low, "largest_id": found.high}
    if len(found.counts):
        result["distinct_ids"] = int(np.count_nonzero(found.counts))
        if vocab_size is not None:
            result["unknown_ids"] = int(found.counts[vocab_size:].sum())
        if eod is not None:
            eods = int(found.counts[eod]) if eod < len(found.counts) else 0
            # An end of text inside of a document was put there by a tokenizer that took text for a special token.
            result |= {
                "documents_ending_in_eod": found.ending_in_eod,
                "eod_inside_documents": eods - found.ending_in_eod,
            }
    return result


def draw_histogram(data: IndexedDataset, lengths: Lengths, path: Path) -> None:
    """Writes a PNG of how many documents, and how many of the tokens, have which length (logarithmic).

    Raises:
        ValueError: matplotlib is not installed; the corpus has no tokens.
    """
    matplotlib = require("matplotlib.figure", "--histogram", "matplotlib")  # without pyplot: no window system, no state
    values, counts = (each[lengths.values > 0] for each in (lengths.values, lengths.counts))
    if len(values) == 0:
        raise ValueError(f"--histogram {path}: {data.prefix} has no tokens to draw")
    documents = int(counts.sum())
    edges = np.unique(np.geomspace(values[0], values[-1] + 1, 61).round()).tolist()
    figure = matplotlib.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.hist(values, edges, weights=counts * (100 / documents), alpha=0.6, label="of the documents")
    axes.hist(values, edges, weights=values * counts * (100 / data.num_tokens), alpha=0.6, label="of the tokens")
    axes.set(xscale="log", xlabel="tokens in a document", ylabel="%")
    axes.set_title(f"{data.prefix.name}: {documents:,} documents, {data.num_tokens:,} tokens")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as file:
        figure.savefig(file, format="png", dpi=100)
