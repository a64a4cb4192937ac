"""Runs a function, or a script, on several ranks of this machine: the harness of every multi-rank test."""

from __future__ import annotations

import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# One server process imports once what every rank needs; ranks are forked from it before it has started any thread of its own.
_context = multiprocessing.get_context("forkserver")
# Some of it torch imports late: torch._dynamo in the first optimizer (a second), distributed.tensor in assert_close. A job that
# saves imports TensorBoard and matplotlib (two seconds).
_TORCH = ["torch", "torch._dynamo", "torch.distributed", "torch.distributed.tensor", "torch.testing"]
_LOGS = ["torch.utils.tensorboard", "matplotlib.figure", "matplotlib.backends.backend_agg"]
_MODELS = ["transformers.models.gpt2.modeling_gpt2"]  # two seconds; skipped if it is not installed
_OURS = ["pytest", "megazero.job", "pretrain_gpt2", "tests.ranks", "tests.frozen"]
_context.set_forkserver_preload([*_TORCH, *_LOGS, *_MODELS, *_OURS])


def _rank_main(
    rank: int, world_size: int, backend: str, store: str, timeout_s: float, function: Callable, args: tuple, pipe: Any
) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    try:
        device = torch.device("cuda", rank % torch.cuda.device_count()) if backend == "nccl" else None
        if device is not None:
            os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # see `has_gpus`
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if world_size > 1 else None,  # as `comm.init_distributed` binds it
        )
        result = function(*args)
        dist.barrier()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)  # the other ranks may never reach a collective that this one has left
    dist.destroy_process_group()


def has_gpus(ranks: int) -> bool:
    """Whether as many ranks can be joined by NCCL here: from 2.30 on also such as share a GPU, which take turns on it."""
    import torch

    gpus = torch.cuda.device_count()
    return ranks <= gpus or (gpus > 0 and torch.cuda.nccl.version() >= (2, 30))


def run_ranks(
    world_size: int, function: Callable, *args: Any, timeout_s: float = 120.0, backend: str = "gloo"
) -> list[Any]:
    """Calls `function(*args)` on `world_size` ranks and returns their results in rank order.

    Over nccl each rank has a GPU of its own, as far as there are any; over gloo those that use CUDA share the first one.

    `function` is a module-level function and everything passed or returned is picklable (return numbers and lists, not tensors
    that share memory). torch.distributed is initialised; model-parallel groups are the function's own business.

    Raises:
        AssertionError: a rank raised; the message holds the traceback of the first one that did.
    """
    with tempfile.TemporaryDirectory() as folder:
        readers, ranks = [], []
        for rank in range(world_size):
            reader, writer = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main,
                args=(rank, world_size, backend, os.path.join(folder, "store"), timeout_s, function, args, writer),
                daemon=True,
            )
            process.start()
            writer.close()
            readers.append(reader)
            ranks.append(process)
        try:
            return _collect(readers, timeout_s)
        finally:
            for process in ranks:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()


def _collect(readers: list, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        ready = wait([r for i, r in enumerate(readers) if i not in results], timeout=timeout_s)
        if not ready:
            missing = [i for i in range(len(readers)) if i not in results]
            raise AssertionError(f"ranks {missing} of {len(readers)} did not finish within {timeout_s} s")
        for reader in ready:
            rank = readers.index(reader)
            try:
                ok, value = reader.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} of {len(readers)} died without a word") from None
            if not ok:
                raise AssertionError(f"rank {rank} of {len(readers)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(readers))]


def _script_main(output: str, environment: dict[str, str], script: str, arguments: list[str]) -> None:
    import torch

    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def free_port() -> int:
    """A port that nobody listens on; not one that the system may give to a connection before the ranks meet there."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)  # systems give higher ones
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def run_script(
    world_size: int, script: str, arguments: list[str], timeout_s: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """Runs a script with its flags on `world_size` ranks, and returns the status of the first that failed and all output.

    The ranks are as the launcher would start them, and end together as under it; forked, they import nothing anew.
    """
    environment = dict(os.environ)
    if world_size > 1:
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(world_size))
    with tempfile.NamedTemporaryFile() as output:
        ranks = []
        for rank in range(world_size):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
            each = environment | (of_rank if world_size > 1 else {})
            ranks.append(_context.Process(target=_script_main, args=(output.name, each, script, arguments)))
            ranks[-1].start()
        status, running = 0, {process.sentinel: process for process in ranks}
        while running and status == 0:
            for ended in (done := wait(running, timeout=timeout_s)):
                process = running.pop(ended)
                process.join()
                status = status or process.exitcode
            if not done:
                status = -signal.SIGALRM
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join(timeout=30)
            process.kill()
        return subprocess.CompletedProcess([script, *arguments], status, Path(output.name).read_text())
