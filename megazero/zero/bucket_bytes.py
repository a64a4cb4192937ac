"""Bytes of one bucket on a rank, state by state: arithmetic over its layout, the stage and the homes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megazero.zero.build import dtype_of
from megazero.zero.config import Sharding, ZeroConfig
from megazero.zero.home import SUM_NUMEL
from megazero.zero.homes import FP32_BYTES, kept_on_device, tile_numel
from megazero.zero.link import MOST_TO_HOST, OUTBOX_BUFFERS
from megazero.zero.residency import GatherLimits, Residency
from megazero.zero.schedule import FETCHES_BEFORE_GATHER, MAX_REDUCTIONS
from megazero.zero.units import ROOT, BucketPlan


@dataclass(frozen=True)
class StateSettings:
    """What decides how many bytes the states take, beside the parameters themselves.

    Attributes:
        data_parallel_size: ranks that see different data, and share out what the stage shards, unless `zero.shard_size` is given.
        device_type: of the accelerator. "cpu" is the host itself: nothing can be offloaded to where it is.
        states_per_element: fp32 numbers that the optimizer keeps for each element: 2 for Adam, 1 for SGD with momentum.
        recomputed_together: units that activation checkpointing recomputes in one piece, which makes all of them whole.
        micro_batches: whose gradients add up in a step.

    Raises:
        ValueError: a number is out of range.
    """

    zero: ZeroConfig
    data_parallel_size: int
    device_type: str = "cuda"
    states_per_element: int = 2
    recomputed_together: int = 1
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name, least in (
            ("data_parallel_size", 1),
            ("states_per_element", 0),
            ("recomputed_together", 1),
            ("micro_batches", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        self.zero.num_shards(self.data_parallel_size)

    @property
    def num_shards(self) -> int:
        """Ranks that share out what the stage shards."""
        return self.zero.num_shards(self.data_parallel_size)

    @property
    def reductions_under_way(self) -> int:
        """Units whose gradients are being reduced while another's are made; one rank has nothing to wait for."""
        return MAX_REDUCTIONS if self.zero.overlap_comm and self.data_parallel_size > 1 else 0

    def with_zero(self, **changes: Any) -> StateSettings:
        """The same with other values of some of `zero`'s fields."""
        return replace(self, zero=replace(self.zero, **changes))

    @property
    def sharding(self) -> Sharding:
        """Which states are cut over the data-parallel group."""
        return self.zero.sharding

    @property
    def optimizer_home(self) -> str:
        """Where O really is: "accelerator", "cpu" or "nvme"."""
        return self._home(self.zero.offload_optimizer)

    @property
    def param_home(self) -> str:
        """Where the shards of P really are."""
        return self._home(self.zero.offload_param)

    def _home(self, name: str) -> str:
        return "accelerator" if name == "none" or (name == "cpu" and self.device_type == "cpu") else name

    def casts_gradient(self, grad_dtype: torch.dtype) -> bool:
        """Whether the update makes an fp32 copy of a bucket's gradient; Adam on the host reads 16 bits as they are."""
        reads_16_bits = self.device_type == "cpu" and self.states_per_element == 2
        return grad_dtype != torch.float32 and self.optimizer_home == "accelerator" and not reads_16_bits

    def has_link(self, home: str) -> bool:
        """Whether states that rest in `home` come to the accelerator over a link."""
        return home != "accelerator" and self.device_type != "cpu"

    @property
    def has_own_master(self) -> bool:
        """Whether fp32 parameters have master weights beside them: where O is not in the same memory."""
        return self.optimizer_home != self.param_home or self.optimizer_home == "nvme" or self.zero.delays_update

    @property
    def keeps_master_alone(self) -> bool:
        """Whether shards of trained 16-bit parameters are their master weights, cast whenever they are gathered."""
        return self.optimizer_home == self.param_home == "accelerator" and not self.zero.delays_update


@dataclass(frozen=True)
class BucketBytes:
    """Bytes of one bucket on a rank."""

    unit: int
    parameters: int  # these five are there from the first gradient to the update, and all but gradients between steps
    gradients: int  # on the accelerator
    reduced: int  # gradients that wait beside O, away from the accelerator: sharded ones, and those of a delayed update
    master: int
    moments: int
    padding: float  # of these five
    persistent: int  # of the parameters, what stays whole on the accelerator though others are sharded
    whole_parameters: int  # while they are gathered
    whole_gradient: int
    owned_gradient: int  # of the elements that this rank updates
    wire: int  # of the gradient in another dtype, where reduce_dtype asks for one
    updating: int  # on the accelerator, during the update
    layout_numel: int  # elements of all ranks' shards
    shard: int  # elements of one
    owned: int  # elements that this rank updates
    optimizer_home: str  # of its O

    @classmethod
    def of(cls, plan: BucketPlan, settings: StateSettings) -> BucketBytes:
        """Those of a planned bucket."""
        layout, sharding = plan.layout, settings.sharding
        if plan.stays_whole:
            sharding = replace(sharding, parameters=False)
        grad_dtype = dtype_of(settings.zero.grad_dtype, plan.dtype)
        reduce_dtype = dtype_of(settings.zero.reduce_dtype, plan.dtype, grad_dtype)
        is_away = settings.optimizer_home != "accelerator"
        grad_bytes = grad_dtype.itemsize if plan.is_trainable else 0  # per element, as all below
        wire_bytes = reduce_dtype.itemsize if plan.is_trainable and reduce_dtype != grad_dtype else 0
        state_bytes = FP32_BYTES if plan.is_trainable else 0
        has_master = plan.dtype != torch.float32 or settings.has_own_master
        is_cast = plan.is_trainable and sharding.parameters and has_master and settings.keeps_master_alone
        moment_bytes = state_bytes * settings.states_per_element

        def held(is_sharded: bool) -> int:
            return layout.shard_numel if is_sharded else layout.numel

        owned = held(sharding.optimizer)
        stay = (
            0 if is_cast else held(sharding.parameters) * plan.dtype.itemsize,
            0 if sharding.gradients and is_away else held(sharding.gradients) * grad_bytes,
            owned * grad_bytes * (sharding.gradients + settings.zero.delays_update) if is_away else 0,
            owned * state_bytes * has_master,
            owned * moment_bytes,
        )
        used = sum(segment.numel for segment in layout.segments)
        return cls(
            plan.unit,
            *stay,
            padding=sum(stay) * (layout.numel - used) / layout.numel if layout.numel else 0.0,
            persistent=stay[0] if plan.stays_whole else 0,
            whole_parameters=0 if plan.stays_whole else layout.numel * plan.dtype.itemsize,
            whole_gradient=layout.numel * grad_bytes,
            owned_gradient=owned * grad_bytes,
            wire=layout.numel * wire_bytes,
            updating=owned * state_bytes if settings.casts_gradient(grad_dtype) else 0,
            layout_numel=layout.numel,
            shard=layout.shard_numel,
            owned=owned if plan.is_trainable else 0,
            optimizer_home=settings.optimizer_home,
        )

    @property
    def coming(self) -> int:
        """This rank's part of the parameters, ahead of its gather; where it has the whole, that comes right into its place."""
        is_part = self.shard < self.layout_numel
        return self.whole_parameters // self.layout_numel * self.shard if is_part else 0

    def leaving(self, settings: StateSettings) -> int:
        """Of the reduced gradient, on its way over the link to where O rests."""
        return self.owned_gradient if settings.has_link(self.optimizer_home) else 0

    @classmethod
    def of_all(cls, plans: Sequence[BucketPlan], settings: StateSettings) -> list[BucketBytes]:
        """Those of each planned bucket, where `offload_optimizer_ratio` says whose O is offloaded."""
        kept = kept_on_device(plans, settings.zero.offload_optimizer_ratio)
        here = settings.with_zero(offload_optimizer="none", offload_optimizer_ratio=1.0, delayed_param_update=0)
        return [cls.of(plan, here if index in kept else settings) for index, plan in enumerate(plans)]


def gathered_bytes(needs: Sequence[BucketBytes], settings: StateSettings) -> int:
    """Whole parameters at a time: the root, which stays for the micro-batch; the unit that runs; what is fetched ahead, or stays.

    Without limits that is one unit ahead, and none stays. Beside them are shards that come over the link ahead of their gather.
    """
    if not settings.sharding.parameters:
        return 0
    return _whole_bytes(needs, settings) + _coming_bytes(needs, settings)


def _coming_bytes(needs: Sequence[BucketBytes], settings: StateSettings) -> int:
    """Shards of the units whose gather is next but one and later; none where this rank has the whole."""
    if not settings.zero.overlap_comm or not settings.has_link(settings.param_home):
        return 0
    shards: dict[int, int] = {}
    for need in needs:
        if need.unit != ROOT:
            shards[need.unit] = shards.get(need.unit, 0) + need.coming
    return _largest(shards.values(), FETCHES_BEFORE_GATHER)


def _whole_bytes(needs: Sequence[BucketBytes], settings: StateSettings) -> int:
    numel, nbytes = {ROOT: 0}, {ROOT: 0}
    for need in needs:
        numel[need.unit] = numel.get(need.unit, 0) + (0 if need.persistent else need.layout_numel)
        nbytes[need.unit] = nbytes.get(need.unit, 0) + need.whole_parameters
    units = sorted(unit for unit in nbytes if unit != ROOT)
    if settings.zero.gather_limits == GatherLimits():
        return nbytes[ROOT] + _largest(
            (nbytes[unit] for unit in units), settings.recomputed_together + settings.zero.overlap_comm
        )
    residency, live, most = Residency([numel[unit] for unit in units], settings.zero.gather_limits), {-1}, 0
    units = [*units, ROOT]  # by index, -1 the root

    def total(of: dict[int, int]) -> int:
        return sum(of[units[index]] for index in live)

    for step in (1, -1):
        for index in range(len(units) - 1)[::step]:
            live.add(index)
            live.update(residency.ahead(index, step, total(numel)) if settings.zero.overlap_comm else ())
            most = max(most, total(nbytes))
            if step < 0 or not residency.stays(index, total(numel)):
                live.discard(index)
    return most + _largest((nbytes[unit] for unit in units[:-1]), settings.recomputed_together - 1)


def reducing_bytes(needs: Sequence[BucketBytes], settings: StateSettings) -> int:
    """The root's whole gradient, complete at the end only; that of the unit in backward; and reductions under way.

    A reduction in the gradient's own dtype happens in its memory; in another one it has a buffer apart. Whole gradients that are
    not sharded are counted in G. What has been reduced is kept until it has come home over the link, or is in the sum there.
    """
    on_their_way = settings.reductions_under_way
    has_wire = any(need.wire for need in needs)
    wires = _largest((need.wire for need in needs), max(1, on_their_way))
    if not settings.sharding.gradients:
        return wires
    root = sum(need.whole_gradient for need in needs if need.unit == ROOT)
    units = [need for need in needs if need.unit != ROOT and need.whole_gradient]
    count: dict[int, int] = {}
    for need in units:
        count[need.unit] = count.get(need.unit, 0) + 1
    per_unit = max(count.values(), default=0)
    whole = _largest((need.whole_gradient for need in units), per_unit + (0 if has_wire else on_their_way))
    leaving = _largest((need.leaving(settings) for need in needs), MOST_TO_HOST + has_wire)
    return root + whole + wires + leaving + adding_bytes(needs, settings)


def adding_bytes(needs: Sequence[BucketBytes], settings: StateSettings) -> int:
    """What comes to the accelerator of a sum in host memory, for the next micro-batch's gradient to be added: a piece of it."""
    if settings.micro_batches == 1 or not settings.sharding.gradients or settings.optimizer_home != "cpu":
        return 0
    away = (need for need in needs if need.owned and need.leaving(settings))
    return max((need.owned_gradient // need.owned * min(need.owned, SUM_NUMEL) for need in away), default=0)


def staging_bytes(needs: Sequence[BucketBytes], settings: StateSettings, compute_dtype: torch.dtype) -> int:
    """The most host memory through which offloaded states pass.

    An update brings a tile of O to hand at a time, and casts gradient and new weights of it where their dtypes differ; new
    weights on the accelerator get there through two buffers. From nvme states come into buffers: one tile is read while another
    is updated and a third one written; and so do shards of P. Gradients of a further micro-batch are added to those in the file
    bucket by bucket. A delayed update has all its new weights there until the next one, and on a CPU its gradients.
    """
    total, away = 0, settings.optimizer_home != "accelerator"
    offloaded = [need.shard for need in needs if need.owned and need.optimizer_home == settings.optimizer_home]
    tile = tile_numel(offloaded, settings.zero.sub_group_size)
    if settings.optimizer_home == "nvme":
        total += (
            3 * settings.zero.optimizer_buffer_count * min(tile, max((n.shard for n in needs), default=1)) * FP32_BYTES
        )
    there = [need.owned for need in needs if need.persistent or settings.param_home == "accelerator"]
    if settings.has_link(settings.optimizer_home):
        total += OUTBOX_BUFFERS * min(tile, max(there, default=0)) * compute_dtype.itemsize
    if away and settings.param_home != "accelerator" and compute_dtype != torch.float32:
        total += tile * compute_dtype.itemsize
    if away and (settings.zero.grad_dtype != "fp32" or not settings.sharding.gradients):
        total += tile * FP32_BYTES
    if settings.optimizer_home == "nvme" and settings.micro_batches > 1 and settings.sharding.gradients:
        largest = max((need.owned_gradient for need in needs if need.optimizer_home == "nvme"), default=0)
        own_buffer, what_is_added = largest > tile * FP32_BYTES, settings.has_link("nvme")
        total += largest * (own_buffer + what_is_added)
    if settings.zero.delays_update:
        total += sum(need.owned for need in needs) * compute_dtype.itemsize
        total += 0 if away else sum(need.owned_gradient for need in needs)
    if settings.param_home == "nvme":
        total += (
            settings.zero.param_buffer_count * max((need.shard for need in needs), default=0) * compute_dtype.itemsize
        )
    return total


def _largest(values: Iterable[int], count: int) -> int:
    return sum(sorted(values, reverse=True)[:count])
