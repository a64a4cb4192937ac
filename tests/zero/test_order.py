"""Ranks that run different parts of a model are told so."""

from __future__ import annotations

import pytest
import torch

from megazero import mpu
from megazero.comm import channel
from tests.ranks import run_ranks
from tests.zero.models import Toy, make_engine, one_step, token_batches
from tests.zero.test_dynamic import Conditioned


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


def other_order_over_nccl_case() -> None:
    channel.backend_of = lambda _: "native"  # of this rank's process alone
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    engine = make_engine(Toy(), 3, zero={"overlap_comm": False})
    rank = mpu.get_data_parallel_rank()
    with torch.no_grad():
        engine.module.blocks[rank](torch.ones(1, 5))  # each takes the other's weights, as these are of one size
    engine.backward(engine(token_batches(1, 1, 2)[0, 0, rank]))
    with pytest.raises(
        RuntimeError, match=r"number 1 is all_gather of blocks.0, .* on rank 0, and all_gather of blocks.1, "
    ):
        engine.step()
    assert engine.global_steps == 0


def test_units_in_another_order_over_nccls_lane_are_named_by_the_first_step():
    run_ranks(2, other_order_over_nccl_case)


def dropped_forward_case() -> None:
    """Units fed with raw data, of which one rank does not use all parameters."""
    channel.backend_of = lambda _: "native"  # of this rank's process alone, for `step` to compare the order
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    engine = make_engine(Conditioned("plain", "raw"), 3)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(mpu.get_data_parallel_rank()))
    for _ in range(3):
        engine(x)
    assert len(engine.schedule._runs._order) == len(engine.module.units), "dropped forwards do not pile up"
    one_step(engine, x)


def test_a_forward_whose_graph_is_dropped_does_not_change_the_order_on_one_rank():
    run_ranks(2, dropped_forward_case)
