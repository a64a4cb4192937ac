"""What a rank's accelerator holds at the moments of a step that can be its peak: states, buffers and activations together.

In forward activations pile up; the loss adds the logits and their gradient. In backward they go, block by block, while gradients
come: that of the head's weight first, which is tied to the embedding and so waits in autograd until the end, where the root's is
made of it; then each block's, whole until it is reduced, which goes on during the next block's backward. The update finds nothing
but states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
class _Block:
    """Bytes of one block, or of the root; where tiles make a block several units, one of them is whole at a time."""

    gathered: int = 0  # of the largest unit's parameters, whole
    gradient: int = 0  # of its gradient, whole
    early: int = 0  # of the root's gradient, what is there in the blocks' backward
    wire: int = 0  # of what travels, where that is not the gradient itself
    reduced: int = 0  # what stays of the block's gradients on the accelerator: this rank's part, or the whole
    leaving: tuple[int, ...] = ()  # of this part, over the link to another home: by bucket, the last one first
    coming: int = 0  # of this rank's part of the parameters, where it comes over the link ahead of its gather

    @classmethod
    def of(cls, needs: Sequence[BucketBytes], settings: StateSettings) -> _Block:
        """That of the buckets of one block."""
        units = [[need for need in needs if need.plan.unit == n] for n in {need.plan.unit for need in needs}]
        is_sharded = settings.sharding.gradients
        return cls(
            max(sum(need.whole_parameters for need in unit) for unit in units),
            max(sum(need.whole_gradient for need in unit) for unit in (units if is_sharded else [needs])),
            sum(need.early_gradient for need in needs),
            max(need.wire for need in needs),
            sum(need.gradients for need in needs),
            tuple(need.leaving for need in reversed(needs) if is_sharded and need.leaving),
            sum(need.coming for need in needs),
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

    Gradients are made by backward, one after the other. So with one micro-batch the peak lies where most activations are; a later
    micro-batch finds the gradients of the first.

    Args:
        needs: of each bucket, the blocks' and the root's.
        states: the sums of these.
        update_working: what the optimizer makes in an update, beside what `states` counts.
    """
    blocks, root = _blocks(needs, settings, num_layers)
    has_earlier = settings.micro_batches > 1
    adding = adding_bytes(needs, settings)
    rest = states.at_rest + (states.gradients if has_earlier else 0)
    is_default = settings.zero.gather_limits == GatherLimits()
    between = rest + (root.gathered if is_default else states.gathered)  # forward and backward
    last_block = blocks[-1].gathered if is_default else 0  # it stays, as its backward comes next
    backward = 0
    together = min(settings.recomputed_together, num_layers)
    for first in range(0, num_layers, together):
        last = min(first + together, num_layers) - 1
        here = sum(block.gathered for block in blocks[first : last + 1])
        if settings.zero.overlap_comm:
            fetched = blocks[max(0, first - 1 - FETCHES_BEFORE_GATHER) : max(0, first - 1)]
            here += (blocks[first - 1].gathered if first else 0) + sum(block.coming for block in fetched)
        gradients = _gradients(blocks, root, last, settings, has_earlier, adding)
        kept = work.kept * (last + 1) // num_layers + work.recomputed + work.block_working + work.head_gradient
        backward = max(backward, (between + here if is_default else between) + gradients + kept)
    embedding = _gradients(blocks, root, -1, settings, has_earlier, adding)
    # Autograd adds up the gradients of both uses of the tied weight; then the root's is made of the sum, and travels.
    made = 0 if has_earlier and not settings.sharding.gradients else root.gradient - root.early
    embedding += max(2 * work.head_gradient, work.head_gradient + made, made + root.wire)
    embedding += blocks[FIRST].gathered if has_earlier and is_default else 0  # the next micro-batch begins with it
    last_to_go = _last_to_go([root, *blocks])
    return {
        "loss": between + last_block + work.saved + work.loss_working + (last_to_go if has_earlier else 0),
        "blocks' backward": backward,
        "embedding's backward": between + embedding,
        "update": states.resident + max(states.updating + update_working, last_to_go),
    }


def muon_working(model: GPT2Config) -> int:
    """Bytes while Muon works on the largest matrix, whole also where it is cut: that, two of the iteration, two short squares."""
    long, short = sorted((model.mlp_size, model.hidden_size), reverse=True)
    return (3 * long * short + 2 * short * short) * torch.bfloat16.itemsize


def _blocks(needs: Sequence[BucketBytes], settings: StateSettings, num_layers: int) -> tuple[list[_Block], _Block]:
    units = 1 + max(need.plan.unit for need in needs)
    per_block = units // num_layers
    by_block: list[list[BucketBytes]] = [[] for _ in range(num_layers)]
    for need in needs:
        if need.plan.unit != ROOT:
            by_block[need.plan.unit // per_block].append(need)
    root = [need for need in needs if need.plan.unit == ROOT]
    return [_Block.of(block, settings) for block in by_block], _Block.of(root, settings)


def _gradients(
    blocks: list[_Block], root: _Block, index: int, settings: StateSettings, has_earlier: bool, adding: int
) -> int:
    """What is there of gradients in the backward of a block, beyond those of earlier micro-batches.

    Args:
        index: of the block; -1 is the embedding, before the root's gradient is made.
        has_earlier: a micro-batch came before, whose shards stay; the last to leave the device is there until another leaves.
        adding: while one leaves, for the sum that it goes into.
    """
    under_way = blocks[index + 1 : index + 1 + settings.reductions_under_way]
    done = blocks[index + 1 + len(under_way) :]
    whole = root.early + (blocks[index].gradient if index >= 0 else 0)
    if not settings.sharding.gradients:
        stay = 0 if has_earlier else whole + sum(block.reduced for block in blocks[index + 1 :])
        return stay + sum(block.wire for block in under_way)
    # What joins a sum in a file is waited for.
    is_sent = settings.optimizer_home == "cpu" or not (under_way or done)
    behind = [root, *blocks] if has_earlier and is_sent else []
    sent = [replace(block, leaving=block.leaving[1:]) for block in under_way]  # all but the bucket that is reduced now
    leaving = _last_to_go([*sent, *done, *behind], MOST_TO_HOST + (root.wire > 0))  # one more while it is cast
    parts = sum(block.wire or block.gradient for block in under_way) + leaving
    return whole + parts + (adding if done else 0) + (0 if has_earlier else sum(block.reduced for block in done))


def _last_to_go(blocks: Sequence[_Block], count: int = MOST_TO_HOST) -> int:
    """Of reduced gradients, what has not arrived in another home: the last few buckets, of `blocks` from the last one on."""
    return sum([nbytes for block in blocks for nbytes in block.leaving][:count])
