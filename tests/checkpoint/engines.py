"""A small model under tensor parallelism, its engine, and a few steps of training."""

from __future__ import annotations

import torch
from torch import nn

from megazero import mpu
from megazero.engine import Engine, weight_decay_groups
from tests.zero.models import one_step


class Net(nn.Module):
    """Column- and row-parallel layers, an embedding with a padded vocabulary, and replicated parameters."""

    def __init__(self):
        super().__init__()
        self.embedding = mpu.VocabParallelEmbedding(13, 12, padded_num_embeddings=24)
        self.up = mpu.ColumnParallelLinear(12, 36, gather_output=False, stride=3)
        self.down = mpu.RowParallelLinear(36, 12, input_is_parallel=True, stride=3)
        self.norm = nn.LayerNorm(12)

    def forward(self, tokens):
        return self.norm(self.down(torch.tanh(self.up(self.embedding(tokens))))).square().mean()


def engine_of(
    model: nn.Module, make_optimizer=torch.optim.SGD, *, lr: float = 0.1, decay: float = 0.0, **options
) -> Engine:
    settings = weight_decay_groups(model, decay)
    return Engine(model, mpu.get_groups(), lambda g: make_optimizer(g, lr=lr), *settings, **options)


def make_engine(size: int, seed: int = 0) -> Engine:
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_cuda_manual_seed(seed)
    return engine_of(Net(), torch.optim.AdamW, lr=0.05, decay=0.1)


def train(engine: Engine, steps: int) -> list[float]:
    return [float(one_step(engine, torch.arange(10).view(2, 5))) for _ in range(steps)]


def write_one(tmp_path, steps: int = 1) -> Engine:
    engine = make_engine(1)
    train(engine, steps)
    engine.save_checkpoint(str(tmp_path))
    return engine
