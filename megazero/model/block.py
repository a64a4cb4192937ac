"""One pre-LN transformer block, and the stack of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero import activation_checkpointing, mpu
from megazero.comm import ProcessGroup
from megazero.model.attention import ParallelSelfAttention
from megazero.model.cache import LayerCache
from megazero.model.config import GPT2Config
from megazero.model.mlp import ParallelMLP
from megazero.mpu.init import InitMethod


def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, dropout: float, training: bool) -> Tensor:
    """residual + dropout(x + bias). Pure, so that torch.compile makes one kernel of it.

    Draws from the default random stream, which is the same on every model-parallel rank, as is the residual.
    """
    return residual + F.dropout(x + bias, dropout, training)


def build_layernorm(
    config: GPT2Config, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """A layer norm over the hidden size, of the implementation that `config.layernorm` names.

    Raises:
        ValueError: NVIDIA apex was asked for and is not importable.
    """
    if config.layernorm == "torch":
        return mpu.LayerNorm(config.hidden_size, config.layernorm_epsilon, device=device, dtype=dtype)
    try:
        from apex.normalization import FusedLayerNorm
    except ImportError as error:
        raise ValueError(
            "--layernorm apex: NVIDIA apex is not importable here (the package called apex on PyPI is something else; build it "
            "from https://github.com/NVIDIA/apex). Use --layernorm torch, which is as fast."
        ) from error
    with torch.device(device or "cpu"):
        return FusedLayerNorm(config.hidden_size, eps=config.layernorm_epsilon).to(dtype=dtype)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on [s, b, h]: the unit that ZeRO shards and checkpointing recomputes."""

    def __init__(
        self,
        config: GPT2Config,
        init_method: InitMethod,
        output_init_method: InitMethod,
        *,
        group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"group": group, "device": device, "dtype": dtype}
        self.hidden_dropout = config.hidden_dropout
        self.compile_body = config.compile
        self.input_layernorm = build_layernorm(config, device, dtype)
        self.attention = ParallelSelfAttention(config, init_method, output_init_method, **where)
        self.post_attention_layernorm = build_layernorm(config, device, dtype)
        self.mlp = ParallelMLP(config, init_method, output_init_method, **where)

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h]. `mask` and `cache` are those of `ParallelSelfAttention`."""
        body = _compiled_body() if self.compile_body and cache is None else _body
        return body(self, x, mask, cache)


def _body(block: TransformerBlock, x: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
    p, training = block.hidden_dropout, block.training
    out, bias = block.attention(block.input_layernorm(x), mask, cache)
    x = bias_dropout_add(out, bias, x, p, training)
    out, bias = block.mlp(block.post_attention_layernorm(x))
    return bias_dropout_add(out, bias, x, p, training)


@functools.cache
def _compiled_body() -> Callable[..., Tensor]:
    """`_body` under torch.compile.

    One function for all blocks: weights are inputs of the graph, so equal blocks share one compilation, and hooks on the block
    (ZeRO's gather and release) run outside of it.
    """
    return torch.compile(_body)


class Transformer(nn.Module):
    """A stack of blocks and the final layer norm, with activation checkpointing."""

    def __init__(
        self,
        config: GPT2Config,
        init_method: InitMethod,
        output_init_method: InitMethod,
        *,
        group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"group": group, "device": device, "dtype": dtype}
        self.checkpoint_activations = config.checkpoint_activations
        self.checkpoint_num_layers = config.checkpoint_num_layers
        self.layers = nn.ModuleList(
            TransformerBlock(config, init_method, output_init_method, **where) for _ in range(config.num_layers)
        )
        self.final_layernorm = build_layernorm(config, device, dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None, caches: Sequence[LayerCache] | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h], normalised. `mask` as in `ParallelSelfAttention`; `caches` has one entry per layer."""
        if caches is not None:
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, mask, cache)
        elif self.checkpoint_activations and torch.is_grad_enabled():
            step = self.checkpoint_num_layers
            for start in range(0, len(self.layers), step):
                # The mask goes last: partitioned checkpointing cuts every argument but the last over the ranks.
                x = activation_checkpointing.checkpoint(self._run(start, start + step), x, mask)
        else:
            x = self._run(0, len(self.layers))(x, mask)
        return self.final_layernorm(x)

    def _run(self, start: int, stop: int) -> Callable[[Tensor, Tensor | None], Tensor]:
        def run(x: Tensor, mask: Tensor | None) -> Tensor:
            for layer in self.layers[start:stop]:
                x = layer(x, mask)
            return x

        return run
