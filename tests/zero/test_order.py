"""Ranks that run different parts of a model are told so."""

from __future__ import annotations

import pytest
import torch

from megazero import mpu
from tests.ranks import run_ranks
from tests.zero.models import Toy, make_engine


def other_order_case() -> None:
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    engine = make_engine(Toy(), 3, zero={"overlap_comm": False})
    blocks = list(engine.module.blocks)
    with pytest.raises(RuntimeError, match=r"unit 'blocks.\d'.*is in all_gather of blocks.\d"), torch.no_grad():
        x = torch.ones(1, 5)
        for block in blocks if mpu.get_data_parallel_rank() == 0 else reversed(blocks):
            x = block(x)


def test_units_in_another_order_on_another_rank_are_named_instead_of_mixed_up():
    run_ranks(2, other_order_case)
