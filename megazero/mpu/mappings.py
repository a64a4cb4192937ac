"""The ways in which a tensor enters or leaves the model-parallel region (Megatron-LM, arXiv:1909.08053, sec. 3, fig. 3).

    copy     identity            / all-reduce        f of the paper: every rank uses x whole; their gradients for it add up
    reduce   all-reduce          / identity          g of the paper: every rank has a partial sum
    scatter  own slice           / all-gather        of the last dimension
    gather   all-gather          / own slice         of the last dimension

Forward / backward. All of them are out of place: autograd may share both x and its gradient with another branch (a
residual connection), so a collective in place would count that branch too. Who has just made a partial sum and gives it up
says so (`in_place`). Backward functions are made of the conjugate mapping, so that they can be differentiated again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megazero import comm
from megazero.comm import ProcessGroup
from megazero.mpu.groups import group_or_default
from megazero.mpu.utils import divide


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # x [...], same on every rank of group
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # grad [...], this rank's partial sum
        return _Reduce.apply(grad, ctx.group, False), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, in_place: bool) -> Tensor:  # x [...], this rank's partial sum
        ctx.group = group
        if not in_place:
            return comm.all_reduced(x, group)
        ctx.mark_dirty(x)
        comm.start_all_reduce(x, group).wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # grad [...], same on every rank of group
        return _Copy.apply(grad, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # x [..., h], same on every rank of group
        ctx.group = group
        width = divide(x.size(-1), group.size())
        return x.narrow(-1, group.rank() * width, width).clone(memory_format=torch.contiguous_format)  # [..., h/t]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # grad [..., h/t]
        return _Gather.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # x [..., h/t], this rank's slice
        ctx.group = group
        return torch.cat(comm.all_gathered(x, group), dim=-1)  # [..., h]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # grad [..., h], same on every rank of group
        return _Scatter.apply(grad, ctx.group), None


def copy_to_model_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """`x`; its gradient is summed over `group` (the model-parallel group by default)."""
    group = group_or_default(group)
    return x if group.size() == 1 else _Copy.apply(x, group)


def reduce_from_model_parallel_region(
    x: Tensor, group: ProcessGroup | None = None, *, in_place: bool = False
) -> Tensor:
    """The sum of `x` over `group`; its gradient is passed through.

    Args:
        in_place: `x`, contiguous, is nobody else's, and becomes the sum. torch.compile sees to that by itself.
    """
    group = group_or_default(group)
    return x if group.size() == 1 else _Reduce.apply(x, group, in_place and not torch.compiler.is_compiling())


def scatter_to_model_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """This rank's slice of the last dimension of `x`, contiguous; its gradient is gathered.

    Raises:
        ValueError: the last dimension is not divisible by the size of `group`.
    """
    group = group_or_default(group)
    return x if group.size() == 1 else _Scatter.apply(x, group)


def gather_from_model_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """`x` of every rank of `group` side by side in the last dimension; its gradient is sliced."""
    group = group_or_default(group)
    return x if group.size() == 1 else _Gather.apply(x, group)


# The words that Megatron-LM has used since v2.
copy_to_tensor_model_parallel_region = copy_to_model_parallel_region
gather_from_tensor_model_parallel_region = gather_from_model_parallel_region
reduce_from_tensor_model_parallel_region = reduce_from_model_parallel_region
scatter_to_tensor_model_parallel_region = scatter_to_model_parallel_region
