"""ZeRO for a module that knows nothing about it: one line chooses the stage, and the sharded model predicts without changes.

megazero examples/zero_any_module.py 3    # stage 0, 1, 2 or 3; or torchrun; python alone is one process
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import megazero


def train(stage: int, steps: int = 5) -> megazero.Engine:
    """The engine after some steps; each rank trains on its own samples."""
    megazero.init_distributed()
    torch.manual_seed(0)  # the same model on every rank
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},  # 1 optimizer states, 2 + gradients, 3 + parameters
    }
    engine, _, _, _ = megazero.initialize(model=model, config=config)
    for step in range(steps):
        x, y = samples(step, torch.distributed.get_rank())
        loss = nn.functional.cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
    return engine


def predict(engine: megazero.Engine, x: torch.Tensor) -> torch.Tensor:
    """Logits [samples, 10]. Every rank must call it. Layers are gathered one after the other, and sharded again afterwards."""
    engine.eval()
    with torch.no_grad():
        return engine(x.to(engine.device))


def samples(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """8 vectors and their classes, different for every step and rank."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 256, generator=random), torch.randint(0, 10, (8,), generator=random)


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]  # which `megazero` adds
    trained = train(stage=int(given[0]) if given else 3)
    classes = predict(trained, samples(0, 0)[0]).argmax(dim=1).tolist()
    if torch.distributed.get_rank() == 0:
        print(f"stage {trained.zero.stage}: {classes}, bytes held: {trained.memory()}")
    megazero.comm.leave_distributed()
