"""Step time, memory and traffic of megazero's ZeRO stages beside torch's DDP, ZeRO-1 and FSDP2, DeepSpeed and Megatron-LM.

    python benchmarks/data_parallel.py                                              # 6 x 384, fp32, 2 ranks
    python benchmarks/data_parallel.py --layers 12 --hidden 768 --heads 12 --bf16
    python benchmarks/data_parallel.py --sides megazero-3,fsdp2 --steps 20
    python benchmarks/data_parallel.py --muon --sides megazero-0,megazero-1                        # Muon, on all sides
    python benchmarks/data_parallel.py --layers 48 --hidden 16 --heads 2 --seq-length 8 --vocab 64 # the host's work: "host ms"
    python benchmarks/data_parallel.py --layers 2 --hidden 32 --heads 2 --seq-length 16 --vocab 128 --steps 2      # does it work?

Every side trains the same plain GPT-2 from the same weights on the same batches, in processes of its own, and must agree with DDP
in loss and gradient norm. The sides of one ZeRO stage are alive together with DDP and take turns, a step each, in an order that
rotates, while the others sleep (with --together pair, one side and DDP: 12 x 768 then fits into 16 GB). Prints one JSON line, and
tables on stderr. CPU only, on Linux with glibc 2.33 or newer.

DeepSpeed takes part when it can be imported. It wants a compiler, for C++ that it builds at its first use (half a minute), and
DS_ACCELERATOR=cpu in the environment where it would find a GPU. Megatron-LM takes part when its library can be imported
(`pip install --no-deps megatron-core`); megatron_side.py says how.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import megatron_side
import torch
from comparison import COLUMNS, conditions, finish, summary, training_parser
from harness import MIB, in_turns, kernel_bytes, model_line, table
from peers import CLIP, DECAY, LR, Entry, Job, Side, available_peers
from rank_sets import RankSet, StepResult
from torch import Tensor, nn

from megazero import mpu
from megazero.engine import Engine, weight_decay_groups
from megazero.mpu.groups import ParallelGroups
from megazero.optim.optimizers import OptimizerConfig
from megazero.zero.config import ZeroConfig

REFERENCE = "ddp"


class EngineSide(Side):
    """This library's engine; in bf16 it computes with 16-bit weights and updates fp32 master weights."""

    def make_engine(self, model: nn.Module, groups: ParallelGroups, zero: ZeroConfig) -> None:
        """Sets `engine`."""
        self.engine = Engine(
            model,
            groups,
            OptimizerConfig(optimizer="muon" if self.job.muon else "adamw").factory(),
            *weight_decay_groups(model, DECAY, self.job.muon),
            zero=zero,
            clip_grad=CLIP,
            gradient_accumulation_steps=self.job.accumulation,
            dtype=torch.bfloat16 if self.job.bf16 else None,
        )
        for group in self.engine.optimizer.param_groups:
            group["lr"] = LR

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a micro-batch."""
        return self.engine(tokens, targets)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward, backward and step of every micro-batch."""
        total = 0.0
        for x, y in zip(tokens, targets, strict=True):
            total += float(self.engine.backward(self.loss(x, y)))
            self.engine.step()
        return total

    def finish(self) -> None:
        """Waits for new weights that are to arrive during the next forward."""
        self.engine.optimizer.finish()

    def grad_norm(self) -> float:
        """What the engine says."""
        return self.engine.get_global_grad_norm()

    def close(self) -> None:
        """Ends the engine and its groups."""
        self.engine.destroy()
        mpu.destroy_model_parallel()


class Megazero(EngineSide):
    """The engine on the model that all sides train.

    Args:
        settings: of ZeRO.
    """

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job)
        groups = mpu.get_groups() if mpu.model_parallel_is_initialized() else mpu.initialize_model_parallel(1)
        self.make_engine(job.model(), groups, ZeroConfig(**settings))

    def counted_bytes(self) -> int | None:
        """Elements by the channel's counters times the size of what goes that way: gradients, or weights; not with Muon."""
        if self.job.muon:
            return None
        bucket = self.engine.buckets[0]
        gradient, weight = bucket.plan.reduce_dtype.itemsize, bucket.weights.flat.dtype.itemsize
        traffic = self.engine.channel.traffic
        reduced = traffic["all_reduce"].elements + traffic["reduce_scatter"].elements
        return reduced * gradient + traffic["all_gather"].elements * weight


def all_sides(bf16: bool, muon: bool) -> dict[str, Entry]:
    """Every system that can be run here, by name; with Muon beside torch.optim.Muon under DDP."""
    ours = {f"megazero-{stage}": Entry(stage, partial(Megazero, stage=stage)) for stage in range(4)}
    for stage in (1, 2):  # new weights travel while the next forward goes on
        ours[f"megazero-{stage}-overlap"] = Entry(stage, partial(Megazero, stage=stage, overlap_param_gather=True))
    for stage in range(4) if bf16 else ():
        ours[f"megazero-{stage}-grad16"] = Entry(stage, partial(Megazero, stage=stage, grad_dtype="compute"))
    peers = available_peers()
    if megatron_side.is_installed():
        peers["megatron-0"] = Entry(0, megatron_side.Megatron)
        peers["megatron-1"] = Entry(1, partial(megatron_side.Megatron, shards_optimizer=True))
    return {**({REFERENCE: peers[REFERENCE]} if muon else peers), **ours}


def play(title: str, sides: dict[str, Entry], job: Job, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Each side's figures, relative to the first one; shown on stderr, too."""
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


def measure(args: argparse.Namespace, sides: dict[str, Entry]) -> dict[str, Any]:
    """Runs all sides and returns the result line."""
    job = Job.of(args)
    groups = {title: play(title, group, job, args) for title, group in grouped(sides, args.together).items()}
    return {
        "question": "step time, memory and traffic of data-parallel training, megazero and others",
        "model": model_line(args),
        "batch": f"{args.accumulation} x {args.batch} x {args.seq_length} per rank",
        "optimizer": "Muon beside AdamW" if args.muon else "AdamW",
        **conditions(args),
        "groups": groups,
    }


def grouped(sides: dict[str, Entry], together: str) -> dict[str, dict[str, Entry]]:
    """Which sides are alive at one time, by title; the reference is always the first of them."""
    reference = {REFERENCE: sides[REFERENCE]}
    others = {name: entry for name, entry in sides.items() if name != REFERENCE}
    groups: dict[str, dict[str, Entry]] = {}
    for name, entry in others.items():
        title = {"all": "all", "stage": f"stage {entry.stage}", "pair": name}[together]
        groups.setdefault(title, dict(reference))[name] = entry
    return groups or {REFERENCE: reference}


def parse_args() -> tuple[argparse.Namespace, dict[str, Entry]]:
    """The command line, and the sides that it asks for."""
    parser = training_parser(__doc__)
    together = f"who takes turns: {REFERENCE} and one other (least memory), {REFERENCE} and all of one stage, or all"
    parser.add_argument("--muon", action="store_true", help="for the matrices of the blocks, on every side")
    parser.add_argument(
        "--steps-per-turn", type=int, default=1, help="in a row; more let an overlap go on from one to the next"
    )
    parser.add_argument("--together", choices=("pair", "stage", "all"), default="stage", help=together)
    parser.add_argument("--sides", default="", help="names, separated by commas (default: all that can be imported)")
    args = parser.parse_args()
    sides = all_sides(args.bf16, args.muon)
    wanted = [REFERENCE, *filter(None, args.sides.split(","))] if args.sides else list(sides)
    unknown = [name for name in wanted if name not in sides]
    if unknown:
        parser.error(f"--sides {','.join(unknown)}: unknown or not importable here. There are {', '.join(sides)}.")
    return args, {name: entry for name, entry in sides.items() if name in wanted}


def main() -> None:
    """Measures, prints, and fails if the sides did not compute the same."""
    args, sides = parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # the ranks inherit it
    result = measure(args, sides)
    finish(result, result["groups"])


if __name__ == "__main__":
    main()
