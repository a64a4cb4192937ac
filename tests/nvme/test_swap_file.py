"""Swap files: bytes come back as they were, errors say what and where, and nothing is left behind."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import io
import logging
import mmap
import multiprocessing
import os
import platform
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megazero import nvme
from megazero.nvme import PAGE, AioConfig, FileTransport, SwapFile, aligned_empty, check_folder, padded, swap_file
from tests.nvme.transports import BROKEN_DRIVE, Buffered, Short, gated


def random_pages(nbytes, seed=0):
    """Whole pages of random bytes."""
    buffer = aligned_empty(padded(nbytes))
    buffer.random_(256, generator=torch.Generator().manual_seed(seed))
    return buffer


def round_trip(swap, nbytes, seed=0):
    written, got = random_pages(nbytes, seed), aligned_empty(padded(nbytes))
    region = swap.allocate(nbytes)
    swap.write(region, written).wait()
    swap.read(region, got).wait()
    assert torch.equal(got, written)
    return region


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 2_500_000])
@pytest.mark.parametrize(
    "aio", [AioConfig(), AioConfig(block_size=PAGE, queue_depth=3, thread_count=2)], ids=["1 MiB", "page"]
)
@pytest.mark.parametrize("transport", [FileTransport, Buffered])
def test_what_is_written_is_read(tmp_path, nbytes, aio, transport):
    with SwapFile(tmp_path, 0, aio, transport=transport) as swap:
        round_trip(swap, 3 * PAGE, seed=1)
        region = round_trip(swap, nbytes)
        assert region.nbytes == padded(nbytes)
        assert (swap.why_buffered is None) == (transport is FileTransport and goes_direct(tmp_path))
    assert swap.is_closed


def goes_direct(folder):
    """Whether the file system takes O_DIRECT, found out without our code."""
    path = folder / "try"
    path.write_bytes(b"")
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    finally:
        path.unlink()
    return True


def test_short_calls_go_on_where_they_ended(tmp_path):
    with SwapFile(tmp_path, 0, transport=Short) as swap:
        round_trip(swap, 40 * PAGE + 1)


def test_parts_of_regions_and_any_dtype(tmp_path):
    with SwapFile(tmp_path, 0) as swap:
        swap.allocate(PAGE)
        region = swap.allocate(8 * PAGE)
        values = aligned_empty(8 * PAGE).view(torch.bfloat16).view(8, -1)
        values.copy_(torch.arange(8)[:, None])
        swap.write(region, values).wait()
        part = aligned_empty(3 * PAGE).view(torch.bfloat16).view(3, -1)
        swap.read(region, part, 4 * PAGE).wait()
        assert torch.equal(part, values[4:7])
        swap.write(region, part[:1], 7 * PAGE).wait()
        swap.read(region, values).wait()
        assert values[:, -1].tolist() == [0, 1, 2, 3, 4, 5, 6, 4]


def test_threads_share_a_file(tmp_path):
    failures = []

    def work(seed):
        try:
            for turn in range(10):
                swap.free(round_trip(swap, (seed + turn) % 7 * PAGE + 17, seed))
        except BaseException as error:
            failures.append(error)

    with SwapFile(tmp_path, 0, AioConfig(block_size=PAGE)) as swap:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert swap.allocate(swap.nbytes).offset == 0  # all holes have become one


def test_freed_space_is_used_again(tmp_path):
    with SwapFile(tmp_path, 0) as swap:
        a, b, c = (swap.allocate(2 * PAGE) for _ in range(3))
        kept = random_pages(2 * PAGE)
        swap.write(b, kept).wait()
        swap.free(a)
        assert swap.allocate(PAGE).offset == 0 and swap.allocate(1).offset == PAGE
        swap.free(c)
        assert swap.allocate(2 * PAGE) == c and swap.nbytes == 6 * PAGE
        assert swap.allocate(PAGE).offset == 6 * PAGE
        got = aligned_empty(2 * PAGE)
        swap.read(b, got).wait()
        assert torch.equal(got, kept)
        swap.free(b)
        for use in (swap.free, lambda region: swap.read(region, got)):
            with pytest.raises(RuntimeError, match="not in use"):
                use(b)


def test_freed_space_is_not_used_while_something_is_under_way_there(tmp_path):
    make, made = gated()
    with SwapFile(tmp_path, 0, transport=make) as swap:
        region, idle, data = swap.allocate(PAGE), swap.allocate(PAGE), random_pages(PAGE)
        made[0].held = {"write"}
        writes = [swap.write(region, data), swap.write(region, data)]
        swap.free(idle)
        swap.free(region)
        assert swap.allocate(PAGE) == idle and swap.allocate(PAGE).offset == 2 * PAGE
        made[0].let_all_go()
        for write in writes:
            write.wait()
        assert swap.allocate(PAGE) == region


def test_a_transfer_starts_after_another_and_fails_with_it(tmp_path):
    make, made = gated()
    with SwapFile(tmp_path, 0, transport=make) as swap:
        region, data, got = swap.allocate(PAGE), random_pages(PAGE), aligned_empty(PAGE)
        made[0].held = {"write"}
        write = swap.write(region, data)
        read, told = swap.read(region, got, after=write), []
        write.then(lambda error: (time.sleep(0.2), told.append(error)))
        made[0].events.wait("write", 0, "starts")
        assert not read.done() and ("read", 0, "starts") not in made[0].events.list
        made[0].let_go("write", 0)
        read.wait()
        write.wait()  # which may take a moment more: what comes after it is started first
        assert write.done() and told == [None] and torch.equal(got, data)
        made[0].failing["read", 0] = BROKEN_DRIVE
        with pytest.raises(OSError, match="read of"):
            swap.read(region, got, after=swap.read(region, data)).wait()
        assert made[0].events.list.count(("read", 0, "starts")) == 2  # not the one behind the read that failed


def test_overlap_events_false_is_one_transfer_at_a_time(tmp_path):
    make, made = gated()
    with SwapFile(tmp_path, 0, AioConfig(block_size=PAGE, overlap_events=False), transport=make) as swap:
        first, second = swap.allocate(6 * PAGE), swap.allocate(6 * PAGE)
        data = random_pages(6 * PAGE)
        made[0].held = {"write"}
        threading.Timer(0.05, made[0].let_all_go).start()
        for transfer in [swap.write(first, data), swap.write(second, data)]:
            transfer.wait()
        events = [(offset >= second.offset, what) for _, offset, what in made[0].events.list]
        assert max(i for i, (is_second, _) in enumerate(events) if not is_second) == 11


def test_io_errors_say_file_place_length_and_rank(tmp_path):
    make, made = gated()
    swap = SwapFile(tmp_path, 3, AioConfig(block_size=2 * PAGE, queue_depth=1), transport=make)
    region, data = swap.allocate(6 * PAGE), random_pages(6 * PAGE)
    made[0].failing["read", 2 * PAGE] = BROKEN_DRIVE
    for _ in range(2):  # it stays usable
        with pytest.raises(OSError, match=f"rank 3: read of {2 * PAGE} bytes at offset {2 * PAGE}") as caught:
            swap.read(region, data).wait()
        assert caught.value.errno == BROKEN_DRIVE and str(tmp_path) in str(caught.value)
    assert ("read", 4 * PAGE, "starts") not in made[0].events.list, "requests behind the one that failed are skipped"
    made[0].failing.clear()
    swap.read(region, data).wait()
    swap.close()


def test_closing_waits_for_what_comes_after_something_under_way(tmp_path):
    make, made = gated()
    swap = SwapFile(tmp_path, 0, transport=make)
    region, data, got = swap.allocate(PAGE), random_pages(PAGE), aligned_empty(PAGE)
    made[0].held = {"write"}
    read = swap.read(region, got, after=swap.write(region, data))
    threading.Timer(0.2, made[0].let_all_go).start()
    swap.close()
    read.wait()
    assert torch.equal(got, data)
    ended = weakref.ref(read)
    del read
    gc.collect()
    assert ended() is None, "a file keeps no transfer that has ended"


def test_after_a_failed_write_every_use_of_the_file_tells_that_error_again(tmp_path):
    make, made = gated()
    with SwapFile(tmp_path, 3, transport=make) as swap:
        region, other, data = swap.allocate(2 * PAGE), swap.allocate(2 * PAGE), random_pages(2 * PAGE)
        swap.write(other, data).wait()
        swap.raise_failure()
        made[0].failing = {("write", 0): errno.ENOSPC, ("write", other.offset): BROKEN_DRIVE}
        made[0].held = {"write"}
        write, later = swap.write(region, data), swap.write(other, data)
        made[0].let_go("write", 0)
        with pytest.raises(OSError, match=f"rank 3: write of {2 * PAGE} bytes at offset 0") as first:
            write.wait()
        made[0].let_all_go()
        assert later.error().errno == BROKEN_DRIVE
        made[0].failing.clear()
        uses = [lambda: swap.read(region, data), lambda: swap.write(region, data), lambda: swap.read(other, data)]
        for use in (*uses, swap.raise_failure):
            with pytest.raises(OSError, match="nothing more is read or written: resume from a checkpoint") as again:
                use()
            assert (again.value.errno, str(again.value)) == (errno.ENOSPC, str(first.value))
        swap.free(region)


def test_a_write_behind_a_read_that_failed_is_a_failed_write(tmp_path):
    make, made = gated()
    with SwapFile(tmp_path, 3, transport=make) as swap:
        region, data = swap.allocate(PAGE), random_pages(PAGE)
        made[0].failing["read", 0] = BROKEN_DRIVE
        write = swap.write(region, data, after=swap.read(region, data))
        assert isinstance(write.error(), OSError)
        with pytest.raises(OSError, match="rank 3: read of"):
            swap.read(region, data)


def test_a_write_whose_buffer_the_device_cannot_fill_is_a_failed_write(tmp_path):
    def filled() -> None:
        raise RuntimeError("the device is gone")

    with SwapFile(tmp_path, 3) as swap:
        region, data = swap.allocate(PAGE), random_pages(PAGE)
        with pytest.raises(RuntimeError, match="the device is gone"):
            swap.write(region, data, filled=filled).wait()
        with pytest.raises(OSError, match="rank 3: a write failed: the device is gone.*resume from a checkpoint"):
            swap.read(region, data)


def test_threads_that_cannot_be_started_are_told_before_anything_is_written(tmp_path, monkeypatch):
    started, start = [], threading.Thread.start

    def start_three(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_three)
    with pytest.raises(OSError, match="rank 2: 4 threads .*can't start new thread.*aio.queue_depth") as told:
        SwapFile(tmp_path, 2, AioConfig(queue_depth=4))
    assert told.value.errno == errno.EAGAIN
    assert len(started) == 3 and not any(thread.is_alive() for thread in started)
    started.clear()
    SwapFile(tmp_path, 2, AioConfig(queue_depth=3)).close()
    assert len(started) == 3


def test_a_truncated_file_is_told(tmp_path):
    with SwapFile(tmp_path, 1) as swap:
        region = round_trip(swap, 8 * PAGE)
        os.ftruncate(swap._file.fileno(), 3 * PAGE + 512)
        with pytest.raises(OSError, match=f"rank 1: read of {8 * PAGE} bytes at offset 0 failed after .* truncated"):
            swap.read(region, aligned_empty(8 * PAGE)).wait()


@pytest.mark.parametrize("where", ["at the flag", "at the first page"])
def test_without_o_direct_it_says_why_and_goes_through_the_page_cache(tmp_path, monkeypatch, caplog, where):
    flags, write = fcntl.fcntl, os.pwritev

    def refuse_flag(file, command, argument=0):
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return flags(file, command, argument)

    def refuse_page(descriptor, views, offset):
        if flags(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, views, offset)

    if where == "at the flag":
        monkeypatch.setattr(fcntl, "fcntl", refuse_flag)
    else:
        monkeypatch.setattr(os, "pwritev", refuse_page)
    with caplog.at_level(logging.WARNING, "megazero"), SwapFile(tmp_path, 0) as swap:
        assert swap.why_buffered == "the file system refuses O_DIRECT (Invalid argument)"
        assert not flags(swap._file, fcntl.F_GETFL) & os.O_DIRECT
        round_trip(swap, 9 * PAGE)
        round_trip(swap, 9 * PAGE)
    assert caplog.text.count("page cache") == 1


def test_a_drive_that_fails_at_the_first_page_is_not_taken_for_one_without_o_direct(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(BROKEN_DRIVE, "Input/output error")

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match="rank 4: the first page could not be written: Input/output error") as told:
        SwapFile(tmp_path, 4)
    assert told.value.errno == BROKEN_DRIVE and str(tmp_path) in str(told.value)


def test_a_full_disk_says_what_was_asked_and_what_is_free(tmp_path, monkeypatch):
    status = os.statvfs(tmp_path)
    too_much = padded(status.f_blocks * status.f_frsize)

    def full(descriptor, offset, size):
        os.ftruncate(descriptor, offset + size // 2 // PAGE * PAGE)
        raise OSError(errno.ENOSPC, "No space left on device")

    with SwapFile(tmp_path, 5) as swap:
        kept = swap.allocate(PAGE)
        for ask, asked in ((swap.allocate, too_much), (swap.reserve, too_much + PAGE)):
            with pytest.raises(
                OSError, match=rf"rank 5: {too_much} bytes more than the {PAGE} .*No space .*\d+ are free.*nvme_path"
            ) as caught:
                ask(asked)
            assert caught.value.errno == errno.ENOSPC and str(tmp_path) in str(caught.value)
        with monkeypatch.context() as patch:
            patch.setattr(swap_file, "reserve", full)  # another process was faster
            with pytest.raises(OSError, match="rank 5"):
                swap.allocate(64 * PAGE)
        assert os.fstat(swap._file.fileno()).st_size == swap.nbytes == kept.end
        round_trip(swap, PAGE)


def test_space_that_is_reserved_is_there_when_the_disk_is_full(tmp_path, monkeypatch, caplog):
    with SwapFile(tmp_path, 0) as swap:
        swap.allocate(PAGE)
        swap.reserve(3 * PAGE - 1)
        status = os.fstat(swap._file.fileno())
        assert status.st_size == 3 * PAGE and status.st_blocks * 512 >= 3 * PAGE
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
            swap.reserve(2 * PAGE)
            round_trip(swap, 2 * PAGE)
            with pytest.raises(OSError, match=f"{PAGE} bytes more than the {3 * PAGE} it has"):
                swap.allocate(PAGE)
        swap.allocate(PAGE)
    assert not caplog.records, "what is there already is not reserved again, in vain"


def test_it_grows_though_its_folder_is_gone(tmp_path):
    (folder := tmp_path / "swap").mkdir()
    with SwapFile(folder, 0) as swap:
        folder.rmdir()
        round_trip(swap, 3 * PAGE)


def test_space_that_cannot_be_reserved_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())  # as on macOS
    monkeypatch.delattr(os, "O_DIRECT")
    with caplog.at_level(logging.WARNING, "megazero"), SwapFile(tmp_path, 0) as swap:
        round_trip(swap, 7 * PAGE)
        round_trip(swap, 9 * PAGE)
        swap.read(swap.allocate(PAGE), aligned_empty(PAGE)).wait()  # of what was never written
    assert caplog.text.count("cannot be reserved") == 1


def test_a_place_behind_4_gib_is_reserved(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        if not swap_file.reserve(file.fileno(), 1 << 32, PAGE):
            pytest.skip("the system or the file system reserves no space")
        assert os.fstat(file.fileno()).st_size == (1 << 32) + PAGE


def test_a_reservation_that_a_signal_interrupts_is_asked_for_again(monkeypatch):
    answers = iter([errno.EINTR, 0])

    def fallocate(*_):
        ctypes.set_errno(answer := next(answers))
        return -bool(answer)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(fallocate=fallocate))
    assert swap_file.reserve(0, 0, PAGE) and not list(answers)


def reserve_without_fallocate(folder):
    """What is said and the bytes written for a reservation where the kernel answers fallocate(2) as a file system without it."""
    number = {"x86_64": 285, "aarch64": 47}[platform.machine()]
    steps = (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.EOPNOTSUPP), (0x06, 0, 0, 0x7FFF0000)
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(filters)))
    prctl = ctypes.CDLL(None).prctl
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, program):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        return None
    told = io.StringIO()
    logging.getLogger("megazero").addHandler(logging.StreamHandler(told))
    with SwapFile(folder, 0, transport=Buffered) as swap:
        swap.reserve(64 * PAGE)
        status = os.fstat(swap._file.fileno())
        round_trip(swap, 64 * PAGE)
        return told.getvalue().count("cannot be reserved"), status.st_size, status.st_blocks


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64") or sys.platform != "linux", reason="knows no others"
)
def test_a_file_system_that_cannot_reserve_is_not_written_byte_by_byte(tmp_path):
    found = in_child(reserve_without_fallocate, tmp_path)
    if found is None:
        pytest.skip("the kernel lets no process filter its calls")
    assert found == (1, 64 * PAGE, 0)


def test_btrfs_is_asked_to_overwrite_in_place_before_anything_is_written(tmp_path, monkeypatch):
    asked = []

    def ioctl(descriptor, request, argument):
        (flags,) = struct.unpack("l", argument)
        asked.append((request, flags, os.fstat(descriptor).st_blocks))
        return struct.pack("l", 0x400)  # FS_COMPR_FL

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    with SwapFile(tmp_path, 0) as swap:
        round_trip(swap, PAGE)
    assert asked == [(0x80086601, 0, 0), (0x40086602, 0x800400, 0)]  # FS_IOC_GETFLAGS, _SETFLAGS with FS_NOCOW_FL


@pytest.mark.parametrize(
    "make, found",
    [
        (lambda path: path, "No such file"),
        (lambda path: path.write_text("") or path, "not a directory"),
        (lambda path: (path.parent / "a").write_text("") and path / "a" or path.parent / "a" / "b", "Not a directory"),
    ],
    ids=["absent", "a file", "in a file"],
)
def test_a_folder_that_cannot_be_used_is_refused(tmp_path, make, found):
    folder = make(tmp_path / "folder")
    for who, use in (
        ("", check_folder),
        ("rank 7: ", lambda path: SwapFile(path, 7)),
    ):
        with pytest.raises(OSError, match=f"nvme_path must be an existing directory .*{found}") as caught:
            use(folder)
        assert str(folder) in str(caught.value) and f"] {who}--nvme-path " in str(caught.value)


def in_child(work, *args):
    """What `work(*args)` returns in a forked process, or the OSError's errno and text."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def run():
        try:
            sender.send(work(*args))
        except OSError as error:
            sender.send((error.errno, str(error)))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    sender.close()  # so that a child that dies is not waited for
    assert receiver.poll(60)
    told = receiver.recv()
    process.join()
    return told


def make_as_nobody(folder):
    if os.geteuid() == 0:
        os.setuid(65534)  # root may write everywhere
    SwapFile(folder, 0)


def allocate_above_limit(folder):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with SwapFile(folder, 2) as swap:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * PAGE, 64 * PAGE))
        round_trip(swap, 60 * PAGE)
        swap.allocate(60 * PAGE)


def is_mapped(address):
    """Whether this process has the page there."""
    status = ctypes.create_string_buffer(1)
    return ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), status) == 0


def test_a_forked_child_has_none_of_the_pages_that_a_drive_may_be_reading_into():
    buffer = aligned_empty(PAGE)
    assert is_mapped(buffer.data_ptr()) and not in_child(is_mapped, buffer.data_ptr())


def map_and_collect(address):
    """Whether a page that this process maps there is still there after a collection."""
    libc, flags = ctypes.CDLL(None), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    assert libc.mmap(address, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
    gc.collect()
    return is_mapped(address)


def test_a_forked_child_that_drops_pages_of_its_parent_keeps_its_own_memory():
    gc.disable()
    try:
        cycle = [aligned_empty(PAGE)]
        address = cycle[0].data_ptr()
        cycle.append(cycle)
        del cycle  # left to the collector of the child
        assert in_child(map_and_collect, address)
    finally:
        gc.enable()


def test_a_read_only_folder_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        code, text = in_child(make_as_nobody, folder)
        assert code == errno.EACCES and "nvme_path" in text and folder in text


def test_a_limit_of_the_file_size_is_told(tmp_path):
    code, text = in_child(allocate_above_limit, tmp_path)
    assert code == errno.EFBIG
    assert f"rank 2: {60 * PAGE} bytes more than the {60 * PAGE}" in text
    assert "ulimit -f" in text


def swap_until_killed(folder, pipe, has_o_tmpfile):
    tempfile._O_TMPFILE_WORKS = has_o_tmpfile
    swap = SwapFile(folder, 0)
    round_trip(swap, 64 * PAGE)
    pipe.send(swap._file.fileno())
    signal.pause()


@pytest.mark.parametrize("has_o_tmpfile", [True, False], ids=["O_TMPFILE", "unlinked"])
def test_a_killed_process_leaves_nothing_and_takes_nothing_of_others(tmp_path, has_o_tmpfile):
    with SwapFile(tmp_path, 0) as mine:
        data, got, region = random_pages(9 * PAGE), aligned_empty(9 * PAGE), mine.allocate(9 * PAGE)
        mine.write(region, data).wait()
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=swap_until_killed, args=(tmp_path, sender, has_o_tmpfile)
        )
        process.start()
        sender.close()
        assert receiver.poll(60)
        theirs = os.stat(f"/proc/{process.pid}/fd/{receiver.recv()}")
        assert theirs.st_nlink == 0
        assert theirs.st_blocks * 512 >= 64 * PAGE  # the kernel frees it with its last descriptor
        assert os.listdir(tmp_path) == []
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL and os.listdir(tmp_path) == []
        with SwapFile(tmp_path, 0) as another:
            round_trip(another, 9 * PAGE, seed=1)
        mine.read(region, got).wait()
        assert torch.equal(got, data)


def test_it_may_be_dropped_or_left_open_at_exit(tmp_path):
    swap, got = SwapFile(tmp_path, 0, AioConfig(block_size=PAGE)), aligned_empty(64 * PAGE)
    region, data = swap.allocate(64 * PAGE), random_pages(64 * PAGE)
    read = swap.read(region, got, after=swap.write(region, data))
    del swap, region
    gc.collect()
    read.wait()
    assert torch.equal(got, data)
    program = """
import atexit, sys
from megazero.nvme import AioConfig, PAGE, SwapFile, aligned_empty
swap = SwapFile(sys.argv[1], 0, AioConfig(block_size=PAGE))
if sys.argv[2]:
    atexit.register(swap.close)
region = swap.allocate(2000 * PAGE)
write = swap.write(region, aligned_empty(2000 * PAGE))
read = swap.read(region, aligned_empty(2000 * PAGE), after=write)
"""
    root = Path(nvme.__file__).parents[2]
    for closes in ("", "at exit"):
        command = [sys.executable, "-c", program, str(tmp_path), closes]
        done = subprocess.run(command, cwd=root, capture_output=True, timeout=60)
        assert done.returncode == 0 and os.listdir(tmp_path) == []


def test_misuse_is_refused(tmp_path):
    with SwapFile(tmp_path, 0) as swap:
        region, pages = swap.allocate(4 * PAGE), aligned_empty(8 * PAGE)
        for buffer, offset in ((pages[: PAGE - 1], 0), (pages[1 : PAGE + 1], 0), (pages[:PAGE], 512)):
            with pytest.raises(ValueError, match="needs whole pages"):
                swap.read(region, buffer, offset)
        for buffer, offset in ((pages, 0), (pages[: 2 * PAGE], 3 * PAGE), (pages[:PAGE], -PAGE)):
            with pytest.raises(ValueError, match=f"the region has {4 * PAGE}"):
                swap.write(region, buffer, offset)
        with pytest.raises(ValueError, match="contiguous CPU tensor"):
            swap.write(region, pages.view(2, -1).t())
        with pytest.raises(ValueError, match="0 bytes or more"):
            swap.allocate(-1)
    swap.close()
    with pytest.raises(RuntimeError, match="closed"):
        swap.read(region, pages)


def test_aligned_memory_is_whole_pages_and_goes_back():
    for nbytes in (1, PAGE, PAGE + 1, 1_000_003):
        buffer = aligned_empty(nbytes, pin=True)
        assert buffer.data_ptr() % PAGE == 0 and buffer.shape == (nbytes,) and buffer.dtype == torch.uint8
        assert buffer.is_pinned() == torch.cuda.is_available()
        assert not buffer.any()
    assert aligned_empty(0).numel() == 0
    big = 256 << 20
    before = mapped_bytes()
    view = aligned_empty(big).view(torch.float32)[5:]
    assert mapped_bytes() >= before + big
    del view
    assert mapped_bytes() < before + big
    with pytest.raises(ValueError, match="-1"):
        aligned_empty(-1)
    with pytest.raises(MemoryError, match="bytes"):
        aligned_empty(1 << 60)


def mapped_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


@pytest.mark.parametrize(
    "values",
    [
        {"block_size": 0},
        {"block_size": 1.5},
        {"block_size": PAGE + 1},
        {"queue_depth": 0},
        {"queue_depth": True},
        {"thread_count": -1},
        {"overlap_events": None},
    ],
    ids=str,
)
def test_aio_values_out_of_range_are_refused_by_name(values):
    with pytest.raises(ValueError, match=f"aio.{next(iter(values))}"):
        AioConfig(**values)


def test_requests_in_flight():
    assert AioConfig().threads == 8
    assert AioConfig(queue_depth=3, thread_count=4).threads == 12
    assert AioConfig(queue_depth=128, thread_count=16).threads == 32
