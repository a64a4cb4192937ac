"""Numbers to compare with, and layers that have them."""

import torch


def shared(*shape, seed=0):
    """The same random numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def load(layer, weight, bias):
    """Puts this rank's part of full values into the layer."""
    with torch.no_grad():
        for name, full in (("weight", weight), ("bias", bias)):
            parameter, cut = getattr(layer, name), layer.partitions.get(name)
            if parameter is not None:
                parameter.copy_(full if cut is None else cut.slice(full, layer.group.rank(), layer.group.size()))
