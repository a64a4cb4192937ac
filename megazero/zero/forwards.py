"""Tracks which modules of a model run forward now, to know who reads a parameter and whether a backward will follow."""

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
        """Tracks the module from now on; returns the hooks' handles."""
        before = module.register_forward_pre_hook(Hook(self._enter), prepend=True)
        return [before, module.register_forward_hook(Hook(self._leave), always_call=True)]

    @property
    def innermost(self) -> nn.Module | None:
        """The innermost module whose forward runs now; None if none does."""
        return self._modules[-1] if self._modules else None

    @property
    def expects_backward(self) -> bool:
        """Whether a backward will follow. Also true in a checkpointed part, which keeps no activations and runs under no_grad."""
        return torch.is_grad_enabled() or (self._has_graph and bool(self._modules))

    def read(self, bucket: Bucket) -> bool:
        """Whether one of these modules reads a parameter of the bucket without owning it."""
        return any(bucket_of(p) is bucket for module in self._modules for p in external_parameters(module))

    def clear(self) -> None:
        """Forgets all modules, because torch runs no hook if Ctrl-C ends a forward."""
        self._modules.clear()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if not self._modules:
            self._has_graph = torch.is_grad_enabled()
        self._modules.append(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        while module in self._modules and self._modules.pop() is not module:
            pass  # an inner module that an exception has left without running its hook


def in_backward() -> bool:
    """Whether a backward runs now: a forward is a recomputation then."""
    return torch._C._current_graph_task_id() != -1
