"""What a rank will hold: the bytes of every model state, and what comes on top during a step. Arithmetic only.

It follows the layouts that the engine would make, so it needs shapes but no values: a model on the meta device will do, of any
size and for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megazero.zero.bucket import Sharding
from megazero.zero.build import dtype_of
from megazero.zero.config import ZeroConfig
from megazero.zero.schedule import MAX_REDUCTIONS
from megazero.zero.units import ROOT, BucketPlan, plan_buckets, select_units

FP32_BYTES = 4


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each rank: the model's states (P, G, O), and what a step needs on top for a while.

    P and O stay. G stays where it is whole; sharded, it is made by backward and freed by the update.

    Not in it: activations, module buffers, temporaries of the torch optimizer, its step counters, what the transport stages,
    and the gradient of one parameter that autograd hands over.
    """

    stage: int
    data_parallel_size: int
    numel: int  # parameters of the model: psi; a tied one counts once
    parameters: int  # P: the weights that the model computes with
    gradients: int  # G
    master: int  # of O: fp32 weights. 0 where P is fp32, which is its own master
    moments: int  # of O: the optimizer's state per element, there from the first step on
    padding: int  # of all these, what holds no parameter; the mean over the ranks
    gathered: int  # whole parameters at the same time, where P is sharded: the root and, with overlap, two units
    reducing: int  # whole gradients and reduction buffers at the same time, beyond G
    updating: int  # in the update: the fp32 copy of one bucket's gradient, where G is not fp32

    @property
    def optimizer(self) -> int:
        """O: master weights and moments."""
        return self.master + self.moments

    @property
    def resident(self) -> int:
        """The model's states, as the ZeRO paper counts them: P + G + O. What is held when backward has ended."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def at_rest(self) -> int:
        """What is held between two steps, while forward makes its activations."""
        return self.resident - (self.gradients if Sharding.of_stage(self.stage).gradients else 0)

    @property
    def transient(self) -> int:
        """The most that comes on top during a step. What is gathered is released before the update."""
        return max(self.gathered + self.reducing, self.updating)

    @property
    def peak(self) -> int:
        """The most that is held at any time of a step. A step of one micro-batch stays below it where gradients are sharded:

        their shards are made one after the other, while a second micro-batch finds all of them.
        """
        return self.resident + self.transient

    def rows(self) -> list[tuple[str, str]]:
        """The plan as (name, value) rows of a table."""
        return memory_rows(self, {})


def plan_memory(
    model: nn.Module,
    *,
    stage: int,
    data_parallel_size: int,
    dtype: torch.dtype | None,
    grad_dtype: str = "fp32",
    reduce_dtype: str = "same",
    states_per_element: int = 2,
    overlap: bool = True,
    recomputed_together: int = 1,
    zero_units: Sequence[nn.Module | type[nn.Module]] | None = None,
    group_of: Mapping[str, int] | None = None,
) -> MemoryPlan:
    """What each rank will hold when an `Engine` with these settings trains `model`. Communicates nothing, allocates nothing.

    The transient part is the most that the engine holds when units run once per forward, in their order, and every trained
    parameter of a unit gets a gradient.

    Args:
        model: on any device, meta included; one tensor-parallel rank's part of it.
        dtype, zero_units, group_of: as for `Engine`; by default every parameter that requires a gradient is trained.
        grad_dtype, reduce_dtype, overlap: as in `ZeroConfig`.
        states_per_element: fp32 numbers that the optimizer keeps for each element: 2 for Adam, 1 for SGD with momentum.
        recomputed_together: units that activation checkpointing recomputes in one piece, which makes all of them whole.

    Raises:
        ValueError: a setting is none of the choices, a size is out of range, or two units share a parameter.
    """
    zero = ZeroConfig(stage=stage, grad_dtype=grad_dtype, reduce_dtype=reduce_dtype, overlap_comm=overlap)
    if min(data_parallel_size, recomputed_together) < 1 or states_per_element < 0:
        raise ValueError(
            "plan_memory needs data_parallel_size >= 1, recomputed_together >= 1 and states_per_element >= 0, got "
            f"{data_parallel_size}, {recomputed_together} and {states_per_element}."
        )
    sharding = Sharding.of_stage(stage)
    groups = dict.fromkeys((name for name, _ in model.named_parameters()), 0) if group_of is None else dict(group_of)
    plans = plan_buckets(model, select_units(model, zero_units), data_parallel_size, groups, (), dtype)
    needs = [_Need.of(plan, sharding, zero, states_per_element) for plan in plans]
    return MemoryPlan(
        stage,
        data_parallel_size,
        numel=sum(segment.numel for plan in plans for segment in plan.layout.segments),
        parameters=sum(need.parameters for need in needs),
        gradients=sum(need.gradients for need in needs),
        master=sum(need.master for need in needs),
        moments=sum(need.moments for need in needs),
        padding=round(sum(need.padding for need in needs)),
        gathered=_gathered(needs, recomputed_together + overlap) if sharding.parameters else 0,
        reducing=_reducing(needs, overlap, keeps_whole=not sharding.gradients),
        updating=max((need.updating for need in needs), default=0),
    )


@dataclass(frozen=True)
class _Need:
    """Bytes of one bucket on a rank."""

    unit: int
    parameters: int  # these four stay
    gradients: int
    master: int
    moments: int
    padding: float  # of these four
    whole_parameters: int
    whole_gradient: int
    wire: int  # of the gradient in another dtype, where reduce_dtype asks for one
    updating: int

    @classmethod
    def of(cls, plan: BucketPlan, sharding: Sharding, zero: ZeroConfig, states_per_element: int) -> _Need:
        layout = plan.layout
        grad_dtype = dtype_of(zero.grad_dtype, plan.dtype)
        reduce_dtype = dtype_of(zero.reduce_dtype, plan.dtype, grad_dtype)
        grad_bytes = grad_dtype.itemsize if plan.is_trainable else 0  # per element, as all below
        wire_bytes = reduce_dtype.itemsize if plan.is_trainable and reduce_dtype != grad_dtype else 0
        state_bytes = FP32_BYTES if plan.is_trainable else 0
        master_bytes = 0 if plan.dtype == torch.float32 else state_bytes
        moment_bytes = state_bytes * states_per_element

        def held(is_sharded: bool) -> int:
            return layout.shard_numel if is_sharded else layout.numel

        owned = held(sharding.optimizer)
        stay = (
            held(sharding.parameters) * plan.dtype.itemsize,
            held(sharding.gradients) * grad_bytes,
            owned * master_bytes,
            owned * moment_bytes,
        )
        used = sum(segment.numel for segment in layout.segments)
        return cls(
            plan.unit,
            *stay,
            padding=sum(stay) * (layout.numel - used) / layout.numel if layout.numel else 0.0,
            whole_parameters=layout.numel * plan.dtype.itemsize,
            whole_gradient=layout.numel * grad_bytes,
            wire=layout.numel * wire_bytes,
            updating=0 if grad_dtype == torch.float32 else owned * state_bytes,
        )


def _gathered(needs: Sequence[_Need], units: int) -> int:
    """The root, which stays whole for the micro-batch; the unit that runs, and the next one, which is fetched ahead."""
    of_unit: dict[int, int] = {}
    for need in needs:
        of_unit[need.unit] = of_unit.get(need.unit, 0) + need.whole_parameters
    return of_unit.pop(ROOT, 0) + _largest(of_unit.values(), units)


def _reducing(needs: Sequence[_Need], overlap: bool, keeps_whole: bool) -> int:
    """The root's whole gradient, complete at the end only; that of the unit in backward; and reductions under way.

    A reduction in the gradient's own dtype happens in its memory; in another one it has a buffer apart.

    Args:
        keeps_whole: whole gradients stay, so they are counted in G.
    """
    on_their_way = MAX_REDUCTIONS if overlap else 0
    has_wire = any(need.wire for need in needs)
    wires = _largest((need.wire for need in needs), max(1, on_their_way))
    if keeps_whole:
        return wires
    root = sum(need.whole_gradient for need in needs if need.unit == ROOT)
    units = [need for need in needs if need.unit != ROOT and need.whole_gradient]
    per_unit = max((sum(need.unit == other.unit for other in units) for need in units), default=0)
    whole = _largest((need.whole_gradient for need in units), per_unit + (0 if has_wire else on_their_way))
    return root + whole + wires


def _largest(values: Iterable[int], count: int) -> int:
    return sum(sorted(values, reverse=True)[:count])


def memory_rows(plan: MemoryPlan, measured: Mapping[str, int]) -> list[tuple[str, str]]:
    """Planned and measured bytes side by side, as (name, value) rows of a table.

    Args:
        measured: bytes under "P", "G", "O", "buffers" and "peak"; what is missing shows as a dash. The rows of G and O say what
            comes later, as long as it is not there.
    """
    late = f"  ({size(plan.moments)} of it from the first step on)" if plan.moments else ""
    planned = [
        ("parameters (P)", "P", plan.parameters, ""),
        ("gradients (G)", "G", plan.gradients, "  (from backward to the update)"),
        ("optimizer (O)", "O", plan.optimizer, late),
        ("buffers, at most", "buffers", plan.transient, ""),
        ("peak", "peak", plan.peak, ""),
    ]
    rows = [("bytes per rank", f"{'planned':>10}  {'measured':>10}")]
    for name, key, value, note in planned:
        is_there = key not in measured or measured[key] >= value
        found = size(measured[key]) if key in measured else "-"
        rows.append((name, f"{size(value):>10}  {found:>10}{'' if is_there else note}"))
    return [*rows, ("padding, included", f"{size(plan.padding):>10}")]


def size(nbytes: int) -> str:
    """A number of bytes for people, in powers of 1000 as in the ZeRO paper: "2.25 GB"."""
    for unit, one in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= one:
            return f"{nbytes / one:.{2 if nbytes < 100 * one else 1}f} {unit}"
    return f"{nbytes} B"
