"""Checkpointed functions against the same functions without: outputs, gradients, random streams and what is kept."""

import gc
import weakref
from collections import deque
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.testing import assert_close

from megazero import mpu
from megazero.activation_checkpointing import checkpoint, non_reentrant_checkpoint
from tests.activation_checkpointing.blocks import Block, assert_same, plainly, run
from tests.ranks import run_ranks

BOTH = pytest.mark.parametrize("checkpoint", [checkpoint, non_reentrant_checkpoint], ids=["reentrant", "by hooks"])


@pytest.fixture
def blocks(one_rank):
    mpu.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(3))


@BOTH
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]), torch.arange(6) > 2])
def test_gradients_and_random_streams_are_bit_equal_with_dropout(blocks, mask, needs_grad, checkpoint):
    x = torch.randn(4, 6).requires_grad_(needs_grad)
    want = run(blocks, x, mask, plainly)
    assert all(block.calls == 1 for block in blocks)
    got = run(blocks, x, mask, checkpoint)
    assert all(block.calls == 3 for block in blocks), "one forward and one recomputation more"
    assert_same(got, want)


@BOTH
def test_dropout_would_differ_without_restored_streams(blocks, monkeypatch, checkpoint):
    """The test above can fail."""
    x = torch.randn(4, 6, requires_grad=True)
    want = run(blocks, x, None, plainly)
    monkeypatch.setattr(mpu.random.RngState, "restore", lambda self: None)
    got = run(blocks, x, None, checkpoint)
    assert torch.equal(got[0], want[0]) and not torch.equal(got[1], want[1])


@BOTH
@pytest.mark.parametrize("forked", ["forward", "backward", "both"])
def test_forks_around_the_forward_and_the_backward_change_nothing(blocks, forked, checkpoint):
    """Those inside of the block nest in them, in the first run and in the second one."""

    def fork(part):
        return mpu.get_cuda_rng_tracker().fork() if forked in (part, "both") else nullcontext()

    def run(call):
        torch.manual_seed(3)
        mpu.model_parallel_cuda_manual_seed(5)
        x = torch.arange(24.0).view(4, 6).requires_grad_()
        with fork("forward"):
            y = call(blocks[0], x)
        with fork("backward"):
            y.square().sum().backward()
            drawn = torch.rand(2)
        with mpu.get_cuda_rng_tracker().fork():
            return [y.detach(), x.grad, drawn, torch.rand(2)]

    assert_same(run(checkpoint), run(plainly))


def mixed(x, number, nothing, items, flags, unused):
    """Tensors and other things, in and out."""
    hidden = (x * number + len(items)) * flags
    return hidden, None, number, hidden.detach() * 2, flags, x, ["a"], hidden.argmax(-1), hidden * 3


@BOTH
def test_mixed_arguments_and_outputs_come_back_in_order(one_rank, checkpoint):
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


@BOTH
def test_single_outputs_that_are_no_tensor(one_rank, checkpoint):
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


@BOTH
def test_an_output_that_is_not_used_adds_nothing(one_rank, checkpoint):
    x = torch.zeros(1, requires_grad=True)
    double, root = checkpoint(lambda x: (x * 2, x.sqrt()), x)
    double.backward()
    assert x.grad.item() == 2.0, "a gradient of zero for the root would make it 0 * inf"


@BOTH
def test_without_grad_mode_it_is_the_call_and_keeps_nothing(one_rank, checkpoint):
    with torch.no_grad():
        y = checkpoint(nn.functional.linear, torch.ones(1, 2), nn.Parameter(torch.ones(2, 2)), None)
    assert y.grad_fn is None


@BOTH
def test_parameters_get_gradients_when_no_input_needs_one(one_rank, checkpoint):
    embedding = nn.Embedding(5, 3)
    ids = torch.tensor([0, 4, 4])
    checkpoint(embedding, ids).square().sum().backward()
    got, embedding.weight.grad = embedding.weight.grad, None
    embedding(ids).square().sum().backward()
    assert torch.equal(got, embedding.weight.grad)


@BOTH
def test_one_tensor_given_twice_gets_both_gradients(one_rank, checkpoint):
    x = torch.tensor([2.0], requires_grad=True)
    checkpoint(lambda a, b: a * b * b, x, x).backward()
    assert x.grad.item() == 12.0


@BOTH
def test_second_backward_and_nested_checkpoints(blocks, checkpoint):
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


@BOTH
@pytest.mark.parametrize("uses", [1, 3])
def test_autocast_is_restored_and_its_cache_does_no_harm(one_rank, uses, checkpoint):
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    found = []
    for call in (plainly, checkpoint):
        x.grad = layer.weight.grad = layer.bias.grad = None
        with torch.autocast("cpu", torch.float16):  # which is not its default there
            y = call(layer, x)
            assert y.dtype == torch.float16
            # A cast of the weight without graph, or of a graph that is gone, must not be found in the cache.
            if uses == 3:
                y = layer(call(layer, y))
        y.float().sum().backward()  # outside of the region
        found.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
    if uses == 1:
        assert_same(*found)
    else:  # the plain run adds up the gradients of its one cast in fp16
        for a, b in zip(*found, strict=True):
            assert_close(a, b, atol=0.02 * b.abs().max().item(), rtol=0)


@BOTH
def test_backward_inside_of_a_region_that_the_forward_was_not_in(one_rank, checkpoint):
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    seen = []

    def function(x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return layer(x.sin())

    y = checkpoint(function, x)
    with torch.autocast("cpu", torch.bfloat16):
        y.sum().backward()
    assert seen == [False, False]


class Box:
    def __init__(self, x):
        self.x = x


def nested(pair, scale=1, *, more):
    """Containers in and out."""
    (a, flag), rest = pair
    c = more["c"][0][0] * scale
    return {"sum": a + c if flag else a, "rest": [rest, deque((c * 2, None))], "same": c}, c


@BOTH
def test_tensors_in_any_nesting_and_by_keyword_have_their_gradients(one_rank, checkpoint):
    a, c = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    found = []
    for call in (plainly, checkpoint):
        a.grad = c.grad = None
        out, again = call(nested, ((a * 1, True), "rest"), scale=3, more={"c": deque([[c]])})
        assert list(out) == ["sum", "rest", "same"] and out["rest"][0] == "rest" and out["rest"][1][1] is None
        (out["sum"] + 5 * out["rest"][1][0] + 7 * out["same"] + 11 * again).sum().backward()
        found.append([again.detach(), a.grad, c.grad])
    assert_same(*found)


@BOTH
def test_a_packed_sequence_goes_in_and_comes_out(one_rank, checkpoint):
    """A named tuple whose constructor asks its tensors where they lie."""
    a, found = torch.randn(3, 4, requires_grad=True), []
    for call in (plainly, checkpoint):
        a.grad = None
        out = call(lambda x: x._replace(data=x.data.sin()), pack_sequence([a, a[:2]]))
        assert type(out) is PackedSequence and out.batch_sizes.tolist() == [2, 2, 1]
        out.data.square().sum().backward()
        found.append([out.data.detach(), a.grad])
    assert_same(*found)


class Settings(dict):
    def __setitem__(self, key, value):
        raise TypeError("read-only")


class Pair(tuple):
    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


@BOTH
def test_containers_without_tensors_go_through_as_they_are_whatever_their_class(one_rank, checkpoint):
    x, given = torch.ones(2, requires_grad=True), [Settings(scale=2), Pair(1, 3)]
    y, *returned = checkpoint(lambda x, settings, pair: (x * settings["scale"] * pair[1], settings, pair), x, *given)
    y.sum().backward()
    assert x.grad.tolist() == [6, 6] and all(out is one for out, one in zip(returned, given, strict=True))


def test_what_would_lose_a_gradient_is_refused(one_rank):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="an argument is a Box that holds a tensor which needs a gradient"):
        checkpoint(lambda a, b: a, x, [Box(x * 2)])
    with pytest.raises(ValueError, match="returned a Box that holds tensors"):
        checkpoint(lambda a: Box(a), x)
    assert checkpoint(lambda a, b: a + b.x, x, Box(x.detach())).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="torch.autograd.grad.* non_reentrant_checkpoint"):
        torch.autograd.grad(checkpoint(torch.sin, x).sum(), x)
    with pytest.raises(RuntimeError, match="create_graph.* non_reentrant_checkpoint"):
        (checkpoint(torch.sin, x).sum() + x.square().sum()).backward(create_graph=True)
    number = iter([1, 2])
    with pytest.raises(RuntimeError, match="returned 1 tensors in the forward, and 2 when it ran again"):
        checkpoint(lambda a: [a * 2] * next(number), x)[0].sum().backward()


def test_hooks_serve_torch_autograd_grad_and_objects(one_rank):
    x = torch.tensor([0.5], requires_grad=True)
    y = non_reentrant_checkpoint(lambda box: Box(box.x.sin()), Box(x * 2)).x
    (grad,) = torch.autograd.grad(y, x)
    assert_close(grad, 2 * (2 * x).cos())


@BOTH
def test_an_argument_that_was_changed_since_is_refused(one_rank, checkpoint):
    z = torch.ones(2, requires_grad=True) * 1
    y = checkpoint(lambda z: z.sin().sin(), z)
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@BOTH
def test_a_function_that_changes_its_argument_is_refused(one_rank, checkpoint):
    """Its second run would begin with other values, and gradients would be wrong."""
    x, counter = torch.ones(3, requires_grad=True), torch.zeros(3)
    with pytest.raises(RuntimeError, match="modified .*by an inplace operation"):
        checkpoint(lambda x, counter: x * counter.add_(1), x, counter).sum().backward()


@BOTH
def test_activations_are_freed_until_the_backward(blocks, checkpoint):
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
    for call in (plainly, checkpoint):
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


@BOTH
def test_a_block_whose_output_shape_changes_is_refused(one_rank, checkpoint):
    """By hooks torch compares every saved tensor, and says so in its own words."""
    sizes = iter([3, 2])
    y = checkpoint(lambda x: x[: next(sizes)].sin(), torch.ones(4, requires_grad=True))
    message = r"shape \[3\] in the forward, and of shape \[2\].*--checkpoint-activations|different metadata"
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


@BOTH
def test_no_grad_refuses_a_tensor_with_a_graph_but_not_an_evaluation(one_rank, checkpoint):
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    with torch.no_grad():
        assert checkpoint(layer, x).grad_fn is None, "an input without graph has none to lose"
        checkpoint(layer, checkpoint(layer, x))
        assert checkpoint(layer, layer(x)).grad_fn is None
    y = layer(x)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"inside of no_grad\(\) with a tensor of shape \[2, 3\] .*detach\(\)"):
            checkpoint(layer, y)
        checkpoint(layer, y.detach())
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"inside of no_grad\(\)"):
        checkpoint(lambda pair: layer(pair["a"][0]), {"a": [y]})
    checkpoint(lambda y: checkpoint(layer, y), y).sum().backward()  # nested ones of a graph are none of it
    assert x.grad is not None
