"""GPT-2 as anyone would write it, with nothing of any library: the model that every side of a benchmark trains."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PlainBlock(nn.Module):
    """A pre-LN transformer block."""

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.head_dim = h // heads
        self.ln1, self.qkv, self.proj = nn.LayerNorm(h), nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.ln2, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        q, k, v = (t.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, dim=2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class PlainGPT2(nn.Module):
    """GPT-2 with a tied head and no dropout. Weights come from the default generator: seed it for equal models."""

    def __init__(self, layers: int, hidden: int, heads: int, seq_length: int, vocab: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(seq_length, hidden)
        self.blocks = nn.ModuleList(PlainBlock(hidden, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, fp32; tokens and targets [b, s]."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Megatron's two optimizer groups: matrices and embeddings decay, biases and normalisation weights do not."""
    # DeepSpeed's zero.Init leaves the shape in an attribute only.
    found = {p: len(getattr(p, "ds_shape", p.shape)) for p in model.parameters()}
    matrices = [p for p, ndim in found.items() if ndim >= 2]
    vectors = [p for p, ndim in found.items() if ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def in_order(plain: PlainGPT2) -> list[Tensor]:
    """The plain model's parameters in the order of those of the library's GPT2Model; both stack Q, K and V alike."""
    layers: list[nn.Module] = [plain.wte, plain.wpe]
    for block in plain.blocks:
        layers += [block.ln1, block.qkv, block.proj, block.ln2, block.up, block.down]
    return [parameter.detach() for layer in [*layers, plain.ln_f] for parameter in layer.parameters()]


def interleaved(stacked: Tensor, size: int) -> Tensor:
    """Rows of Q, K and V [3 h, ...] so that each of `size` equal cuts (ranks, or heads) has its part of all three."""
    return stacked.unflatten(0, (3, size, -1)).transpose(0, 1).flatten(0, 2).contiguous()
