"""Rotary positions (arXiv:2104.09864): each head turns its queries and keys by angles that grow with the position.

With d elements in a head, elements i and i + d/2 of a token at position p are one pair, turned by p / base^(2i/d), as in Hugging
Face's and Megatron-LM's models. Scores then depend on how far apart two tokens are.

Llama 3.1 (arXiv:2407.21783) was first trained on sequences of 8192 tokens, and then on longer ones with long wavelengths made
longer (`use_scaled_rope` in Meta's code, "llama3" in Hugging Face's).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Of Llama 3.1: a wavelength that has gone around more than HIGH times in ORIGINAL_POSITIONS stays; fewer than LOW, it is scaled.
ORIGINAL_POSITIONS, LOW, HIGH = 8192, 1.0, 4.0


def rotation_of(
    position_ids: Tensor, head_size: int, base: int, dtype: torch.dtype, scaling_factor: float | None = None
) -> Tensor:
    """Cosines and sines [2, s, b or 1, 1, d/2] of the angles at `position_ids` [b or 1, s]. Angles are fp32.

    Args:
        scaling_factor: how much longer long wavelengths are, as in Llama 3.1; None: all are as they are.
    """
    exponents = torch.arange(0, head_size, 2, device=position_ids.device, dtype=torch.float32) / head_size
    frequencies = 1.0 / base**exponents  # radians per position
    if scaling_factor is not None:
        rounds = frequencies * (ORIGINAL_POSITIONS / (2 * math.pi))
        kept = ((rounds - LOW) / (HIGH - LOW)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling_factor)
    angles = position_ids.t()[..., None, None] * frequencies  # [s, b or 1, 1, d/2]
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Queries or keys [s, b, n, d], each turned as `rotation` says for its position; in their own dtype."""
    cos, sin = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
