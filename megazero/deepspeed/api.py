"""`megazero.initialize`: makes an engine, an optimizer, a data loader and a schedule from a model and a JSON configuration."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from megazero import comm
from megazero.deepspeed.engine import DeepSpeedEngine
from megazero.deepspeed.mpu import declare_cuts, parallel_groups
from megazero.deepspeed.optimizer import check_evaluation, client_optimizer, given_back, named_groups
from megazero.json_config import DeepSpeedConfigError, JsonConfig, load_json_config
from megazero.logging import ALIKE, get_logger, setup_logging
from megazero.mpu.groups import ParallelGroups
from megazero.optim.optimizers import OptimizerFactory
from megazero.zero.init import suspended
from megazero.zero.optimizer import BucketOptimizer
from megazero.zero.parameter import ReleasedParameter
from megazero.zero.unfit import refuse_other_models, refuse_unfit
from megazero.zero.units import select_units, target_dtype

logger = get_logger(__name__)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed and --deepspeed_config (and their oldest spellings) to a script's parser, and returns it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed-shaped configuration")
    group.add_argument(
        "--deepspeed", action="store_true", help="train with the engine that --deepspeed_config describes"
    )
    group.add_argument("--deepspeed_config", type=str, default=None, metavar="FILE", help="JSON configuration")
    for flag in ("--deepspeed_mpi", "--deepscale"):
        group.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser


@torch.inference_mode(False)  # within which the caller may evaluate
@suspended()  # a zero.Init around it does not shard what the callables among the arguments construct
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Any = None,
    config_params: Any = None,
    distributed_port: int = 29500,
    mesh_param: Any = None,
    zero_units: Any = None,
) -> tuple[DeepSpeedEngine, BucketOptimizer | None, DataLoader[Any] | None, Any]:
    """Wraps a model for training: engine, optimizer, data loader and learning-rate schedule, or None for any that is absent.

    Without an optimizer the engine is for evaluation, at ZeRO stage 3 or 0, and holds neither gradients nor optimizer states.

    Args:
        args: a namespace whose `deepspeed_config` names the configuration, instead of `config`; its `local_rank` is checked.
        model: the model. Every rank starts from the weights and buffers of the first data-parallel rank. It may be built under
            `zero.Init`.
        optimizer: a torch optimizer over the model's parameters, or a callable that makes one; overrides the configuration's.
        model_parameters: parameters or parameter groups for the configuration's optimizer (default: all of the model's).
        training_data: a dataset to make a loader for.
        lr_scheduler: an object with step(), or a callable that makes one from the optimizer; overrides the configuration's.
        mpu: an object whose `get_{model,data}_parallel_group()` say which ranks share a layer and which share the data. Split
            parameters are those of `megazero.mpu`'s layers, and those that are marked the way Megatron-LM marks its own.
        config, config_params: a dict, a path, or URL-safe base64 of JSON.
        zero_units: modules or classes that are gathered and released together, see `Engine`.

    Raises:
        DeepSpeedConfigError: the arguments or the configuration are wrong; this is a ValueError and an AssertionError.
        ValueError: ranks have different configurations or models, or a model cannot be trained as torch would; see `Engine`.
        OtherRankError: another rank has raised one of these errors.
    """
    if not isinstance(model, nn.Module):
        raise DeepSpeedConfigError(f"megazero.initialize needs a model (an nn.Module), got {type(model).__name__}.")
    if mesh_param is not None:
        raise DeepSpeedConfigError(
            "mesh_param asks for sequence parallelism by mesh, which does not exist here. Drop it."
        )
    is_optimizer, is_schedule = isinstance(optimizer, torch.optim.Optimizer), hasattr(lr_scheduler, "step")
    for name, given, is_one in (("optimizer", optimizer, is_optimizer), ("lr_scheduler", lr_scheduler, is_schedule)):
        if given is not None and not is_one and not callable(given):
            raise DeepSpeedConfigError(
                f"{name} must be one as torch has them, or a callable that makes one; got {type(given).__name__}. By name it is "
                "chosen in the configuration."
            )
    _check_training_data(training_data)
    source = _config_source(args, config, config_params)
    groups = _join(args, mpu, distributed_port, dist_init_required)
    # What one rank alone refuses must reach all of them: they would wait for it in the next collective.
    told = comm.together(
        partial(
            load_json_config,
            source,
            world_size=torch.distributed.get_world_size(),
            model_parallel_size=groups.model_parallel_size,
        )
    )
    comm.refuse_differences(told.of_all_ranks, "Give initialize the same configuration on every rank.")
    factory, *grouped = comm.together(
        partial(_trained, told, model, groups, optimizer, model_parameters, lr_scheduler, zero_units)
    )
    tensors = (*model.named_parameters(), *model.named_buffers())
    refuse_other_models(tensors, grouped[0], groups.data)  # here too, before the first rank's values are copied to all
    comm.together(partial(_move, model, comm.local_device(), told.buffer_dtype))
    _as_on_first_rank(model, groups)
    declare_cuts(model, groups)
    logger.info("%s", told.describe(), extra=ALIKE)
    with given_back(optimizer):
        engine = DeepSpeedEngine(
            told,
            model,
            groups,
            factory,
            *grouped,
            lr_scheduler=lr_scheduler,
            collate_fn=collate_fn,
            zero_units=zero_units,
        )
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _trained(
    told: JsonConfig,
    model: nn.Module,
    groups: ParallelGroups,
    optimizer: Any,
    model_parameters: Any,
    lr_scheduler: Any,
    zero_units: Any,
) -> tuple[OptimizerFactory | None, dict[str, int], list[dict[str, Any]]]:
    """The first arguments of `Engine` after the groups, if this rank finds nothing in its own that cannot be trained."""
    _ = told.precision  # checks it
    factory, param_groups = client_optimizer(told, optimizer, model_parameters, model)
    if factory is None:
        check_evaluation(told, lr_scheduler)
    group_of, group_settings = named_groups(param_groups, model)
    # Here too, before the first rank's values are copied to all, and a move to a GPU gives what shares memory its own.
    refuse_unfit(model, select_units(model, zero_units), groups, group_of, len(group_settings), told.zero)
    _check_values(model, told)
    return factory, group_of, group_settings


def _check_training_data(data: Any) -> None:
    has_samples = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if data is not None and not has_samples and not isinstance(data, IterableDataset):
        raise DeepSpeedConfigError(
            f"training_data must be a dataset, with len(data) and data[i], or an IterableDataset; got {type(data).__name__}. "
            "A loader of your own is not given to initialize: iterate over it."
        )


def _join(args: Any, mpu: Any, distributed_port: int, dist_init_required: bool | None) -> ParallelGroups:
    """Joins the world unless this process is already in one, shows the log if the script does not, and returns the groups."""
    comm.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    if not torch.distributed.is_initialized():
        raise DeepSpeedConfigError(
            "dist_init_required=False says that the script has joined torch.distributed, and it has not. Call "
            "megazero.init_distributed() before, or leave dist_init_required out."
        )
    if not logger.hasHandlers():  # the script shows no log of its own
        setup_logging(torch.distributed.get_rank())
    _check_local_rank(args)
    return parallel_groups(mpu)


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    if config is not None and config_params is not None and config != config_params:
        raise DeepSpeedConfigError(
            "The configuration is given twice, and differs: config= and config_params=, its old name. Use one of them."
        )
    config = config_params if config is None else config
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is None and getattr(args, "deepscale_config", None) is not None:
        logger.warning("--deepscale_config is an old spelling of --deepspeed_config", extra=ALIKE)
        from_args = args.deepscale_config
    if from_args is not None and config is not None:
        raise DeepSpeedConfigError(
            f"The configuration is given twice: args.deepspeed_config={from_args!r} and config=. Use one of them."
        )
    if from_args is None and config is None:
        raise DeepSpeedConfigError(
            "megazero.initialize requires --deepspeed_config FILE in args, or config= (a dict or a path); neither is given."
        )
    return from_args if config is None else config


def _check_local_rank(args: Any) -> None:
    given = getattr(args, "local_rank", None)
    found = comm.get_local_rank()
    if given is not None and 0 <= int(given) != found:
        raise DeepSpeedConfigError(
            f"args.local_rank is {given} and LOCAL_RANK in the environment is {found}. The launcher sets both; do not set either."
        )


def _check_values(model: nn.Module, config: JsonConfig) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise DeepSpeedConfigError(
                f"Parameter {name!r} is on the meta device and has no values. Build the model on a device, or under zero.Init."
            )
        if (
            config.compute_dtype == "fp32"
            and parameter.dtype in (torch.float16, torch.bfloat16)
            and parameter.requires_grad
        ):
            wanted = "fp16" if parameter.dtype == torch.float16 else "bf16"
            raise DeepSpeedConfigError(
                f"Parameter {name!r} is {parameter.dtype}, but neither fp16 nor bf16 is enabled in the configuration. Add "
                f'"{wanted}": {{"enabled": true}}, or give an fp32 model: a new one, if an initialize that failed has cast it.'
            )


def _move(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Moves parameters to the device, and buffers to the device and dtype; the engine's buckets cast the parameters."""
    for parameter in model.parameters():
        if not isinstance(parameter, ReleasedParameter) and (parameter.device != device or 0 in parameter.stride()):
            parameter.data = _writable(parameter.data.to(device))
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            moved = _writable(buffer.to(device, target_dtype(buffer.dtype, dtype)))
            if moved is not buffer:  # setting it again would make a parameter of one that is an nn.Parameter
                setattr(module, name, moved)


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or if it is expanded or a conjugate, a copy with memory for every element, in which its values stand."""
    return (tensor.clone() if 0 in tensor.stride() else tensor).resolve_conj().resolve_neg()


def _as_on_first_rank(model: nn.Module, groups: ParallelGroups) -> None:
    """Copies the first data-parallel rank's parameters and buffers to all: scripts for DeepSpeed need not set a seed."""
    if groups.data_parallel_size == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, ReleasedParameter):  # zero.Init has done this already
            continue
        values = tensor.detach().contiguous()
        comm.broadcast_(values, groups.data)
        if not tensor.is_contiguous():
            tensor.detach().copy_(values)
