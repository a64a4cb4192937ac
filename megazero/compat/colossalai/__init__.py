"""Colossal-AI's ZeRO of 2022 (v0.1.3 to v0.1.12) over megazero's engine. To port a script, import from this module instead.

docs/coming_from_other_systems.md describes what each name means here, and what is refused.
"""

from megazero.compat.colossalai.grad_scaler import DynamicGradScaler
from megazero.compat.colossalai.hooks import BaseHook, LogMetricByEpochHook, LossHook, LRSchedulerHook
from megazero.compat.colossalai.init_context import ZeroInitContext
from megazero.compat.colossalai.launch import Engine, gpc, initialize, launch_from_torch
from megazero.compat.colossalai.reports import (
    DistributedLogger,
    disable_existing_loggers,
    get_current_device,
    get_dist_logger,
    get_mem_info,
)
from megazero.compat.colossalai.shard_strategy import BucketTensorShardStrategy, TensorShardStrategy
from megazero.compat.colossalai.sharded import ShardedModelV2, ShardedOptimizerV2
from megazero.compat.colossalai.trainer import Trainer
from megazero.ops.adam import CPUAdam, HybridAdam

__all__ = [
    "BaseHook",
    "BucketTensorShardStrategy",
    "CPUAdam",
    "DistributedLogger",
    "DynamicGradScaler",
    "Engine",
    "HybridAdam",
    "LRSchedulerHook",
    "LogMetricByEpochHook",
    "LossHook",
    "ShardedModelV2",
    "ShardedOptimizerV2",
    "TensorShardStrategy",
    "Trainer",
    "ZeroInitContext",
    "disable_existing_loggers",
    "get_current_device",
    "get_dist_logger",
    "get_mem_info",
    "gpc",
    "initialize",
    "launch_from_torch",
]
