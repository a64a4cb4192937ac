"""Step time, memory and traffic of tensor parallelism: megazero beside Megatron-LM and torch (`parallelize_module`, DTensor).

    python benchmarks/tensor_parallel.py                                              # 6 x 384, fp32, 2 ranks
    python benchmarks/tensor_parallel.py --layers 12 --hidden 768 --heads 12 --bf16 --steps 6 --warmup 1
    python benchmarks/tensor_parallel.py --layers 2 --hidden 32 --heads 2 --vocab 128 --seq-length 16 --steps 2   # does it work?

All sides split the same GPT-2 of the same weights over the same ranks by Megatron-LM's plan: a vocabulary-parallel embedding, its
tied head with a vocabulary-parallel loss, and blocks of a column-parallel and a row-parallel layer each. "-sequence" also cuts
norms and residuals along the sequence. They are alive together and take turns, a step each, in processes of their own, and must
agree in loss and gradient norm. Prints one JSON line, and a table on stderr. Linux and CPU only.

Megatron-LM takes part when its library can be imported (`pip install --no-deps megatron-core`); megatron_side.py says how.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import megatron_side
import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparison import conditions, finish, play, training_parser
from harness import gpt2_config, model_line
from megazero_side import EngineSide
from peers import CLIP, DECAY, LR, Entry, Job, Side, TorchSide
from plain_gpt2 import PlainGPT2, decay_groups, in_order, interleaved
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from megazero import mpu
from megazero.model.gpt2 import GPT2Model
from megazero.model.state_dict import slice_full
from megazero.zero.config import ZeroConfig

REFERENCE = "torch"


class SameBatch(Job):
    """A job whose ranks all read the same batch."""

    def data(self, index: int, rank: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of the first rank."""
        return super().data(index, 0)


class SplitGPT2(PlainGPT2):
    """The plain GPT-2 whose parameters torch has split: the sums that torch's styles for layers do not say."""

    mesh: DeviceMesh
    in_slices: bool

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, fp32, whole on every rank; tokens and targets [b, s]. In slices, x is [b, s/t, h] up to the head."""
        positions = self.wpe(torch.arange(tokens.size(1)))[None]
        if self.in_slices:
            positions = (
                DTensor.from_local(positions, self.mesh, [Replicate()]).redistribute(placements=[Shard(1)]).to_local()
            )
        x = self.wte(tokens) + positions
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        if not self.in_slices:
            x = DTensor.from_local(x, self.mesh, [Replicate()])
        logits = F.linear(x.redistribute(placements=[Replicate()]), self.wte.weight)  # cut along the vocabulary
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def cut_and_whole(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those that are cut over the ranks, and the others: one foreach operation takes tensors of one kind."""
    known = list(parameters)
    return [[p for p in known if isinstance(p, DTensor) == is_cut] for is_cut in (True, False)]


class Torch(TorchSide):
    """torch's tensor parallelism as its tutorial shows it, with fused AdamW."""

    def __init__(self, job: Job, sequence_parallel: bool = False) -> None:
        super().__init__(job)
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,))
        torch.manual_seed(0)
        self.model = model = SplitGPT2(job.layers, job.hidden, job.heads, job.seq_length, job.vocab)
        model.mesh, model.in_slices = mesh, sequence_parallel
        x = Shard(1) if sequence_parallel else Replicate()
        parallelize_module(model.wte, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=x))
        plan: dict[str, Any] = {
            "qkv": ColwiseParallel(input_layouts=x),
            "proj": RowwiseParallel(output_layouts=x),
            "up": ColwiseParallel(input_layouts=x),
            "down": RowwiseParallel(output_layouts=x),
        }
        if sequence_parallel:
            plan |= {"ln1": SequenceParallel(), "ln2": SequenceParallel()}
            parallelize_module(model.ln_f, mesh, SequenceParallel())
        for block in model.blocks:
            for parameter in block.qkv.parameters():
                parameter.data = interleaved(parameter.data, size)
            parallelize_module(block, mesh, plan)
        self.kinds = cut_and_whole(model.parameters())
        groups = [
            {**group, "params": kind}
            for group in decay_groups(model, DECAY)
            for kind in cut_and_whole(group["params"])
            if kind
        ]
        self.optimizers = [torch.optim.AdamW(groups, lr=LR, fused=True)]

    def gradient_sync(self, is_last: bool) -> contextlib.AbstractContextManager:
        """The loss and its gradient from logits that are cut along the vocabulary."""
        return loss_parallel()

    def clip(self) -> Tensor:
        """By the norm of what is cut and of what every rank has."""
        cut, whole = ([p.grad for p in kind if p.grad is not None] for kind in self.kinds)
        norm = nn.utils.get_total_norm(cut).full_tensor()  # type: ignore[attr-defined]
        if whole:
            norm = torch.linalg.vector_norm(torch.stack([norm, nn.utils.get_total_norm(whole)]))
        for kind in self.kinds:
            nn.utils.clip_grads_with_norm_(kind, CLIP, norm)
        return norm


class Megazero(EngineSide):
    """This library's GPT-2 and engine."""

    def __init__(self, job: Job, sequence_parallel: bool = False) -> None:
        super().__init__(job)
        groups = mpu.initialize_model_parallel(dist.get_world_size())
        sizes = argparse.Namespace(**vars(job))
        config = gpt2_config(sizes, attention_dropout=0.0, hidden_dropout=0.0, sequence_parallel=sequence_parallel)
        model = GPT2Model(config, group=groups.model, dtype=torch.bfloat16 if job.bf16 else torch.float32)
        plain = dict(zip(dict(model.named_parameters()), in_order(job.model()), strict=True))
        model.load_state_dict(slice_full(plain, model, groups.model.rank(), groups.model.size()))
        self.make_engine(model, groups, ZeroConfig(stage=0))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean of what the model returns for each token."""
        return self.engine(tokens, targets=targets).mean()


def available_sides() -> dict[str, Entry]:
    """Every system that can be imported here, by name."""
    sides: dict[str, Callable[..., Side]] = {REFERENCE: Torch, "megazero": Megazero}
    if megatron_side.is_installed():
        sides["megatron"] = megatron_side.MegatronGPT2
    return {
        **{name: Entry(0, side) for name, side in sides.items()},
        **{f"{name}-sequence": Entry(0, partial(side, sequence_parallel=True)) for name, side in sides.items()},
    }


def main() -> None:
    """Measures, prints, and fails if the sides did not compute the same."""
    args = training_parser(__doc__).parse_args()
    rows = play("tensor parallel", available_sides(), SameBatch.of(args), args)
    result = {
        "question": "step time, memory and traffic of tensor parallelism, megazero and others",
        "model": model_line(args),
        "batch": f"{args.accumulation} x {args.batch} x {args.seq_length}",
        **conditions(args),
        "sides": rows,
        "reference": REFERENCE,
    }
    finish(result, {"all": rows})


if __name__ == "__main__":
    main()
