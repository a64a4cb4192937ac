"""Exact divisions and vocabulary ranges."""

import pytest
import torch

from megazero.mpu.utils import (
    VocabUtility,
    check_token_ids,
    divide,
    ensure_divisibility,
    split_tensor_along_last_dim,
)


def test_divide_is_exact_or_raises():
    assert divide(12, 4) == 3
    for function in (divide, ensure_divisibility):
        with pytest.raises(ValueError, match="13 is not divisible by 4"):
            function(13, 4)


def test_split_along_last_dim():
    x = torch.arange(12).view(2, 6)
    views = split_tensor_along_last_dim(x, 3)
    assert [v.tolist() for v in views] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert views[1].data_ptr() == x[:, 2:].data_ptr()
    assert all(v.is_contiguous() for v in split_tensor_along_last_dim(x, 3, contiguous_split_chunks=True))
    with pytest.raises(ValueError, match="6 is not divisible by 4"):
        split_tensor_along_last_dim(x, 4)


def test_vocabulary_ranges_tile_the_vocabulary():
    for size in (1, 2, 3, 4):
        ranges = [VocabUtility.vocab_range_from_global_vocab_size(24, rank, size) for rank in range(size)]
        assert [i for first, last in ranges for i in range(first, last)] == list(range(24))
    assert VocabUtility.vocab_range_from_per_partition_vocab_size(5, 2, 4) == (10, 15)


def test_token_ids_outside_of_the_vocabulary_are_named():
    check_token_ids(torch.tensor([[0, 6]]), 7)
    with pytest.raises(ValueError, match="token ids are torch.float32, and must be integers"):
        check_token_ids(torch.zeros(2), 7)
    check_token_ids(torch.empty(0, 3, dtype=torch.int64), 7)
    for bad, advice in ((7, "another vocabulary"), (-1, "any.*multiply their loss by 0"), (-100, "any.*by 0")):
        with pytest.raises(ValueError, match=f"token id {bad} is outside of the vocabulary: 7 ids.*{advice}"):
            check_token_ids(torch.tensor([[1, bad]]), 7)
