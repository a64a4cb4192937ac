"""The values of a whole linear layer: drawn as that layer would draw them, and written into layers that hold parts of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.mpu.parallel_module import ParallelModule

Values = dict[str, Tensor | None]  # full "weight" [out, in] and "bias" [out]; None if absent


def whole_layer(linear_cls: Callable[..., nn.Module], *sizes: int, **kwargs: Any) -> nn.Module:
    """The layer as it would be without tiles, built for the values that it draws."""
    if isinstance(linear_cls, type) and issubclass(linear_cls, ParallelModule):
        # Such a layer draws the full weight on the CPU and can keep it there; no part of it needs an accelerator.
        kwargs["keep_master_weight_for_test"] = True
        if torch.device(kwargs.get("device") or "cpu").type != "meta":
            kwargs["device"] = "cpu"
    return linear_cls(*sizes, **kwargs)


def drawn_values(layer: nn.Module) -> Values:
    """The full values of a layer that has just been made; None for values that need not be written to the tiles."""
    if isinstance(layer, ParallelModule) and (layer.master_weight is not None or layer.weight.is_meta):
        return {"weight": layer.master_weight, "bias": None}  # biases start at zero
    return {name: merged(layer, name) for name in ("weight", "bias")}


def merged(layer: nn.Module, name: str) -> Tensor | None:
    """A parameter's full value, merged from all ranks that it is cut over; None if the layer does not have it."""
    value = getattr(layer, name, None)
    cut = getattr(layer, "partitions", {}).get(name)
    if value is None or cut is None:
        return None if value is None else value.detach()
    return cut.merge(comm.all_gathered(value.detach(), layer.group))  # type: ignore[arg-type]


def write(tile: nn.Module, name: str, value: Tensor) -> None:
    """Fills a tile's parameter with this rank's part of the full `value`."""
    parameter = getattr(tile, name)
    cut = getattr(tile, "partitions", {}).get(name)
    if cut is not None:
        group: Any = tile.group
        value = cut.slice_like(parameter.shape, value, group.rank(), group.size())
    parameter.copy_(value)
