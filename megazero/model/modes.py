"""Training and evaluation mode for the time of a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Inside, all modules of `model` are in training mode, or in evaluation mode; afterwards each is in its own again."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training
