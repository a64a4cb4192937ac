"""A GPT-2 in plain single-process torch, with megazero's parameter names: what the tests compare with."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero import mpu
from megazero.model.state_dict import slice_full


class PlainBlock(nn.Module):
    """A pre-LN block on [b, s, h] with attention spelled out."""

    def __init__(self, h, heads, f, epsilon=1e-5):
        super().__init__()
        self.heads = heads
        self.input_layernorm = nn.LayerNorm(h, epsilon)
        self.attention = nn.ModuleDict({"query_key_value": nn.Linear(h, 3 * h), "dense": nn.Linear(h, h)})
        self.post_attention_layernorm = nn.LayerNorm(h, epsilon)
        self.mlp = nn.ModuleDict({"dense_h_to_4h": nn.Linear(h, f), "dense_4h_to_h": nn.Linear(f, h)})

    def forward(self, x, mask):
        b, s, h = x.shape
        qkv = self.attention["query_key_value"](self.input_layernorm(x))
        q, k, v = (y.view(b, s, self.heads, -1).transpose(1, 2) for y in qkv.split(h, dim=-1))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(h // self.heads)).masked_fill(~mask, -math.inf)
        x = x + self.attention["dense"]((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, h))
        y = self.mlp["dense_h_to_4h"](self.post_attention_layernorm(x))
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))  # GPT-2's GELU
        return x + self.mlp["dense_4h_to_h"](y)


class PlainGPT2(nn.Module):
    """Logits [b, s, v] of tokens [b, s], no dropout, no vocabulary padding."""

    def __init__(self, config):
        super().__init__()
        h, epsilon = config.hidden_size, config.layernorm_epsilon
        self.word_embeddings = nn.Embedding(config.vocab_size, h)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, h)
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(
            PlainBlock(h, config.num_attention_heads, config.mlp_size, epsilon) for _ in range(config.num_layers)
        )
        self.transformer.final_layernorm = nn.LayerNorm(h, epsilon)

    def forward(self, tokens):
        s = tokens.size(1)
        mask = torch.ones(s, s, dtype=torch.bool).tril()
        x = self.word_embeddings(tokens) + self.position_embeddings(torch.arange(s))
        for layer in self.transformer.layers:
            x = layer(x, mask)
        return F.linear(self.transformer.final_layernorm(x), self.word_embeddings.weight)

    def loss(self, tokens, targets):
        """Per-token loss [b, s]."""
        return F.cross_entropy(self(tokens).transpose(1, 2), targets, reduction="none")


def decay_groups(model: nn.Module, decay: float) -> list[dict]:
    """A torch optimizer's groups: the weights of linear layers and embeddings decay; biases, norms and all else do not."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    rest = [p for p in model.parameters() if all(p is not weight for weight in weights)]
    return [{"params": weights, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Fills every parameter with numbers of about 0.2, biases and norms too, so that none can hide behind a zero or a one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if "layernorm.weight" in name:
                parameter.add_(1.0)


def random_state(config) -> dict[str, Tensor]:
    """The whole state dictionary of a model with the numbers of `randomize`."""
    plain = PlainGPT2(config)
    randomize(plain)
    return plain.state_dict()


def load_same(model: nn.Module, plain: nn.Module) -> None:
    """Fills both with the same numbers of `randomize`: the plain one, and this rank's part of it in a model of ours."""
    randomize(plain)
    groups = mpu.get_groups()
    model.load_state_dict(slice_full(plain.state_dict(), model, groups.model_parallel_rank, groups.model_parallel_size))


def random_tokens(batch: int, length: int, vocab_size: int, seed: int = 1) -> torch.Tensor:
    """[batch, length] token ids."""
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
