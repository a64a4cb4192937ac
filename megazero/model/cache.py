"""Keys and values of tokens already read, so that generation computes each token once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.model.config import GPT2Config


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of a `KeyValueCache` during one forward pass."""

    keys: Tensor  # [b, n/t, max_length, d]
    values: Tensor  # [b, n/t, max_length, d]
    slots: Tensor  # [b, s] int64: where each row writes its s new tokens
    length: int  # slots to read

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes new [b, n/t, s, d] into their slots; returns all keys and values [b, n/t, length, d] (views).

        They have the cache's dtype, whatever that of the new ones is under autocast.
        """
        rows = torch.arange(k.size(0), device=k.device)[:, None]
        for all_of_them, new in ((self.keys, k), (self.values, v)):
            # Indexing puts the indexed [b, s] first: [b, s, n/t, d].
            all_of_them[rows, :, self.slots] = new.transpose(1, 2).to(all_of_them.dtype)
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class KeyValueCache:
    """Preallocated keys and values of every layer: 2 x num_layers x [b, n/t, max_length, d] on this rank.

    n is the number of heads of keys and values. Where positions are rotary, keys are turned already.

    A token's slot is its position. Rows may have different lengths: a slot that a row has not filled lies behind its position
    and is masked. Every forward pass of s tokens may fill slots below `length` + s.
    """

    def __init__(
        self,
        config: GPT2Config,
        batch_size: int,
        max_length: int,
        *,
        model_parallel_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        config.check_parallel(model_parallel_size)
        self.max_length = max_length
        self.length = 0
        shape = (batch_size, config.key_value_heads // model_parallel_size, max_length, config.head_size)
        # Zeros, not empty: masked weights are 0, and 0 x NaN of uninitialised memory would still be NaN.
        self._keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)]
        self._values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)]

    def extend(self, slots: Tensor) -> tuple[list[LayerCache], Tensor]:
        """Makes room for one more forward pass, over tokens at `slots` [b, s].

        Returns:
            Each layer's part, and the mask [b, 1, s, length]: True where a token may read, itself and what is before it.

        Raises:
            ValueError: the cache would be longer than `max_length`.
        """
        tokens = slots.size(1)
        if self.length + tokens > self.max_length:
            raise ValueError(
                f"the key-value cache holds {self.max_length} positions, {self.length} are taken and {tokens} more were asked "
                "for. Make it with a larger max_length."
            )
        self.length += tokens
        layers = [LayerCache(k, v, slots, self.length) for k, v in zip(self._keys, self._values, strict=True)]
        return layers, torch.arange(self.length, device=slots.device) <= slots[:, None, :, None]
