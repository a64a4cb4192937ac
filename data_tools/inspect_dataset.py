"""Shows what is in a tokenized corpus: documents as text, statistics, and a histogram of the lengths.

    python -m data_tools inspect data/webtext_text_document --tokenizer-path data/gpt2_bpe --documents 0 -1 --histogram h.png

Documents go to standard output as text, or as ids without a tokenizer; the statistics after them as one JSON line. The memory is
the same for any size, so there is no --memory.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.inspect_statistics import describe, document_lengths, draw_histogram
from data_tools.preprocess_data import add_tokenizer_arguments
from megazero.data.build import build_tokenizer_from
from megazero.data.corpora import find_corpora
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import check_tokenizer, read_sidecar, sidecar_path
from megazero.data.tokenizer import Tokenizer
from megazero.logging import printable

logger = logging.getLogger(__name__)


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
    picked = random.Random(seed).sample(range(total), min(sample + len(chosen), total))
    return chosen + sorted([number for number in picked if number not in chosen][:sample])


def document_tokens(data: IndexedDataset, document: int, max_tokens: int) -> tuple[np.ndarray, int]:
    """The first tokens of a document, and how many it has."""
    start, stop = data.token_starts(data.doc_idx[document : document + 2]).tolist()
    return data.read(start, min(start + max_tokens, stop)), stop - start


def show_document(data: IndexedDataset, document: int, tokenizer: Tokenizer | None, max_tokens: int) -> str:
    """A heading and the text, in which control characters are spelled out: a document cannot command the terminal.

    Ids that the vocabulary lacks are named in the heading; without a tokenizer ids take the place of the text.
    """
    tokens, total = document_tokens(data, document, max_tokens)
    ids: list[int] = tokens.tolist()
    heading = f"--- document {document}: {total} tokens" + (f", the first {len(ids)}" if len(ids) < total else "")
    if tokenizer is None:
        return f"{heading}\n{' '.join(map(str, ids))}"
    if unknown := [i for i in ids if not 0 <= i < tokenizer.vocab_size]:
        heading += f"; ids outside the vocabulary: {unknown}"
    return f"{heading}\n{printable(tokenizer.decode(i for i in ids if 0 <= i < tokenizer.vocab_size))}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    parser.add_argument("corpus", help="prefix of a .bin/.idx pair, or one of its files")
    show = parser.add_argument_group("documents")
    show.add_argument(
        "--documents", type=int, nargs="+", default=[], help="numbers of documents to show; -1 is the last"
    )
    show.add_argument("--sample", type=int, default=0, help="number of further documents to show, picked at random")
    show.add_argument("--seed", type=int, default=1234, help="seed for --sample")
    show.add_argument("--max-tokens", type=int, default=200, help="tokens to show of each document, at most")
    parser.add_argument("--histogram", type=Path, metavar="FILE.png", help="draw a histogram of document lengths")
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Shows documents on standard output, draws the histogram, and returns the statistics."""
    if args.max_tokens < 1 or args.sample < 0:
        raise ValueError(f"--max-tokens {args.max_tokens} and --sample {args.sample}: at least 1, and at least 0")
    data = open_corpus(args.corpus)
    tokenizer = _tokenizer(args, data)
    for document in choose_documents(len(data.doc_idx) - 1, args.documents, args.sample, args.seed):
        sys.stdout.write(show_document(data, document, tokenizer, args.max_tokens) + "\n")
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
    tokenizer = build_tokenizer_from(args)
    if not check_tokenizer(data.prefix, data.num_tokens, tokenizer):
        logger.warning("no %s: cannot check that this tokenizer made the corpus", sidecar_path(data.prefix))
    return tokenizer
