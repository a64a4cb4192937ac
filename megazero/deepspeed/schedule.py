"""How `initialize` uses the learning-rate schedule of the caller, or that of the configuration."""

from __future__ import annotations

from typing import Any

import torch

from megazero.json_config import DeepSpeedConfigError, JsonConfig
from megazero.logging import ALIKE, get_logger
from megazero.optim.schedules import scheduler_by_name
from megazero.zero.optimizer import BucketOptimizer

logger = get_logger(__name__)

# Keys that torch's schedules write into parameter groups when they are built.
_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")


def client_scheduler(config: JsonConfig, given: Any, optimizer: BucketOptimizer) -> Any:
    """The given schedule, made to drive the engine's optimizer; otherwise the configuration's, or None if there is none.

    Raises:
        DeepSpeedConfigError: the schedule drives an optimizer with a different number of parameter groups.
    """
    if given is None:
        if config.scheduler is None:
            return None
        own = [group["lr"] for group in optimizer.param_groups]
        schedule = scheduler_by_name(config.scheduler.type, config.scheduler.params)(optimizer.torch_optimizer)
        if (peaks := getattr(schedule, "max_lrs", own)) != own:
            logger.warning(
                "learning rates rise to %s, which the configuration's %s sets; the optimizer's own, %s, have no effect",
                *(peaks, config.scheduler.type, own),
                extra=ALIKE,
            )
        return schedule
    if config.scheduler is not None:
        logger.warning(
            "the lr_scheduler given to initialize is used, not the configuration's %s",
            config.scheduler.type,
            extra=ALIKE,
        )
    if isinstance(given, type) or not hasattr(given, "step"):  # a schedule class has step(), but is a callable
        return given(optimizer.torch_optimizer)
    if getattr(given, "optimizer", optimizer.torch_optimizer) is not optimizer.torch_optimizer:
        if len(given.optimizer.param_groups) != len(optimizer.param_groups):
            raise DeepSpeedConfigError(
                f"The lr_scheduler drives an optimizer with {len(given.optimizer.param_groups)} parameter groups, the engine's "
                f"has {len(optimizer.param_groups)}. Build it on the optimizer that is given to initialize, or pass a callable."
            )
        logger.info("the lr_scheduler was built on another optimizer; it drives the engine's from now on")
        # torch warns if no schedule was built on an optimizer that a schedule drives; this one changes nothing.
        torch.optim.lr_scheduler.ConstantLR(optimizer.torch_optimizer, 1.0)
        for mine, theirs in zip(optimizer.param_groups, given.optimizer.param_groups, strict=True):
            cycled = ("momentum", "betas") if "max_momentum" in theirs else ()
            mine.update({key: theirs[key] for key in (*_SCHEDULED, *cycled) if key in theirs})
        _rebind(given, optimizer.torch_optimizer)
    return given


def _rebind(schedule: Any, optimizer: torch.optim.Optimizer) -> None:
    """Makes a schedule, and its parts if it has any (torch's SequentialLR, ChainedScheduler), drive another optimizer."""
    schedule.optimizer = optimizer
    for part in getattr(schedule, "_schedulers", ()):
        _rebind(part, optimizer)
