"""Where a training step makes the host wait for the device: for the gradient norm, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megazero import training
from megazero.arguments import load_config
from tests.plan.fake_world import ACCELERATOR, fake_job, fake_step

COMMON = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --vocab-size 128
    --batch-size 2 --peak-tflops 1 --no-use-pin-memory"""
CASES = {
    "whole": "--zero-stage 0",
    "O sharded, 16 bits": "--zero-stage 1 --bf16",
    "two micro-batches": "--zero-stage 2 --fp16 --global-batch-size 32",
    "all sharded, recomputed": "--zero-stage 3 --bf16 --checkpoint-activations",
    "tensor-parallel": "--zero-stage 2 --bf16 --model-parallel-size 2 --sequence-parallel",
    "loss in chunks": "--zero-stage 1 --bf16 --sequence-chunk-size 16",
    "tokens weighed": "--zero-stage 2 --fp16 --global-batch-size 32 --calculate-per-token-loss",
    "tokens weighed, tensor-parallel": "--zero-stage 3 --bf16 --model-parallel-size 2 --calculate-per-token-loss",
    "O on the host": "--zero-stage 2 --bf16 --offload-optimizer cpu",
    "O on the host, whole G": "--zero-stage 1 --bf16 --offload-optimizer cpu",
    "O on the host, whole G of fp32": "--zero-stage 1 --offload-optimizer cpu",
    "O on a drive, whole G": "--zero-stage 1 --bf16 --offload-optimizer nvme --nvme-path /drive",
    "all on the host": "--zero-stage 3 --bf16 --offload-optimizer cpu --offload-param cpu --global-batch-size 32",
    "all on a drive": "--zero-stage 3 --bf16 --offload-optimizer nvme --offload-param nvme --nvme-path /drive",
    "delayed": "--zero-stage 2 --bf16 --offload-optimizer cpu --delayed-param-update 1",
    "muon": "--zero-stage 2 --bf16 --model-parallel-size 2 --optimizer muon",
    "sets of ranks": "--zero-stage 3 --bf16 --zero-shard-size 2",
    "new weights on their way": "--zero-stage 1 --bf16 --overlap-param-gather",
    "new weights in the step": "--zero-stage 1 --bf16 --no-overlap-param-gather",
}


def token_batches() -> Iterator[dict[str, Tensor]]:
    while True:
        yield {"text": torch.zeros(2, 33, dtype=torch.int64)}


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
def test_a_step_waits_for_the_gradient_norm_alone(flags, monkeypatch):
    monkeypatch.setattr(training, "_raise_not_finite", lambda *_: None)  # every number is 1 here, that of bad ranks too
    monkeypatch.setattr(training, "_why_stop", lambda *_: None)
    config = load_config(f"{COMMON} {flags}".split(), world_size=8)
    with fake_job(config, 8, rank=1) as (job, held):
        batches = token_batches() if job.groups.model_parallel_rank == 0 else None
        for _ in range(2):
            held.waits.clear()
            training.train_step(job, batches)
        assert held.waits == ["_local_scalar_dense in grad_norm"], held.waits


@pytest.mark.parametrize("case", ["tensor-parallel", "O on the host", "all on a drive"])
def test_the_norm_of_each_gradient_is_waited_for_together_and_only_where_it_is_logged(case, monkeypatch):
    monkeypatch.setattr(training, "_raise_not_finite", lambda *_: None)
    monkeypatch.setattr(training, "_why_stop", lambda *_: None)
    flags = f"{COMMON} {CASES[case]} --log-grad-norms --log-interval 2"
    with fake_job(load_config(flags.split(), world_size=8), 8, rank=1) as (job, held):
        batches = token_batches() if job.groups.model_parallel_rank == 0 else None
        for iteration in range(1, 5):
            held.waits.clear()
            training.train_step(job, batches)
            if iteration > 1:  # the first compares parameters that ranks hold whole
                of_norms = [] if iteration % 2 else ["_to_copy in grad_norms"]
                assert held.waits == [*of_norms, "_local_scalar_dense in grad_norm"], held.waits


def test_muon_on_the_host_waits_once_for_what_comes_back_of_each_slice():
    flags = "--zero-stage 3 --bf16 --optimizer muon --offload-optimizer cpu --offload-param cpu"
    config = load_config(f"{COMMON} {flags}".split(), world_size=2)
    with fake_job(config, 2) as (job, held):
        optimizer = job.engine.optimizer
        of_muon = [piece for piece in optimizer.slices if optimizer.param_groups[piece.span.group]["use_muon"]]
        fake_step(job)
        held.waits.clear()
        fake_step(job)
        assert held.waits == ["_local_scalar_dense in grad_norm", *["_to_copy in _take"] * len(of_muon)]


def test_waits_are_seen():
    """So that the test above can fail."""
    config = load_config(COMMON.split(), world_size=1)
    with fake_job(config, 1) as (_, held):
        held.waits.clear()
        x = torch.zeros(3, device=ACCELERATOR)
        _ = float(x.sum()), x.tolist(), x.cpu()
        assert len(held.waits) == 1 + 3 + 1, held.waits
        _ = torch.zeros(3).copy_(x), x.copy_(torch.zeros(3)), torch.equal(x, x), bool(x[0] > 0)
        assert len(held.waits) == 5 + 4, held.waits
        _ = x.to("cpu", non_blocking=True), torch.zeros(3).copy_(x, non_blocking=True), torch.zeros(3).tolist()
        assert len(held.waits) == 5 + 4, held.waits
