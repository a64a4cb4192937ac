"""Colossal-AI's `ShardedModelV2` and `ShardedOptimizerV2` (v0.1.3 to v0.1.12): settings of one megazero engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.compat.colossalai.grad_scaler import DynamicGradScaler
from megazero.compat.colossalai.shard_strategy import BucketTensorShardStrategy
from megazero.compat.wrappers import EngineModule, EngineOptimizer, join
from megazero.deepspeed.api import initialize
from megazero.logging import ALIKE, get_logger
from megazero.zero.registry import bucket_of

logger = get_logger(__name__)

_POLICIES = ("cuda", "cpu", "auto")


class ShardedModelV2(EngineModule):
    """A model whose states are sharded: at ZeRO stage 3 if `ZeroInitContext` sharded its parameters, else at stage 2.

    It can compute once `ShardedOptimizerV2` has been made from it.

    Args:
        module: a model with 16-bit parameters from `ZeroInitContext`. Any other model is converted, and its master weights keep
            its original values.
        shard_strategy: which parameters travel together.
        process_group, reduce_scatter_process_group: must be None: `megazero.mpu.initialize_model_parallel` makes the groups.
        reduce_scatter_bucket_size_mb: accepted without effect; the gradients of a unit travel together.
        fp32_reduce_scatter: gradients are summed over the ranks in fp32 instead of 16 bits.
        tensor_placement_policy: "cuda": everything stays on the device that the model computes on. "cpu": optimizer states and
            reduced gradients are kept in host memory and updated there; at stage 3, parameter shards are kept there too. "auto":
            the same as "cpu", except that at stage 3 one traced iteration decides what stays on the device.
        gradient_predivide_factor: 16-bit gradients are divided by this factor before the sum and by ranks / factor afterwards, so
            the result is the mean for every positive value. None chooses a power of two near the square root of the number of
            ranks.
        reuse_fp16_shard: gradients stay in 16 bits, stored separately from the parameters. Accumulating them over several
            backwards is therefore refused.
        bf16: use bf16 without a loss scale, instead of fp16.
        warmup_non_model_data_ratio: accepted without effect; no placement here relies on a guess of what activations need.

    Raises:
        ValueError: an argument is out of its range, or a process group is given.
    """

    def __init__(
        self,
        module: nn.Module,
        shard_strategy: BucketTensorShardStrategy,
        process_group: None = None,
        reduce_scatter_process_group: None = None,
        reduce_scatter_bucket_size_mb: float = 25,
        fp32_reduce_scatter: bool = False,
        tensor_placement_policy: str = "cuda",
        gradient_predivide_factor: float | None = 1.0,
        reuse_fp16_shard: bool = False,
        bf16: bool = False,
        *,
        warmup_non_model_data_ratio: float | None = None,
    ) -> None:
        if not isinstance(shard_strategy, BucketTensorShardStrategy):
            raise ValueError(
                "ShardedModelV2 needs a shard_strategy: TensorShardStrategy() or BucketTensorShardStrategy() of "
                f"megazero.compat.colossalai, got {type(shard_strategy).__name__}."
            )
        if process_group is not None or reduce_scatter_process_group is not None:
            raise ValueError(
                "ShardedModelV2 takes no process groups: states are sharded over the data-parallel ranks of "
                "megazero.mpu.initialize_model_parallel(size), or over all ranks. Drop process_group."
            )
        if tensor_placement_policy not in _POLICIES:
            raise ValueError(
                f"tensor_placement_policy must be one of {', '.join(_POLICIES)}, got {tensor_placement_policy!r}."
            )
        if not reduce_scatter_bucket_size_mb > 0:
            raise ValueError(f"reduce_scatter_bucket_size_mb must be positive, got {reduce_scatter_bucket_size_mb}.")
        if isinstance(module, EngineModule):
            raise ValueError("ShardedModelV2 was given a model that is wrapped already. Give it the model itself.")
        join()
        super().__init__(module)
        self.shard_strategy = shard_strategy
        self.fp32_reduce_scatter, self.reuse_fp16_shard, self.bf16 = fp32_reduce_scatter, reuse_fp16_shard, bf16
        self.tensor_placement_policy = tensor_placement_policy
        self.gradient_predivide_factor = gradient_predivide_factor
        self.is_sharded = any(bucket_of(parameter) is not None for parameter in module.parameters())

    def make_engine(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: DynamicGradScaler | None,
        gpu_margin_mem_ratio: float,
        gradient_accumulation_steps: int,
    ) -> None:
        """Makes the engine that trains this model with `optimizer`; called by `ShardedOptimizerV2`.

        Raises:
            ValueError: the settings contradict each other, or the optimizer is not over this model's parameters.
        """
        half = "bf16" if self.bf16 else "fp16"
        stage = 3 if self.is_sharded else 2
        homes = _homes(self.tensor_placement_policy, stage, gpu_margin_mem_ratio)
        factor = self.gradient_predivide_factor
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # a batch may have any number of samples
            "gradient_clipping": 0.0,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "zero_optimization": {"stage": stage, **homes},
            half: {"enabled": True},
            "communication_data_type": "fp32" if self.fp32_reduce_scatter else half,
            "data_types": {"grad_accum_dtype": half if self.reuse_fp16_shard else "fp32", "buffer_dtype": half},
            "gradient_predivide_factor": _root_of(comm.world().size()) if factor is None else factor,
        }
        units = self.shard_strategy.units(self.module)
        self._engine = initialize(model=self.module, optimizer=optimizer, config=config, zero_units=units)[0]
        if scaler is not None:
            self._engine.optimizer.loss_scaler = scaler
            logger.info("the loss scale is that of %s: %g at first", type(scaler).__name__, scaler.scale)


class ShardedOptimizerV2(EngineOptimizer):
    """The optimizer of a `ShardedModelV2`. Use: `zero_grad()`, `backward(loss)`, `step()`.

    Args:
        sharded_model: the model to train.
        optimizer: `HybridAdam`, `CPUAdam`, or a torch optimizer that updates each element by itself, over the model's parameters.
            It remains the one that steps, so schedulers that hold it keep working.
        gpu_margin_mem_ratio: share of the device's free memory for optimizer states, with the policy "auto".
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: see `DynamicGradScaler`.
        dp_process_group, mp_process_group: must be None, as for `ShardedModelV2`.
        verbose: accepted without effect; `optimizer.engine.memory()` has the bytes.
        gradient_accumulation_steps: if N, each loss is divided by N, and every N-th `step()` is an update. With 1, the gradients
            of several backwards before a `step()` add up.

    Raises:
        ValueError: an argument is out of its range, or gradients would accumulate under `reuse_fp16_shard`.
    """

    def __init__(
        self,
        sharded_model: ShardedModelV2,
        optimizer: torch.optim.Optimizer,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        dp_process_group: None = None,
        mp_process_group: None = None,
        verbose: bool = False,
        *,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        if not isinstance(sharded_model, ShardedModelV2) or isinstance(optimizer, EngineOptimizer):
            raise ValueError(
                "ShardedOptimizerV2 needs a ShardedModelV2 and a torch optimizer over its parameters, got "
                f"{type(sharded_model).__name__} and {type(optimizer).__name__}."
            )
        if dp_process_group is not None or mp_process_group is not None:
            raise ValueError("ShardedOptimizerV2 takes no process groups: they are the model's. Drop them.")
        if gradient_accumulation_steps > 1 and sharded_model.reuse_fp16_shard:
            raise ValueError(
                _NO_ACCUMULATION.format(f"gradient_accumulation {gradient_accumulation_steps} asks for it")
            )
        scaler = DynamicGradScaler(
            initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale
        )
        sharded_model.make_engine(
            optimizer, None if sharded_model.bf16 else scaler, gpu_margin_mem_ratio, gradient_accumulation_steps
        )
        super().__init__(sharded_model.engine)
        self.model = sharded_model

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss`, the mean over this rank's batch, to those since the last step, and reduces them.

        Raises:
            RuntimeError: there are gradients already, and `reuse_fp16_shard` is on.
        """
        if self.model.reuse_fp16_shard and self.engine.schedule.reductions.is_done:
            raise RuntimeError(
                _NO_ACCUMULATION.format("this is a second backward without step() or zero_grad() between")
            )
        self.engine.backward(loss)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> None:
        """Makes the next update scale the gradients so that their global norm is at most `max_norm`; 0 for no scaling.

        The norm itself is available after the update: `optimizer.engine.get_global_grad_norm()`.
        """
        self.engine.optimizer.clip_grad = max_norm

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update, or none if a gradient is inf or NaN; the loss scale adapts to the outcome."""
        is_update = self.engine.is_gradient_accumulation_boundary()
        super().step(closure)
        if is_update:
            self.engine.optimizer.clip_grad = 0.0


_NO_ACCUMULATION = (
    "reuse_fp16_shard=True keeps 16-bit gradients, in which nothing can accumulate, and {}. Set reuse_fp16_shard=False, or make "
    "one backward per step."
)


def _root_of(ranks: int) -> float:
    """A power of two near the square root of the number of ranks: the divisions before and after the sum are then similar."""
    return 2.0 ** (ranks.bit_length() // 2)


def _homes(policy: str, stage: int, margin_ratio: float) -> dict[str, Any]:
    """The part of a `zero_optimization` section that says where shards are kept."""
    if not 0 <= margin_ratio <= 1:
        raise ValueError(f"gpu_margin_mem_ratio must lie between 0 and 1, got {margin_ratio}.")
    is_placed = policy == "auto" and stage == 3
    if margin_ratio and not is_placed:
        logger.warning(
            'gpu_margin_mem_ratio %g has no effect: it is for tensor_placement_policy "auto" and sharded parameters',
            margin_ratio,
            extra=ALIKE,
        )
    if policy == "cuda":
        return {}
    homes: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
    if stage < 3:
        logger.info(
            "tensor_placement_policy: parameters stay whole on the device, since they are not sharded; the rest is on the host"
        )
        return homes
    homes["offload_param"] = {"device": "cpu"}
    return {**homes, "placement": "auto", "gpu_margin_mem_ratio": margin_ratio} if is_placed else homes
