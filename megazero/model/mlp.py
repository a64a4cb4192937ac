"""The transformer's MLP, its hidden layer split over the model-parallel group."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megazero import mpu
from megazero.logging import ALIKE, get_logger
from megazero.model.config import GPT2Config
from megazero.model.init import normal_init, residual_init
from megazero.zero import TiledLinear

logger = get_logger(__name__)


class ParallelMLP(nn.Module):
    """h -> 4h -> h with GELU between: a column-parallel and a row-parallel layer, one all-reduce (arXiv:1909.08053, fig. 3a).

    With `swiglu` the first layer is two, stacked: [gate; up], and silu(gate) x up is between (arXiv:2002.05202).

    With `memory_centric_tiled_linear` both are tiled, and there is an all-reduce per output tile.

    Args:
        where: `group`, `device` and `dtype`, as of `mpu`'s layers.
    """

    def __init__(self, config: GPT2Config, **where: Any) -> None:
        super().__init__()
        h, wide, factor = config.hidden_size, config.mlp_size, config.tile_factor
        where |= {"sequence_parallel": config.sequence_parallel, "bias": not config.disable_bias_linear}
        self.swiglu, stacked = config.swiglu, 1 + config.swiglu
        up = {"gather_output": False, "init_method": normal_init(config), **where}
        down = {"input_is_parallel": True, "init_method": residual_init(config), **where}
        self.dense_h_to_4h: nn.Module
        self.dense_4h_to_h: nn.Module
        if config.memory_centric_tiled_linear:
            # As many tiles on both sides of the GELU: a rank's part of the 4h features is its part of each tile. Over several
            # ranks no tile has rows of both gate and up: `check_parallel` sees to that.
            up |= {"linear_cls": mpu.ColumnParallelLinear, "in_splits": factor, "out_splits": 4 * factor * stacked}
            down |= {"linear_cls": mpu.RowParallelLinear, "in_splits": 4 * factor, "out_splits": factor}
            self.dense_h_to_4h = TiledLinear(h, stacked * wide, **up)
            self.dense_4h_to_h = TiledLinear(wide, h, **down)
        else:
            self.dense_h_to_4h = mpu.ColumnParallelLinear(h, stacked * wide, stride=stacked, **up)
            self.dense_4h_to_h = mpu.RowParallelLinear(wide, h, skip_bias_add=config.blocks_add_biases, **down)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """[s, b, h] -> [s, b, h]; both are slices [s/t, b, h] if sequence-parallel.

        With `config.blocks_add_biases`: ([s/t, b, h] without its bias, that bias [h]).
        """
        if self.swiglu:
            gate, up = self.dense_h_to_4h(x).chunk(2, dim=-1)
            return self.dense_4h_to_h(F.silu(gate) * up)
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x), approximate="tanh"))  # of [s, b, 4h/t]


def warn_of_exact_gelu(what: str) -> None:
    """Says of a trained model, whose GELU is not the tanh approximation, that it becomes another one here."""
    logger.warning(
        "%s was trained with the exact GELU, this model computes its tanh approximation: activations differ by up to 5e-4",
        what,
        extra=ALIKE,
    )
