"""ZeRO data parallelism: flat buckets, the schedule that drives them, the optimizer over them, and access to sharded states."""

from megazero.zero.config import ZeroConfig
from megazero.zero.external import register_external_parameter, unregister_external_parameter
from megazero.zero.gathered import GatheredParameters
from megazero.zero.init import Init
from megazero.zero.parameter import ReleasedParameter, ZeroParamStatus
from megazero.zero.tiling import TiledLinear, TiledLinearReturnBias

MiCS_Init = Init  # DeepSpeed's name, for a configuration with mics_shard_size

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "ReleasedParameter",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroConfig",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
]
