"""Blocks of JSON lines turned into tokens."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from megazero.data.mmidx import token_dtype
from megazero.data.tokenizer import Tokenizer
from megazero.lines.jsonl import LineError, name_of
from megazero.lines.results import NO_TEXT, BlockResult, read_documents
from megazero.lines.resumable import Item

Surrogates: TypeAlias = Literal["replace", "reject"]
SURROGATES: tuple[Surrogates, ...] = get_args(Surrogates)
"""What to do with unpaired surrogates, which JSON can spell ("\\ud800") and no UTF-8 text can hold: put U+FFFD in their place, or
take the line for one that holds no document."""


class BlockEncoder:
    """Turns the documents of a block into tokens: a `BlockWork` with two outputs.

    These are the tokens end to end, in the dtype that they are stored in, and the length of each document, int32. A document is
    counted as changed if unpaired surrogates were replaced in it.

    Args:
        key: which entry of each JSON object is the text.
        append_eod: whether every document ends with the end-of-text token.
        surrogates: what to do with unpaired ones.
    """

    def __init__(self, tokenizer: Tokenizer, key: str, append_eod: bool, surrogates: Surrogates = "replace") -> None:
        self.tokenizer, self.key, self.surrogates = tokenizer, key, surrogates
        self.dtype = token_dtype(tokenizer.vocab_size)
        self._end = np.full(int(append_eod), tokenizer.eod, dtype=self.dtype)

    def __call__(self, item: Item) -> BlockResult:
        """The tokens of a block; lines that hold no document, or no text, are listed."""
        pieces: list[np.ndarray] = [np.empty(0, self.dtype)]
        sizes: list[int] = []
        result = BlockResult()
        for number, _, line, document in read_documents(item[1], self.key, result):
            try:
                ids = encoded(document[self.key], self.tokenizer)
                # Only such an escape can make a surrogate, so most lines need no second look.
                is_replaced = (b"\\ud" in line or b"\\uD" in line) and self._is_replaced(document[self.key])
            except LineError as error:
                result.bad_line(number, str(error), name_of(document))
                continue
            if len(ids) == 0:
                result.drop(number, NO_TEXT, name_of(document))
                continue
            result.counts.changed += is_replaced
            pieces += (ids, self._end)
            sizes.append(len(ids) + len(self._end))
        result.counts.documents += len(sizes)
        result.counts.kept = len(sizes)
        result.tokens = sum(sizes)
        tokens = np.concatenate(pieces, dtype=self.dtype, casting="unsafe")
        result.frames = [tokens.tobytes(), np.asarray(sizes, dtype="<i4").tobytes()]
        return result

    def _is_replaced(self, text: str) -> bool:
        """Whether the text has unpaired surrogates; a LineError where those are rejected."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            if self.surrogates == "reject":
                raise LineError(f"an unpaired surrogate at character {error.start} of the text") from error
            return True
        return False


def encoded(text: str, tokenizer: Tokenizer) -> npt.NDArray[np.integer]:
    """The tokens of a document's text; a LineError for one that has none."""
    try:
        return tokenizer.encode_array(text)
    except ValueError as error:  # the pattern of a BPE can give up on megabytes of white space
        raise LineError(f"the text cannot be tokenized: {error}") from error
