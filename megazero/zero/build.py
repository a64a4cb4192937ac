"""Builds a model's buckets from its parameters, one unit at a time, so that a model that was built sharded is never whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from megazero import comm
from megazero.comm import Channel
from megazero.nvme import PAGE
from megazero.zero.bucket import MASTER, Bucket
from megazero.zero.bucket_bytes import StateSettings
from megazero.zero.config import ZeroConfig
from megazero.zero.homes import Homes
from megazero.zero.memory import memory_of_buckets
from megazero.zero.registry import bucket_of, forget, keep
from megazero.zero.storage import is_same_memory, view_of
from megazero.zero.units import BucketPlan

VECTORS = 6  # of a bucket in a swap file, at most: P, master weights, two moments, and gradients, twice if an update is delayed


def build_buckets(plans: Sequence[BucketPlan], channel: Channel, config: ZeroConfig, homes: Homes) -> list[Bucket]:
    """The buckets of `plans`, with their shards in their homes, and released if parameters are sharded.

    Collective over the world, whose other ranks raise OtherRankError if one fails.

    Raises:
        OSError: the disk has no room for all that this rank will write to its swap file.
        MemoryError, torch.OutOfMemoryError: there is no memory for this rank's states.
        ValueError: data-parallel ranks hold different values, or a parameter belongs to another engine.
    """
    if homes.swap is not None:
        # All of it now: training is not to end at its first step, or because of other ranks' files.
        plan = memory_of_buckets(plans, StateSettings(config, channel.num_ranks, comm.local_device().type))
        rounding = len(plans) * VECTORS * PAGE
        comm.together(partial(homes.swap.reserve, plan.disk + rounding))
    buckets: list[Bucket] = []
    try:
        comm.together(partial(_fill, buckets, plans, channel, config, homes))
    except BaseException:  # a full disk, or ranks that differ: the buckets made so far stay alive for another engine
        leave(buckets)
        raise
    return buckets


def _fill(
    buckets: list[Bucket], plans: Sequence[BucketPlan], channel: Channel, config: ZeroConfig, homes: Homes
) -> None:
    sums = []
    for index, plan in enumerate(plans):
        sources = _gathered_sources(plan.parameters.values())
        make = partial(
            Bucket,
            plan,
            channel,
            predivide=channel.num_ranks if config.prescale_gradients else config.gradient_predivide_factor,
            param_home=homes.param,
            optimizer_home=None if index in homes.kept else homes.optimizer,
            tile_numel=homes.tile_numel,
            separate_master=config.delays_update,
        )
        # A rank without the memory for it must say so here: the others would wait for it in the next gather.
        bucket = comm.together(make, channel.group)
        buckets.append(bucket)  # before anything else may fail, as parameters lie in it now
        for source in sources:
            source.weights.forget(plan.parameters.values())
        sums.append(_sum_of_bits(bucket.weights.flat))
        bucket.weights.release()
    if homes.link is not None:
        homes.link.to_host.finish()  # values sent to the host let go of their device memory
    _check_replicas(sums, channel)


@torch.inference_mode(False)  # within which the tensors could not be trained
def dissolve(buckets: Iterable[Bucket]) -> None:
    """Gives every parameter a whole tensor of its own again."""
    for bucket in buckets:
        bucket.weights.gather()
        bucket.weights.wait_gathered()
        bucket.weights.show_parameters()  # even after an update that has failed
        for parameter in bucket.parameters.values():
            parameter.data = parameter.data.clone()
            forget(parameter)
        bucket.optimizer = None  # which refers to the bucket: with this cycle O would outlive the engine


def leave(buckets: Iterable[Bucket]) -> None:
    """Lets another engine take over the parameters of buckets that no engine drives, as it does with those of `zero.Init`."""
    for bucket in buckets:
        for parameter in bucket.parameters.values():
            keep(parameter, bucket)


def _gathered_sources(parameters: Iterable[nn.Parameter]) -> list[Bucket]:
    sources: list[Bucket] = []
    for parameter in parameters:
        source = bucket_of(parameter)
        if source is None or source in sources:
            continue
        if source.schedule is not None:
            raise ValueError(
                f"The parameters of unit {source.name!r} belong to another engine already, and two would write to them. Call "
                "destroy() of that engine first; if nothing refers to it any more, build the model anew."
            )
        sources.append(source)
    for source in sources:
        source.weights.gather()
    for source in sources:
        source.weights.wait_gathered()
        _give_master_weights(source)
    return sources


def _give_master_weights(source: Bucket) -> None:
    """Gives parameters their unrounded fp32 values back, if `source` is of an engine that was not completed. Collective."""
    if not source.is_trainable or source.weights.flat.dtype == torch.float32:
        return
    source.adopt_written()
    with source.states[MASTER].at_hand() as owned:
        whole = source.whole(owned)
    for segment in source.layout.segments:
        parameter = source.parameters.get(segment.name)  # None: it has moved to another bucket
        if parameter is not None and is_same_memory(parameter, source.weights.views[segment.name]):
            parameter.data = view_of(whole, segment)


def _check_replicas(sums: list[torch.Tensor], channel: Channel) -> None:
    """Raises on every rank unless all data-parallel ranks start with equal weights."""
    if channel.num_ranks == 1 or not sums:
        return
    mine = torch.stack(sums)
    # The largest ~x is that of the smallest x.
    ends = comm.all_reduced(torch.stack([mine, ~mine]), channel.group, torch.distributed.ReduceOp.MAX)
    if not torch.equal(ends[0], ~ends[1]):
        raise ValueError(
            "The data-parallel ranks start with different weights and would train different models. Call torch.manual_seed "
            "with the same seed on every rank before the model is built, or load the same weights."
        )


def _sum_of_bits(flat: torch.Tensor) -> torch.Tensor:
    """An int64 that is equal for equal tensors wherever it is computed; a sum of floats depends on threads and kind of GPU."""
    # A bucket is whole 8-byte words. The CPU would copy shorter integers to int64 before it sums them.
    return flat.view(torch.int64).sum()
