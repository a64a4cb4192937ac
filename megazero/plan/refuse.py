"""What the job asks before it allocates (does it fit this machine?), and after it did not fit (which flags take less?)."""

from __future__ import annotations

import logging
import os

import torch

from megazero.config import Config
from megazero.plan.fit import check_fits, what_takes_less, what_to_change
from megazero.plan.job_plan import Setup, plan_job
from megazero.plan.limits import Limits, measure_limits

logger = logging.getLogger(__name__)


def refuse_what_cannot_fit(
    config: Config,
    world_size: int,
    device: torch.device,
    limits: Limits | None = None,
    states_per_element: int = 2,
) -> None:
    """Raises if the job cannot fit this machine, as far as can be known; warns if its activations may not fit.

    Allocates and communicates nothing.

    Args:
        config: with the vocabulary's size.
        device: this rank's.
        limits: of this machine; measured by default.
        states_per_element: as in `StateSettings`; 0 for an optimizer whose states are not known yet.

    Raises:
        ValueError: the states alone exceed what device, host or disk offer, or the activations do many times over; the message
            says what to change.
    """
    plan = plan_job(_setup(config, world_size, device, states_per_element))
    if limits is None:
        limits = measure_limits(device, *config.swap_folders)
    problems = check_fits(plan, limits)
    certain = [problem for problem in problems if problem.is_certain]
    if certain:
        ways = what_to_change(plan.setup, limits)
        advice = f" It fits with {' or with '.join(change.flags for change in ways)}." if ways else ""
        raise ValueError(" Also, ".join(map(str, certain)) + advice)
    for problem in problems:
        logger.warning("%s", problem)


def ways_to_less_memory(config: Config, world_size: int, device: torch.device) -> list[str]:
    """Flags that each lower, by themselves, what the device holds; cheapest in time first."""
    return [change.flags for change in what_takes_less(_setup(config, world_size, device))]


def _setup(config: Config, world_size: int, device: torch.device, states_per_element: int = 2) -> Setup:
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return Setup.of(config, world_size, ranks_per_node, device.type, states_per_element)
