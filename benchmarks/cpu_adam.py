"""One Adam update on the host: megazero's CPU Adam, torch's three implementations, and DeepSpeedCPUAdam where it is installed.

    nice -n -20 python benchmarks/cpu_adam.py                    # 50 M parameters, 1 and 2 threads
    python benchmarks/cpu_adam.py --numel 1000000 --rounds 3     # does it work?

    ours-fp32       CPUAdam.step, fp32 gradients
    ours-mixed      what the engine calls: bf16 gradients in, bf16 weights out; the kernel is numba's, else torch's in tiles
    ours-tiled      the same by torch in tiles
    torch-fused, torch-for-loop, torch-foreach     torch.optim.AdamW, fp32
    deepspeed       DeepSpeedCPUAdam, fp32; it compiles C++ at its first use

All ways update the same memory, so that none has better pages than another, and take turns in an order that is drawn anew for
each round. Before its turn each waits for threads that still spin after the last one's work. Targets are for the median of the
ratios within each round, whose sides ran within seconds of each other. First, every way makes three updates of a small model
from the same start; they must agree. Prints one JSON line.

Targets, on each number of threads: torch-for-loop takes at least 8 times as long as ours-fp32 and ours-mixed, which take at most
1.05 times as long as torch-fused and as deepspeed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness import compared, is_installed, make_parser, measured_on, quartiles
from torch import Tensor, nn

from megazero.optim.adam_kernels import AdamSettings, MixedKernel, Operands, mixed, mixed_kernel, tiled
from megazero.optim.cpu_adam import CPUAdam

OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
TARGETS = {
    "torch-for-loop / ours-fp32": (">=", 8.0),
    "torch-for-loop / ours-mixed": (">=", 8.0),
    "ours-fp32 / torch-fused": ("<=", 1.05),
    "ours-mixed / torch-fused": ("<=", 1.05),
    "ours-fp32 / deepspeed": ("<=", 1.05),
    "ours-mixed / deepspeed": ("<=", 1.05),
}
REST_S = 0.01  # OpenMP's threads spin for some milliseconds after their work
Update = Callable[[], object]


@dataclass(frozen=True)
class Memory:
    """What every way updates: one flat parameter."""

    weights: Tensor
    grads: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grads16: Tensor
    weights16: Tensor

    @classmethod
    def of(cls, numel: int) -> Memory:
        """Weights and gradients are random, the same in every call; moments are zero. All pages are touched."""
        generator = torch.Generator().manual_seed(0)
        weights, grads = (torch.randn(numel, generator=generator) for _ in range(2))
        grads.mul_(1e-3)
        moments = torch.full((numel,), 0.0), torch.full((numel,), 0.0)
        return cls(weights, grads, *moments, grads.bfloat16(), weights.bfloat16())


def stepping(optimizer_class: Callable[..., torch.optim.Optimizer], memory: Memory, **kind: bool | None) -> Update:
    """The step of an optimizer of the fp32 parameter, whose moments lie in the memory."""
    step = 0 if optimizer_class.__module__.startswith("deepspeed") else torch.tensor(0.0)
    parameter = nn.Parameter(memory.weights)
    optimizer = optimizer_class([parameter], **OPTIONS, **kind)
    parameter.grad = memory.grads
    optimizer.state[parameter] = {"step": step, "exp_avg": memory.exp_avg, "exp_avg_sq": memory.exp_avg_sq}
    return optimizer.step


def in_one_pass(kernel: MixedKernel, memory: Memory) -> Update:
    """The engine's entry."""
    optimizer = CPUAdam([torch.zeros(1)], **OPTIONS)
    settings = AdamSettings.of(optimizer, optimizer.param_groups[0])
    operands = Operands(memory.weights, memory.grads16, memory.exp_avg, memory.exp_avg_sq, memory.weights16)
    steps = itertools.count(1)
    return lambda: kernel(settings, operands, float(next(steps)), 1.0)


def ways(memory: Memory) -> tuple[dict[str, Update], str]:
    """The updates by name, and why DeepSpeed is missing, if it is."""
    updates = {
        "ours-fp32": stepping(CPUAdam, memory),
        "ours-mixed": in_one_pass(mixed, memory),
        "ours-tiled": in_one_pass(tiled, memory),
        "torch-fused": stepping(torch.optim.AdamW, memory, fused=True),
        "torch-for-loop": stepping(torch.optim.AdamW, memory, foreach=False, fused=False),
        "torch-foreach": stepping(torch.optim.AdamW, memory, foreach=True),
    }
    if not is_installed("deepspeed", "pip install deepspeed"):
        return updates, "not installed"
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        updates["deepspeed"] = stepping(DeepSpeedCPUAdam, memory, adamw_mode=True)
    except (ImportError, RuntimeError, OSError) as error:  # no compiler, no headers: say so and measure the others
        return updates, str(error).splitlines()[0]
    return updates, ""


def check_equal(numel: int) -> None:
    """Raises where a way has other weights than the first one after three updates from the same start."""
    want, steps = None, 3
    for name in ways(Memory.of(numel))[0]:
        memory = Memory.of(numel)
        update = ways(memory)[0][name]
        for _ in range(steps):
            update()
        want = memory.weights if want is None else want
        error = float((memory.weights - want).abs().max())
        # Gradients of 8 bits, some of them near eps: half an update's size after as many updates.
        if not error <= (0.5 if name in ("ours-mixed", "ours-tiled") else 1e-2) * steps * OPTIONS["lr"]:
            raise RuntimeError(f"{name} differs from the others by up to {error:.3g}")


def measure(updates: dict[str, Update], args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every update that counts, by way."""
    times: dict[str, list[float]] = {name: [] for name in updates}
    order = random.Random(0)
    for turn in range(args.warmup + args.rounds):
        for name in order.sample(list(updates), len(updates)):
            time.sleep(REST_S)
            start = time.perf_counter()
            updates[name]()
            if turn >= args.warmup:
                times[name].append(time.perf_counter() - start)
    return times


def summary(times: dict[str, list[float]]) -> dict:
    """Medians and quartiles in ms, the ratios, and whether their medians by rounds meet the targets."""
    ratios, met = {}, {}
    for ratio, (compare, limit) in TARGETS.items():
        over, under = ratio.split(" / ")
        if over in times and under in times:
            ratios[ratio] = compared(times[over], times[under])
            value = ratios[ratio]["ratio_by_rounds"]
            met[f"{ratio} {compare} {limit}"] = value >= limit if compare == ">=" else value <= limit
    ms = {name: [1e3 * s for s in seconds] for name, seconds in times.items()}
    return {
        "median_ms": {name: round(statistics.median(values), 2) for name, values in ms.items()},
        "quartiles_ms": {name: quartiles(values) for name, values in ms.items()},
        "least_ms": {name: round(min(values), 2) for name, values in ms.items()},
        "ratios": ratios,
        "targets_met": met,
    }


def main() -> None:
    """Parses the sizes, measures, prints."""
    parser = make_parser(__doc__, numel=50_000_000, rounds=31, warmup=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads")
    args = parser.parse_args()
    check_equal(min(args.numel, 10**6))
    updates, missing = ways(Memory.of(args.numel))
    found = {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        found[f"{threads} threads"] = summary(measure(updates, args))
    about = {
        "numel": args.numel,
        "rounds": args.rounds,
        "mixed kernel": mixed_kernel().__name__,
        "without": missing and f"deepspeed: {missing}",
    }
    about |= measured_on("numba", "deepspeed")
    print(json.dumps({"question": "one Adam update on the host", **about, **found}))


if __name__ == "__main__":
    main()
