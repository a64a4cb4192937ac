"""Messages in which ranks tell each other the collective that they are in, so that none takes another's data for its own."""

from __future__ import annotations

import hashlib

from torch import Tensor

MESSAGE_BYTES = 256
_DIGEST_BYTES = 8


def describe(action: str, buffer: Tensor, name: str) -> str:
    """The collective in words: "all_gather of blocks.0, 6 elements (torch.float32)". `name` may be empty."""
    return f"{action} of {name and name + ', '}{buffer.numel()} elements ({buffer.dtype})"


def message(what: str) -> bytes:
    """What to send others about `what`, at most MESSAGE_BYTES: a digest of all of it, and as much of the text as fits."""
    text = what.encode()
    return (hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest() + text)[:MESSAGE_BYTES]


def check(theirs: bytes, what: str, rank: int) -> None:
    """Returns if `rank`, which sent the message `theirs`, is in the same collective as this one, in `what`.

    Raises:
        RuntimeError: it is in another one; names both.
    """
    if theirs != message(what):
        raise RuntimeError(
            f"rank {rank} is in {theirs[_DIGEST_BYTES:].decode(errors='replace')} while this rank is in {what}. "
            "Issue the same collectives in the same order on every rank."
        )
