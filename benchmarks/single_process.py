"""What the engine costs on one process: its training step beside a plain hand-written PyTorch loop of the same GPT-2.

    python benchmarks/single_process.py                      # 12 x 768, fp32, CPU
    python benchmarks/single_process.py --bf16 --layers 24 --hidden 1024 --heads 16 --batch 8     # on a GPU
    python benchmarks/single_process.py --layers 2 --hidden 32 --heads 2 --seq-length 16 --vocab 128 --steps 2     # does it work?

Both train the same weights on the same batches in one process, a step of one after a step of the other, and must agree in the
loss. Prints one JSON line: medians, quartiles, and ratios (engine / plain).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from harness import compared, gpt2_config, in_turns, join, machine_of, make_parser, measured_on, model_line, quartiles
from peers import CLIP, DECAY, LR
from plain_gpt2 import PlainGPT2, decay_groups, in_order
from torch import Tensor, nn

from megazero import comm, mpu
from megazero.engine import Engine, weight_decay_groups
from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from megazero.optim.optimizers import OptimizerConfig
from megazero.throughput import peak_tflops

Step = Callable[[Tensor, Tensor], Tensor]


def engine_side(config: GPT2Config, device: torch.device, dtype: torch.dtype) -> tuple[GPT2Model, Step]:
    """The library's model and its training step: (tokens, targets) -> loss."""
    torch.manual_seed(0)
    model = GPT2Model(config, device=device, dtype=dtype)
    factory = OptimizerConfig().factory()
    engine = Engine(model, mpu.get_groups(), factory, *weight_decay_groups(model, DECAY), clip_grad=CLIP)
    for group in engine.optimizer.param_groups:
        group["lr"] = LR

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets=targets).mean()
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return model, step


def plain_side(config: GPT2Config, device: torch.device, dtype: torch.dtype, weights: GPT2Model) -> Step:
    """The hand-written model's training step, from the same weights."""
    h, heads, vocab = config.hidden_size, config.num_attention_heads, config.require_vocab_size()
    model = PlainGPT2(config.num_layers, h, heads, config.max_position_embeddings, vocab).to(device, dtype)
    for mine, theirs in zip(in_order(model), weights.parameters(), strict=True):
        mine.copy_(theirs.detach())
    if config.compile:
        for block in model.blocks:
            block.compile()
    adam = torch.optim.AdamW(decay_groups(model, DECAY), lr=LR, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def interleave(sides: dict[str, Step], args: argparse.Namespace, device: torch.device) -> tuple[dict, dict]:
    """Seconds and losses of every step by side: a step of one, a step of the other, each first in turn."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for index, name in in_turns(sides, args.warmup + args.steps):
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(0, args.vocab, (args.batch, args.seq_length + 1), generator=generator).to(device)
        start = time.perf_counter()
        losses[name].append(float(sides[name](text[:, :-1].contiguous(), text[:, 1:].contiguous())))
        if device.type == "cuda":
            torch.cuda.synchronize()
        if index >= args.warmup:
            times[name].append(time.perf_counter() - start)
    return times, losses


def measure(args: argparse.Namespace) -> dict:
    """Runs both sides and returns the result line."""
    device, dtype = join(), torch.bfloat16 if args.bf16 else torch.float32
    config = gpt2_config(args, attention_dropout=0.0, hidden_dropout=0.0, compile=args.compile)
    model, engine_step = engine_side(config, device, dtype)
    sides = {"plain": plain_side(config, device, dtype, model), "engine": engine_step}
    times, losses = interleave(sides, args, device)
    if not args.bf16:  # in bf16 the sides differ on purpose: the engine keeps fp32 master weights
        torch.testing.assert_close(torch.tensor(losses["engine"]), torch.tensor(losses["plain"]), rtol=1e-4, atol=1e-4)
    median = {name: statistics.median(values) for name, values in times.items()}
    peak, source = peak_tflops(device, dtype)
    tokens = args.batch * args.seq_length
    return {
        "question": "step time of the engine / of a plain loop, one process",
        "model": model_line(args),
        "batch": f"{args.batch} x {args.seq_length}",
        "dtype": str(dtype).removeprefix("torch."),
        "compile": args.compile,
        **measured_on(machine=machine_of(device)),
        "steps": args.steps,
        "median_s": {name: round(value, 4) for name, value in median.items()},
        "quartiles_s": {name: quartiles(values) for name, values in times.items()},
        **compared(times["engine"], times["plain"]),
        "tokens_per_s": round(tokens / median["engine"], 1),
        "mfu": round(config.flops_per_token(args.seq_length) * tokens / median["engine"] / 1e12 / peak, 4),
        "peak_tflops": f"{peak:.3f} ({source})",
        "last_loss": {name: round(values[-1], 6) for name, values in losses.items()},
    }


def main() -> None:
    """Parses the sizes, measures, prints."""
    sizes = {"layers": 12, "hidden": 768, "heads": 12, "seq_length": 512, "batch": 1, "vocab": 50304}
    parser = make_parser(__doc__, **sizes, steps=16, warmup=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if args.vocab % 128:
        parser.error(f"--vocab {args.vocab} would be padded on one side only: give a multiple of 128")
    print(json.dumps(measure(args)))
    comm.leave_distributed()


if __name__ == "__main__":
    main()
