"""Activation checkpointing: keep a function's inputs instead of its activations, and run it again in the backward.

    checkpoint(function, *args)                          what function(*args) returns, with the same gradients, bit for bit
    partition_activations_in_checkpoint(True)            keep 1/t of each input on each of the t model-parallel ranks

The second run sees what the first one saw: random streams (CPU, device, and the tracker's), so that dropout drops the same
elements, and autocast. Afterwards the streams are back where they were. The inputs of a transformer block are the same on every
model-parallel rank, so keeping them whole on each would store them t times; partitioned, a block costs one more all-gather in
the backward (ZeRO, arXiv:1910.02054, sec. 6.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megazero import comm
from megazero.comm import ProcessGroup
from megazero.mpu.groups import get_groups, model_parallel_is_initialized
from megazero.mpu.random import RngState


@dataclass
class CheckpointSettings:
    """How activations are kept.

    Attributes:
        partition_activations: keep 1/t of each floating-point input on each of the t model-parallel ranks.
    """

    partition_activations: bool = False


# What partition_activations_in_checkpoint() sets for the whole process, as in Megatron-LM: the only state of this module.
settings = CheckpointSettings()


def partition_activations_in_checkpoint(partition_activations: bool) -> None:
    """Whether `checkpoint` keeps its inputs cut over the model-parallel ranks, from the next call on.

    Every floating-point argument must then be the same on all ranks of the model-parallel group, as the inputs of a transformer
    block are: the pieces that are put together again come from different ranks.
    """
    settings.partition_activations = bool(partition_activations)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, keeping only `args` until the backward, which runs `function` again.

    Parameters that `function` uses get their gradients in the backward as ever. Without grad mode it is just the call.

    With partitioned activations every floating-point tensor among `args` is cut over the model-parallel ranks, except the
    attention mask: that is the last of several arguments, where it needs no gradient. (Masks are shared by all layers; a piece
    per layer would cost memory.) Other dtypes are kept whole.

    Args:
        function: gives the same result each time. It returns a tensor, or a tuple or list of tensors and other things.
        args: tensors and anything else. Tensors that need a gradient are arguments of their own, not inside of a container.

    Raises:
        ValueError: a tensor that needs a gradient lies inside of a container argument, or a tensor inside of a returned
            container: its gradient would be lost.
        RuntimeError: in the backward, if it is not run by `backward()` but by `torch.autograd.grad`, which cannot be given the
            parameters' gradients; or if an argument was changed in place since.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    for i, arg in enumerate(args):
        if not isinstance(arg, Tensor) and any(x.requires_grad for x in _tensors_in(arg)):
            raise ValueError(
                f"checkpoint: argument {i} is a {type(arg).__name__} that holds a tensor which needs a gradient. "
                "Pass that tensor as an argument of its own."
            )
    run = _Run(function, args, _partition_group())
    # Inputs may all be without gradient (token ids) while parameters are not: then an anchor makes autograd record the call.
    anchor = None if any(run.needs_grad) else torch.empty(0, requires_grad=True)
    outputs = _Checkpoint.apply(run, anchor, *args)
    return list(outputs) if run.returns_list else outputs


def _partition_group() -> ProcessGroup | None:
    """The group to cut inputs over, looked up anew in every call: groups may have been made again with another size."""
    if not settings.partition_activations or not model_parallel_is_initialized():
        return None
    group = get_groups().model
    return group if group.size() > 1 else None


class _Run:
    """What one checkpointed call needs to be repeated, except its tensors."""

    def __init__(self, function: Callable[..., Any], args: tuple, group: ProcessGroup | None) -> None:
        self.function = function
        self.group = group
        self.returns_list = False
        self.rng = RngState.capture()
        kinds = sorted({"cpu", comm.local_device().type})
        self.autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        # Per argument: what is no tensor; the shape of a tensor that is cut; whether a tensor needs a gradient.
        self.others = [None if isinstance(x, Tensor) else x for x in args]
        self.cut_shapes = [x.shape if self._is_cut(x, i, len(args)) else None for i, x in enumerate(args)]
        self.needs_grad = [isinstance(x, Tensor) and x.requires_grad for x in args]

    def _is_cut(self, x: Any, i: int, count: int) -> bool:
        if self.group is None or not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return False
        is_mask = i == count - 1 and count > 1 and not x.requires_grad
        return not is_mask

    def kept(self, args: Sequence[Any]) -> list[Tensor | None]:
        """What is kept of each argument: the tensor, this rank's piece of it, or None for what is no tensor."""
        return [
            None if not isinstance(x, Tensor) else x if shape is None else _piece(x, self.group)
            for x, shape in zip(args, self.cut_shapes, strict=True)
        ]

    def arguments(self, kept: Sequence[Tensor | None]) -> list[Any]:
        """The arguments again: tensors detached from the graph of the first run, in which they need gradients as before."""
        args: list[Any] = []
        for x, other, shape, needs_grad in zip(kept, self.others, self.cut_shapes, self.needs_grad, strict=True):
            if x is None:
                args.append(other)
            else:
                whole = x if shape is None else _whole(x, shape, self.group)
                args.append(whole.detach().requires_grad_(needs_grad))
        return args

    def call(self, args: Sequence[Any]) -> Any:
        """`function(*args)` under the autocast of the first run, without autocast's cache of weights.

        A cast that the first run made has no graph, so no later use of the weight may find it: torch 2.8 would hand it out and
        the weight would lose that gradient (later versions keep a cache for each grad mode).
        """
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            return self.function(*args)

    def call_again(self, args: Sequence[Any]) -> Any:
        """`call` with the random streams of the first run; they go back to where they are now."""
        now = RngState.capture()
        self.rng.restore()
        try:
            return self.call(args)
        finally:
            now.restore()


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, anchor: Tensor | None, *args: Any) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*run.kept(args))
        outputs = run.call(args)
        for value in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if not isinstance(value, Tensor) and any(True for _ in _tensors_in(value)):
                raise ValueError(
                    f"checkpoint: the function returned a {type(value).__name__} that holds tensors, which would lose their "
                    "gradients. Let it return a tensor, or a flat tuple or list of them."
                )
        run.returns_list = isinstance(outputs, list)
        return tuple(outputs) if run.returns_list else outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "checkpoint: torch.autograd.grad (or backward(inputs=...)) cannot go through a checkpointed function, because "
                "the gradients of its parameters would be lost. Use backward(), or turn off --checkpoint-activations."
            )
        args = ctx.run.arguments(ctx.saved_tensors)
        with torch.enable_grad():
            outputs = ctx.run.call_again(args)
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and isinstance(output, Tensor) and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        return None, None, *(x.grad if isinstance(x, Tensor) else None for x in args)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors inside of nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _piece(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's 1/t of the elements of `x`, the same number on every rank: the last piece is filled up with zeros."""
    assert group is not None  # cut_shapes are set only with a group
    size = -(-x.numel() // group.size())
    own = x.detach().reshape(-1)[group.rank() * size : (group.rank() + 1) * size]
    piece = x.new_zeros(size)
    piece[: own.numel()].copy_(own)
    return piece


def _whole(piece: Tensor, shape: torch.Size, group: ProcessGroup | None) -> Tensor:
    """The tensor of which every rank of `group` has its `_piece`."""
    assert group is not None
    return torch.cat(comm.all_gather(piece, group))[: shape.numel()].view(shape)
