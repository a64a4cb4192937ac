"""Small things that the layers share: the cast of autocast, a check of token ids, what torch.compile leaves alone."""

from __future__ import annotations

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


def check_token_ids(ids: Tensor, vocab_size: int) -> None:
    """Returns if all `ids` are in [0, vocab_size). Looks at CPU tensors only: reading a CUDA tensor would make it wait.

    Raises:
        ValueError: one is outside.
    """
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
