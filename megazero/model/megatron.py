"""The transformer classes of Megatron-LM's first mpu (2019): ported code finds its constructors, inputs and parameter names here.

They are this package's pieces behind other signatures. Inputs and outputs are [b, s, h], biases and dropout are applied inside.
New code takes `TransformerBlock` and `GPT2Model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero import mpu
from megazero.model.attention import attend, merge_heads, split_heads
from megazero.model.block import Transformer
from megazero.model.config import GPT2Config
from megazero.mpu.init import InitMethod


def _gpt2_config(hidden_size: int, num_attention_heads: int, **options: Any) -> GPT2Config:
    config = GPT2Config(hidden_size=hidden_size, num_attention_heads=num_attention_heads, **options)
    config.check_parallel(mpu.get_model_parallel_world_size())
    return config


class GPT2ParallelTransformer(Transformer):
    """A stack of pre-LN blocks and the final layer norm, on [b, s, h]."""

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        num_attention_heads: int,
        attention_dropout_prob: float,
        output_dropout_prob: float,
        checkpoint_activations: bool,
        checkpoint_num_layers: int = 1,
        layernorm_epsilon: float = 1.0e-5,
        init_method_std: float = 0.02,
        use_scaled_init_for_output_weights: bool = True,
    ) -> None:
        config = _gpt2_config(
            hidden_size,
            num_attention_heads,
            num_layers=num_layers,
            attention_dropout=attention_dropout_prob,
            hidden_dropout=output_dropout_prob,
            checkpoint_activations=checkpoint_activations,
            checkpoint_num_layers=checkpoint_num_layers,
            layernorm_epsilon=layernorm_epsilon,
            init_method_std=init_method_std,
        )
        super().__init__(config)
        if not use_scaled_init_for_output_weights:
            residual = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
            with torch.no_grad():
                for weight in (p for name, p in self.named_parameters() if name.endswith(residual)):
                    weight.mul_(math.sqrt(2 * num_layers))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """[b, s, h] -> [b, s, h], normalised; `attention_mask` [b or 1, 1, s, s] is 1 where a query may read, None is causal."""
        may_read = None if attention_mask is None else attention_mask.bool()
        return super().forward(hidden_states.transpose(0, 1), may_read).transpose(0, 1)


class BertParallelSelfAttention(nn.Module):
    """Bidirectional self-attention without its output projection, on [b, s, h]."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        dropout_prob: float,
        output_parallel: bool = False,
        init_method: InitMethod = nn.init.xavier_normal_,
    ) -> None:
        super().__init__()
        config = _gpt2_config(hidden_size, num_attention_heads)
        self.head_size = config.head_size
        self.dropout = dropout_prob
        self.output_parallel = output_parallel
        self.query_key_value = mpu.ColumnParallelLinear(
            hidden_size, 3 * hidden_size, stride=3, gather_output=False, init_method=init_method
        )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """[b, s, h] -> [b, s, h], or this rank's heads [b, s, h/t] with `output_parallel`.

        Args:
            attention_mask: [b or 1, 1, s or 1, s], added to the scores (0 or a large negative number), or bool (True = may read).
        """
        group = self.query_key_value.group
        qkv = self.query_key_value(hidden_states.transpose(0, 1))
        q, k, v = (split_heads(x, self.head_size) for x in qkv.chunk(3, dim=-1))
        context = attend(
            q,
            k,
            v,
            attention_mask,
            is_causal=False,
            dropout=self.dropout if self.training else 0.0,
            model_parallel_size=group.size(),
        )
        own = merge_heads(context).transpose(0, 1)  # [b, s, h/t]
        return own if self.output_parallel else mpu.gather_from_model_parallel_region(own, group)


class BertParallelTransformerOutput(nn.Module):
    """norm(residual + dropout(dense(x))): how each half of a post-LN layer ends."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        dropout_prob: float,
        layernorm_epsilon: float,
        init_method: InitMethod,
    ) -> None:
        super().__init__()
        self.dropout = dropout_prob
        self.dense = mpu.RowParallelLinear(input_size, output_size, input_is_parallel=True, init_method=init_method)
        self.layernorm = mpu.LayerNorm(output_size, eps=layernorm_epsilon)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """`hidden_states` [..., input_size/t] and the residual [..., output_size] -> [..., output_size]."""
        return self.layernorm(input_tensor + F.dropout(self.dense(hidden_states), self.dropout, self.training))


class BertParallelTransformerLayer(nn.Module):
    """One post-LN (BERT) layer on [b, s, h]."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_attention_heads: int,
        attention_dropout_prob: float,
        output_dropout_prob: float,
        intermediate_activation_fn: Callable[[Tensor], Tensor],
        layernorm_epsilon: float,
        init_method: InitMethod = nn.init.xavier_normal_,
    ) -> None:
        super().__init__()
        self.attention = BertParallelSelfAttention(
            hidden_size, num_attention_heads, attention_dropout_prob, output_parallel=True, init_method=init_method
        )
        self.self_output = BertParallelTransformerOutput(
            hidden_size, hidden_size, output_dropout_prob, layernorm_epsilon, init_method
        )
        self.intermediate = mpu.ColumnParallelLinear(
            hidden_size, intermediate_size, gather_output=False, init_method=init_method
        )
        self.intermediate_activation_fn = intermediate_activation_fn
        self.output = BertParallelTransformerOutput(
            intermediate_size, hidden_size, output_dropout_prob, layernorm_epsilon, init_method
        )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """[b, s, h] -> [b, s, h]; `attention_mask` as in `BertParallelSelfAttention`."""
        attended = self.self_output(self.attention(hidden_states, attention_mask), hidden_states)
        widened = self.intermediate_activation_fn(self.intermediate(attended))  # [b, s, intermediate/t]
        return self.output(widened, attended)
