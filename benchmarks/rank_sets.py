"""Runs a training system on ranks of its own, a step or some at a time, so that several systems can be alive and take turns.

Each rank is a fresh process with one thread. Between steps it sleeps in a pipe's read, so only one system is at work at any time,
what a process holds is that system's alone, and what passes the loopback device meanwhile was sent by it. Needs Linux's /proc.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import MIB, MallocPeak, forget_peak, malloc_bytes, status_bytes, trim
from peers import Entry, Job

TIMEOUT_S = 900.0  # building may compile (DeepSpeed), and a step of a large model is long on one thread


@dataclass(frozen=True)
class StepResult:
    """A step of all ranks: seconds from the first rank's start to the last one's end, and bytes sent per rank.

    Of a turn of several steps they are the means; what its last step has left under way is waited for, and counts.
    `host_seconds` is what the thread that trains has worked, without what it has waited, and without other threads' work.
    `socket_bytes` is what the loopback device carried, TCP/IP headers included; `counted_bytes` what the system says of itself,
    by whatever way it sent them. Loss and gradient norm are means over the ranks. None: the system does not tell.
    """

    seconds: float
    host_seconds: float
    socket_bytes: float
    counted_bytes: float | None
    loss: float
    grad_norm: float | None


class RankSet:
    """The ranks of one side, asleep unless `step` is running.

    Raises:
        RuntimeError: a rank failed; the message has its traceback, or the signal that ended it.
    """

    def __init__(self, name: str, entry: Entry, job: Job, world_size: int, keep_freed: bool) -> None:
        self.name, self.steps, self.folder = name, job.steps_per_turn, tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            args = (rank, world_size, os.path.join(self.folder.name, "store"), entry, job, keep_freed, theirs)
            process = context.Process(target=_rank_main, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self._answers()

    def step(self, index: int) -> StepResult:
        """Wakes the ranks for one turn."""
        before = loopback_bytes()
        answers = self._ask("step", index)
        sent = (loopback_bytes() - before) / len(answers)
        starts, ends, worked, counted, losses, norms = zip(*answers, strict=True)
        of_turn = (max(ends) - min(starts), _mean(worked), sent, _mean(counted))
        of_step = (None if each is None else each / self.steps for each in of_turn)
        return StepResult(*of_step, _mean(losses), _mean(norms))

    def forget_peak(self) -> None:
        """Starts the peak of memory anew, without what the allocator has kept."""
        self._ask("forget_peak")

    def memory(self, index: int) -> dict[str, float]:
        """MiB of the rank that needs most, as comparison.MEASURED describes them; trains step `index` more to see its peak."""
        answers = self._ask("memory", index)
        return {key: round(max(answer[key] for answer in answers) / MIB, 1) for key in answers[0]}

    def close(self) -> None:
        """Ends the ranks."""
        for pipe in self.pipes:
            pipe.close()  # a rank that sees its pipe end returns
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()

    def _ask(self, *command: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(command)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"{self.name}: ranks {sorted(waiting.values())} did not answer within {TIMEOUT_S} s")
            for pipe in ready:
                answers[waiting[pipe]] = self._receive(pipe, waiting[pipe])  # type: ignore[index, arg-type]
        return [answers[rank] for rank in range(len(self.pipes))]

    def _receive(self, pipe: Connection, rank: int) -> Any:
        try:
            ok, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(timeout=10)
            code = self.processes[rank].exitcode
            hint = " (killed, probably out of memory: use smaller sizes or fewer --sides)" if code == -9 else ""
            raise RuntimeError(f"{self.name}: rank {rank} died with exit code {code}{hint}") from None
        if not ok:
            raise RuntimeError(f"{self.name}: rank {rank} failed:\n{value}")
        return value


def _mean(values: tuple) -> Any:
    return None if None in values else sum(values) / len(values)


def loopback_bytes() -> int:
    """Bytes that the loopback device has sent since boot."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("/proc/net/dev does not list the loopback device: traffic cannot be measured here")


def _rank_main(
    rank: int, world_size: int, store: str, entry: Entry, job: Job, keep_freed: bool, pipe: Connection
) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is for the driver's one line, whatever a library prints
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (rank, rank, world_size, world_size)), strict=True))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    Path("/proc/self/oom_score_adj").write_text("1000")  # too large a model shall end this, and nothing else here
    try:
        if keep_freed:
            from megazero.throughput import keep_freed_memory

            keep_freed_memory()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        worker = _Worker(entry, job)
        pipe.send((True, None))
        while True:
            name, *args = pipe.recv()
            pipe.send((True, getattr(worker, name)(*args)))
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the driver is done, or gone
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)  # the other ranks may never reach a collective that this one has left


class _Worker:
    """One rank: its side, and the commands of `RankSet`."""

    def __init__(self, entry: Entry, job: Job) -> None:
        self.rank = dist.get_rank()
        _rehearse(entry, job, self.rank)
        trim()
        self.in_use_before = malloc_bytes()
        self.peak_of_building = 0
        self.side = entry.build(job)
        self.job = job

    def step(self, index: int) -> tuple[float, float, float, int | None, float, float | None]:
        """Start and end on the clock that all processes share, this thread's work in s, bytes sent, loss, gradient norm."""
        steps = self.job.steps_per_turn
        batches = [self.job.data(steps * index + step, self.rank) for step in range(steps)]
        before = self.side.counted_bytes()
        start, worked = time.perf_counter(), -time.thread_time()
        for tokens, targets in batches:
            loss = self.side.step(tokens, targets)
        self.side.finish()
        worked, end = worked + time.thread_time(), time.perf_counter()
        after = self.side.counted_bytes()
        sent = None if before is None or after is None else after - before
        return start, end, worked, sent, loss, self.side.grad_norm()

    def forget_peak(self) -> None:
        """Everything until now counts as building and warming up."""
        self.peak_of_building = status_bytes("VmHWM")
        trim()
        forget_peak()

    def memory(self, index: int) -> dict[str, int]:
        """Bytes between steps and at most, of what malloc has given out and of the whole process."""
        resident_peak = status_bytes("VmHWM")
        trim()
        shared = status_bytes("RssShmem")  # by all ranks: what one of them needs is its part
        found = {
            "held": malloc_bytes() - self.in_use_before,
            "shared": shared,
            "resident": status_bytes("VmRSS") - shared + shared // dist.get_world_size(),
            "resident_peak": resident_peak,
            "resident_building": self.peak_of_building,
        }
        with MallocPeak() as peak:
            self.step(index)
        return {**found, "peak": peak.bytes - self.in_use_before}


def _rehearse(entry: Entry, job: Job, rank: int) -> None:
    """Trains a small model, so that all code that a step needs is loaded and does not count as the model's memory."""
    size = dist.get_world_size()  # which divides all that a layer may be split by
    job = replace(job, layers=1, hidden=32 * size, heads=size, seq_length=16 * size, vocab=128 * size, batch=1)
    side = entry.build(job)
    side.step(*job.data(0, rank))
    side.grad_norm()
    side.close()
