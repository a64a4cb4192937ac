"""The matrix products of column-parallel layers of one x, with their communication hidden behind their own backward.

Every rank multiplies the same x with its own columns, so the gradients of x add up over the ranks:

    y = x W^T + b          grad_x = all_reduce(grad_y W)      grad_W = grad_y^T x      grad_b = sum(grad_y)

As two autograd nodes (`copy_to_model_parallel_region`, then F.linear) the all-reduce starts when grad_W is finished. As one
node it starts as soon as the partial grad_x exists and runs while grad_W and grad_b are computed. On CUDA the all-reduce
must be launched before the product of grad_W occupies the device; CUDA_DEVICE_MAX_CONNECTIONS=1 guarantees the order.

Sequence-parallel (arXiv:2205.05198, sec. 4.2.2) each rank has a slice of x. It is gathered for the product, and the gradient of x
is reduce-scattered. Only the slice is kept, and gathered again in backward while the gradient of x is computed.

Several layers of one x communicate once: x is gathered for all of them, and their gradients of x are added before they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
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
        ctx: Any, group: ProcessGroup, sequence_parallel: bool, x: Tensor, *weights_and_biases: Any
    ) -> tuple[Tensor, ...]:
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3::2]) else None, *weights)
        if sequence_parallel:
            x, work = start_sequence_gather(x, group)  # [s, ..., i] of [s/t, ..., i]
            work.wait()
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # [..., o/t]

    @staticmethod
    @once_differentiable("a column-parallel layer with overlap_backward or sequence_parallel")
    def backward(ctx: Any, saved: tuple[Tensor, ...], *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = saved  # [..., i] as it came, [o/t, i] each
        grad_x = gathering = reducing = None
        all_rows = [grad.reshape(-1, grad.size(-1)) for grad in grads]  # [tokens, o/t] each
        needs_weight, needs_bias = ctx.needs_input_grad[3::2], ctx.needs_input_grad[4::2]
        if ctx.sequence_parallel and any(needs_weight):
            x, gathering = start_sequence_gather(x, ctx.group)
        if ctx.needs_input_grad[2]:
            # This rank's partial sum [..., i]: ours, so the collective may be in place.
            grad_x = all_rows[0].mm(weights[0])
            for rows, weight in zip(all_rows[1:], weights[1:], strict=True):
                grad_x.addmm_(rows, weight)
            grad_x = grad_x.view(*grads[0].shape[:-1], weights[0].size(1))
            if ctx.sequence_parallel:
                grad_x, reducing = start_sequence_reduce_scatter(grad_x, ctx.group)  # [s/t, ..., i]
            else:
                reducing = comm.start_all_reduce(grad_x, ctx.group)
        if gathering is not None:
            gathering.wait()
        of_parameters: list[Tensor | None] = []
        for rows, weight_does, bias_does in zip(all_rows, needs_weight, needs_bias, strict=True):
            of_parameters.append(rows.t().mm(x.reshape(-1, x.size(-1))) if weight_does else None)
            of_parameters.append(rows.sum(0) if bias_does else None)
        if reducing is not None:
            reducing.wait()
        if ctx.sequence_parallel and grad_x is not None:
            grad_x = grad_x.clone()  # without the rest of the buffer
        return None, None, grad_x, *of_parameters


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    overlap: bool | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """`F.linear(x, weight, bias)` with the gradient of `x` summed over `group`.

    Args:
        x: [..., i], the same on every rank of `group`; with `sequence_parallel` this rank's slice [s/t, ..., i].
        weight: [o/t, i].
        bias: [o/t] or None.
        group, overlap, sequence_parallel: as for `column_linears`.

    Returns:
        [..., o/t], this rank's columns, of the whole sequence.
    """
    if group.size() == 1:  # a common case, in which blocks are often small
        return F.linear(x, weight, bias)
    (y,) = column_linears(x, [(weight, bias)], group, overlap, sequence_parallel)
    return y


def column_linears(
    x: Tensor,
    parameters: Sequence[tuple[Tensor, Tensor | None]],
    group: ProcessGroup,
    overlap: bool | None = None,
    sequence_parallel: bool = False,
) -> tuple[Tensor, ...]:
    """`column_linear` of `x` with each weight and bias, with one message each way for all of them.

    Under autocast, x is cast before the mapping, so that the gradient of x travels in the lower precision.

    Args:
        overlap: hide the all-reduce of x's gradient behind the computation of the weight's; None does so on CUDA. The numbers
            are the same. torch.compile cannot trace an asynchronous collective: there the layer compiles without it.
        sequence_parallel: gather x along its first dimension, and reduce-scatter its gradient; always hidden in this way.
    """
    if group.size() > 1:
        x, parameters = as_autocast(x), [(as_autocast(weight), bias) for weight, bias in parameters]
        if sequence_parallel:
            return outside_graphs(_ColumnLinear.apply, group, True, x, *chain.from_iterable(parameters))
        if not torch.compiler.is_compiling() and (comm.has_streams(x.device) if overlap is None else overlap):
            return _ColumnLinear.apply(group, False, x, *chain.from_iterable(parameters))
        x = copy_to_model_parallel_region(x, group)
    return tuple(F.linear(x, weight, bias) for weight, bias in parameters)
