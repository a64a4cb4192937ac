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
from functools import partial
from typing import Any

import megatron_side
from comparison import conditions, finish, play, training_parser
from harness import model_line
from megazero_side import Megazero
from peers import Entry, Job, available_peers

REFERENCE = "ddp"


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
    result = measure(args, sides)
    finish(result, result["groups"])


if __name__ == "__main__":
    main()
