"""What a rank's accelerator holds at the moments of a step that can be its peak: states, buffers and activations together.

In forward, activations pile up; the loss adds the logits and their gradient. In backward, activations are freed block by block
while gradients appear. The gradient of the head's weight comes first: if that weight is tied to the embedding, its gradient waits
in autograd until the end, when the root's gradient is made from it. Then comes each block's gradient, whole until it is reduced,
which happens during the next block's backward. At the update, only states are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from megazero.model.config import GPT2Config
from megazero.plan.activations import Activations
from megazero.zero.bucket_bytes import FIRST, BucketBytes, StateSettings, adding_bytes
from megazero.zero.link import MOST_TO_HOST
from megazero.zero.memory import MemoryPlan
from megazero.zero.residency import GatherLimits
from megazero.zero.schedule import FETCHES_BEFORE_GATHER
from megazero.zero.units import ROOT


@dataclass(frozen=True)
class _Unit:
    """Bytes of one unit: a block (tiles make several units of a block), several blocks that share their buckets, or the root.

    They are those that a micro-batch adds: what exists from the micro-batch before is 0 here. So are the parameters if what is
    gathered has limits, under which `MemoryPlan.gathered` counts those of all units.
    """

    gathered: int = 0  # of its parameters, whole
    gradient: int = 0  # of its gradient, whole
    early: int = 0  # of the root's gradient, what exists during the blocks' backward
    wire: int = 0  # of what is sent, if that is not the gradient itself
    reduced: int = 0  # what stays of its gradient on the accelerator: this rank's part, or all of it
    leaving: tuple[int, ...] = ()  # of this part, what goes over the link to another home: by bucket, last one first
    coming: int = 0  # of this rank's part of the parameters, if it comes over the link before its gather
    last_block: int = 0  # the last of its blocks, whose backward comes first
    is_linear_tile: bool = False  # tiles do not stay whole when they are recomputed

    @classmethod
    def of(cls, needs: Sequence[BucketBytes], settings: StateSettings, last_block: int = 0) -> _Unit:
        """The unit made of these buckets."""
        is_sharded, is_only = settings.sharding.gradients, settings.micro_batches == 1
        makes_whole = is_sharded or is_only  # otherwise all of G exists, from the micro-batch before
        has_no_limits = settings.zero.gather_limits == GatherLimits()
        return cls(
            gathered=sum(need.whole_parameters for need in needs) * has_no_limits,
            gradient=sum(need.whole_gradient for need in needs) * makes_whole,
            early=sum(need.early_gradient for need in needs) * makes_whole,
            wire=max(need.wire for need in needs),
            reduced=sum(need.gradients for need in needs) * is_only,
            leaving=tuple(need.leaving for need in reversed(needs) if is_sharded and need.leaving),
            coming=sum(need.coming for need in needs) * has_no_limits,
            last_block=last_block,
            is_linear_tile=any(need.plan.is_linear_tile for need in needs),
        )


def step_moments(
    needs: Sequence[BucketBytes],
    settings: StateSettings,
    states: MemoryPlan,
    work: Activations,
    num_layers: int,
    update_working: int = 0,
) -> dict[str, int]:
    """Bytes on the accelerator at the loss, in the blocks' and the embedding's backward, and in the update.

    Backward makes gradients one after the other. With one micro-batch, the peak is therefore where activations are largest; a
    later micro-batch finds the gradients of the first.

    Args:
        needs: those of each bucket, the blocks' and the root's.
        states: the sums of these.
        update_working: what the optimizer makes in an update, besides what `states` counts.
    """
    units, root = _units(needs, settings, num_layers)
    has_earlier = settings.micro_batches > 1
    adding = adding_bytes(needs, settings)
    rest = states.at_rest + (states.gradients if has_earlier else 0)
    # Between forward and backward.
    between = rest + (root.gathered if settings.zero.gather_limits == GatherLimits() else states.gathered)
    last_to_go = _last_to_go([root, *units])
    at_loss = max(work.loss_working, work.head_working + root.early - work.logits if work.head_working else 0)
    return {
        # The last unit stays, because its backward comes next.
        "loss": between + units[-1].gathered + work.saved + at_loss + (last_to_go if has_earlier else 0),
        "blocks' backward": between + _blocks_backward(units, root, settings, work, num_layers, adding),
        "embedding's backward": between + _embedding_backward(units, root, settings, work, adding),
        "update": states.resident + max(states.updating + update_working, last_to_go),
    }


def muon_working(model: GPT2Config) -> int:
    """Bytes while Muon works on the largest matrix, whole even if cut: that matrix, two of the iteration, two short squares."""
    long, short = max(model.mlp_size, model.hidden_size), model.hidden_size  # stacked ones are taken one by one
    return (3 * long * short + 2 * short * short) * torch.bfloat16.itemsize


def _units(needs: Sequence[BucketBytes], settings: StateSettings, num_layers: int) -> tuple[list[_Unit], _Unit]:
    """The units of all blocks, in forward order, and the root."""
    by_unit: dict[int, list[BucketBytes]] = {}
    for need in needs:
        by_unit.setdefault(need.plan.unit, []).append(need)
    root = _Unit.of(by_unit.pop(ROOT), settings)
    counts = {unit: sum(len(need.plan.layout.segments) for need in by_unit[unit]) for unit in sorted(by_unit)}
    per_block = sum(counts.values()) // num_layers  # parameters; blocks are equal
    ends = accumulate(counts.values())
    return [_Unit.of(by_unit[u], settings, (end - 1) // per_block) for u, end in zip(counts, ends, strict=True)], root


def _blocks_backward(
    units: list[_Unit], root: _Unit, settings: StateSettings, work: Activations, num_layers: int, adding: int
) -> int:
    """The most that the backward of any unit takes, besides what exists between forward and backward.

    Args:
        adding: as in `_gradients`.
    """
    most = 0
    together = min(settings.recomputed_together, num_layers)
    start_of: dict[int, int] = {}  # the index of the first unit of each piece
    for index, unit in enumerate(units):
        piece = unit.last_block // together  # the piece that is recomputed at a time
        start = start_of.setdefault(piece, index) if together > 1 else index  # from there on units are whole
        end = min((piece + 1) * together, num_layers)
        recomputed = work.recomputed * (together - (end - 1 - unit.last_block)) // together
        kept = work.kept * end // num_layers + recomputed + work.head_gradient
        here = sum(other.gathered for other in units[start:index] if not other.is_linear_tile) + unit.gathered
        if settings.zero.overlap_comm:
            # The shard of the unit that is being gathered stays until that is over.
            fetched = units[max(0, start - 1 - FETCHES_BEFORE_GATHER) : start]
            here += (units[start - 1].gathered if start else 0) + sum(other.coming for other in fetched)
        # G is allocated with a weight's first gradient; when it is complete, activations of earlier units' blocks still exist.
        earlier_blocks = units[index - 1].last_block + 1 if index else 0
        complete = work.kept * earlier_blocks // num_layers + work.head_gradient + _being_kept(units, index, settings)
        held = max(kept + max(work.block_working - unit.gradient, work.later_working), complete)
        most = max(most, here + held + _gradients(units, root, index, settings, adding))
    return most


def _embedding_backward(
    units: list[_Unit], root: _Unit, settings: StateSettings, work: Activations, adding: int
) -> int:
    """What the embedding's backward takes, besides what exists between forward and backward.

    Autograd adds up the gradients of both uses of a tied weight; then the root's gradient is made from the sum, and sent.
    """
    made = root.gradient - root.early
    sent = made + max(root.wire, _being_kept(units, -1, settings))
    taken = max(work.head_gradient + work.table_gradient, work.head_gradient + made, sent)
    next_gather = units[FIRST].gathered if settings.micro_batches > 1 else 0  # the next micro-batch begins with it
    return _gradients(units, root, -1, settings, adding) + taken + next_gather


def _being_kept(units: list[_Unit], index: int, settings: StateSettings) -> int:
    """When a unit's gradient is complete, pending reductions are waited for, and this rank's part gets memory of its own."""
    under_way = units[index + 1 : index + 1 + settings.reductions_under_way]
    return sum(other.reduced for other in under_way) if settings.sharding.gradients else 0


def _gradients(units: list[_Unit], root: _Unit, index: int, settings: StateSettings, adding: int) -> int:
    """Bytes of gradients that exist in the backward of a unit, beyond those of earlier micro-batches.

    Args:
        index: of the unit; -1 is the embedding, before the root's gradient is made.
        adding: bytes for the sum that a gradient goes into, while one leaves.
    """
    under_way = units[index + 1 : index + 1 + settings.reductions_under_way]
    done = units[index + 1 + len(under_way) :]
    whole = root.early + (units[index].gradient if index >= 0 else 0)
    if not settings.sharding.gradients:
        return whole + sum(unit.reduced for unit in units[index + 1 :]) + sum(unit.wire for unit in under_way)
    # A gradient that joins a sum in a file is waited for.
    is_sent = settings.optimizer_home == "cpu" or not (under_way or done)
    # Of the micro-batch before, the last one to leave the device stays until another leaves.
    behind = [root, *units] if settings.micro_batches > 1 and is_sent else []
    sent = [replace(unit, leaving=unit.leaving[1:]) for unit in under_way]  # all but the bucket that is reduced now
    leaving = _last_to_go([*sent, *done, *behind], MOST_TO_HOST + (root.wire > 0))  # one more while it is cast
    parts = sum(unit.wire or unit.gradient for unit in under_way) + leaving
    return whole + parts + (adding if done else 0) + sum(unit.reduced for unit in done)


def _last_to_go(units: Sequence[_Unit], count: int = MOST_TO_HOST) -> int:
    """Bytes of reduced gradients that have not arrived in another home: the last few buckets. `units` has the latest first."""
    return sum([nbytes for unit in units for nbytes in unit.leaving][:count])
