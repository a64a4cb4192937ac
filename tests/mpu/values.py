"""Numbers to compare with."""

import torch


def shared(*shape, seed=0):
    """The same random numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
