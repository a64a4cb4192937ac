"""`initialize` without an optimizer: an engine that evaluates, as the plain module does, and holds nothing but parameters."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import megazero as deepspeed
from megazero import mpu
from tests.ranks import run_ranks

MICRO = {"train_micro_batch_size_per_gpu": 2}


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    model.register_buffer("scale", torch.ones(2))
    return model


def evaluator(stage: int, model: nn.Module | None = None, seed: int = 0, **config):
    zero = {"stage": stage, **config.pop("zero", {})}
    model = make_model(seed) if model is None else model
    engine, optimizer, loader, schedule = deepspeed.initialize(
        model=model, config={**MICRO, "zero_optimization": zero, **config}
    )
    assert (optimizer, loader, schedule) == (None, None, None) and engine.optimizer is engine.lr_scheduler is None
    return engine.eval()


def x_of() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1 + torch.distributed.get_rank()))


def share(bytes_each: int) -> int:
    """Bytes that a rank holds of the model's two units, each of 64-element parameters and padded to whole shards."""
    size = torch.distributed.get_world_size()
    return sum(-(-64 * parameters // (64 * size)) * 64 for parameters in (2, 2)) * bytes_each


def values_case(stage: int, dtype: str, home: str, under_init: bool, folder: str) -> None:
    plain, x = make_model().eval(), x_of()
    if dtype != "fp32":
        plain, x = plain.to(torch.bfloat16), x.to(torch.bfloat16)
    want = plain(x)
    zero = {} if home == "none" else {"offload_param": {"device": home, "nvme_path": folder, "pin_memory": False}}
    with deepspeed.zero.Init(enabled=under_init):
        model = make_model()
    engine = evaluator(stage, model, zero=zero, bf16={"enabled": dtype == "bf16"})
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            assert torch.equal(engine(x), want), context
    engine.empty_partition_cache()
    held = engine.memory()
    assert held["G"] == held["O"] == 0
    assert not any(bucket.is_trainable or bucket.states for bucket in engine.buckets)
    if stage == 3:
        assert all(p.shape == (0,) for p in model.parameters()) and held["buffers"] == 0
        assert held["P"] == (0 if home == "nvme" else share(want.element_size()))
    engine.destroy()
    assert torch.equal(model(x), want), "and has whole parameters again"
    mpu.destroy_model_parallel()


def inference_mode_case() -> None:
    plain, x = make_model(), x_of()
    for stage in (0, 3):
        model = make_model()
        with torch.inference_mode():
            engine = evaluator(stage, model)
            assert torch.equal(engine(x), plain(x))
        assert torch.equal(engine(x), plain(x)), "outside of it, too"
        with torch.inference_mode():
            engine.destroy()
        model(x).sum().backward()  # it can be trained
        mpu.destroy_model_parallel()


def test_an_engine_is_made_and_ended_inside_of_inference_mode():
    run_ranks(2, inference_mode_case)


def every_kind_case(folder: str) -> None:
    for stage, dtype, home, under_init in (
        (0, "fp32", "none", False),
        (0, "bf16", "none", True),
        (3, "fp32", "none", False),
        (3, "fp32", "cpu", True),
        (3, "bf16", "none", True),
        (3, "bf16", "cpu", False),
        (3, "bf16", "nvme", False),
    ):
        values_case(stage, dtype, home, under_init, folder)


@pytest.mark.parametrize("world_size", [1, 2])
def test_outputs_are_those_of_the_plain_module_bit_for_bit_and_nothing_but_parameters_is_held(world_size, tmp_path):
    run_ranks(world_size, every_kind_case, str(tmp_path))


def access_case(stage: int, folder: str) -> None:
    engine = evaluator(stage, zero={"stage3_gather_16bit_weights_on_model_save": True})
    plain = make_model().state_dict()
    found = engine.state_dict()
    assert list(found) == list(plain) and all(torch.equal(found[name], value) for name, value in plain.items())
    with deepspeed.zero.GatheredParameters(engine.module[0].weight, modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            engine.module[0].weight.data.fill_(0.5)
    assert engine.module_state_dict()["0.weight"].eq(0.5).all()
    assert deepspeed.utils.safe_get_full_fp32_param(engine.module[0].weight) is None, "it is not trained"
    other = make_model(seed=1)
    engine.load_module_state_dict(other.state_dict())
    with torch.no_grad():
        assert torch.equal(engine(x_of()), other(x_of()))
    assert engine.save_16bit_model(folder, f"{stage}.bin")
    saved = torch.load(f"{folder}/{stage}.bin", weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in other.state_dict().items())
    assert engine.get_lr() == engine.get_mom() == [] and engine.get_global_grad_norm() == 0
    assert not engine.was_step_applied() and engine.loss_scale() == 1 and engine.train_batch_size() == 4


@pytest.mark.parametrize("stage", [0, 3])
def test_whole_values_can_be_read_written_and_saved(stage, tmp_path):
    run_ranks(2, access_case, stage, str(tmp_path))


def trainer(stage: int, seed: int, folder: str | None = None):
    config = {**MICRO, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=make_model(seed), config=config)
    if folder is not None:
        engine.backward(engine(x_of()).square().mean())
        engine.step()
        engine.save_checkpoint(folder, client_state={"epoch": 3})
    return engine


def checkpoint_case(folder: str) -> None:
    trained = trainer(2, 0, f"{folder}/trained")
    with torch.no_grad():
        want = trained.eval()(x_of())
    engine = evaluator(3, seed=1)
    path, client = engine.load_checkpoint(f"{folder}/trained")
    assert path.endswith("global_step1") and client == {"epoch": 3}
    plain = make_model()
    plain.load_state_dict(trained.module_state_dict())
    half = evaluator(3, seed=1, bf16={"enabled": True})
    half.load_checkpoint(f"{folder}/trained")
    with torch.no_grad():
        assert torch.equal(engine(x_of()), want)
        assert torch.equal(half(x_of().bfloat16()), plain.bfloat16()(x_of().bfloat16()))
    engine.save_checkpoint(f"{folder}/evaluated")
    assert engine.memory()["G"] == engine.memory()["O"] == 0
    for other in (evaluator(0, seed=2), trainer(1, seed=3).eval()):
        other.load_checkpoint(f"{folder}/evaluated")
        with torch.no_grad():
            assert torch.equal(other(x_of()), want)
    with pytest.raises(ValueError, match="exclude_frozen_parameters=True.*every parameter is frozen"):
        engine.save_checkpoint(f"{folder}/nothing", exclude_frozen_parameters=True)


def test_it_takes_the_weights_of_a_training_checkpoint_and_saves_what_a_training_can_load(tmp_path):
    run_ranks(2, checkpoint_case, str(tmp_path))


@pytest.mark.parametrize("stage", [0, 3])
def test_backward_and_step_say_what_is_missing(one_rank, stage):
    engine = evaluator(stage)
    with pytest.raises(AssertionError, match=r"backward\(\) needs an optimizer.*Give optimizer=|give optimizer= to"):
        engine.backward(engine(x_of()).mean())
    with pytest.raises(AssertionError, match=r'step\(\) needs an optimizer, .* or an "optimizer" section'):
        engine.step()
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (0, 0, 0)


def test_what_only_training_has_is_refused_without_an_optimizer(one_rank, caplog):
    schedule = {"type": "WarmupLR", "params": {}}
    for config, given, words in (
        ({"zero_optimization": {"stage": 1}}, {}, "stage 1 needs an optimizer.*use stage 3"),
        ({"zero_optimization": {"stage": 2}}, {}, "stage 2 needs an optimizer"),
        ({"zero_optimization": {"stage": 3, "placement": "auto"}}, {}, 'placement "auto" needs an optimizer'),
        ({}, {"lr_scheduler": lambda optimizer: None}, "an lr_scheduler, but no optimizer"),
    ):
        with pytest.raises(AssertionError, match=words):
            deepspeed.initialize(model=make_model(), config={**MICRO, **config}, **given)
    with pytest.raises(ValueError, match="no trainable parameter"):
        evaluator(3, nn.Tanh())
    caplog.set_level(logging.INFO)
    evaluator(3, scheduler=schedule)
    assert "the engine is for evaluation; the configuration's scheduler has no effect" in caplog.text
    assert "require a gradient but are in no group" not in caplog.text
