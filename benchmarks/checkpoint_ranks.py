"""What one rank of benchmarks/checkpoint.py does: turns of saving and loading, and saves beside training. Needs Linux's /proc."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_ways import Way, all_ways
from harness import forget_peak, status_bytes, trim
from peers import Job
from torch import Tensor

from megazero import comm


class Ranks:
    """One rank of the measurement; every method is called by all of them together."""

    def __init__(self, job: Job, args: argparse.Namespace, directory: str) -> None:
        self.job, self.args, self.directory, self.rank = job, args, Path(directory), dist.get_rank()
        self.ways = all_ways(job, self.directory)
        self.steps = 0
        for way in {id(way.trainer): way for way in self.ways.values()}.values():
            for _ in range(2):  # so that there are moments to save
                self.step(way)

    def step(self, way: Way, finishes: bool = False) -> float:
        """Seconds of one training step, of its update too if it `finishes`; else what of it goes on delays the next one."""
        self.steps += 1
        tokens, targets = self.job.data(self.steps, self.rank)

        def run() -> None:
            way.trainer.step(tokens, targets)
            if finishes:
                way.trainer.finish()  # what `tensors` reads is not new before

        return timed(run)

    def save_and_load(self, found: dict[str, Any], turn: int, name: str) -> None:
        """One turn of one way."""
        way, folder = self.ways[name], self.directory / f"{name}-{turn}"
        self.settle(way)
        save = measured(lambda: way.save(folder))
        saved = [tensor.clone() for tensor in way.tensors()]
        self.scramble(way)
        if self.args.cold and self.rank == 0:
            forget_pages(folder)
        load = measured(lambda: way.load(folder))
        self.check(way, saved, name)
        found["file_bytes"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        self.clear(folder)
        if turn >= self.args.warmup:
            found.setdefault("save", []).append(save)
            found.setdefault("load", []).append(load)

    def save_in_background(self, found: dict[str, list[float]], turn: int, name: str) -> None:
        """One save beside training, and the steps around it."""
        way, folder = self.ways[name], self.directory / f"{name}-background-{turn}"
        self.settle(way)
        self.step(way)
        normal = [self.step(way) for _ in range(self.args.between)]
        step_s = self.step(way, finishes=True)  # as the save would
        saved = [tensor.clone() for tensor in way.tensors()]
        start = time.perf_counter()
        call_s = timed(lambda: way.start_saving(folder))
        beside = []
        while any(comm.all_gathered_objects(way.is_writing())):
            beside.append(self.step(way))
        way.wait()
        write_s = time.perf_counter() - start
        self.scramble(way)
        way.load(folder)
        self.check(way, saved, f"{name} in the background")
        self.clear(folder)
        if turn >= self.args.warmup:
            for key, values in (("normal", normal), ("saving", [step_s + call_s]), ("call", [call_s])):
                found.setdefault(key, []).extend(values)
            found.setdefault("beside", []).extend(beside)
            found.setdefault("write", []).append(write_s)

    def settle(self, way: Way) -> None:
        """Nothing of what came before is still to be updated, written or freed."""
        way.trainer.finish()
        gc.collect()
        if self.rank == 0:
            os.sync()

    def scramble(self, way: Way) -> None:
        """A load that does nothing shall be noticed."""
        for tensor in way.tensors():
            tensor.fill_(float("nan"))

    def check(self, way: Way, saved: list[Tensor], name: str) -> None:
        """Raises on all ranks.

        Raises:
            RuntimeError: not every element has come back.
        """
        pairs = zip(way.tensors(), saved, strict=True)
        if not all(comm.all_gathered_objects(all(torch.equal(tensor, value) for tensor, value in pairs))):
            raise RuntimeError(f"what {name} has loaded is not what it has saved")

    def clear(self, folder: Path) -> None:
        """Deletes a checkpoint that nobody needs."""
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder)


def timed(action: Callable[[], Any]) -> float:
    """Seconds from the first rank's start to the last one's end, on the clock that all processes share."""
    dist.barrier()
    start = time.perf_counter()
    action()
    starts, ends = zip(*comm.all_gathered_objects((start, time.perf_counter())), strict=True)
    return max(ends) - min(starts)


def measured(action: Callable[[], Any]) -> tuple[float, int]:
    """Seconds as `timed` tells them, and bytes by which the process that grew most has grown meanwhile."""
    trim()
    before = status_bytes("VmRSS")
    forget_peak()
    seconds = timed(action)
    return seconds, max(comm.all_gathered_objects(status_bytes("VmHWM") - before))


def forget_pages(folder: Path) -> None:
    """Makes the next read go to the disk, as far as the kernel follows the advice."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
