"""torch.distributed with one rank, where a test makes the groups of ranks itself."""

from __future__ import annotations

import pytest
import torch

from megazero import comm, mpu


@pytest.fixture
def world():
    comm.init_distributed("gloo")
    yield
    mpu.destroy_model_parallel()
    torch.distributed.destroy_process_group()
