"""Bytes of a rank's buckets: of each state, and of temporary memory. Arithmetic over the buckets' plans and the homes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megazero.zero.config import Sharding, ZeroConfig
from megazero.zero.home import SUM_NUMEL
from megazero.zero.homes import FP32_BYTES, kept_on_device, offloaded_tile, optimizer_buffers, param_buffers
from megazero.zero.link import MOST_TO_HOST, OUTBOX_BUFFERS
from megazero.zero.residency import GatherLimits, Residency
from megazero.zero.schedule import FETCHES_BEFORE_GATHER
from megazero.zero.units import ROOT, BucketPlan

FIRST = 0  # first unit of the forward in a model that runs its units in order, and last unit of the backward


@dataclass(frozen=True)
class StateSettings:
    """The settings that, together with the parameters themselves, determine how many bytes the states take.

    Attributes:
        data_parallel_size: ranks that see different data. What the stage shards is divided among all of them, unless
            `zero.shard_size` is given.
        device_type: of the accelerator. "cpu" is the host itself, so that nothing can be offloaded to host memory.
        states_per_element: fp32 numbers that the optimizer keeps for each element: 2 for Adam, 1 for SGD with momentum. For
            matrices that Muon updates it is always 1.
        recomputed_together: units that activation checkpointing recomputes in one piece, so that all of them are whole at once.
        micro_batches: micro-batches whose gradients accumulate in a step.

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
        for name in ("data_parallel_size", "states_per_element", "recomputed_together", "micro_batches"):
            least = 0 if name == "states_per_element" else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        self.zero.num_shards(self.data_parallel_size)

    @property
    def num_shards(self) -> int:
        """Number of ranks that sharded states are divided among."""
        return self.zero.num_shards(self.data_parallel_size)

    @property
    def reductions_under_way(self) -> int:
        """Units whose gradients are reduced while another unit's are made; 0 on a single rank, which has nothing to wait for."""
        return int(self.zero.overlap_comm and self.data_parallel_size > 1)

    def with_zero(self, **changes: Any) -> StateSettings:
        """The same settings with changes to some of `zero`'s fields."""
        return replace(self, zero=replace(self.zero, **changes))

    @property
    def sharding(self) -> Sharding:
        """Which states are cut over the data-parallel group."""
        return self.zero.sharding

    @property
    def optimizer_home(self) -> str:
        """Where O actually is: "accelerator", "cpu" or "nvme"."""
        return self._home(self.zero.offload_optimizer)

    @property
    def param_home(self) -> str:
        """Where the shards of P actually are."""
        return self._home(self.zero.offload_param)

    def _home(self, name: str) -> str:
        return "accelerator" if name == "none" or (name == "cpu" and self.device_type == "cpu") else name

    def casts_gradient(self, grad_dtype: torch.dtype) -> bool:
        """Whether the update makes an fp32 copy of a bucket's gradient. Adam on the host reads 16-bit gradients directly."""
        reads_16_bits = self.device_type == "cpu" and self.states_per_element == 2
        return grad_dtype != torch.float32 and self.optimizer_home == "accelerator" and not reads_16_bits

    def has_link(self, home: str) -> bool:
        """Whether states that rest in `home` reach the accelerator over a link."""
        return home != "accelerator" and self.device_type != "cpu"

    @property
    def has_own_master(self) -> bool:
        """Whether fp32 parameters have separate master weights: if O is offloaded to other memory, or the update is delayed."""
        return self.optimizer_home != self.param_home or self.optimizer_home == "nvme" or self.zero.delays_update

    @property
    def keeps_master_alone(self) -> bool:
        """Whether the master weights serve as the shards of trained 16-bit parameters, cast whenever they are gathered."""
        return self.optimizer_home == self.param_home == "accelerator" and not self.zero.delays_update


@dataclass(frozen=True)
class BucketBytes:
    """Bytes of one bucket on a rank.

    Attributes:
        settings: the job's settings. For a bucket whose O stays on the device, they are changed as if nothing were offloaded,
            because its master weights serve as the shard of P there.
    """

    plan: BucketPlan
    settings: StateSettings

    @classmethod
    def of_all(cls, plans: Sequence[BucketPlan], settings: StateSettings) -> list[BucketBytes]:
        """One for each planned bucket."""
        kept = kept_on_device(settings.zero, plans)
        here = settings.with_zero(
            offload_optimizer="none", offload_param="none", offload_optimizer_ratio=1.0, delayed_param_update=0
        )
        return [cls(plan, here if index in kept else settings) for index, plan in enumerate(plans)]

    # ---- P, G and O: all exist from the first gradient to the update; between steps P and O do

    @property
    def parameters(self) -> int:
        """P: the shard, or the whole if it is not sharded; 0 if the master weights serve as the shard."""
        is_cast = self.plan.is_trainable and self.plan.sharding.parameters and self._has_master
        if is_cast and self.settings.keeps_master_alone:
            return 0
        return self._held(self.plan.sharding.parameters) * self.plan.dtype.itemsize

    @property
    def persistent(self) -> int:
        """The part of `parameters` that stays whole on the accelerator while others are sharded."""
        is_whole = self.settings.sharding.parameters and not self.plan.sharding.parameters
        return self.parameters if is_whole else 0

    @property
    def gradients(self) -> int:
        """G on the accelerator."""
        is_elsewhere = self.plan.sharding.gradients and self._is_away
        return 0 if is_elsewhere else self._held(self.plan.sharding.gradients) * self._grad_bytes

    @property
    def reduced(self) -> int:
        """Gradients that wait next to O, away from the accelerator: sharded ones, and those of a delayed update."""
        copies = self.plan.sharding.gradients + self.settings.zero.delays_update
        return self.owned_gradient * copies if self._is_away else 0

    @property
    def master(self) -> int:
        """The part of O that is fp32 weights; 0 if P itself is the master weights."""
        return self.owned * FP32_BYTES if self._has_master else 0

    @property
    def moments(self) -> int:
        """The part of O that the optimizer keeps for each element."""
        return self.owned * FP32_BYTES * (1 if self.plan.has_matrices else self.settings.states_per_element)

    @property
    def padding(self) -> float:
        """Padding in all of these states."""
        layout = self.plan.layout
        held = self.parameters + self.gradients + self.reduced + self.master + self.moments
        return held * (layout.numel - layout.param_numel) / layout.numel

    # ---- temporarily on the accelerator

    @property
    def whole_parameters(self) -> int:
        """The whole parameters, while they are gathered; 0 if they are always whole."""
        return self.plan.layout.numel * self.plan.dtype.itemsize if self.plan.sharding.parameters else 0

    @property
    def coming(self) -> int:
        """This rank's part of the parameters, if it crosses the link ahead of its gather; a sole rank's is copied into place."""
        is_ahead = self.settings.has_link(self.settings.param_home) and self.plan.layout.num_shards > 1
        return self.whole_parameters // self.plan.layout.num_shards if is_ahead else 0

    @property
    def whole_gradient(self) -> int:
        """The whole gradient, until it is reduced."""
        return self.plan.layout.numel * self._grad_bytes

    @property
    def early_gradient(self) -> int:
        """The root's gradient during the units' backward: all of G, unless little comes before and waits as it is."""
        plan, whole = self.plan, self.whole_gradient
        first = plan.first_numel * plan.dtype.itemsize
        return min(first, whole) if first <= plan.early_bytes else whole

    @property
    def wire(self) -> int:
        """The gradient in the dtype that it travels in, if that differs (reduce_dtype)."""
        plan = self.plan
        is_cast = plan.is_trainable and plan.reduce_dtype != plan.grad_dtype
        return plan.layout.numel * plan.reduce_dtype.itemsize if is_cast else 0

    @property
    def leaving(self) -> int:
        """The reduced gradient on its way over the link to O's home."""
        return self.owned_gradient if self.settings.has_link(self.settings.optimizer_home) else 0

    @property
    def directions(self) -> int:
        """During the update: Muon's directions of the whole bucket, in bf16."""
        is_stepped = self.plan.has_matrices and self.plan.is_trainable
        return self.plan.layout.numel * torch.bfloat16.itemsize if is_stepped else 0

    @property
    def updating(self) -> int:
        """During the update: the gradient's fp32 copy."""
        return self.owned * FP32_BYTES if self.settings.casts_gradient(self.plan.grad_dtype) else 0

    # ---- what they are made of

    @property
    def owned(self) -> int:
        """Elements that this rank updates; 0 if the bucket is frozen."""
        return self.plan.owned_numel if self.plan.is_trainable else 0

    @property
    def owned_gradient(self) -> int:
        """Bytes of the gradient of the owned elements."""
        return self.owned * self._grad_bytes

    @property
    def _grad_bytes(self) -> int:
        """Bytes per element of the gradient."""
        return self.plan.grad_dtype.itemsize if self.plan.is_trainable else 0

    @property
    def _is_away(self) -> bool:
        return self.settings.optimizer_home != "accelerator"

    @property
    def _has_master(self) -> bool:
        """Whether trained parameters have master weights that are not P."""
        return self.plan.dtype != torch.float32 or self.settings.has_own_master

    def _held(self, is_sharded: bool) -> int:
        """Elements that this rank holds."""
        return self.plan.layout.shard_numel if is_sharded else self.plan.layout.numel


def gathered_bytes(needs: Sequence[BucketBytes], settings: StateSettings) -> int:
    """Most bytes of parameters gathered at the same time.

    Included are the root, which stays for the micro-batch; the unit that runs; and units that are gathered ahead or stay. Without
    limits, one unit is gathered ahead, and the last unit stays because its backward comes next. Added are shards that cross the
    link ahead of their gather, of the units whose gather is next but one and later.
    """
    nbytes = _by_unit(needs, lambda need: need.whole_parameters)
    coming = _by_unit(needs, lambda need: need.coming * settings.zero.overlap_comm)
    root, _ = nbytes.pop(ROOT), coming.pop(ROOT)
    ahead = _largest(coming.values(), FETCHES_BEFORE_GATHER)
    if settings.zero.gather_limits == GatherLimits():
        together = settings.recomputed_together + settings.zero.overlap_comm
        return root + ahead + _largest(nbytes.values(), together)
    most, _ = _within_limits(needs, settings)
    return root + ahead + most + _largest(nbytes.values(), settings.recomputed_together - 1)


def _within_limits(needs: Sequence[BucketBytes], settings: StateSettings) -> tuple[int, set[int]]:
    """Under `stage3_*` limits: most bytes of units, without the root, that are whole together; and units kept for backward."""
    if not settings.sharding.parameters:
        return 0, set()
    sharded = _by_unit(needs, lambda need: need.plan.layout.numel * need.plan.sharding.parameters)
    nbytes = _by_unit(needs, lambda need: need.whole_parameters)
    root, units = sharded.pop(ROOT), list(sharded)
    residency = Residency(list(sharded.values()), settings.zero.gather_limits)
    live: set[int] = set()  # indices in `units`
    stay: set[int] = set()
    most = 0

    def numel() -> int:
        return root + sum(residency.sizes[index] for index in live)

    for step in (1, -1):
        for index in range(len(units))[::step]:
            live.add(index)
            live.update(residency.ahead(index, step, numel()) if settings.zero.overlap_comm else ())
            most = max(most, sum(nbytes[units[index]] for index in live))
            if step < 0 or not residency.stays(index, numel()):
                live.discard(index)
        stay |= live  # empty after backward
    return most, {units[index] for index in stay}


def gathers_of_units(
    needs: Sequence[BucketBytes], settings: StateSettings, recomputes_tiles: bool = False
) -> dict[int, int]:
    """How often each unit's sharded parameters are gathered in a step: for a forward and a backward of each micro-batch.

    These gathers are saved:

    - the root stays for all micro-batches;
    - the last unit stays for its backward, and so do units before it within `stage3_max_reuse_distance`, if
      `stage3_max_live_parameters` has room;
    - the first unit stays for the next micro-batch.

    A recomputed tile does not stay. Its backward comes after the recomputation of all later tiles, so it is gathered for the
    recomputation and for the backward. One of these is saved if the next unit's backward has requested the tile already.
    """
    m, (_, to_backward) = settings.micro_batches, _within_limits(needs, settings)
    units = {need.plan.unit for need in needs} - {ROOT}
    tiles = {need.plan.unit for need in needs if need.plan.is_linear_tile and recomputes_tiles}
    others = units - tiles

    def gathers_of(unit: int) -> int:
        if unit in tiles:
            is_there = settings.zero.overlap_comm and unit + 1 in others
            return (2 if is_there else 3) * m
        return 2 * m - m * (unit in to_backward) - (m - 1) * (unit == FIRST)

    return {ROOT: 1, **{unit: gathers_of(unit) for unit in units}}


def reducing_bytes(needs: Sequence[BucketBytes], settings: StateSettings) -> tuple[int, int]:
    """Bytes of whole gradients and reductions under way: during the units' backward, and after it, when the root's is whole.

    A reduction in the gradient's own dtype happens in its memory; in another dtype it has a separate buffer. Gradients that are
    not sharded are counted in G. A reduced gradient is kept until it has crossed the link to its home, or is in the sum there.
    """
    on_their_way = settings.reductions_under_way
    if not settings.sharding.gradients:
        wires = _largest((need.wire for need in needs), max(1, on_their_way))
        return wires, wires
    root = [need for need in needs if need.plan.unit == ROOT]
    units = [need for need in needs if need.plan.unit != ROOT and need.whole_gradient]
    has_wire = any(need.wire for need in needs)
    per_unit = max(Counter(need.plan.unit for need in units).values(), default=0)
    in_units = sum(need.early_gradient for need in root)
    in_units += _largest((need.whole_gradient for need in units), per_unit + (0 if has_wire else on_their_way))
    in_units += _largest((need.wire for need in units), max(1, on_their_way))
    last_unit = _largest((need.wire or need.whole_gradient for need in units), on_their_way)
    behind = sum(need.whole_gradient for need in root) + max([last_unit, *(need.wire for need in root)])
    leaving = _largest((need.leaving for need in needs), MOST_TO_HOST + has_wire) + adding_bytes(needs, settings)
    return in_units + leaving, behind + leaving


def updating_bytes(needs: Sequence[BucketBytes]) -> int:
    """Bytes during the update: a bucket's gradient in fp32, or Muon's directions of three (arriving, worked on and leaving)."""
    cast = max((need.updating for need in needs), default=0)
    return max(cast, _largest((need.directions for need in needs), 3))


def adding_bytes(needs: Sequence[BucketBytes], settings: StateSettings) -> int:
    """Bytes of the piece of a sum in host memory that is on the accelerator while a later micro-batch's gradient is added."""
    if settings.micro_batches == 1 or not settings.sharding.gradients or settings.optimizer_home != "cpu":
        return 0
    away = (need for need in needs if need.leaving)
    return max((min(need.owned, SUM_NUMEL) * need.plan.grad_dtype.itemsize for need in away), default=0)


def staging_bytes(needs: Sequence[BucketBytes], settings: StateSettings) -> int:
    """Most bytes of host memory through which offloaded states pass.

    - An update brings one tile of O to hand at a time, and casts its gradient and new weights if their dtypes differ.
    - New weights go to the accelerator through two buffers, and whole gradients come from there through as many.
    - Muon steps all tiles at once: all such gradients are there together, and a bucket's directions arrive in bf16.
    - States on nvme come into buffers (`homes`), and so do shards of P.
    - On nvme, gradients of a further micro-batch are added to those in the file bucket by bucket.
    - A delayed update keeps all its new weights until the next update and, on a CPU, its gradients.
    """
    zero, plans = settings.zero, [need.plan for need in needs]
    tile, dtype = offloaded_tile(zero, plans), plans[0].dtype
    is_away, has_link = settings.optimizer_home != "accelerator", settings.has_link(settings.optimizer_home)
    total = 0
    if any(need.settings.param_home == "nvme" for need in needs):
        total += math.prod(param_buffers(zero, plans))
    if is_away and settings.param_home != "accelerator" and dtype != torch.float32:
        total += tile * dtype.itemsize
    if is_away and zero.grad_dtype != "fp32":
        total += tile * FP32_BYTES
    if settings.optimizer_home == "nvme":
        total += math.prod(optimizer_buffers(zero, plans))
        if settings.micro_batches > 1 and settings.sharding.gradients:
            largest = max((need.owned_gradient for need in needs if need.settings.optimizer_home == "nvme"), default=0)
            own_buffer, what_is_added = largest > tile * FP32_BYTES, has_link
            total += largest * (own_buffer + what_is_added)
    if has_link:
        there = [need.owned for need in needs if need.persistent or settings.param_home == "accelerator"]
        total += OUTBOX_BUFFERS * min(tile, max(there, default=0)) * dtype.itemsize
        matrices = [need.owned for need in needs if need.directions]
        total += max(matrices, default=0) * torch.bfloat16.itemsize
        if not settings.sharding.gradients and not zero.delays_update:  # a delayed update's gradients are on the host
            by_tiles = (1 + MOST_TO_HOST) * tile * plans[0].grad_dtype.itemsize
            total += sum(need.owned for need in needs) * FP32_BYTES if matrices else by_tiles
    if zero.delays_update:
        total += sum(need.owned for need in needs) * dtype.itemsize
        total += 0 if is_away else sum(need.owned_gradient for need in needs)
    return total


def _by_unit(needs: Iterable[BucketBytes], value: Callable[[BucketBytes], int]) -> dict[int, int]:
    """Sums by unit, in forward order; the root is always included, and comes first."""
    total = {ROOT: 0}
    for need in sorted(needs, key=lambda need: need.plan.unit):
        total[need.plan.unit] = total.get(need.plan.unit, 0) + value(need)
    return total


def _largest(values: Iterable[int], count: int) -> int:
    return sum(sorted(values, reverse=True)[:count])
