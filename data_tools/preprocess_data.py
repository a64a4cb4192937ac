"""Tokenizes loose JSON into .bin/.idx files for --train-data. Killed, it goes on where it stopped when started again.

    python data_tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --vocab-file encoder.json --merge-file vocab.bpe

writes data/corpus_text_document.{bin,idx,json}: tokens and index as Megatron-LM has them, and a record of the tokenizer.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a checkout that is not installed

from megazero.data.preprocess import TokenizeOptions, available_cores, tokenize_json  # noqa: E402
from megazero.data.tokenizer import TOKENIZER_TYPES, build_tokenizer  # noqa: E402


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    data = parser.add_argument_group("data")
    data.add_argument("--input", nargs="+", required=True, help="JSON lines, one document a line; also .gz, .xz, .zst")
    data.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="entries to tokenize, each into files of its own (default: text)",
    )
    data.add_argument("--output-prefix", required=True, help="files are OUTPUT_PREFIX_KEY_document.bin, .idx, .json")
    data.add_argument("--append-eod", action="store_true", help="end every document with the end-of-text token")
    data.add_argument(
        "--strict",
        action="store_true",
        help="stop at the first line that holds no document (default: count and report)",
    )
    words = parser.add_argument_group("tokenizer")
    words.add_argument(
        "--tokenizer-type", choices=TOKENIZER_TYPES, default=TOKENIZER_TYPES[0], help=f"default: {TOKENIZER_TYPES[0]}"
    )
    words.add_argument("--vocab-file", help="GPT-2's encoder.json, also known as vocab.json")
    words.add_argument("--merge-file", help="GPT-2's vocab.bpe, also known as merges.txt")
    words.add_argument(
        "--tokenizer-path", help="vocabulary file (*.model, tokenizer.json), or the folder that holds it"
    )
    work = parser.add_argument_group("work")
    work.add_argument("--workers", type=int, default=available_cores(), help="processes (default: all cores)")
    work.add_argument(
        "--log-interval",
        type=int,
        default=10_000,
        help="documents between log lines where no bar is shown (default: 10000)",
    )
    work.add_argument(
        "--dataset-impl", choices=("mmap",), default="mmap", help="accepted for Megatron-LM's scripts: always mmap"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Tokenizes, and prints one JSON line of statistics per key."""
    flags = parse(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    try:
        options = TokenizeOptions(flags.workers, strict=flags.strict, log_interval=flags.log_interval)
        tokenizer = build_tokenizer(flags.tokenizer_type, flags.vocab_file, flags.merge_file, flags.tokenizer_path)
        for key in flags.json_keys:
            start = time.perf_counter()
            prefix = f"{flags.output_prefix}_{key}_document"
            sidecar = tokenize_json(
                flags.input, prefix, tokenizer, key=key, append_eod=flags.append_eod, options=options
            )
            result = {
                "prefix": prefix,
                "documents": sidecar.documents,
                "tokens": sidecar.tokens,
                **{name: value for name, value in sidecar.statistics.items() if name != "first_errors"},
                "tokenizer_sha256": sidecar.tokenizer_sha256,
                "seconds": round(time.perf_counter() - start, 2),
            }
            print(json.dumps(result), flush=True)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
