"""A GPT as nanoGPT has it: its names, its exact GELU, its padded vocabulary in the softmax, and on demand no biases at all."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Block(nn.Module):
    """On [b, s, h]."""

    def __init__(self, n_embd: int, n_head: int, bias: bool) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=bias)
        self.n_head = n_head
        self.ln_1, self.ln_2 = Norm(n_embd, bias), Norm(n_embd, bias)
        self.attn = nn.ModuleDict({"c_attn": linear(n_embd, 3 * n_embd), "c_proj": linear(n_embd, n_embd)})
        self.mlp = nn.ModuleDict({"c_fc": linear(n_embd, 4 * n_embd), "c_proj": linear(4 * n_embd, n_embd)})

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        qkv = self.attn["c_attn"](self.ln_1(x)).split(h, dim=2)
        q, k, v = (part.view(b, s, self.n_head, -1).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(b, s, h))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    """Logits [b, s, v] of tokens [b, s]."""

    def __init__(self, n_layer: int, n_head: int, n_embd: int, block_size: int, bias: bool, vocab_size: int) -> None:
        super().__init__()
        blocks = nn.ModuleList(Block(n_embd, n_head, bias) for _ in range(n_layer))
        wte, wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.transformer = nn.ModuleDict({"wte": wte, "wpe": wpe, "h": blocks, "ln_f": Norm(n_embd, bias)})
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.size(1)))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))
