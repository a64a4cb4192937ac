"""A Llama (RMSNorm, rotary positions, grouped queries, SwiGLU) of mpu's layers, tensor-parallel and sequence-parallel.

megazero --num_gpus 4 examples/tensor_parallel_llama.py 2    # 2 ranks split each layer; or torchrun, or one process

Sizes: s sequence, b sequences, h hidden, n heads, d head size, t ranks that split each layer.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megazero
from megazero import comm, mpu

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, MLP, SEQUENCE, BATCH = 256, 64, 2, 8, 4, 192, 32, 4
HEAD = HIDDEN // HEADS


class RMSNorm(nn.Module):
    """A norm whose weight all ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """x [s/t, b, h] -> the same. The weight's gradient is summed over the slices of the sequence."""
        (weight,) = mpu.copy_parameters_to_sequence_parallel_region([self.weight])
        return F.rms_norm(x, (HIDDEN,), weight)


def column(outputs: int, matrices: int = 1) -> mpu.ColumnParallelLinear:
    """x [s/t, b, h] -> [s, b, outputs/t]. Of several stacked matrices, each rank has its part of each."""
    return mpu.ColumnParallelLinear(
        HIDDEN, outputs, bias=False, gather_output=False, stride=matrices, sequence_parallel=True
    )


def row(inputs: int) -> mpu.RowParallelLinear:
    """x [s, b, inputs/t] -> [s/t, b, h]."""
    return mpu.RowParallelLinear(inputs, HIDDEN, bias=False, input_is_parallel=True, sequence_parallel=True)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of x [s, b, n, d] (arXiv:2104.09864)."""
    inverse = 10000 ** (-torch.arange(0, HEAD, 2, device=x.device) / HEAD)
    angles = torch.outer(torch.arange(len(x), device=x.device), inverse)[:, None, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention of this rank's heads. Several query heads share one head of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key_value, self.out = column(HIDDEN), column(2 * KV_HEADS * HEAD, matrices=2), row(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """x [s/t, b, h] -> the same; the heads see the whole sequence."""
        q, k, v = (y.unflatten(-1, (-1, HEAD)) for y in (self.query(x), *self.key_value(x).chunk(2, dim=-1)))
        q, k, v = (y.permute(1, 2, 0, 3) for y in (rotated(q), rotated(k), v))  # [b, n/t, s, d]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.permute(2, 0, 1, 3).flatten(2))


class Block(nn.Module):
    """Attention and a SwiGLU MLP, each with a norm before it and a residual around both."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(), Attention()
        self.mlp_norm, self.gate_and_up, self.down = RMSNorm(), column(2 * MLP, matrices=2), row(MLP)

    def forward(self, x: Tensor) -> Tensor:
        """x [s/t, b, h] -> the same."""
        x = x + self.attention(self.attention_norm(x))
        gate, up = self.gate_and_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """The model with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = mpu.VocabParallelEmbedding(VOCAB, HIDDEN, sequence_parallel=True)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(), column(VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens [b, s] and targets, the token after each -> the mean loss."""
        x = self.embedding(tokens.t())
        for block in self.blocks:
            x = block(x)
        return mpu.vocab_parallel_cross_entropy(self.head(self.norm(x)), targets.t()).mean()


def train(model_parallel_size: int, stage: int = 2, steps: int = 5) -> list[float]:
    """The loss of every step. Ranks that split layers have the same samples, others have samples of their own."""
    megazero.init_distributed()
    mpu.initialize_model_parallel(model_parallel_size)
    torch.manual_seed(0)  # the same on every rank: each draws the whole weight, and keeps its part
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }
    engine, _, _, _ = megazero.initialize(model=Llama(), config=config, mpu=mpu)
    random = torch.Generator().manual_seed(mpu.get_data_parallel_rank())
    text = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=random).to(engine.device)
    losses = []
    for _ in range(steps):
        loss = engine(text[:, :-1], text[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]  # which `megazero` adds
    of_each_step = train(int(given[0]) if given else 1)
    if comm.get_rank() == 0:
        print("losses:", " ".join(f"{loss:.4f}" for loss in of_each_step))
    comm.leave_distributed()
