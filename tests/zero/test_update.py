"""How an update is divided into calls of the torch optimizer, and what it finds on which device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from megazero import mpu
from megazero.arguments import load_config
from megazero.engine import Engine, weight_decay_groups
from megazero.model import GPT2Config, GPT2Model
from megazero.optim.cpu_adam import CPUAdam
from megazero.zero.config import ZeroConfig
from tests.plan.fake_world import ACCELERATOR, fake_job, fake_step, fake_world

MODEL = """--num-layers 6 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50257 --seq-length 64 --batch-size 1 --bf16
--max-position-embeddings 64 --peak-tflops 1 --no-use-pin-memory --zero-stage 2"""
# A block has 12.6e6 elements, and all the rest 51.5e6.


@pytest.mark.parametrize(
    "ranks, flags, calls",
    [
        (1, "", 2),  # five blocks; and one with all the rest
        (4, "", 1),
        (64, "", 1),
        (64, "--grad-dtype compute", 7),
        (64, "--offload-optimizer cpu --offload-optimizer-ratio 0.5", 1),  # of what stays: the host's Adam is no call
    ],
)
def test_small_shards_are_stepped_together_on_a_device(ranks, flags, calls):
    config = load_config(f"{MODEL} {flags}".split(), world_size=ranks)
    with fake_job(config, ranks) as (job, _):
        assert calls_during(lambda: fake_step(job)) == calls


def calls_during(step: Callable[[], object]) -> int:
    """How often torch optimizers step."""
    calls_made: list[object] = []
    handle = register_optimizer_step_post_hook(lambda *_: calls_made.append(1))
    try:
        step()
    finally:
        handle.remove()
    return len(calls_made)


@pytest.mark.parametrize("is_fused, calls", [(True, 1), (False, 2)])
def test_kernels_that_are_not_fused_get_less_at_a_time(is_fused, calls):
    """They take memory for all that a call steps; a shard of this model has a fourth of the elements above."""
    config = GPT2Config(6, 1024, 16, vocab_size=50257, max_position_embeddings=64)
    with fake_world(4):
        model = GPT2Model(config, device=ACCELERATOR)
        make = partial(torch.optim.AdamW, fused=is_fused)
        engine = Engine(model, mpu.get_groups(), make, *weight_decay_groups(model, 0.1), zero=ZeroConfig(stage=2))
        ids = torch.zeros(1, 8, dtype=torch.int64, device=ACCELERATOR)
        engine.backward(engine(ids, targets=ids).mean())
        assert calls_during(engine.step) == calls


@pytest.mark.parametrize("ratio", [None, 0.5])
def test_cpu_adam_steps_what_stays_on_the_device_too(ratio):
    config = GPT2Config(4, 64, 2, vocab_size=128, max_position_embeddings=8)
    offload = {} if ratio is None else {"offload_optimizer": "cpu", "offload_optimizer_ratio": ratio}
    with fake_world(2):
        model = GPT2Model(config, device=ACCELERATOR)
        zero = ZeroConfig(stage=3, pin_memory=False, **offload)
        engine = Engine(model, mpu.get_groups(), CPUAdam, *weight_decay_groups(model, 0.1), zero=zero)
        ids = torch.zeros(1, 8, dtype=torch.int64, device=ACCELERATOR)
        engine.backward(engine(ids, targets=ids).mean())
        engine.step()
        devices = {state["step"].device for state in engine.optimizer.state.values()}
        assert devices == {ACCELERATOR, *([] if ratio is None else [torch.device("cpu")])}
        engine.optimizer.let_go()
        assert not engine.optimizer.torch_optimizer.on_any_device


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_loaded_step_count_lies_where_torch_has_it(is_fused):
    config = GPT2Config(2, 16, 2, vocab_size=32, max_position_embeddings=8)
    with fake_world(2):
        model = GPT2Model(config, device=ACCELERATOR)
        groups = weight_decay_groups(model, 0.1)
        engine = Engine(model, mpu.get_groups(), lambda params: torch.optim.AdamW(params, fused=is_fused), *groups)
        counters = {name: {"step": 3.0} for name, _ in model.named_parameters()}
        engine.optimizer.allocate_state(dict.fromkeys(counters, ["exp_avg", "exp_avg_sq"]), counters)
        states = list(engine.optimizer.state.values())
        assert states
        assert {state["step"].device for state in states} == {ACCELERATOR if is_fused else torch.device("cpu")}
        assert {state["exp_avg"].device for state in states} == {ACCELERATOR}
