"""Turns tokens that other trainers have stored into .bin/.idx files for --train-data, cut into documents.

    python -m data_tools import_tokens --input fineweb10B/fineweb_train_*.bin --output-prefix data/fineweb --tokenizer-path vocab
    python -m data_tools import_tokens --input owt/train.bin --dtype uint16 --output-prefix data/owt --tokenizer-path vocab

writes data/fineweb_text_document.{bin,idx,json}: what `tokenize --append-eod` makes of the same text. An input is one of

- a file with the header of llm.c and modded-nanogpt, or a one-dimensional array as np.save writes it;
- a .parquet, of which each row has the tokens of one document (or, with --packed, of any piece of the stream);
- otherwise the tokens alone, in --dtype: nanoGPT's files, and those of OLMo, which are named .npy all the same.

Files are one stream in the order given, so a document may begin in one and end in the next. Documents end with the end of text,
which the last one, and each row, is given if it lacks it. As in `tokenize`, documents without text are left out: of a stream in
which documents begin with the end of text, as llm.c's do, that is the one before the first. A killed run goes on where it
stopped; the memory is the same for any size, so there is no --memory.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from data_tools.preprocess_data import add_tokenizer_arguments
from data_tools.token_files import DTYPES, Layout, Reader, find_inputs, layout_of
from megazero.data import mmidx
from megazero.data.build import build_tokenizer_from
from megazero.data.preprocess import lengths_of, make_corpus
from megazero.data.tokenizer import Tokenizer
from megazero.files import append_suffix
from megazero.lines.contents import describe_files
from megazero.lines.partial_shard import PartialShard
from megazero.lines.results import BlockResult, Counts, report_empty
from megazero.lines.resumable import Item, WorkOptions, fill_one
from megazero.logging import some

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 22  # a multiple of the size of each dtype


class Converter:
    """A `BlockWork`: tokens in the dtype in which they are kept, all of the vocabulary, the very last one an end of text."""

    def __init__(self, layouts: Sequence[Layout], tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        self.layouts, self.tokenizer, self.ends = layouts, tokenizer, ends
        self.dtype = mmidx.token_dtype(tokenizer.vocab_size)
        filled = [(number, layout.stop) for number, layout in enumerate(layouts) if layout.stop > layout.start]
        self.last = max(filled, default=None)

    def __call__(self, item: Item) -> BlockResult:
        """The tokens of a block; counts each end of text as that of a document."""
        block = item[1]
        data = block.read()
        ids = np.frombuffer(data, self.layouts[block.file].dtype)
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
        if low < 0 or high >= self.tokenizer.vocab_size:
            raise ValueError(
                f"{block.path} holds token ids from {low} to {high}, but {self.tokenizer.name} has {self.tokenizer.vocab_size} "
                "entries. Give the vocabulary that made the tokens, and for a file without a header the --dtype that stores them."
            )
        is_end = np.isin(ids, self.ends)
        tokens = ids.astype(self.dtype)
        tokens[is_end] = self.ends[0]
        if (block.file, block.stop) == self.last and not is_end[-1:].any():
            tokens = np.append(tokens, np.asarray(self.ends[:1], self.dtype))
        counts = Counts(documents=int(np.count_nonzero(tokens == self.ends[0])), text_bytes_in=len(data))
        return BlockResult([tokens.tobytes(), b""], counts, tokens=len(tokens))


class Cutter:
    """A `Place`: the tokens without empty documents, and the lengths of the documents that end in them."""

    def __init__(self, partial: PartialShard, dtype: np.dtype, eod: int) -> None:
        self.dtype, self.eod = dtype, eod
        lengths = lengths_of(partial)
        # Tokens of the last document so far.
        self._open = partial.sizes[0] // dtype.itemsize - int(lengths.sum(dtype=np.int64))

    def __call__(self, _: list[int], frames: list[bytes]) -> list[bytes]:
        """What is appended to the tokens and to the lengths."""
        tokens = np.frombuffer(frames[0], self.dtype)
        stops = np.flatnonzero(tokens == self.eod) + 1
        lengths = np.diff(stops, prepend=-self._open)
        self._open = len(tokens) - int(stops[-1]) if len(stops) else self._open + len(tokens)
        if (longest := max(int(lengths.max(initial=0)), self._open)) > mmidx.MAX_SEQUENCE:
            raise ValueError(
                f"there is no end of text (id {self.eod}) in {longest} tokens, and the .idx format stores documents of up to "
                f"{mmidx.MAX_SEQUENCE}. Give the vocabulary that made the tokens, or the id between documents: --delimiter."
            )
        is_empty = lengths == 1
        return [np.delete(tokens, stops[is_empty] - 1).tobytes(), lengths[~is_empty].astype("<i4").tobytes()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    data = parser.add_argument_group("data")
    data.add_argument(
        "--input", nargs="+", required=True, help="files of tokens, or folders of .bin, .npy or .parquet; in this order"
    )
    data.add_argument("--output-prefix", required=True, help="files are OUTPUT_PREFIX_text_document.bin, .idx, .json")
    data.add_argument("--dtype", choices=DTYPES, help="of tokens in files without a header")
    data.add_argument("--column", default="input_ids", help="the tokens' column in .parquet")
    data.add_argument("--packed", action="store_true", help="rows of .parquet are pieces of one stream, not documents")
    data.add_argument(
        "--delimiter",
        type=int,
        help="another id that is between documents, such as a beginning of text; becomes the end of text",
    )
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Imports, and returns the statistics."""
    prefix = append_suffix(args.output_prefix, "_text_document")
    paths, tokenizer = find_inputs(args.input, prefix), build_tokenizer_from(args)
    ends = [tokenizer.eod] if args.delimiter is None else [tokenizer.eod, args.delimiter]
    layouts = [layout_of(path, args.dtype) for path in paths]
    source = {
        "step": "import_tokens",
        "inputs": describe_files(paths),
        **{name: getattr(args, name) for name in ("dtype", "column", "packed", "delimiter")},
        "tokenizer_sha256": tokenizer.sha256,
    }

    def make(partial: PartialShard) -> dict[str, Any]:
        converter, reader = Converter(layouts, tokenizer, ends), Reader(layouts, args.column, args.packed, ends)
        options = WorkOptions(1, block_bytes=_BLOCK_BYTES)
        fill_one(partial, converter, options, "importing", reader, Cutter(partial, converter.dtype, tokenizer.eod))
        report_empty(paths)
        documents = len(lengths_of(partial))
        if not documents:
            partial.remove()
            raise ValueError(f"{some([*map(str, paths)])}: there are no documents in it")
        if documents == 1:
            logger.warning(
                "all is one document: the end of text, id %d, is nowhere inside. If another id is between documents, name it "
                "with --delimiter.",
                tokenizer.eod,
            )
        return {"empty_documents": partial.counts.documents - documents}

    sidecar, is_done = make_corpus(paths, prefix, tokenizer, source, make)
    return {
        "prefix": str(prefix),
        "inputs": len(paths),
        "documents": sidecar.documents,
        "tokens": sidecar.tokens,
        **sidecar.statistics,
        "dtype": str(mmidx.token_dtype(tokenizer.vocab_size)),
        "tokenizer_sha256": tokenizer.sha256,
        "skipped": is_done,
    }
