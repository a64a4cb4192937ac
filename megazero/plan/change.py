"""Flags that a job could change to need less memory: single changes, cheapest in time first, and last resorts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megazero.option import flag_of
from megazero.plan.job_plan import Setup

SMALL_TILE = 1 << 24  # elements; a disk delivers such a piece in some tens of milliseconds


@dataclass(frozen=True)
class Change:
    """One step towards less memory per device, with the flags that make it."""

    values: Mapping[str, object]  # by flag; "" if a flag takes none
    setup: Setup
    is_of_states: bool = True  # otherwise it lowers activations only

    @property
    def flags(self) -> str:
        """The flags as on a command line."""
        return " ".join(f"{flag} {value}".rstrip() for flag, value in self.values.items())


def changes(setup: Setup) -> Iterator[Change]:
    """Each single change that lowers what a device holds, the cheapest in time first."""
    states, model, is_cuda = setup.states, setup.model, setup.states.device_type == "cuda"
    if setup.data_parallel_size > 1:
        for stage in range(states.zero.stage + 1, 4):
            yield _of_zero(setup, zero_stage=stage)
    if states.num_shards < setup.data_parallel_size:
        yield _of_zero(setup, zero_shard_size=0)
    if model.recompute_mode != "full":
        all_of_it = replace(model, checkpoint_activations=False, recompute="full", recompute_budget_gb=None)
        values = {"--checkpoint-activations": ""} if model.recompute is None else {"--recompute": "full"}
        yield Change(values, replace(setup, model=all_of_it), False)
    if states.optimizer_home == "accelerator" and is_cuda:
        if states.zero.stage:
            yield _of_zero(setup, offload_optimizer="cpu")
        elif setup.data_parallel_size == 1:  # a stage alone saves nothing here
            yield _of_zero(setup, zero_stage=2, offload_optimizer="cpu")
    if states.zero.offload_optimizer_ratio < 1:
        yield _of_zero(setup, offload_optimizer_ratio=1)
    if states.zero.stage == 3 and states.param_home == "accelerator" and is_cuda:
        yield _of_zero(setup, offload_param="cpu")
    if setup.shape.batch_size > 1:
        half = replace(setup.shape, batch_size=setup.shape.batch_size // 2)
        yield Change({"--batch-size": half.batch_size}, replace(setup, shape=half), False)


def last_resorts(setup: Setup) -> Iterator[Change]:
    """Further changes if none of `changes` is enough: all states moved elsewhere even with one rank, nvme, smaller pieces."""
    states = setup.states
    if states.zero.stage < 3 and setup.data_parallel_size == 1:
        home = "cpu" if states.device_type == "cuda" else "nvme"
        optimizer = states.optimizer_home if states.optimizer_home != "accelerator" else home
        yield _of_zero(setup, zero_stage=3, offload_optimizer=optimizer, offload_param=home)
    if states.zero.stage and states.optimizer_home != "nvme":
        yield _of_zero(setup, offload_optimizer="nvme")
    if states.zero.stage == 3 and states.param_home != "nvme":
        yield _of_zero(setup, offload_param="nvme")
    if states.optimizer_home == "nvme" and not 0 < states.zero.sub_group_size <= SMALL_TILE:
        yield _of_zero(setup, sub_group_size=SMALL_TILE)


def _of_zero(setup: Setup, **flags: Any) -> Change:
    """The change that these flags make, given by their names with underscores."""
    if "nvme" in flags.values() and setup.states.zero.nvme_path is None:
        flags["nvme_path"] = "DIR"  # any name will do for a plan
    values = {flag_of(name): value for name, value in flags.items()}
    return Change(values, setup.with_zero(**{name.removeprefix("zero_"): value for name, value in flags.items()}))
