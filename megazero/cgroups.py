"""Cores and host memory that control groups, as set by containers and batch systems, leave to a process."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

UNLIMITED = 1 << 60  # bytes; cgroup v1 writes "no limit" as about 2^63


def available_cores(root: Path | str = "/") -> int:
    """Cores that this process may use: those in its CPU affinity, but no more than its cgroups' share of CPU time, rounded up.

    Under `docker run --cpus 2`, or a Kubernetes limit, a process may run on every core of the host. With a thread for each of
    these cores, the process uses up the time of two cores early in each period of a tenth of a second, and all threads then wait
    for the next period.

    Args:
        root: folder that holds /proc and /sys; tests pass their own.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder, is_version_2 in _folders(Path(root), "cpu"):
        names = ("cpu.max",) if is_version_2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota = [word for path in map(folder.joinpath, names) if path.exists() for word in path.read_text().split()]
        if len(quota) == 2 and quota[0].isdigit():  # without a limit: "max", or -1
            cores = min(cores, max(1, math.ceil(int(quota[0]) / int(quota[1]))))
    return cores


def available_host_memory(root: Path) -> int | None:
    """Bytes that processes here can still allocate: the kernel's estimate, but no more than the cgroup's limit leaves.

    Page cache counts as free, because the kernel gives it up. None if there is no /proc.
    """
    values = []
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        kilobytes = fields.get("MemAvailable", fields.get("MemFree", "")).split()
        values += [int(kilobytes[0]) * 1024] if kilobytes else []
    values += [max(0, limit - used) for limit, used in _memory_limits(root)]
    return min(values, default=None)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of each limited memory cgroup that this process is in, enclosing ones included."""
    for folder, is_version_2 in _folders(root, "memory"):
        names, cache = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
        if is_version_2:
            names, cache = ("memory.max", "memory.current"), "inactive_file"
        limit, used = (_number(folder / name) for name in names)
        if limit is not None and limit < UNLIMITED:
            yield limit, max(0, (used or 0) - (_number(folder / "memory.stat", cache) or 0))


def _number(path: Path, key: str = "") -> int | None:
    """The number in a file, or the one behind a key in it; None if there is none ("max")."""
    found = re.search(rf"^{key}\s*(\d+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return int(found[1]) if found else None


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """The folder of every cgroup that this process is in and that can limit the resource of `controller` ("memory", "cpu").

    Args:
        root: folder that holds /proc and /sys.

    Yields:
        A folder, and whether its files are those of version 2; inner groups come before those that enclose them.
    """
    listing = root / "proc/self/cgroup"
    for line in os.fsdecode(listing.read_bytes()).splitlines() if listing.exists() else ():
        _, controllers, path = line.split(":", 2)
        is_version_2 = controllers == ""
        if not is_version_2 and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("" if is_version_2 else controller)
        inner = path.strip("/")
        # In a container, the path is often the host's, while the mount shows the container's own group at its root.
        for folder in (mount / inner, *(mount / inner).parents) if inner else (mount,):
            if folder == mount.parent:
                break
            yield folder, is_version_2
