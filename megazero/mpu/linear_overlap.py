"""The matrix product of a column-parallel layer, with its communication hidden behind its own backward.

Every rank multiplies the same x with its own columns, so the gradients of x add up over the ranks:

    y = x W^T + b          grad_x = all_reduce(grad_y W)      grad_W = grad_y^T x      grad_b = sum(grad_y)

As two autograd nodes (`copy_to_model_parallel_region`, then F.linear) the all-reduce starts when grad_W is finished. As one
node it starts as soon as the partial grad_x exists and runs while grad_W and grad_b are computed. On CUDA the all-reduce
must be launched before the product of grad_W occupies the device; CUDA_DEVICE_MAX_CONNECTIONS=1 guarantees the order.

Sequence-parallel (arXiv:2205.05198, sec. 4.2.2) each rank has a slice of x. It is gathered for the product, and the gradient of x
is reduce-scattered. Only the slice is kept, and gathered again in backward while the gradient of x is computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero import comm
from megazero.comm import ProcessGroup
from megazero.mpu.mappings import copy_to_model_parallel_region
from megazero.mpu.sequence_mappings import start_sequence_gather, start_sequence_reduce_scatter
from megazero.mpu.utils import as_autocast, once_differentiable, outside_graphs


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, sequence_parallel: bool
    ) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        if sequence_parallel:
            x, work = start_sequence_gather(x, group)  # [s, ..., i] of [s/t, ..., i]
            work.wait()
        return F.linear(x, weight, bias)  # [..., o/t]

    @staticmethod
    @once_differentiable("a column-parallel layer with overlap_backward or sequence_parallel")
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = saved  # [..., i] as it came, [o/t, i]
        grad_x = grad_weight = grad_bias = gathering = reducing = None
        rows = grad.reshape(-1, grad.size(-1))  # [tokens, o/t]
        if ctx.sequence_parallel and ctx.needs_input_grad[1]:
            x, gathering = start_sequence_gather(x, ctx.group)
        if ctx.needs_input_grad[0]:
            # This rank's partial sum [..., i]: ours, so the collective may be in place.
            grad_x = rows.mm(weight).view(*grad.shape[:-1], weight.size(1))
            if ctx.sequence_parallel:
                grad_x, reducing = start_sequence_reduce_scatter(grad_x, ctx.group)  # [s/t, ..., i]
            else:
                reducing = comm.start_all_reduce(grad_x, ctx.group)
        if gathering is not None:
            gathering.wait()
        if ctx.needs_input_grad[1]:
            grad_weight = rows.t().mm(x.reshape(-1, x.size(-1)))
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        if reducing is not None:
            reducing.wait()
        if ctx.sequence_parallel and grad_x is not None:
            grad_x = grad_x.clone()  # without the rest of the buffer
        return grad_x, grad_weight, grad_bias, None, None


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    overlap: bool | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """`F.linear(x, weight, bias)` with the gradient of `x` summed over `group`.

    Under autocast, x is cast before the mapping, so that the gradient of x travels in the lower precision.

    Args:
        x: [..., i], the same on every rank of `group`; with `sequence_parallel` this rank's slice [s/t, ..., i].
        weight: [o/t, i].
        bias: [o/t] or None.
        overlap: hide the all-reduce of x's gradient behind the computation of the weight's; None does so on CUDA. The numbers
            are the same. torch.compile cannot trace an asynchronous collective: there the layer compiles without it.
        sequence_parallel: gather x along its first dimension, and reduce-scatter its gradient; always hidden in this way.

    Returns:
        [..., o/t], this rank's columns, of the whole sequence.
    """
    if group.size() == 1:
        return F.linear(x, weight, bias)
    x, weight = as_autocast(x), as_autocast(weight)
    if sequence_parallel:
        return outside_graphs(_ColumnLinear.apply, x, weight, bias, group, True)
    if not torch.compiler.is_compiling() and (comm.has_streams(x.device) if overlap is None else overlap):
        return _ColumnLinear.apply(x, weight, bias, group, False)
    return F.linear(copy_to_model_parallel_region(x, group), weight, bias)
