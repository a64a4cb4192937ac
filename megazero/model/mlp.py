"""The transformer's MLP, its hidden layer split over the model-parallel group."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megazero import mpu
from megazero.model.config import GPT2Config
from megazero.model.init import normal_init, residual_init
from megazero.zero import TiledLinear, TiledLinearReturnBias


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias), with GPT-2's tanh approximation. Pure, so that torch.compile makes one kernel of it."""
    return F.gelu(x + bias, approximate="tanh")


class ParallelMLP(nn.Module):
    """h -> 4h -> h with GELU between: a column-parallel and a row-parallel layer, one all-reduce (arXiv:1909.08053, fig. 3a).

    With `memory_centric_tiled_linear` both are tiled, and there is an all-reduce per output tile.

    Args:
        where: `group`, `device` and `dtype`, as of `mpu`'s layers.
    """

    def __init__(self, config: GPT2Config, **where: Any) -> None:
        super().__init__()
        # Compiled, the bias is added in GELU's kernel. Eager, the matrix product adds it for nothing and an addition of its own
        # would cost a pass over [s, b, 4h].
        self.fuse_bias_gelu = config.compile
        h, wide, factor = config.hidden_size, config.mlp_size, config.tile_factor
        where["sequence_parallel"] = config.sequence_parallel
        up = {"gather_output": False, "init_method": normal_init(config), "skip_bias_add": self.fuse_bias_gelu, **where}
        down = {"input_is_parallel": True, "init_method": residual_init(config), "skip_bias_add": True, **where}
        self.dense_h_to_4h: nn.Module
        self.dense_4h_to_h: nn.Module
        if config.memory_centric_tiled_linear:
            # As many tiles on both sides of the GELU: a rank's part of the 4h features is its part of each tile.
            tiled = TiledLinearReturnBias if self.fuse_bias_gelu else TiledLinear
            up |= {"linear_cls": mpu.ColumnParallelLinear, "in_splits": factor, "out_splits": 4 * factor}
            down |= {"linear_cls": mpu.RowParallelLinear, "in_splits": 4 * factor, "out_splits": factor}
            self.dense_h_to_4h = tiled(h, wide, **up)
            self.dense_4h_to_h = TiledLinearReturnBias(wide, h, **down)
        else:
            self.dense_h_to_4h = mpu.ColumnParallelLinear(h, wide, **up)
            self.dense_4h_to_h = mpu.RowParallelLinear(wide, h, **down)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[s, b, h] -> ([s, b, h] without its bias, that bias [h]): the caller fuses the bias with dropout and residual.

        Both are this rank's slices [s/t, b, h] of the sequence if the model is sequence-parallel.
        """
        if self.fuse_bias_gelu:
            hidden = bias_gelu(*self.dense_h_to_4h(x))
        else:
            hidden = F.gelu(self.dense_h_to_4h(x), approximate="tanh")
        return self.dense_4h_to_h(hidden)  # of [s, b, 4h/t]
