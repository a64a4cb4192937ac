"""Bytes that a rank moves per optimizer step: between ranks, over the link to the host, and to and from the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.model.config import GPT2Config
from megazero.plan.activations import Shape
from megazero.zero.bucket_bytes import BucketBytes, StateSettings, gathers_of_units

BF16_BYTES = 2


@dataclass(frozen=True)
class Traffic:
    """Bytes per rank and optimizer step.

    Attributes:
        data_parallel_elements: sent over the data-parallel group, gradients and parameters (ZeRO, arXiv:1910.02054, sec. 7).
        data_parallel: bytes of these.
        between_sets: the part of these that leaves the set of ranks sharing one copy of the states; 0 if all ranks share one.
        model_parallel: sent over the tensor-parallel group, by ring all-reduces.
        to_host, from_host: over the link between accelerator and host, for states that rest away from the accelerator.
        disk_read, disk_written: for states that rest on nvme.
    """

    data_parallel_elements: int
    data_parallel: int
    between_sets: int
    model_parallel: int
    to_host: int
    from_host: int
    disk_read: int
    disk_written: int


def plan_traffic(
    model: GPT2Config,
    shape: Shape,
    needs: Sequence[BucketBytes],
    settings: StateSettings,
) -> Traffic:
    """The traffic of a step: psi is the parameters of the trained buckets of `needs`, with their padding."""
    n, m, is_sharded = settings.num_shards, settings.micro_batches, settings.sharding.gradients
    sets = settings.data_parallel_size // n  # an all-reduce between them adds up a shard's sums
    times = m if is_sharded else 1  # how often gradients are reduced
    trained = [need for need in needs if need.owned]
    reduced = sum(need.plan.layout.numel for need in trained) * times
    across = 2 * reduced // n * (sets - 1) // sets
    gathers = gathers_of_units(needs, settings, recomputes_tiles=model.recompute_mode == "full")
    # P from other ranks: once after the update, or whenever sharded parameters are used.
    gathered = sum(
        need.plan.layout.numel * (gathers[need.plan.unit] if need.plan.sharding.parameters else 1) for need in trained
    )
    wire = trained[0].plan.reduce_dtype.itemsize
    # Directions for Muon, in bf16: sent once so that matrices are whole, and once for the results. If O is whole, only results
    # are sent, which costs as much as both.
    matrices = sum(need.plan.layout.numel for need in trained if need.plan.has_matrices)
    directions, directions_across = 2 * matrices, 2 * matrices // n * (sets - 1) // sets
    sent = reduced * wire + gathered * shape.dtype.itemsize + directions * BF16_BYTES
    between_sets = across * wire + directions_across * BF16_BYTES
    split = matrices // settings.data_parallel_size * (shape.model_parallel_size - 1)
    away = [need for need in trained if need.settings.optimizer_home != "accelerator"]
    owned, owned_away = (sum(need.owned for need in some) for some in (trained, away))
    states = sum(need.master + need.moments for need in away)
    added = sum(need.owned_gradient for need in away)
    gradients = added * times  # if gradients are sharded, each micro-batch's are added where O rests
    shards = gathered * shape.dtype.itemsize // n  # of parameters, for each time that they are gathered
    on_disk = settings.optimizer_home == "nvme"
    params_away, params_on_disk = settings.param_home != "accelerator", settings.param_home == "nvme"
    has_link = settings.device_type != "cpu"
    # Each further micro-batch's gradients are added to the sum: by the device if it is in host memory, by the host if it is in a
    # file.
    sums = added * (m - 1) if is_sharded and settings.optimizer_home == "cpu" else 0
    # Whole gradients stay on the accelerator until the update. A delayed update takes a copy of P, for weights that are not P's
    # yet.
    swapped = gradients if is_sharded or settings.zero.delays_update else 0
    staged = owned * shape.dtype.itemsize if settings.zero.delays_update else 0
    weights = (owned - owned_away) * shape.dtype.itemsize if params_away else staged
    return Traffic(
        data_parallel_elements=(reduced + gathered + directions) * (n - 1) // n + across + directions_across,
        data_parallel=sent * (n - 1) // n + between_sets,
        between_sets=between_sets,
        model_parallel=_model_parallel(model, shape) * m + split * BF16_BYTES,
        # New weights cross the link if O and P rest on different sides of it.
        to_host=(gradients + weights) * has_link,
        from_host=(sums + (shards if params_away else owned_away * shape.dtype.itemsize)) * has_link,
        disk_read=(states + swapped if on_disk else 0) + (shards + staged if params_on_disk else 0),
        disk_written=(states + swapped if on_disk else 0) + (owned * shape.dtype.itemsize if params_on_disk else 0),
    )


def _model_parallel(model: GPT2Config, shape: Shape) -> int:
    """Two all-reduces of [s, b, h] per block in forward, two in backward, two more if it is recomputed; embedding and head.

    With --sequence-parallel, column-parallel layers other than tiles gather their input again in backward: half an all-reduce
    each.
    """
    t = shape.model_parallel_size
    halves = 2 * (model.num_layers * (6 if model.recompute_mode == "full" else 4) + 2)
    if model.sequence_parallel:
        halves += model.num_layers * (1 if model.memory_centric_tiled_linear else 2)
    return halves * shape.tokens * model.hidden_size * shape.dtype.itemsize * (t - 1) // t
