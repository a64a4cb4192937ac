"""What DeepSpeed's users ask their engine: batch sizes, precision, ZeRO's stage, ranks; from configuration and groups."""

from __future__ import annotations

import torch

from megazero import comm
from megazero.json_config import JsonConfig
from megazero.mpu.groups import ParallelGroups
from megazero.zero.config import Sharding, ZeroConfig
from megazero.zero.optimizer import BucketOptimizer


class Questions:
    """The part of `DeepSpeedEngine` that only answers."""

    config: JsonConfig
    groups: ParallelGroups
    zero: ZeroConfig
    sharding: Sharding
    _optimizer: BucketOptimizer
    _micro_batch_size: int
    _accumulation_steps: int

    def train_batch_size(self) -> int:
        """Samples of one optimizer step on all ranks."""
        return self._micro_batch_size * self._accumulation_steps * self.groups.data_parallel_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro-batch size, accumulation steps)."""
        return self.train_batch_size(), self._micro_batch_size, self._accumulation_steps

    @property
    def global_rank(self) -> int:
        """This process's rank in the world."""
        return torch.distributed.get_rank()

    @property
    def local_rank(self) -> int:
        """This process's rank on its node, as the launcher counts them."""
        return comm.get_local_rank()

    @property
    def world_size(self) -> int:
        """Ranks of the world."""
        return torch.distributed.get_world_size()

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks."""
        return self.groups.data_parallel_size

    @property
    def mp_world_size(self) -> int:
        """Model-parallel ranks."""
        return self.groups.model_parallel_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward on one rank."""
        return self._micro_batch_size

    def get_mom(self) -> list:
        """The momentum, or Adam's betas, of every parameter group."""
        return [group.get("momentum", group.get("betas")) for group in self._optimizer.param_groups]

    def gradient_clipping(self) -> float:
        """The global norm that gradients are clipped to; 0 for none."""
        return self._optimizer.clip_grad

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return self._optimizer.loss_scaler.dynamic

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self.config.bf16.enabled

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.zero.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.sharding.gradients

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.sharding.parameters

    def wall_clock_breakdown(self) -> bool:
        """Whether the times of forward, backward and step are logged."""
        return self.config.wall_clock_breakdown

    def steps_per_print(self) -> int | None:
        """Optimizer steps between log lines; None for no lines."""
        return self.config.steps_per_print
