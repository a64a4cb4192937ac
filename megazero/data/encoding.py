"""Blocks of JSON lines turned into tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megazero.data.jsonl import Block, LineError, block_lines, read_document
from megazero.data.mmidx import token_dtype
from megazero.data.tokenizer import Tokenizer


@dataclass
class EncodedBlock:
    """The documents of one block.

    Attributes:
        tokens: all of them end to end, in the dtype that they are stored in.
        sizes: [documents] int32, tokens per document.
        lines: lines in the block, blank ones included.
        empty: documents without text, left out.
        errors: (number of the line within the block, from 0; reason) for each line that holds no document.
    """

    tokens: np.ndarray
    sizes: npt.NDArray[np.int32]
    lines: int
    empty: int = 0
    errors: list[tuple[int, str]] = field(default_factory=list)


class BlockEncoder:
    """Turns a block into tokens; picklable.

    Args:
        key: which entry of each JSON object is the text.
        append_eod: whether every document ends with the end-of-text token.
    """

    def __init__(self, tokenizer: Tokenizer, key: str, append_eod: bool) -> None:
        self.tokenizer, self.key = tokenizer, key
        self.dtype = token_dtype(tokenizer.vocab_size)
        self._end = np.full(int(append_eod), tokenizer.eod, dtype=self.dtype)

    def __call__(self, block: Block) -> EncodedBlock:
        """The documents of `block`; lines that hold none are reported in `errors`."""
        lines = block_lines(block)
        pieces: list[np.ndarray] = []
        sizes: list[int] = []
        encoded = EncodedBlock(np.empty(0, self.dtype), np.empty(0, np.int32), len(lines))
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                ids = self._encode(read_document(line, self.key))
            except LineError as error:
                encoded.errors.append((number, str(error)))
                continue
            if len(ids) == 0:
                encoded.empty += 1
                continue
            pieces += (ids, self._end)
            sizes.append(len(ids) + len(self._end))
        if pieces:
            encoded.tokens = np.concatenate(pieces, dtype=self.dtype, casting="unsafe")
            encoded.sizes = np.asarray(sizes, dtype=np.int32)
        return encoded

    def _encode(self, text: str) -> npt.NDArray[np.integer]:
        try:
            return self.tokenizer.encode_array(text)
        except ValueError as error:  # the pattern of a BPE can give up on megabytes of white space
            raise LineError(f"the text cannot be tokenized: {error}") from error
