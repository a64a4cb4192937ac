"""What NVMe is for: models beyond a limit of host memory, runs that are killed, tensor parallelism beside it, and wrong paths."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import namedtuple
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megazero import mpu, zero
from megazero.arguments import load_config
from megazero.data.build import build_tokenizer_from
from megazero.engine import Engine, weight_decay_groups
from megazero.job import build_job, setup_distributed, with_vocabulary
from megazero.job_checkpoints import save
from megazero.nvme import AioConfig
from megazero.zero.config import ZeroConfig
from pretrain_gpt2 import check, forward_step, main, make_model
from tests.ranks import run_ranks
from tests.test_zero_job import check_equal, end, start, train
from tests.tiny import TINY_MODEL, run_command, run_job
from tests.zero.models import one_step

MIB = 1 << 20
OFFLOADED = [("cpu", "cpu"), ("nvme", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")]  # homes of O and P
ON_NVME = ["--zero-stage", "3", "--offload-optimizer", "nvme", "--offload-param", "nvme", "--nvme-path"]


# ---- a limit of host memory

# One rank builds a model of 96 MiB of parameters, and trains one of 24 MiB, which takes 96 MiB as well: P, G and two moments.
BLOCKS, WIDTH = 24, 512
LIMIT, NEEDED = 32 * MIB, 96 * MIB
MALLOC = {-8: 1, -3: 1 << 16, -1: 1 << 16}  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: what is freed goes back


def return_all_that_is_freed() -> None:
    """For a rank whose memory is measured."""
    threading.stack_size(1 << 19)  # stacks of the threads that swap count as well
    for option, value in MALLOC.items():
        ctypes.CDLL(None).mallopt(option, value)


def status(key: str) -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def limit_data(limit: int) -> None:
    """Lets this process's data grow by `limit` bytes."""
    most = status("VmData") + limit  # once: another thread may change it, and the first must not be above the second
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Blocks(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def built(folder: str, home: str, blocks: int) -> Blocks:
    torch.manual_seed(0)
    config = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": folder}}}
    with zero.Init(remote_device=home, config=config):
        return Blocks(blocks)


def trained(folder: str, home: str, blocks: int) -> list[float]:
    """The losses of two steps."""
    homes = {"offload_optimizer": home, "offload_param": home, "nvme_path": folder, "sub_group_size": 1 << 16}
    config = ZeroConfig(stage=3, aio=AioConfig(queue_depth=2), **homes)
    model = built(folder, home, blocks)
    adam = partial(torch.optim.AdamW, lr=1e-5, fused=True)
    engine = Engine(model, mpu.get_groups(), adam, *weight_decay_groups(model, 0.1), zero=config, clip_grad=1.0)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    return [one_step(engine, x).item() for _ in range(2)]


def limited_case(folder: str, home: str, limit: int) -> dict[str, dict]:
    """What a build and a training return and the most memory beyond the start's, or how they were refused; 0: no limit."""
    return_all_that_is_freed()
    mpu.initialize_model_parallel(1)
    trained(folder, home, 2)  # everything that is needed once: threads, code, what malloc keeps
    before = status("VmRSS")
    if limit:
        limit_data(limit)
    found: dict[str, dict] = {}
    for what, action in (
        ("build", lambda: sum(parameter.ds_numel for parameter in built(folder, home, 4 * BLOCKS).parameters())),
        ("train", lambda: trained(folder, home, BLOCKS)),
    ):
        gc.collect()  # the model before: parameters and their bucket hold each other
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts anew
        try:
            found[what] = {"value": action(), "peak": status("VmHWM") - before}
        except (RuntimeError, MemoryError) as error:
            found[what] = {"refused": str(error)}
    return found


def test_what_a_memory_limit_forbids_goes_through_nvme(tmp_path):
    """A model is built in a third of its bytes, and trained in a third of those of its states."""
    (refused,), (passed,), (free,) = (
        run_ranks(1, limited_case, str(tmp_path), home, limit)
        for home, limit in [("cpu", LIMIT), ("nvme", LIMIT), ("cpu", 0)]
    )
    for what in ("build", "train"):
        assert "allocate" in refused[what]["refused"]
        assert "refused" not in passed[what] and passed[what]["peak"] < LIMIT
    for what in ("build", "train"):
        assert passed[what]["value"] == free[what]["value"]
        assert free[what]["peak"] > 0.9 * NEEDED
    assert passed["build"]["value"] * 4 > NEEDED
    assert os.listdir(tmp_path) == []


# ---- the job builds its model where its parameters will rest

DEEP = [*TINY_MODEL, "--num-layers", "33", "--hidden-size", "256"]  # 26 million parameters, 99 MiB


def swap_files(folder: str) -> list[str]:
    """What this process has open in a directory."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.exists(link) and os.readlink(link).startswith(folder)]


def built_case(flags: list[str], path: str) -> None:
    job = start([*flags, "--zero-stage", "3"])
    want = job.engine.state_dict()
    end(job)
    job = start([*flags, *ON_NVME, path])
    gc.collect()
    assert len(swap_files(path)) == 1, "the one that it was built in is gone"
    check_equal(job.engine.state_dict(), want, "was built to other values on nvme")
    end(job)


def test_a_job_builds_on_nvme_what_it_builds_in_memory(corpus, tmp_path):
    run_ranks(2, built_case, [*corpus, "--train-iters", "2"], str(tmp_path))


def built_under_limit_case(flags: list[str]) -> int | str:
    """Builds a model of 99 MiB where memory may grow by two thirds of that; its parameters' number, or what it lacks."""
    return_all_that_is_freed()
    config = load_config([*DEEP, *flags], 1)
    tokenizer, groups = build_tokenizer_from(config.data), setup_distributed(config)
    config = replace(config, model=with_vocabulary(config.model, tokenizer))

    def provider(*arguments: Any) -> nn.Module:
        limit_data(2 * LIMIT)
        return make_model(*arguments)

    try:
        job = build_job(config, groups, tokenizer, provider, forward_step)
    except RuntimeError as error:
        return str(error)
    assert job.engine.memory()["P"] == 0
    return sum(parameter.ds_numel for parameter in job.engine.module.parameters())


def test_a_job_builds_a_model_larger_than_its_memory_on_nvme(corpus, tmp_path):
    flags = [*corpus, "--train-iters", "2"]
    (refused,) = run_ranks(1, built_under_limit_case, [*flags, "--zero-stage", "3"])
    assert "allocate" in str(refused)
    (numel,) = run_ranks(1, built_under_limit_case, [*flags, *ON_NVME, str(tmp_path), "--sub-group-size", "65536"])
    assert isinstance(numel, int) and 4 * numel > NEEDED


@pytest.mark.parametrize(
    "layers, bytes_each, more",
    [
        (8, 16, "--train-iters 1 --sub-group-size 262144"),
        pytest.param(12, 18, "--bf16 --train-iters 2 --sub-group-size 65536", marks=pytest.mark.slow),
    ],
)
def test_a_job_on_nvme_needs_less_memory_than_its_states_whatever_malloc_does_by_itself(
    corpus, tmp_path, layers, bytes_each, more
):
    """Blocks of 20 MB, of a size that glibc takes from its heap once one was freed, and does not return; libraries included."""
    sizes = ["--num-layers", str(layers), "--hidden-size", "640", *more.split()]
    done = run_command([sys.executable, "pretrain_gpt2.py", *TINY_MODEL, *corpus, *sizes, *ON_NVME, str(tmp_path)])
    assert done.returncode == 0, done.stdout
    (peak,) = re.findall(r"peak memory per rank \(MB\) +(\d+)", done.stdout)
    libraries = 0
    if torch.version.cuda:  # those of a CUDA build are half of the states, so they are left out
        imported = "import megazero.job, torch; from megazero.throughput import peak_memory_bytes as peak"
        measured = run_command([sys.executable, "-c", f"{imported}; print(peak(torch.device('cpu')))"])
        libraries = int(measured.stdout)
    states = bytes_each * layers * 12 * 640**2
    assert int(peak) * MIB - libraries < states


# ---- runs that are killed

DROPOUT = ["--attention-dropout", "0.2", "--hidden-dropout", "0.2"]
STEPS = 8


def killed_case(flags: list[str], kill_after_s: float | None) -> tuple[int, list[float], float, dict[str, list[float]]]:
    """Trains from where --save has come to, saving after every other step; rank 1 may be killed on the way.

    Returns:
        The iteration that it began at, the losses, seconds, and a few numbers of every weight at the end.
    """
    job = start(flags)
    began, losses, begin = job.iteration, [], time.perf_counter()
    death = threading.Timer(kill_after_s or 0.0, os.kill, (os.getpid(), signal.SIGKILL))
    is_doomed = kill_after_s is not None and torch.distributed.get_rank() == 1
    if is_doomed:
        death.start()
    while job.iteration < STEPS:
        losses += train(job, 2)
        save(job)
    if is_doomed:
        death.join()  # this run was faster than the one that the instant was chosen from
    seconds = time.perf_counter() - begin
    weights = {name: value.flatten()[:50].tolist() for name, value in job.engine.state_dict().items()}
    end(job)
    return began, losses, seconds, weights


def kills(corpus: list[str], folder: Path, count: int, seed: int, earliest: float = 0.0) -> list[int]:
    """Kills `count` runs at random instants after this part of the time that they take; returns where each was resumed."""
    swap, instants, resumed = folder / "swap", random.Random(seed), []
    swap.mkdir()
    flags = [*corpus, *DROPOUT, "--train-iters", str(STEPS), *ON_NVME, str(swap), "--data-cache-path", str(folder)]

    def run(name: str, kill_after_s: float | None = None) -> tuple[int, list[float], float, dict]:
        where = ["--save", str(folder / name), "--load", str(folder / name)]
        return run_ranks(2, killed_case, [*flags, *where], kill_after_s)[0]

    began, want, seconds, weights = run("whole")
    assert began == 0 and len(set(want)) == STEPS
    for index in range(count):
        with pytest.raises(AssertionError, match="rank [01] of 2 (died|failed)"):
            run(f"killed {index}", instants.uniform(earliest * seconds, seconds))
        assert os.listdir(swap) == []
        began, got, _, now = run(f"killed {index}")
        assert got == want[began:] and now == weights, f"kill {index}, resumed at {began}"
        assert os.listdir(swap) == []
        resumed.append(began)
    return resumed


def test_a_killed_run_leaves_nothing_and_resumes_bit_for_bit(corpus, tmp_path):
    assert kills(corpus, tmp_path, 1, seed=3, earliest=0.6) > [0], "after the second of four saves"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_killed_runs_leave_nothing_and_resume_bit_for_bit(corpus, tmp_path):
    resumed = kills(corpus, tmp_path, 20, seed=4)
    assert len(set(resumed)) > 2, f"kills have come at different times: {resumed}"


# ---- beside tensor parallelism


def parallel_case(flags: list[str], homes: list[list[str]]) -> None:
    want = None
    for home in ([], *homes):
        job = start([*flags, "--train-iters", "3", "--model-parallel-size", "2", *home])
        got = train(job, 3), job.engine.state_dict()
        want = want or got
        assert got[0] == want[0] and len(set(got[0])) == 3, home
        check_equal(got[1], want[1], f"was trained to other values with {home}")
        end(job)


@pytest.mark.parametrize("dtype", [pytest.param([], marks=pytest.mark.slow), ["--bf16"]], ids=["fp32", "bf16"])
def test_tensor_parallel_2_x_data_parallel_2_in_every_home_equals_in_memory_bit_for_bit(corpus, dtype, tmp_path):
    homes = [("1", "nvme", "none"), ("2", "cpu", "none"), ("2", "nvme", "none"), *(("3", o, p) for o, p in OFFLOADED)]
    flags = [
        ["--zero-stage", stage, "--offload-optimizer", o, "--offload-param", p, "--sub-group-size", "4096"]
        + (["--nvme-path", str(tmp_path)] if "nvme" in (o, p) else [])
        for stage, o, p in homes
    ]
    run_ranks(4, parallel_case, [*corpus, *dtype], flags)
    assert os.listdir(tmp_path) == []


# ---- what cannot work is told before training


def one_error(output: str) -> str:
    """The only line with an error, of a job that has said nothing of a traceback and has not trained."""
    assert "Traceback" not in output and "iteration" not in output, output
    lines = [line for line in output.splitlines() if line.startswith("error")]
    assert len(lines) == 1, output
    return lines[0]


def test_a_directory_that_is_not_there_is_one_line_before_training(corpus, tmp_path):
    done = run_job([*TINY_MODEL, *corpus, "--train-iters", "2", *ON_NVME, str(tmp_path / "absent")], 2)
    line = one_error(done.stdout)
    assert done.returncode != 0 and line.startswith("error: --nvme-path ") and f"{tmp_path}/absent" in line, line


Filesystem = namedtuple("Filesystem", ["f_bavail", "f_frsize", "f_blocks", "f_bfree"])


def refused_case(arguments: list[str], free: int) -> str:
    """What a job says that finds `free` times 1000 bytes on the disk of --nvme-path."""
    sys.argv[1:] = arguments
    statvfs, os.statvfs = os.statvfs, lambda _: Filesystem(free, 1000, 10**9, free)
    try:
        main(check(torch.distributed.get_world_size()))
    except (ValueError, OSError) as error:
        return str(error)
    finally:
        os.statvfs = statvfs
    return "nothing"


def test_a_full_disk_is_one_line_before_training(corpus, tmp_path):
    large = [*TINY_MODEL, *corpus, "--hidden-size", "256", "--train-iters", "2", *ON_NVME, str(tmp_path)]
    for told in run_ranks(2, refused_case, large, 1000):
        assert "\n" not in told and "1.00 MB are there" in told and "--nvme-path" in told, told
    assert os.listdir(tmp_path) == []


def test_a_read_only_directory_is_one_line_before_training(corpus):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        folder = folder if os.geteuid() else "/sys/kernel"  # root may write everywhere else
        arguments = [*TINY_MODEL, *corpus, "--train-iters", "2", *ON_NVME, folder]
        for told in run_ranks(2, refused_case, arguments, 10**9):
            assert "\n" not in told and told.startswith("[Errno 13] --nvme-path "), told
            assert folder in told and "Permission denied" in told
