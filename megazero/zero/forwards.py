"""Which modules of a model run forward now, so that it is known who reads a parameter, and whether a backward will follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megazero.zero.bucket import Bucket
from megazero.zero.external import external_parameters
from megazero.zero.hooks import Hook
from megazero.zero.registry import bucket_of


class Forwards:
    """The modules whose forwards are under way, outermost first."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._has_graph = False  # of the outermost one

    def watch(self, module: nn.Module) -> list[Any]:
        """Counts the module in from now on; returns the handles."""
        before = module.register_forward_pre_hook(Hook(self._enter), prepend=True)
        return [before, module.register_forward_hook(Hook(self._leave), always_call=True)]

    @property
    def innermost(self) -> nn.Module | None:
        """The one that runs now, if any does."""
        return self._modules[-1] if self._modules else None

    @property
    def train(self) -> bool:
        """Whether a backward will follow: also in a part whose activations are not kept, which runs under no_grad."""
        return torch.is_grad_enabled() or (self._has_graph and bool(self._modules))

    def read(self, bucket: Bucket) -> bool:
        """Whether one of them reads a parameter of the bucket that it does not own."""
        return any(bucket_of(p) is bucket for module in self._modules for p in external_parameters(module))

    def clear(self) -> None:
        """Forgets them all: torch runs no hook where Ctrl-C ends a forward."""
        self._modules.clear()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if not self._modules:
            self._has_graph = torch.is_grad_enabled()
        self._modules.append(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        while module in self._modules and self._modules.pop() is not module:
            pass  # a part that an exception has left without its hook
