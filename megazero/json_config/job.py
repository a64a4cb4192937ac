"""Translates a JSON file in DeepSpeed's keys to values of the GPT-2 job's own flags, which override it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from megazero.json_config import DeepSpeedConfigError, JsonConfig, load_json_config
from megazero.json_config.config import ZERO, ZERO_FIELDS
from megazero.json_config.job_flags import BATCH_KEYS, PEAK_LR, STEPS_KEY, WARMUP_FIELDS, Flags
from megazero.json_config.schema import ALWAYS, every_key
from megazero.json_config.sections import CHECKPOINTING, CHECKPOINTING_FIELDS, DYNAMIC_SCALE_FIELDS, OptimizerSection
from megazero.mpu.groups import check_model_parallel_size
from megazero.optim.lr_schedule import LRScheduleConfig

logger = logging.getLogger(__name__)

ADAM_FIELDS = {"lr": "lr", "eps": "adam_eps", "weight_decay": "weight_decay"}
# Adam's other accepted parameters: how torch runs it, or what is always so (false is refused).
ADAM_ALWAYS = {"adam_w_mode", "torch_adam", "bias_correction", "fp32_optimizer_states", "fused", "foreach"}


def values_of_file(path: str, given: Mapping[str, Any], components: Sequence[type], world_size: int) -> dict[str, Any]:
    """The values that the file sets, by field name of `components`; fields that it does not set are absent.

    Logs each flag that overrides the file, with the key, and the keys that have no effect in this job.

    Args:
        given: the flags that were given, by field name.

    Raises:
        DeepSpeedConfigError: the file is wrong, cannot be obeyed here, or its batch sizes do not fit the flags.
        ValueError: the world does not divide by --model-parallel-size.
    """
    flags = Flags(path, given, components, world_size)
    model_parallel_size = flags.value("model_parallel_size")
    check_model_parallel_size(world_size, model_parallel_size)
    try:
        config = load_json_config(
            path,
            world_size=world_size,
            model_parallel_size=model_parallel_size,
            auto=_auto(flags),
            adapt=flags.write_into,
        )
        said = _said(config)
    except DeepSpeedConfigError as error:
        said_of_file = str(error).removeprefix(path).lstrip(":, ")  # what cannot be parsed is named already
        raise DeepSpeedConfigError(f"{flags.source}: {said_of_file}") from error
    for key, field, value in said:
        flags.note(field, key, value, config.at(key))
    _log_idle(config, {key for key, _, _ in said}, flags)
    sets_global_batch = not config.given.isdisjoint({BATCH_KEYS["global_batch_size"], STEPS_KEY})
    return {
        **{field: value for _, field, value in said},
        "batch_size": config.train_micro_batch_size_per_gpu,
        "global_batch_size": config.train_batch_size if sets_global_batch else None,
        "scheduler": None if flags.describe_schedule else config.scheduler,
    }


def _auto(flags: Flags) -> dict[str, Any]:
    """The meaning of "auto" for keys where it is not the same as leaving the key out."""
    iterations = flags.value("train_iters")
    schedule = LRScheduleConfig(**{field: flags.value(field) for field in WARMUP_FIELDS})
    return {
        "gradient_clipping": flags.value("clip_grad"),
        "steps_per_print": flags.value("log_interval"),
        "optimizer.params.betas": [flags.value("adam_beta1"), flags.value("adam_beta2")],
        **{f"optimizer.params.{key}": flags.value(field) for key, field in ADAM_FIELDS.items()},
        "scheduler.params.warmup_min_lr": 0.0,
        **{f"scheduler.params.{key}": flags.value("lr") for key in PEAK_LR.values()},
        "scheduler.params.warmup_num_steps": max(1, int(schedule.warmup_iters(iterations))),
        "scheduler.params.total_num_steps": iterations,
    }


def _said(config: JsonConfig) -> list[tuple[str, str, Any]]:
    """(key, field, value) for what the file gives, except batch sizes and schedule."""
    if config.gradient_allreduce_op == "sum":
        raise DeepSpeedConfigError('gradient_allreduce_op "sum": the GPT-2 job averages over the ranks. Drop it.')
    if config.scheduler is not None and config.scheduler.type == "ReduceLROnPlateau":
        raise DeepSpeedConfigError(
            "scheduler: ReduceLROnPlateau follows a metric, and the GPT-2 job gives it none. Use another schedule."
        )
    zero, fp16, kept = config.zero, config.fp16, config.activation_checkpointing
    every = [
        ("steps_per_print", "log_interval", config.steps_per_print),
        ("gradient_clipping", "clip_grad", config.gradient_clipping),
        ("bf16.enabled", "bf16", config.bf16.enabled),
        ("fp16.enabled", "fp16", fp16.enabled),
        *((key, field, getattr(zero, field)) for key, field in ZERO_FIELDS.items()),
        *((f"{CHECKPOINTING}.{key}", field, getattr(kept, key)) for key, field in CHECKPOINTING_FIELDS.items()),
    ]
    for name in ("offload_optimizer", "offload_param"):
        if getattr(zero, name) != "none":
            every += [(f"{ZERO}.{name}.{key}", key, getattr(zero, key)) for key in ("nvme_path", "pin_memory")]
    if fp16.enabled:
        every += [
            ("fp16.loss_scale", "loss_scale", fp16.loss_scale),
            ("fp16.initial_scale_power", "initial_loss_scale", 2.0**fp16.initial_scale_power),
            *((f"fp16.{key}", field, getattr(fp16, key)) for key, field in DYNAMIC_SCALE_FIELDS.items()),
        ]
    said = [entry for entry in every if entry[0] in config.given and entry[2] is not None]
    return said + (_said_of_adam(config.optimizer) if config.optimizer else [])


def _said_of_adam(section: OptimizerSection) -> list[tuple[str, str, Any]]:
    params, where = dict(section.params), "optimizer.params"
    if section.type.lower() not in ("adam", "adamw") or params.get("adam_w_mode") is False:
        kind = section.type + (" with adam_w_mode false" if "adam_w_mode" in params else "")
        raise DeepSpeedConfigError(
            f'optimizer {kind}: the GPT-2 job trains with AdamW ("Adam" or "AdamW" in the file), and with Muon by --optimizer '
            "muon. Other optimizers are for scripts of your own, by pretrain(make_optimizer=) or megazero.initialize."
        )
    unknown = sorted(params.keys() - ADAM_FIELDS.keys() - ADAM_ALWAYS - {"betas"})
    if unknown:
        raise DeepSpeedConfigError(f"{where}.{unknown[0]}: the GPT-2 job's AdamW has no such setting. Drop it.")
    said: list[tuple[str, str, Any]] = [("optimizer.type", "optimizer", "adamw")]
    said += [(f"{where}.{key}", field, float(params[key])) for key, field in ADAM_FIELDS.items() if key in params]
    betas = zip(("adam_beta1", "adam_beta2"), params.get("betas", ()), strict=False)
    return said + [(f"{where}.betas", field, float(value)) for field, value in betas]


def _log_idle(config: JsonConfig, used: set[str], flags: Flags) -> None:
    """Logs the file's keys that have no effect in this job."""
    used = used | {*BATCH_KEYS.values(), STEPS_KEY}
    unused = ((config.given - used) | config.idle) - flags.written.keys()
    elsewhere = ("fp16.", "optimizer.", "scheduler.")  # obeyed or refused as a whole
    idle = [
        key
        for key, field in every_key(JsonConfig)
        if key in unused and field.metadata["effect"] != ALWAYS and not key.startswith(elsewhere)
    ]
    if idle:
        logger.info("of %s these change nothing here: %s", flags.path, ", ".join(sorted(idle)))
