"""A collective method that one rank calls alone says so within the timeout, instead of waiting for ever or doing half of it."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

import megazero as deepspeed
from megazero import mpu, utils
from tests.ranks import run_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


def join(folder: str, name: str, timeout_s: float) -> None:
    """Leaves the harness's world for one with another timeout."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if name == "short":
        torch.distributed.barrier()  # the other one still connects
    torch.distributed.destroy_process_group()
    where = {"init_method": f"file://{folder}/{name}", "rank": rank, "world_size": size}
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout_s), **where)


def trained(**config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, **config})
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 6)).mean())
        if engine.global_steps == 0:
            engine.step()
    return engine


def alone_case(folder: str) -> None:
    join(folder, "short", 6.0)
    engine = trained()
    finished = Path(folder) / "finished"
    if torch.distributed.get_rank() == 1:
        while not finished.exists():
            time.sleep(0.05)
    else:
        weight = engine.module[0].weight
        values = {"0.weight": torch.zeros(7, 6)}
        called = r"{} was called on rank 0, but within .* s not on ranks \[1\]"
        engine.channel.timeout_s = engine.channel._meeting._timeout_s = 0.5
        for name, call in {
            "module_state_dict": engine.state_dict,
            "load_module_state_dict": lambda: engine.load_module_state_dict(values, strict=False),
            "save_checkpoint": lambda: engine.save_checkpoint(folder),
            "load_checkpoint": lambda: engine.load_checkpoint(folder),
            "save_16bit_model": lambda: engine.save_16bit_model(folder),
            "safe_set_full_fp32_param of 0.weight": lambda: utils.safe_set_full_fp32_param(weight, values["0.weight"]),
            "GatheredParameters of 0": lambda: deepspeed.zero.GatheredParameters(weight).__enter__(),
        }.items():
            with pytest.raises(RuntimeError, match=called.format(name)):
                call()
        told = r"rank 0, step 2, engine.step\(\) failed. If the other ranks did not come.*Timed out waiting 6000ms"
        with pytest.raises(RuntimeError, match=told):
            engine.step()
        for name, call in {
            "safe_get_full_grad of 0.weight": lambda: utils.safe_get_full_grad(weight),
            "safe_get_full_fp32_param of 0.weight": lambda: utils.safe_get_full_fp32_param(weight),
            "reading the optimizer's state 'exp_avg'": lambda: utils.safe_get_full_optimizer_state(weight, "exp_avg"),
        }.items():
            with pytest.raises(RuntimeError, match=f"{name} failed on rank 0. It is collective"):
                call()
        finished.touch()
    mpu.destroy_model_parallel()
    join(folder, "end", 60.0)  # the groups of before are broken


def delayed_case(stage: int) -> None:
    engine = trained(
        zero_optimization={"stage": stage, "offload_optimizer": {"device": "cpu"}, "delayed_param_update": 1}
    )
    engine.step()
    if torch.distributed.get_rank() == 0:
        engine.channel.timeout_s = engine.channel._meeting._timeout_s = 0.5
        for name, call in {"module_state_dict": engine.module_state_dict, "destroy": engine.destroy}.items():
            with pytest.raises(RuntimeError, match=rf"{name} was called on rank 0, but within .* s not on ranks \[1\]"):
                call()
    torch.distributed.barrier()


@pytest.mark.parametrize("stage", [1, 2])
def test_what_completes_a_delayed_update_is_named_if_one_rank_calls_it_alone(stage):
    run_ranks(2, delayed_case, stage)


def test_what_one_rank_calls_alone_is_named(tmp_path):
    run_ranks(2, alone_case, str(tmp_path))
