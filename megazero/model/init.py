"""How weights begin: normal, with residual projections scaled down by depth."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megazero.model.config import GPT2Config
from megazero.mpu.init import InitMethod


def normal_init(config: GPT2Config) -> InitMethod:
    """An initialiser that draws from N(0, std^2), with std = `init_method_std`."""
    return partial(nn.init.normal_, std=config.init_method_std)


def residual_init(config: GPT2Config) -> InitMethod:
    """An initialiser for the 2 x `num_layers` projections that add to the residual stream: N(0, std^2 / (2 num_layers)).

    Independent contributions add in variance, so the stream leaves the last block as wide as one unscaled contribution
    (GPT-2, sec. 2.3).
    """
    return partial(nn.init.normal_, std=config.init_method_std / math.sqrt(2.0 * config.num_layers))


# Of Tensor and of torch.nn.init.
_DRAWS = {"normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_"}


class NoDraws(TorchFunctionMode):
    """Context manager for building a model whose values are loaded next: initializers write zeros instead of drawing.

    A CPU draws some 0.2 billion values per second, on one core, on every rank.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Calls `func`, or fills its tensor with zeros."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) not in _DRAWS:
            return func(*args, **kwargs)
        with torch.no_grad():
            return (args[0] if args else kwargs["tensor"]).zero_()
