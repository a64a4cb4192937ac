"""What this machine offers a job: device memory, host memory under its cgroup's limit, locked pages, free disk."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megazero.cgroups import UNLIMITED, available_host_memory
from megazero.files import nearest_there
from megazero.nvme import PAGE, aligned_empty
from megazero.throughput import unreserved_memory_bytes


@dataclass(frozen=True)
class Limits:
    """Bytes that a job may use; None if the limit is unknown, or there is none."""

    device: int | None = None  # of each rank's accelerator
    host: int | None = None  # of a node, for all of its ranks
    memlock: int | None = None  # of a process: pages that CUDA may lock into memory for it
    disk: int | None = None  # of a node, where the swap files go
    checkpoint_disk: int | None = None  # where those of activation checkpoints go, if they have a disk of their own


def measure_limits(
    device: torch.device | None = None,
    nvme_path: str | None = None,
    checkpoint_nvme_path: str | None = None,
    root: Path | str = "/",
) -> Limits:
    """What an ordinary user may still take, before a job allocates anything.

    Args:
        device: this rank's device; a CPU has only host memory.
        nvme_path: folder of the swap files; if it does not exist yet, its nearest parent counts.
        checkpoint_nvme_path: a second one, of activation checkpoints; on the same file system it is no disk of its own.
        root: folder that holds /proc and /sys; tests pass their own.
    """
    free = memlock = None
    if device is not None and device.type == "cuda":
        free, memlock = unreserved_memory_bytes(device), lock_limit(partial(aligned_empty, PAGE, pin=True))
    folders = [nearest_there(path) for path in (nvme_path, checkpoint_nvme_path) if path is not None]
    disks = {folder.stat().st_dev: shutil.disk_usage(folder).free for folder in folders}
    return Limits(free, available_host_memory(Path(root)), memlock, *disks.values())


def lock_limit(pin: Callable[[], object]) -> int | None:
    """RLIMIT_MEMLOCK in bytes; None if there is no limit, or if the driver ignores it.

    The kernel leaves enforcement to each driver. NVIDIA's for Linux pins pages without asking for the limit (os_lock_user_pages
    in its open kernel modules), so a small limit, 8 MiB by default, is no reason to refuse a job; another driver may obey it.
    Therefore this function tries: it sets the limit to zero for a moment, and locks a page.

    Args:
        pin: locks a page, or raises MemoryError.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= UNLIMITED:
        return None
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, hard))
    try:
        pin()
    except MemoryError:
        return soft
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    return None
