"""How `initialize` uses the optimizer and parameter groups of the caller, or those of the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megazero.json_config import DeepSpeedConfigError, JsonConfig
from megazero.logging import ALIKE, get_logger
from megazero.optim.optimizers import OptimizerFactory, muon_groups, optimizer_by_name
from megazero.zero.optimizer import refuse_untested
from megazero.zero.param_groups import hidden_matrices, warn_of_left_out

logger = get_logger(__name__)

# These choose how torch runs an optimizer, not what it computes; the optimizer that is made decides them.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


def client_optimizer(
    config: JsonConfig, optimizer: Any, model_parameters: Iterable[Any] | None, model: nn.Module
) -> tuple[OptimizerFactory | None, list[dict[str, Any]]]:
    """A factory for the torch optimizer, and its parameter groups; (None, []) if neither caller nor file has an optimizer.

    Raises:
        DeepSpeedConfigError: the optimizer cannot work on flat ranges, holds others or has made steps, or `model_parameters` is
            invalid.
    """
    if optimizer is None and config.optimizer is None:
        return None, []
    parameters = _listed(model.parameters() if model_parameters is None else model_parameters)
    groups = _groups_of(parameters)
    if optimizer is None:
        assert config.optimizer is not None, "else there is none at all"
        if not parameters:
            raise DeepSpeedConfigError(
                "model_parameters is empty. A generator (model.parameters(), filter(...)) can be read once only: give a list, or "
                "leave model_parameters out to train the whole model."
            )
        factory = optimizer_by_name(config.optimizer.type, config.optimizer.params)
        if config.optimizer.type.lower() == "muon":
            names = hidden_matrices(model)
            matrices = {parameter for name, parameter in model.named_parameters() if name in names}
            groups = muon_groups(groups, matrices, config.optimizer.params)
        return factory, [{key: value for key, value in g.items() if key not in _IMPLEMENTATION} for g in groups]
    if config.optimizer is not None:
        logger.warning(
            "the optimizer given to initialize is used, not the configuration's %s", config.optimizer.type, extra=ALIKE
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        return _adopted(optimizer, config)
    return optimizer, groups


def _groups_of(parameters: list[Any]) -> list[dict[str, Any]]:
    if not any(isinstance(entry, dict) for entry in parameters):
        return [{"params": _unnamed(parameters)}]
    if not all(isinstance(entry, dict) for entry in parameters):
        raise DeepSpeedConfigError("model_parameters mixes parameter groups and parameters. Give one or the other.")
    return [{**group, "params": _unnamed(group.get("params"))} for group in parameters]


def _adopted(optimizer: torch.optim.Optimizer, config: JsonConfig) -> tuple[OptimizerFactory, list[dict[str, Any]]]:
    """A factory that gives the caller's own optimizer the flat slices, so that its schedulers keep working; and its groups."""
    name = type(optimizer).__name__
    if not config.zero_allow_untested_optimizer:
        try:
            refuse_untested(optimizer)
        except ValueError as error:
            raise DeepSpeedConfigError(str(error)) from None
    shared = {id(group) for group in optimizer.param_groups}
    for inner in _optimizers_in(optimizer):
        if inner.state is not optimizer.state or not shared.issuperset(id(group) for group in inner.param_groups):
            raise DeepSpeedConfigError(
                f"{name} holds another optimizer, {type(inner).__name__}, with param_groups or state of its own. The engine "
                f"knows only those of {name}: the other would step nothing, or its state would be in no checkpoint. Use one "
                "optimizer with a parameter group for each part of the model, or let both have the same param_groups and state."
            )
    states = [state for state in optimizer.state.values() if state]  # to look one up makes an empty one
    if any(float(state.get("step", 1)) > 0 for state in states):
        raise DeepSpeedConfigError(
            f"{name} has made steps already, and its state cannot be taken over. Pass a new one."
        )
    groups = [dict(group) for group in optimizer.param_groups]
    if states:  # Adagrad makes its state in its constructor, so construct it on the slices
        defaults = {key: value for key, value in optimizer.defaults.items() if key not in _IMPLEMENTATION}
        return lambda new: type(optimizer)(new, **defaults), groups

    def adopt(slices: Iterable[Any]) -> torch.optim.Optimizer:
        optimizer.state.clear()  # of empty ones
        for mine, new in zip(optimizer.param_groups, slices, strict=True):
            mine["params"] = new["params"]
        return optimizer

    return adopt, groups


def _optimizers_in(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """The optimizers among its attributes, and in the lists and dicts among them."""
    for value in vars(optimizer).values():
        members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        yield from (member for member in members if isinstance(member, torch.optim.Optimizer))


def check_evaluation(config: JsonConfig, lr_scheduler: Any) -> None:
    """For an engine without an optimizer: refuses settings that need training, and logs those that have no effect.

    Raises:
        DeepSpeedConfigError: a schedule was given, the ZeRO stage shards only training states, or the placement is "auto".
    """
    remedy = 'Give optimizer= to initialize, or an "optimizer" section'
    zero = config.zero_optimization
    if lr_scheduler is not None:
        raise DeepSpeedConfigError(f"There is an lr_scheduler, but no optimizer that it could drive. {remedy}.")
    if zero.stage in (1, 2):
        raise DeepSpeedConfigError(
            f"zero_optimization.stage {zero.stage} needs an optimizer: it shards nothing else but gradients. {remedy}; to "
            "evaluate only, use stage 3, which shards the parameters, or 0."
        )
    if zero.placement == "auto":
        raise DeepSpeedConfigError(
            f'zero_optimization.placement "auto" needs an optimizer: it plans from a training step. {remedy}; to evaluate only, '
            "drop it."
        )
    in_vain = "; the configuration's scheduler has no effect" if config.scheduler is not None else ""
    logger.info("there is no optimizer: the engine is for evaluation%s", in_vain, extra=ALIKE)


def _unnamed(parameters: Any) -> list[Any]:
    """A list of parameters, from one tensor or from what torch's optimizers take: parameters, or (name, parameter) pairs.

    Raises:
        DeepSpeedConfigError: it is none of these.
    """
    found = [entry[1] if isinstance(entry, tuple) else entry for entry in _listed(parameters)]
    for each in found:
        if not isinstance(each, torch.Tensor):
            raise DeepSpeedConfigError(
                f"Among the parameters to train is {type(each).__name__}. Give parameters, as model.parameters() has them, or "
                'parameter groups, as {"params": [...], "lr": 1e-3}.'
            )
    return found


def _listed(given: Any) -> list[Any]:
    """What was given one by one, as a list. A tensor is one: its rows are no parameters."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, torch.Tensor) else [given]


@contextmanager
def given_back(optimizer: Any) -> Iterator[None]:
    """If the block raises, gives the caller's own optimizer its parameters back in place of the flat slices."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    before = [group["params"] for group in groups]
    try:
        yield
    except BaseException:
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters
        raise


def named_groups(groups: list[dict[str, Any]], model: nn.Module) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """The group index of each parameter by name, and the groups' settings. Having no groups, and training nothing, is valid.

    Raises:
        DeepSpeedConfigError: a group holds a tensor that is not a parameter of the model, or two groups hold the same one.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    group_of = {}
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise DeepSpeedConfigError(
                    f"Parameter group {index} holds a tensor of shape {tuple(parameter.shape)} that is not a parameter of the "
                    "model. Give initialize the model whose parameters are to be trained."
                )
            if names[id(parameter)] in group_of:
                raise DeepSpeedConfigError(
                    f"Parameter {names[id(parameter)]!r} is in two parameter groups. Keep it in one."
                )
            group_of[names[id(parameter)]] = index
    if groups:
        warn_of_left_out(model, group_of)
    return group_of, [{key: value for key, value in group.items() if key != "params"} for group in groups]
