"""A GPT-2, or a Llama, in plain single-process torch, with megazero's parameter names: what the tests compare with."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero import mpu
from megazero.model.state_dict import slice_full


def plain_norm(config):
    return getattr(nn, config.normalization)(config.hidden_size, config.layernorm_epsilon)


class PlainBlock(nn.Module):
    """A block on [b, s, h], norms first, with attention spelled out."""

    def __init__(self, config):
        super().__init__()
        self.config, h, f = config, config.hidden_size, config.mlp_size
        linear = partial(nn.Linear, bias=not config.disable_bias_linear)
        self.kv = kv = config.key_value_heads * config.head_size
        qkv = (
            {"query_key_value": linear(h, 3 * h)}
            if kv == h
            else {"query": linear(h, h), "key_value": linear(h, 2 * kv)}
        )
        self.input_layernorm = plain_norm(config)
        self.attention = nn.ModuleDict({**qkv, "dense": linear(h, h)})
        self.post_attention_layernorm = plain_norm(config)
        up = linear(h, (1 + config.swiglu) * f)
        self.mlp = nn.ModuleDict({"dense_h_to_4h": up, "dense_4h_to_h": linear(f, h)})

    def forward(self, x, mask):
        (b, s, h), d = x.shape, self.config.head_size
        *qkv, dense = self.attention.values()
        y = self.input_layernorm(x)
        parts = torch.cat([layer(y) for layer in qkv], dim=-1).split((h, self.kv, self.kv), dim=-1)
        q, k, v = (part.view(b, s, -1, d).transpose(1, 2) for part in parts)
        if self.config.position_embedding_type == "rope":  # turns pairs as complex numbers
            angles = torch.outer(torch.arange(s), self.config.rotary_base ** (-torch.arange(0, d, 2) / d))
            turns = torch.polar(torch.ones_like(angles), angles)
            turned = (torch.complex(*part.chunk(2, dim=-1)) * turns for part in (q, k))
            q, k = (torch.cat((part.real, part.imag), dim=-1) for part in turned)
        k, v = (part.repeat_interleave(h // self.kv, dim=1) for part in (k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(d)).masked_fill(~mask, -math.inf)
        x = x + dense((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, h))
        y = self.mlp["dense_h_to_4h"](self.post_attention_layernorm(x))
        if self.config.swiglu:
            gate, up = y.chunk(2, dim=-1)
            return x + self.mlp["dense_4h_to_h"](gate * torch.sigmoid(gate) * up)
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))  # GPT-2's GELU
        return x + self.mlp["dense_4h_to_h"](y)


class PlainGPT2(nn.Module):
    """Logits [b, s, v] of tokens [b, s], no dropout, no vocabulary padding."""

    def __init__(self, config):
        super().__init__()
        h, v = config.hidden_size, config.vocab_size
        self.word_embeddings, self.position_embeddings, self.output_layer = nn.Embedding(v, h), None, None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, h)
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.transformer.final_layernorm = plain_norm(config)
        if config.untie_embeddings_and_output_weights:
            self.output_layer = nn.Linear(h, v, bias=False)

    def forward(self, tokens):
        s = tokens.size(1)
        mask = torch.ones(s, s, dtype=torch.bool).tril()
        x = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(torch.arange(s))
        for layer in self.transformer.layers:
            x = layer(x, mask)
        head = self.word_embeddings if self.output_layer is None else self.output_layer
        return F.linear(self.transformer.final_layernorm(x), head.weight)

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
