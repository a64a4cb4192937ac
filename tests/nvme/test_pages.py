"""Host memory in whole pages: as much as was asked, page-locked as much, given back with the last tensor, and used again."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from megazero.nvme import PAGE, PagePool, aligned_empty, padded
from megazero.zero.home import MemoryHome


class Threads(threading.local):
    """The current device of each thread: the first one, until it is told another."""

    device = 0


class Runtime:
    """CUDA's runtime, as far as it locks pages: what is locked now, how often it was asked, and on which devices it works."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.calls = 0
        self.code = 0
        self.threads, self.devices = Threads(), set[int]()
        self.threads.device = 3  # of the main one

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.threads.device = self.threads.device, index
        yield
        self.threads.device = before

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert address % PAGE == 0 and address not in self.locked and flags == 1
        self.devices.add(self.threads.device)
        self.calls += 1
        if not self.code:
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.devices.add(self.threads.device)
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch) -> Runtime:
    pretended = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pretended)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pretended.threads.device)
    monkeypatch.setattr(torch.cuda, "device", pretended.device)
    yield pretended
    gc.collect()
    assert pretended.devices == {3}, "CUDA was started on another device than this process computes on"


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 5 * PAGE, 3_000_000])
def test_as_many_pages_are_locked_as_were_asked_for_until_the_last_tensor_is_gone(runtime, nbytes):
    buffer = aligned_empty(nbytes, pin=True)
    assert buffer.nbytes == buffer.untyped_storage().nbytes() == nbytes
    assert runtime.locked == {buffer.data_ptr(): padded(nbytes)}
    part = buffer[:1]
    del buffer
    assert len(runtime.locked) == 1
    del part
    assert runtime.locked == {}


def test_pages_are_there_before_they_are_locked_which_supplies_those_that_are_missing_in_one_thread(
    runtime, monkeypatch
):
    resident = []

    def lock(address: int, nbytes: int, flags: int) -> int:
        pages = np.zeros(nbytes // PAGE, dtype=np.uint8)
        assert (
            ctypes.CDLL(None).mincore(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(pages.ctypes.data)
            )
            == 0
        )
        resident.append(int((pages & 1).sum()))
        return Runtime.cudaHostRegister(runtime, address, nbytes, flags)

    monkeypatch.setattr(runtime, "cudaHostRegister", lock)
    buffer = aligned_empty(300 * PAGE + 1, pin=True)
    assert resident == [301]
    assert not buffer.any()


def test_pages_whose_last_tensor_goes_in_another_thread_are_unlocked_on_the_device_that_they_were_locked_for(runtime):
    buffers = [aligned_empty(PAGE, pin=True)]
    thread = threading.Thread(target=buffers.clear)
    thread.start()
    thread.join()
    assert runtime.locked == {} and runtime.devices == {3}


def test_what_cannot_be_locked_is_told_with_what_to_change_and_cudas_last_error_is_taken_away(runtime, monkeypatch):
    kernels: list = []

    def zeros(numel: int, device: str) -> None:
        kernels.append((numel, device))
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    aligned_empty(1, pin=True)
    assert not kernels
    runtime.code = 2
    with pytest.raises(MemoryError, match=f"pin a buffer of {2 * PAGE} bytes .* returned 2.*pin_memory"):
        aligned_empty(PAGE + 1, pin=True)
    assert runtime.locked == {} and kernels == [(1, "cuda")]


def test_pages_of_one_size_are_locked_once_and_used_again(runtime):
    pool = PagePool()
    for _ in range(5):
        first, second = pool.empty(3 * PAGE), pool.empty(100)
        assert first.nbytes == 3 * PAGE and second.nbytes == 100 and first.data_ptr() % PAGE == 0
        assert pool.spare_nbytes == 0
        alias = first.view(torch.float32)[5:]
        del first
        assert pool.spare_nbytes == 0, "somebody still reads it"
        del alias, second
        assert pool.spare_nbytes == 3 * PAGE + 100
    assert runtime.calls == 2 and sorted(runtime.locked.values()) == [PAGE, 3 * PAGE]
    both = pool.empty(100), pool.empty(100)
    assert both[0].data_ptr() != both[1].data_ptr() and runtime.calls == 3
    del both, pool
    assert runtime.locked == {}


def test_a_pool_of_sizes_that_vary_uses_large_buffers_for_small_ones_and_drops_those_that_are_too_small(runtime):
    pool = PagePool(sizes_vary=True)
    for sizes in ((3, 5), (5, 3), (2, 4), (1, 2), (3,)):  # pages
        buffers = [pool.empty(pages * PAGE) for pages in sizes]
        assert [buffer.nbytes for buffer in buffers] == [pages * PAGE for pages in sizes]
        assert len({buffer.data_ptr() for buffer in buffers}) == len(sizes) and runtime.calls == 2
        del buffers
        assert pool.spare_nbytes == 8 * PAGE
    kept = pool.empty(PAGE)
    assert pool.empty(6 * PAGE).nbytes == 6 * PAGE and len(runtime.locked) == 3, "somebody has one of the others"
    del kept
    for pages in (7, 8):
        large = pool.empty(pages * PAGE)
        assert list(runtime.locked.values()) == [pages * PAGE], "nobody had any of the others"
        del large
    del pool
    assert runtime.locked == {}


def test_a_pool_gives_nothing_for_nothing():
    pool = PagePool()
    assert pool.empty(0).nbytes == 0 and pool.spare_nbytes == 0
    with pytest.raises(ValueError, match="0 bytes or more"):
        pool.empty(-1)


def test_a_home_in_host_memory_locks_what_its_vectors_hold_and_no_more(runtime):
    home = MemoryHome(torch.device("cpu"), pin=True)
    vectors = [home.vector(numel, torch.float32) for numel in (10_000, 3, 70_001)]
    assert sorted(runtime.locked.values()) == [padded(4 * numel) for numel in (3, 10_000, 70_001)]
    assert [vector.resident.untyped_storage().nbytes() for vector in vectors] == [40_000, 12, 280_004]
    with vectors[2].at_hand() as values:
        values.fill_(1)
    assert home.nbytes == 0
    del vectors, values
    assert home.nbytes == 320_016
    again = home.hold(torch.arange(10_000.0, dtype=torch.float64).float().to(torch.float32), copy=False)
    assert home.nbytes == 320_016 and torch.equal(again.resident, torch.arange(10_000.0)), "it lies here already"
    del home, again
    assert runtime.locked == {}
