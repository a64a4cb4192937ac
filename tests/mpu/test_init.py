"""Initial values: the same for every model-parallel size, with the default generator at the same place afterwards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.init import kaiming_uniform_, normal_, xavier_normal_

from megazero import mpu
from megazero.model.state_dict import merge_full
from megazero.mpu.init import init_weight_
from tests.ranks import run_ranks

VOCAB = 13


def build(group, device="cpu", dtype=None):
    options = {"group": group, "device": device, "dtype": dtype}
    padded = -(-VOCAB // (4 * group.size())) * 4 * group.size()  # depends on the number of ranks, as Megatron's does
    replicated = torch.empty(5, 3, device=device, dtype=dtype)
    init_weight_(replicated, normal_)
    layers = nn.ModuleDict(
        {
            "embedding": mpu.VocabParallelEmbedding(VOCAB, 24, padded_num_embeddings=padded, **options),
            "qkv": mpu.ColumnParallelLinear(24, 72, stride=3, init_method=kaiming_uniform_, **options),
            "row": mpu.RowParallelLinear(24, 7, init_method=lambda w: w.normal_(std=0.02), **options),
            "columns": mpu.ParallelEmbedding(5, 12, **options),
        }
    )
    return layers, replicated


def init_case(dtype):
    torch.manual_seed(1234)
    layers, replicated = build(dist.group.WORLD, dtype=dtype)
    after = torch.get_rng_state()
    cuts = mpu.partitions(layers)
    assert {name for name, p in layers.named_parameters() if name not in cuts} == {"row.bias"}
    full = {**merge_full(dict(layers.named_parameters()), cuts, dist.group.WORLD), "replicated": replicated.detach()}
    torch.manual_seed(1234)
    build(dist.group.WORLD, device="meta")
    assert torch.equal(torch.get_rng_state(), after), "the meta device must advance the generator alike"
    return {name: (list(value.shape), value.double().numpy().tobytes()) for name, value in full.items()}, after.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_shards_and_generator_are_bit_identical_for_1_2_3_4_ranks(dtype):
    (want, after), *others = [run_ranks(t, init_case, dtype)[0] for t in (1, 2, 3, 4)]
    assert want["embedding.weight"][0] == [VOCAB, 24] and want["qkv.weight"][0] == [72, 24]
    for got, state in others:
        assert got == want
        assert state == after


def test_values_are_those_of_the_init_method_on_the_full_shape(one_rank):
    torch.manual_seed(5)
    layer = mpu.ColumnParallelLinear(50, 30, keep_master_weight_for_test=True)
    torch.manual_seed(5)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(seed)
    assert torch.equal(layer.weight, xavier_normal_(torch.empty(30, 50)))
    assert torch.equal(layer.master_weight, layer.weight) and not layer.bias.any()
    assert mpu.ColumnParallelLinear(5, 3).master_weight is None


def test_successive_weights_differ_and_the_generator_moves_by_one_integer_each(one_rank):
    torch.manual_seed(5)
    first, second = torch.empty(2, 40)
    for weight in (first, second):
        init_weight_(weight, normal_)
    assert not torch.equal(first, second)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    torch.empty(2, dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)


def test_nothing_is_drawn_on_the_meta_device(one_rank):
    drawn = []
    assert init_weight_(torch.empty(10**6, 10**6, device="meta"), drawn.append) is None
    assert not drawn


def test_an_init_method_that_raises_leaves_the_generator_usable(one_rank):
    def fail(weight):
        raise KeyError("no")

    torch.manual_seed(5)
    with pytest.raises(KeyError):
        init_weight_(torch.empty(3), fail)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    init_weight_(torch.empty(3), normal_)
    assert torch.equal(torch.get_rng_state(), after)


def master_case():
    layer = mpu.RowParallelLinear(6, 4, keep_master_weight_for_test=True, group=dist.group.WORLD)
    embedding = mpu.ParallelEmbedding(3, 4, keep_master_weight_for_test=True, group=dist.group.WORLD)
    return layer.master_weight.shape == (4, 6) and embedding.master_weight.shape == (3, 4)


def test_the_full_weight_is_kept_on_request():
    assert run_ranks(2, master_case) == [True, True]
