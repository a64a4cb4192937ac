"""Trains a sentencepiece vocabulary on JSON lines, such that decode(encode(text)) == text for every text.

The text is taken as it is (no normalisation, white space kept, line ends are a piece of their own), and characters outside the
vocabulary fall back to bytes, so nothing is ever unknown. The end of text is the piece `<|endoftext|>`, id 1.

    python data_tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --model-prefix spm
"""

from __future__ import annotations

import argparse
import io
import json
import os
import string
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a checkout that is not installed

from megazero.data.gpt2_bpe import END_OF_TEXT  # noqa: E402
from megazero.data.jsonl import LineError, block_lines, read_blocks, read_document  # noqa: E402
from megazero.data.tokenizer import SentencePieceTokenizer  # noqa: E402
from megazero.files import is_compressed, written_aside  # noqa: E402

PROBE = "Round  trip:\n\n\ttabs, 1234, \u00fcber, \u4e2d\u6587, \u2581 and <|endoftext|> \n"
"""Text with everything that sentencepiece's usual settings would change."""


def read_texts(paths: Sequence[Path], key: str) -> Iterator[str]:
    """The documents of all files in order; lines that hold none are left out (preprocess_data.py reports them)."""
    for path in paths:
        for block in read_blocks(path, 1 << 22):
            for line in block_lines(block):
                try:
                    yield read_document(line, key)
                except LineError:
                    continue


def sample_lines(paths: Sequence[Path], key: str, sample_mb: float) -> list[str]:
    """Lines of about `sample_mb` megabytes of documents, spread over the whole corpus; always the same ones."""
    total = sum(path.stat().st_size * (4 if is_compressed(path) else 1) for path in paths)
    share = min(1.0, sample_mb * 1e6 / max(total, 1))
    lines: list[str] = []
    for number, text in enumerate(tqdm(read_texts(paths, key), desc="reading", unit=" documents", disable=None)):
        if zlib.crc32(str(number).encode()) <= share * 0xFFFFFFFF:
            lines += (line for line in text.split("\n") if line)
    return lines


def train(lines: Sequence[str], vocab_size: int, model_type: str, threads: int) -> bytes:
    """The model, serialised. No path of this machine is in it, so that equal vocabularies have equal hashes.

    Raises:
        ValueError: the text is too small for the vocabulary, or the vocabulary too small for the bytes.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            num_threads=threads,
            byte_fallback=True,
            character_coverage=0.9995,
            required_chars="".join(c for c in string.printable if c not in string.whitespace),
            user_defined_symbols=["\n"],
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=1 << 24,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece=END_OF_TEXT,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(f"--vocab-size {vocab_size} cannot be trained on this text: {error}") from error
    return model.getvalue()


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--input", type=Path, nargs="+", required=True, help="JSON lines (.jsonl, .json, also .gz, .xz, .zst)"
    )
    parser.add_argument("--json-key", default="text", help="which entry is the text (default: text)")
    parser.add_argument(
        "--vocab-size", type=int, default=8192, help="entries, special ones and bytes included (default: 8192)"
    )
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="default: bpe")
    parser.add_argument("--model-prefix", required=True, help="the model is written to MODEL_PREFIX.model")
    parser.add_argument(
        "--sample-mb", type=float, default=32.0, help="megabytes of text to train on at most (default: 32)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: all cores")
    flags = parser.parse_args(argv)
    start = time.perf_counter()
    missing = [path for path in flags.input if not path.is_file()]
    if missing:
        sys.exit(f"error: --input {missing[0]}: there is no such file")
    lines = sample_lines(flags.input, flags.json_key, flags.sample_mb)
    if not lines:
        sys.exit(
            f"error: no line of {', '.join(map(str, flags.input))} holds a text under the key {flags.json_key!r} (--json-key)"
        )
    try:
        model = train(lines, flags.vocab_size, flags.model_type, flags.threads)
    except ValueError as error:
        sys.exit(f"error: {error}")
    path = Path(f"{flags.model_prefix}.model")
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as file:
        file.write(model)
    tokenizer = SentencePieceTokenizer(path)
    probe = "\n".join([PROBE, *lines[:: max(1, len(lines) // 2000)]])
    ids = tokenizer.encode(probe)
    if tokenizer.decode(ids) != probe or 0 in ids:
        sys.exit(f"error: {path} does not give back the text that it encodes")
    result = {
        "model": str(path),
        "vocab_size": tokenizer.vocab_size,
        "model_type": flags.model_type,
        "sha256": tokenizer.sha256,
        "sampled_mb": round(sum(len(line.encode()) for line in lines) / 1e6, 2),
        "bytes_per_token": round(len(probe.encode()) / len(ids), 3),
        "seconds": round(time.perf_counter() - start, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
