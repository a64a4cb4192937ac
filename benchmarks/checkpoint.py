"""Saving and loading a training state: megazero beside torch.distributed.checkpoint and torch.save, in one run.

    python benchmarks/checkpoint.py                                       # 42 million parameters, 0.5 GB, 2 ranks
    python benchmarks/checkpoint.py --directory /mnt/checkpoints --rounds 9 --cold
    python benchmarks/checkpoint.py --layers 1 --hidden 64 --vocab 256 --seq-length 16 --rounds 2 --saves 2     # does it work?

The state is that of a plain GPT-2 and Adam in fp32, sharded over the ranks: by ZeRO stage 3 for megazero, by FSDP2 for the
others; megazero-nvme has master weights and moments in a swap file. All ways are alive in the same processes and take turns,
in an order that rotates. Everything saved is on the disk when its time ends, with torch.save too, and every load is compared
with what was saved, bit for bit. Only megazero checks what it loads against checksums. Between the turns the written files are
deleted and the disks synced.

Then, for the ways that can, saves in the background of training: how much longer is the step that saves, and are those beside
which it writes. Prints one JSON line, and tables on stderr. Linux and CPU only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from typing import Any

from checkpoint_ranks import Ranks
from harness import (
    MACHINE,
    gpt2_config,
    in_turns,
    legend,
    make_parser,
    measured_on,
    model_line,
    quartiles,
    run_ranks,
    table,
)
from peers import Job

REFERENCE = "dcp"
MEASURED = {
    "median_s": "from the first rank's start to the last one's end",
    "gb_s": "12 bytes per parameter (fp32 weights and both moments), of all ranks, per second at the median",
    "speed_ratio": f"{REFERENCE}'s median seconds by this way's: above 1 is faster than {REFERENCE}",
    "peak_mib": "VmHWM less VmRSS before, of the rank and round that need most; pages of mapped files count",
    "call_ratio": "the median call that saves in the background, by the median step of no save: what saving adds to a step",
    "saving_step_ratio": "(a step + the call that saves in the background) by the median step of no save; median and quartiles",
    "beside_ratio": "the median step while the background writes, by the median step of no save",
    "write_s": "median from the call that saves until everything is on the disk, with training going on",
}


def of_rank(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    """What one rank measures in a directory that all of them see."""
    ranks = Ranks(Job.of(args), args, directory)
    found: dict[str, dict[str, Any]] = {name: {} for name in ranks.ways}
    for turn, name in in_turns(found, args.warmup + args.rounds):
        ranks.save_and_load(found[name], turn, name)
    for turn, name in in_turns(found, args.warmup + args.saves):
        if ranks.ways[name].has_background:
            ranks.save_in_background(found[name].setdefault("background", {}), turn, name)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the ranks and returns the result line."""
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        found = run_ranks(of_rank, args.ranks, args, directory)
    state_bytes = 12 * gpt2_config(args).num_parameters()
    return {
        "question": "saving and loading a training state: megazero, torch.distributed.checkpoint and torch.save",
        "model": model_line(args),
        "batch": f"{args.batch} x {args.seq_length} per rank",
        "state_bytes": state_bytes,
        "ranks": args.ranks,
        "loads": "cold page cache" if args.cold else "warm page cache",
        **measured_on(machine=f"{MACHINE}, 1 thread a rank, gloo"),
        "rounds": args.rounds,
        "save": {name: summary(way["save"], found[REFERENCE]["save"], state_bytes) for name, way in found.items()},
        "load": {name: summary(way["load"], found[REFERENCE]["load"], state_bytes) for name, way in found.items()},
        "file_bytes": {name: way["file_bytes"] for name, way in found.items()},
        "background": {name: background(way["background"]) for name, way in found.items() if "background" in way},
        "measured": MEASURED,
    }


def summary(mine: list[tuple[float, int]], reference: list[tuple[float, int]], nbytes: int) -> dict[str, Any]:
    """Figures of one way, from (seconds, peak bytes) of every round, and beside those of the reference."""
    seconds = [s for s, _ in mine]
    median, base = statistics.median(seconds), statistics.median(s for s, _ in reference)
    return {
        "median_s": round(median, 4),
        "quartiles_s": quartiles(seconds),
        "gb_s": round(nbytes / median / 1e9, 3),
        "speed_ratio": round(base / median, 3),
        "peak_mib": round(max(peak for _, peak in mine) / 2**20, 1),
    }


def background(times: dict[str, list[float]]) -> dict[str, Any]:
    """Figures of the saves beside training."""
    step = statistics.median(times["normal"])
    ratios = [seconds / step for seconds in times["saving"]]
    return {
        "step_s": round(step, 4),
        "step_quartiles_s": quartiles(times["normal"]),
        "call_s": round(statistics.median(times["call"]), 4),
        "call_ratio": round(statistics.median(times["call"]) / step, 3),
        "saving_step_ratio": round(statistics.median(ratios), 3),
        "saving_step_quartiles": quartiles(ratios),
        "beside_ratio": round(statistics.median(times["beside"]) / step, 3) if times["beside"] else None,
        "write_s": round(statistics.median(times["write"]), 4),
        "steps": len(times["normal"]),
        "saves": len(ratios),
    }


def parse_args() -> argparse.Namespace:
    """The command line."""
    sizes = {"layers": 8, "hidden": 512, "heads": 8, "seq_length": 512, "vocab": 32000, "batch": 1}
    parser = make_parser(__doc__, **sizes, ranks=2, rounds=9, saves=5, warmup=1)
    parser.add_argument("--between", type=int, default=6, help="steps that count between two saves in the background")
    parser.add_argument("--directory", help="existing directory to measure in (default: that of temporary files)")
    parser.add_argument(
        "--cold", action="store_true", help="drop the written pages from the page cache before each load"
    )
    args = parser.parse_args()
    if args.between < 1:
        parser.error("a ratio needs at least 1 step --between two saves")
    return args


def main() -> None:
    """Measures and prints."""
    args = parse_args()
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")  # the ranks inherit it
    result = measure(args)
    for title in ("save", "load", "background"):
        print(table(title, result[title]), file=sys.stderr)
    print(legend(MEASURED), file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
