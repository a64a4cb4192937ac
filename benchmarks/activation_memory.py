"""Bytes that a GPT-2's blocks keep for backward, and the time that it costs not to: our ways, torch's and DeepSpeed's.

    python benchmarks/activation_memory.py                                             # 6 x 384, 2 x 512 tokens, fp32
    python benchmarks/activation_memory.py --attention-dropout 0.1 --plot activation_memory.png
    python benchmarks/activation_memory.py --layers 2 --hidden 32 --heads 2 --rounds 2            # does it work?
    python -m megazero.launch --standalone --nproc-per-node 2 benchmarks/activation_memory.py    # tensor-parallel

    none, selective, full       --recompute
    full, ...                   with --partition-activations, --contiguous-checkpointing, --checkpoint-in-cpu
    sequence-parallel, ...      --sequence-parallel, on several ranks
    auto N %                    --recompute auto with a budget of N % of what none takes, where that is enough
    torch reentrant, by hooks   torch.utils.checkpoint around each block; on several ranks only without --attention-dropout
    deepspeed, ...              deepspeed.checkpointing around each block, where it is installed (a CPU takes DS_ACCELERATOR=cpu)

The ways take turns, a step (forward and backward, no optimizer) each. Kept: bytes between forward and backward, saved by autograd
in blocks or held by checkpoints. Peak: the most memory of a step beyond what was there before it, gradients included. Each way
must agree with the first one in its gradients. Prints one JSON line, and a table on stderr; `--plot` draws memory over the time
of one step, the fastest of three.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from harness import (
    check_close,
    gpt2_config,
    in_turns,
    is_installed,
    machine_of,
    make_parser,
    measured_on,
    memory_timeline,
    quartiles_ms,
    table,
)
from torch import Tensor

from megazero import activation_checkpointing, comm, mpu
from megazero.model.gpt2 import GPT2Model
from megazero.model.recompute import measure_block, plan_recompute, saved_tensors
from megazero.throughput import keep_freed_memory

Checkpoint = Callable[..., Tensor]


@dataclass
class Way:
    """One way to spend less memory on activations."""

    modes: list[str]  # of each block
    settings: dict[str, Any] = field(default_factory=dict)  # of `activation_checkpointing.configure`
    is_sliced: bool = False  # sequence-parallel
    checkpoint: Checkpoint | None = None  # somebody else's, around each block
    prepare: Callable[[], Any] = lambda: None  # tells them


def ways(args: argparse.Namespace, whole: GPT2Model) -> dict[str, Way]:
    """What is compared, by name."""
    count, ranks = args.layers, whole.group.size()
    found = {mode: Way([mode] * count) for mode in ("none", "selective", "full")}
    full = found["full"]
    contiguous = {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": count}
    found["full, contiguous"] = replace(full, settings=contiguous)
    if ranks > 1:
        found["full, partitioned"] = replace(full, settings={"partition_activations": True})
        for mode in ("none", "selective", "full"):
            found[f"sequence-parallel, {mode}"] = Way([mode] * count, is_sliced=True)
    if whole.word_embeddings.weight.is_cuda:
        found["full, in cpu"] = replace(full, settings={"checkpoint_in_cpu": True})
    costs = measure_block(whole.transformer.blocks[0], args.seq_length, args.batch)
    for share in args.auto:
        budget = int(share / 100 * count * costs["none"].nbytes)
        try:
            modes = plan_recompute(costs, count, budget)
        except ValueError as error:  # of few layers one may need more; on every rank, as each keeps as many bytes
            print(f"auto {share} % is left out: {error}", file=sys.stderr)
            continue
        found[f"auto {share} %"] = Way(comm.all_gathered_objects(modes)[0])  # ranks measure other times
    if ranks == 1 or args.attention_dropout == 0.0:  # it does not repeat the dropout of the model-parallel streams
        found["torch reentrant"] = replace(full, checkpoint=_torch_checkpoint(use_reentrant=True))
        found["torch by hooks"] = replace(full, checkpoint=_torch_checkpoint(use_reentrant=False))
        found.update(_deepspeed_ways(full, ranks))
    return found


def _torch_checkpoint(use_reentrant: bool) -> Checkpoint:
    return lambda run, x, mask: torch.utils.checkpoint.checkpoint(run, x, mask, use_reentrant=use_reentrant)


def _deepspeed_ways(full: Way, ranks: int) -> dict[str, Way]:
    """DeepSpeed's checkpointing, and with partitioned activations on several ranks; none where it cannot be imported."""
    if not is_installed("deepspeed", "pip install deepspeed"):
        return {}
    with redirect_stdout(sys.stderr):  # stdout is for the result
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        deepspeed.init_distributed(torch.distributed.get_backend(), verbose=False)  # finds that there is one
    theirs = deepspeed.checkpointing

    def checkpoint(run: Callable[..., Tensor], x: Tensor, mask: Tensor | None) -> Tensor:
        return theirs.checkpoint(partial(run, mask=mask), x)  # partitioned, it takes no argument that is None

    way = replace(full, checkpoint=checkpoint, prepare=partial(theirs.configure, mpu))
    if ranks == 1:
        return {"deepspeed": way}
    cut = replace(way, prepare=partial(theirs.configure, mpu, partition_activations=True))
    return {"deepspeed": way, "deepspeed, partitioned": cut}


def _kept_by_deepspeed(y: Tensor) -> Iterator[Tensor]:
    """What its checkpointed calls, which `y` comes from, keep; autograd, and so `saved_tensors`, knows nothing of it."""
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for x in getattr(node, "deepspeed_saved_tensors", None) or ():
            kept = getattr(x, "saved_data", None)
            yield x if kept is None else kept
        nodes += [next_node for next_node, _ in node.next_functions]


class Bench:
    """The models, with and without slices, of equal weights; and steps of them in each way."""

    def __init__(self, args: argparse.Namespace) -> None:
        config = gpt2_config(
            args,
            vocab_chunk_size=args.vocab_chunk_size,
            hidden_dropout=args.hidden_dropout,
            attention_dropout=args.attention_dropout,
        )
        where: dict[str, Any] = {"device": comm.local_device(), "dtype": getattr(torch, args.dtype)}
        torch.manual_seed(0)
        self.whole = GPT2Model(config, **where)
        self.models = {False: self.whole}
        if self.whole.group.size() > 1:
            self.models[True] = GPT2Model(replace(config, sequence_parallel=True), **where)
            self.models[True].load_state_dict(self.whole.state_dict())
        self.tokens = torch.randint(args.vocab, (args.batch, args.seq_length), device=where["device"])
        self.seed = 1
        mpu.model_parallel_cuda_manual_seed(self.seed)  # measuring blocks draws dropout too

    def use(self, way: Way) -> GPT2Model:
        """The model, told to go this way, without gradients."""
        activation_checkpointing.configure(None, **way.settings)
        model = self.models[way.is_sliced]
        model.transformer.set_recompute(way.modes)
        vars(model.transformer).pop("_checkpoint", None)
        way.prepare()
        if way.checkpoint is not None:
            model.transformer._checkpoint = way.checkpoint  # type: ignore[method-assign, assignment]
        for one in self.models.values():
            one.zero_grad(set_to_none=True)
        mpu.model_parallel_cuda_manual_seed(self.seed)
        return model

    def step(self, model: GPT2Model) -> float:
        """Forward and backward; returns the loss, so that it also waits for a device."""
        loss = model(self.tokens, targets=self.tokens).mean()
        loss.backward()
        return loss.item()

    def kept_bytes(self, way: Way) -> int:
        """What all blocks keep between forward and backward."""
        model = self.use(way)
        ranks = model.group.size() if way.is_sliced else 1
        shape = self.tokens.size(1) // ranks, self.tokens.size(0), model.config.hidden_size
        x = torch.randn(shape, device=self.tokens.device, dtype=model.word_embeddings.weight.dtype, requires_grad=True)
        with saved_tensors(model.parameters()) as saved:
            y = model.transformer.run_blocks(x)
        for x in _kept_by_deepspeed(y):
            saved.add(x)
        kept = activation_checkpointing.default.storage.kept_bytes
        del y
        return saved.nbytes + kept

    def timeline(self, way: Way) -> list[tuple[float, float]]:
        """The memory of a step, as `memory_timeline` says."""
        return memory_timeline(partial(self.step, self.use(way)), self.tokens.device.type)


def measure(bench: Bench, found: dict[str, Way], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Times, kept bytes and peak of every way."""
    times: dict[str, list[float]] = {name: [] for name in found}
    want: list[Tensor] = []
    for turn, name in in_turns(found, args.warmup + args.rounds):
        model = bench.use(found[name])
        comm.barrier()
        start = time.perf_counter()
        bench.step(model)
        if turn >= args.warmup:
            times[name].append(time.perf_counter() - start)
        if turn == 0:
            got = [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
            want = want or got
            if not found[name].is_sliced or args.hidden_dropout == 0.0:  # slices drop other elements
                check_close(f"a gradient of {name}", got, want, 1e-4 if args.dtype == "float32" else 5e-2)
    return {
        name: {
            "quartiles_ms": quartiles_ms(times[name]),
            "kept_mb": round(bench.kept_bytes(way) / 1e6, 2),
            "peak_mb": round(max(size for _, size in bench.timeline(way)), 1),
            "by_none": round(statistics.median(times[name]) / statistics.median(times["none"]), 2),
            "modes": "".join(mode[0] for mode in way.modes),
        }
        for name, way in found.items()
    }


def plot(bench: Bench, found: dict[str, Way], path: str) -> None:
    """Memory over the time of one step, a line for each way, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5.5))
    for name, way in found.items():
        line = min((bench.timeline(way) for _ in range(3)), key=lambda line: line[-1][0])
        if comm.world().rank() == 0:
            axes.step(*zip(*line, strict=True), where="post", label=f"{name}, peak {max(y for _, y in line):.3g} MB")
    if comm.world().rank() == 0:
        axes.set(xlabel="ms since the start of the step", ylabel="MB beyond parameters", title="Memory over one step")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=130, bbox_inches="tight")


def main() -> None:
    """Parses the sizes, measures, prints."""
    sizes = {"layers": 6, "hidden": 384, "heads": 6, "seq_length": 512, "batch": 2}
    # Few ids, as the head is not what is measured.
    parser = make_parser(__doc__, **sizes, vocab=1000, vocab_chunk_size=0, rounds=7, warmup=2)
    parser.add_argument("--hidden-dropout", type=float, default=0.1)
    parser.add_argument("--attention-dropout", type=float, default=0.0, help="on a CPU it takes the fused kernel away")
    parser.add_argument("--dtype", default="float32", help="of parameters and activations")
    parser.add_argument("--auto", type=int, nargs="*", default=[50, 75], help="budgets, in %% of what none keeps")
    parser.add_argument("--plot", metavar="PNG", help="draw memory over the time of one step")
    parser.add_argument("--plotted", nargs="+", help="the ways to draw (default: all but torch's and DeepSpeed's)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    comm.init_distributed()
    mpu.initialize_model_parallel(torch.distributed.get_world_size())
    bench = Bench(args)
    found = ways(args, bench.whole)
    names = args.plotted or [name for name in found if not name.startswith(("torch", "deepspeed"))]
    if unknown := set(names) - set(found):
        parser.error(f"--plotted {', '.join(unknown)}: there is no such way. There are {', '.join(found)}.")
    result = measure(bench, found, args)
    if args.plot:
        plot(bench, {name: found[name] for name in names}, args.plot)
    if comm.world().rank() == 0:
        print(table("way", result), file=sys.stderr)
        ranks = torch.distributed.get_world_size()
        machine = {**measured_on("deepspeed", machine=machine_of(comm.local_device())), "ranks": ranks}
        question = "activations: bytes kept between forward and backward, and time of a step, by way"
        print(json.dumps({"question": question, **vars(args), **machine, "ways": result}))
    comm.leave_distributed()


if __name__ == "__main__":
    main()
