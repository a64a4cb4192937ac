"""The JSON configuration as a whole: its keys, which of them exclude each other, and what the engine is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megazero.json_config.schema import ALWAYS, IF_GIVEN, NO_EFFECT, OBEYED, REFUSED, describe, every_key, key
from megazero.json_config.sections import (
    DYNAMIC_SCALE_FIELDS,
    ActivationCheckpointingSection,
    AioSection,
    Bf16Section,
    CheckpointSection,
    DataTypesSection,
    Fp16Section,
    OptimizerSection,
    SchedulerSection,
)
from megazero.json_config.zero_section import OffloadOptimizerSection, OffloadParamSection, ZeroSection
from megazero.json_source import DeepSpeedConfigError, errors_of
from megazero.optim.loss_scaler import DTYPES, PrecisionConfig
from megazero.zero.config import ZeroConfig
from megazero.zero.residency import LIMIT_KEYS, GatherLimits

ZERO = "zero_optimization"  # the name of a section
_LIMITS = {f"{ZERO}.{key}": field for field, key in LIMIT_KEYS.items()}  # the fields of GatherLimits, by key
# The field of ZeroConfig that corresponds to a key. nvme_path and pin_memory are missing: they are keys of two sections.
ZERO_FIELDS = {
    "gradient_predivide_factor": "gradient_predivide_factor",
    "prescale_gradients": "prescale_gradients",
    "communication_data_type": "reduce_dtype",
    "data_types.grad_accum_dtype": "grad_dtype",
    f"{ZERO}.stage": "stage",
    f"{ZERO}.mics_shard_size": "shard_size",
    f"{ZERO}.reduce_bucket_size": "reduce_bucket_size",
    f"{ZERO}.overlap_comm": "overlap_comm",
    f"{ZERO}.overlap_param_gather": "overlap_param_gather",
    f"{ZERO}.placement": "placement",
    f"{ZERO}.gpu_margin_mem_ratio": "gpu_margin_mem_ratio",
    f"{ZERO}.delayed_param_update": "delayed_param_update",
    f"{ZERO}.sub_group_size": "sub_group_size",
    **dict.fromkeys(_LIMITS, "gather_limits"),
    f"{ZERO}.stage3_param_persistence_threshold": "param_persistence_threshold",
    f"{ZERO}.stage3_model_persistence_threshold": "model_persistence_threshold",
    f"{ZERO}.offload_param.device": "offload_param",
    f"{ZERO}.offload_param.buffer_count": "param_buffer_count",
    f"{ZERO}.offload_optimizer.device": "offload_optimizer",
    f"{ZERO}.offload_optimizer.ratio": "offload_optimizer_ratio",
    f"{ZERO}.offload_optimizer.buffer_count": "optimizer_buffer_count",
    f"{ZERO}.offload_optimizer.pipeline_read": "pipeline_read",
    f"{ZERO}.offload_optimizer.pipeline_write": "pipeline_write",
    **{f"aio.{key}": "aio" for key in ("block_size", "queue_depth", "intra_op_parallelism", "overlap_events")},
}

# The keys to which ranks may give different values: where a host has its drive, what suits it, and what only a log shows.
_MAY_DIFFER = {
    *(f"{ZERO}.{home}.{key}" for home in ("offload_param", "offload_optimizer") for key in ("nvme_path", "pin_memory")),
    *(key for key in ZERO_FIELDS if key.startswith("aio.")),
    "activation_checkpointing.profile",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
}


@dataclass(frozen=True)
class JsonConfig:
    """A checked configuration in DeepSpeed's keys, with the three batch numbers resolved.

    Attributes:
        world_size, model_parallel_size: what the batch numbers were resolved for.
        given: the paths of the keys that the source had ("fp16.enabled"); the others have their defaults.
    """

    train_batch_size: int = key(None, OBEYED, "micro-batch x accumulation steps x data-parallel size")
    train_micro_batch_size_per_gpu: int = key(None, OBEYED, "samples of one forward on one data-parallel rank")
    gradient_accumulation_steps: int = key(None, OBEYED, "micro-batches of one optimizer step")

    gradient_clipping: float = key(1.0, OBEYED, "the global norm is at most this; 0: no clipping", at_least=0)
    zero_optimization: ZeroSection = key(ZeroSection(), OBEYED)
    fp16: Fp16Section = key(Fp16Section(), OBEYED)
    bf16: Bf16Section = key(Bf16Section(), OBEYED, old=("bfloat16",))
    data_types: DataTypesSection = key(DataTypesSection(), OBEYED)
    optimizer: OptimizerSection | None = key(None, OBEYED)
    scheduler: SchedulerSection | None = key(None, OBEYED)
    activation_checkpointing: ActivationCheckpointingSection = key(ActivationCheckpointingSection(), OBEYED)
    checkpoint: CheckpointSection = key(CheckpointSection(), OBEYED)
    aio: AioSection = key(AioSection(), OBEYED)

    steps_per_print: int | None = key(
        None, OBEYED, "optimizer steps between progress lines; null or Infinity: none", at_least=1
    )
    wall_clock_breakdown: bool = key(False, OBEYED, "logs the times of forward, backward and step")
    memory_breakdown: bool = key(False, OBEYED, "logs the bytes of P, G, O and buffers after each step")
    dump_state: bool = key(False, ALWAYS, "the effective configuration is always printed once")
    prescale_gradients: bool = key(False, OBEYED, "gradients are divided by the number of ranks before they are summed")
    gradient_predivide_factor: float = key(1.0, OBEYED, "they are divided by this before, by the rest after", above=0)
    gradient_allreduce_op: str = key(
        "mean", OBEYED, "sum: of the ranks' gradients; not with stage 3, nor in the GPT-2 job", choices=("mean", "sum")
    )
    communication_data_type: str | None = key(
        None,
        OBEYED,
        "of gradients on the wire: fp32 or the compute dtype; null: that in which they accumulate",
        choices=tuple(DTYPES),
    )
    seq_parallel_communication_data_type: str | None = key(
        "fp32", NO_EFFECT, "of DeepSpeed's sequence parallelism, which is not built", choices=tuple(DTYPES)
    )
    zero_allow_untested_optimizer: bool = key(
        False,
        OBEYED,
        "an optimizer of the caller's own class, at any stage: all of them step flat ranges of parameters",
    )
    zero_force_ds_cpu_optimizer: bool = key(
        True, NO_EFFECT, "every optimizer can be offloaded; Adam is one pass over memory"
    )
    dataloader_drop_last: bool = key(False, OBEYED, "drops a last incomplete batch")
    managed_gradient_accumulation: bool = key(True, REFUSED, "step() counts micro-batches")
    sparse_gradients: bool = key(False, REFUSED, "gradients are dense, those of `nn.Embedding(sparse=True)` too")
    use_data_before_expert_parallelism: bool = key(False, REFUSED, "mixtures of experts are not built")
    sequence_parallel_size: int = key(1, REFUSED, "sequences are cut over the model-parallel ranks alone")
    graph_harvesting: bool = key(False, REFUSED, "CUDA graphs are not captured")
    disable_allgather: bool = key(False, NO_EFFECT, "updated weights travel in one all-gather per bucket")
    allgather_size: int = key(500_000_000, NO_EFFECT, "buffers are sized by the model's units", above=0)
    vocabulary_size: int | None = key(None, NO_EFFECT, "the model pads its own vocabulary", at_least=1)
    disable_python_gc: bool = key(False, NO_EFFECT, "the garbage collector is left alone")
    log_level: str | None = key(None, NO_EFFECT, "set the level of the logger megazero")

    world_size: int = 1
    model_parallel_size: int = 1
    given: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.fp16.enabled and self.bf16.enabled:
            raise DeepSpeedConfigError(
                "fp16.enabled and bf16.enabled are both true, but parameters have one dtype. Disable one of them."
            )
        if self.gradient_allreduce_op == "sum" and self.zero_optimization.stage == 3:
            raise DeepSpeedConfigError(
                'gradient_allreduce_op "sum" is not possible with zero_optimization.stage 3. Use "mean", or stage 2.'
            )
        _ = self.zero  # checks it
        if self.data_types.param_dtype not in (None, self.compute_dtype):
            raise DeepSpeedConfigError(
                f'data_types.param_dtype "{self.data_types.param_dtype}" is not the dtype of the parameters, which is '
                f"{self.compute_dtype} by fp16.enabled and bf16.enabled. Set these, and drop it."
            )

    @property
    def data_parallel_size(self) -> int:
        """Ranks that share the batch."""
        return self.world_size // self.model_parallel_size

    @property
    def compute_dtype(self) -> str:
        """The dtype of parameters and activations: "fp32", "fp16" or "bf16"."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    @property
    def cast_to(self) -> torch.dtype | None:
        """What the model's parameters are cast to; None: under fp32 they keep their own dtypes."""
        return None if self.compute_dtype == "fp32" else self.precision.dtype

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """What the model's floating-point buffers are cast to; None: they keep their own dtypes."""
        name = self.data_types.buffer_dtype
        return None if name is None else DTYPES[name]

    @property
    def idle(self) -> set[str]:
        """The paths of the given keys that have no effect, by themselves or beside the others."""
        zero, section = self.zero, self.zero_optimization
        idle = {path for path, f in every_key(type(self)) if f.metadata["effect"] == NO_EFFECT}
        idle |= {path for path, field in ZERO_FIELDS.items() if field in zero.idle}
        if not zero.sharding.parameters:
            idle.add(f"{ZERO}.stage3_gather_16bit_weights_on_model_save")
        for name in ("offload_optimizer", "offload_param"):  # one field of ZeroConfig stands for these keys of both
            home = getattr(zero, name)
            idle |= {f"{ZERO}.{name}.nvme_path"} if home != "nvme" else set()
            idle |= {f"{ZERO}.{name}.pin_memory"} if home == "none" and zero.placement == "static" else set()
        if section.has_idle_offload_param:
            idle |= {path for path in self.given if path.startswith(f"{ZERO}.offload_param.")}
        return idle & self.given

    @property
    def of_all_ranks(self) -> dict[str, Any]:
        """By path, the values that ranks must have in common to train together."""
        effects = {path: f.metadata["effect"] for path, f in every_key(type(self)) if path not in _MAY_DIFFER}
        return {
            path: self.at(path) if effect == OBEYED or (effect == IF_GIVEN and path in self.given) else None
            for path, effect in effects.items()
        }

    def at(self, path: str) -> Any:
        """The value of the key at `path`; None if a section that would contain it is absent."""
        at: Any = self
        for name in path.split("."):
            if at is None:
                return None
            at = at[name] if isinstance(at, Mapping) else getattr(at, name.removeprefix("stage3_"))  # see `key`
        return at

    @cached_property
    def zero(self) -> ZeroConfig:
        """The ZeRO settings for the engine.

        Raises:
            DeepSpeedConfigError: settings contradict each other, or do not fit the number of ranks.
        """
        section = self.zero_optimization
        optimizer = section.offload_optimizer or OffloadOptimizerSection()
        param = (None if section.has_idle_offload_param else section.offload_param) or OffloadParamSection()
        pinned = {  # as given for either home; the default is for both
            home.pin_memory
            for name, home in (("offload_optimizer", optimizer), ("offload_param", param))
            if (home.device != "none" or section.placement == "auto") and f"{ZERO}.{name}.pin_memory" in self.given
        }
        if len(pinned) > 1:
            raise DeepSpeedConfigError(
                "zero_optimization.offload_optimizer.pin_memory and offload_param.pin_memory differ, and one setting is for "
                "both. Give the same value."
            )
        paths = {offload.nvme_path for offload in (optimizer, param) if offload.device == "nvme"}
        if len(paths) > 1:
            raise DeepSpeedConfigError(
                f"zero_optimization.offload_optimizer.nvme_path and offload_param.nvme_path differ ({optimizer.nvme_path!r}, "
                f"{param.nvme_path!r}): a rank swaps to one file. Give the same directory."
            )
        as_zero_has_it = {
            "shard_size": max(0, section.mics_shard_size),
            "reduce_dtype": self._dtype("communication_data_type") or "same",
            "grad_dtype": self._dtype("data_types.grad_accum_dtype") or "fp32",
            "offload_param": param.device,
            "offload_optimizer_ratio": 1.0 if optimizer.device == "none" else optimizer.ratio,
            "nvme_path": next(iter(paths), None),
            "pin_memory": next(iter(pinned), ZeroConfig.pin_memory),
            "aio": self.aio.settings,
            "gather_limits": GatherLimits(**self._given(_LIMITS)),
        }
        with errors_of(ZERO):
            zero = ZeroConfig(**{**self._given(ZERO_FIELDS), **as_zero_has_it})
            zero.num_shards(self.data_parallel_size)
        return zero

    def _given(self, fields: Mapping[str, str]) -> dict[str, Any]:
        """{field: value} of the keys in `fields`, {key: field}, that were given."""
        return {field: self.at(key) for key, field in fields.items() if key in self.given}

    @property
    def precision(self) -> PrecisionConfig:
        """The dtype of the parameters and the loss scale.

        Raises:
            DeepSpeedConfigError: the dynamic loss scale would begin below its least value.
        """
        if not self.fp16.enabled:
            return PrecisionConfig(bf16=self.bf16.enabled)
        section = self.fp16
        if section.loss_scale:
            return PrecisionConfig(fp16=True, loss_scale=section.loss_scale)
        with errors_of("fp16"):
            dynamic = {field: getattr(section, key) for key, field in DYNAMIC_SCALE_FIELDS.items()}
            return PrecisionConfig(fp16=True, initial_loss_scale=2.0**section.initial_scale_power, **dynamic)

    def describe(self) -> str:
        """The effective configuration, one line per section, and which of the given keys have no effect."""
        lines = [
            f"batch: train_batch_size {self.train_batch_size} = train_micro_batch_size_per_gpu "
            f"{self.train_micro_batch_size_per_gpu} x gradient_accumulation_steps {self.gradient_accumulation_steps} x "
            f"data-parallel size {self.data_parallel_size}"
        ]
        lines += describe(self, self.given)
        if idle := sorted(self.idle):
            lines.append(f"given, but {NO_EFFECT}: {', '.join(idle)}")
        return "\n".join(lines)

    def _dtype(self, path: str) -> str | None:
        """ZeroConfig's name for a dtype of the JSON: fp32, or compute."""
        dtype = self.at(path)
        if dtype in (None, "fp32"):
            return dtype
        if dtype != self.compute_dtype:
            raise DeepSpeedConfigError(
                f'{path} "{dtype}" is neither "fp32" nor the dtype of the parameters, which is {self.compute_dtype}. Use one of '
                f"these, or enable {dtype}."
            )
        return "compute"
