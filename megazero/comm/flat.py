"""Arithmetic on flat buffers: cutting them into pieces, and sums that do not depend on who computes them."""

from __future__ import annotations

import torch
from torch import Tensor


def pieces(numel: int, largest: int) -> list[tuple[int, int]]:
    """(start, stop) of consecutive pieces of at most `largest` elements."""
    return [(start, min(start + largest, numel)) for start in range(0, numel, largest)]


def scratch_bytes(nbytes: int, terms: int) -> int:
    """Bytes of the scratch that `sum_` needs for so many terms of at most `nbytes` bytes: 16-bit terms are summed in fp32."""
    return 2 * nbytes if terms > 2 else 0


def sum_(terms: list[Tensor], own: int, scratch: Tensor) -> None:
    """Replaces terms[own] by the sum of all terms, added in list order; 16-bit floats in fp32, rounded once.

    Args:
        terms: at least two tensors of one shape [n] and dtype; all but terms[own] are only read.
        own: index of the term that is overwritten.
        scratch: uint8 [scratch_bytes(bytes of a term, terms)] or longer, overwritten.
    """
    result = terms[own]
    if len(terms) == 2:  # torch adds two 16-bit floats in fp32 and rounds once: what is wanted, in one pass
        torch.add(terms[0], terms[1], out=result)
    elif result.is_floating_point() and result.element_size() == 2:
        total = scratch.view(torch.float32)[: result.numel()].copy_(terms[0])
        for term in terms[1:]:
            total.add_(term)
        result.copy_(total)
    else:
        total, spare = terms[0], scratch.view(result.dtype)[: result.numel()]
        for index in range(1, len(terms)):
            # terms[own] may be overwritten as soon as it has been added itself
            total = torch.add(total, terms[index], out=result if index >= own else spare)
