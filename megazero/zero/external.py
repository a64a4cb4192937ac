"""Parameters that a module reads although another module owns them (DeepSpeed's external parameters)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from megazero.zero.hooks import Hook
from megazero.zero.parameter import bucket_of

if TYPE_CHECKING:
    from megazero.zero.bucket import Bucket

_external: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Has `parameter` whole around the forward and backward of `module`, which reads it without owning it.

    May be called before or after the engine is made: in the module's constructor, for instance. The first read does the same by
    itself; so this spares a wait, and a graph break where the module is compiled.

    Raises:
        RuntimeError: one of the arguments is something else.
    """
    _check(module, parameter)
    known = _external.setdefault(module, [])
    if not any(p is parameter for p in known):
        known.append(parameter)
        bucket = bucket_of(parameter)
        if bucket is not None and bucket.driver is not None:
            bucket.driver.add_external(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undoes `register_external_parameter` for engines made from now on; a present one goes on gathering it.

    Raises:
        RuntimeError: the parameter was not registered for the module.
    """
    _check(module, parameter)
    known = _external.get(module, [])
    if not any(p is parameter for p in known):
        raise RuntimeError("the parameter is not registered as an external parameter of this module.")
    _external[module] = [p for p in known if p is not parameter]


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """What was registered for `module`."""
    return _external.get(module, [])


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


def _check(module: object, parameter: object) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise RuntimeError(
            f"register_external_parameter takes a module and a parameter, got {type(module).__name__} and "
            f"{type(parameter).__name__}."
        )
