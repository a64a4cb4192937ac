"""Does `--placement auto` keep its budget, and is it as fast as the best static split of the states? A sweep at stage 3.

    python benchmarks/placement.py --layers 48 --hidden 1600 --heads 25 --seq-length 1024 --batch 8 --vocab 50304 --bf16 \\
        --checkpoint --budget 20GB                                           # 1.5 billion parameters, on a GPU
    python benchmarks/placement.py --layers 2 --hidden 64 --heads 4 --seq-length 32 --vocab 512 --budget 2MB  # does it work?

Side `auto` plans by itself. Side RATIO-P is a static split: that share of the optimizer's states and reduced gradients rests in
host memory (`--offload-optimizer-ratio`) and is updated there, P is where the shards of the parameters rest, none (the device) or
cpu. All of them may use `--budget` bytes of the device (torch.cuda.set_per_process_memory_fraction), by default all of it; a
static side that needs more ends out of memory, and does not count. Each side runs in processes of its own on the same batches.
Prints one JSON line; the answer is in `auto_over_best_static` (at most 1, within the quartiles), and `auto_within_budget`.

Without a GPU there is one memory, and times say nothing: the device is a stand-in of so many bytes for the plan, and a static
side counts if the states and buffers that it is planned to have there fit. What then can be compared is the share of the elements
that a step updates on the host, `auto_host_share` beside `least_static_host_share`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from harness import join
from offload import about, chosen, make_engine, measured, play, run_in_turns, side_parser
from torch import Tensor

from megazero.engine import Engine
from megazero.plan.__main__ import parse_size
from megazero.zero.config import ZeroConfig
from megazero.zero.memory import plan_memory

RATIOS = (0.25, 0.5, 0.75, 1.0)  # of the optimizer's states, on the host
AUTO = "auto"


class StandIn:
    """A device of `total` bytes on which only lies what a plan decides about, for a machine that has none."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.engine: Engine | None = None

    def used_bytes(self) -> int:
        """What the engine has placed there."""
        assert self.engine is not None and self.engine.placement is not None
        return self.engine.placement.model_bytes()

    def free_bytes(self) -> int:
        """The rest."""
        return self.total - self.used_bytes()


def config_of(name: str, args: argparse.Namespace) -> ZeroConfig:
    """The configuration that a side's name stands for."""
    if name == AUTO:
        return ZeroConfig(3, placement="auto", gpu_margin_mem_ratio=args.margin_ratio)
    ratio, home = name.split("-")
    if float(ratio) == 0:
        return ZeroConfig(3)
    return ZeroConfig(3, offload_optimizer="cpu", offload_optimizer_ratio=float(ratio), offload_param=home)


def side_names(args: argparse.Namespace) -> list[str]:
    """auto, and every static split."""
    # Without a share on the host there is one: master weights on the device serve as the shards of P.
    names = [AUTO, "0.0-none", *(f"{ratio}-{home}" for ratio in RATIOS for home in ("none", "cpu"))]
    return chosen(args, names)


def run_side(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Trains one side on this rank; returns its figures."""
    device = join()
    is_cuda = device.type == "cuda"
    meter = None if is_cuda else StandIn(args.budget)
    if is_cuda:
        total = torch.cuda.mem_get_info(device)[1]  # may be a little less than what the device says of itself
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.budget / total), device)
    engine = make_engine(args, config_of(name, args), device, meter)
    if meter is not None:
        meter.engine = engine

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        if is_cuda and engine.global_steps == args.warmup:
            torch.cuda.reset_peak_memory_stats()
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    found = measured(args, step, device)
    if is_cuda:
        found["peak_reserved_mb"] = round(torch.cuda.max_memory_reserved() / 1e6, 1)
    found["planned_mb"] = round(planned_bytes(engine, name, args) / 1e6, 1)
    found["host_share"] = round(host_share(engine), 4)
    if engine.placement is not None:
        plan = engine.placement.gemini.plan
        found["plan"] = {
            "budget_mb": round(plan.budget / 1e6, 1),
            "peak_mb": round(plan.peak_bytes / 1e6, 1),
            "fetched_mb": round(plan.fetched_bytes / 1e6, 1),
            "units_with_optimizer": len(plan.optimizer_units),
            "units_with_shard": len(plan.shard_units),
            "is_followed": engine.placement.gemini.follows_plan,
        }
    return found


def host_share(engine: Engine) -> float:
    """The part of the elements that is updated on the host in each step, which nothing hides."""
    trained = [bucket for bucket in engine.buckets if bucket.is_trainable]
    away = [b.owned_numel for b in trained if engine.homes.optimizer is b.optimizer_home]
    return sum(away) / sum(bucket.owned_numel for bucket in trained)


def planned_bytes(engine: Engine, name: str, args: argparse.Namespace) -> int:
    """What the states and buffers of a side need of a GPU, without activations; of auto what its plan has there."""
    if engine.placement is not None:
        return engine.placement.gemini.plan.peak_bytes
    ranks = {"data_parallel_size": args.ranks, "device_type": "cuda"}
    plan = plan_memory(engine.module, config_of(name, args), dtype=None, **ranks)
    return plan.peak


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs every side; returns the result line."""
    is_cuda = torch.cuda.is_available()
    sides = run_in_turns(args, side_names(args), __file__)
    fits = {
        name: side["median_s"]
        for name, side in sides.items()
        if name != AUTO and "median_s" in side and (is_cuda or side["planned_mb"] * 1e6 <= args.budget)
    }
    best = min(fits, key=lambda name: fits[name], default=None)
    auto, answer = sides.get(AUTO, {}), {}
    if "plan" in auto:
        peak = auto["peak_reserved_mb"] if is_cuda else auto["plan"]["peak_mb"]
        answer["auto_within_budget"] = max(peak, auto["plan"]["peak_mb"]) * 1e6 <= args.budget
        if best is not None and is_cuda:
            answer["best_static"] = best
            answer["auto_over_best_static"] = round(auto["median_s"] / fits[best], 4)
            answer["auto_is_never_slower"] = auto["median_s"] <= sides[best]["quartiles_s"][1]
        if fits:
            answer["auto_host_share"] = auto["host_share"]
            answer["least_static_host_share"] = min(sides[name]["host_share"] for name in fits)
    budget = {"budget_mb": round(args.budget / 1e6, 1), "margin_ratio": args.margin_ratio, "is_stand_in": not is_cuda}
    return {"benchmark": "placement", **budget, **answer, **about(args, sides)}


def main() -> None:
    """Parses the sizes, measures, prints."""
    parser = side_parser(__doc__)
    parser.add_argument("--budget", help="device memory that a side may use, such as 20GB (default: all)")
    parser.add_argument("--margin-ratio", type=float, default=ZeroConfig().gpu_margin_mem_ratio)
    args = parser.parse_args()
    if args.budget is None and not torch.cuda.is_available():
        sys.exit("error: without a GPU give --budget, the bytes of the device that is played.")
    if args.budget:
        args.budget = parse_size(args.budget, "--budget")
    else:  # by what starts nothing on the first device, which neither this process nor most ranks compute on
        args.budget = torch.cuda.get_device_properties(0).total_memory
    if args.warmup < 2:
        sys.exit("error: --warmup must be at least 2: the first step is traced, and after it states move.")
    play(args, run_side, measure)


if __name__ == "__main__":
    main()
