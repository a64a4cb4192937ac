"""Checkpointed functions against the same functions without: outputs, gradients, random streams and what is kept."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import dropout
from torch.testing import assert_close

from megazero import activation_checkpointing, comm, mpu
from megazero.activation_checkpointing import checkpoint, partition_activations_in_checkpoint
from tests.ranks import run_ranks


class Block(nn.Module):
    """Uses the default stream, the model-parallel stream, and a mask that may be absent."""

    def __init__(self, size=6):
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.calls = 0

    def forward(self, x, mask=None):
        self.calls += 1
        y = dropout(torch.tanh(self.first(x)), 0.4)
        with mpu.get_cuda_rng_tracker().fork():
            y = dropout(self.second(mpu.copy_to_model_parallel_region(y)), 0.3)
        y = mpu.reduce_from_model_parallel_region(y)  # the same on every rank again, as a block's output is
        return x + (y if mask is None else y * mask)


def run(blocks, x, mask, call, partition=False):
    """Outputs, gradients of the input and of the parameters, and the numbers drawn next from both streams."""
    torch.manual_seed(3)
    mpu.model_parallel_cuda_manual_seed(5)
    partition_activations_in_checkpoint(partition)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    y = x
    for block in blocks:
        y = call(block, y, mask)
    blocks.zero_grad()
    drawn_forward = torch.rand(2)
    y.square().sum().backward()
    with mpu.get_cuda_rng_tracker().fork():
        drawn_inner = torch.rand(2)
    partition_activations_in_checkpoint(False)
    return [y.detach(), x.grad, *(p.grad for p in blocks.parameters()), drawn_forward, torch.rand(2), drawn_inner]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.fixture
def blocks(one_rank):
    mpu.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(3))


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]), torch.arange(6) > 2])
def test_gradients_and_random_streams_are_bit_equal_with_dropout(blocks, mask, needs_grad):
    x = torch.randn(4, 6).requires_grad_(needs_grad)
    want = run(blocks, x, mask, lambda block, *args: block(*args))
    assert all(block.calls == 1 for block in blocks)
    got = run(blocks, x, mask, checkpoint)
    assert all(block.calls == 3 for block in blocks), "one forward and one recomputation more"
    assert_same(got, want)


def test_dropout_would_differ_without_restored_streams(blocks, monkeypatch):
    """The test above can fail."""
    x = torch.randn(4, 6, requires_grad=True)
    want = run(blocks, x, None, lambda block, *args: block(*args))
    monkeypatch.setattr(mpu.random.RngState, "restore", lambda self: None)
    got = run(blocks, x, None, checkpoint)
    assert torch.equal(got[0], want[0]) and not torch.equal(got[1], want[1])


def mixed(x, number, nothing, items, flags, unused):
    """Tensors and other things, in and out."""
    hidden = (x * number + len(items)) * flags
    return hidden, None, number, hidden.detach() * 2, flags, x, ["a"], hidden.argmax(-1), hidden * 3


def test_mixed_arguments_and_outputs_come_back_in_order(one_rank):
    x = torch.randn(3, 4, requires_grad=True)
    other = torch.randn(2, requires_grad=True)
    flags = torch.tensor([True, False, True, True])
    args = (x, 3, None, [1, 2], flags, other)
    for make in (tuple, list):
        want = make(mixed(*args))
        got = checkpoint(lambda *a, make=make: make(mixed(*a)), *args)
        assert type(got) is make and len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
        assert not got[4].requires_grad and not got[7].requires_grad
        found = []
        for outputs in (want, got):
            x.grad = other.grad = None
            (
                outputs[0].sum() + (outputs[8] * outputs[0]).sum() + 5 * outputs[5].sum()
            ).backward()  # others get no gradient
            found.append((x.grad, other.grad))
        assert torch.equal(found[0][0], found[1][0]) and found[0][1] is found[1][1] is None


def test_single_outputs_that_are_no_tensor(one_rank):
    assert checkpoint(lambda x: None, torch.ones(1, requires_grad=True)) is None
    assert checkpoint(lambda x: 3, torch.ones(1)) == 3


def test_an_output_without_gradient_is_skipped(one_rank):
    x = torch.ones(2, requires_grad=True)
    a, b = checkpoint(lambda x: (x * 2, x.detach() * 3), x)
    (a + b).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    x.grad = None
    checkpoint(lambda x: x.detach() * 3, x).sum().backward()  # nothing to do, no error
    assert x.grad is None


def test_an_output_that_is_not_used_adds_nothing(one_rank):
    x = torch.zeros(1, requires_grad=True)
    double, root = checkpoint(lambda x: (x * 2, x.sqrt()), x)
    double.backward()
    assert x.grad.item() == 2.0, "a gradient of zero for the root would make it 0 * inf"


def test_without_grad_mode_it_is_the_call_and_keeps_nothing(one_rank):
    with torch.no_grad():
        y = checkpoint(nn.Linear(2, 2), torch.ones(1, 2))
    assert y.grad_fn is None


def test_parameters_get_gradients_when_no_input_needs_one(one_rank):
    embedding = nn.Embedding(5, 3)
    ids = torch.tensor([0, 4, 4])
    checkpoint(embedding, ids).square().sum().backward()
    got, embedding.weight.grad = embedding.weight.grad, None
    embedding(ids).square().sum().backward()
    assert torch.equal(got, embedding.weight.grad)


def test_one_tensor_given_twice_gets_both_gradients(one_rank):
    x = torch.tensor([2.0], requires_grad=True)
    checkpoint(lambda a, b: a * b * b, x, x).backward()
    assert x.grad.item() == 12.0


def test_second_backward_and_nested_checkpoints(blocks):
    x = torch.randn(4, 6, requires_grad=True)

    def nested(x):
        return checkpoint(blocks[1], checkpoint(blocks[0], x))

    found = []
    for function in (lambda x: blocks[1](blocks[0](x)), lambda x: checkpoint(nested, x)):
        torch.manual_seed(3)
        mpu.model_parallel_cuda_manual_seed(5)
        x.grad = None
        blocks.zero_grad()
        y = function(x).sum()
        y.backward(retain_graph=True)
        y.backward()
        found.append([x.grad, *(p.grad for p in blocks[:2].parameters())])
    assert_same(*found)


@pytest.mark.parametrize("uses", [1, 3])
def test_autocast_is_restored_and_its_cache_does_no_harm(one_rank, uses):
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    found = []
    for call in (lambda f, *a: f(*a), checkpoint):
        x.grad = layer.weight.grad = layer.bias.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y = call(layer, x)
            assert y.dtype == torch.bfloat16
            if (
                uses == 3
            ):  # a cast of the weight without graph, or of a graph that is gone, must not be found in the cache
                y = layer(call(layer, y))
        y.float().sum().backward()  # outside of the region
        found.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
    if uses == 1:
        assert_same(*found)
    else:  # the plain run adds up the gradients of its one cast in bf16
        for a, b in zip(*found, strict=True):
            assert_close(a, b, atol=0.02 * b.abs().max().item(), rtol=0)


def test_backward_inside_of_a_region_that_the_forward_was_not_in(one_rank):
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    seen = []

    def function(x):
        y = layer(x)
        seen.append(y.dtype)
        return y

    y = checkpoint(function, x)
    with torch.autocast("cpu", torch.bfloat16):
        y.sum().backward()
    assert seen == [torch.float32, torch.float32]


def test_what_would_lose_a_gradient_is_refused(one_rank):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="argument 1 is a list .*argument of its own"):
        checkpoint(lambda a, b: a, x, [{"x": (x,)}])
    with pytest.raises(ValueError, match="returned a dict"):
        checkpoint(lambda a: {"x": a}, x)
    with pytest.raises(ValueError, match="returned a list"):
        checkpoint(lambda a: (a, [a]), x)
    assert checkpoint(lambda a, b: a + b["x"], x, {"x": x.detach()}).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="torch.autograd.grad"):
        torch.autograd.grad(checkpoint(torch.sin, x).sum(), x)
    z = x * 1
    y = checkpoint(torch.sin, z)
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_activations_are_freed_until_the_backward(blocks):
    inner = []

    def function(x):
        hidden = x * 2
        inner.append(weakref.ref(hidden))
        return blocks[0](hidden)

    y = checkpoint(function, torch.randn(4, 6, requires_grad=True))
    gc.collect()
    assert inner[0]() is None
    y.sum().backward()
    assert len(inner) == 2


def kept_tensors(function, *args):
    """What a checkpointed call saves, by autograd's own hooks."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        y = checkpoint(function, *args)
    return y, saved


@contextmanager
def watched_gathers():
    """The sizes of what comm.all_gather is given."""
    sizes, real = [], comm.all_gather
    comm.all_gather = lambda x, group: (sizes.append(x.numel()), real(x, group))[1]
    try:
        yield sizes
    finally:
        comm.all_gather = real


def partition_case():
    """Bit-equal with and without cutting; 1/t of each floating-point input is kept, whatever its size; one gather a block."""
    mpu.initialize_model_parallel(dist.get_world_size())
    t = dist.get_world_size()
    torch.manual_seed(0)
    mpu.model_parallel_cuda_manual_seed(5)
    blocks = nn.ModuleList(Block(5) for _ in range(2))
    for rows in (1, 3, 4):  # 5, 15, 20 elements: odd sizes are filled up
        for mask in (None, torch.rand(5), torch.arange(5) > 2):
            x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows)).requires_grad_()
            want = run(blocks, x, mask, lambda block, *args: block(*args))
            with watched_gathers() as gathered:
                got = run(blocks, x, mask, checkpoint, partition=True)
            assert_same(got, want)
            assert gathered == ([] if t == 1 else [-(-5 * rows // t)] * 2)
    partition_activations_in_checkpoint(True)
    x, residual = torch.randn(7, 3, requires_grad=True), torch.randn(4)
    ids, mask, low = torch.arange(6), torch.rand(7, 3), torch.randn(9).bfloat16()
    _, saved = kept_tensors(lambda *a: a[0] * 1, x, residual, ids, low, torch.zeros(0, 3), mask)
    sizes = [-(-21 // t), -(-4 // t), 6, -(-9 // t), 0, 21]
    assert [s.numel() for s in saved] == sizes and saved[3].dtype == torch.bfloat16
    assert [s.numel() for s in kept_tensors(torch.sin, mask)[1]] == [sizes[0]], "an only argument is no mask"
    _, saved = kept_tensors(lambda a, b: a + b, mask, x)
    assert [s.numel() for s in saved] == [sizes[0]] * 2, "nor is one that needs a gradient"
    assert saved[0].untyped_storage().nbytes() == 4 * sizes[0] or t == 1, "a piece must not hold on to the whole"
    # The group is looked up in every call.
    mpu.destroy_model_parallel()
    assert [s.numel() for s in kept_tensors(torch.sin, x)[1]] == [21]
    mpu.initialize_model_parallel(1)
    assert [s.numel() for s in kept_tensors(torch.sin, x)[1]] == [21]
    partition_activations_in_checkpoint(False)
    assert activation_checkpointing.settings.partition_activations is False


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_partitioned_activations_are_bit_equal_and_keep_one_part_in_t(world_size):
    run_ranks(world_size, partition_case)


def parallel_block_case():
    """A block of parallel layers inside: its collectives run again in the recomputation, in the same order on every rank."""
    mpu.initialize_model_parallel(2)
    torch.manual_seed(0)
    mpu.model_parallel_cuda_manual_seed(5)
    column = mpu.ColumnParallelLinear(6, 8, gather_output=False, overlap_backward=True)
    row = mpu.RowParallelLinear(8, 6, input_is_parallel=True)

    def block(x):
        with mpu.get_cuda_rng_tracker().fork():
            hidden = dropout(torch.tanh(column(x)), 0.3)
        return x + dropout(row(hidden), 0.2)

    found = []
    for call in (lambda f, x: f(x), checkpoint):
        torch.manual_seed(1)
        mpu.model_parallel_cuda_manual_seed(2)
        x = torch.ones(3, 6, requires_grad=True)
        parameters = [*column.parameters(), *row.parameters()]
        for p in parameters:
            p.grad = None
        y = call(block, call(block, x))
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in parameters)])
    assert_same(*found)


def test_parallel_layers_inside_are_bit_equal():
    run_ranks(2, parallel_block_case)
