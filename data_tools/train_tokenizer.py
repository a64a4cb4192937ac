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
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_tools.done_marker import marker_path, read_marker, write_marker
from data_tools.inputs import list_inputs
from data_tools.optional import version_of
from data_tools.options import add_run_options, number
from data_tools.train_sample import Sample, sample_documents
from data_tools.train_vocabulary import train_byte_level_bpe, train_sentencepiece
from megazero.data.tokenizer import GPT2BPETokenizer, SentencePieceTokenizer, Tokenizer
from megazero.files import append_suffix, locked, sync_folder, write_whole, written_aside
from megazero.lines.contents import check_unchanged, describe_files, key_of
from megazero.lines.outputs import check_ours, full_disk_named
from megazero.lines.results import NO_TEXT, check_strict

logger = logging.getLogger(__name__)

BYTE_LEVEL = "byte_level_bpe"
MODEL_TYPES = ("bpe", "unigram", BYTE_LEVEL)
PROBE = "Round  trip:\n\n\ttabs, 1234, \u00fcber, \u4e2d\u6587, \u2581 and <|endoftext|> \r\n"
"""Text with everything that sentencepiece's usual settings would change."""

_DROPPED, _ASIDE = "dropped.jsonl", ".partial"
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
    paths = list_inputs(args.input)
    package = "tokenizers" if args.model_type == BYTE_LEVEL else "sentencepiece"
    contents = describe_files(paths)
    description = {
        "step": "train_tokenizer",
        "inputs": contents,
        **{name: getattr(args, name) for name in ("json_key", "vocab_size", "model_type", "sample_mb", "max_line_mb")},
        "package": f"{package} {version_of(package, f'--model-type {args.model_type}')}",
    }
    prefix, key = Path(args.model_prefix), key_of(description)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with locked(append_suffix(prefix, ".lock")):
        if (done := _finished(args, key)) is not None:
            return done
        check_ours(_outputs(args), "--model-prefix", marker_path(prefix), append_suffix(prefix, _ASIDE))
        sample = sample_documents(paths, args.json_key, args.sample_mb, args.strict, int(args.max_line_mb * (1 << 20)))
        check_unchanged(paths, contents)
        if not sample.texts:
            why = f"; the first: {sample.counts.errors[0]}" if sample.counts.errors else ""
            raise ValueError(
                f"no line of {', '.join(map(str, paths))} holds a text under the key {args.json_key!r} (--json-key){why}"
            )
        with full_disk_named(f"{prefix}.*", "which trains it anew"):
            return _make(args, sample, key)


def _check_memory(args: argparse.Namespace) -> None:
    need = _FIXED_BYTES + int(_BYTES_PER_BYTE[args.model_type] * args.sample_mb * 1e6)
    if args.sample_mb <= 0:
        raise ValueError(f"--sample-mb must be positive, got {args.sample_mb}")
    if need > args.memory:
        raise ValueError(
            f"--memory {args.memory >> 20}M is too little to train {args.model_type} on --sample-mb {args.sample_mb:g}, which "
            f"needs {need >> 20}M. Give more, or a smaller sample."
        )


def _finished(args: argparse.Namespace, key: str) -> dict[str, Any] | None:
    """The statistics of the run that made what is there, if it is whole and of the same input and settings; else None."""
    content = read_marker(Path(args.model_prefix), key, _outputs(args))
    if content is None:
        return None
    result: dict[str, Any] = content["result"]
    try:
        if _load(args, _outputs(args)[0].parent).sha256 != result["sha256"]:
            return None
    except (ValueError, KeyError, TypeError):
        return None  # damaged: it is made again
    check_strict(result["first_errors"], args.strict, f"when {args.model_prefix} was made")
    logger.info("%s is there already, from the same input and settings", result["model"])
    return {**result, "skipped": True}


def _make(args: argparse.Namespace, sample: Sample, key: str) -> dict[str, Any]:
    """Trains into a folder aside; what is whole, and loses no text, comes to its place."""
    prefix, outputs = Path(args.model_prefix), _outputs(args)
    aside = append_suffix(prefix, _ASIDE)
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed
    aside.mkdir()
    try:
        result = _train_aside(args, sample, aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    # The folder aside, as long as it is there, vouches for what lies at the places of the outputs.
    for path in (marker_path(prefix), *outputs):
        path.unlink(missing_ok=True)
    outputs[0].parent.mkdir(exist_ok=True)
    for path in outputs:
        os.replace(aside / path.name, path)
    os.replace(aside / _DROPPED, append_suffix(prefix, f".{_DROPPED}"))
    sync_folder(outputs[0].parent)
    write_marker(prefix, key, outputs, {"result": result})
    shutil.rmtree(aside)
    return {**result, "skipped": False}


def _train_aside(args: argparse.Namespace, sample: Sample, aside: Path) -> dict[str, Any]:
    """The statistics of the vocabulary that is made in the folder `aside`."""
    megabytes = sum(len(text.encode()) for text in sample.texts) / 1e6
    logger.info("training on %d documents, %.1f MB of text", len(sample.texts), megabytes)
    for name, content in _train(args, sample.texts).items():
        write_whole(aside / name, content)
    with written_aside(aside / _DROPPED) as file:
        file.writelines(sample.left_out)
    tokenizer = _load(args, aside)
    return {
        "model": args.model_prefix if args.model_type == BYTE_LEVEL else f"{args.model_prefix}.model",
        "tokenizer_type": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "model_type": args.model_type,
        "sha256": tokenizer.sha256,
        "lines": sample.counts.lines,
        "sampled_documents": len(sample.texts),
        "sampled_mb": round(megabytes, 2),
        "bad_lines": sample.counts.bad_lines,
        "empty_documents": sample.counts.dropped.get(NO_TEXT, 0),
        "surrogates_replaced": sample.replaced,
        "first_errors": sample.counts.errors,
        "bytes_per_token": _check_round_trip(tokenizer, sample.texts, args.model_prefix),
    }


def _outputs(args: argparse.Namespace) -> list[Path]:
    if args.model_type == BYTE_LEVEL:
        return [Path(args.model_prefix, name) for name in ("vocab.json", "merges.txt", "tokenizer.json")]
    return [append_suffix(args.model_prefix, ".model")]


def _train(args: argparse.Namespace, texts: Sequence[str]) -> dict[str, bytes]:
    """The content of each output, by the name of its file."""
    texts = [piece for text in texts for piece in _LONG_RUN.split(text) if piece]
    if args.model_type == BYTE_LEVEL:
        return train_byte_level_bpe(texts, args.vocab_size)
    lines = [line for text in texts for line in text.split("\n") if line]
    return {_outputs(args)[0].name: train_sentencepiece(lines, args.vocab_size, args.model_type)}


def _load(args: argparse.Namespace, folder: Path) -> Tokenizer:
    if args.model_type == BYTE_LEVEL:
        return GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt")
    return SentencePieceTokenizer(folder / _outputs(args)[0].name)


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
