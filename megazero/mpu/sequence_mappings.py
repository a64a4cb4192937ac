"""The ways in which a tensor enters or leaves the sequence-parallel region, where ranks hold slices of the first dimension.

    scatter         own slice        / all-gather
    gather          all-gather       / reduce-scatter     every rank uses x whole, as for copy of `mappings`
    reduce-scatter  reduce-scatter   / all-gather         every rank has a partial sum, as for reduce of `mappings`
    copy            identity         / all-reduce         of parameters that each rank uses on its slice, in one message

Forward / backward (Korthikanti et al., arXiv:2205.05198, sec. 4.2.2), with the rules of `mappings`. A layer that is used with
and without sequence parallelism begins with `enter_parallel_region` and ends with `leave_parallel_region`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megazero.comm import Channel, ProcessGroup, Work
from megazero.mpu.groups import group_or_default
from megazero.mpu.mappings import copy_to_model_parallel_region, reduce_from_model_parallel_region
from megazero.mpu.utils import as_autocast, outside_graphs


@functools.lru_cache(maxsize=4)  # more than are in use: those of groups that are gone end
def sequence_channel(group: ProcessGroup) -> Channel:
    """What moves slices of sequences over `group`. Collective in the first call for a group, as a `Channel` is: the engine's.

    A channel, because a reduce-scatter of gloo's own sends as much as an all-reduce. Its traffic counts what was moved.
    """
    return Channel(group)


def start_sequence_gather(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """A buffer of the shape [s, ...] that holds the slices [s/t, ...] of all ranks when the work is done."""
    whole = x.new_empty(x.size(0) * group.size(), *x.shape[1:])
    whole.view(group.size(), *x.shape)[group.rank()].copy_(x)
    return whole, sequence_channel(group).all_gather_(whole.view(-1), "sequence gather")


def start_sequence_reduce_scatter(partial: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """This rank's slice [s/t, ...] of the sum of `partial` [s, ...], when the work is done; `partial` is overwritten.

    The slice is a view of `partial`, which must be contiguous.
    """
    work = sequence_channel(group).reduce_scatter_(partial.view(-1), "sequence reduce-scatter")
    return partial.chunk(group.size())[group.rank()], work


def sequence_slice_length(length: int, ranks: int) -> int:
    """What one of `ranks` ranks holds of a sequence.

    Raises:
        ValueError: it does not come out even.
    """
    if length % ranks:
        raise ValueError(
            f"--sequence-parallel cuts sequences into equal slices, and {length} tokens (--seq-length; the first dimension) do "
            f"not divide by --model-parallel-size {ranks}. Use a multiple of it, or drop --sequence-parallel."
        )
    return length // ranks


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # x [s, ...], same on every rank of group
        ctx.group = group
        length = sequence_slice_length(x.size(0), group.size())
        return x.narrow(0, group.rank() * length, length).clone(memory_format=torch.contiguous_format)  # [s/t, ...]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # grad [s/t, ...]
        return _GatherSequence.apply(grad, ctx.group, False), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, has_partial_grad: bool) -> Tensor:  # x [s/t, ...]
        ctx.group, ctx.has_partial_grad = group, has_partial_grad
        whole, work = start_sequence_gather(x, group)
        work.wait()
        return whole  # [s, ...]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # grad [s, ...]
        if ctx.has_partial_grad:
            return _ReduceScatterSequence.apply(grad, ctx.group, False), None, None
        return _ScatterSequence.apply(grad, ctx.group), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, in_place: bool) -> Tensor:  # x [s, ...], a partial sum
        ctx.group = group
        sequence_slice_length(x.size(0), group.size())
        if not in_place:
            x = x.clone(memory_format=torch.contiguous_format)
        own, work = start_sequence_reduce_scatter(x, group)
        work.wait()
        return own.clone()  # [s/t, ...] without the rest of the buffer

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # grad [s/t, ...]
        return _GatherSequence.apply(grad, ctx.group, True), None, None


class _CopyParameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # of this rank's slice of the sequence
        own = torch.cat([grad.reshape(-1) for grad in grads])
        wide = own.to(torch.promote_types(own.dtype, torch.float32))  # a sum in 16 bits would be rounded at every rank
        flat = reduce_from_model_parallel_region(wide, ctx.group).to(own.dtype)
        parts = flat.split([grad.numel() for grad in grads])
        return None, *(part.view(grad.shape) for part, grad in zip(parts, grads, strict=True))


def scatter_to_sequence_parallel_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """This rank's slice [s/t, ...] of the first dimension of `x` [s, ...], contiguous; its gradient is gathered.

    Raises:
        ValueError: the first dimension is not divisible by the size of `group`.
    """
    group = group_or_default(group)
    return x if group.size() == 1 else outside_graphs(_ScatterSequence.apply, x, group)


def gather_from_sequence_parallel_region(
    x: Tensor, tensor_parallel_output_grad: bool = True, group: ProcessGroup | None = None
) -> Tensor:
    """The slices [s/t, ...] of every rank of `group`, one behind the other: [s, ...].

    Args:
        tensor_parallel_output_grad: what follows is cut over the ranks, so each has a part of the gradient's sum: it is
            reduce-scattered. False: what follows is the same on every rank: the gradient is sliced.
    """
    group = group_or_default(group)
    return x if group.size() == 1 else outside_graphs(_GatherSequence.apply, x, group, tensor_parallel_output_grad)


def reduce_scatter_to_sequence_parallel_region(
    x: Tensor, group: ProcessGroup | None = None, *, in_place: bool = False
) -> Tensor:
    """This rank's slice [s/t, ...] of the sum over `group` of `x` [s, ...]; its gradient is gathered.

    Args:
        in_place: `x`, contiguous, is nobody else's, and is overwritten.

    Raises:
        ValueError: the first dimension is not divisible by the size of `group`.
    """
    group = group_or_default(group)
    return x if group.size() == 1 else outside_graphs(_ReduceScatterSequence.apply, x, group, in_place)


def copy_parameters_to_sequence_parallel_region(
    parameters: Sequence[Tensor], group: ProcessGroup | None = None
) -> tuple[Tensor, ...]:
    """The parameters, to be used on this rank's slice of the sequence; their gradients are summed over `group`, in fp32 at least.

    One message for all of them, when the last gradient has come. So they have the gradients of the whole sequence as soon as
    autograd hands them over, whatever takes them from there: sharded, accumulated, or seen by a hook.

    Args:
        parameters: of one dtype, the same on every rank.
    """
    group = group_or_default(group)
    return tuple(parameters) if group.size() == 1 else outside_graphs(_CopyParameters.apply, group, *parameters)


def enter_parallel_region(x: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """All of `x`, of which each rank of `group` has a slice if `sequence_parallel`; its gradients are summed over the ranks.

    Under autocast it is cast first, so that it and its gradient travel in the lower precision.
    """
    x = as_autocast(x)
    if sequence_parallel:
        return gather_from_sequence_parallel_region(x, group=group)
    return copy_to_model_parallel_region(x, group)


def leave_parallel_region(partial: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """The sum over `group` of `partial`, contiguous, which is given up: this rank's slice of it if `sequence_parallel`."""
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(partial, group, in_place=True)
    return reduce_from_model_parallel_region(partial, group, in_place=True)
