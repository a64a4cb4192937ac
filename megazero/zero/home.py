"""Where a bucket's state rests between its uses. The one home built now is the accelerator, where it is used anyway."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Home(Protocol):
    """Rests flat tensors somewhere, and brings them where they are computed with.

    A homed tensor is what `empty` returned. `fetch` and `store` may be asynchronous inside, but what `fetch` returns is there.
    """

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A homed tensor of `numel` elements, uninitialised."""
        ...

    def prefetch(self, homed: Tensor) -> None:
        """Says that `fetch(homed)` comes soon."""
        ...

    def fetch(self, homed: Tensor) -> Tensor:
        """The values of `homed` on the accelerator."""
        ...

    def store(self, homed: Tensor, values: Tensor) -> None:
        """Makes `values`, which `fetch` returned and the caller has changed, those of `homed`."""
        ...


class AcceleratorHome:
    """Tensors rest on the device that computes with them (the CPU in a run without a GPU): nothing ever moves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor on the device."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def prefetch(self, homed: Tensor) -> None:
        """Nothing to bring."""

    def fetch(self, homed: Tensor) -> Tensor:
        """`homed` itself."""
        return homed

    def store(self, homed: Tensor, values: Tensor) -> None:
        """`values` are `homed`'s memory: the change is there already."""
        assert values is homed
