"""Documents inside one training sequence: positions that restart at each, and attention that stays within one."""

from __future__ import annotations

import torch
from torch import Tensor


def document_positions(tokens: Tensor, eod: int) -> tuple[Tensor, Tensor]:
    """Position of each token in its document, and the number of that document in its row.

    A document ends with its end-of-document token, which belongs to it; the next token begins another.

    Args:
        tokens: [b, s] int64.
        eod: id of the end-of-document token.

    Returns:
        (position_ids [b, s], document_ids [b, s]), int64, both counted from 0 in every row.
    """
    is_eod = tokens == eod
    document_ids = is_eod.cumsum(dim=1) - is_eod.long()
    index = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    begins = torch.ones_like(is_eod)
    begins[:, 1:] = is_eod[:, :-1]
    # Index of the first token of the document that we are in.
    first = torch.where(begins, index, 0).cummax(dim=1).values
    return index - first, document_ids


def document_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, 1, s, s], to be added to attention scores: 0 where query i may read key j, else -inf.

    It may where j is not after i and lies in the same document. The kernels want it in the dtype of the scores: of a bool mask
    every layer would make such a copy, and keep it for its backward.

    Args:
        document_ids: [b, s] integers, equal exactly within a document.
        dtype: of the activations.
    """
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return torch.zeros(same.shape, dtype=dtype, device=same.device).masked_fill_(~same.tril(), float("-inf"))
