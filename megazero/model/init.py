"""How weights begin: normal, with residual projections scaled down by depth."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from megazero.model.config import GPT2Config
from megazero.mpu.init import InitMethod

PIECE_NUMEL = 1 << 20  # elements of a large weight that have a random stream of their own


def draw_normal_(weight: Tensor, std: float) -> None:
    """Fills `weight` with values from N(0, std^2), by all of torch's threads: one draws some 0.2 billion per second.

    They depend on the state of the default generator of the weight's device, and not on the number of threads.
    """
    if has_torch_function((weight,)):
        handle_torch_function(draw_normal_, (weight,), weight, std)
    elif weight.numel() <= PIECE_NUMEL or not _is_on_host(weight):
        nn.init.normal_(weight, std=std)
    else:
        pieces = weight.detach().view(-1).split(PIECE_NUMEL)
        seeds = torch.empty(len(pieces), dtype=torch.int64, device="cpu").random_().tolist()
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(lambda piece, generator: piece.normal_(0.0, std, generator=generator), pieces, generators))


def _is_on_host(weight: Tensor) -> bool:
    return type(weight) is Tensor and weight.device.type == "cpu"  # a fake tensor, of another type, has no values


def normal_init(config: GPT2Config) -> InitMethod:
    """An initialiser that draws from N(0, std^2), with std = `init_method_std`."""
    return partial(draw_normal_, std=config.init_method_std)


def residual_init(config: GPT2Config) -> InitMethod:
    """An initialiser for the 2 x `num_layers` projections that add to the residual stream: N(0, std^2 / (2 num_layers)).

    Independent contributions add in variance, so the stream leaves the last block as wide as one unscaled contribution
    (GPT-2, sec. 2.3).
    """
    return partial(draw_normal_, std=config.init_method_std / math.sqrt(2.0 * config.num_layers))


class NoDraws(TorchFunctionMode):
    """Context manager for building a model whose values are loaded next: `draw_normal_` writes zeros instead of drawing.

    Every rank draws all values, some 0.2 billion per second and thread. Other initializers, of a script's own model, draw: what
    follows may depend on it and be in no checkpoint, as a buffer that is not persistent.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Calls `func`, or fills the weight of `draw_normal_` with zeros."""
        if func is not draw_normal_:
            return func(*args, **(kwargs or {}))
        with torch.no_grad():
            return args[0].zero_()
