"""Rewrites old forms of the JSON to current ones, and refuses DeepSpeed's subsystems that do not exist here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megazero.json_config.schema import AUTO, join, show
from megazero.json_source import DeepSpeedConfigError

_MONITOR = (
    "the engine writes no metrics; log the loss, engine.get_lr() and engine.get_global_grad_norm() in the script. The GPT-2 job "
    "writes DIR/metrics.jsonl and TensorBoard under --save DIR or --tensorboard-dir, and to --wandb-project"
)
_DATA = (
    "there is no curriculum; give a loader that orders the data. The GPT-2 job's are shuffled samples of equal length"
)
DISABLED_ONLY = {
    "amp": "apex amp is not used; use fp16 or bf16",
    "autotuning": "there is no tuner",
    "comet": _MONITOR,
    "comms_logger": "collectives are not logged one by one",
    "compile": "use --compile, or torch.compile on the model",
    "compression_training": "nothing is compressed",
    "csv_monitor": _MONITOR,
    "curriculum_learning": _DATA,
    "data_efficiency": _DATA,
    "datastates": "checkpoints are written by their own store",
    "eigenvalue": "it belongs to quantization, which is not built",
    "elasticity": "batch sizes are fixed; a checkpoint loads under any number of ranks",
    "expert_parallel": "mixtures of experts are not built",
    "flops_profiler": "torch.utils.flop_counter.FlopCounterMode counts a step's; the GPT-2 job logs TFLOP/s and MFU",
    "hybrid_engine": "inference is not part of training",
    "nebula": "checkpoints are written by their own store",
    "pipeline": "pipeline parallelism is not built",
    "progressive_layer_drop": "no layer is dropped",
    "quantize_training": "quantization is not built",
    "sparse_attention": "attention is dense",
    "tensor_parallel": "tensor parallelism is --model-parallel-size, or an mpu given to initialize",
    "tensorboard": _MONITOR,
    "timers": "use wall_clock_breakdown",
    "torch_autocast": "parameters have one dtype; use fp16 or bf16",
    "wandb": _MONITOR,
    "weight_quantization": "quantization is not built",
}


def without_disabled(document: Mapping[str, Any]) -> dict[str, Any]:
    """`document` without the sections of subsystems that do not exist here.

    Raises:
        DeepSpeedConfigError: one of them is not disabled.
    """
    for name, reason in DISABLED_ONLY.items():
        if _asks(document.get(name)):
            raise DeepSpeedConfigError(
                f'{name} asks for something that does not exist here: {reason}. Drop the section, or set "enabled": false in it.'
            )
    return {name: value for name, value in document.items() if name not in DISABLED_ONLY}


def _asks(value: Any) -> bool:
    """Whether a section asks for something: it is not disabled, as by "auto", and has a value that does."""
    if isinstance(value, Mapping):
        return value.get("enabled") not in (False, AUTO) and any(map(_asks, value.values()))
    return bool(value)


def modernised(document: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """`document` with old forms rewritten; a sentence about each is added to `warnings`.

    Raises:
        DeepSpeedConfigError: an old form and its replacement are given together.
    """
    document = dict(document)
    if document.get("steps_per_print") == math.inf:  # as Hugging Face's Accelerate writes it
        document["steps_per_print"] = None
    _replace_bool(document, "fp32_allreduce", "communication_data_type", "fp32", "", warnings)
    zero = document.get("zero_optimization")
    if isinstance(zero, bool):
        warnings.append(f"zero_optimization {show(zero)} is an old form, read as stage {int(zero)}.")
        document["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        document["zero_optimization"] = _modern_zero(dict(zero), warnings)
    optimizer = document.get("optimizer")
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("params", {}), Mapping):
        clipping = show(document["gradient_clipping"]) if "gradient_clipping" in document else "its default"
        document["optimizer"] = _modern_optimizer(dict(optimizer), clipping, warnings)
    return document


def _modern_optimizer(optimizer: dict[str, Any], clipping: str, warnings: list[str]) -> dict[str, Any]:
    params = dict(optimizer.get("params", {}))
    if "adam_w_mode" in optimizer:
        if "adam_w_mode" in params:
            raise DeepSpeedConfigError(
                "optimizer.adam_w_mode and optimizer.params.adam_w_mode are given together. Keep the latter."
            )
        params["adam_w_mode"] = optimizer.pop("adam_w_mode")
        warnings.append("optimizer.adam_w_mode is read as optimizer.params.adam_w_mode.")
    if "max_grad_norm" in params:
        warnings.append(
            f"optimizer.params.max_grad_norm {show(params.pop('max_grad_norm'))} is dropped: gradients are clipped as "
            f"gradient_clipping says ({clipping})."
        )
    return {**optimizer, "params": params}


def _modern_zero(zero: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    path = "zero_optimization"
    pin = _taken_bool(zero, "cpu_offload_use_pin_memory", path)
    offload: dict[str, Any] = {"device": "cpu"}
    if pin is not None:
        both = [name for name in ("offload_param", "offload_optimizer") if name in zero]
        if both:
            raise DeepSpeedConfigError(
                f"{path}.cpu_offload_use_pin_memory and {path}.{both[0]}, which replaces it, are given together. Use "
                f"{both[0]}.pin_memory."
            )
        warnings.append(f"{path}.cpu_offload_use_pin_memory is an old form, read as pin_memory of offload_*.")
        offload["pin_memory"] = pin
    _replace_bool(zero, "cpu_offload", "offload_optimizer", offload, path, warnings)
    for spelling in ("cpu_offload_param", "cpu_offload_params"):
        _replace_bool(zero, spelling, "offload_param", offload, path, warnings)
    _replace_bool(zero, "find_unused_parameters", "ignore_unused_parameters", False, path, warnings)
    return zero


def _replace_bool(section: dict[str, Any], old: str, new: str, value: Any, path: str, warnings: list[str]) -> None:
    """Rewrites the key `old`: true becomes `new` with `value`; false and "auto" set nothing."""
    asked = _taken_bool(section, old, path)
    if asked is None:
        return
    if new in section:
        raise DeepSpeedConfigError(
            f"{join(path, old)} and {join(path, new)}, which replaces it, are given together. Keep {join(path, new)}."
        )
    warnings.append(f"{join(path, old)} is an old form, read as {join(path, new)}.")
    if asked:
        section[new] = dict(value) if isinstance(value, dict) else value


def _taken_bool(section: dict[str, Any], old: str, path: str) -> bool | None:
    """The value of the key `old`, which leaves the section at `path`; None if it is not there, or "auto"."""
    asked = section.pop(old, AUTO)
    if asked != AUTO and not isinstance(asked, bool):
        raise DeepSpeedConfigError(f"{join(path, old)} must be true or false, got {show(asked)}.")
    return None if asked == AUTO else asked
