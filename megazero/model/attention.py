"""Multi-head self-attention, its heads split over the model-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero import activation_checkpointing, mpu
from megazero.activation_checkpointing import ActivationCheckpointer
from megazero.model.cache import LayerCache
from megazero.model.config import GPT2Config
from megazero.model.init import normal_init, residual_init
from megazero.model.rotary import rotated
from megazero.mpu.layers import parallel_columns
from megazero.mpu.random import own_stream
from megazero.mpu.utils import outside_graphs


def split_heads(x: Tensor, head_size: int, rotation: Tensor | None = None) -> Tensor:
    """Q, K or V [s, b, h/t] -> [b, n/t, s, d], a view unless it is turned by `rotation` of `rotation_of`."""
    x = x.view(*x.shape[:-1], -1, head_size)
    return (x if rotation is None else rotated(x, rotation)).permute(1, 2, 0, 3)


def merge_heads(context: Tensor) -> Tensor:
    """[b, n/t, s, d] -> [s, b, h/t]."""
    return context.permute(2, 0, 1, 3).flatten(2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool, dropout: float, model_parallel_size: int
) -> Tensor:
    """softmax(q k' / sqrt(d) + mask) v, with dropout of the weights: [b, n/t, s, d]. Of k and v heads may be fewer.

    Ranks hold different heads, so dropout must differ between them: it draws from the tracker's model-parallel stream. One rank
    holds every head and draws from the default stream, which needs no seeding and does not break a compiled graph.

    Args:
        mask: None, or [b or 1, 1, s, keys]: bool (True = may read) or a float added to the scores.
    """
    # Fewer heads are taken by flash attention on GPUs, for 16 bits without a mask, and else by kernels that keep all scores
    # (torch 2.8 has no other on CPUs).
    is_flash = mask is None and q.dtype != torch.float32 and q.device.type != "cpu"
    if k.size(1) < q.size(1) and not is_flash:
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    with own_stream(dropout > 0.0 and model_parallel_size > 1):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=k.size(1) < q.size(1)
        )


class ParallelSelfAttention(nn.Module):
    """Causal self-attention: one column-parallel layer for Q, K and V, one row-parallel projection, one all-reduce.

    Where several heads share their keys and values (arXiv:2305.13245), Q has a layer of its own, which shares its message with
    that of K and V.

    The attention itself is `F.scaled_dot_product_attention` over this rank's heads and needs no communication
    (arXiv:1909.08053, fig. 3b).

    Args:
        where: `group`, `device` and `dtype`, as of `mpu`'s layers.

    Attributes:
        heads_per_key: heads that share their keys and values.
        recomputes_core: keep Q, K and V, and run the attention itself again in backward (arXiv:2205.05198, sec. 5). What the
            projections keep, they keep.
        checkpointer: how they are kept; None is `activation_checkpointing.default`.
    """

    def __init__(self, config: GPT2Config, **where: Any) -> None:
        super().__init__()
        h = config.hidden_size
        self.head_size = config.head_size
        self.dropout = config.attention_dropout
        self.recomputes_core = config.recompute_mode == "selective"
        self.checkpointer: ActivationCheckpointer | None = None
        where["sequence_parallel"] = config.sequence_parallel
        where["bias"] = not config.disable_bias_linear
        column = {"gather_output": False, "init_method": normal_init(config), **where}
        self.heads_per_key = config.num_attention_heads // config.key_value_heads
        if self.heads_per_key > 1:
            self.query = mpu.ColumnParallelLinear(h, h, **column)
            kv = config.key_value_heads * self.head_size
            self.key_value = mpu.ColumnParallelLinear(h, 2 * kv, stride=2, **column)
        else:
            self.query_key_value = mpu.ColumnParallelLinear(h, 3 * h, stride=3, **column)
        self.dense = mpu.RowParallelLinear(
            h,
            h,
            input_is_parallel=True,
            init_method=residual_init(config),
            skip_bias_add=config.blocks_add_biases,
            **where,
        )

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        rotation: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """[s, b, h] -> [s, b, h]; both are slices [s/t, b, h] if sequence-parallel.

        With `config.blocks_add_biases`: ([s/t, b, h] without its bias, that bias [h]).

        Args:
            mask: None for causal attention; else [b or 1, 1, s, keys], bool (True = may read) or added to the scores.
            cache: keys and values of earlier tokens, to which those of `x` are added; `mask` then covers all of them.
            rotation: of the positions of all of `x`'s sequence, from `rotation_of`; None does not turn queries and keys.
        """
        q, k, v = self._projected(x)
        if rotation is not None:
            v = v.contiguous()  # a view would keep the memory in which Q and K were before they were turned
        q, k = (split_heads(y, self.head_size, rotation) for y in (q, k))  # [b, n/t, s, d]
        v = split_heads(v, self.head_size)
        if cache is not None:
            k, v = cache.append(k, v)  # [b, n/t, keys, d]
        core = self.core(is_causal=mask is None)
        if self.recomputes_core and cache is None and torch.is_grad_enabled():
            checkpointer = self.checkpointer or activation_checkpointing.default
            context = outside_graphs(checkpointer.checkpoint_sharded, core, q, k, v, mask)
        else:
            context = core(q, k, v, mask)
        return self.dense(merge_heads(context))

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Q, K and V, views [s, b, n d/t] of what one message brings."""
        if self.heads_per_key == 1:
            return self.query_key_value(x).chunk(3, dim=-1)
        q, kv = parallel_columns(x, self.query, self.key_value)
        return q, *kv.chunk(2, dim=-1)

    def core(self, is_causal: bool) -> Callable[..., Tensor]:
        """`attend` as this layer calls it in its present mode, of Q, K, V and mask: what `recomputes_core` runs again."""
        dropout, size = self.dropout if self.training else 0.0, self.dense.group.size()
        return partial(attend, is_causal=is_causal, dropout=dropout, model_parallel_size=size)
