"""`--recompute auto`: what a block costs in each mode, measured on the block, and which blocks recompute what, to fit a budget.

When the backward of block i begins, the blocks before it hold what they kept, and block i has all of its activations again,
whether it kept them or has run again. Of L equal blocks that keep k_1, ..., k_L bytes, and N without recomputation,

    bytes(i) = k_1 + ... + k_{i-1} + N        largest for i = L, as every k is positive

So the last block recomputes nothing: that is free. Of the others only how many recompute what matters, not which ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megazero import activation_checkpointing, comm
from megazero.activation_checkpointing.storage import Storage
from megazero.model.block import Transformer, TransformerBlock
from megazero.model.config import BLOCK_MODES
from megazero.model.modes import in_mode
from megazero.mpu.random import RngState
from megazero.zero import GatheredParameters

_REPEATS = 3  # of which the fastest counts, after one that does not


@dataclass(frozen=True)
class BlockCost:
    """What one block costs in one mode."""

    nbytes: int  # kept from its forward to its backward
    seconds: float  # of running again what it does not keep


@dataclass(frozen=True)
class RecomputePlan:
    """What was decided, and from what."""

    modes: tuple[str, ...]
    costs: dict[str, BlockCost]
    budget_bytes: int

    def __str__(self) -> str:
        """For the log: blocks by mode, bytes of the budget, seconds that recomputation takes of each micro-batch."""
        counts = ", ".join(f"{self.modes.count(mode)} {mode}" for mode in BLOCK_MODES)
        seconds = sum(self.costs[mode].seconds for mode in self.modes)
        peak = peak_bytes(self.modes, self.costs)
        return (
            f"--recompute auto: blocks {counts}; {peak / 1e9:.4g} of {self.budget_bytes / 1e9:.4g} GB, "
            f"{seconds * 1e3:.1f} ms of recomputation per micro-batch"
        )


def decide_recompute(
    transformer: Transformer,
    *,
    seq_length: int,
    micro_batch_size: int,
    budget_bytes: int,
    mask: Tensor | None = None,
) -> RecomputePlan:
    """Measures the first block, and sets the mode of each block to what is fastest within the budget.

    Collective over the world: all ranks use the largest of their measurements, so that they decide alike. A block is run forward
    a few times, as in training; no gradient is made, and random streams are where they were afterwards.

    Args:
        transformer: all of its blocks are alike; on its device, and driven by its engine if it has one.
        seq_length: of the whole sequence.
        micro_batch_size: sequences.
        budget_bytes: for what the blocks keep for backward, on each rank, at most.
        mask: as blocks get it; None is causal.

    Raises:
        ValueError: nothing fits the budget.
    """
    costs = _agreed(measure_block(transformer.blocks[0], seq_length, micro_batch_size, mask))
    plan = RecomputePlan(tuple(plan_recompute(costs, len(transformer.layers), budget_bytes)), costs, budget_bytes)
    transformer.set_recompute(plan.modes)
    return plan


def peak_bytes(modes: Sequence[str], costs: Mapping[str, BlockCost]) -> int:
    """The most that equal blocks with these modes hold at a time, for and in their backward."""
    return sum(costs[mode].nbytes for mode in modes[:-1]) + costs["none"].nbytes


def plan_recompute(costs: Mapping[str, BlockCost], num_blocks: int, budget_bytes: int) -> list[str]:
    """The mode of each block: what loses the least time of all that fits the budget; of equally fast ones the smallest.

    Args:
        costs: of a block, for each of `BLOCK_MODES`.
        num_blocks: equal blocks, at least one.
        budget_bytes: for `peak_bytes`.

    Raises:
        ValueError: nothing fits.
    """
    plans = (  # numbers of blocks, of which the last is "none"
        {"full": full, "selective": selective, "none": num_blocks - full - selective}
        for full in range(num_blocks)
        for selective in range(num_blocks - full)
    )
    rated = (
        (
            sum(count * costs[mode].seconds for mode, count in plan.items()),
            sum(count * costs[mode].nbytes for mode, count in plan.items()),
            plan,
        )
        for plan in plans
    )
    best = min((plan for plan in rated if plan[1] <= budget_bytes), key=itemgetter(0, 1), default=None)
    if best is None:
        least = min(peak_bytes([mode] * (num_blocks - 1) + ["none"], costs) for mode in BLOCK_MODES)
        raise ValueError(
            f"--recompute-budget-gb {budget_bytes / 1e9:g} is {budget_bytes:,} bytes, and {num_blocks} blocks need {least:,} "
            f"even if all but the last are recomputed: one block alone has {costs['none'].nbytes:,} bytes of activations in its "
            "backward. Raise it, lower --batch-size, or cut activations by --sequence-parallel and a larger "
            "--model-parallel-size."
        )
    return [mode for mode, count in best[2].items() for _ in range(count)]


def measure_block(
    block: TransformerBlock, seq_length: int, micro_batch_size: int, mask: Tensor | None = None
) -> dict[str, BlockCost]:
    """Bytes that a block keeps in each mode, and the time of what it runs again: all of it, or the inside of its attention."""
    attention, group = block.attention, block.attention.dense.group
    checkpointer = attention.checkpointer or activation_checkpointing.default
    weight = attention.dense.weight  # [h, h/t]
    was_selective, streams = attention.recomputes_core, RngState.capture()
    slices = group.size() if block.sequence_parallel else 1
    with GatheredParameters(block.parameters()), torch.enable_grad(), in_mode(block, training=True):
        like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        # Without rotary positions: they change no number of bytes.
        x = torch.randn(seq_length // slices, micro_batch_size, weight.size(0), **like).requires_grad_()
        heads = weight.size(1) // attention.head_size
        q, k, v = (
            torch.randn(micro_batch_size, n, seq_length, attention.head_size, **like).requires_grad_()
            for n in (heads, *[heads // attention.heads_per_key] * 2)
        )
        try:
            nbytes = {}
            for mode in ("none", "selective"):
                attention.recomputes_core = mode == "selective"
                nbytes[mode] = _kept_bytes(lambda: block(x, mask), block, mask, checkpointer.storage)
            attention.recomputes_core = False
            # What a call keeps of its input, as it is told to keep it.
            checkpoint = checkpointer.checkpoint_sharded if slices > 1 else checkpointer.checkpoint
            run = partial(checkpoint, block, x.detach().clone().requires_grad_(), mask)
            nbytes["full"] = _kept_bytes(run, block, mask, checkpointer.storage)
            core = partial(attention.core(is_causal=mask is None), q, k, v, mask)
            seconds = {
                "none": 0.0,
                "selective": _fastest(core),
                "full": _fastest(partial(block, x, mask)),
            }
        finally:
            attention.recomputes_core = was_selective
            streams.restore()
    return {mode: BlockCost(nbytes[mode], seconds[mode]) for mode in BLOCK_MODES}


class SavedTensors:
    """The memory of tensors that autograd has saved: each storage once, however many of its views were saved.

    It holds on to that memory, so that no storage is taken for another one that lay in the same place.
    """

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        self._ignore = list(ignore)
        self._storages: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def add(self, x: Tensor) -> Tensor:
        """Counts the tensor, unless it lies in the memory of an ignored one as that is now. Returns it."""
        storage = x.untyped_storage()
        place = storage.data_ptr()
        if place not in {other.untyped_storage().data_ptr() for other in self._ignore}:
            self._storages[x.device, place] = storage
        return x


@contextmanager
def saved_tensors(ignore: Iterable[Tensor] = ()) -> Iterator[SavedTensors]:
    """Counts what autograd saves inside. What checkpoints keep in copies of their own is their storage's `kept_bytes`.

    Args:
        ignore: parameters, and what is there anyway.
    """
    saved = SavedTensors(ignore)
    with saved_tensors_hooks(saved.add, lambda x: x):
        yield saved


def _kept_bytes(run: Callable[[], Tensor], block: TransformerBlock, mask: Tensor | None, storage: Storage) -> int:
    """Bytes on the device that are kept for the backward of what `run` returns, without the mask that all blocks share."""
    before = storage.kept_bytes
    with saved_tensors([*block.parameters(), *([] if mask is None else [mask])]) as saved:
        y = run()
    copies = 0 if storage.is_elsewhere else storage.kept_bytes - before
    del y
    return saved.nbytes + copies


def _fastest(run: Callable[[], Any]) -> float:
    times, synchronize = [], torch.get_device_module(comm.local_device()).synchronize
    for _ in range(1 + _REPEATS):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _agreed(costs: dict[str, BlockCost]) -> dict[str, BlockCost]:
    """The largest of all ranks' measurements."""
    own = torch.tensor([[costs[mode].nbytes, costs[mode].seconds] for mode in BLOCK_MODES], dtype=torch.float64)
    own = own.to(comm.local_device())
    most = comm.all_reduced(own, comm.world(), torch.distributed.ReduceOp.MAX).tolist()
    return {
        mode: BlockCost(math.ceil(nbytes), seconds) for mode, (nbytes, seconds) in zip(BLOCK_MODES, most, strict=True)
    }
