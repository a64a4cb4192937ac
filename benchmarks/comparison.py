"""Rounds of several training systems in turns: figures of each, relative to one of them, and whether they agree."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from contextlib import ExitStack, closing
from typing import Any

from harness import (
    MACHINE,
    MIB,
    compared,
    in_turns,
    kernel_bytes,
    legend,
    make_parser,
    measured_on,
    quartiles,
    table,
)
from peers import Entry, Job
from rank_sets import RankSet, StepResult

# Relative. The norm's is wide in fp32 too, because vector_norm of 20 million fp32 elements is itself 0.1 % off on a CPU.
TOLERANCE = {"fp32": {"loss": 1e-4, "grad_norm": 1e-2}, "bf16": {"loss": 1e-2, "grad_norm": 1e-1}}
MEASURED = {
    "seconds": "from the first rank's start of a step to the last rank's end; median and quartiles of the timed rounds",
    "host_ms": "what the thread that trains has worked in a step, without what it has waited, mean of the ranks; median",
    "ratio": "of the medians, to the first side in the same rounds; by_rounds: quartiles of the ratios within each round",
    "held_mib": "what malloc has given out between steps, touched or not, less that before the side was built, of the rank that "
    "needs most",
    "peak_mib": "the most of the same during one more, untimed step, looked at every half millisecond",
    "shared_mib": "the memory that the ranks share to send through; where a side has none, the kernel's socket buffers do that",
    "resident_mib": "resident size of the whole process between steps after malloc_trim; what the ranks share counts in parts",
    "resident_peak_mib": "VmHWM of the timed rounds, with what the ranks share; with --malloc keep freed memory counts",
    "resident_building_mib": "VmHWM until then: building and warm-up",
    "socket_mb": "bytes of the loopback device per step and rank, headers included; the least of the rounds",
    "counted_mb": "what megazero's channel counts per step and rank, through sockets or shared memory: elements x itemsize",
}
COLUMNS = {
    "median_s": "s/step",
    "quartiles_s": "quartiles",
    "ratio": "/ first",
    "ratio_by_rounds": "by rounds",
    "quartiles_by_rounds": "quartiles",
    "host_ms": "host ms",
    "held_mib": "held MiB",
    "peak_mib": "peak",
    "shared_mib": "shared",
    "resident_mib": "resident",
    "resident_peak_mib": "peak",
    "resident_building_mib": "building",
    "socket_mb": "socket MB",
    "counted_mb": "counted",
    "loss_differs": "loss differs",
    "grad_norm_differs": "norm",
}


def training_parser(about: str | None) -> argparse.ArgumentParser:
    """A parser for the job that all sides train, and for how they do it."""
    sizes = {"layers": 6, "hidden": 384, "heads": 6, "seq_length": 512, "vocab": 50304, "batch": 1, "accumulation": 1}
    parser = make_parser(about, **sizes, ranks=2, steps=12, warmup=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--malloc", choices=("keep", "stock"), default="keep", help="alike for all sides")
    return parser


def play(title: str, sides: dict[str, Entry], job: Job, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Each side's figures, relative to the first one; shown on stderr, too."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the ranks inherit it
    untimed = args.warmup + 1  # one more round faults in again what was given back after the warm-up
    results: dict[str, list[StepResult]] = {name: [] for name in sides}
    with ExitStack() as stack:
        sets = {
            name: stack.enter_context(closing(RankSet(name, entry, job, args.ranks, args.malloc == "keep")))
            for name, entry in sides.items()
        }
        for index, name in in_turns(sides, untimed + args.steps):
            if index == args.warmup:
                sets[name].forget_peak()
            results[name].append(sets[name].step(index))
            check_memory(name)
        memory = {name: rank_set.memory(untimed + args.steps) for name, rank_set in sets.items()}
    first = next(iter(results.values()))
    rows = {name: summary(own, first, memory[name], untimed) for name, own in results.items()}
    print(table(title, rows, COLUMNS), file=sys.stderr, flush=True)
    return rows


def check_memory(name: str) -> None:
    """Raises while there is still memory to say so.

    Raises:
        RuntimeError: less than 512 MiB are left.
    """
    if kernel_bytes("meminfo", "MemAvailable") < 512 * MIB:
        raise RuntimeError(f"after a step of {name} less than 512 MiB are left: use smaller sizes or fewer --sides")


def summary(own: list[StepResult], reference: list[StepResult], memory: dict[str, float], skip: int) -> dict[str, Any]:
    """One side's figures, relative to the reference in the same rounds, of which the first `skip` do not count."""
    mine = own[skip:]
    seconds = [r.seconds for r in mine]
    counted = [r.counted_bytes for r in mine if r.counted_bytes is not None]
    return {
        "median_s": round(statistics.median(seconds), 4),
        "quartiles_s": quartiles(seconds),
        **compared(seconds, [r.seconds for r in reference[skip:]]),
        "host_ms": round(statistics.median(1e3 * r.host_seconds for r in mine), 2),
        **{f"{key}_mib": value for key, value in memory.items()},
        "socket_mb": round(min(r.socket_bytes for r in mine) / 1e6, 3),
        "counted_mb": round(statistics.median(counted) / 1e6, 3) if counted else None,
        "last_loss": round(mine[-1].loss, 6),
        "loss_differs": largest_difference(own, reference, "loss"),
        "grad_norm_differs": largest_difference(own, reference, "grad_norm"),
    }


def largest_difference(own: list[StepResult], reference: list[StepResult], field: str) -> float | None:
    """The largest relative difference to the reference in any round; None where the side does not tell."""
    pairs = [(getattr(r, field), getattr(o, field)) for r, o in zip(own, reference, strict=True)]
    known = [abs(mine / other - 1) for mine, other in pairs if mine is not None]
    worst = max(known, key=lambda difference: (difference != difference, difference), default=None)  # NaN is the worst
    return None if worst is None else float(f"{worst:.2g}")


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """For the result line: how the sides were run, and how each figure was measured."""
    return {
        "ranks": args.ranks,
        "dtype": "bf16" if args.bf16 else "fp32",
        "malloc": args.malloc,
        **measured_on("deepspeed", "megatron-core", machine=f"{MACHINE}, 1 thread a rank, gloo"),
        "steps": args.steps,
        "measured": MEASURED,
    }


def finish(result: dict[str, Any], groups: dict[str, dict[str, dict]]) -> None:
    """Prints the result line, which has the `conditions`; fails if the sides of a group did not compute the same."""
    print(legend(MEASURED), file=sys.stderr)
    print(json.dumps(result))
    if different := disagreements(groups, result["dtype"]):
        sys.exit("The sides trained different things, so their figures do not compare:\n" + "\n".join(different))


def disagreements(groups: dict[str, dict[str, dict]], dtype: str) -> list[str]:
    """One line for every side that does not compute what the reference computes."""
    return [
        f"{name}: {field} differs from the reference's by {side[field + '_differs']:.1e}, more than {limit:.0e}"
        for sides in groups.values()
        for name, side in sides.items()
        for field, limit in TOLERANCE[dtype].items()
        if side[field + "_differs"] is not None and not side[field + "_differs"] <= limit
    ]
