"""How many megabytes of text per second does preprocessing turn into .bin/.idx, per core? Prints one JSON line.

    python benchmarks/preprocess.py --input corpus.jsonl --tokenizer-path data/gpt2_bpe --workers 1 2
    python benchmarks/preprocess.py --input in.jsonl --tokenizer-path v --mb 1 --repeats 1          # does it work?

The input is repeated to --mb megabytes of JSON lines in a temporary folder. A run's time counts from the call to the finished
files, start of the workers included; `tokenizer_alone` is the tokenizer on the same texts in a plain loop, the bound of a core.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# For a checkout that is not installed, and before this folder, which has a data_tools.py.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import make_parser, measured_on  # noqa: E402

from data_tools.preprocess_data import add_tokenizer_arguments  # noqa: E402
from megazero.data.build import build_tokenizer_from  # noqa: E402
from megazero.data.preprocess import tokenize_json  # noqa: E402
from megazero.data.tokenizer import Tokenizer  # noqa: E402
from megazero.lines.compressed import open_bytes  # noqa: E402
from megazero.lines.resumable import WorkOptions  # noqa: E402


def measure(path: Path, folder: str, tokenizer: Tokenizer, workers: int, repeats: int) -> dict[str, float]:
    """The fastest of several runs: one that other work disturbed says nothing about the program."""
    best = float("inf")
    for repeat in range(repeats):
        start = time.perf_counter()
        sidecar = tokenize_json([path], Path(folder, f"{workers}-{repeat}"), tokenizer, options=WorkOptions(workers))
        best = min(best, time.perf_counter() - start)
    mb = sidecar.statistics["text_bytes"] / 1e6
    return {
        "seconds": round(best, 2),
        "mb_per_s": round(mb / best, 2),
        "mb_per_s_per_worker": round(mb / best / workers, 2),
        "tokens_per_s": round(sidecar.tokens / best),
    }


def tokenizer_alone(texts: Sequence[str], tokenizer: Tokenizer, repeats: int) -> float:
    """MB/s of the tokenizer in a plain loop."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for text in texts:
            tokenizer.encode_array(text)
        best = min(best, time.perf_counter() - start)
    return round(sum(len(text.encode()) for text in texts) / 1e6 / best, 2)


def main() -> None:
    """The command line."""
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--input", type=Path, required=True, help="JSON lines with a key text; also .gz, .xz, .zst")
    parser.add_argument("--mb", type=float, default=64.0, help="megabytes of JSON lines to tokenize (default: 64)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    add_tokenizer_arguments(parser)
    flags = parser.parse_args()
    tokenizer = build_tokenizer_from(flags)
    with open_bytes(flags.input) as file:
        once = file.read()
    texts = [json.loads(line)["text"] for line in once.splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.jsonl")
        path.write_bytes(once * max(1, round(flags.mb * 1e6 / len(once))))
        runs = {str(workers): measure(path, folder, tokenizer, workers, flags.repeats) for workers in flags.workers}
        result = {
            "benchmark": "preprocess",
            "input": flags.input.name,
            "mb": round(path.stat().st_size / 1e6, 1),
            "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer_alone_mb_per_s": tokenizer_alone(texts, tokenizer, flags.repeats),
            "workers": runs,
            **measured_on("tiktoken", "sentencepiece"),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
