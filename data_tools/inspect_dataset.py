"""Shows what is in a tokenized corpus: documents as text, statistics, and a histogram of the lengths.

    python -m data_tools inspect data/webtext_text_document --tokenizer-path data/gpt2_bpe --documents 0 -1 --histogram h.png

Documents go to standard output as text (or as JSON lines with --json), the statistics after them as one JSON line. Without a
tokenizer the ids are shown. The memory is the same for any size, so there is no --memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.inspect_statistics import describe, document_lengths, draw_histogram
from data_tools.preprocess_data import add_tokenizer_arguments, tokenizer_of
from megazero.data.corpora import find_corpora
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import check_tokenizer, read_sidecar, sidecar_path
from megazero.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shown:
    """One document as it is shown.

    Attributes:
        document: its number.
        tokens: its length.
        ids: the first of its tokens.
        text: what they say; None without a tokenizer.
        unknown_ids: those of `ids` that the vocabulary lacks, which `text` leaves out.
    """

    document: int
    tokens: int
    ids: list[int]
    text: str | None
    unknown_ids: list[int]

    def to_text(self) -> str:
        """A heading and the text, in which control characters are spelled out: a document cannot command the terminal."""
        cut = f", the first {len(self.ids)}" if len(self.ids) < self.tokens else ""
        unknown = f"; ids outside the vocabulary: {self.unknown_ids}" if self.unknown_ids else ""
        body = " ".join(map(str, self.ids)) if self.text is None else _printable(self.text)
        return f"--- document {self.document}: {self.tokens} tokens{cut}{unknown}\n{body}"


def _printable(text: str) -> str:
    return "".join(c if c in "\n\t" or ord(c) >= 0xA0 or 0x20 <= ord(c) < 0x7F else f"\\x{ord(c):02x}" for c in text)


def open_corpus(name: str) -> IndexedDataset:
    """The corpus that a prefix, or one of its files, names.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is text, or several corpora have the name, or a file is damaged.
    """
    found = find_corpora([name], "inspect")
    if len(found) != 1 or not found[0].is_indexed:
        what = (
            "text, not tokens" if len(found) == 1 else f"{len(found)} corpora ({', '.join(str(c.path) for c in found)})"
        )
        raise ValueError(f"inspect {name} stands for {what}. Give the prefix of one .bin/.idx pair.")
    return IndexedDataset(found[0].path)


def choose_documents(total: int, numbers: Sequence[int], sample: int, seed: int) -> list[int]:
    """Numbers of the documents to show: those asked for (negative ones count from the end), then `sample` others at random.

    Raises:
        ValueError: there is no such document.
    """
    chosen = []
    for number in numbers:
        if not -total <= number < total:
            raise ValueError(f"--documents {number}: the corpus has {total} documents, 0 to {total - 1}")
        chosen.append(number % total)
    return chosen + sorted(random.Random(seed).sample(range(total), min(sample, total)))


def document_tokens(data: IndexedDataset, document: int, max_tokens: int) -> tuple[np.ndarray, int]:
    """The first tokens of a document, and how many it has."""
    start, stop = data.token_starts(data.doc_idx[document : document + 2]).tolist()
    count = min(max_tokens, stop - start)
    return np.fromfile(data.bin_path, data.dtype, count, offset=start * data.dtype.itemsize), stop - start


def show_document(data: IndexedDataset, document: int, tokenizer: Tokenizer | None, max_tokens: int) -> Shown:
    """A document decoded."""
    tokens, total = document_tokens(data, document, max_tokens)
    ids = [int(i) for i in tokens]
    if tokenizer is None:
        return Shown(document, total, ids, None, [])
    unknown = [i for i in ids if not 0 <= i < tokenizer.vocab_size]
    return Shown(document, total, ids, tokenizer.decode(i for i in ids if 0 <= i < tokenizer.vocab_size), unknown)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    parser.add_argument("corpus", help="prefix of a .bin/.idx pair, or one of its files")
    show = parser.add_argument_group("documents")
    show.add_argument(
        "--documents", type=int, nargs="+", default=[], help="numbers of documents to show; -1 is the last"
    )
    show.add_argument("--sample", type=int, default=0, help="documents to show that are picked at random")
    show.add_argument("--seed", type=int, default=1234, help="of that choice")
    show.add_argument("--max-tokens", type=int, default=200, help="to show of each document")
    show.add_argument("--json", action="store_true", help="documents as JSON lines, with their ids")
    parser.add_argument("--histogram", type=Path, metavar="FILE.png", help="draw the lengths of the documents")
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Shows documents on standard output, draws the histogram, and returns the statistics."""
    if args.max_tokens < 1 or args.sample < 0:
        raise ValueError(f"--max-tokens {args.max_tokens} and --sample {args.sample}: at least 1, and at least 0")
    data = open_corpus(args.corpus)
    tokenizer = _tokenizer(args, data)
    for document in choose_documents(len(data.doc_idx) - 1, args.documents, args.sample, args.seed):
        shown = show_document(data, document, tokenizer, args.max_tokens)
        sys.stdout.write((json.dumps(asdict(shown), ensure_ascii=False) if args.json else shown.to_text()) + "\n")
    lengths = document_lengths(data)
    if args.histogram is not None:
        draw_histogram(data, lengths, args.histogram)
    record = read_sidecar(data.prefix)
    known = record or tokenizer
    return {
        "prefix": str(data.prefix),
        **describe(data, lengths, *((known.vocab_size, known.eod) if known is not None else ())),
        "tokenizer": None if record is None else {"type": record.tokenizer_type, "sha256": record.tokenizer_sha256},
        **({"histogram": str(args.histogram)} if args.histogram is not None else {}),
    }


def _tokenizer(args: argparse.Namespace, data: IndexedDataset) -> Tokenizer | None:
    """The tokenizer that was named, checked against the record of the corpus; None if none was."""
    if not (args.vocab_file or args.merge_file or args.tokenizer_path):
        return None
    tokenizer = tokenizer_of(args)
    if not check_tokenizer(data.prefix, data.num_tokens, tokenizer):
        logger.warning("no %s: cannot check that this tokenizer made the corpus", sidecar_path(data.prefix))
    return tokenizer
