"""The same trainings wherever a job may run: on the CPU in every run of the tests; by `-m gpu` on CUDA, over NCCL and gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megazero import activation_checkpointing
from megazero.comm import channel
from tests import test_parity
from tests.ranks import has_gpus, run_ranks
from tests.zero.models import Toy, make_engine, one_step
from tests.zero.test_engine import engine_case
from tests.zero.test_offload import resume_case


def on_gpu(*place: Any, id: str, nccl_ranks: int = 1) -> Any:
    reason = f"needs {nccl_ranks} CUDA devices" + ", or one and NCCL 2.30" * (nccl_ranks > 1)
    return pytest.param(
        *place, id=id, marks=[pytest.mark.gpu, pytest.mark.skipif(not has_gpus(nccl_ranks), reason=reason)]
    )


# Ranks, backend, and what a channel takes for its backend: not gloo but "native" shows on the CPU what NCCL is asked for.
PLACES = [
    pytest.param(1, "gloo", None, id="CPU"),
    pytest.param(2, "gloo", "native", id="2 ranks, CPU, NCCL's lane"),
    on_gpu(1, "nccl", None, id="NCCL"),
    on_gpu(2, "gloo", None, id="2 ranks on one GPU"),
    on_gpu(2, "nccl", None, id="2 ranks, NCCL", nccl_ranks=2),
    on_gpu(4, "nccl", None, id="4 ranks, NCCL", nccl_ranks=4),
]
everywhere = pytest.mark.parametrize(("ranks", "backend", "lane"), PLACES)
where_several = pytest.mark.parametrize(("ranks", "backend", "lane"), [at for at in PLACES if at.values[0] > 1])


def case(lane: str | None, function: Callable, args: tuple, options: dict) -> None:
    if lane is not None:
        channel.backend_of = lambda _: lane  # of this rank's process alone
    function(*args, **options)


def run_there(ranks: int, backend: str, lane: str | None, function: Callable, *args: Any, **options: Any) -> None:
    run_ranks(ranks, case, lane, function, args, options, backend=backend)


@everywhere
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_equals_plain_torch(ranks, backend, lane, stage):
    run_there(ranks, backend, lane, engine_case, "sgd", stage=stage)


WAYS = {
    "new weights during the next forward": {"stage": 2, "overlap_param_gather": True},
    "sets of two ranks": {"stage": 3, "shard_size": 2},
    "nothing overlapped": {"stage": 3, "overlap_comm": False},
    "on the host, during the next forward": {"stage": 2, "offload_optimizer": "cpu", "overlap_param_gather": True},
    "on a drive": {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
    "placed by a plan": {"stage": 3, "placement": "auto"},
}


@where_several
@pytest.mark.parametrize("way", WAYS)
def test_other_ways_between_ranks_equal_plain_torch(ranks, backend, lane, way, tmp_path):
    run_there(ranks, backend, lane, engine_case, "adamw", nvme_path=str(tmp_path), **WAYS[way])


@everywhere
@pytest.mark.parametrize(
    "options",
    [{}, {"max_position_embeddings": 8, "sequence_parallel": True, "recompute": "full"}],
    ids=["", "sequence-parallel"],
)
def test_a_gpt2_over_all_ranks_equals_plain_torch_on_a_cpu(ranks, backend, lane, options):
    """Its layers are split over them; by the job's optimizer, which scales and clips in its own pass."""
    run_there(ranks, backend, lane, test_parity.engine_case, ranks, "adamw, fused", options)


@everywhere
def test_states_in_host_memory_equal_plain_torch(ranks, backend, lane):
    run_there(ranks, backend, lane, engine_case, "adamw", stage=3, offload_optimizer="cpu", offload_param="cpu")


def checkpointed_case() -> None:
    activation_checkpointing.configure(None, checkpoint_in_cpu=True)
    engine_case("sgd", run="ours", stage=3)


@everywhere
def test_activation_checkpoints_in_host_memory_equal_plain_torch(ranks, backend, lane):
    run_there(ranks, backend, lane, checkpointed_case)


@everywhere
@pytest.mark.parametrize("home", ["none", "cpu"])
def test_a_checkpoint_goes_on_bit_for_bit(ranks, backend, lane, home, tmp_path):
    there = {"offload_optimizer": home, "offload_param": home}
    # Where the unbroken run has its states, too: Adam on the host does not round as Adam on a device.
    run_there(ranks, backend, lane, resume_case, str(tmp_path), there, there, there)


@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
def test_a_default_device_changes_nothing(one_rank, home, tmp_path):
    """Many scripts call `torch.set_default_device("cuda")`; "meta" is one on which nothing of an engine's can be."""
    model, tokens = Toy(), torch.arange(8).view(2, 4)
    with torch.device("meta"):
        there = {"offload_optimizer": home, "offload_param": home, "nvme_path": str(tmp_path)}
        engine = make_engine(model, 3, zero=there)
        for _ in range(2):
            one_step(engine, tokens)
        want = engine.state_dict()
        engine.save_checkpoint(tmp_path / "saved")
        one_step(engine, tokens)
        engine.load_checkpoint(tmp_path / "saved")
        got = engine.state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
