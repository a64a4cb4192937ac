"""Blocks of JSON lines turned into tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from megazero.data.jsonl import Block, LineError, block_lines, is_blank, read_object
from megazero.data.mmidx import token_dtype
from megazero.data.tokenizer import Tokenizer

Surrogates: TypeAlias = Literal["replace", "reject"]
SURROGATES: tuple[Surrogates, ...] = get_args(Surrogates)
"""What to do with unpaired surrogates, which JSON can spell ("\\ud800") and no UTF-8 text can hold: put U+FFFD in their place, or
take the line for one that holds no document."""


@dataclass(frozen=True)
class LeftOut:
    """A line of a block that gave no tokens.

    Attributes:
        line: its number within the block, from 0.
        fault: why it holds no document; None if it holds one, without text.
        identity: the "id" or "url" of the document, where it has one.
    """

    line: int
    fault: str | None
    identity: str | None = None


@dataclass
class EncodedBlock:
    """The documents of one block.

    Attributes:
        tokens: all of them end to end, in the dtype that they are stored in.
        sizes: [documents] int32, tokens per document.
        lines: lines in the block, blank ones included.
        left_out: lines that gave no tokens, blank ones apart.
        replaced: documents in which unpaired surrogates were replaced.
    """

    tokens: np.ndarray
    sizes: npt.NDArray[np.int32]
    lines: int = 0
    left_out: list[LeftOut] = field(default_factory=list)
    replaced: int = 0


class BlockEncoder:
    """Turns a block into tokens; picklable.

    Args:
        key: which entry of each JSON object is the text.
        append_eod: whether every document ends with the end-of-text token.
        surrogates: what to do with unpaired ones.
    """

    def __init__(self, tokenizer: Tokenizer, key: str, append_eod: bool, surrogates: Surrogates = "replace") -> None:
        self.tokenizer, self.key, self.surrogates = tokenizer, key, surrogates
        self.dtype = token_dtype(tokenizer.vocab_size)
        self._end = np.full(int(append_eod), tokenizer.eod, dtype=self.dtype)

    def __call__(self, block: Block) -> EncodedBlock:
        """The documents of `block`; lines that hold none are reported in `left_out`."""
        pieces: list[np.ndarray] = []
        sizes: list[int] = []
        encoded = EncodedBlock(np.empty(0, self.dtype), np.empty(0, np.int32))
        for number, (_, line) in enumerate(block_lines(block)):
            encoded.lines += 1
            if is_blank(line, block):
                continue
            document: dict[str, Any] = {}
            try:
                document = read_object(line, self.key, block.fault)
                ids = self._encode(document[self.key])
                # Only such an escape can make a surrogate, so most lines need no second look.
                if b"\\ud" in line or b"\\uD" in line:
                    encoded.replaced += self._is_replaced(document[self.key])
            except LineError as error:
                encoded.left_out.append(LeftOut(number, str(error), _identity(document)))
                continue
            if len(ids) == 0:
                encoded.left_out.append(LeftOut(number, None, _identity(document)))
                continue
            pieces += (ids, self._end)
            sizes.append(len(ids) + len(self._end))
        if pieces:
            encoded.tokens = np.concatenate(pieces, dtype=self.dtype, casting="unsafe")
            encoded.sizes = np.asarray(sizes, dtype=np.int32)
        return encoded

    def _is_replaced(self, text: str) -> bool:
        """Whether the text has unpaired surrogates; a LineError where those are rejected."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            if self.surrogates == "reject":
                raise LineError(f"an unpaired surrogate at character {error.start} of the text") from error
            return True
        return False

    def _encode(self, text: str) -> npt.NDArray[np.integer]:
        try:
            return self.tokenizer.encode_array(text)
        except ValueError as error:  # the pattern of a BPE can give up on megabytes of white space
            raise LineError(f"the text cannot be tokenized: {error}") from error


def _identity(document: dict[str, Any]) -> str | None:
    return next((str(document[key]) for key in ("id", "url") if document.get(key) not in (None, "")), None)
