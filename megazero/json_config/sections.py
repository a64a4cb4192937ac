"""The sections of the JSON configuration except `zero_optimization`: one dataclass each, with DeepSpeed's names and defaults."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

from megazero.json_config.schema import ALWAYS, NO_EFFECT, OBEYED, REFUSED, key
from megazero.json_source import DeepSpeedConfigError, errors_of
from megazero.nvme import AioConfig
from megazero.optim.loss_scaler import DTYPES
from megazero.optim.optimizers import optimizer_by_name
from megazero.optim.schedules import SCHEDULES, scheduler_by_name

_NVME = "for shards on NVMe"

CHECKPOINTING = "activation_checkpointing"  # the name of a section
# The field of CheckpointSettings that corresponds to each of its keys.
CHECKPOINTING_FIELDS = {
    "partition_activations": "partition_activations",
    "number_checkpoints": "num_checkpoints",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "profile": "profile",
    "synchronize_checkpoint_boundary": "synchronize",
}

# The field of PrecisionConfig that corresponds to each key of the dynamic loss scale.
DYNAMIC_SCALE_FIELDS = {
    "loss_scale_window": "loss_scale_window",
    "hysteresis": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "min_loss_scale": "min_scale",
}


@dataclass(frozen=True)
class Fp16Section:
    """Half precision with a loss scale."""

    enabled: bool = key(False, OBEYED, "parameters and activations are fp16")
    auto_cast: bool = key(False, OBEYED, "floating-point inputs of the engine are cast to fp16")
    loss_scale: float = key(0.0, OBEYED, "0: dynamic", at_least=0)
    initial_scale_power: int = key(16, OBEYED, "the dynamic scale starts at 2 to this power", at_least=0)
    loss_scale_window: int = key(1000, OBEYED, "clean steps after which the scale doubles")
    hysteresis: int = key(2, OBEYED, "the overflow that halves the scale: those before it are forgiven")
    consecutive_hysteresis: bool = key(False, OBEYED, "every clean step refills the hysteresis")
    min_loss_scale: float = key(1.0, OBEYED, "the scale never goes below")
    fp16_master_weights_and_grads: bool = key(False, REFUSED, "master weights are always fp32")

    def __post_init__(self) -> None:
        if self.initial_scale_power > 127:
            raise DeepSpeedConfigError(
                f"fp16.initial_scale_power {self.initial_scale_power} gives a scale beyond fp32. Use 127 or less; 16 is usual."
            )
        if not self.enabled or self.loss_scale:
            return  # the other keys are for the dynamic scale
        for name in ("loss_scale_window", "hysteresis", "min_loss_scale"):
            if getattr(self, name) <= 0:
                raise DeepSpeedConfigError(
                    f"fp16.{name} must be greater than 0 with the dynamic loss scale (fp16.loss_scale 0), got "
                    f"{getattr(self, name)}."
                )


@dataclass(frozen=True)
class Bf16Section:
    """bfloat16, which needs no loss scale."""

    enabled: bool = key(False, OBEYED, "parameters and activations are bf16")
    check_grad_overflow: bool = key(True, ALWAYS, "a step with inf or NaN gradients is always skipped")
    immediate_grad_update: bool = key(False, NO_EFFECT, "gradients are added up as soon as they are there")
    bf16_master_weights_and_grads: bool = key(False, REFUSED, "master weights are always fp32")
    bf16_optimizer_states: bool = key(False, REFUSED, "optimizer states are always fp32")


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer by name."""

    type: str = key(
        MISSING, OBEYED, "Adam (AdamW's arithmetic), AdamW, Muon, Adagrad, SGD, or another class of torch.optim"
    )
    params: dict[str, Any] = key({}, OBEYED, "lr, betas, eps, weight_decay, adam_w_mode, torch_adam, ...")
    legacy_fusion: bool = key(False, NO_EFFECT, "there is one implementation")

    def __post_init__(self) -> None:
        with errors_of("optimizer"):
            optimizer_by_name(self.type, self.params)


@dataclass(frozen=True)
class SchedulerSection:
    """The learning-rate schedule by name."""

    type: str = key(MISSING, OBEYED, f"{', '.join(SCHEDULES)}, or a class of torch.optim.lr_scheduler")
    params: dict[str, Any] = key({}, OBEYED, "those of the schedule, see below")

    def __post_init__(self) -> None:
        with errors_of("scheduler"):
            scheduler_by_name(self.type, self.params)


@dataclass(frozen=True)
class ActivationCheckpointingSection:
    """How activations are kept if the model checkpoints them."""

    partition_activations: bool = key(False, OBEYED, "each model-parallel rank keeps its part of every kept activation")
    number_checkpoints: int | None = key(
        None, OBEYED, "checkpointed calls that contiguous_memory_optimization has room for", at_least=1
    )
    contiguous_memory_optimization: bool = key(
        False, OBEYED, "what is kept lies in one storage; needs partition_activations"
    )
    cpu_checkpointing: bool = key(False, OBEYED, "what is kept rests in pinned host memory; beside a CUDA device")
    profile: bool = key(False, OBEYED, "times checkpointed calls in forward and backward")
    synchronize_checkpoint_boundary: bool = key(False, OBEYED, "waits for the device before and after each call")


@dataclass(frozen=True)
class AioSection:
    """Reading and writing shards on NVMe."""

    block_size: int = key(1048576, OBEYED, _NVME + ": bytes of one request", at_least=1)
    queue_depth: int = key(8, OBEYED, _NVME + ": requests in flight", at_least=1)
    intra_op_parallelism: int = key(1, OBEYED, _NVME + ": multiplies queue_depth", old=("thread_count",), at_least=1)
    single_submit: bool = key(False, NO_EFFECT, _NVME + ": every request is a call of its own")
    overlap_events: bool = key(True, OBEYED, _NVME + ": false makes one transfer at a time")
    use_gds: bool = key(False, REFUSED, "GPUDirect storage is not built")

    @property
    def settings(self) -> AioConfig:
        """The same for a swap file.

        Raises:
            DeepSpeedConfigError: `block_size` is not a number of whole pages.
        """
        try:
            return AioConfig(self.block_size, self.queue_depth, self.overlap_events, self.intra_op_parallelism)
        except ValueError as error:
            raise DeepSpeedConfigError(str(error)) from error


@dataclass(frozen=True)
class CheckpointSection:
    """Saving and loading."""

    tag_validation: str = key(
        "WARN", OBEYED, "when ranks save under different tags", choices=("WARN", "IGNORE", "FAIL")
    )
    load_universal: bool = key(
        False, NO_EFFECT, "every checkpoint loads under any number of ranks and stage; import DeepSpeed's"
    )
    use_node_local_storage: bool = key(False, REFUSED, "all nodes must see the directory of a checkpoint")
    parallel_write: dict[str, Any] | None = key(None, NO_EFFECT, "every rank always writes its own part")


@dataclass(frozen=True)
class DataTypesSection:
    """Dtypes that do not follow from fp16 and bf16."""

    grad_accum_dtype: str | None = key(
        None, OBEYED, "of accumulated gradients: fp32 (default) or the compute dtype", choices=tuple(DTYPES)
    )
    param_dtype: str | None = key(None, OBEYED, "null, or that which fp16 and bf16 say: a check", choices=tuple(DTYPES))
    buffer_dtype: str | None = key(
        None,
        OBEYED,
        "of floating-point buffers; null: each keeps its own, while BatchNorm needs the compute dtype",
        choices=tuple(DTYPES),
    )
    keep_in_fp32_modules: list[str] | None = key(
        None, REFUSED, "every buffer keeps its dtype, or buffer_dtype casts them all"
    )
