"""`import megazero as deepspeed`: initialize and its engine, as a script that was written for DeepSpeed uses them."""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, IterableDataset

import megazero as deepspeed
from megazero import comm, mpu
from megazero.json_config import DeepSpeedConfigError
from tests.ranks import run_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
}


def data(world_size: int, steps: int = 3) -> torch.Tensor:
    """[steps, ranks, 2, 6] inputs."""
    return torch.randn(steps, world_size, 2, 6, generator=torch.Generator().manual_seed(1))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean()


def plain(world_size: int) -> dict[str, torch.Tensor]:
    model = make_model()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for batch in data(world_size):
        (sum(loss_of(model(x)) for x in batch) / world_size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def train(engine) -> None:
    rank = mpu.get_data_parallel_rank()
    for batch in data(mpu.get_data_parallel_world_size()):
        loss = loss_of(engine(batch[rank]))
        engine.backward(loss)
        engine.step()


def parity_case(stage: int) -> None:
    model = make_model()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, config={**CONFIG, "zero_optimization": {"stage": stage}}
    )
    assert engine.optimizer is optimizer and loader is None and scheduler is None
    train(engine)
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (3, 3, 0)
    assert engine.global_samples == 3 * engine.train_batch_size() == 6 * torch.distributed.get_world_size()
    assert engine.zero_optimization_stage() == stage and engine.zero_optimization() == (stage > 0)
    want = plain(torch.distributed.get_world_size())
    torch.testing.assert_close(engine.module_state_dict(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_sequential_model_trains_as_in_plain_torch(world_size, stage):
    run_ranks(world_size, parity_case, stage)


def client_case(kind: str) -> None:
    model = make_model()
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}
    make = lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)  # noqa: E731
    if kind == "callable":
        engine, *_ = deepspeed.initialize(model=model, optimizer=make, config=config)
    else:
        adam = make(model.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1.0)
        engine, optimizer, _, scheduler = deepspeed.initialize(
            model=model, optimizer=adam, lr_scheduler=schedule, config=config
        )
        assert optimizer.torch_optimizer is adam and scheduler is schedule
    train(engine)
    want = plain(torch.distributed.get_world_size())
    torch.testing.assert_close(engine.state_dict(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["callable", "instance with a torch scheduler"])
def test_an_optimizer_of_the_callers_own(kind):
    run_ranks(2, client_case, kind)


def megatron_case() -> None:
    """Megatron's tree builds the schedule on another Adam that holds the same parameter-group dictionaries."""
    mpu.initialize_model_parallel(1)
    model = make_model()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.Adam(groups, lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.5**step)
    args = SimpleNamespace(deepspeed_config=None, local_rank=torch.distributed.get_rank())
    engine, optimizer, _, scheduler = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=groups,
        lr_scheduler=schedule,
        mpu=mpu,
        dist_init_required=False,
        config=CONFIG,
    )
    assert scheduler is schedule and [g["weight_decay"] for g in optimizer.param_groups] == [0, 0.0]
    before = engine.get_lr()
    train(engine)
    assert before == [0.5, 0.5] and engine.get_lr() == [0.0625, 0.0625]
    assert optimizer.param_groups[0]["lr"] == 0.0625 and optimizer.cur_scale == 1.0 and not optimizer.overflow


def test_megatrons_call_without_an_optimizer_rebinds_its_schedule():
    run_ranks(2, megatron_case)


S = torch.optim.lr_scheduler
SCHEDULES = {
    "one after the other": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=2), S.ExponentialLR(o, 0.5)], [2]
    ),
    "chained": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.5, total_iters=2), S.ExponentialLR(o, 0.5)]),
    "of momentum too": lambda o: S.OneCycleLR(o, 0.5, total_steps=8),
}


@pytest.mark.parametrize("is_rebound", [True, False])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_torch_does_not_warn_of_a_schedule_that_the_engine_steps(one_rank, kind, is_rebound, recwarn):
    model = make_model()
    given = SCHEDULES[kind](torch.optim.AdamW(model.parameters(), lr=1e-2)) if is_rebound else SCHEDULES[kind]
    recwarn.clear()  # SequentialLR warns of itself when it is built
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "bf16": {"enabled": True}}, lr_scheduler=given)
    for _ in range(3):
        engine.backward(loss_of(engine(torch.ones(2, 6, dtype=torch.bfloat16))))
        engine.step()
    assert [str(warning.message) for warning in recwarn if "optimizer.step()" in str(warning.message)] == []


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_of_several_parts_is_rebound_with_all_of_them(one_rank, kind):
    model = make_model()
    schedules = [SCHEDULES[kind](torch.optim.AdamW(model.parameters(), lr=1e-2)) for _ in range(2)]
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=CONFIG, lr_scheduler=schedules[0])
    for _ in range(5):
        (want,) = schedules[1].optimizer.param_groups
        assert [(g["lr"], g["betas"]) for g in optimizer.param_groups] == [(want["lr"], want["betas"])]
        engine.backward(loss_of(engine(torch.ones(2, 6))))
        engine.step()
        schedules[1].optimizer.step()
        schedules[1].step()


JSON_SCHEDULES = {
    "CosineAnnealingLR": {"T_max": 4, "eta_min": 1e-3},
    "MultiStepLR": {"milestones": [1, 3], "gamma": 0.5},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": 8},
}


@pytest.mark.parametrize("kind", JSON_SCHEDULES)
def test_the_configuration_names_torchs_schedules(one_rank, kind, recwarn):
    config = {**CONFIG, "scheduler": {"type": kind, "params": JSON_SCHEDULES[kind]}}
    engine, optimizer, _, schedule = deepspeed.initialize(model=make_model(), config=config)
    plain = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=CONFIG["optimizer"]["params"]["lr"])
    want = getattr(S, kind)(plain, **JSON_SCHEDULES[kind])
    for _ in range(4):
        assert engine.get_lr() == want.get_last_lr() == schedule.get_last_lr()
        assert optimizer.param_groups[0]["betas"] == plain.param_groups[0]["betas"]
        engine.backward(loss_of(engine(torch.ones(2, 6))))
        engine.step()
        plain.step()
        want.step()
    assert [str(warning.message) for warning in recwarn if "optimizer.step()" in str(warning.message)] == []


def test_torch_does_not_warn_of_a_schedule_that_the_script_keeps(one_rank, recwarn):
    model = make_model()
    own = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = S.StepLR(own, 1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=own, config={**CONFIG, "bf16": {"enabled": True}})
    engine.backward(loss_of(engine(torch.ones(2, 6, dtype=torch.bfloat16))))
    engine.step()
    schedule.step()
    assert engine.get_lr() == pytest.approx([1e-3])
    assert [str(warning.message) for warning in recwarn if "optimizer.step()" in str(warning.message)] == []


def test_sets_that_do_not_divide_the_ranks_are_refused_before_the_model_is_touched(one_rank):
    model = nn.BatchNorm1d(6)
    config = {**CONFIG, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "mics_shard_size": 2}}
    with pytest.raises(DeepSpeedConfigError, match=r"mics_shard_size\) does not divide the 1 data-parallel rank into"):
        deepspeed.initialize(model=model, config=config)
    assert model.running_mean.dtype == torch.float32


@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_failed_initialize_has_cast_is_not_called_the_callers_dtype_nor_unfrozen(one_rank, stage):
    model, config = make_model(), {**CONFIG, "zero_optimization": {"stage": stage}}
    with pytest.raises(ZeroDivisionError):
        deepspeed.initialize(model=model, config={**config, "bf16": {"enabled": True}}, lr_scheduler=lambda _: 1 / 0)
    first = next(model.parameters())
    with pytest.raises(ValueError, match="the parameter is not trained by an engine"):
        deepspeed.utils.safe_set_full_fp32_param(first, torch.zeros(1))
    with pytest.raises(ValueError, match="or give an fp32 model: a new one, if an initialize that failed has cast it"):
        deepspeed.initialize(model=model, config=config)


@pytest.mark.parametrize("stage", [0, 2])
def test_steps_of_the_optimizer_itself_that_would_train_nothing_or_apart_are_refused(one_rank, stage):
    model = make_model()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_batch_size": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage}}
    with pytest.raises(ZeroDivisionError):
        deepspeed.initialize(model=model, optimizer=own, config=config, lr_scheduler=lambda _: 1 / 0)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=own, config=config)  # which has both again
    for _ in range(4):  # micro-batches, of two steps
        engine.backward(loss_of(engine(torch.ones(2, 6))))
        with pytest.raises(RuntimeError, match=r"given to an engine.*would train nothing. Call engine\.step\(\)"):
            own.step()
        with pytest.raises(RuntimeError, match=r"moves the learning-rate schedule.* Call engine\.step\(\)"):
            optimizer.step()
        engine.step()
    assert engine.global_steps == 2
    engine.destroy()
    own.step()  # the caller's again


@pytest.mark.parametrize(
    "scheduler, peaks",
    [
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 2}}, [0.001, 0.001]),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 0.02}}, [0.02, 0.02]),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": [0.02, 1e-5]}}, None),
        ({"type": "WarmupLR", "params": {}}, None),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}, None),
    ],
)
def test_rates_that_a_schedule_replaces_are_told(one_rank, caplog, scheduler, peaks):
    model = make_model()
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == is_matrix]} for is_matrix in (True, False)]
    groups[0]["lr"], groups[1]["lr"] = 0.02, 1e-5
    config = {**CONFIG, "scheduler": scheduler}
    with caplog.at_level(logging.WARNING, "megazero"):
        deepspeed.initialize(model=model, model_parameters=groups, config=config)
    told = f"rise to {peaks}, which the configuration's {scheduler['type']} sets; the optimizer's own, [0.02, 1e-05], "
    assert (told in caplog.text) == (peaks is not None) == ("rise to" in caplog.text)


def fp16_case(stage: int) -> None:
    model = make_model()
    config = {
        **CONFIG,
        "fp16": {"enabled": True, "initial_scale_power": 15, "hysteresis": 1, "loss_scale_window": 2},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=config)
    assert engine.fp16_enabled() and engine.dynamic_loss_scale() and optimizer.loss_scale_config.cur_scale == 2.0**15
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(2)).half()
    scales, lrs = [], []
    for step in range(4):
        loss = loss_of(engine(x))
        engine.backward(loss * (float("inf") if step == 1 and torch.distributed.get_rank() == 0 else 1.0))
        engine.step()
        scales.append(engine.loss_scale())
        lrs.append(engine.get_lr()[0])
    assert scales == [2.0**15, 2.0**14, 2.0**14, 2.0**15], scales  # one overflow on one rank, then two clean steps
    assert engine.skipped_steps == 1 and engine.global_steps == 4 and lrs[1] == lrs[0] < lrs[2]
    assert next(iter(engine.module_state_dict().values())).dtype == torch.float16


@pytest.mark.parametrize("stage", [0, 3])
def test_fp16_overflow_on_one_rank_skips_the_step_on_all(stage):
    run_ranks(2, fp16_case, stage)


def minimum_case() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1}
    for stage in (0, 1):
        config = {**CONFIG, "fp16": fp16, "zero_optimization": {"stage": stage}}
        engine, *_ = deepspeed.initialize(model=make_model(), config=config)
        scales = []
        for _ in range(5):
            engine.backward(loss_of(engine(torch.ones(2, 6).half())) * float("inf"))
            if stage and engine.loss_scale() == 1:
                with pytest.raises(FloatingPointError, match="Current loss scale already at minimum"):
                    engine.step()
                break
            engine.step()
            scales.append(engine.loss_scale())
        assert scales == ([2, 1] if stage else [2, 1, 1, 1, 1])
        engine.destroy()


def test_an_overflow_at_the_least_scale_is_skipped_without_zero_and_an_error_with_it():
    run_ranks(1, minimum_case)


def accumulation_case(stage: int) -> None:
    config = {**CONFIG, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    x = data(torch.distributed.get_world_size())[0][torch.distributed.get_rank()]
    for boundary in (False, True):
        assert engine.is_gradient_accumulation_boundary() == boundary
        half = engine.backward(loss_of(engine(x)))
        torch.testing.assert_close(half, loss_of(engine(x)).detach() / 2)
        engine.step()
        assert engine.was_step_applied() == boundary
    assert (engine.micro_steps, engine.global_steps) == (2, 1)
    engine.backward(loss_of(engine(x)))
    engine.step()  # not a boundary, after an update that was one
    assert not engine.was_step_applied()
    engine.zero_grad()
    for count, is_due in ((3, True), (2, False)):
        engine.micro_steps = count
        assert engine.is_gradient_accumulation_boundary() == is_due
    if stage < 2:
        with engine.no_sync():
            with engine.no_sync():
                engine.backward(loss_of(engine(x)))
            with pytest.raises(AssertionError, match="no_sync"):
                engine.step()
    else:
        with pytest.raises(AssertionError, match="no_sync"), engine.no_sync():
            pass
    engine.zero_grad()
    engine.set_gradient_accumulation_steps(np.int64(4))
    assert type(engine.train_batch_size()) is int  # counted from it, it goes into a checkpoint's JSON
    engine.set_train_batch_size(12)
    assert engine.gradient_accumulation_steps() == 3 and engine.train_batch_size() == 12
    with pytest.raises(ValueError, match="multiple of micro-batch size 2"):
        engine.set_train_batch_size(7)
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be at least 1, got 0"):
        engine.set_gradient_accumulation_steps(0)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps must be an integer, got 2\.0"):
        engine.set_gradient_accumulation_steps(2.0)
    assert engine.gradient_accumulation_steps() == 3


@pytest.mark.parametrize("stage", [1, 2])
def test_accumulation_no_sync_and_batch_size(stage):
    run_ranks(2, accumulation_case, stage)


def loader_case() -> None:
    samples = [(torch.full((6,), float(i)), i) for i in range(10)]
    engine, _, loader, _ = deepspeed.initialize(model=make_model(), config=CONFIG, training_data=samples)
    assert engine.training_dataloader is loader
    mine = [int(i) for _, labels in loader for i in labels]
    assert len(mine) == 5 and len(loader) == 3
    rest = engine.deepspeed_io(samples, batch_size=5, route="eval")
    assert [int(i) for _, labels in rest for i in labels] == list(range(torch.distributed.get_rank(), 10, 2))
    said: list[logging.LogRecord] = []
    logging.getLogger("megazero").addHandler(handler := logging.Handler())
    handler.emit = said.append  # type: ignore[method-assign]
    for route, count in (("train", 9), ("eval", 10), ("eval", 9)):
        assert not said
        engine.deepspeed_io(samples[:count], route=route)
    if torch.distributed.get_rank() == 0:
        assert said.pop().getMessage().startswith("9 samples do not divide by 2 data-parallel ranks: 1 come again")
    assert not said
    return mine


def test_training_data_becomes_a_loader_that_shares_samples_out():
    shares = run_ranks(2, loader_case)
    assert sorted(shares[0] + shares[1]) == list(range(10))


class UpToFour(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_a_loader_has_the_samples_and_the_options_that_it_is_given(one_rank):
    engine, *_ = deepspeed.initialize(model=make_model(), config=CONFIG, collate_fn=list)
    for dataset in (range(4), UpToFour()):
        assert list(engine.deepspeed_io(dataset, route="eval")) == [[0, 1], [2, 3]]
    assert sorted(i for batch in engine.deepspeed_io(range(4)) for i in batch) == [0, 1, 2, 3]
    loader = engine.deepspeed_io(range(9), data_sampler=[8, 3, 5], collate_fn=sum, num_local_io_workers=1)
    assert list(loader) == [11, 5] and loader.num_workers == 1 and not loader.pin_memory  # on a CPU


def test_what_an_optimizer_of_ones_own_leaves_out_is_told(one_rank, caplog):
    model = make_model()
    deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1), config=CONFIG)
    assert "the optimizer given to initialize is used, not the configuration's AdamW" in caplog.text
    assert "2 parameters require a gradient but are in no group, and are not trained: ['2.weight', '2." in caplog.text


def test_configuration_sources(one_rank, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    for given in (
        {"args": args},
        {"config": str(path)},
        {"config_params": CONFIG},
        {"config": base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()},
    ):
        engine, *_ = deepspeed.initialize(model=make_model(), **given)
        assert engine.train_micro_batch_size_per_gpu() == 2
    for wrong, words in (
        ({"args": args, "config": CONFIG}, "given twice"),
        ({"config": CONFIG, "config_params": {**CONFIG, "gradient_clipping": 0.25}}, "given twice, and differs"),
        ({}, "requires --deepspeed_config"),
        ({"config": CONFIG, "model": None}, "needs a model"),
        ({"config": CONFIG, "training_data": DataLoader([1])}, "training_data must be a dataset.*got DataLoader"),
        ({"config": CONFIG, "optimizer": "adam"}, "optimizer must be one as torch has them, or a callable.*got str"),
        ({"config": CONFIG, "lr_scheduler": "cosine"}, "lr_scheduler must be one as torch has them.*got str"),
        ({"config": "no/such/file"}, "no/such/file"),
        ({"config": CONFIG, "args": SimpleNamespace(local_rank=3)}, "local_rank is 3"),
        ({"config": {"train_batch_size": 2, "zero_optimization": {"stage": 2}}}, "needs an optimizer"),
    ):
        with pytest.raises(AssertionError, match=words):
            deepspeed.initialize(**{"model": make_model(), **wrong})


def test_the_oldest_spelling_of_the_flags_is_understood_and_told(one_rank, tmp_path, caplog):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepscale", "--deepspeed_mpi", "--deepscale_config", str(path)])
    engine, *_ = deepspeed.initialize(args=args, model=make_model())
    assert engine.train_micro_batch_size_per_gpu() == 2
    assert "--deepscale_config is an old spelling of --deepspeed_config" in caplog.text


@pytest.mark.parametrize(("dtype", "section"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
def test_a_trained_16_bit_model_needs_a_configuration_that_says_so_and_a_frozen_part_none(one_rank, dtype, section):
    model = make_model()
    model[0].to(dtype)
    with pytest.raises(DeepSpeedConfigError, match=f'0.weight.*{dtype}, but neither.* Add "{section}": '):
        deepspeed.initialize(model=model, config=CONFIG)
    model[0].requires_grad_(False)
    deepspeed.initialize(model=model, config=CONFIG)
    assert (model[0].weight.dtype, model[2].weight.dtype) == (dtype, torch.float32)


def test_mistakes_are_named_before_anything_is_built(one_rank):
    model = make_model()
    with pytest.raises(DeepSpeedConfigError, match="not a parameter of the model"):
        deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=1), config=CONFIG
        )

    class Own(torch.optim.SGD):
        pass

    for stage in (0, 1):
        config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}}
        with pytest.raises(DeepSpeedConfigError, match="zero_allow_untested_optimizer"):
            deepspeed.initialize(model=model, optimizer=Own(model.parameters(), lr=1), config=config)
    config["zero_allow_untested_optimizer"] = True
    engine, *_ = deepspeed.initialize(model=model, optimizer=Own(model.parameters(), lr=1), config=config)
    engine.destroy()
    used = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    model(torch.ones(1, 6)).sum().backward()
    used.step()
    with pytest.raises(AssertionError, match="made steps already"):
        deepspeed.initialize(model=model, optimizer=used, config={"train_batch_size": 1})


@pytest.mark.parametrize("home", ["none", "nvme"])
def test_an_optimizer_whose_states_were_looked_up_has_made_no_steps(one_rank, home, tmp_path):
    model = make_model()
    own = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert not any(own.state[p] for p in model.parameters())  # as schedule-free optimizers do before their first step
    away = {"stage": 2, "offload_optimizer": {"device": home, "nvme_path": str(tmp_path)}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=own, config={"train_batch_size": 2, "zero_optimization": away}
    )
    train(engine)
    assert engine.optimizer.torch_optimizer is own


def saved_by_the_first(stage: int, folder) -> None:
    model = make_model()
    own = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=own, config={"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    )
    train(engine)
    instead = r"each rank its own.* engine\.load_checkpoint\(directory\) on every rank"
    with pytest.raises(RuntimeError, match=instead):
        own.state_dict()
    with pytest.raises(RuntimeError, match=instead):  # the first rank's, on the others too
        own.load_state_dict({"state": {}, "param_groups": own.param_groups})
    engine.save_checkpoint(str(folder))
    engine.load_checkpoint(str(folder))
    engine.destroy()
    own.load_state_dict(own.state_dict())  # the caller's again


@pytest.mark.parametrize("stage", [0, 3])
def test_states_of_the_optimizer_itself_which_are_one_ranks_part_are_refused(stage, tmp_path):
    run_ranks(2, saved_by_the_first, stage, tmp_path)


class Both(torch.optim.Optimizer):
    """Several optimizers in one, which shares their parameter groups, or also their state, or neither."""

    def __init__(self, model: nn.Module, *shared: str) -> None:
        self.inner = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()]
        super().__init__(model.parameters(), {})
        if "param_groups" in shared:
            self.param_groups = [group for each in self.inner for group in each.param_groups]
        if "state" in shared:
            for each in self.inner:
                each.state = self.state

    def step(self, closure=None) -> None:
        for each in self.inner:
            each.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_of_several_trains_if_they_share_its_groups_and_state(one_rank, stage):
    config = {"train_batch_size": 2, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage}}
    for shared in ((), ("state",), ("param_groups",)):
        with pytest.raises(DeepSpeedConfigError, match="Both holds another optimizer, SGD, .* of its own"):
            model = make_model()
            deepspeed.initialize(model=model, optimizer=Both(model, *shared), config=config)
    states = []
    for optimizer in (
        lambda m: Both(m, "param_groups", "state"),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    ):
        torch.manual_seed(0)
        model = make_model()
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
        train(engine)
        states.append(engine.module_state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_the_rate_of_an_optimizer_without_one_is_0(one_rank, caplog):
    class Fixed(torch.optim.Optimizer):
        def step(self, closure=None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data.sub_(0.01 * p.grad)

    caplog.set_level(logging.INFO)
    model = make_model()
    config = {"train_batch_size": 2, "zero_allow_untested_optimizer": True, "steps_per_print": 1}
    engine, *_ = deepspeed.initialize(model=model, optimizer=Fixed(model.parameters(), {}), config=config)
    train(engine)
    assert engine.get_lr() == [0.0] and "step 1, skipped 0, lr [0.0]" in caplog.text


def test_progress_lines(one_rank, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    config = {**CONFIG, "steps_per_print": 2, "wall_clock_breakdown": True, "scheduler": schedule}
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    monkeypatch.setattr(engine, "loss_scale", lambda: 2.0**22)
    train(engine)
    lines = [r.getMessage() for r in caplog.records]
    assert "loss scale 4194304.0" in caplog.text, "with all its digits, as overflows have it"
    assert sum("train_batch_size" in line for line in lines) == 1, "the effective configuration is printed once"
    assert lines.count("the schedule counts optimizer steps, of 1 micro-batch each; a skipped one does not count") == 1
    assert [line.split(",")[0] for line in lines if line.startswith("step ")] == ["step 2"]
    assert sum(line.startswith("time (ms) | ") for line in lines) == 3
    assert engine.get_mom() == [(0.9, 0.999)] and engine.device.type == "cpu"


def state_case(stage: int) -> None:
    torch.manual_seed(torch.distributed.get_rank() * 0)
    config = {**CONFIG, "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": False}}
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    state = {name: torch.randn_like(value) for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in engine.state_dict().items())
    assert all(p.numel() == 0 for p in engine.module.parameters()) == (stage == 3), "sharded ones are not left whole"
    train(engine)  # from the loaded master weights
    reference = make_model()
    reference.load_state_dict(state)
    after = engine.state_dict()
    assert all((after[name] - state[name]).abs().max() < 0.05 for name in state), "one step moves by the learning rate"
    with pytest.raises(RuntimeError, match="missing"):
        engine.load_module_state_dict({})
    with pytest.raises(RuntimeError, match=r"missing \[\], unknown \['2.wait'\]"):
        engine.load_module_state_dict({**state, "2.wait": torch.ones(3)})
    with pytest.raises(RuntimeError, match=r"^(rank 1 failed: RuntimeError: )?load_module_state_dict: missing"):
        engine.load_module_state_dict({} if torch.distributed.get_rank() == 1 else state)  # on one rank: on all
    with pytest.raises(RuntimeError, match=r"not all ranks were given 0.bias, 0.weight, 2.bias and 1 more"):
        engine.load_module_state_dict({} if torch.distributed.get_rank() == 1 else state, strict=False)
    for weight, kind in ((np.ones((3, 7)), "ndarray"), ([1.0], "list")):
        with pytest.raises(RuntimeError, match=rf"2.weight has shape \(3, 7\), got {kind}\."):
            engine.load_module_state_dict({**state, "2.weight": weight})
    assert all(torch.equal(value, after[name]) for name, value in engine.state_dict().items())
    assert engine.save_16bit_model("unused", "unused") is False if stage == 3 else True


@pytest.mark.parametrize("stage", [1, 3])
def test_state_dict_is_whole_and_loads(stage):
    run_ranks(2, state_case, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tied_weight_loads_by_any_of_its_names(stage, one_rank):
    model = nn.ModuleDict({"head": nn.Linear(4, 7, bias=False), "embedding": nn.Embedding(7, 4)})
    model["head"].weight = model["embedding"].weight
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": stage}})
    engine.load_module_state_dict({"embedding.weight": torch.full((7, 4), 2.0)}, strict=False)
    assert (engine.module_state_dict()["head.weight"] == 2.0).all()
    engine.load_module_state_dict({"embedding.weight": torch.full((7, 4), 3.0), "head.weight": torch.full((7, 4), 4.0)})
    assert (engine.module_state_dict()["head.weight"] == 3.0).all(), "the last name in the model decides, as in torch"


def test_a_model_that_torchs_data_parallelism_has_taken_is_refused(one_rank):
    sharded = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(sharded[1], mesh=init_device_mesh("cpu", (1,)))
    for model, words in (
        (nn.parallel.DistributedDataParallel(nn.Linear(4, 2)), "the model is under torch's DistributedDataParallel, "),
        (sharded, "1 is under torch's FSDPModule, "),
    ):
        with pytest.raises(ValueError, match=f"^{words}.* Give the engine the model without it"):
            deepspeed.initialize(model=model, config=CONFIG)


def test_a_model_that_torchs_tensor_parallelism_has_cut_is_refused(one_rank):
    mesh = init_device_mesh("cpu", (1,))
    cut = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    parallelize_module(cut, mesh, {"1": ColwiseParallel()})
    counted = nn.Sequential(nn.Linear(4, 2))
    counted.register_buffer("count", distribute_tensor(torch.zeros(2), mesh))
    for model, name in ((cut, r"1\.weight"), (counted, "count")):
        with pytest.raises(ValueError, match=f"^{name} is a DTensor, .*ColumnParallelLinear"):
            deepspeed.initialize(model=model, config=CONFIG)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor|The PyTorch API of nested tensors|Sparse CSR")
@pytest.mark.parametrize(
    ("make", "form"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.ones(2, 2).to_mkldnn(), "_mkldnn"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "qint8"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    ],
)
def test_tensors_that_are_not_dense_are_refused_by_name(one_rank, make, form):
    held, trained = nn.Linear(4, 2), nn.Linear(4, 2)
    held.register_buffer("graph", make(), persistent=False)
    trained.graph = nn.Parameter(make(), requires_grad=False)
    for model, kind in ((held, "buffer"), (trained, "parameter")):
        with pytest.raises(ValueError, match=rf"^The {kind} 'graph' is a tensor of form {form}, .*to_dense\(\)"):
            deepspeed.initialize(model=model, config=CONFIG)


def test_a_tie_that_is_one_memory_of_two_parameters_is_refused_where_it_would_be_lost(one_rank):
    tied = nn.ModuleDict({"head": nn.Linear(4, 7, bias=False), "embedding": nn.Embedding(7, 4)})
    tied["head"].weight = tied["embedding"].weight
    tied.load_state_dict(tied.state_dict(), assign=True)
    transposed = nn.ModuleList([nn.Linear(4, 7, bias=False), nn.Linear(7, 4, bias=False)])
    transposed[1].weight.data = transposed[0].weight.data.t()
    for model, names in ((tied, "'head.weight' and 'embedding.weight'"), (transposed, "'0.weight' and '1.weight'")):
        for parameter in list(model.parameters())[:2]:
            with pytest.raises(ValueError, match=f"^Parameters {names} are two parameters in one memory"):
                deepspeed.initialize(model=model, config=CONFIG)
            parameter.requires_grad_(False)
        frozen = nn.ModuleList([model, nn.Linear(2, 2)])  # nothing changes what they share
        deepspeed.initialize(model=frozen, config=CONFIG)


def expanded_case() -> None:
    model, rank = make_model(), torch.distributed.get_rank()
    expanded = torch.full((1, 3), float(rank + 1)).expand(2, 3)
    model.register_buffer("mask", expanded)
    model.register_parameter("scale", nn.Parameter(expanded, requires_grad=False))
    model.register_buffer("filter", torch.full((3,), 1j * (rank + 1)).conj())
    model.register_buffer("phase", model.filter.imag)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    state = engine.module_state_dict()
    assert state["mask"].tolist() == state["scale"].tolist() == 2 * [[1.0, 1.0, 1.0]]
    assert state["filter"].tolist() == 3 * [-1j] and state["phase"].tolist() == 3 * [-1.0]
    engine.load_module_state_dict({"mask": 2 * state["mask"]}, strict=False)
    assert model.mask.tolist() == 2 * [[2.0, 2.0, 2.0]]


def test_an_expanded_buffer_or_parameter_and_a_conjugate_are_those_of_the_first_rank_and_load():
    run_ranks(2, expanded_case)


class Counting(nn.Linear):
    """A layer with a state that is no tensor."""

    count = 0

    def get_extra_state(self) -> dict:
        return {"count": self.count}

    def set_extra_state(self, state: dict) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_modules_extra_state_is_part_of_the_state_dictionary(stage, one_rank):
    model = nn.Sequential(Counting(4, 4))
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": stage}})
    model[0].count = 3
    state = engine.module_state_dict()
    model[0].count = 4
    engine.load_module_state_dict(state)
    assert model[0].count == 3
    engine.load_module_state_dict({"0.bias": state["0.bias"]}, strict=False)
    assert model[0].count == 3 and state["0._extra_state"] == {"count": 3}


class Remembering(nn.Linear):
    """A layer whose state is a tensor that grows."""

    history = torch.zeros(2)

    def get_extra_state(self) -> torch.Tensor:
        return self.history

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.history = state.clone()


def test_an_extra_state_that_is_a_tensor_is_its_modules_to_take_and_the_last_name_of_a_buffer_decides(one_rank):
    model = nn.Sequential(Remembering(4, 4))
    for name in "abcdefgh":
        model[0].register_buffer(name, model[0]._buffers.get("a", torch.zeros(1)))
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    names = {f"0.{name}": torch.full([1], float(number)) for number, name in enumerate("abcdefgh")}
    engine.load_module_state_dict({"0._extra_state": torch.arange(5.0), **names}, strict=False)
    assert model[0].history.tolist() == [0, 1, 2, 3, 4] and model[0].a.item() == 7


class Scaled(nn.Linear):
    """A layer that makes a tensor and a number for its state dictionary, and takes them from there, as quantized layers do."""

    scale, bits = 1.0, 8

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"], destination[prefix + "bits"] = torch.tensor(self.scale), self.bits

    def _load_from_state_dict(self, state: dict, prefix: str, *rest: Any) -> None:
        self.scale, self.bits = float(state.pop(prefix + "scale", self.scale)), state.pop(prefix + "bits", self.bits)
        super()._load_from_state_dict(state, prefix, *rest)


def test_what_a_module_makes_for_its_state_dictionary_is_handed_back_to_it(one_rank):
    model = nn.Sequential(Scaled(4, 4))
    model[0].register_buffer("codes", nn.Parameter(torch.ones(4), requires_grad=False))
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": 3}})
    model[0].scale, model[0].bits = 3.0, 4
    state = engine.module_state_dict()
    model[0].scale, model[0].bits = 4.0, 8
    model[0].codes.data.zero_()
    engine.load_module_state_dict(state)
    assert (model[0].scale, model[0].bits) == (3.0, 4) and model[0].codes.tolist() == [1.0] * 4


def test_adagrad_of_the_callers_own_and_models_that_cannot_work(one_rank):
    model = make_model()
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.Adagrad(model.parameters(), lr=0.1), config=config
    )
    train(engine)
    engine.destroy()
    for wrong, words in (
        (make_model().half(), r'"fp16": {"enabled": true}'),
        (make_model().to("meta"), "meta device"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=words):
            deepspeed.initialize(model=wrong, config=CONFIG)
    twice = [{"params": list(model.parameters())}, {"params": [model[0].weight]}]
    with pytest.raises(DeepSpeedConfigError, match="in two parameter groups"):
        deepspeed.initialize(model=model, model_parameters=twice, config=CONFIG)


def test_a_new_batch_size_counts_from_the_last_update(one_rank):
    engine, *_ = deepspeed.initialize(model=make_model(), config=CONFIG)
    x = data(1)[0, 0]
    for _ in range(3):
        engine.backward(loss_of(engine(x)))
        engine.step()
    engine.set_train_batch_size(8)
    engine.backward(loss_of(engine(x)))
    for asked in (engine.set_train_batch_size, engine.set_gradient_accumulation_steps):
        with pytest.raises(
            AssertionError, match="in the middle of a step, of which each micro-batch so far counts 1/4"
        ):
            asked(2)
    engine.set_train_batch_size(8)  # as before
    engine.zero_grad()
    boundaries = []
    for _ in range(8):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.backward(loss_of(engine(x)))
        engine.step()
    assert boundaries == 2 * [False, False, False, True] and engine.global_steps == 5


def said_case() -> None:
    """What each rank's log prints of warnings that are the same on all of them, and of one that is not."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        config = {
            **CONFIG,
            "zero_optimization": {"stage": 3, "placement": "auto"},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_num_steps": 11}},
        }
        deepspeed.initialize(model=make_model(), config=config)
        logging.getLogger("megazero.tests").warning("of this rank alone")
    rank = torch.distributed.get_rank()
    for shared in ("there is nothing to place", "total_num_steps 5 is less than"):
        assert (shared in said.getvalue()) == (rank == 0), said.getvalue()
    assert ("[rank 1] of this rank alone" in said.getvalue()) == (rank == 1)


def test_a_warning_that_all_ranks_share_is_printed_by_the_first_alone():
    run_ranks(2, said_case)


def differing_case(folder: str) -> None:
    rank = torch.distributed.get_rank()
    for mine, said in (
        ({"gradient_clipping": 0.5 + rank}, "gradient_clipping is 1.5, and on rank 0 0.5"),
        ({"fp16": {"enabled": True}} if rank else {}, "fp16.enabled is True, and on rank 0 False"),
        (
            {"zero_optimization": {"stage": 3, **({"max_live_parameters": 10**9} if rank else {})}},
            "stage3_max_live_par",
        ),
        ({} if rank else {"scheduler": {"type": "WarmupLR"}}, "scheduler.type is None, and on rank 0 'WarmupLR'"),
    ):
        with pytest.raises(ValueError, match=f"ranks differ and would train different models: on rank 1, .*{said}"):
            deepspeed.initialize(model=make_model(), config={**CONFIG, **mine})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", f"2.{rank}")
        with pytest.raises(ValueError, match="on rank 1, the release of torch is '2.1', and on rank 0 '2.0'"):
            deepspeed.initialize(model=make_model(), config=CONFIG)
    home = {"device": "nvme", "nvme_path": f"{folder}/{rank}", "pin_memory": bool(rank)}
    Path(home["nvme_path"]).mkdir()
    own = {
        "steps_per_print": 1 + rank,
        "zero_optimization": {"stage": 1, "offload_optimizer": home},
        "aio": {"queue_depth": 4 + rank},
    }
    train(deepspeed.initialize(model=make_model(), config={**CONFIG, **own})[0])


def other_models_case() -> None:
    rank = torch.distributed.get_rank()
    model = make_model()
    model.register_buffer("mask", torch.ones(3 + rank))
    with pytest.raises(ValueError, match="different models: mask are not"):
        deepspeed.initialize(model=model, config=CONFIG)
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("ab", "ba")[rank]})
    with pytest.raises(ValueError, match=r"different models: a.weight, b.weight are not"):
        deepspeed.initialize(model=model, config=CONFIG)


def test_ranks_with_other_models_are_refused_before_they_take_the_first_ones_values():
    run_ranks(2, other_models_case)


def test_ranks_with_other_settings_are_refused_but_for_their_own_paths_and_logs(tmp_path):
    run_ranks(2, differing_case, str(tmp_path))


def lone_mistake_case() -> None:
    is_second = torch.distributed.get_rank() == 1
    error, told = (DeepSpeedConfigError, "") if is_second else (comm.OtherRankError, "rank 1 failed: DeepSpeedConfig.*")
    for mistake, said in (
        ({"config": "absent.json" if is_second else CONFIG}, "'absent.json' is neither"),
        ({"config": CONFIG, "model_parameters": iter([]) if is_second else None}, "model_parameters is empty"),
    ):
        with pytest.raises(error, match=told + said):
            deepspeed.initialize(model=make_model(), **mistake)


def test_a_mistake_of_one_rank_is_an_error_on_all_of_them_at_once():
    run_ranks(2, lone_mistake_case, timeout_s=30)
