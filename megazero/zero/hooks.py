"""The hooks that the engine puts on the modules of a user's model, and what a copy of a module gets instead of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class Hook:
    """A module's hook that torch.compile leaves alone, and that a copy of the module loses, because a copy is not sharded."""

    def __init__(self, hook: Callable) -> None:
        self._call = torch.compiler.disable(hook)

    def __call__(self, *args: Any) -> Any:
        """What the hook returns."""
        return self._call(*args)

    def __reduce__(self) -> tuple:
        """What `copy.deepcopy` and pickle make of it: a function that does nothing and does not refer to the engine."""
        return partial, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    pass
