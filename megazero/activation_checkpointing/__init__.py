"""Activation checkpointing: keep a function's inputs instead of its activations, and run it again in the backward.

    checkpoint(function, *args, **kwargs)                what the function returns, with the same gradients, bit for bit
    configure(None, partition_activations=True, ...)     how the inputs are kept

The second run sees what the first one saw: random streams (CPU, device, and the tracker's), so that dropout drops the same
elements, and autocast. Afterwards the streams are back where they were. The inputs of a transformer block are the same on every
model-parallel rank, so keeping them whole on each would store them t times; partitioned, a block costs one more all-gather in
the backward (ZeRO, arXiv:1910.02054, sec. 6.1), which travels while the block behind it is run again.

The functions here serve the whole process, as Megatron-LM's and DeepSpeed's do: they use one `ActivationCheckpointer`, `default`.
A model that shall be checkpointed in a way of its own gets an `ActivationCheckpointer` of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megazero.activation_checkpointing.checkpointer import ActivationCheckpointer
from megazero.activation_checkpointing.options import CheckpointSettings, settings_from
from megazero.json_source import DeepSpeedConfigError
from megazero.mpu import random
from megazero.mpu.groups import model_group_of
from megazero.mpu.random import get_cuda_rng_tracker
from megazero.timers import Timers

__all__ = [
    "ActivationCheckpointer",
    "CheckpointSettings",
    "checkpoint",
    "configure",
    "default",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

# The checkpointer of the functions of this module.
default = ActivationCheckpointer()


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
    *,
    partition_activation: bool | None = None,
    checkpoint_nvme_path: str | None = None,
    timers: Timers | None = None,
) -> None:
    """How `checkpoint` keeps its inputs, from the next call on: the defaults, then the JSON's section, then the arguments given.

    Args:
        mpu_: whose `get_model_parallel_group()` names the ranks that inputs are cut over; None for `megazero.mpu`.
        deepspeed_config: whose `activation_checkpointing` section is read: a dict, a path, base64 of JSON.
        partition_activations, ...: the fields of `CheckpointSettings`; `partition_activation` is the tutorial's spelling.
        timers: where `profile` puts its times; by default `default.timers`.

    Raises:
        DeepSpeedConfigError: mpu_ is no mpu, or the section or a combination is wrong; it is a ValueError and an AssertionError.
    """
    given = {
        "partition_activations": partition_activation if partition_activations is None else partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
        "checkpoint_nvme_path": checkpoint_nvme_path,
    }
    if mpu_ is not None and not any(hasattr(mpu_, f"get_{kind}_parallel_group") for kind in ("model", "tensor_model")):
        raise DeepSpeedConfigError(
            f"checkpointing.configure(mpu_={mpu_!r}): it says which ranks inputs are cut over, by get_model_parallel_group(). "
            "Give Megatron-LM's mpu, megazero.mpu, or None."
        )
    default.settings = settings_from(deepspeed_config, given)
    default.mpu, default.timers, default.is_configured = mpu_, timers, True


def is_configured() -> bool:
    """Whether `configure` has been called in this process. `checkpoint` works without, by the defaults."""
    return default.is_configured


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, keeping only the arguments until the backward, which runs `function` again.

    Parameters that `function` uses get their gradients in the backward as ever. Without grad mode it is just the call.

    With partitioned, contiguous or offloaded activations floating-point tensors among the arguments are copied; partitioned, they
    must be the same on all model-parallel ranks, as the inputs of a transformer block are, because the pieces that are put
    together again come from different ranks. Attention masks are not: the last of several positional arguments, and arguments by
    keyword, where they need no gradient. (Masks are shared by all layers; a piece per layer would cost memory.) These and other
    dtypes are kept as they are.

    Args:
        function: gives the same result each time: tensors and anything else, in lists, tuples and dicts. Tensors that it leaves
            elsewhere, such as in an attribute, get no gradient.
        args, kwargs: tensors and anything else, in lists, tuples and dicts.

    Raises:
        ValueError: another object, among the arguments or returned, holds tensors whose gradients would be lost.
        RuntimeError: more calls than `num_checkpoints` are kept; or the function changes an argument in place that is kept as it
            is; or grad mode is off and an argument has a graph, whose gradient would be lost. In the backward: the function
            returns tensors of other shapes than before; or it is not run by `backward()` but by `torch.autograd.grad`, which
            cannot be given the parameters' gradients; or with create_graph; or an argument was changed in place since.
    """
    return default.checkpoint(function, *args, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `checkpoint`, by hooks on what autograd saves: also for `torch.autograd.grad`, and arguments of any kind.

    The function runs in grad mode, and again when the first of its saved tensors is needed, up to the last one. What is kept
    is kept in the same way, but not fetched ahead.
    """
    return default.non_reentrant_checkpoint(function, *args, **kwargs)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """As `megazero.mpu.model_parallel_cuda_manual_seed`, for the model-parallel rank of the mpu that `configure` was given.

    Raises:
        RuntimeError: it was given none, and `megazero.mpu`'s groups do not exist.
    """
    rank = None if default.mpu is None else model_group_of(default.mpu).rank()
    random.model_parallel_cuda_manual_seed(seed, rank)


def reset() -> None:
    """Gives up the contiguous storage: after a forward that no backward follows, such as an evaluation in grad mode."""
    default.reset()


def partition_activations_in_checkpoint(partition_activations: bool) -> None:
    """Whether `checkpoint` keeps its inputs cut over the model-parallel ranks, from the next call on."""
    default.settings = replace(default.settings, partition_activations=bool(partition_activations))


def set_num_layers(nlayers: int) -> None:
    """For how many calls contiguous storage has room, from the next call on: `configure`'s num_checkpoints."""
    default.settings = replace(default.settings, num_checkpoints=nlayers)
