"""The example of a model of mpu's layers trains as in one process, however its layers are cut, at every stage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.testing import assert_close

from examples.tensor_parallel_llama import train
from tests.ranks import run_ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "tensor_parallel_llama.py"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_llama_that_two_ranks_split_trains_as_on_one(stage):
    (alone,) = run_ranks(1, train, 1, 0)
    for losses in run_ranks(2, train, 2, stage):
        assert_close(losses, alone, rtol=1e-5, atol=1e-5)
    assert alone[-1] < alone[0] - 1


def test_the_script_runs_as_its_first_lines_say():
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--local_rank=0"],  # as `megazero` starts it
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(SCRIPT.parents[1]), "PATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert "losses: 5." in run.stdout
