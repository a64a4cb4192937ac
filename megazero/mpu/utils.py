"""Small things that the layers share: divisions that come out even, vocabulary ranges, autocast, no second derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def as_autocast(x: Tensor) -> Tensor:
    """`x` as autocast would hand it to a matrix product: in its dtype where it is on, but for fp64 and integers."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # there is none on the meta device
        return x
    return x.to(torch.get_autocast_dtype(kind)) if x.is_floating_point() and x.dtype != torch.float64 else x


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Returns if `numerator` is a multiple of `denominator`.

    Raises:
        ValueError: it is not.
    """
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The exact quotient.

    Raises:
        ValueError: there is a remainder.
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """`num_partitions` equal pieces of the last dimension: views, or copies when `contiguous_split_chunks`.

    Raises:
        ValueError: the last dimension is not divisible by `num_partitions`.
    """
    pieces = tensor.split(divide(tensor.size(-1), num_partitions), dim=-1)
    return tuple(piece.contiguous() for piece in pieces) if contiguous_split_chunks else tuple(pieces)


def check_token_ids(ids: Tensor, vocab_size: int) -> None:
    """Returns if all `ids` are in [0, vocab_size). Looks at CPU tensors only: reading a CUDA tensor would make it wait.

    Raises:
        ValueError: one is outside, or they are no integers, wherever they are.
    """
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"token ids are {ids.dtype}, and must be integers: convert them with .long().")
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or ids.numel() == 0:
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0:  # most often BERT's -1 or torch's ignore_index
        raise ValueError(
            f"token id {low} is outside of the vocabulary: {vocab_size} ids, 0 to {vocab_size - 1}. Places that do not count "
            "need an id too: give them any (ids.clamp(min=0)), and multiply their loss by 0."
        )
    if high >= vocab_size:
        raise ValueError(
            f"token id {high} is outside of the vocabulary: {vocab_size} ids, 0 to {vocab_size - 1}. "
            "The data were probably tokenized with another vocabulary than the model has."
        )


def outside_graphs(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, which torch.compile does not look into where it compiles the caller."""
    if torch.compiler.is_compiling():
        return torch.compiler.disable(function)(*args)
    return function(*args)


def once_differentiable(what: str) -> Callable[[Callable[..., tuple]], Callable[..., tuple]]:
    """A decorator for the backward of a Function, called `what` in messages, that computes outside of autograd.

    What it returns may be kept with `create_graph=True`, and raises when it is differentiated. torch's decorator of that name
    raises only if the incoming gradient has a graph: that of `loss.sum()` has none, and derivatives are silently wrong.

    The backward is called with `(ctx, saved, *grads)`, because saved tensors may be read once only (they may be recomputed). They
    must be the inputs themselves that it depends on, which have the graph.
    """

    def decorate(backward: Callable[..., tuple]) -> Callable[..., tuple]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *grads: Tensor) -> tuple:
            saved = ctx.saved_tensors
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # torch.compile refuses by itself
                return backward(ctx, saved, *grads)
            with torch.no_grad():
                results = backward(ctx, saved, *grads)
            return _Undifferentiable.apply(what, results, *saved, *grads)

        return wrapper

    return decorate


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: str, results: tuple, *depends_on: Tensor | None) -> tuple:
        ctx.what = what
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        raise RuntimeError(
            f"{ctx.what} is differentiated a second time, which it does not support: its gradient, made with create_graph=True, "
            "is part of what backward() or grad() was called on. Leave it out of that (detach() it), or compute this part with "
            "torch's own functions."
        )


class VocabUtility:
    """Half-open ranges `(first, last)` of the vocabulary ids that a rank holds."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """The range of `rank` when each of the `world_size` ranks holds `per_partition_vocab_size` ids."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """The range of `rank` when `global_vocab_size` ids are split evenly over `world_size` ranks.

        Raises:
            ValueError: `global_vocab_size` is not divisible by `world_size`.
        """
        size = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(size, rank, world_size)
