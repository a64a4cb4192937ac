"""Clipping over model-parallel shards against torch.nn.utils.clip_grad_norm_ of the whole model."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from megazero import comm, mpu
from megazero.model.state_dict import merge_full
from tests.mpu.values import shared
from tests.ranks import run_ranks


def build():
    group = dist.group.WORLD
    return nn.ModuleDict(
        {
            "embedding": mpu.VocabParallelEmbedding(11, 6, padded_num_embeddings=12, group=group),
            "column": mpu.ColumnParallelLinear(6, 12, group=group),
            "row": mpu.RowParallelLinear(12, 5, group=group),
            "norm": nn.LayerNorm(5),
            "unused": nn.Linear(2, 2),
        }
    )


def set_gradients(model):
    """Random gradients, the same full ones for every number of ranks. Returns the full ones."""
    group, cuts = dist.group.WORLD, mpu.partitions(model)
    full = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        if name.startswith("unused"):
            continue
        cut = cuts.get(name)
        full[name] = shared(*(p.shape if cut is None else cut.full_shape(p.shape)), seed=i)
        p.grad = full[name].clone() if cut is None else cut.slice_like(p.shape, full[name], group.rank(), group.size())
    return full


def clip_case():
    model = build()
    for norm_type in (2, 2.0, math.inf, 1, 3.5):
        for max_norm in (0.5, 1e3):
            for give_module in (True, False):
                full = set_gradients(model)
                plain = [nn.Parameter(torch.zeros_like(grad)) for grad in full.values()]
                for p, grad in zip(plain, full.values(), strict=True):
                    p.grad = grad.clone()
                want = torch.nn.utils.clip_grad_norm_(plain, max_norm, norm_type)
                got = mpu.clip_grad_norm(
                    model if give_module else model.parameters(), max_norm, norm_type, group=dist.group.WORLD
                )
                assert isinstance(got, float)
                assert_close(got, want.item(), rtol=1e-5, atol=0)
                own = {name: model.get_parameter(name).grad for name in full}
                merged = merge_full(own, mpu.partitions(model), dist.group.WORLD)
                for name, p in zip(full, plain, strict=True):
                    assert_close(merged[name], p.grad, rtol=1e-5, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")


def special_case():
    group = dist.group.WORLD
    model = build()
    # Parameters that were put in place of others have no flag; the module still knows.
    set_gradients(model)
    want = mpu.clip_grad_norm(model, 1e9, group=group)
    clone = copy.deepcopy(model)
    clone.load_state_dict({name: nn.Parameter(p.detach()) for name, p in model.named_parameters()}, assign=True)
    set_gradients(clone)
    assert mpu.clip_grad_norm(clone, 1e9, group=group) == want
    # The norm of 16-bit gradients is taken in fp32: in bf16 it would be off by up to 2e-3 of it.
    low = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    low.grad = shared(4096).bfloat16()
    assert_close(mpu.clip_grad_norm(low, 1e9, group=group), low.grad.double().norm().item(), rtol=1e-5, atol=0)
    # That of fp64 ones is told to ranks that count none of them.
    high = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    high.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert mpu.clip_grad_norm(high, 1e9, group=group) == 5.0
    # Nobody has a gradient, or only one rank has one: no rank hangs.
    model.zero_grad()
    assert mpu.clip_grad_norm(model, 1.0, group=group) == 0.0
    if group.rank() == group.size() - 1:
        model["column"].bias.grad = torch.full_like(model["column"].bias, 2.0)
    assert mpu.clip_grad_norm(model, 1e9, norm_type=math.inf, group=group) == 2.0
    # One tensor; a NaN on one rank is everybody's.
    lone = nn.Parameter(torch.zeros(2))
    lone.grad = torch.tensor([3.0, 4.0])
    assert mpu.clip_grad_norm(lone, 1.0, group=group) == 5.0, "a replicated parameter counts once"
    assert_close(lone.grad, torch.tensor([0.6, 0.8]))
    lone.model_parallel = True
    lone.grad = torch.tensor([3.0, math.nan if group.rank() == group.size() - 1 else 4.0])
    assert math.isnan(mpu.clip_grad_norm([lone], 1.0, group=group))
    # Megatron-LM's later mark, on a parameter or in a module that declares no partitions.
    later = nn.Linear(4, 1, bias=False)
    later.weight.tensor_model_parallel = True
    later.weight.grad = torch.ones(1, 4)
    for given in (later, later.weight, later.parameters()):
        assert_close(mpu.clip_grad_norm(given, 1e9, group=group), math.sqrt(4 * group.size()))
    # A head without partitions of its own, tied to a sharded table and listed first.
    head = nn.Linear(6, 12 // group.size(), bias=False)
    tied = nn.ModuleDict({"head": head, "embedding": model["embedding"]})
    head.weight = model["embedding"].weight
    head.weight.grad = torch.ones_like(head.weight)
    assert_close(mpu.clip_grad_norm(tied, 1e9, group=group), math.sqrt(72), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="norm_type=0.0 must be positive"):
        mpu.clip_grad_norm(model, 1.0, 0, group=group)
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"max_norm={bad} must be a norm"):
            mpu.clip_grad_norm(model, bad, group=group)


def sync_case():
    """One message of one number, and one wait, whatever the number of parameters."""
    model = build()
    set_gradients(model)
    gathered, waits = [], []
    real_gather, real_item = comm.all_gathered, torch.Tensor.item
    comm.all_gathered = lambda x, group: (gathered.append(x.numel()), real_gather(x, group))[1]
    torch.Tensor.item = lambda x: (waits.append(x), real_item(x))[1]
    try:
        mpu.clip_grad_norm(model, 1.0, group=dist.group.WORLD)
    finally:
        comm.all_gathered, torch.Tensor.item = real_gather, real_item
    assert gathered == [1] and len(waits) == 1


def all_cases():
    clip_case()
    special_case()
    sync_case()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_clipping_equals_torch_on_the_whole_model(world_size):
    run_ranks(world_size, all_cases)


def default_group_case():
    mpu.initialize_model_parallel(2)  # of 4 ranks: data-parallel ranks must not count
    p = nn.Parameter(torch.zeros(1))
    p.model_parallel, p.grad = True, torch.ones(1)
    return mpu.clip_grad_norm(p, 1e9)


def test_the_default_group_is_the_model_parallel_one():
    assert run_ranks(4, default_group_case) == [pytest.approx(math.sqrt(2))] * 4
