"""The `zero_optimization` section, with DeepSpeed's names and defaults."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from megazero.json_config.schema import ALWAYS, IF_GIVEN, NO_EFFECT, OBEYED, REFUSED, key
from megazero.json_source import DeepSpeedConfigError
from megazero.zero.config import HOMES, PLACEMENTS

_BUFFERS = "buffers are sized by the model's units"
_UNITS = "a unit (a transformer block) is gathered and released as a whole"
_QUANTIZED = "quantized communication is not built"


@dataclass(frozen=True)
class OffloadParamSection:
    """Where the shards of the parameters rest (stage 3)."""

    device: str = key("none", OBEYED, "cpu: host memory; nvme: a file in nvme_path", choices=HOMES)
    nvme_path: str | None = key(None, OBEYED, "directory; needed by nvme")
    buffer_count: int = key(5, OBEYED, "units whose shard is in host memory at a time, for nvme", at_least=1)
    buffer_size: int = key(100_000_000, NO_EFFECT, _BUFFERS, at_least=0)
    max_in_cpu: int = key(1_000_000_000, NO_EFFECT, "all of it is in the file", at_least=0)
    pin_memory: bool = key(True, OBEYED, "page-locked host memory")


@dataclass(frozen=True)
class OffloadOptimizerSection:
    """Where master weights and the optimizer's moments rest, and where the update runs."""

    device: str = key("none", OBEYED, "cpu: host memory; nvme: a file in nvme_path", choices=HOMES)
    nvme_path: str | None = key(None, OBEYED, "directory; needed by nvme")
    buffer_count: int = key(
        4, OBEYED, "states of a sub-group; three sub-groups are in host memory, for nvme", at_least=1
    )
    pin_memory: bool = key(True, OBEYED, "page-locked host memory")
    pipeline_read: bool = key(True, OBEYED, "true (DeepSpeed: false): the next sub-group is read while one is updated")
    pipeline_write: bool = key(True, OBEYED, "true (DeepSpeed: false): the last one is written while one is updated")
    fast_init: bool = key(False, NO_EFFECT, "the file's space is reserved, and nothing written that is not read")
    ratio: float = key(
        1.0, OBEYED, "part of the update that runs on the host; the first units' stays on the device", at_least=0
    )
    super_offload: bool = key(False, REFUSED, "it is for one kind of machine and not built")
    cpuadam_cores_perc: float = key(0.8, NO_EFFECT, "belongs to super_offload", at_least=0)

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes overlap with the update."""
        return self.pipeline_read or self.pipeline_write


@dataclass(frozen=True)
class ZeroSection:
    """Which model states are sharded, and how."""

    stage: int = key(0, OBEYED, "0 nothing, 1 optimizer states, 2 + gradients, 3 + parameters", at_least=0, at_most=3)
    overlap_comm: bool = key(
        True, OBEYED, "true at every stage (DeepSpeed: stage 3 only); the result is the same", old=("comm_overlap",)
    )
    overlap_param_gather: bool = key(
        False,
        OBEYED,
        "not DeepSpeed's: new weights travel while the next forward goes on (stages 1 and 2), and at stage 2 an offloaded update "
        "goes on as well; the GPT-2 job's default is true if new weights come from other ranks or homes",
    )
    offload_param: OffloadParamSection | None = key(None, OBEYED)
    offload_optimizer: OffloadOptimizerSection | None = key(None, OBEYED)

    placement: str = key(
        "static",
        OBEYED,
        "not DeepSpeed's: auto (stage 3) decides from one step what stays on the device",
        choices=PLACEMENTS,
    )
    gpu_margin_mem_ratio: float = key(
        0.95,
        OBEYED,
        "not DeepSpeed's: share of unused device memory that placement auto gives to optimizer states",
        at_least=0,
    )

    delayed_param_update: int = key(
        0,
        OBEYED,
        "not DeepSpeed's: after so many steps, an offloaded update runs while the next step computes with weights one step "
        "older; 0: never",
        at_least=0,
    )

    contiguous_gradients: bool = key(True, ALWAYS, "the gradients of a unit always lie in one buffer")
    reduce_scatter: bool = key(True, ALWAYS, "a rank gets the gradients that it needs and no others")
    allgather_partitions: bool = key(True, ALWAYS, "updated weights travel in one all-gather per bucket")
    use_multi_rank_bucket_allreduce: bool = key(True, ALWAYS, "gradients travel in one collective per bucket")
    load_from_fp32_weights: bool = key(True, ALWAYS, "master weights are loaded in fp32 where a checkpoint has them")
    ignore_unused_parameters: bool = key(True, ALWAYS, "a parameter that was not used has a gradient of zero")
    compute_grad_norm: bool = key(True, ALWAYS, "the norm is what finds overflows")
    override_module_apply: bool = key(True, ALWAYS, "initialisation of sharded parameters works by itself")
    parameter_alignment: bool = key(False, ALWAYS, "parameters always start at multiples of 64 elements")
    enable_sanity_checks: bool = key(False, ALWAYS, "the checks are always on")

    param_persistence_threshold: int = key(
        100_000,
        IF_GIVEN,
        "parameters of fewer elements stay whole",
        stage3=True,
        old=("stage3_param_persitence_threshold", "stage3_param_persitance_threshold"),
        at_least=0,
    )
    model_persistence_threshold: int = key(
        sys.maxsize, IF_GIVEN, "elements that stay whole at most", stage3=True, at_least=0
    )
    max_live_parameters: int = key(1_000_000_000, IF_GIVEN, "most elements gathered at a time", stage3=True, at_least=0)
    max_reuse_distance: int = key(
        1_000_000_000,
        IF_GIVEN,
        "a unit stays gathered if so many elements or fewer run until its backward; else the last one alone",
        stage3=True,
        at_least=0,
    )
    gather_16bit_weights_on_model_save: bool = key(
        False, OBEYED, "for save_16bit_model", stage3=True, old=("stage3_gather_fp16_weights_on_model_save",)
    )

    reduce_bucket_size: int = key(
        500_000_000, OBEYED, "most elements of small units that share a bucket (stages 0 to 2); 0: none do", at_least=0
    )
    allgather_bucket_size: int = key(500_000_000, NO_EFFECT, _BUFFERS, at_least=0)
    prefetch_bucket_size: int = key(
        50_000_000, IF_GIVEN, "most elements gathered ahead; else one unit", stage3=True, at_least=0
    )
    sub_group_size: int = key(
        1_000_000_000,
        IF_GIVEN,
        "most elements that an offloaded update brings to hand, an eighth of the rank's anyway",
        at_least=0,
    )
    memory_efficient_linear: bool = key(True, NO_EFFECT, "gathered weights are views; nothing is copied")
    module_granularity_threshold: int = key(0, NO_EFFECT, _UNITS, stage3=True)
    use_all_reduce_for_fetch_params: bool = key(False, NO_EFFECT, _UNITS, stage3=True)
    allgather_sequential: bool = key(False, NO_EFFECT, _UNITS, stage3=True)
    log_trace_cache_warnings: bool = key(False, NO_EFFECT, "there is no trace: the order of units is known")
    elastic_checkpoint: bool = key(False, NO_EFFECT, "a checkpoint always loads under any number of ranks")
    round_robin_gradients: bool = key(False, NO_EFFECT, "a rank's gradients are one contiguous piece")
    pipeline_loading_checkpoint: bool = key(False, NO_EFFECT, "tensors are read one at a time")
    legacy_stage1: bool = key(False, NO_EFFECT, "there is one implementation")

    mics_shard_size: int = key(
        -1, OBEYED, "data-parallel ranks that share one copy of the states; -1 or 0: all of them", at_least=-1
    )
    mics_hierarchical_params_gather: bool = key(
        False, NO_EFFECT, "the ranks that share a copy gather in one collective"
    )
    zero_hpz_partition_size: int = key(
        1, REFUSED, "parameters are not sharded a second time inside of a node; mics_shard_size shards all states there"
    )
    zero_quantized_weights: bool = key(False, REFUSED, _QUANTIZED)
    zero_quantized_nontrainable_weights: bool = key(False, REFUSED, _QUANTIZED)
    zero_quantized_gradients: bool = key(False, REFUSED, _QUANTIZED)
    save_muon_momentum_buffer_in_memory: bool = key(False, REFUSED, "Muon's momentum rests where the other states do")
    zenflow: dict[str, Any] | None = key(None, REFUSED, "ZenFlow is not built")
    leaf_module: dict[str, Any] | None = key(None, REFUSED, "give them to initialize(zero_units=)")

    def __post_init__(self) -> None:
        offload = self.offload_optimizer
        if self.stage == 0 and offload and offload.device != "none":
            raise DeepSpeedConfigError(
                f'zero_optimization.offload_optimizer.device "{offload.device}" needs zero_optimization.stage 1 or more, got '
                "stage 0: nothing is sharded that could rest elsewhere."
            )
        for name, home in (("offload_param", self.offload_param), ("offload_optimizer", offload)):
            if home and home.device == "nvme" and not home.nvme_path:
                path = f"zero_optimization.{name}"
                raise DeepSpeedConfigError(f'{path}.device "nvme" needs {path}.nvme_path, a directory on the device.')
        if offload and not 0 <= offload.ratio <= 1:
            raise DeepSpeedConfigError(
                f"zero_optimization.offload_optimizer.ratio must lie in [0, 1], got {offload.ratio}."
            )

    @property
    def has_idle_offload_param(self) -> bool:
        """Whether offload_param names a home at a stage that shards no parameters, which DeepSpeed ignores."""
        return self.stage < 3 and self.offload_param is not None and self.offload_param.device != "none"
