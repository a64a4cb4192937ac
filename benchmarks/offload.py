"""What each home of the model states costs and frees: step time and bytes on device, host and disk, of every combination.

    python benchmarks/offload.py                                             # 6 x 512, fp32, one CPU process
    python benchmarks/offload.py --ranks 2 --stages 3 --bf16 --nvme-path /local_nvme
    python benchmarks/offload.py --layers 48 --hidden 1600 --heads 25 --seq-length 1024 --batch 8 --bf16 --checkpoint \\
        --only 2-cpu-none,3-cpu-none,3-nvme-nvme                             # 1.5 billion parameters, on a GPU
    python benchmarks/offload.py --layers 2 --hidden 64 --heads 4 --seq-length 32 --vocab 512 --steps 2 --rounds 1 # does it work?

A side is called STAGE-O-P: where the optimizer's states and the reduced gradients rest, and where the shards of the parameters
do; each is none (the device), cpu or nvme. There is no STAGE-none-cpu: where O is on the device, its master weights serve as the
shards of P. deepspeed-STAGE-O-P is DeepSpeed, where it can be imported, with its own optimizers and the same sizes. Every side
trains the hand-written GPT-2 of `plain_gpt2.py` from the same seed on the same batches, in processes of its own; sides take
turns, `--rounds` times each, and times are over all rounds. On the CPU the losses of all sides of megazero must be equal bit for
bit. Prints one JSON line.

states_mb are the states with their buffers between backward and update; peak_device_mb is what the device's allocator has held at
most, peak_resident_mb the process in host memory (without a GPU both kinds of memory are one).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import (
    MACHINE,
    gpt2_config,
    in_turns,
    is_installed,
    join,
    make_parser,
    measured_on,
    model_line,
    quartiles,
    status_bytes,
)
from peers import CLIP, DECAY, LR
from plain_gpt2 import PlainBlock, PlainGPT2, decay_groups
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megazero import comm, mpu, zero
from megazero.engine import Engine, weight_decay_groups
from megazero.optim.optimizers import OptimizerConfig
from megazero.zero.config import HOMES, ZeroConfig
from megazero.zero.gemini_trace import Meter
from megazero.zero.nvme_home import NvmeHome

Step = Callable[[Tensor, Tensor], Tensor]


class CheckpointedBlock(PlainBlock):
    """Keeps its input only, and runs again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        return checkpoint(super().forward, x, use_reentrant=False)


def make_model(args: argparse.Namespace) -> PlainGPT2:
    """The model, equal in all processes."""
    torch.manual_seed(0)
    model = PlainGPT2(args.layers, args.hidden, args.heads, args.seq_length, args.vocab)
    if args.checkpoint:
        for block in model.blocks:
            block.__class__ = CheckpointedBlock
    return model


def side_names(args: argparse.Namespace) -> list[str]:
    """Every side that stages and flags allow."""
    names = []
    for stage in args.stages:
        for o in HOMES:
            names += [f"{stage}-{o}-{p}" for p in (HOMES if stage == 3 and o != "none" else ("none",))]
    if is_installed("deepspeed", "pip install deepspeed"):  # which has nvme at stage 3 only
        names += [f"deepspeed-{name}" for name in names if "nvme" not in name or name.startswith("3")]
    return chosen(args, names)


def chosen(args: argparse.Namespace, names: list[str]) -> list[str]:
    """The sides that --only names, else all."""
    if unknown := [name for name in args.only if name not in names]:
        sys.exit(f"error: --only {','.join(unknown)}: unknown or not importable here. There are {', '.join(names)}.")
    return args.only or names


# ---- one side, in processes of its own


def megazero_side(
    args: argparse.Namespace, stage: int, o: str, p: str, device: torch.device
) -> tuple[Step, Callable[[], dict]]:
    """A step of this library's engine, and its bytes; `o` and `p` are the homes of O and P."""
    arrives = stage in (1, 2) and o != "none"  # as the GPT-2 job has it
    config = ZeroConfig(
        stage, offload_optimizer=o, offload_param=p, nvme_path=args.nvme_path, overlap_param_gather=arrives
    )
    engine = make_engine(args, config, device)
    held: dict[str, int] = {}

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        if not held:
            held.update(bytes_of(engine, o, p))
        engine.step()
        return loss.detach()

    def nbytes() -> dict[str, int]:
        later = bytes_of(engine, o, p)  # moments are there from the first step on
        return {key: max(value, later[key]) for key, value in held.items()}

    return step, nbytes


def make_engine(
    args: argparse.Namespace, config: ZeroConfig, device: torch.device, meter: Meter | None = None
) -> Engine:
    """The model in an engine; `meter` is for placement auto."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    home = "cpu" if config.placement == "auto" else config.offload_param
    source = {"zero_optimization": {"offload_param": {"nvme_path": args.nvme_path}}}
    with zero.Init(
        remote_device=None if home == "none" else home, config=source, enabled=config.stage == 3, dtype=dtype
    ):
        model = make_model(args)
    if config.stage < 3:
        model.to(device, dtype)
    group_of, settings = weight_decay_groups(model, DECAY)
    settings = [{**group, "lr": LR} for group in settings]
    options: dict[str, Any] = {"clip_grad": CLIP, "dtype": dtype, "placement_meter": meter}
    return Engine(model, mpu.get_groups(), OptimizerConfig().factory(), group_of, settings, zero=config, **options)


def bytes_of(engine: Engine, o: str, p: str) -> dict[str, int]:
    """What the engine has of the states and of buffers now, by kind of memory."""
    memory, found = engine.memory(), {"device": 0, "host": 0, "disk": 0}
    place = {"none": "device", "cpu": "host", "nvme": "host"}  # what of an nvme home is in memory is in the host's
    found[place[p]] += memory["P"]
    found[place[o]] += memory["O"]
    found[place[o] if engine.sharding.gradients else "device"] += memory["G"]
    found["device"] += memory["buffers"]
    for home in (engine.homes.optimizer, engine.homes.param):
        found["host"] += home.nbytes if isinstance(home, NvmeHome) else 0
    found["disk"] = engine.homes.swap.nbytes if engine.homes.swap else 0
    return found


def deepspeed_side(
    args: argparse.Namespace, stage: int, o: str, p: str, device: torch.device
) -> tuple[Step, Callable[[], dict]]:
    """A step of DeepSpeed's engine; it does not count its bytes."""
    import deepspeed

    homes: dict[str, dict[str, Any]] = {}
    for key, home in (("offload_optimizer", o), ("offload_param", p)):
        if home != "none":
            homes[key] = {"device": home, "pin_memory": device.type == "cuda"}
        if home == "nvme":
            homes[key]["nvme_path"] = args.nvme_path
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": args.bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage, **homes},
    }
    deepspeed.utils.logging.logger.setLevel("WARNING")
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = make_model(args)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=decay_groups(model, DECAY), config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, lambda: {}


def run_side(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Trains one side on this rank; returns its figures."""
    *system, stage, o, p = name.split("-")
    device = join()
    step, nbytes = (deepspeed_side if system else megazero_side)(args, int(stage), o, p, device)
    found = measured(args, step, device)
    return {**found, "states_mb": {key: round(value / 1e6, 1) for key, value in nbytes().items()}}


def measured(args: argparse.Namespace, step: Step, device: torch.device) -> dict[str, Any]:
    """Trains with the step; returns the timed seconds, bytes at most and losses."""
    rank = torch.distributed.get_rank()
    seconds, losses, generator = [], [], torch.Generator().manual_seed(1 + rank)
    for index in range(args.warmup + args.steps):
        text = torch.randint(0, args.vocab, (args.batch, args.seq_length + 1), generator=generator).to(device)
        torch.distributed.barrier()
        start = time.perf_counter()
        losses.append(float(step(text[:, :-1].contiguous(), text[:, 1:].contiguous())))
        torch.distributed.barrier()
        seconds += [time.perf_counter() - start] if index >= args.warmup else []
    return {
        "seconds": seconds,
        "peak_device_mb": round(torch.cuda.max_memory_allocated() / 1e6, 1) if device.type == "cuda" else None,
        "peak_resident_mb": round(status_bytes("VmHWM") / 1e6, 1),
        "losses": losses,
    }


# ---- all of them


def run_in_turns(args: argparse.Namespace, names: list[str], script: str = __file__) -> dict[str, dict[str, Any]]:
    """Every side's figures, or why there are none: times of all rounds, the rest of the last one."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _, name in in_turns(names, args.rounds):
        if not any("error" in run for run in runs[name]):
            runs[name].append(launch(args, name, script))
    return {name: summary(args, found) for name, found in runs.items()}


def launch(args: argparse.Namespace, name: str, script: str) -> dict[str, Any]:
    """One run of a side, or why it failed; on stderr too, for whoever has to stop before the last side is done."""
    ranks = ["-m", "megazero.launch", "--standalone", "--nproc-per-node", str(args.ranks)]
    command = [sys.executable, *ranks, script, *sys.argv[1:], "--nvme-path", args.nvme_path, "--side", name]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or not lines:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        errors = [line for line in said if "Error" in line]
        found = {"error": (errors or said)[-1]}
    else:
        found = json.loads(lines[-1])
    print(f"{name}: {json.dumps(summary(args, [found]))}", file=sys.stderr, flush=True)
    return found


def summary(args: argparse.Namespace, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a side's runs: one failure is the side's."""
    last = runs[-1]
    if "error" in last:
        return last
    seconds = [duration for run in runs for duration in run["seconds"]]
    tokens, median = args.batch * args.seq_length * args.ranks, statistics.median(seconds)
    flops = gpt2_config(args).flops_per_token(args.seq_length) * args.batch * args.seq_length
    return {
        "median_s": round(median, 4),
        "quartiles_s": quartiles(seconds),
        "tokens_per_s": round(tokens / median, 1),
        "model_tflops_per_rank": round(flops / median / 1e12, 4),
        **{key: value for key, value in last.items() if key != "seconds"},
    }


def about(args: argparse.Namespace, sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of all sides, and what they were taken of and on; takes the losses of all steps out of them."""
    losses = {name: side.pop("losses") for name, side in sides.items() if "losses" in side}
    ours = {tuple(trace) for name, trace in losses.items() if not name.startswith("deepspeed")}
    return {
        "model": model_line(args),
        "batch": f"{args.batch} x {args.seq_length} on each of {args.ranks} ranks",
        "dtype": "bfloat16" if args.bf16 else "float32",
        "checkpointed_activations": args.checkpoint,
        "sides": sides,
        "losses": "equal bit for bit" if len(ours) == 1 else "different" if ours else "none",
        "last_losses": {name: trace[-1] for name, trace in losses.items()},
        "steps": args.steps,
        "rounds": args.rounds,
        **measured_on("deepspeed", machine=torch.cuda.get_device_name() if torch.cuda.is_available() else MACHINE),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs every side; returns the result line."""
    return {"benchmark": "offload", **about(args, run_in_turns(args, side_names(args)))}


def side_parser(description: str | None) -> argparse.ArgumentParser:
    """The sizes of model and run."""
    sizes = {"layers": 6, "hidden": 512, "heads": 8, "seq_length": 256, "batch": 1, "vocab": 8192, "ranks": 1}
    parser = make_parser(description, **sizes, steps=5, warmup=2)
    parser.add_argument("--rounds", type=int, default=2, help="runs of every side (default: 2)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="names of sides")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpoint", action="store_true", help="recompute the blocks in backward")
    parser.add_argument("--nvme-path", help="directory on the drive (default: that of temporary files)")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    return parser


def play(
    args: argparse.Namespace,
    run_side: Callable[[argparse.Namespace, str], dict[str, Any]],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
) -> None:
    """Prints the figures of the one side of which this process is a rank; else all sides', in a folder that goes at the end.

    Without a GPU, where every home has the same Adam, it fails if the sides' losses differ.
    """
    if args.side:
        found = run_side(args, args.side)
        if torch.distributed.get_rank() == 0:
            print(json.dumps(found), flush=True)
        comm.leave_distributed()
        return
    with tempfile.TemporaryDirectory(dir=args.nvme_path) as folder:
        args.nvme_path = folder
        found = measure(args)
    print(json.dumps(found))
    if found["losses"] == "different" and not torch.cuda.is_available():
        sys.exit("The sides trained different things, so their figures do not compare.")


def main() -> None:
    """Parses the sizes, measures, prints."""
    parser = side_parser(__doc__)
    parser.add_argument("--stages", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3])
    play(parser.parse_args(), run_side, measure)


if __name__ == "__main__":
    main()
