"""The four region mappings: values, gradients, and that no tensor of somebody else is written to."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from megazero import mpu
from tests.mpu.values import shared
from tests.ranks import run_ranks


def mapping_case():
    group = dist.group.WORLD
    t, r = group.size(), group.rank()
    parts = [shared(3, 2, seed=i) for i in range(t)]  # what rank i has
    whole = torch.cat(parts, -1)  # [3, 2t]
    grad_whole, grad_parts = shared(3, 2 * t, seed=50), [shared(3, 2, seed=60 + i) for i in range(t)]
    # name: input of this rank, output, incoming gradient of this rank, gradient of the input
    cases = {
        "copy_to": (
            whole,
            whole,
            torch.cat(grad_parts, -1) * (r + 1),
            torch.cat(grad_parts, -1) * sum(range(1, t + 1)),
        ),
        "reduce_from": (parts[r], sum(parts), grad_parts[0], grad_parts[0]),
        "scatter_to": (whole, parts[r], grad_parts[r], torch.cat(grad_parts, -1)),
        "gather_from": (parts[r], whole, grad_whole, grad_whole.chunk(t, -1)[r]),
    }
    for name, (x, want, grad, want_grad) in cases.items():
        function = getattr(mpu, f"{name}_model_parallel_region")
        for form in (x, x.t().contiguous().t(), x.to(torch.bfloat16), x.double()):
            form = form.clone(memory_format=torch.preserve_format).requires_grad_()
            before, incoming = form.detach().clone(), grad.to(form.dtype)
            incoming_before = incoming.clone()
            got = function(form, group)
            exact = form.dtype != torch.bfloat16
            tolerance = {"atol": 1e-6, "rtol": 1e-6} if exact else {"atol": 5e-2, "rtol": 5e-2}
            assert_close(got, want.to(form.dtype), **tolerance)
            if name != "copy_to":
                assert got.is_contiguous() or t == 1
            (got_grad,) = torch.autograd.grad(got, form, incoming)
            assert_close(got_grad, want_grad.to(form.dtype), **tolerance)
            assert torch.equal(form, before) and torch.equal(incoming, incoming_before), f"{name} wrote to its input"


def residual_case():
    """The branch beside a mapping shares its tensors: y = f(x) + x has gradient t + 1, and g leaves its input alone."""
    group = dist.group.WORLD
    t = group.size()
    x = torch.ones(4, requires_grad=True)
    (mpu.copy_to_model_parallel_region(x, group) + x).sum().backward()
    assert x.grad.tolist() == [t + 1.0] * 4
    x = torch.ones(4, requires_grad=True)
    y = mpu.reduce_from_model_parallel_region(x * 2, group) + x * 2
    assert y.tolist() == [2.0 * t + 2] * 4
    z = x * 2
    y = mpu.reduce_from_model_parallel_region(z, group) + z
    assert y.tolist() == [2.0 * t + 2] * 4 and z.tolist() == [2.0] * 4
    y.sum().backward()
    assert x.grad.tolist() == [4.0] * 4


class Copies(TorchDispatchMode):
    """Counts the operations that copy a tensor."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
        return func(*args, **(kwargs or {}))


def in_place_case():
    """What is given up becomes the sum, without a copy, and gradients are those of the mapping out of place."""
    group = dist.group.WORLD
    t = group.size()
    x = torch.ones(4, requires_grad=True)
    z = x * 2
    y = mpu.reduce_from_model_parallel_region(z, group, in_place=True)
    assert y.data_ptr() == z.data_ptr() and y.tolist() == [2.0 * t] * 4
    (y * y).sum().backward()
    assert x.grad.tolist() == [2 * 2.0 * t * 2] * 4
    layer = mpu.RowParallelLinear(2 * t, 3, input_is_parallel=True, group=group)
    part = torch.ones(5, 2)
    want = mpu.reduce_from_model_parallel_region(torch.nn.functional.linear(part, layer.weight), group)
    with Copies() as copies:
        got = layer(part)
    assert torch.equal(got, want) and copies.number == 0
    with Copies() as copies:
        mpu.reduce_from_model_parallel_region(got, group)
    assert copies.number == (t > 1)


def in_place_of_a_saved_tensor_case():
    """What a backward still needs is not given up silently: its gradient would be wrong."""
    y = torch.ones(3, requires_grad=True).exp()  # whose backward needs its result
    total = mpu.reduce_from_model_parallel_region(y, dist.group.WORLD, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.sum().backward()


def second_derivative_case():
    """f then g of a cube over every rank's share, differentiated twice: as t cubes in one process."""
    group = dist.group.WORLD
    x = shared(3).double().requires_grad_()
    own = shared(3, seed=7 + group.rank()).double()
    y = mpu.reduce_from_model_parallel_region(own * mpu.copy_to_model_parallel_region(x, group) ** 3, group).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    total = sum(shared(3, seed=7 + i).double() for i in range(group.size()))
    assert_close(first, 3 * total * x**2)
    assert_close(second, 6 * total * x)


def bad_width_case():
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="5 is not divisible by 2"):
        mpu.scatter_to_model_parallel_region(torch.zeros(2, 5), group)


def default_group_case():
    """Without an argument the mappings use the model-parallel group, not the world."""
    mpu.initialize_model_parallel(2)
    total = mpu.reduce_from_model_parallel_region(torch.ones(1))
    assert total.item() == 2.0


def all_cases():
    mapping_case()
    residual_case()
    in_place_case()
    second_derivative_case()
    if dist.get_world_size() == 2:
        bad_width_case()
        in_place_of_a_saved_tensor_case()
    if dist.get_world_size() == 4:
        default_group_case()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_mappings_equal_what_one_process_computes(world_size):
    run_ranks(world_size, all_cases)
