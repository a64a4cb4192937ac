"""What megazero is measured against: torch DDP, DDP + ZeroRedundancyOptimizer, FSDP2 and DeepSpeed, as their users set them up.

Every system is a `Side`: it builds the same model from the same seed and trains it with fused AdamW and clipping. In bf16 each
does what its documentation shows: DDP autocasts over fp32 weights, FSDP2 has a mixed-precision policy, DeepSpeed a bf16 section.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import is_installed
from plain_gpt2 import PlainGPT2, decay_groups
from torch import Tensor, nn

LR, DECAY, CLIP = 1e-4, 0.01, 1.0


@dataclass(frozen=True)
class Job:
    """What all sides train: sizes of the model, sequences per micro-batch and rank, micro-batches per step."""

    layers: int
    hidden: int
    heads: int
    seq_length: int
    vocab: int
    batch: int
    accumulation: int = 1
    bf16: bool = False
    muon: bool = False  # for the matrices of the blocks
    steps_per_turn: int = 1  # in a row, before another side has its turn

    @classmethod
    def of(cls, args: argparse.Namespace) -> Job:
        """The job on the command line."""
        return cls(**{each.name: getattr(args, each.name) for each in fields(cls) if hasattr(args, each.name)})

    def model(self) -> PlainGPT2:
        """The fp32 model, equal on every rank and side."""
        torch.manual_seed(0)
        return PlainGPT2(self.layers, self.hidden, self.heads, self.seq_length, self.vocab)

    def data(self, index: int, rank: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets [accumulation, batch, seq_length] of a step; they come back every other step, so the loss falls."""
        generator = torch.Generator().manual_seed(1000 * (index % 2) + rank)
        shape = (self.accumulation, self.batch, self.seq_length + 1)
        text = torch.randint(0, self.vocab, shape, generator=generator)
        return text[..., :-1].contiguous(), text[..., 1:].contiguous()


class Side:
    """One system that trains a job on this rank; torch.distributed is initialised and its world is the data-parallel group."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """One update; returns this rank's loss, averaged over the micro-batches [m, b, s]."""
        raise NotImplementedError

    def grad_norm(self) -> float | None:
        """The global gradient norm of the last step, before clipping; None where the system does not tell. Collective."""
        raise NotImplementedError

    def finish(self) -> None:
        """Waits for what the last step has left under way, which would go on during another side's turn."""

    def counted_bytes(self) -> int | None:
        """Bytes that this rank has sent so far, where the system counts them itself."""
        return None

    def close(self) -> None:
        """Frees what a later side of the same process needs for itself. Collective."""


class TorchSide(Side):
    """A plain torch loop; subclasses set `model` and `optimizers`."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    autocasts = True  # in bf16; else the model computes in bf16 by itself
    norm: Tensor | float

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward and backward of every micro-batch, clipping, update."""
        total, last = 0.0, len(tokens) - 1
        for index, (x, y) in enumerate(zip(tokens, targets, strict=True)):
            with self.gradient_sync(index == last):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.job.bf16 and self.autocasts):
                    loss = self.loss(x, y) / len(tokens)
                loss.backward()
            total += float(loss.detach())
        self.update()
        return total

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a micro-batch."""
        return self.model(tokens, targets)

    def update(self) -> None:
        """Clipping, and the optimizers' step."""
        self.norm = self.clip()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def gradient_sync(self, is_last: bool) -> contextlib.AbstractContextManager:
        """The context of one micro-batch."""
        return contextlib.nullcontext()

    def clip(self) -> Tensor:
        """Scales the gradients to a norm of at most CLIP; returns what it was."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)

    def grad_norm(self) -> float:
        """What it was in the last update."""
        return float(self.norm)


class DDP(TorchSide):
    """torch DistributedDataParallel: its defaults, or with gradients that are views into its buckets."""

    def __init__(self, job: Job, bucket_view: bool = False) -> None:
        super().__init__(job)
        self.model = nn.parallel.DistributedDataParallel(job.model(), gradient_as_bucket_view=bucket_view)
        self.optimizers = self.make_optimizers(decay_groups(self.model, DECAY))

    def make_optimizers(self, groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
        """Fused AdamW with whole states on every rank; where the job wants it, beside Muon, which each rank computes whole."""
        if not self.job.muon:
            return [torch.optim.AdamW(groups, lr=LR, fused=True)]
        matrices = [p for p in self.model.module.blocks.parameters() if p.ndim == 2]  # type: ignore[union-attr]
        theirs = set(matrices)
        rest = [{**group, "params": [p for p in group["params"] if p not in theirs]} for group in groups]
        muon = torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(rest, lr=LR, fused=True)]

    def gradient_sync(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Gradients of all micro-batches but the last stay local."""
        return contextlib.nullcontext() if is_last else self.model.no_sync()  # type: ignore[operator]


class Zero1(DDP):
    """DDP with torch's ZeroRedundancyOptimizer: each rank updates some of the parameters and broadcasts them."""

    def make_optimizers(self, groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
        """Fused AdamW whose states are shared out by whole parameters."""
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return [ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=LR, fused=True)]


class FSDP2(TorchSide):
    """torch fully_shard, one group per block and one for the rest.

    Args:
        reshard: drop a block's gathered weights after its forward (ZeRO-3), or keep them until the update (ZeRO-2).
    """

    autocasts = False

    def __init__(self, job: Job, reshard: bool = True) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__(job)
        model, mesh = job.model(), init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if job.bf16 else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.optimizers = [torch.optim.AdamW(decay_groups(model, DECAY), lr=LR, fused=True)]

    def grad_norm(self) -> float:
        """The whole of the norm that clip_grad_norm_ returned as a DTensor."""
        return float(self.norm.full_tensor())  # type: ignore[attr-defined]


class DeepSpeed(Side):
    """DeepSpeed with the same torch optimizer; everything that this file does not name keeps its default."""

    def __init__(self, job: Job, stage: int) -> None:
        import deepspeed

        super().__init__(job)
        deepspeed.utils.logging.logger.setLevel("WARNING")
        deepspeed.init_distributed("gloo")
        model = job.model()
        config = {
            "train_micro_batch_size_per_gpu": job.batch,
            "gradient_accumulation_steps": job.accumulation,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": job.bf16},
        }
        optimizer = torch.optim.AdamW(decay_groups(model, DECAY), lr=LR, fused=True)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """The three calls of DeepSpeed's tutorial for every micro-batch."""
        total = 0.0
        for x, y in zip(tokens, targets, strict=True):
            loss = self.engine(x, y)
            self.engine.backward(loss)
            self.engine.step()
            total += float(loss.detach())
        return total / len(tokens)

    def grad_norm(self) -> float | None:
        """What the engine says: nothing in fp32 at stage 0."""
        return self.engine.get_global_grad_norm()


@dataclass(frozen=True)
class Entry:
    """What makes a side, and the ZeRO stage whose memory and traffic it has: sides of one stage are compared."""

    stage: int
    build: Callable[[Job], Side]


def available_peers() -> dict[str, Entry]:
    """Every peer that can be imported here, by name."""
    peers = {
        "ddp": Entry(0, DDP),
        "ddp-bucket-view": Entry(0, partial(DDP, bucket_view=True)),
        "torch-zero1": Entry(1, Zero1),
        "fsdp2-no-reshard": Entry(2, partial(FSDP2, reshard=False)),
        "fsdp2": Entry(3, FSDP2),
    }
    if is_installed("deepspeed", "pip install deepspeed"):
        peers.update({f"deepspeed-{stage}": Entry(stage, partial(DeepSpeed, stage=stage)) for stage in range(4)})
    return peers
