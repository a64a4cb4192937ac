"""Turns documents into tokens: .bin/.idx files for --train-data. If killed, it resumes where it stopped.

    python -m data_tools tokenize --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --vocab-file encoder.json --merge-file vocab.bpe

writes data/corpus_text_document.{bin,idx,json}: tokens and index as Megatron-LM has them, and a record of the tokenizer; and
data/corpus_text_document.dropped.jsonl, if lines held no document or no text. `python data_tools/preprocess_data.py` is the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a checkout that is not installed

from data_tools.documents import check_documents, document_blocks
from data_tools.inputs import list_inputs
from data_tools.options import add_run_options, run_options
from megazero.data.build import build_tokenizer_from
from megazero.data.encoding import SURROGATES
from megazero.data.preprocess import tokenize_json
from megazero.data.tokenizer import TOKENIZER_TYPES, Tokenizer
from megazero.lines.contents import describe_files
from megazero.lines.partial_shard import DROPPED_SUFFIX
from megazero.lines.resumable import WorkOptions


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --tokenizer-type, --vocab-file, --merge-file and --tokenizer-path."""
    words = parser.add_argument_group("tokenizer")
    words.add_argument(
        "--tokenizer-type", choices=TOKENIZER_TYPES, default=TOKENIZER_TYPES[0], help="kind of vocabulary"
    )
    words.add_argument("--vocab-file", "--vocab", help="GPT-2's encoder.json, also known as vocab.json")
    words.add_argument("--merge-file", help="GPT-2's vocab.bpe, also known as merges.txt")
    words.add_argument(
        "--tokenizer-path", help="vocabulary file (*.model, tokenizer.json), or the folder that holds it"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    data = parser.add_argument_group("data")
    data.add_argument(
        "--input", nargs="+", required=True, help="files or folders: .jsonl (.gz, .xz, .zst), .parquet; in this order"
    )
    data.add_argument(
        "--json-keys", nargs="+", default=["text"], help="entries to tokenize, each into files of its own"
    )
    data.add_argument("--output-prefix", required=True, help="files are OUTPUT_PREFIX_KEY_document.bin, .idx, .json")
    data.add_argument("--append-eod", action="store_true", help="end every document with the end-of-text token")
    data.add_argument(
        "--surrogates",
        choices=SURROGATES,
        default=SURROGATES[0],
        help="unpaired surrogates (\\ud800): replaced by U+FFFD, or the line is left out and reported",
    )
    add_tokenizer_arguments(parser)
    work = add_run_options(parser, "--workers", "--memory", "--strict", "--max-line-mb")
    parser.set_defaults(memory="4G", block_kb=2048)  # the latter is no flag of this step
    work.add_argument(
        "--log-interval", type=int, default=10_000, help="documents between log lines where no bar is shown"
    )
    work.add_argument(
        "--dataset-impl", choices=("mmap",), default="mmap", help="accepted for Megatron-LM's scripts: always mmap"
    )
    work.add_argument("--chunk-size", type=int, help="accepted for Megatron-LM's scripts: workers take blocks of text")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Tokenizes each key, and returns the statistics."""
    limits = run_options(args)
    options = replace(limits, workers=limits.workers_in_memory)
    inputs = list_inputs(args.input)
    tokenizer = build_tokenizer_from(args)
    outputs = [_tokenize(args, inputs, key, tokenizer, options) for key in args.json_keys]
    return {
        "documents": sum(output["documents"] for output in outputs),
        "tokens": sum(output["tokens"] for output in outputs),
        "outputs": outputs,
        "tokenizer_sha256": tokenizer.sha256,
        "workers": options.workers,
    }


def _tokenize(
    args: argparse.Namespace, inputs: Sequence[Path], key: str, tokenizer: Tokenizer, options: WorkOptions
) -> dict[str, Any]:
    prefix = f"{args.output_prefix}_{key}_document"
    check_documents(inputs, key, options.max_line_bytes, "--json-keys")
    sidecar = tokenize_json(
        inputs,
        prefix,
        tokenizer,
        key=key,
        append_eod=args.append_eod,
        surrogates=args.surrogates,
        options=options,
        log_interval=args.log_interval,
        blocks=document_blocks,
        describe=partial(describe_files, threads=options.workers),
    )
    dropped = sidecar.statistics["bad_lines"] + sidecar.statistics["empty_documents"]
    return {
        "prefix": prefix,
        "documents": sidecar.documents,
        "tokens": sidecar.tokens,
        **sidecar.statistics,
        **({"dropped_list": f"{prefix}{DROPPED_SUFFIX}"} if dropped else {}),
    }


if __name__ == "__main__":
    from data_tools.megatron_names import run_script

    run_script("tokenize")
