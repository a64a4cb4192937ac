"""The buckets of a GPT-2 of any depth, for any number of ranks, without building more than one of its blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from megazero.comm import ProcessGroup
from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from megazero.zero.config import ZeroConfig
from megazero.zero.param_groups import matrices_of, weight_decay_groups
from megazero.zero.units import ROOT, BucketPlan, find_units, plan_buckets, share_buckets


@dataclass(frozen=True)
class _Ranks:
    """Stands in for a process group: its size is all that the layers ask for on the meta device."""

    count: int

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return 0


def gpt2_buckets(
    model: GPT2Config,
    model_parallel_size: int,
    data_parallel_size: int,
    dtype: torch.dtype,
    zero: ZeroConfig,
    uses_muon: bool = False,
) -> list[BucketPlan]:
    """The buckets that an engine would make of `model` on one tensor-parallel rank. Blocks are equal, so one is laid out.

    Parameters that `zero` keeps whole are kept whole in every block, as if there were no limit on their number.

    Raises:
        ValueError: the model does not split over the ranks, or has no `vocab_size`.
    """
    group = cast(ProcessGroup, _Ranks(model_parallel_size))
    with torch.random.fork_rng(devices=[]):  # building a model draws from the generator, even on the meta device
        one = GPT2Model(replace(model, num_layers=1), group=group, device="meta", dtype=dtype)
    groups = weight_decay_groups(one, 0.0, uses_muon)
    zero = replace(zero, model_persistence_threshold=None)
    matrices = matrices_of(*groups)
    num_shards = zero.num_shards(data_parallel_size)
    plans = plan_buckets(one, find_units(one), num_shards, groups[0], zero, matrices=matrices)
    blocks = [plan for plan in plans if plan.unit != ROOT]
    per_block = 1 + max(plan.unit for plan in blocks)
    layers = reversed(range(model.num_layers))
    every = [replace(plan, unit=plan.unit + layer * per_block) for layer in layers for plan in blocks]
    root = [plan for plan in plans if plan.unit == ROOT]
    return share_buckets([*every, *root], zero.shared_numel(data_parallel_size))
