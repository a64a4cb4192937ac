"""Rotary positions (arXiv:2104.09864): each head turns its queries and keys by angles that grow with the position.

With d elements in a head, elements i and i + d/2 of a token at position p are one pair, turned by p / base^(2i/d), as in Hugging
Face's and Megatron-LM's models. Scores then depend on how far apart two tokens are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_of(position_ids: Tensor, head_size: int, base: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines [2, s, b or 1, 1, d/2] of the angles at `position_ids` [b or 1, s]. Angles are fp32."""
    exponents = torch.arange(0, head_size, 2, device=position_ids.device, dtype=torch.float32) / head_size
    angles = position_ids.t()[..., None, None] * (1.0 / base**exponents)  # [s, b or 1, 1, d/2]
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Queries or keys [s, b, n, d], each turned as `rotation` says for its position; in their own dtype."""
    cos, sin = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
