"""torch.distributed with one rank, where a test makes the groups of ranks itself; and a checkpoint made without any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero import comm, mpu
from tests.checkpoint.checkpoints import make


@pytest.fixture
def world():
    comm.init_distributed("gloo")
    yield
    mpu.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Its directory."""
    make(tmp_path / "saved")
    return tmp_path / "saved"
