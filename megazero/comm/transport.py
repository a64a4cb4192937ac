"""What the ways of moving data over gloo share: an interface, sums, and a check that ranks are in the same collective."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

MESSAGE_BYTES = 256
_DIGEST_BYTES = 8


class Transport(Protocol):
    """What moves the data of a `ThreadLane`: collectives in place that return when they are done.

    A rank that is in a collective of another name, or of another size, gets an error.
    """

    def reduce_scatter_(self, buffer: Tensor, name: str) -> None:
        """Makes this rank's part of `buffer` the sum over the group."""

    def all_gather_(self, buffer: Tensor, name: str) -> None:
        """Fills `buffer` with every rank's part of it."""

    def close(self) -> None:
        """Lets ranks that wait for this one fail at once."""


def describe(action: str, buffer: Tensor, name: str) -> str:
    """The collective in words: "all_gather of blocks.0, 6 elements (torch.float32)". `name` may be empty."""
    return f"{action} of {name and name + ', '}{buffer.numel()} elements ({buffer.dtype})"


def message(what: str) -> bytes:
    """What to send others about `what`, at most MESSAGE_BYTES: a digest of all of it, and as much of the text as fits."""
    text = what.encode()
    return (hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest() + text)[:MESSAGE_BYTES]


def check(theirs: bytes, what: str, rank: int) -> None:
    """Compares the collective that this rank is in, `what`, with the message `theirs` about the one that `rank` is in.

    Raises:
        RuntimeError: they differ; the message names both.
    """
    if theirs != message(what):
        raise RuntimeError(
            f"rank {rank} is in {theirs[_DIGEST_BYTES:].decode(errors='replace')} while this rank is in {what}. "
            "Issue the same collectives in the same order on every rank."
        )


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
