"""One pre-LN transformer block, and the stack of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero import activation_checkpointing, mpu
from megazero.activation_checkpointing import ActivationCheckpointer
from megazero.model.attention import ParallelSelfAttention
from megazero.model.cache import LayerCache
from megazero.model.config import BLOCK_MODES, GPT2Config
from megazero.model.mlp import ParallelMLP
from megazero.model.norm import build_layernorm, normalise_slice
from megazero.mpu.random import own_stream

MAX_GRAPHS = 64  # compilations of one function, of all models in the process


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on [s, b, h]: the unit that ZeRO shards and checkpointing recomputes.

    Sequence-parallel, x is this rank's slice [s/t, b, h] wherever it is not inside of attention or MLP: norms, dropout and
    residuals keep 1/t (arXiv:2205.05198, sec. 4.2.2).

    Args:
        where: `group`, `device` and `dtype`, as of `mpu`'s layers.
    """

    def __init__(self, config: GPT2Config, **where: Any) -> None:
        super().__init__()
        self.hidden_dropout = config.hidden_dropout
        self.compile_body = config.compile
        self.sequence_parallel = config.sequence_parallel
        self.body: Callable[..., Tensor] = _body
        if config.sequence_parallel:
            self.body = _tiled_sequence_body if config.memory_centric_tiled_linear else _sequence_body
        self.input_layernorm = build_layernorm(config, **where)
        self.attention = ParallelSelfAttention(config, **where)
        self.post_attention_layernorm = build_layernorm(config, **where)
        self.mlp = ParallelMLP(config, **where)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        rotation: Tensor | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]. `mask`, `cache` and `rotation` are those of `ParallelSelfAttention`.

        Sequence-parallel: [s/t, b, h] -> [s/t, b, h], without `cache`.
        """
        body = compiled(self.body) if self.compile_body and cache is None else self.body
        return body(self, x, mask, cache, rotation)


def _body(
    block: TransformerBlock, x: Tensor, mask: Tensor | None, cache: LayerCache | None, rotation: Tensor | None
) -> Tensor:
    p, training = block.hidden_dropout, block.training
    x = x + F.dropout(block.attention(block.input_layernorm(x), mask, cache, rotation), p, training)
    return x + F.dropout(block.mlp(block.post_attention_layernorm(x)), p, training)


def _sequence_body(
    block: TransformerBlock, x: Tensor, mask: Tensor | None, _: LayerCache | None, rotation: Tensor | None
) -> Tensor:
    """`_body` on this rank's slice of the sequence: attention and MLP gather it, and reduce-scatter what they return.

    They leave their biases to be added here, so that one message sums the gradients of all parameters used on slices.
    """
    first, second = block.input_layernorm, block.post_attention_layernorm
    norms = [*first.parameters(), *second.parameters()]
    biases = [b for b in (block.attention.dense.bias, cast(Tensor, block.mlp.dense_4h_to_h.bias)) if b is not None]
    copies = mpu.copy_parameters_to_sequence_parallel_region([*norms, *biases], block.attention.dense.group)
    half, count = len(norms) // 2, len(norms)
    attention_bias, mlp_bias = copies[count:] or (None, None)
    out, _ = block.attention(normalise_slice(first, x, copies[:half]), mask, None, rotation)
    x = _add_slice(block, x, out, attention_bias)
    out, _ = block.mlp(normalise_slice(second, x, copies[half:count]))
    return _add_slice(block, x, out, mlp_bias)


def _tiled_sequence_body(
    block: TransformerBlock, x: Tensor, mask: Tensor | None, _: LayerCache | None, rotation: Tensor | None
) -> Tensor:
    """`_sequence_body` of children that ZeRO gathers one by one: each sums the gradients of its own parameters."""
    group = block.attention.dense.group
    x = _add_slice(block, x, block.attention(block.input_layernorm(x, group), mask, None, rotation))
    return _add_slice(block, x, block.mlp(block.post_attention_layernorm(x, group)))


def _add_slice(block: TransformerBlock, x: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """x + dropout(out + bias) of slices of the sequence, whose dropout draws from the rank's own stream."""
    p, training = block.hidden_dropout, block.training
    with own_stream(training and p > 0.0):
        return x + F.dropout(out if bias is None else out + bias, p, training)


@functools.cache
def compiled(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`body` under torch.compile, the same one at each call.

    One function for all blocks: weights are inputs of the graph, so equal blocks share one compilation, and hooks on the block
    (ZeRO's gather and release) run outside of it.

    It never falls back to running without a graph, as torch's default is after 8 compilations. Sizes of models and batches,
    training, evaluation and recomputation each take one, and compiled dropout draws other masks than plain dropout does: if a
    block's first run were compiled and its recomputation were not, its gradients would be wrong.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: there are more than MAX_GRAPHS.
    """
    limits = torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS, fail_on_recompile_limit_hit=True)
    return limits(torch.compile(body))


class Transformer(nn.Module):
    """A stack of blocks and the final norm, with activation checkpointing.

    Args:
        where: `group`, `device` and `dtype`, as of `mpu`'s layers.

    Attributes:
        recompute: what each block recomputes in backward: "none", "selective" or "full". None before `set_recompute`, where the
            configuration says "auto".
        checkpointer: how what is recomputed is kept; None before `use_checkpointer`: `activation_checkpointing.default`.
    """

    recompute: tuple[str, ...] | None
    checkpointer: ActivationCheckpointer | None

    def __init__(self, config: GPT2Config, **where: Any) -> None:
        super().__init__()
        self.checkpoint_num_layers = config.checkpoint_num_layers
        self.sequence_parallel = config.sequence_parallel
        self.layers = nn.ModuleList(TransformerBlock(config, **where) for _ in range(config.num_layers))
        self.final_layernorm = build_layernorm(config, **where)
        self.recompute = self.checkpointer = None
        if config.recompute_mode != "auto":
            self.set_recompute([config.recompute_mode] * config.num_layers)

    @property
    def blocks(self) -> list[TransformerBlock]:
        """The blocks, first to last."""
        return cast(list[TransformerBlock], list(self.layers))

    def set_recompute(self, modes: Sequence[str]) -> None:
        """Has each block recompute nothing ("none"), the inside of its attention ("selective") or all of it ("full").

        Raises:
            ValueError: there is another number of blocks, or no such mode.
        """
        if len(modes) != len(self.layers) or not set(BLOCK_MODES).issuperset(modes):
            raise ValueError(
                f"set_recompute: {list(modes)} must be one of none, selective and full for each of {len(self.layers)} blocks."
            )
        self.recompute = tuple(modes)
        for block, mode in zip(self.blocks, modes, strict=True):
            block.attention.recomputes_core = mode == "selective"

    def use_checkpointer(self, checkpointer: ActivationCheckpointer | None) -> None:
        """Has this model's recomputed calls kept in a way of their own, apart from every other model's of the process."""
        self.checkpointer = checkpointer
        for block in self.blocks:
            block.attention.checkpointer = checkpointer

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
        rotation: Tensor | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h], normalised. `mask`, `rotation`: of `ParallelSelfAttention`; `caches`: one for each layer.

        Sequence-parallel: [s/t, b, h] -> [s/t, b, h], without `caches`.
        """
        if caches is not None:
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, mask, cache, rotation)
        else:
            x = self.run_blocks(x, mask, rotation)
        norm = self.final_layernorm
        if not self.sequence_parallel:
            return norm(x)
        group = self.blocks[0].attention.dense.group
        return normalise_slice(norm, x, mpu.copy_parameters_to_sequence_parallel_region(list(norm.parameters()), group))

    def run_blocks(self, x: Tensor, mask: Tensor | None = None, rotation: Tensor | None = None) -> Tensor:
        """`forward` without the final norm."""
        if not torch.is_grad_enabled():
            return _run(self.blocks, rotation, x, mask)
        for blocks, is_recomputed in self._runs():
            run = functools.partial(_run, blocks, rotation)
            # The mask goes last: partitioned checkpointing cuts every argument but the last over the ranks.
            x = self._checkpoint(run, x, mask) if is_recomputed else run(x, mask)
        return x

    def _checkpoint(self, run: Callable[..., Tensor], x: Tensor, mask: Tensor | None) -> Tensor:
        # A slice of the sequence is cut already, whatever partitioned checkpointing is told.
        checkpointer = self.checkpointer or activation_checkpointing.default
        checkpoint = checkpointer.checkpoint_sharded if self.sequence_parallel else checkpointer.checkpoint
        return checkpoint(run, x, mask)

    def _runs(self) -> Iterator[tuple[list[TransformerBlock], bool]]:
        """The blocks in groups, and whether each is recomputed."""
        if self.recompute is None:
            raise RuntimeError(
                "--recompute auto: what each block recomputes has not been decided. The GPT-2 job measures it at its start; in a "
                "script of your own call megazero.model.recompute.decide_recompute(model.transformer, ...) before training."
            )
        for is_full, pairs in groupby(zip(self.blocks, self.recompute, strict=True), lambda pair: pair[1] == "full"):
            blocks = [block for block, _ in pairs]
            step = self.checkpoint_num_layers if is_full else len(blocks)
            for start in range(0, len(blocks), step):
                yield blocks[start : start + step], is_full


def _run(blocks: Iterable[TransformerBlock], rotation: Tensor | None, x: Tensor, mask: Tensor | None) -> Tensor:
    for block in blocks:
        x = block(x, mask, None, rotation)
    return x
