"""engine.grad_norms() against whole gradients, wherever they are kept and however parameters are cut; what it leaves alone."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch

from megazero import comm, mpu
from megazero.engine import EngineStateError
from megazero.optim.loss_scaler import LossScaler
from tests.checkpoint.test_any_to_any import Net
from tests.ranks import run_ranks
from tests.zero.models import MODELS, full_grads, make_engine, run, token_batches, trained_names

TIED, FROZEN = "tied head, unused parameter", "frozen layers"
BF16 = {"dtype": torch.bfloat16}
OFFLOAD = {"offload_optimizer": "cpu"}
NVME = {"offload_optimizer": "nvme", "offload_param": "nvme"}


def norms_case(path: str, name: str, stage: int, options: dict) -> None:
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    options = {**options, "zero": {"nvme_path": path, **options.get("zero", {})}}
    size, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    torch.manual_seed(0)
    engine = make_engine(
        MODELS[name](), stage, gradient_accumulation_steps=2, loss_scaler=LossScaler(256.0), clip_grad=0.1, **options
    )
    for batches in token_batches(3, 2, size):
        for batch in batches:
            engine.backward(engine(batch[rank]))
            if engine.is_gradient_accumulation_boundary():
                with patch.object(comm, "all_reduced", wraps=comm.all_reduced) as collective:
                    found = engine.grad_norms()
                assert collective.call_count == 1
                want = {each: float(grad.norm()) for each, grad in full_grads(engine).items()}
                assert found.keys() == want.keys(), "tied ones once, without frozen ones"
                assert found == pytest.approx(want, rel=1e-5)
            engine.step()
        assert math.hypot(*found.values()) == pytest.approx(engine.get_global_grad_norm(), rel=1e-6)
    weights = {f"weight {each}": value for each, value in engine.state_dict().items()}
    engine.destroy()
    alone = run(MODELS[name], stage, micro=2, loss_scaler=LossScaler(256.0), clip_grad=0.1, **options)
    assert all(torch.equal(alone[each], value) for each, value in weights.items()), "it changes nothing"


@pytest.mark.parametrize(
    ("ranks", "stage", "name", "options"),
    [
        *((2, stage, TIED, {}) for stage in range(4)),
        *((3, stage, FROZEN, {**BF16, "zero": {"grad_dtype": "compute"}}) for stage in (1, 3)),
        (1, 2, TIED, BF16),
        (4, 3, FROZEN, {"zero": {"shard_size": 2}}),
        (2, 2, TIED, {**BF16, "zero": OFFLOAD}),
        (2, 3, TIED, {**BF16, "zero": {**OFFLOAD, "delayed_param_update": 1}}),
        (2, 3, FROZEN, {**BF16, "zero": NVME}),
        (2, 1, TIED, {"zero": {"offload_optimizer": "nvme"}}),
        (2, 3, TIED, {**BF16, "optimizer": "muon"}),
        (3, 0, "a unit without elements", {"zero": {"reduce_bucket_size": 500}}),
    ],
)
def test_each_norm_is_that_of_the_whole_gradient_and_training_stays_the_same(ranks, stage, name, options, tmp_path):
    run_ranks(ranks, norms_case, str(tmp_path), name, stage, options)


def split_case(size: int, stage: int) -> dict[str, float]:
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    engine = make_engine(Net(), stage)
    engine.backward(engine(torch.arange(10).view(2, 5)))
    norms = engine.grad_norms()
    engine.step()
    assert math.hypot(*norms.values()) == pytest.approx(engine.get_global_grad_norm(), rel=1e-6)
    return norms


def test_parts_of_a_split_parameter_are_added_and_a_whole_one_counts_once():
    (want,) = run_ranks(1, split_case, 1, 0)
    for ranks, stage in ((2, 0), (4, 2)):
        for found in run_ranks(ranks, split_case, 2, stage):
            assert found == pytest.approx(want, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("stage", [0, 2])
def test_it_is_refused_where_a_steps_gradients_are_not_there(one_rank, stage):
    engine = make_engine(MODELS[TIED](), stage, gradient_accumulation_steps=2)
    batch = token_batches(1, 1, 1)[0, 0, 0]

    def is_refused() -> None:
        with pytest.raises(
            EngineStateError, match=r"between engine.backward\(loss\) of the step's last micro-batch and"
        ):
            engine.grad_norms()

    is_refused()
    loss = engine(batch)
    engine.backward(loss)
    is_refused()  # another micro-batch is to come
    engine.step()
    is_refused()  # still
    engine.backward(engine(batch))
    assert engine.grad_norms() == engine.grad_norms()
    engine.step()
    is_refused()
    engine.set_gradient_accumulation_boundary(True)
    if stage == 0:
        with engine.no_sync():
            engine.backward(engine(batch))
            is_refused()
        assert all(norm >= 0 for norm in engine.grad_norms().values()), "of what no_sync has left unreduced"
    engine.zero_grad()
    is_refused()


def test_what_is_frozen_later_has_none(one_rank):
    engine = make_engine(MODELS[TIED](), 2)
    engine.module.blocks[0].up.weight.requires_grad_(False)
    engine.backward(engine(token_batches(1, 1, 1)[0, 0, 0]))
    assert sorted(engine.grad_norms()) == trained_names(engine)
