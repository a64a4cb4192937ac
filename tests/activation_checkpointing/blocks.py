"""Blocks with dropout, and runs of them whose gradients and random streams are compared."""

import torch
from torch import nn
from torch.nn.functional import dropout

from megazero import mpu


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


def plainly(function, *args, **kwargs):
    """What the checkpointed calls are compared with."""
    return function(*args, **kwargs)


def run(blocks, x, mask, call):
    """Outputs, gradients of the input and of the parameters, and the numbers drawn next from both streams."""
    torch.manual_seed(3)
    mpu.model_parallel_cuda_manual_seed(5)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    y = x
    for block in blocks:
        y = call(block, y, mask)
    blocks.zero_grad()
    drawn_forward = torch.rand(2)
    y.square().sum().backward()
    with mpu.get_cuda_rng_tracker().fork():
        drawn_inner = torch.rand(2)
    return [y.detach(), x.grad, *(p.grad for p in blocks.parameters()), drawn_forward, torch.rand(2), drawn_inner]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
