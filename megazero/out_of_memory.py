"""Explains an out-of-memory error of a device or host: what the rank holds, and which flags take less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megazero import comm
from megazero.config import Config
from megazero.job import Job
from megazero.plan import ways_to_less_memory
from megazero.reporting import describe_memory
from megazero.zero.memory import size

# Texts of such errors that are not a torch.OutOfMemoryError: from PyTorch, from NCCL, from cuBLAS and cuDNN.
NO_MEMORY = ("DefaultCPUAllocator", "CUDA error: out of memory", "'out of memory'", "STATUS_ALLOC_FAILED")


@contextmanager
def tells_out_of_memory(config: Config, job: Job | None = None, when: str = "") -> Iterator[None]:
    """Replaces an out-of-memory error of a device or host by one that says what is held, and which flags take less.

    Args:
        job: None while it is being made.
        when: what the block does, if it makes no steps.

    Raises:
        MemoryError: there was no memory for a tensor.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not isinstance(error, torch.OutOfMemoryError) and not any(text in str(error) for text in NO_MEMORY):
            raise
        ways = ways_to_less_memory(config, torch.distributed.get_world_size(), comm.local_device())
        raise MemoryError(_describe(error, job, when, ways)) from error


def _describe(error: Exception, job: Job | None, when: str, ways: list[str]) -> str:
    """The message of a rank that found no memory for a tensor: when, what it holds, and what takes less.

    Args:
        ways: flags that lower what a device holds.
    """
    when = when or ("while the job was being made" if job is None else f"in iteration {job.iteration + 1}")
    lines = [f"rank {torch.distributed.get_rank()} ran out of memory {when}: {error}"]
    if job is not None:
        lines.append(describe_memory(job, "memory, planned and held when it failed", job.engine.memory()))
    if torch.cuda.is_available():
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        lines.append(
            f"PyTorch has {size(allocated)} in tensors and {size(reserved)} reserved on the device, {size(reserved - allocated)} "
            "of it in pieces between them."
        )
    less = f"Each of these takes less: {'; '.join(ways)}." if ways else "More ranks, or a smaller model, take less."
    return "\n".join([*lines, f"{less} `python -m megazero.plan` with the job's flags says how much."])
