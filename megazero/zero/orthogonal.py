"""Muon's directions of whole matrices, of which ranks hold flat parts: gathered, made orthogonal, and scattered again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapreplace
from typing import Any

import torch
from torch import Tensor

from megazero import comm
from megazero.comm import Work
from megazero.comm.lane import Finished
from megazero.mpu.partition import Partition
from megazero.optim.muon import orthogonalized, rate_factor
from megazero.zero.bucket import Bucket
from megazero.zero.layout import NO_GROUP, Segment, Span
from megazero.zero.sliced import Slice, SlicedOptimizer
from megazero.zero.storage import part_of, view_of


class Orthogonal:
    """The callable that an engine's `Muon` uses for the part of its step that needs whole matrices. Collective over the world.

    For each bucket, every rank puts its range of the directions into a flat bf16 buffer of the bucket's size. Then:

    1. An all-gather makes the directions whole.
    2. Each matrix is made orthogonal by one rank.
    3. A reduce-scatter of the results gives every rank its range. A rank's results are zero where another rank did the work.

    So at every stage an update sends as much as one more gradient and one more gather in bf16, the work is divided by the number
    of ranks, and the numbers are the same bit for bit. Each tensor-parallel rank gathers its own part of a matrix.

    Args:
        cuts: how parameters are cut over the tensor-parallel ranks, by name. A parameter that stacks several matrices (Q, K and
            V) is processed as separate matrices.

    Raises:
        ValueError: gradients accumulate in 16 bits, which directions do not fit into; or a parameter is not a matrix.
    """

    def __init__(
        self, optimizer: SlicedOptimizer, cuts: Mapping[str, Partition], model_group: comm.ProcessGroup
    ) -> None:
        self._optimizer, self._cuts, self._model_group = optimizer, cuts, model_group
        for segment in [s for bucket in optimizer.buckets for s in bucket.layout.segments if self._is_muons(s)]:
            if len(segment.shape) != 2:
                raise ValueError(
                    f"Muon takes matrices, and a group with use_muon has {segment.name!r} of shape {segment.shape}. Put it into "
                    "a group without."
                )
        for bucket in self._buckets:
            if bucket.gradient.dtype != torch.float32:
                raise ValueError(
                    f"Muon writes directions where gradients were, and those of unit {bucket.name!r} add up in "
                    f"{bucket.gradient.dtype}. Let them add up in fp32: data_types.grad_accum_dtype, ZeroConfig.grad_dtype."
                )

    @property
    def _buckets(self) -> list[Bucket]:
        """The buckets with matrices, in the same order on every rank."""
        return [bucket for bucket in self._optimizer.buckets if self._matrices(bucket)]

    def _is_muons(self, of: Segment | Span) -> bool:
        return of.group != NO_GROUP and bool(self._optimizer.param_groups[of.group].get("use_muon"))

    def _matrices(self, bucket: Bucket) -> list[Segment]:
        return [s for s in bucket.layout.segments if self._is_muons(s) and self._optimizer.is_trained(s)]

    def __call__(self, _: Sequence[Any]) -> None:
        """Replaces the directions of all matrices; the next bucket's are gathered while this one's are worked on."""
        buckets = self._buckets
        loads = [(0, rank) for rank in range(self._optimizer.buckets[0].channel.num_ranks)]  # a heap
        gathers = map(self._gather, buckets)  # each starts when it is asked for
        coming = next(gathers, None)
        leaving: tuple[Bucket, Tensor, Work] | None = None
        for bucket in buckets:
            assert coming is not None
            (whole, work), coming = coming, next(gathers, None)
            work.wait()
            self._work_on(bucket, whole, loads)
            if leaving is not None:
                self._take(*leaving)
            leaving = bucket, whole, self._reduce(bucket, whole)
        if leaving is not None:
            self._take(*leaving)

    def _pieces(self, bucket: Bucket) -> list[Slice]:
        return [p for p in self._optimizer.slices_of[bucket] if p.is_trained and self._is_muons(p.span)]

    def _gather(self, bucket: Bucket) -> tuple[Tensor, Work]:
        whole = torch.zeros(bucket.layout.numel, dtype=torch.bfloat16, device=bucket.device)
        for piece in self._pieces(bucket):
            assert piece.master.grad is not None
            whole[piece.span.start : piece.span.stop].copy_(piece.master.grad, non_blocking=True)
        if not bucket.sharding.optimizer:
            return whole, Finished()  # every rank has all directions
        return whole, bucket.channel.all_gather_(whole, bucket.name)

    def _work_on(self, bucket: Bucket, whole: Tensor, loads: list[tuple[int, int]]) -> None:
        """Makes this rank's matrices orthogonal, the others zero. Largest first, each goes to the rank with least work so far."""
        groups = self._optimizer.param_groups
        for segment in sorted(self._matrices(bucket), key=lambda segment: -_cost(segment)):
            load, owner = loads[0]
            heapreplace(loads, (load + _cost(segment), owner))
            matrix = view_of(whole, segment)
            if owner == bucket.channel.group.rank():
                matrix.copy_(self._orthogonalized(matrix, segment, groups[segment.group]["ns_steps"]))
            else:
                matrix.zero_()

    def _orthogonalized(self, local: Tensor, segment: Segment, steps: int) -> Tensor:
        """This tensor-parallel rank's part of the result, from its part of the matrix, or of several stacked ones."""
        cut = self._cuts.get(segment.name)
        if cut is None:
            return orthogonalized(local, steps)
        group = self._model_group
        stacked = cut.merge(comm.all_gathered(local, group)).chunk(cut.stride, cut.dim)
        result = torch.cat([orthogonalized(matrix, steps) for matrix in stacked], cut.dim)
        return cut.slice_like(local.shape, result, group.rank(), group.size())

    def _shape(self, segment: Segment) -> list[int]:
        """[rows, columns] of the whole matrix, or of each of several stacked ones."""
        cut = self._cuts.get(segment.name)
        if cut is None:
            return list(segment.shape)
        shape = list(cut.full_shape(segment.shape))
        shape[cut.dim] //= cut.stride
        return shape

    def _reduce(self, bucket: Bucket, whole: Tensor) -> Work:
        start = bucket.channel.reduce_scatter_ if bucket.sharding.optimizer else bucket.channel.all_reduce_
        return start(whole, bucket.name)

    def _take(self, bucket: Bucket, whole: Tensor, work: Work) -> None:
        """Writes the results in this rank's range, scaled for the shapes of their matrices."""
        work.wait()
        groups = self._optimizer.param_groups
        for piece in self._pieces(bucket):
            assert piece.master.grad is not None
            start = piece.span.start
            found = whole[start : piece.span.stop].to(piece.master.device)  # one copy if O is on the host
            for segment in self._matrices(bucket):
                (mine, _), (new, _) = (part_of(values, start, segment) for values in (piece.master.grad, found))
                factor = rate_factor(groups[segment.group]["adjust_lr_fn"], *self._shape(segment))
                mine.copy_(new).mul_(factor)


def _cost(segment: Segment) -> int:
    """The cost of making a matrix orthogonal, up to a factor."""
    return segment.numel * min(segment.shape)
