"""The check of token ids."""

import pytest
import torch

from megazero.mpu.utils import check_token_ids


def test_token_ids_outside_of_the_vocabulary_are_named():
    check_token_ids(torch.tensor([[0, 6]]), 7)
    check_token_ids(torch.empty(0, 3, dtype=torch.int64), 7)
    for bad, advice in ((7, "another vocabulary"), (-1, "any.*multiply their loss by 0"), (-100, "any.*by 0")):
        with pytest.raises(ValueError, match=f"token id {bad} is outside of the vocabulary: 7 ids.*{advice}"):
            check_token_ids(torch.tensor([[1, bad]]), 7)
