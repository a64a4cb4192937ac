"""This library's engine as a side of the benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from peers import CLIP, DECAY, LR, Job, Side
from torch import Tensor, nn

from megazero import mpu
from megazero.engine import Engine, weight_decay_groups
from megazero.mpu.groups import ParallelGroups
from megazero.optim.optimizers import OptimizerConfig
from megazero.zero.config import ZeroConfig


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
