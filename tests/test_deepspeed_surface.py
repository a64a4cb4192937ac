"""Every name of DeepSpeed's engine that scripts use is there and answers rightly; and settings that only `initialize` reads."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import namedtuple
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import megazero as deepspeed
from megazero import comm, mpu
from megazero.json_config import DeepSpeedConfigError
from tests.ranks import free_port, run_ranks
from tests.test_deepspeed_api import make_model

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def initialize(model: nn.Module | None = None, **config):
    engine, *_ = deepspeed.initialize(
        model=make_model() if model is None else model,
        config={"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, **config},
    )
    return engine


def one_step(engine, x: torch.Tensor, times: float = 1.0) -> torch.Tensor:
    loss = engine.backward(times * engine(x).float().square().mean())
    engine.step()
    return loss


def x_of(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(rank)).to(dtype)


# ---- names


CALLS = """backward step forward train eval zero_grad train_batch_size train_micro_batch_size_per_gpu
gradient_accumulation_steps set_train_batch_size is_gradient_accumulation_boundary set_gradient_accumulation_boundary
was_step_applied get_lr get_mom get_global_grad_norm gradient_clipping loss_scale dynamic_loss_scale fp16_enabled
bfloat16_enabled zero_optimization zero_optimization_stage zero_optimization_partition_gradients
zero_optimization_partition_weights wall_clock_breakdown steps_per_print no_sync allreduce_gradients deepspeed_io
save_checkpoint load_checkpoint save_16bit_model save_fp16_model module_state_dict load_module_state_dict state_dict
empty_partition_cache destroy parameters named_parameters""".split()


def surface_case() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_num_steps": 4}}
    engine = initialize(
        gradient_accumulation_steps=2,
        gradient_clipping=0.5,
        bf16={"enabled": True},
        scheduler=schedule,
        zero_optimization={"stage": 3},
        steps_per_print=7,
    )
    assert not [name for name in CALLS if not callable(getattr(engine, name))]
    questions = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "is_gradient_accumulation_boundary": False,
        "was_step_applied": False,
        "get_lr": [0.001],
        "get_mom": [(0.9, 0.999)],
        "gradient_clipping": 0.5,
        "loss_scale": 1.0,
        "dynamic_loss_scale": False,
        "fp16_enabled": False,
        "bfloat16_enabled": True,
        "zero_optimization": True,
        "zero_optimization_stage": 3,
        "zero_optimization_partition_gradients": True,
        "zero_optimization_partition_weights": True,
        "wall_clock_breakdown": False,
        "steps_per_print": 7,
        "get_batch_info": (8, 2, 2),
    }
    assert {name: getattr(engine, name)() for name in questions} == questions
    rank = torch.distributed.get_rank()
    ranks = (engine.global_rank, engine.local_rank, engine.world_size, engine.dp_world_size, engine.mp_world_size)
    assert ranks == (rank, rank, 2, 2, 1)
    assert comm.get_all_ranks_from_group(engine.data_parallel_group) == [0, 1]
    assert engine.zero_offload_optimizer() is None is engine.zero_offload_param()
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples) == (0, 0, 0, 0)
    assert engine.lr_scheduler.get_lr() == engine.lr_scheduler.get_last_lr() == [0.001]
    assert engine.train() is engine and engine.training and not engine.eval().module.training
    assert engine.to(engine.device) is engine.to("cpu", torch.bfloat16) is engine
    with pytest.raises(RuntimeError, match="nowhere"):
        engine.to("nowhere")
    for _ in range(2):
        loss = one_step(engine.train(), x_of(rank, torch.bfloat16))
    assert loss.ndim == 0 and engine.was_step_applied() and engine.get_global_grad_norm() > 0
    engine.set_gradient_accumulation_boundary(True)
    assert engine.is_gradient_accumulation_boundary()
    engine.empty_partition_cache()


def test_every_name_of_deepspeeds_engine_is_there_and_answers():
    run_ranks(2, surface_case)


def test_names_of_the_package():
    for name in (
        "initialize",
        "add_config_arguments",
        "get_accelerator",
        "init_distributed",
        "DeepSpeedConfigError",
        "DeepSpeedEngine",
    ):
        assert callable(getattr(deepspeed, name))
    for name in ("Init", "GatheredParameters", "register_external_parameter", "TiledLinear"):
        assert callable(getattr(deepspeed.zero, name))
    version = ("version", "version_major", "version_minor", "version_patch", "git_hash", "git_branch")
    assert all(hasattr(deepspeed, f"__{name}__") for name in version)
    states = ("fp32_param", "grad", "optimizer_state")
    for name in (
        f"safe_{verb}_{part}_{state}" for verb in ("get", "set") for part in ("full", "local") for state in states
    ):
        assert callable(getattr(deepspeed.utils, name))
    assert callable(deepspeed.checkpointing.configure) and deepspeed.comm and deepspeed.ops.adam.DeepSpeedCPUAdam


def test_modules_inside_ops_and_utils_need_no_import_of_their_own():
    code = "deepspeed.ops.adam.FusedAdam, deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint"
    subprocess.run([sys.executable, "-c", f"import megazero as deepspeed; {code}"], check=True)


# ---- joining the world


@pytest.fixture
def no_world(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def timeout_s() -> float:
    return comm.timeout_of(comm.world())


def test_init_distributed_takes_its_timeout_from_the_argument_or_the_environment(no_world, tmp_path):
    no_world.setenv("DEEPSPEED_TIMEOUT", "2.5")
    deepspeed.init_distributed("gloo")
    assert timeout_s() == 150.0
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=7))  # already there: nothing happens
    assert timeout_s() == 150.0
    torch.distributed.destroy_process_group()
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=7))
    assert timeout_s() == 7.0
    torch.distributed.destroy_process_group()
    deepspeed.init_distributed("gloo", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    assert timeout_s() == 150.0
    torch.distributed.destroy_process_group()
    deepspeed.init_distributed(dist_init_required=False)
    assert not torch.distributed.is_initialized(), "the caller says that it joins by itself"
    with pytest.raises(DeepSpeedConfigError, match="dist_init_required=False says that the script has joined"):
        deepspeed.initialize(model=make_model(), config={"train_batch_size": 2}, dist_init_required=False)
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in launched.items():
        no_world.setenv(name, value)
    deepspeed.init_distributed("gloo")
    assert timeout_s() == 150.0


def test_nccl_without_a_gpu_is_an_error_that_has_the_call_too(no_world, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"--distributed-backend gloo; or in a call, init_distributed\(\) without a backend"
    ):
        deepspeed.init_distributed("nccl")


@pytest.mark.parametrize("minutes", ["soon", "1e14"])
def test_a_timeout_in_the_environment_that_is_no_time_is_one_line(no_world, minutes):
    no_world.setenv("DEEPSPEED_TIMEOUT", minutes)
    with pytest.raises(
        ValueError, match=f"DEEPSPEED_TIMEOUT='{minutes}' in the environment must be a number of minutes"
    ):
        deepspeed.init_distributed("gloo")


@pytest.mark.parametrize(
    ("to_nccl", "to_gloo", "used"),
    [
        ("lo", None, "lo"),
        ("=lo", None, "lo"),
        ("lo", "eth7", "eth7"),
        ("^lo", None, None),
        ("l", None, None),
        ("", None, None),
    ],
)
def test_gloo_uses_the_interface_that_is_named_to_nccl_if_it_is_one(no_world, to_nccl, to_gloo, used):
    no_world.setenv("NCCL_SOCKET_IFNAME", to_nccl)
    no_world.setenv("GLOO_SOCKET_IFNAME", to_gloo or "x")  # so that what is set below is taken away afterwards
    if to_gloo is None:
        no_world.delenv("GLOO_SOCKET_IFNAME")
    no_world.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    deepspeed.init_distributed("gloo")
    assert os.environ.get("GLOO_SOCKET_IFNAME") == used


def test_init_distributed_reads_open_mpis_variables_and_a_place(no_world, tmp_path):
    for name, value in {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items():
        no_world.setenv(f"OMPI_COMM_WORLD_{name}", value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        no_world.setenv(name, "x")  # so that what is set below is taken away afterwards
        no_world.delenv(name)
    no_world.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 ranks on several hosts and do not say where these meet"):
        deepspeed.init_distributed("gloo")
    no_world.setenv("OMPI_COMM_WORLD_SIZE", "1")
    deepspeed.init_distributed("gloo", distributed_port=0)
    assert os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] == "1" and torch.distributed.get_world_size() == 1
    torch.distributed.destroy_process_group()
    deepspeed.init_distributed("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert torch.distributed.get_world_size() == 1


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_one_of_several_processes_that_knows_no_rank_is_refused_and_one_alone_is_not(no_world, name):
    for each in ("RANK", "WORLD_SIZE"):
        no_world.setenv(each, "x")  # so that it is as before afterwards
        no_world.delenv(each)
    no_world.setenv(name, "2")
    for join in (deepspeed.init_distributed, comm.told_world):
        with pytest.raises(ValueError, match=rf"one of 2 of .* \({name}\), and nothing says which rank it is"):
            join()
    no_world.setenv(name, "1")
    assert comm.told_world() == (0, 1)
    for each, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        no_world.setenv(each, value)
    no_world.setenv(name, "2")
    assert comm.told_world() == (1, 2)


def test_a_script_that_does_not_leave_waits_for_gloos_threads_at_its_exit():
    script = "import megazero as m\nm.init_distributed()\nm.init_distributed()\nm.comm.join.time.sleep = print"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines().count(str(comm.join.UNLOCKED_S)) == 1  # torch 2.8 prints a line of its own


@pytest.mark.parametrize("host, said", [("no.such.host", "does not know"), ("127.0.0.1", "nothing answers at")])
def test_a_meeting_place_that_does_not_answer_is_named(no_world, host, said):
    port = free_port()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port)}.items():
        no_world.setenv(name, value)
    no_world.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(
        OSError, match=f"rank 1: .*MASTER_ADDR={host}.* {said}|{said} MASTER_ADDR={host}, MASTER_PORT={port}"
    ):
        deepspeed.init_distributed("gloo", timeout=timedelta(seconds=1))


def rank_given_case(port: int) -> int:
    """Joins another world, as the other rank."""
    rank = 1 - torch.distributed.get_rank()
    comm.leave_distributed()  # together: a rank that left at once could close connections that the other still makes
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    deepspeed.init_distributed("gloo", rank=rank, world_size=2)
    return torch.distributed.get_rank()


def test_init_distributed_joins_as_the_rank_that_it_is_given():
    assert run_ranks(2, rank_given_case, free_port()) == [1, 0]


def restarted_case(port: int, of_torchrun: bool) -> float:
    """Joins again as a rank of one of two nodes, which have counted different numbers of restarts; the sum of the ranks + 1."""
    rank = torch.distributed.get_rank()
    comm.leave_distributed()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(GROUP_WORLD_SIZE="2", TORCHELASTIC_RESTART_COUNT=str(rank + 1))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(of_torchrun)
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=20))
    total = torch.tensor(rank + 1.0)
    torch.distributed.all_reduce(total)
    return total.item()


def test_restarted_ranks_of_several_nodes_meet_in_a_new_store_and_are_told_so_in_torchruns_own():
    assert run_ranks(2, restarted_case, free_port(), False) == [3.0, 3.0]
    with pytest.raises(
        AssertionError, match=r"restart \d by torchrun: .*Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node"
    ):
        run_ranks(2, restarted_case, free_port(), True)


def test_a_rank_that_contradicts_the_environments_is_refused(no_world):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        no_world.setenv(name, value)
    with pytest.raises(ValueError, match=r"init_distributed\(rank=1\), and the environment has RANK=0\. Drop"):
        deepspeed.init_distributed("gloo", rank=1, world_size=1)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ("RANK=", "RANK= in the environment must be a number"),
        ("LOCAL_RANK=x", "LOCAL_RANK=x in the environment must be a number"),
        ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=", "MASTER_PORT= in the environment must be a number"),
        ("RANK=0 WORLD_SIZE=1 MASTER_ADDR= MASTER_PORT=1", "the environment has no MASTER_ADDR: a launcher sets"),
        ("WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1", "the environment has no RANK: a launcher sets"),
        ("RANK=1 WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=1", "RANK=1 in the environment must be below WORLD_SIZE=1"),
    ],
)
def test_what_no_launcher_says_is_refused_before_ranks_wait_for_each_other(no_world, variables, said):
    for variable in variables.split():
        no_world.setenv(*variable.split("="))
    with pytest.raises(ValueError, match=said):
        deepspeed.init_distributed("gloo")


def timeout_case() -> float:
    return initialize(zero_optimization={"stage": 3}).channel.timeout_s


def test_the_engine_waits_as_long_as_the_world_does():
    assert run_ranks(2, timeout_case, timeout_s=33.0) == [33.0, 33.0]


# ---- settings


def summed_case() -> None:
    """SGD with the sum is SGD with N times the mean."""
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0}
    n, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for stage in (0, 1, 2):
        mean = initialize(**config, zero_optimization={"stage": stage})
        loss = one_step(mean, x_of(rank), times=n)
        summed = initialize(**config, zero_optimization={"stage": stage}, gradient_allreduce_op="sum")
        torch.testing.assert_close(one_step(summed, x_of(rank)), loss / n)
        torch.testing.assert_close(summed.get_global_grad_norm(), mean.get_global_grad_norm())
        torch.testing.assert_close(summed.module_state_dict(), mean.module_state_dict())
    with pytest.raises(ValueError, match="not possible with zero_optimization.stage 3"):
        initialize(zero_optimization={"stage": 3}, gradient_allreduce_op="sum")


def test_summed_gradients_are_not_divided_by_the_number_of_ranks():
    run_ranks(2, summed_case)


def static_case() -> None:
    rank = torch.distributed.get_rank()
    results = []
    for section in ({"loss_scale": 128}, {"initial_scale_power": 7}):
        engine = initialize(fp16={"enabled": True, **section}, zero_optimization={"stage": 2})
        optimizer = engine.optimizer
        scales = [(optimizer.cur_scale, optimizer.loss_scale, optimizer.loss_scale_config.cur_scale)]
        for step in range(3):
            broken = step == 1 and rank == 0
            one_step(engine, x_of(rank, torch.float16), times=float("inf") if broken else 1.0)
            assert optimizer.overflow == (step == 1)
            assert optimizer.loss_scale_config.cur_iter == step + 1
        results.append((engine.module_state_dict(), engine.skipped_steps, scales))
        assert engine.dynamic_loss_scale() == ("loss_scale" not in section) and engine.loss_scale() == 128.0
    (static, *rest), (dynamic, *others) = results
    assert rest == others == [1, [(128.0, 128.0, 128.0)]]
    assert all(torch.equal(value, dynamic[name]) for name, value in static.items())


def test_a_static_loss_scale_trains_as_a_dynamic_one_that_has_not_moved():
    run_ranks(2, static_case)


Pair = namedtuple("Pair", "a b")


class Twice(Pair):
    def __new__(cls, both):
        return super().__new__(cls, both, both)


class Nested(nn.Linear):
    def forward(self, pair, more):
        assert type(more["twice"]) is Twice
        seen = [pair.a, pair.b, *more["twice"], more["list"][0], more["ids"]]
        assert [t.dtype for t in seen] == [*[torch.float16] * 5, torch.int64]
        return super().forward(pair.a + pair.b + more["list"][0])


def test_auto_cast_brings_floating_point_inputs_to_fp16(one_rank):
    engine = initialize(Nested(6, 3), fp16={"enabled": True, "auto_cast": True})
    x = x_of(0)
    engine.backward(engine(Pair(x, x), more={"list": [x], "twice": Twice(x), "ids": torch.arange(3)}).float().mean())
    engine.step()
    plain = initialize(make_model(), fp16={"enabled": True})
    with pytest.raises(RuntimeError, match="dtype"):
        plain(x)


def test_memory_breakdown_logs_what_is_held(one_rank, caplog):
    caplog.set_level(logging.INFO)
    engine = initialize(nn.Linear(6, 2**18 // 6), memory_breakdown=True)
    one_step(engine, x_of(0))
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("memory (MiB)")]
    numel = sum(p.numel() for p in engine.module.parameters())
    assert f"P: {4 * numel / 2**20:.2f} |" in line and f"O: {8 * numel / 2**20:.2f} |" in line, line


@pytest.mark.parametrize("breakdown", [False, True])
def test_phases_are_timed_only_where_their_times_are_logged(one_rank, breakdown):
    engine = initialize(wall_clock_breakdown=breakdown)
    engine(x_of(0))
    assert set(engine.timers.read_and_reset()) == ({"forward"} if breakdown else set())
    with torch.no_grad():
        engine(x_of(0))  # an evaluation, of no step
    evaluator = initialize(wall_clock_breakdown=breakdown, optimizer=None)
    evaluator(x_of(0))
    assert not engine.timers.read_and_reset() and not evaluator.timers.read_and_reset()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"zero_optimization": {"stage": 2, "placement": "auto"}}, "--placement auto needs --zero-stage 3"),
        ({"fp16": {"enabled": True, "initial_scale_power": 1, "min_loss_scale": 4}}, "fp16: --min-scale 4 "),
    ],
)
def test_settings_that_exclude_each_other_are_refused_before_the_model_is_touched(one_rank, settings, message):
    model = nn.BatchNorm1d(4)
    before = [(tensor.data_ptr(), tensor.dtype) for tensor in model.state_dict().values()]
    with pytest.raises(DeepSpeedConfigError, match=message):
        initialize(model, data_types={"buffer_dtype": "bf16"}, **settings)
    assert [(tensor.data_ptr(), tensor.dtype) for tensor in model.state_dict().values()] == before


@pytest.mark.parametrize(
    "schedule, params, rates",
    [
        ("WarmupLR", {"warmup_num_steps": 4, "warmup_max_lr": 0.4, "warmup_type": "linear"}, [0.0, 0.0, 0.1, 0.2, 0.3]),
        (
            "WarmupDecayLR",
            {"warmup_num_steps": 2, "warmup_max_lr": 0.4, "warmup_type": "linear", "total_num_steps": 4},
            [0.0, 0.0, 0.2, 0.4, 0.2],
        ),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 1}, [0.1, 0.2, 0.3]),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 2},
            [0.1, 0.2, 0.3, 0.2, 0.1],
        ),
        ("WarmupCosineLR", {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_type": "linear"}, [0.0, 0.0, 0.005]),
    ],
)
def test_a_schedule_of_the_file_sets_the_rate_of_each_update_and_rests_in_a_skipped_one(
    one_rank, schedule, params, rates
):
    engine = initialize(
        scheduler={"type": schedule, "params": params},
        gradient_accumulation_steps=2,
        fp16={"enabled": True, "initial_scale_power": 4},
    )
    found = []
    for step in range(len(rates)):
        found.append(engine.get_lr()[0])
        assert engine.optimizer.param_groups[0]["lr"] == found[-1] == engine.lr_scheduler.get_last_lr()[0]
        for _ in range(2):
            one_step(engine, x_of(0, torch.float16))
        if step == 1:
            before = engine.get_lr()
            for _ in range(2):
                one_step(engine, x_of(0, torch.float16), times=float("inf"))
            assert engine.skipped_steps == 1 and engine.get_lr() == before
    assert found == pytest.approx(rates)


class Halving:
    """A schedule of a script's own, made from an optimizer alone."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


def test_a_class_of_schedules_is_a_callable_that_makes_one(one_rank):
    engine, *_ = deepspeed.initialize(
        model=make_model(), lr_scheduler=Halving, config={"train_batch_size": 2, "optimizer": ADAM}
    )
    one_step(engine, x_of(0))
    assert isinstance(engine.lr_scheduler, Halving) and engine.get_lr() == [5e-3]


def test_a_schedule_that_needs_metrics_says_so_before_anything_is_updated(one_rank):
    engine, *_ = deepspeed.initialize(
        model=make_model(),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        config={"train_batch_size": 2, "optimizer": ADAM},
    )
    before = engine.module_state_dict()
    with pytest.raises(TypeError, match=r"missing a required argument: 'metrics', for ReduceLROnPlateau\.step"):
        one_step(engine, x_of(0))
    with pytest.raises(TypeError, match=r"engine\.step\(<function .*takes lr_kwargs, .*, and calls no closure"):
        engine.step(lambda: None)
    assert engine.global_steps == 0 and all(torch.equal(v, before[k]) for k, v in engine.module_state_dict().items())
    engine.step(lr_kwargs={"metrics": 1.0})  # the gradients are still there
    engine.backward(engine(x_of(0)).square().mean())
    engine.step(lr_kwargs={"metrics": 1.0})
    assert engine.global_steps == 2 and engine.get_lr() == [5e-3]


def test_the_optimizers_zero_grad_forgets_a_micro_batch_as_the_engines_does(one_rank):
    changes = []
    for forget in (lambda e: e.optimizer.zero_grad(), lambda e: e.zero_grad(), lambda e: None):
        model = make_model()
        engine, before = initialize(model, gradient_accumulation_steps=2), model[0].weight.detach().clone()
        one_step(engine, x_of(1), times=100.0)
        forget(engine)
        one_step(engine, x_of(0))
        changes.append(model[0].weight.detach() - before)
    assert torch.equal(changes[0], changes[1]) and not torch.equal(changes[1], changes[2])


def test_a_script_that_sets_micro_steps_sets_where_the_next_update_is_due(one_rank):
    """As BEiT's loop does where an epoch begins, whose last one may have left a step in the middle."""
    engine = initialize(gradient_accumulation_steps=2)
    for micro_steps, boundaries in ((0, [False, True, False]), (3, [True, False, True])):
        engine.zero_grad()
        engine.micro_steps = micro_steps
        found = []
        for _ in boundaries:
            found.append(engine.is_gradient_accumulation_boundary())
            one_step(engine, x_of(0))
        assert found == boundaries and engine.micro_steps == micro_steps + 3
    assert engine.global_steps == 3


def test_an_update_without_its_last_backward_is_told_once(one_rank, caplog):
    engine, said = initialize(gradient_accumulation_steps=2), "without a backward of the step's last micro-batch"
    for extra, told in ((0, 0), (1, 1), (1, 1)):
        one_step(engine, x_of(0))
        if extra:  # also that of a micro-batch whose loss a script has left out
            engine.step()
        else:
            one_step(engine, x_of(1))
        assert caplog.text.count(said) == told
    assert engine.global_steps == 3


def test_the_accelerator_is_the_device_that_the_engine_computes_on(one_rank):
    accelerator, engine = deepspeed.accelerator.get_accelerator(), initialize()
    name = accelerator.device_name(accelerator.current_device() if engine.device.type == "cuda" else engine.local_rank)
    assert torch.device(name) == engine.device == torch.device(accelerator.current_device_name())
    assert torch.device(accelerator.device_name()).type == accelerator._name == engine.device.type
    assert torch.distributed.get_backend() == accelerator.communication_backend_name()
    before = accelerator.memory_allocated()
    held = torch.ones(2**24, device=name)
    assert held.nbytes / 2 < accelerator.memory_allocated() - before <= accelerator.max_memory_allocated()
    accelerator.manual_seed_all(3)
    assert torch.initial_seed() == 3 and accelerator.is_available() and accelerator.device_count() >= 1
    state, drawn = accelerator.get_rng_state(), torch.rand(3, device=name)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=name), drawn) and accelerator.FloatTensor([1.0]).device == engine.device
    with accelerator.device(engine.device.index):
        accelerator.synchronize()
    accelerator.empty_cache()
    with pytest.raises(AttributeError, match="the accelerator has no attribute 'create_op_builder', and neither has"):
        accelerator.create_op_builder("x")


def test_profiling_is_an_error_that_says_what_to_do_until_the_job_has_imported_its_own():
    done = subprocess.run([sys.executable, "-c", "import megazero; megazero.profiling"], capture_output=True, text=True)
    assert done.returncode and "has no attribute 'profiling': torch.profiler measures time" in done.stderr


def test_what_deepspeed_has_besides_is_an_error_that_says_what_to_do(one_rank):
    engine = initialize()
    for owner, name, words in (
        (deepspeed, "init_inference", r"initialize\(model=, config=\) without an optimizer"),
        (deepspeed, "PipelineModule", "pipeline parallelism is not built"),
        (deepspeed, "moe", r"initialize\(zero_units=\[...\]\)"),
        (deepspeed, "monitor", "the engine writes no metrics"),
        (deepspeed.utils, "set_z3_leaf_modules", r"initialize\(zero_units=\[...\]\)"),
        (deepspeed.utils, "set_z3_leaf_modules_by_name", r"initialize\(zero_units=\[...\]\)"),
        (deepspeed, "runtime", r"see_memory_usage shows is get_accelerator\(\)"),
        (deepspeed.utils, "groups", "in megazero.mpu"),
        (deepspeed.utils, "no_such", "has no attribute 'no_such'$"),
        (deepspeed, "no_such", "has no attribute 'no_such'$"),
        (engine, "train_batch", "neither the engine nor its module, Sequential, has .*pipeline parallelism"),
        (engine, "offload_states", "offload_optimizer and offload_param"),
        (engine, "clip_grad_norm_", "gradient_clipping in the configuration"),
        (engine, "set_requires_gradient_sync", "gradient_accumulation_steps in the configuration"),
        (engine, "coalesce_grad_reduction", r"set_gradient_accumulation_boundary\(False\)"),
        (engine, "unshard", r"GatheredParameters\(parameters\)"),
        (engine, "summon_full_params", r"GatheredParameters\(parameters\)"),
        (engine, "register_comm_hook", "communication_data_type in the configuration"),
        (engine, "join", "leave the loop together"),
        (engine, "tput_timer", "Drop the call"),
        (engine, "optimizer_name", r"engine\.config\.optimizer\.type"),
        (engine, "_zero3_consolidated_16bit_state_dict", r"module_state_dict\(\) is whole"),
        (engine, "no_such", "neither the engine nor its module, Sequential, has an attribute 'no_such'.$"),
        (engine.optimizer, "state_dict", r"engine\.save_checkpoint\(directory\)"),
        (engine.optimizer, "_global_grad_norm", r"engine\.get_global_grad_norm\(\)"),
        (engine.optimizer, "no_such", "has no attribute 'no_such'$"),
    ):
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match=words):
            getattr(owner, name)
    engine.module.train_batch = 7  # the module's own wins
    assert engine.train_batch == 7


def test_a_name_that_is_imported_and_absent_is_an_error_that_says_what_to_do(monkeypatch):
    for statement, words in (
        ("from megazero import PipelineModule, initialize", "pipeline parallelism is not built"),
        ("from megazero.utils import RepeatingLoader, logger", r"call iter\(loader\) again"),
        ("from megazero.utils import OnDevice", "under zero.Init"),
        ("from megazero.utils import safe_update_full_grad_vectorized", "safe_set_full_grad for each parameter"),
        ("from megazero.utils import logging", "the logger is megazero.utils.logger"),
        ("from megazero.mpu import set_model_parallel_rank", "no tool has to pretend one"),
        ("from megazero.utils import no_such", "cannot import name 'no_such'"),
    ):
        with pytest.raises(ImportError, match=words):
            exec(statement)
    monkeypatch.delattr(deepspeed, "profiling", raising=False)
    exec("from megazero import files, profiling, zero")  # modules that no attribute names yet


# ---- what is given to initialize


def test_parameters_in_every_form_that_torchs_optimizers_take_and_one_by_itself(one_rank):
    for given in (
        lambda m: filter(lambda p: p.requires_grad, m.parameters()),
        lambda m: m.named_parameters(),
        lambda m: [{"params": m[0].parameters(), "lr": 0.5}, {"params": m[2].weight, "weight_decay": 0.0}],
        lambda m: [{"params": m.named_parameters()}],
        lambda m: m[2].weight,
    ):
        model = make_model()
        engine, optimizer, *_ = deepspeed.initialize(
            model=model, model_parameters=given(model), config={"train_batch_size": 2, "optimizer": ADAM}
        )
        one_step(engine, x_of(0))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    used = make_model()
    consumed = used.parameters()
    list(consumed)
    for wrong, words in (
        (consumed, "empty. A generator"),
        ([{"params": []}, used[0].weight], "mixes parameter groups"),
        (nn.Linear(2, 2), "Among the parameters to train is Linear. Give parameters"),
        (used, "Among the parameters to train is Linear"),  # a Sequential is a list of modules
        ([{"lr": 0.5}], "Among the parameters to train is NoneType"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=words):
            deepspeed.initialize(model=used, model_parameters=wrong, config={"train_batch_size": 2, "optimizer": ADAM})


class Normed(nn.Module):
    """Parameters and buffers of several kinds: one in channels-last order, one without dimensions, one of bool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.norm.running_mean.normal_()


def unseeded_case() -> list[list]:
    torch.manual_seed(torch.distributed.get_rank())
    model = Normed()
    mine = [value.tolist() for value in model.state_dict().values()]
    for stage in (0, 3):
        engine = initialize(model, zero_optimization={"stage": stage})
        found = [value.tolist() for value in engine.module_state_dict().values()]
        engine.destroy()
    return [mine, found]


def test_a_script_without_a_seed_starts_with_the_first_ranks_values():
    (first, _), *others = run_ranks(2, unseeded_case)
    assert others[0][0] != first, "the ranks have drawn other values"
    assert all(found == first for _, found in others)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_backward_inside_of_no_grad_trains_as_outside(one_rank, reduction):
    states = []
    for is_enabled in (True, False):
        engine = initialize(make_model(), gradient_allreduce_op=reduction, gradient_accumulation_steps=2)
        for _ in range(2):
            loss = engine(x_of(0)).square().mean()
            with torch.set_grad_enabled(is_enabled):
                assert not engine.backward(loss).requires_grad
                engine.step()
        states.append(engine.module_state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_is_none_says_so(one_rank, reduction):
    engine = initialize(gradient_allreduce_op=reduction)
    y = engine(x_of(0))
    for wrong, found in (
        ((y.mean(), y), "got tuple"),
        (y, r"shape \(2, 3\) with a grad_fn"),
        (y.mean().detach(), r"shape \(\) without a grad_fn"),
        (None, "got NoneType"),
        (0.5, "got float"),
    ):
        with pytest.raises(AssertionError, match=rf"needs a scalar loss .*{found}"):
            engine.backward(wrong)
    with pytest.raises(RuntimeError, match=r"call engine.backward\(loss\) before every step"):
        y.mean().backward()  # not the engine's
        engine.step()


def test_a_loss_behind_a_reentrant_checkpoint_without_an_input_to_train_says_so(one_rank):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.adapter = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
            return checkpoint(self.adapter, self.frozen(x), use_reentrant=use_reentrant).mean()

    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=Net(), config=config)
    with (
        pytest.warns(UserWarning, match="None of the inputs have requires_grad"),
        pytest.raises(AssertionError, match="behind frozen layers does not: pass use_reentrant=False"),
    ):
        engine.backward(engine(torch.ones(2, 3), True))
    engine.backward(engine(torch.ones(2, 3), False))
    assert deepspeed.utils.safe_get_full_grad(engine.module.adapter.weight).abs().sum() > 0


def test_megatrons_groups_and_ours_are_the_same_to_initialize(one_rank):
    engine = initialize()
    assert engine.groups is mpu.get_groups()


def test_states_are_read_and_set_by_deepspeeds_keywords(one_rank):
    engine, utils = initialize(zero_optimization={"stage": 2}), deepspeed.utils
    one_step(engine, x_of(0))
    engine.backward(engine(x_of(1)).square().mean())
    param = next(engine.module.parameters())
    for extent in ("full", "local"):
        for what in ("fp32_param", "grad", "optimizer_state"):
            key = {"optim_state_key": "exp_avg"} if what == "optimizer_state" else {}
            get, set_ = (getattr(utils, f"safe_{verb}_{extent}_{what}") for verb in ("get", "set"))
            value = get(param=param, **key) + 1.0
            set_(param=param, value=value, **key)
            torch.testing.assert_close(get(param=param, **key), value)


def test_deepspeeds_further_keywords_of_init_pass_while_they_ask_for_nothing(one_rank):
    off = {"param_swapper": None, "sequence_data_parallel_group": None, "zero_param_parallel_group": None}
    off.update(zero_quantized_weights=False, zero_quantized_nontrainable_weights=False)
    with deepspeed.zero.Init(**off):
        model = make_model()
    assert model[0].weight.shape == (0,)
    for name in off:
        with pytest.raises(ValueError, match=rf"zero.Init\({name}=...\) is not possible here: .* Drop it"):
            deepspeed.zero.Init(**{name: True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'shard'"):
        deepspeed.zero.Init(shard=True)


def test_what_initialize_constructs_is_not_sharded_by_the_zero_init_around_it(one_rank):
    built = nn.ModuleList()

    def make_optimizer(groups):
        built.append(nn.Linear(2, 2))
        built.append(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        return torch.optim.AdamW(groups)

    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init():
        model = make_model()
        with pytest.raises(AssertionError, match="neither is given"):
            deepspeed.initialize(model=model)
        deepspeed.initialize(model=model, optimizer=make_optimizer, config=config)
        later = nn.Linear(2, 2)
    assert hasattr(later.weight, "ds_id") and not any(hasattr(p, "ds_id") for p in built.parameters())


def test_init_casts_parameters_alone_and_only_where_it_is_told_to(one_rank):
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("scale", torch.ones(2))

    found = []
    for dtype in (None, torch.float16):
        with deepspeed.zero.Init(dtype=dtype):
            model = Scaled()
        found.append((model.weight.dtype, model.scale.dtype))
    assert found == [(torch.float32, torch.float32), (torch.float16, torch.float32)]


class Rotated(nn.Linear):
    """Features turned by the angles of positions that bf16 has no numbers for."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("frequencies", 1e4 ** (-torch.arange(4) / 4))
        self.register_buffer("first", torch.tensor(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(self.first + torch.arange(len(x)), self.frequencies)
        return super().forward(x * angles.cos().to(x.dtype))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("under_init", [False, True])
def test_buffers_keep_their_dtypes_unless_the_configuration_names_one(one_rank, stage, under_init):
    x = torch.randn(6, 4, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(3))
    for told, kept in ((None, torch.float32), ("BF16", torch.bfloat16), ("fp32", torch.float32)):
        torch.manual_seed(5)
        plain = Rotated()
        plain.frequencies.data = plain.frequencies.to(kept)
        plain.weight.data, plain.bias.data = plain.weight.bfloat16(), plain.bias.bfloat16()
        torch.manual_seed(5)
        with deepspeed.zero.Init(enabled=under_init, dtype=torch.bfloat16):
            model = Rotated()
        engine = initialize(
            model, bf16={"enabled": True}, data_types={"buffer_dtype": told}, zero_optimization={"stage": stage}
        )
        assert (model.frequencies.dtype, model.first.dtype) == (kept, torch.int64)
        assert torch.equal(engine(x), plain(x))
        assert torch.equal(engine.module_state_dict()["frequencies"], plain.frequencies)


class Quantized(nn.Module):
    """A frozen weight of 8-bit floats and an adapter. As in transformers' FP8Linear, the dtype says whether there is a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("shift", torch.ones(4).to(torch.float8_e5m2))
        self.adapter = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 0.5 if self.weight.element_size() == 1 else 1.0
        return x @ self.weight.to(x.dtype) * scale + self.shift.to(x.dtype) + self.adapter(x)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("under_init", [False, True])
def test_weights_that_are_quantized_to_8_bit_floats_stay_so(one_rank, tmp_path, stage, under_init):
    torch.manual_seed(5)
    want = Quantized().requires_grad_(False)
    want.adapter.bfloat16()
    torch.manual_seed(5)
    with deepspeed.zero.Init(enabled=under_init, dtype=torch.bfloat16):
        model = Quantized()
    told = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, "data_types": {"buffer_dtype": "bf16"}}
    engine = initialize(model, **told)
    x = x_of(0, torch.bfloat16)[:, :4]
    assert torch.equal(engine(x), want(x))
    one_step(engine, x)
    engine.save_checkpoint(tmp_path)
    other = initialize(Quantized(), **told)
    other.load_checkpoint(tmp_path)
    for name, value in other.module_state_dict().items():
        assert value.dtype == want.state_dict()[name].dtype
        assert "adapter" in name or torch.equal(value.float(), want.state_dict()[name].float())
    with pytest.raises(ValueError, match="trained parameters of torch.float8_e4m3fn"):
        initialize(Quantized().requires_grad_(), **told)


def quantized_case(stage: int) -> None:
    with deepspeed.zero.Init(enabled=stage == 3, dtype=torch.bfloat16):
        model = Quantized()
    engine = initialize(model, bf16={"enabled": True}, zero_optimization={"stage": stage})
    value = torch.full((4, 4), 2.0).to(torch.float8_e4m3fn)
    with deepspeed.zero.GatheredParameters(model.weight, modifier_rank=1), torch.no_grad():
        model.weight.copy_(value if engine.global_rank == 1 else torch.zeros_like(value))
    one_step(engine, x_of(engine.global_rank, torch.bfloat16)[:, :4])
    assert torch.equal(engine.module_state_dict()["weight"], value)


@pytest.mark.parametrize("stage", [2, 3])
def test_they_are_sent_between_ranks(stage):
    run_ranks(2, quantized_case, stage)


def test_a_batch_norm_runs_in_16_bits_with_buffers_of_that_dtype(one_rank):
    engine = initialize(nn.BatchNorm1d(3), bf16={"enabled": True}, data_types={"buffer_dtype": "bf16"})
    assert engine(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
