"""The sequence-parallel mappings and layers: values, gradients, and that no tensor of somebody else is written to."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close

from megazero import mpu
from tests.mpu.values import load, shared
from tests.ranks import run_ranks


def mapping_case():
    group = dist.group.WORLD
    t, r = group.size(), group.rank()
    parts = [shared(2, 3, seed=i) for i in range(t)]  # [s/t, 3], what rank i has
    whole = torch.cat(parts)  # [s, 3]
    partial = [shared(2 * t, 3, seed=20 + i) for i in range(t)]  # [s, 3], rank i's part of a sum
    grads = [shared(2, 3, seed=60 + i) for i in range(t)]
    grads_of_whole = [shared(2 * t, 3, seed=80 + i) for i in range(t)]
    # function, input of this rank, output, incoming gradient, gradient of the input
    cases = (
        (mpu.scatter_to_sequence_parallel_region, whole, parts[r], grads[r], torch.cat(grads)),
        (mpu.gather_from_sequence_parallel_region, parts[r], whole, grads_of_whole[r], sum(grads_of_whole).chunk(t)[r]),
        (
            lambda x, group: mpu.gather_from_sequence_parallel_region(x, False, group),
            *(parts[r], whole, grads_of_whole[0], grads_of_whole[0].chunk(t)[r]),
        ),
        (
            mpu.reduce_scatter_to_sequence_parallel_region,
            *(partial[r], sum(partial).chunk(t)[r], grads[r], torch.cat(grads)),
        ),
        (
            lambda x, group: mpu.copy_parameters_to_sequence_parallel_region([x], group)[0],
            *(whole, whole, grads_of_whole[r], sum(grads_of_whole)),
        ),
    )
    for function, x, want, grad, want_grad in cases:
        for form in (x, x.t().contiguous().t(), x.to(torch.bfloat16), x.double()):
            form = form.clone(memory_format=torch.preserve_format).requires_grad_()
            before, incoming = form.detach().clone(), grad.to(form.dtype)
            incoming_before = incoming.clone()
            got = function(form, group=group)
            tolerance = {"atol": 5e-2, "rtol": 5e-2} if form.dtype == torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-6}
            assert_close(got, want.to(form.dtype), **tolerance)
            (got_grad,) = torch.autograd.grad(got, form, incoming)
            assert_close(got_grad, want_grad.to(form.dtype), **tolerance)
            assert torch.equal(form, before) and torch.equal(incoming, incoming_before), "its input was written to"
            assert all(y.untyped_storage().nbytes() == y.nbytes for y in (got, got_grad)), "more is kept than it needs"


def kept_case():
    group = dist.group.WORLD
    layer = mpu.ColumnParallelLinear(4, 3 * group.size(), gather_output=False, sequence_parallel=True, group=group)
    x = shared(2, 5, 4, seed=group.rank()).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).sum(), x)
    assert grad.untyped_storage().nbytes() == x.nbytes
    for is_trained in (True, False):
        layer.weight.requires_grad_(is_trained)
        kept: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved, kept=kept: kept.append(saved.shape), lambda _: None
        ):
            layer(x)
        assert (x.shape in kept) == is_trained


def test_a_column_layer_keeps_its_slice_and_that_only_for_the_gradient_of_its_weight():
    run_ranks(2, kept_case)


def second_derivative_case():
    """Gather, cube and weigh on every rank, reduce-scatter, square; differentiated twice: as in one process."""
    group = dist.group.WORLD
    t, r = group.size(), group.rank()
    x = shared(2 * t, seed=3).double()
    weights = [shared(2 * t, seed=7 + i).double() for i in range(t)]
    own = x.chunk(t)[r].clone().requires_grad_()
    y = mpu.gather_from_sequence_parallel_region(own, group=group) ** 3 * weights[r]
    y = mpu.reduce_scatter_to_sequence_parallel_region(y, group).square().sum()
    (first,) = torch.autograd.grad(y, own, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), own)
    assert_close(first, (6 * sum(weights) ** 2 * x**5).chunk(t)[r])
    assert_close(second, (30 * sum(weights) ** 2 * x**4).chunk(t)[r])
    # Scatter what is whole on every rank.
    whole = x.clone().requires_grad_()
    y = (mpu.scatter_to_sequence_parallel_region(whole, group) ** 3).sum()
    (first,) = torch.autograd.grad(y, whole, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), whole)
    assert_close((first, second), (3 * x**2, 6 * x))
    # A parameter: used in its third power on every rank's slice.
    p = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(
        ((r + 1) * mpu.copy_parameters_to_sequence_parallel_region([p], group)[0] ** 3).sum(), p, create_graph=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a collective that it cannot differentiate is in a graph
        (second,) = torch.autograd.grad(first.sum(), p)
    assert_close(first, 3 * sum(range(1, t + 1)) * p**2)
    assert_close(second, 6 * sum(range(1, t + 1)) * p)


def several_parameters_case():
    """One message for parameters of several shapes; one that is not used counts as zero, a frozen one has no gradient."""
    group = dist.group.WORLD
    t, r = group.size(), group.rank()
    a, b = torch.ones(3, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    unused, frozen = torch.ones(1, requires_grad=True), torch.ones(5)
    c, d, _, e = mpu.copy_parameters_to_sequence_parallel_region([a, b, unused, frozen], group)
    ((r + 1) * (c.sum() + 2 * d.sum() + e.sum())).backward()
    total = sum(range(1, t + 1))
    assert a.grad.tolist() == [total] * 3 and b.grad.tolist() == [[2 * total] * 2] * 2
    assert frozen.grad is None and (unused.grad is None if t == 1 else unused.grad.tolist() == [0.0])
    # In bf16, 256 + 1 is 256: a sum that is rounded at every rank never gets beyond it.
    low, slices = torch.zeros(t, dtype=torch.bfloat16, requires_grad=True), torch.eye(t) * 255 + 1
    (mpu.copy_parameters_to_sequence_parallel_region([low], group)[0] * slices[r].bfloat16()).sum().backward()
    assert torch.equal(low.grad, slices.sum(dim=0).bfloat16())


def layers_case():
    """Column and row with a bias each, on slices: as two linear layers on all of it, whatever needs a gradient; autocast too."""
    group = dist.group.WORLD
    t, r = group.size(), group.rank()
    weight_1, bias_1, weight_2, bias_2 = (
        shared(12, 5, seed=1),
        shared(12, seed=2),
        shared(5, 12, seed=3),
        shared(5, seed=4),
    )
    x = shared(4 * t, 3, 5, seed=5)
    for needs_x, needs_weight, low in ((1, 1, 0), (1, 0, 0), (0, 1, 0), (1, 1, 1)):
        column = mpu.ColumnParallelLinear(5, 12, gather_output=False, group=group, sequence_parallel=True)
        row = mpu.RowParallelLinear(12, 5, input_is_parallel=True, group=group, sequence_parallel=True)
        load(column, weight_1, bias_1)
        load(row, weight_2, bias_2)
        column.weight.requires_grad_(bool(needs_weight))
        own = x.chunk(t)[r].clone().requires_grad_(bool(needs_x))
        whole = x.clone().requires_grad_(bool(needs_x))
        plain = [w.clone().requires_grad_() for w in (weight_1, bias_1, weight_2, bias_2)]
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(low)):
            got = row(torch.tanh(column(own)))
            want = F.linear(torch.tanh(F.linear(whole, *plain[:2])), *plain[2:])
        assert got.dtype == want.dtype == (torch.bfloat16 if low else torch.float32)
        (got.float() ** 2).sum().backward()
        (want.float() ** 2).sum().backward()
        tolerance = {"atol": 1e-5, "rtol": 1e-5}
        cuts = [column.partitions["weight"], column.partitions["bias"], row.partitions["weight"], None]
        found = [(got, want.chunk(t)[r])]
        found += [(own.grad, whole.grad.chunk(t)[r])] if needs_x else []
        for p, q, cut in zip([*column.parameters(), *row.parameters()], plain, cuts, strict=True):
            if p.requires_grad:
                found.append((p.grad, q.grad if cut is None else cut.slice(q.grad, r, t)))
        for a, b in found:
            if low:
                tolerance = {"atol": 0.03 * b.abs().max().item(), "rtol": 0}
            assert_close(a, b.to(a.dtype), **tolerance)


def embedding_case():
    group = dist.group.WORLD
    t, r = group.size(), group.rank()
    table = mpu.VocabParallelEmbedding(4 * t, 3, group=group, sequence_parallel=True)
    whole = mpu.VocabParallelEmbedding(4 * t, 3, group=group)
    whole.load_state_dict(table.state_dict())
    ids = torch.arange(4 * t).view(2 * t, 2)
    for one in (table, whole):
        y = one(ids)
        y = y if one is whole else mpu.gather_from_sequence_parallel_region(y, False, group)
        (y * shared(2 * t, 2, 3)).sum().backward()
    assert_close(table(ids), whole(ids).chunk(t)[r])
    assert_close(table.weight.grad, whole.weight.grad)


def refused_case():
    group = dist.group.WORLD
    for function in (mpu.scatter_to_sequence_parallel_region, mpu.reduce_scatter_to_sequence_parallel_region):
        with pytest.raises(ValueError, match="--sequence-parallel .* 5 tokens .*--model-parallel-size 2"):
            function(torch.zeros(5, 2), group)
    with pytest.raises(ValueError, match="gather_output=False"):
        mpu.ColumnParallelLinear(4, 4, group=group, sequence_parallel=True)
    with pytest.raises(ValueError, match="input_is_parallel=True"):
        mpu.RowParallelLinear(4, 4, group=group, sequence_parallel=True)


def all_cases():
    mapping_case()
    second_derivative_case()
    several_parameters_case()
    layers_case()
    embedding_case()
    if dist.get_world_size() == 2:
        refused_case()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_mappings_and_layers_equal_what_one_process_computes(world_size):
    run_ranks(world_size, all_cases)
