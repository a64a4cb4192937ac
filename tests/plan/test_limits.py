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
    measured = measure_limits(None, str(tmp_path / "not" / "yet"), root=tmp_path)
    assert measured.disk == pytest.approx(found.f_bavail * found.f_frsize, rel=0.1)
    assert measure_limits(None, root=tmp_path).disk is None


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a second file system")
def test_activation_checkpoints_have_a_disk_of_their_own_if_it_is_another_one(tmp_path):
    (tmp_path / "beside").mkdir()
    for name in ("beside", "not yet"):
        assert measure_limits(None, str(tmp_path), str(tmp_path / name), tmp_path).checkpoint_disk is None
    measured, other = measure_limits(None, str(tmp_path), "/dev/shm/x", tmp_path), os.statvfs("/dev/shm")
    assert measured.checkpoint_disk == pytest.approx(other.f_bavail * other.f_frsize, rel=0.1)
    assert measured.disk == pytest.approx(measure_limits(None, str(tmp_path), root=tmp_path).disk, rel=0.1)


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


def device_with(monkeypatch, free: int, total: int, reserved: int = 0, fraction: float = 1.0) -> torch.device:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
    return torch.device("cuda")


@pytest.mark.parametrize("heeds", [True, False])
def test_cuda_is_asked_to_lock_a_page(lock_rlimit, tmp_path, monkeypatch, heeds):
    asked: list = []

    def pinned(nbytes: int, pin: bool) -> torch.Tensor:
        asked.append((nbytes, pin, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
        if heeds:
            raise MemoryError
        return torch.empty(nbytes)

    monkeypatch.setattr(limits, "aligned_empty", pinned)
    found = measure_limits(device_with(monkeypatch, free=5, total=9), root=tmp_path)
    assert (found.device, found.memlock) == (5, LOCKED if heeds else None)
    assert asked == [(mmap.PAGESIZE, True, 0)]


@pytest.mark.parametrize(
    ("fraction", "reserved", "usable"), [(1.0, 0, 70), (0.8, 0, 70), (0.4, 0, 40), (0.4, 30, 10), (0.2, 30, 0)]
)
def test_a_device_counts_within_the_fraction_that_this_process_may_use(
    monkeypatch, tmp_path, fraction, reserved, usable
):
    monkeypatch.setattr(limits, "lock_limit", lambda pin: None)
    device = device_with(monkeypatch, 70, 100, reserved, fraction)
    assert measure_limits(device, root=tmp_path).device == usable


def test_without_a_gpu_nothing_is_locked(lock_rlimit, tmp_path):
    assert measure_limits(torch.device("cpu"), root=tmp_path).memlock is None


def test_this_machine_has_memory_and_a_cpu_has_no_device_of_its_own():
    measured = measure_limits(torch.device("cpu"), ".")
    assert measured.device is None and measured.host and measured.disk
