"""torch.distributed with one rank, where a test makes the groups of ranks itself; and a checkpoint made without any."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero import comm
from tests.checkpoint.checkpoints import make


@pytest.fixture
def world(own_world):
    comm.init_distributed("gloo")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Its directory."""
    make(tmp_path / "saved")
    return tmp_path / "saved"
