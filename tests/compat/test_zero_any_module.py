"""OneFlow's example: any module trains and predicts under every stage, as one process does on the whole batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from examples.zero_any_module import predict, samples, train
from tests.ranks import run_ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "zero_any_module.py"


def plain(world_size: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x, y = (torch.cat(parts) for parts in zip(*(samples(step, rank) for rank in range(world_size)), strict=True))
        sgd.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the configuration's default
        sgd.step()
    return model


def stages_case() -> None:
    size = torch.distributed.get_world_size()
    x = samples(99, 0)[0]
    reference = plain(size)
    predictions = []
    for stage in range(4):
        engine = train(stage)
        predictions.append(predict(engine, x))
        torch.testing.assert_close(predictions[-1], reference(x).detach())
        torch.testing.assert_close(engine.module_state_dict(), reference.state_dict())
        held, whole = engine.memory(), 4 * sum(p.numel() for p in reference.parameters())
        assert held["buffers"] == 0 and held["P"] < (whole / size + 1024 if stage == 3 else whole + 1024)
        if stage == 3:
            assert all(parameter.numel() == 0 for parameter in engine.module.parameters()), "no full copy is left"
        engine.destroy()
    assert all(torch.equal(prediction, predictions[0]) for prediction in predictions), "all stages, bit for bit"


def test_every_stage_trains_and_predicts_as_one_process():
    run_ranks(3, stages_case)


def test_the_script_runs_as_its_first_lines_say():
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--local_rank=0", "2"],  # as `megazero` starts it
        capture_output=True,
        text=True,
        timeout=120,
        cwd=SCRIPT.parents[1],
        env={"PYTHONPATH": str(SCRIPT.parents[1]), "PATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert "stage 2: [" in run.stdout and "bytes held" in run.stdout
