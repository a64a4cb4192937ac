"""Cutting full parameters into shards and putting them together again."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megazero import mpu
from megazero.deepspeed.mpu import declare_cuts
from megazero.engine import Engine
from megazero.mpu.partition import Partition, partitions
from tests.ranks import run_ranks


@settings(max_examples=60)
@given(
    size=st.integers(1, 5),
    stride=st.integers(1, 4),
    chunk=st.integers(1, 3),
    dim=st.integers(0, 2),
    padding=st.integers(0, 40),
)
def test_merge_undoes_slice(size, stride, chunk, dim, padding):
    full_size = size * stride * chunk
    padded = full_size
    if stride == 1:  # a size of its own, that only the padding makes divisible
        full_size = size * chunk - min(size - 1, padding % size)
        padded = -(-(full_size + padding) // size) * size
    cut = Partition(dim, stride, full_size=full_size)
    shape = [2, 3, 4]
    shape[dim] = full_size
    full = torch.randn(shape)
    shards = [cut.slice(full, rank, size, padded) for rank in range(size)]
    assert all(shard.is_contiguous() and shard.size(dim) == padded // size for shard in shards)
    assert torch.equal(cut.merge(shards), full)
    assert sum(int(s.count_nonzero()) for s in shards) == int(full.count_nonzero()), "padding is zero"


def test_stride_cuts_each_stacked_matrix_on_its_own():
    q, k, v = torch.randn(3, 4, 2)
    cut = Partition(0, 3, full_size=12)
    stacked = torch.cat((q, k, v))
    for rank in range(2):
        own = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(cut.slice(stacked, rank, 2), torch.cat((q[own], k[own], v[own])))


def test_padded_vocabulary_leaves_zeros_on_the_last_ranks():
    table = torch.arange(1.0, 6.0)[:, None]  # 5 ids, padded to 12 rows over 4 ranks
    cut = Partition(0, full_size=5)
    got = [cut.slice(table, rank, 4, 12)[:, 0].tolist() for rank in range(4)]
    assert got == [[1, 2, 3], [4, 5, 0], [0, 0, 0], [0, 0, 0]]


def test_a_slice_shares_no_memory_with_the_full_tensor():
    full = torch.ones(2, 2)
    Partition(0, full_size=2).slice(full, 0, 1).zero_()
    assert full.sum() == 4


@pytest.mark.parametrize(
    ("cut", "size", "padded", "message"),
    [
        (Partition(0, full_size=5), 1, None, "must be 5"),
        (Partition(0, full_size=6), 4, None, "cannot cut 6 rows for 4 ranks"),
        (Partition(0, 3, full_size=6), 4, 12, "cannot cut 12 rows"),
        (Partition(0, full_size=6), 2, 4, "cannot cut 4 rows"),
    ],
)
def test_slices_that_do_not_come_out_even_are_refused(cut, size, padded, message):
    with pytest.raises(ValueError, match=message):
        cut.slice(torch.zeros(6, 1), 0, size, padded)


def test_shards_that_do_not_fit_are_refused():
    cut = Partition(0, full_size=6)
    with pytest.raises(ValueError, match="one shape"):
        cut.merge([torch.zeros(3, 1), torch.zeros(2, 1)])
    with pytest.raises(ValueError, match="2 shards"):
        cut.merge([torch.zeros(2, 1)] * 2)
    with pytest.raises(ValueError, match="2 shards"):
        Partition(0, 2, full_size=8).merge([torch.zeros(5, 1)] * 2)  # a row of each is in neither of its matrices
    with pytest.raises(ValueError, match="2 shards"):
        Partition(0, 2, full_size=6).merge([torch.zeros(4, 1)] * 2)  # the padding would lie between the matrices


def test_partitions_lists_sharded_parameters_by_full_name_and_survives_deepcopy(one_rank):
    column = mpu.ColumnParallelLinear(2, 6, stride=3)
    block = nn.Sequential(nn.LayerNorm(2), column, nn.ModuleDict({"row": mpu.RowParallelLinear(6, 2, bias=True)}))
    block.add_module("again", column)  # under both of its names
    want = {
        "1.weight": Partition(0, 3, full_size=6),
        "1.bias": Partition(0, 3, full_size=6),
        "2.row.weight": Partition(1, full_size=6),
        "again.weight": Partition(0, 3, full_size=6),
        "again.bias": Partition(0, 3, full_size=6),
    }
    assert partitions(block) == want
    clone = copy.deepcopy(block)
    assert partitions(clone) == want
    assert partitions(column) == {"weight": want["1.weight"], "bias": want["1.bias"]}
    flags = {name: getattr(p, "model_parallel", False) for name, p in clone.named_parameters()}
    assert flags == {name: name in want for name in flags}
    assert clone[1].group is column.group and clone[1].weight is not column.weight and clone[1] is clone.again
    x = torch.randn(3, 2)
    assert torch.equal(clone[1](x), column(x))


def test_a_layer_whose_bias_was_taken_away_is_copied(one_rank):
    column = mpu.ColumnParallelLinear(2, 6)
    column.bias = None
    clone = copy.deepcopy(column)
    assert clone.bias is None and list(partitions(clone)) == ["weight"]


def test_a_split_layer_is_not_pickled_and_says_what_to_do_instead(one_rank, tmp_path):
    model = nn.Sequential(mpu.RowParallelLinear(6, 2))
    with pytest.raises(TypeError, match=r"RowParallelLinear cannot be pickled: .* Save state_dict\(\)"):
        torch.save(model, tmp_path / "model.pt")
    assert copy.copy(model[0]).weight is model[0].weight


def tied(head_first: bool) -> nn.ModuleDict:
    embedding, head = (
        mpu.VocabParallelEmbedding(4, 3),
        nn.Linear(3, 4 // mpu.get_model_parallel_world_size(), bias=False),
    )
    head.weight = embedding.weight
    return nn.ModuleDict({"a": head, "b": embedding} if head_first else {"a": embedding, "b": head})


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_parameter_is_listed_under_the_names_of_layers_that_declare_nothing(head_first, one_rank):
    assert partitions(tied(head_first)) == dict.fromkeys(["a.weight", "b.weight"], Partition(0, full_size=4))


def norm_case(head_first: bool) -> tuple[float, bool]:
    groups = mpu.initialize_model_parallel(2)
    model = tied(head_first)
    before = partitions(model)
    declare_cuts(model, groups)
    engine = Engine(model, groups, lambda params: torch.optim.SGD(params, lr=0.1), {"a.weight": 0}, [{}])
    engine.backward((model["b"].weight * (1.0 + groups.model.rank())).sum())
    engine.step()
    return engine.get_global_grad_norm(), partitions(model) == before


@pytest.mark.parametrize("head_first", [True, False])
def test_the_norm_is_of_all_parts_of_a_tied_parameter_whichever_name_comes_first(head_first):
    norm = (6 * 1.0**2 + 6 * 2.0**2) ** 0.5
    assert run_ranks(2, norm_case, head_first) == [(pytest.approx(norm), True)] * 2


class Embedding2020(nn.Module):
    """As of Megatron-LM of 2020, which says by an attribute of the layer alone that columns are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dim_per_partition = 3
        self.weight = nn.Parameter(torch.ones(4, 3))
        self.weight.model_parallel = True


def foreign_case(head_first: bool) -> dict[str, Partition]:
    embedding, head = Embedding2020(), nn.Linear(3, 4, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"a": head, "b": embedding} if head_first else {"a": embedding, "b": head})
    declare_cuts(model, mpu.initialize_model_parallel(2))
    return partitions(model)


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_parameter_of_foreign_layers_is_cut_as_the_layer_says_that_knows(head_first):
    want = dict.fromkeys(["a.weight", "b.weight"], Partition(1, full_size=6))
    assert run_ranks(2, foreign_case, head_first) == [want] * 2
