"""How many megabytes of text per second does preprocessing turn into .bin/.idx? Prints one JSON line.

    python benchmarks/preprocess.py --input corpus.jsonl --tokenizer-path data/gpt2_bpe --workers 1 2
    python benchmarks/preprocess.py --input in.jsonl --tokenizer-path v --mb 1 --rounds 2           # does it work?

The input is repeated to --mb megabytes of JSON lines in a temporary folder. A run's time counts from the call to the finished
files, start of the workers and the hash of the input included; its speed is that of all workers together. "tokenizer alone" is
the tokenizer on the same texts, once, in a plain loop: the bound of a core. All take turns; medians and quartiles of the rounds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import in_fork, in_turns, make_parser, measured_on, quartiles, settle

from data_tools.preprocess_data import add_tokenizer_arguments
from megazero.data.build import build_tokenizer_from
from megazero.data.preprocess import tokenize_json
from megazero.data.tokenizer import Tokenizer
from megazero.lines.compressed import open_bytes
from megazero.lines.resumable import WorkOptions

Way = Callable[[int], object]
"""What it does in a round."""


def preprocess(path: Path, tokenizer: Tokenizer, workers: int, turn: int) -> None:
    """The whole step, with files of its own in the folder of `path`."""
    tokenize_json([path], path.parent / f"{workers}-{turn}", tokenizer, options=WorkOptions(workers))


def tokenize_alone(texts: Sequence[str], tokenizer: Tokenizer, turn: int) -> None:
    """The tokenizer in a plain loop."""
    for text in texts:
        tokenizer.encode_array(text)


def measure(ways: dict[str, tuple[int, Way]], rounds: int) -> dict[str, dict[str, Any]]:
    """Megabytes of text per second of every way, of which the bytes of text are given."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn, name in in_turns(ways, rounds):
        nbytes, way = ways[name]
        start = time.perf_counter()
        in_fork(partial(way, turn))
        speeds[name].append(nbytes / 1e6 / (time.perf_counter() - start))
    return {
        name: {"mb_per_s": round(statistics.median(each), 2), "quartiles_mb_per_s": quartiles(each, 2)}
        for name, each in speeds.items()
    }


def main() -> None:
    """The command line."""
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--input", type=Path, required=True, help="JSON lines with a key text; also .gz, .xz, .zst")
    parser.add_argument("--mb", type=float, default=64.0, help="megabytes of JSON lines to tokenize (default: 64)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    add_tokenizer_arguments(parser)
    flags = parser.parse_args()
    try:
        tokenizer = build_tokenizer_from(flags)
        with open_bytes(flags.input) as file:
            once = file.read()
    except OSError as error:
        parser.error(str(error))
    texts = [json.loads(line)["text"] for line in once.splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.jsonl")
        copies, nbytes = max(1, round(flags.mb * 1e6 / len(once))), sum(len(text.encode()) for text in texts)
        path.write_bytes(once * copies)
        settle(path)
        ways: dict[str, tuple[int, Way]] = {"tokenizer alone": (nbytes, partial(tokenize_alone, texts, tokenizer))}
        for workers in flags.workers:
            ways[f"{workers} workers"] = copies * nbytes, partial(preprocess, path, tokenizer, workers)
        result = {
            "benchmark": "preprocess",
            "input": flags.input.name,
            "mb": round(path.stat().st_size / 1e6, 1),
            "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "rounds": flags.rounds,
            "ways": measure(ways, flags.rounds),
            **measured_on("tiktoken", "sentencepiece"),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
