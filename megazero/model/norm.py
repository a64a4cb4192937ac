"""Norms, of whole sequences and of slices of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from megazero import mpu
from megazero.comm import ProcessGroup
from megazero.model.config import GPT2Config


def build_layernorm(
    config: GPT2Config,
    group: ProcessGroup | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The norm over the hidden size that the configuration names, in the implementation that it names; whole on each rank.

    Raises:
        ValueError: NVIDIA apex was asked for and is not importable.
    """
    if config.layernorm == "torch":
        is_unit = config.sequence_parallel and config.memory_centric_tiled_linear
        norm: type[nn.LayerNorm | nn.RMSNorm]
        if config.normalization == "RMSNorm":
            norm = SliceRMSNorm if is_unit else nn.RMSNorm
        else:
            norm = SliceNorm if is_unit else mpu.LayerNorm
        return norm(config.hidden_size, config.layernorm_epsilon, device=device, dtype=dtype)
    try:
        from apex.normalization import FusedLayerNorm
    except ImportError as error:
        raise ValueError(
            "--layernorm apex: NVIDIA apex is not importable here (the package called apex on PyPI is something else; build it "
            "from https://github.com/NVIDIA/apex). Use --layernorm torch, which is as fast."
        ) from error
    with torch.device(device or "cpu"):
        return FusedLayerNorm(config.hidden_size, eps=config.layernorm_epsilon).to(dtype=dtype)


class SliceNorm(mpu.LayerNorm):
    """A layer norm of slices of the sequence that sums its parameters' gradients over the ranks by itself.

    Beside tiles: there it is a ZeRO unit of its own, whose parameters the block cannot read.
    """

    def forward(self, x: Tensor, group: ProcessGroup | None = None) -> Tensor:
        """[..., h] -> [..., h]; a slice over the ranks of `group`, where it is given."""
        if group is None:
            return super().forward(x)
        weight, bias = mpu.copy_parameters_to_sequence_parallel_region([self.weight, self.bias], group)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class SliceRMSNorm(nn.RMSNorm):
    """An RMSNorm as `SliceNorm` is a layer norm."""

    def forward(self, x: Tensor, group: ProcessGroup | None = None) -> Tensor:
        """[..., h] -> [..., h]; a slice over the ranks of `group`, where it is given."""
        if group is None:
            return super().forward(x)
        (weight,) = mpu.copy_parameters_to_sequence_parallel_region([self.weight], group)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def normalise_slice(norm: nn.Module, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """`norm(x)` of a slice of the sequence, with what `copy_parameters_to_sequence_parallel_region` made of its parameters."""
    names = (name for name, _ in norm.named_parameters())
    return functional_call(norm, dict(zip(names, parameters, strict=True)), x)
