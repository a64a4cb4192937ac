"""What a machine offers beside host memory, which is in tests/test_cgroups.py."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from pathlib import Path

import pytest
import torch

from megazero.plan import limits, measure_limits
from megazero.plan.limits import lock_limit


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
def test_cuda_is_asked_to_lock_a_page(lock_rlimit, tmp_path, monkeypatch, heeds):
    asked: list = []

    def pinned(nbytes: int, pin: bool) -> torch.Tensor:
        asked.append((nbytes, pin, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
        if heeds:
            raise MemoryError
        return torch.empty(nbytes)

    monkeypatch.setattr(limits, "aligned_empty", pinned)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9))
    found = measure_limits(torch.device("cuda"), root=tmp_path)
    assert (found.device, found.memlock) == (5, LOCKED if heeds else None)
    assert asked == [(mmap.PAGESIZE, True, 0)]


def test_without_a_gpu_nothing_is_locked(lock_rlimit, tmp_path):
    assert measure_limits(torch.device("cpu"), root=tmp_path).memlock is None


def test_this_machine_has_memory_and_a_cpu_has_no_device_of_its_own():
    measured = measure_limits(torch.device("cpu"), ".")
    assert measured.device is None and measured.host and measured.disk
