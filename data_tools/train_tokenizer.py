"""Trains a vocabulary on documents, such that decode(encode(text)) == text for every text.

    python -m data_tools train_tokenizer --input corpus.jsonl --vocab-size 8192 --model-prefix spm
    python -m data_tools train_tokenizer --input corpus.jsonl --vocab-size 8192 --model-type byte_level_bpe --model-prefix bpe

--model-type bpe and unigram write MODEL_PREFIX.model for SentencePieceTokenizer. The text is taken as it is (no normalisation,
white space kept, line ends are a piece of their own), and characters outside the vocabulary fall back to bytes, so nothing is
ever unknown. byte_level_bpe writes the folder MODEL_PREFIX with vocab.json, merges.txt (GPT2BPETokenizer) and tokenizer.json
(HuggingFaceTokenizer), laid out as GPT-2's. Where the same input and settings have made them, nothing is done.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from data_tools.documents import check_documents
from data_tools.done_marker import made_once
from data_tools.inputs import list_inputs
from data_tools.optional import version_of
from data_tools.options import add_run_options, number
from data_tools.train_sample import Sample, sample_documents
from data_tools.train_vocabulary import train_byte_level_bpe, train_sentencepiece
from megazero.data.tokenizer import GPT2BPETokenizer, SentencePieceTokenizer, Tokenizer
from megazero.files import append_suffix, written_aside
from megazero.lines.contents import check_unchanged, describe_files, key_of
from megazero.lines.partial_shard import DROPPED_SUFFIX
from megazero.lines.results import NO_TEXT, check_strict, no_text

logger = logging.getLogger(__name__)

BYTE_LEVEL = "byte_level_bpe"
MODEL_TYPES = ("bpe", "unigram", BYTE_LEVEL)
PROBE = "Round  trip:\n\n\ttabs, 1234, \u00fcber, \u4e2d\u6587, \u2581 and <|endoftext|> \r\n"
"""Text with everything that sentencepiece's usual settings would change."""

# What the step takes for a byte of the sample: 10, 20 and 6 were measured on English text, and half as much is added. And what it
# takes without a sample, with the copies of the longest line.
_BYTES_PER_BYTE = {"bpe": 15, "unigram": 30, BYTE_LEVEL: 9}
_FIXED_BYTES = 240 << 20
# Where a text is cut for training: the time of byte-level BPE and of unigram grows with the square of a word.
_LONG_RUN = re.compile(r"(\S{1000}|\s{1000})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    parser.add_argument(
        "--input", nargs="+", required=True, help="files or folders: .jsonl (.gz, .xz, .zst), .parquet; in this order"
    )
    parser.add_argument("--json-key", default="text", help="which entry is the text")
    parser.add_argument("--vocab-size", type=int, default=8192, help="entries, special ones and bytes included")
    parser.add_argument("--model-type", choices=MODEL_TYPES, default=MODEL_TYPES[0], help="kind of vocabulary")
    parser.add_argument("--model-prefix", required=True, help="of what is written; see above")
    parser.add_argument("--sample-mb", type=number, default=32.0, help="megabytes of text to train on at most")
    add_run_options(parser, "--memory", "--max-line-mb", "--strict")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains and writes the vocabulary, and returns the statistics."""
    _check_memory(args)
    paths, prefix = list_inputs(args.input), Path(args.model_prefix)
    package = "tokenizers" if args.model_type == BYTE_LEVEL else "sentencepiece"
    contents = describe_files(paths)
    description = {
        "step": "train_tokenizer",
        "inputs": contents,
        **{name: getattr(args, name) for name in ("json_key", "vocab_size", "model_type", "sample_mb", "max_line_mb")},
        "package": f"{package} {version_of(package, f'--model-type {args.model_type}')}",
    }

    def make(*files: BinaryIO) -> dict[str, Any]:
        max_line_bytes = int(args.max_line_mb * (1 << 20))
        check_documents(paths, args.json_key, max_line_bytes)
        sample = sample_documents(paths, args.json_key, args.sample_mb, args.strict, max_line_bytes)
        check_unchanged(paths, contents)
        if not sample.texts:
            raise no_text(paths, args.json_key, sample.counts, "--json-key")
        return {"result": _write(args, sample, files)}

    content, skipped = made_once(prefix, _outputs(args), key_of(description), make, "--model-prefix")
    result: dict[str, Any] = content["result"]
    check_strict(result["first_errors"], args.strict, f"when {prefix} was made")
    return {**result, "skipped": skipped}


def _check_memory(args: argparse.Namespace) -> None:
    need = _FIXED_BYTES + int(_BYTES_PER_BYTE[args.model_type] * args.sample_mb * 1e6)
    if args.sample_mb <= 0:
        raise ValueError(f"--sample-mb must be positive, got {args.sample_mb}")
    if need > args.memory:
        raise ValueError(
            f"--memory {args.memory >> 20}M is too little to train {args.model_type} on --sample-mb {args.sample_mb:g}, which "
            f"needs {need >> 20}M. Give more, or a smaller sample."
        )


def _outputs(args: argparse.Namespace) -> list[Path]:
    if args.model_type == BYTE_LEVEL:
        return [Path(args.model_prefix, name) for name in ("vocab.json", "merges.txt", "tokenizer.json")]
    return [append_suffix(args.model_prefix, ".model")]


def _write(args: argparse.Namespace, sample: Sample, files: Sequence[BinaryIO]) -> dict[str, Any]:
    """Writes the vocabulary into the files of the outputs, and returns its statistics; a ValueError if it loses text."""
    megabytes = sum(len(text.encode()) for text in sample.texts) / 1e6
    logger.info("training on %d documents, %.1f MB of text", len(sample.texts), megabytes)
    for file, content in zip(files, _train(args, sample.texts), strict=True):
        file.write(content)
        file.flush()  # it is read below
    names = [file.name for file in files]
    is_byte_level = args.model_type == BYTE_LEVEL
    tokenizer: Tokenizer = GPT2BPETokenizer(*names[:2]) if is_byte_level else SentencePieceTokenizer(*names)
    bytes_per_token = _check_round_trip(tokenizer, sample.texts, args.model_prefix)
    with written_aside(append_suffix(args.model_prefix, DROPPED_SUFFIX)) as dropped:
        dropped.writelines(sample.left_out)
    return {
        "model": args.model_prefix if is_byte_level else f"{args.model_prefix}.model",
        "tokenizer_type": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "model_type": args.model_type,
        "sha256": tokenizer.sha256,
        "lines": sample.counts.lines,
        "sampled_documents": len(sample.texts),
        "sampled_mb": round(megabytes, 2),
        "bad_lines": sample.counts.bad_lines,
        "empty_documents": sample.counts.dropped.get(NO_TEXT, 0),
        "surrogates_replaced": sample.counts.changed,
        "first_errors": sample.counts.errors,
        "bytes_per_token": bytes_per_token,
    }


def _train(args: argparse.Namespace, texts: Sequence[str]) -> list[bytes]:
    """The content of each output."""
    texts = [piece for text in texts for piece in _LONG_RUN.split(text) if piece]
    if args.model_type == BYTE_LEVEL:
        return train_byte_level_bpe(texts, args.vocab_size)
    lines = [line for text in texts for line in text.split("\n") if line]
    return [train_sentencepiece(lines, args.vocab_size, args.model_type)]


def _check_round_trip(tokenizer: Tokenizer, texts: Sequence[str], prefix: str) -> float:
    """Bytes per token of a part of the texts, every one of which must come back as it was."""
    num_bytes = num_tokens = 0
    for text in (PROBE, *texts[:: max(1, len(texts) // 500)]):
        try:
            ids = tokenizer.encode(text)
        except ValueError:
            continue  # the pattern of a BPE can give up on megabytes of white space; `tokenize` reports such a text
        if tokenizer.decode(ids) != text:
            raise ValueError(
                f"{prefix} does not give back the text that it encodes: {text[:60]!r}. Please report this."
            )
        num_bytes, num_tokens = num_bytes + len(text.encode()), num_tokens + len(ids)
    return round(num_bytes / num_tokens, 3)
