"""Plans of small jobs against what real engines hold, activations included: every tensor of a step on 1 and 2 real ranks.

On a CPU all of it is the host's memory, and offloaded to it is nothing; to a swap file there is, and that is a real one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megazero import comm, mpu
from megazero.model import GPT2Config, GPT2Model
from megazero.plan import plan_job
from megazero.zero.config import ZeroConfig
from megazero.zero.homes import TILE_MULTIPLE
from tests.plan.live_bytes import LiveBytes
from tests.plan.setups import setup_of
from tests.ranks import run_ranks
from tests.zero.models import APART, SHARING, make_engine

MODEL = GPT2Config(
    num_layers=3,
    hidden_size=192,
    num_attention_heads=4,
    vocab_size=1000,
    max_position_embeddings=64,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


# In small tiles, as it is up to the drive how many buffers are used.
ON_NVME = {"offload_optimizer": "nvme", "sub_group_size": 8 * TILE_MULTIPLE}
GENERATORS = 1 << 15  # bytes, at most: the states of random generators, which are saved and loaded
JOBS = [  # stage, dtype, batch size, what is recomputed, micro-batches, what else
    (0, torch.float32, 4, None, 1, {}),
    (0, torch.bfloat16, 8, "full", 1, {}),
    (1, torch.bfloat16, 4, None, 1, {}),
    (2, torch.bfloat16, 1, None, 1, {}),
    (1, torch.float32, 4, None, 1, APART),
    (2, torch.bfloat16, 4, "full", 2, APART),
    (3, torch.float32, 4, None, 1, {}),
    (3, torch.bfloat16, 8, "full", 1, {}),
    (2, torch.bfloat16, 1, None, 2, {}),
    (1, torch.bfloat16, 4, None, 1, {**ON_NVME, "sub_group_size": 2 * TILE_MULTIPLE}),
    (3, torch.bfloat16, 4, None, 2, ON_NVME),
    (2, torch.bfloat16, 4, None, 1, {**ON_NVME, "delayed_param_update": 1}),
    (3, torch.float32, 4, None, 1, {"offload_optimizer": "cpu", "delayed_param_update": 1}),
]


def engine_case(path: str, every: int) -> None:
    groups = mpu.initialize_model_parallel(1)
    n = groups.data_parallel_size
    with LiveBytes() as live:
        channel = comm.Channel(groups.data)
    staging = live.now["cpu"]  # of the transport, whatever the model
    channel.close()
    for stage, dtype, batch_size, recompute, micro_batches, zero in JOBS[::every]:
        mpu.model_parallel_cuda_manual_seed(1)
        config, settings = replace(MODEL, recompute=recompute), ZeroConfig(stage, **zero, nvme_path=path)
        options = {"batch": batch_size, "dtype": dtype, "micro_batches": micro_batches, "device_type": "cpu"}
        plan = plan_job(setup_of(config, settings, n, **options))
        ids = torch.zeros(batch_size, 64, dtype=torch.int64)
        with LiveBytes() as live:
            options = {"zero": {**SHARING, **zero, "nvme_path": path}, "gradient_accumulation_steps": micro_batches}
            engine = make_engine(GPT2Model(config, dtype=dtype), stage, **options)
            live.watch(bucket.weights.flat for bucket in engine.buckets)
            # Moments come with the first step, what is delayed after it; one sequence will do: 16-bit products take a CPU long.
            before = 1 + ("delayed_param_update" in zero)
            for tokens in [*[ids[:1]] * before, ids]:
                live.restart()
                for _ in range(micro_batches):
                    engine.backward(engine(tokens, targets=tokens).mean())
                    engine.step()
        what = f"{stage=}, {dtype=}, {batch_size=}, {recompute=}, {micro_batches=}, {zero=}, {n=}: {plan.moments}"
        held = live.peak["cpu"] - staging
        if n == 1 and plan.disk and micro_batches > 1:
            # A sum from the file comes to hand when its unit's activations are gone. So the peaks of the host and of the device,
            # which share one memory here, lie at different moments.
            assert plan.device < held < plan.device + plan.host, what
        elif plan.disk and stage == 1:  # only the update passes anything through the host
            assert held == pytest.approx(max(plan.device, plan.moments["update"] + plan.host), rel=0.03), what
        else:
            assert held == pytest.approx(plan.device + plan.host, rel=0.03), what
        if plan.disk:
            assert engine.homes.swap.nbytes == pytest.approx(plan.disk, rel=0.03), what
            engine.optimizer.finish()
            known = [p for bucket in engine.buckets for p in (bucket.weights.flat, bucket.weights.resident)]
            for passes_the_buffers in (engine.save_checkpoint, engine.load_checkpoint):
                with LiveBytes(known) as live:
                    passes_the_buffers(path)
                assert live.peak["cpu"] < plan.host + GENERATORS, (passes_the_buffers, what)
        engine.destroy()


@pytest.mark.parametrize("world_size, every", [(1, 1), (2, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_step_of_a_real_engine_holds_what_was_planned(world_size, every, tmp_path):
    run_ranks(world_size, engine_case, str(tmp_path), every)
