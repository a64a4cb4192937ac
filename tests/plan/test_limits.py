"""What a machine offers, read from files that a test has written."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from pathlib import Path

import pytest
import torch

from megazero.plan import limits, measure_limits
from megazero.plan.limits import available_host_memory, lock_limit

GIB = 2**30


def machine(root: Path, files: dict[str, str]) -> Path:
    """A folder with the files of /proc and /sys."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = f"MemTotal:       {64 * GIB // 1024} kB\nMemFree:  1000 kB\nMemAvailable:   {40 * GIB // 1024} kB\n"


def test_without_a_cgroup_the_kernels_estimate_counts(tmp_path):
    assert available_host_memory(machine(tmp_path, {"proc/meminfo": MEMINFO})) == 40 * GIB


def test_without_proc_nothing_is_known(tmp_path):
    assert available_host_memory(tmp_path) is None


def test_a_cgroup_of_version_2_and_those_around_it_limit_what_is_left_and_cache_counts_as_free(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": str(GIB),
        "sys/fs/cgroup/job/memory.max": str(8 * GIB),
        "sys/fs/cgroup/job/memory.current": str(3 * GIB),
        "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    assert available_host_memory(machine(tmp_path, files)) == 6 * GIB


def test_in_a_container_the_mount_is_the_containers_own_group(tmp_path):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": str(5 * GIB),
        "sys/fs/cgroup/memory.current": str(2 * GIB),
    }
    assert available_host_memory(machine(tmp_path, files)) == 3 * GIB
    files["proc/self/cgroup"] = "0::/docker/of/the/host\n"  # is not there inside
    assert available_host_memory(machine(tmp_path, files)) == 3 * GIB


def test_a_cgroup_of_version_1(tmp_path):
    files = {
        "proc/self/cgroup": "9:cpu:/x\n5:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    assert available_host_memory(machine(tmp_path, files)) == 3.5 * GIB


def test_more_than_the_limit_in_use_leaves_nothing(tmp_path):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000",
        "sys/fs/cgroup/memory.current": "2000",
    }
    assert available_host_memory(machine(tmp_path, files)) == 0


def test_free_disk_is_that_of_the_nearest_folder_that_exists(tmp_path):
    found = os.statvfs(tmp_path)
    measured = measure_limits(None, str(tmp_path / "not" / "yet"), tmp_path)
    assert measured.disk == pytest.approx(found.f_bavail * found.f_frsize, rel=0.1)
    assert measure_limits(None, None, tmp_path).disk is None


LOCKED = 1 << 20


@pytest.fixture
def lock_rlimit():
    """A limit of locked memory, as `ulimit -l 1024` sets it."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKED, before[1]))
    yield
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == LOCKED, "it is as it was"
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def mlock() -> None:
    """Locks a page by the system call, which heeds the limit."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    if ctypes.CDLL(None).mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page))), len(page)):
        raise MemoryError


def test_locked_memory_is_limited_for_those_who_heed_the_limit(lock_rlimit):
    """As NVIDIA's driver does not, and mlock does, but for root."""
    assert lock_limit(lambda: None) is None
    status = Path("/proc/self/status").read_text()
    capabilities = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff"))
    is_free = capabilities >> 14 & 1  # CAP_IPC_LOCK
    assert lock_limit(mlock) == (None if is_free else LOCKED)

    def heed() -> None:
        if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < mmap.PAGESIZE:
            raise MemoryError

    assert lock_limit(heed) == LOCKED


@pytest.mark.parametrize("heeds", [True, False])
def test_cuda_is_asked_to_lock_a_page_and_its_last_error_is_taken_away(lock_rlimit, tmp_path, monkeypatch, heeds):
    asked: list = []

    def pinned(nbytes: int, pin: bool) -> torch.Tensor:
        asked.append((nbytes, pin, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
        if heeds:
            raise MemoryError
        return torch.empty(nbytes)

    monkeypatch.setattr(limits, "aligned_empty", pinned)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9))
    monkeypatch.setattr(torch, "zeros", lambda numel, device: asked.append((numel, device)))
    cuda = torch.device("cuda")
    found = measure_limits(cuda, root=tmp_path)
    assert (found.device, found.memlock) == (5, LOCKED if heeds else None)
    assert asked == [(mmap.PAGESIZE, True, 0), *([(1, cuda)] if heeds else [])]


def test_without_a_gpu_nothing_is_locked(lock_rlimit, tmp_path):
    assert measure_limits(torch.device("cpu"), root=tmp_path).memlock is None


def test_this_machine_has_memory_and_a_cpu_has_no_device_of_its_own():
    measured = measure_limits(torch.device("cpu"), ".")
    assert measured.device is None and measured.host and measured.disk
