"""Drops documents that share a sequence of words with evaluation sets, so that a model is not tested on what it was trained on.

Brown et al. 2020 (arXiv:2005.14165, appendix C) take sequences of 13 words, without regard to case and punctuation, as here. The
reason in the dropped list is `contaminated`, its detail the first shared sequence and the evaluation file that has it. In
Chinese and other scripts without spaces each letter counts as a word, so they may need a larger --ngram. An evaluation file
that holds no text is an error, and so are texts that are all too short.

    python -m data_tools decontaminate --input clean/ --output train/ --evaluation lambada.jsonl wikitext.txt
"""

from __future__ import annotations

import argparse
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_tools.dedup_minhash import U64, VERSION, ngrams
from data_tools.documents import Document, document_blocks
from data_tools.inputs import list_inputs
from data_tools.line_functions import Dropped
from data_tools.options import RunOptions, add_input_output, add_run_options, run_options
from data_tools.shards import run_documents
from megazero.lines.contents import check_unchanged, describe_files
from megazero.lines.progress import Progress
from megazero.lines.results import BlockResult, read_documents
from megazero.texts import read_text

_BYTES_PER_NGRAM = 64  # of the table and while it is made


def normalized(text: str) -> str:
    """The text with one form of each letter, as `clean` gives it: é may be spelled as e and an accent."""
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


class Decontaminator:
    """A document function: raises Dropped for a document with `least` sequences of words or more of the evaluation sets.

    Args:
        size: words in a sequence.
        table: sorted hashes of the evaluation sets' sequences.
        source: [len(table)] which of the evaluation files has it.
        names: of the evaluation files.
    """

    def __init__(
        self, key: str, size: int, table: U64, source: npt.NDArray[np.uint32], names: list[str], least: int
    ) -> None:
        self.key, self.size, self.table, self.source = key, size, table, source
        self.names, self.least = names, least
        # One look tells of nearly every hash that it is not in the table.
        self._mask = np.uint64((1 << (16 * len(table)).bit_length()) - 1)
        self._occurs = np.zeros(int(self._mask) + 1, bool)
        self._occurs[table & self._mask] = True

    @property
    def nbytes(self) -> int:
        """What its tables take, in each process."""
        return self.table.nbytes + self.source.nbytes + self._occurs.nbytes

    def __call__(self, document: Document) -> Document:
        """The document as it is."""
        text = normalized(document[self.key])
        hashes, spans = ngrams(text, self.size)
        candidates = np.flatnonzero(self._occurs[hashes & self._mask])
        if len(candidates) == 0:
            return document
        places = np.minimum(np.searchsorted(self.table, hashes[candidates]), len(self.table) - 1)
        shared = self.table[places] == hashes[candidates]
        if len(np.unique(places[shared])) < self.least:
            return document
        (start, stop), place = spans[candidates[shared][0]], places[shared][0]
        sequence = " ".join(text[start:stop].split())
        raise Dropped("contaminated", detail=f"{self.names[self.source[place]]}: {sequence}")


def evaluation_table(
    paths: Sequence[Path], key: str, size: int, options: RunOptions
) -> tuple[U64, npt.NDArray[np.uint32], int]:
    """Sorted hashes of all sequences in the evaluation files, the file of each, and how many texts are too short to have one.

    Raises:
        ValueError: a line holds no document (an evaluation set is taken whole or not at all), there is no text, none is long
            enough, or the table outgrows --memory.
    """
    hashes: list[U64] = []
    sources: list[npt.NDArray[np.uint32]] = []
    too_short = total = 0
    with Progress("reading evaluation sets", sum(path.stat().st_size for path in paths)) as progress:
        for number, path in enumerate(paths):
            texts = 0
            for text in _texts(path, key, options):
                found = np.unique(ngrams(normalized(text), size)[0])
                texts += bool(text.strip())
                too_short += len(found) == 0
                hashes.append(found)
                sources.append(np.full(len(found), number, np.uint32))
                total += len(found)
                if total * _BYTES_PER_NGRAM > options.memory_bytes // 2:
                    raise ValueError(
                        f"--evaluation: more than {total} sequences of words at {path}, for which --memory is too little. "
                        f"Give at least {4 * total * _BYTES_PER_NGRAM >> 20}M."
                    )
            if not texts:
                raise ValueError(f"--evaluation {path}: it holds no text. Leave it out, or get the file again.")
            progress.update(texts, path.stat().st_size, path.stat().st_size)
    if not total:
        raise ValueError(f"--evaluation: none of the texts has --ngram {size} words. Lower --ngram to look for any.")
    table, first = np.unique(np.concatenate(hashes), return_index=True)
    return table, np.concatenate(sources)[first], too_short


def _texts(path: Path, key: str, options: RunOptions) -> Iterator[str]:
    if path.suffix == ".txt":
        yield read_text(path, "--evaluation")
        return
    before = 0
    for block in document_blocks(path, options.block_bytes, max_line_bytes=options.max_line_bytes):
        result = BlockResult()
        for *_, document in read_documents(block, key, result):
            yield document[key]
        if result.removed:
            line, _, _, fault = result.removed[0]
            raise ValueError(f"--evaluation {path}:{before + line + 1}: {fault} (--evaluation-key names the text)")
        before += result.counts.lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    add_input_output(parser)
    group = parser.add_argument_group("evaluation sets")
    group.add_argument("--evaluation", nargs="+", required=True, help="JSON lines, parquet, or .txt (one text a file)")
    group.add_argument("--evaluation-key", help="which entry is the text (default: as --json-key)")
    group.add_argument("--ngram", type=int, default=13, help="words in a sequence")
    group.add_argument("--min-matches", type=int, default=1, help="different shared sequences to drop for")
    add_run_options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Decontaminates, and returns the statistics."""
    options = run_options(args)
    if args.ngram < 1 or args.min_matches < 1:
        raise ValueError(f"--ngram {args.ngram} and --min-matches {args.min_matches} must be at least 1")
    texts = [Path(path) for path in args.evaluation if Path(path).suffix == ".txt" and Path(path).is_file()]
    others = [path for path in args.evaluation if Path(path) not in texts]
    evaluation = [*texts, *list_inputs(others, flag="--evaluation")]
    contents = describe_files(evaluation, options.workers)
    table, source, too_short = evaluation_table(evaluation, args.evaluation_key or args.json_key, args.ngram, options)
    check_unchanged(evaluation, contents, options.workers)
    names = [path.name for path in evaluation]
    function = Decontaminator(args.json_key, args.ngram, table, source, names, args.min_matches)
    settings = {
        "evaluation": contents,
        "evaluation_key": args.evaluation_key,
        "ngram": args.ngram,
        "min_matches": args.min_matches,
        "version": VERSION,
    }
    options = replace(options, held_bytes=function.nbytes)
    result = run_documents("decontaminate", function, settings, args, options, evaluation)
    return {**result, "evaluation_sequences": len(table), "evaluation_texts_too_short": too_short}
