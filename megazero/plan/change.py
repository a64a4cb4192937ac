"""Flags that a job could change to need less memory: single changes, cheapest in time first, and last resorts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megazero.option import as_given
from megazero.plan.job_plan import Setup

SMALL_TILE = 1 << 24  # elements; a disk delivers such a piece in some tens of milliseconds


@dataclass(frozen=True)
class Change:
    """One step towards less memory per device, with the flags that make it."""

    values: Mapping[str, Any]  # by field of the job's configuration
    setup: Setup

    @property
    def flags(self) -> str:
        """The flags as on a command line."""
        described = {f.name: f for part in vars(self.setup.config).values() for f in fields(part)}
        return " ".join(as_given(described[name], value) for name, value in self.values.items())


def changes(setup: Setup) -> Iterator[Change]:
    """Each single change that can lower what a device holds and that the job accepts, the cheapest in time first."""
    states, model, is_cuda = setup.states, setup.model, setup.states.device_type == "cuda"
    if setup.data_parallel_size > 1:
        for stage in range(states.zero.stage + 1, 4):
            yield from _change(setup, stage=stage)
    if states.num_shards < setup.data_parallel_size:
        yield from _change(setup, shard_size=0)
    if model.recompute_mode == "auto":
        assert model.recompute_budget_gb is not None
        yield from _change(setup, recompute_budget_gb=model.recompute_budget_gb / 2)
    elif model.recompute_mode != "full":
        all_of_it = {"checkpoint_activations": True} if model.recompute is None else {"recompute": "full"}
        yield from _change(setup, **all_of_it)
    if states.optimizer_home == "accelerator" and is_cuda:
        if states.zero.stage:
            yield from _change(setup, offload_optimizer="cpu")
        elif setup.data_parallel_size == 1:  # a stage alone saves nothing here
            yield from _change(setup, stage=2, offload_optimizer="cpu")
    if states.zero.offload_optimizer_ratio < 1:
        yield from _change(setup, offload_optimizer_ratio=1.0)
    if states.zero.stage == 3 and states.param_home == "accelerator" and is_cuda:
        yield from _change(setup, offload_param="cpu")
    if setup.shape.batch_size > 1:
        yield from _change(setup, **_smaller_batch(setup))


def last_resorts(setup: Setup) -> Iterator[Change]:
    """Further changes if none of `changes` is enough: all states moved elsewhere even with one rank, nvme, smaller pieces."""
    states = setup.states
    if states.zero.stage < 3 and setup.data_parallel_size == 1:
        home = "cpu" if states.device_type == "cuda" else "nvme"
        optimizer = states.optimizer_home if states.optimizer_home != "accelerator" else home
        yield from _change(setup, stage=3, offload_optimizer=optimizer, offload_param=home)
    if states.zero.stage and states.optimizer_home != "nvme":
        yield from _change(setup, offload_optimizer="nvme")
    if states.zero.stage == 3 and states.param_home != "nvme":
        yield from _change(setup, offload_param="nvme")
    if states.optimizer_home == "nvme" and not 0 < states.zero.sub_group_size <= SMALL_TILE:
        yield from _change(setup, sub_group_size=SMALL_TILE)


def at_lower_stages(setup: Setup, values: Mapping[str, Any]) -> Iterator[Change]:
    """Changes of these values, if they raise the stage, at every stage between: the lowest first, as it communicates least."""
    if setup.data_parallel_size > 1:
        for stage in range(setup.states.zero.stage + 1, values.get("stage", 0)):
            yield from _change(setup, **{**values, "stage": stage})


def _smaller_batch(setup: Setup) -> dict[str, int]:
    """Half the micro-batch; of a global batch that is set, the next smaller micro-batch that divides it as well."""
    batch, training = setup.shape.batch_size, setup.config.training
    if training.global_batch_size is None:
        return {"batch_size": batch // 2}
    smaller = batch // next((n for n in range(2, math.isqrt(batch) + 1) if batch % n == 0), batch)
    if setup.config.deepspeed.deepspeed_config is None:
        return {"batch_size": smaller}
    # with both, the file's number of accumulation steps, if it has one, follows
    return {"batch_size": smaller, "global_batch_size": training.global_batch_size}


def _change(setup: Setup, **values: Any) -> Iterator[Change]:
    """The change that these values of fields make, if the job accepts it."""
    zero = setup.config.zero
    if "nvme" in values.values():
        if zero.placement == "auto":  # it has no disk: its homes are then given by hand, as they are planned
            homes = {name: getattr(setup.states.zero, name) for name in ("offload_optimizer", "offload_param")}
            values = {"placement": "static", **{k: v for k, v in homes.items() if k not in values}, **values}
        if zero.nvme_path is None:
            values["nvme_path"] = "DIR"  # any name will do for a plan
    try:
        yield Change(values, setup.changed(**values))
    except ValueError:
        return
