"""Embeddings cut by vocabulary or by columns, against nn.Embedding."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close

from megazero import comm, mpu
from tests.mpu.values import shared
from tests.ranks import run_ranks

V, H = 13, 12


def embedding_case():
    group = dist.group.WORLD
    t, r = group.size(), group.rank()
    table = shared(V, H)
    ids = torch.randint(0, V, (5, 3), generator=torch.Generator().manual_seed(1))
    ids[0] = torch.tensor([0, V - 1, 0])  # repeats: their gradients add up
    upstream = shared(5, 3, H, seed=2)
    for padded in (-(-V // t) * t, 16 * t):  # of the second, the last ranks hold nothing but padding
        for layer in (
            mpu.VocabParallelEmbedding(V, H, padded_num_embeddings=padded, group=group),
            mpu.ParallelEmbedding(V, H, group=group),
        ):
            cut = layer.partitions["weight"]
            with torch.no_grad():
                layer.weight.copy_(cut.slice(table, r, t, layer.weight.size(cut.dim) * t))
            want_table = table.clone().requires_grad_()
            want = F.embedding(ids, want_table)
            got = layer(ids)
            assert torch.equal(got, want), "zeros are added to one rank's row: exact"
            want.backward(upstream)
            got.backward(upstream)
            assert_close(cut.merge(comm.all_gathered(layer.weight.grad, group)), want_table.grad)
            if isinstance(layer, mpu.VocabParallelEmbedding):
                assert not layer.weight.grad[max(0, V - layer.first_id) :].any(), "padding gets no gradient"
                assert layer(ids[:0]).shape == (0, 3, H)
            for bad in (V, -1):  # V is a padding row, V + 100 is nowhere
                with pytest.raises(ValueError, match=f"token id {bad} is outside of the vocabulary: {V} ids"):
                    layer(torch.tensor([0, bad]))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_embeddings_equal_embedding(world_size):
    run_ranks(world_size, embedding_case)


def uneven_case():
    group = dist.group.WORLD
    with pytest.raises(ValueError, match=r"padded vocabulary\)=13 .*multiple of 2"):
        mpu.VocabParallelEmbedding(13, 4, group=group)
    with pytest.raises(ValueError, match="padded_num_embeddings=12 is less than num_embeddings=13"):
        mpu.VocabParallelEmbedding(13, 4, padded_num_embeddings=12, group=group)
    with pytest.raises(ValueError, match="embedding_dim=5"):
        mpu.ParallelEmbedding(4, 5, group=group)


def test_tables_that_cannot_be_cut_are_named():
    run_ranks(2, uneven_case)
