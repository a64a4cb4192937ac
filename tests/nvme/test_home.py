"""Vectors on NVMe: what is read ahead and written behind at each moment, errors on both sides, and the memory that it takes."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from megazero.nvme import PAGE, AioConfig, SwapFile, aligned_empty
from megazero.zero.nvme_home import NvmeHome
from tests.nvme.transports import BROKEN_DRIVE, TIMEOUT_S, gated

NUMEL = PAGE // 4  # fp32 elements of a page


def home_of(swap, buffers=6, **options):
    return NvmeHome(swap, PAGE, buffers, **options)


def update(vectors, before=lambda i: None):
    """Adds 10 to each, with the next one asked for first, as an update of tiles does."""
    for i, vector in enumerate(vectors):
        if i + 1 < len(vectors):
            vectors[i + 1].prefetch()
        with vector.at_hand(writes=True) as values:
            before(i)
            values += 10


def gated_home(tmp_path, **options):
    """A home with six vectors of a page, i everywhere in vector i; its transport, and the vectors."""
    make, made = gated()
    home = home_of(SwapFile(tmp_path, 7, AioConfig(block_size=PAGE), transport=make), **options)
    vectors = [home.hold(torch.full((NUMEL,), float(i))) for i in range(6)]
    home.flush()
    made[0].events.list.clear()
    return home, made[0], vectors


def values_of(vectors):
    found = []
    for vector in vectors:
        with vector.at_hand() as values:
            found.append(values[0].item())
            assert torch.equal(values, values[0].expand(NUMEL))
    return found


def test_the_next_one_is_read_and_the_last_one_written_while_one_is_updated(tmp_path):
    home, transport, vectors = gated_home(tmp_path)
    transport.held.add("write")

    def before(i):
        if i + 1 < 6:
            transport.events.wait("read", (i + 1) * PAGE, "ends")
        if i > 0:
            transport.events.wait("write", (i - 1) * PAGE, "starts")
            assert ("write", (i - 1) * PAGE, "ends") not in transport.events.list
            transport.let_go("write", (i - 1) * PAGE)

    update(vectors, before)
    transport.let_all_go()
    home.flush()
    assert values_of(vectors) == [10, 11, 12, 13, 14, 15]


def test_without_pipelining_everything_is_one_after_the_other(tmp_path):
    home, transport, vectors = gated_home(tmp_path, reads_ahead=False, writes_behind=False)
    update(vectors, lambda i: transport.events.add("update", i))
    want = []
    for i in range(6):
        place = i * PAGE
        want += [("read", place, "starts"), ("read", place, "ends"), ("update", i)]
        want += [("write", place, "starts"), ("write", place, "ends")]
    assert transport.events.list == want
    assert values_of(vectors) == [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_few_buffers_slow_it_down_and_change_nothing(buffers, tmp_path):
    home, _, vectors = gated_home(tmp_path, buffers=buffers)
    for _ in range(3):
        update(vectors)
    home.flush()
    assert values_of(vectors) == [30, 31, 32, 33, 34, 35]
    assert home.nbytes <= max(buffers, 2) * PAGE, "one at hand and one read ahead"


def test_every_thread_that_flushes_waits_for_the_same_write(tmp_path):
    home, transport, vectors = gated_home(tmp_path)
    transport.held.add("write")
    update(vectors[:1])
    with ThreadPoolExecutor(2) as threads:
        flushes = [threads.submit(home.flush) for _ in range(2)]
        assert not wait(flushes, 0.1).done
        transport.let_all_go()
        for flush in flushes:
            flush.result(TIMEOUT_S)
    assert values_of(vectors)[0] == 10


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("kind, i", [("read", 0), ("read", 4), ("write", 0), ("write", 5)])
def test_a_failed_transfer_is_told_by_place_and_rank(tmp_path, pipelined, kind, i):
    home, transport, vectors = gated_home(tmp_path, reads_ahead=pipelined, writes_behind=pipelined)
    transport.failing[kind, i * PAGE] = BROKEN_DRIVE
    with pytest.raises(OSError, match=f"rank 7: {kind} of {PAGE} bytes at offset {i * PAGE} failed"):
        update(vectors)
        home.flush()


@pytest.mark.parametrize("pipelined", [True, False])
def test_who_goes_on_after_a_failed_write_is_stopped_at_every_later_use(tmp_path, pipelined):
    home, transport, vectors = gated_home(tmp_path, reads_ahead=pipelined, writes_behind=pipelined)
    transport.failing["write", PAGE] = BROKEN_DRIVE
    vectors[5].prefetch()
    with pytest.raises(OSError, match=f"offset {PAGE} failed"):
        update(vectors[:4])
        home.flush()
    transport.failing.clear()
    uses = [(lambda vector=vector, use=use: use([vector])) for use in (values_of, update) for vector in vectors]
    for use in (
        *uses,  # with what was not touched, or read before
        vectors[0].prefetch if pipelined else home.flush,
        home.flush,
        lambda: home.hold(torch.ones(NUMEL)),
    ):
        with pytest.raises(
            OSError, match=f"rank 7: write of {PAGE} bytes at offset {PAGE} failed .*injected"
        ) as caught:
            use()
        assert caught.value.errno == BROKEN_DRIVE and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("pipelined", [True, False])
def test_after_a_failed_read_all_buffers_are_there(tmp_path, pipelined):
    home, transport, vectors = gated_home(tmp_path, reads_ahead=pipelined, writes_behind=pipelined)
    for _ in range(10):
        transport.failing["read", 2 * PAGE] = BROKEN_DRIVE
        with pytest.raises(OSError, match="rank 7: read"):
            update(vectors[2:4])
        transport.failing.clear()
    update(vectors)
    home.flush()
    assert values_of(vectors) == [10, 11, 12, 13, 14, 15]
    assert home.nbytes <= 6 * PAGE


def test_after_ctrl_c_a_write_that_has_begun_has_its_buffer_to_itself(tmp_path, monkeypatch):
    home, transport, vectors = gated_home(tmp_path)
    write = home.swap.write

    def interrupted(*args, **options):
        write(*args, **options)
        raise KeyboardInterrupt

    transport.held.add("write")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), vectors[0].at_hand(writes=True) as values:
        patch.setattr(home.swap, "write", interrupted)
        values.fill_(10.0)
    assert values_of(vectors[1:]) == [1, 2, 3, 4, 5]
    transport.let_all_go()
    transport.events.wait("write", 0, "ends")
    assert values_of(vectors) == [10, 1, 2, 3, 4, 5]


def test_what_was_read_ahead_of_a_write_is_read_again(tmp_path):
    home, transport, vectors = gated_home(tmp_path, buffers=2)
    for _ in range(4):
        transport.events.list.clear()
        transport.held.add("read")
        vectors[0].prefetch()
        with vectors[0].at_hand(reads=False, writes=True) as values:
            values.fill_(7)
            transport.let_all_go()
            transport.events.wait("read", 0, "ends")
        assert values_of(vectors[:1]) == [7]
    assert home.nbytes <= 3 * PAGE, "buffers come back"


def test_a_vector_that_is_dropped_goes_at_once_and_its_place_when_it_has_been_written(tmp_path):
    home, transport, vectors = gated_home(tmp_path)
    transport.held.add("write")
    update(vectors[5:])
    dropped = weakref.ref(vectors.pop())
    gc.collect()
    assert dropped() is None
    size, others = home.swap.nbytes, [home.vector(NUMEL, torch.float32)]
    assert home.swap.nbytes == size + PAGE
    transport.let_all_go()
    home.flush()
    others.append(home.vector(NUMEL, torch.float32))
    assert home.swap.nbytes == size + PAGE


@pytest.mark.parametrize("pages", [1, 3], ids="buffers of {} pages".format)
@pytest.mark.parametrize("start, stop", [(5, NUMEL + 7), (5, 2 * NUMEL), (NUMEL, NUMEL + 7)])
def test_parts_of_pages_keep_what_lies_beside_them_and_are_there_where_all_of_it_was_read_ahead(
    tmp_path, start, stop, pages
):
    with SwapFile(tmp_path, 0) as swap:
        home, want = NvmeHome(swap, pages * PAGE, 6), torch.arange(3.0 * NUMEL)
        vector = home.hold(want)
        vector.prefetch()
        with vector.at_hand(start, stop, reads=False, writes=True) as part:
            part.fill_(-1)
        want[start:stop] = -1
        with vector.at_hand() as values:
            assert torch.equal(values, want)


def test_parts_beside_others_that_are_being_written_are_written_and_read_and_stay_read(tmp_path):
    home, transport, others = gated_home(tmp_path)
    vector = home.hold(torch.arange(4.0).repeat_interleave(NUMEL))
    home.flush()
    transport.events.list.clear()
    transport.held.add("write")
    vector.prefetch(0, NUMEL)
    vector.prefetch(3 * NUMEL)
    for start in (NUMEL, 2 * NUMEL):
        with vector.at_hand(start, start + NUMEL, reads=False, writes=True) as part:
            part.fill_(7)
    found = []
    for start in (0, 3 * NUMEL, 0, 3 * NUMEL):  # read ahead, then again
        with vector.at_hand(start, start + NUMEL) as part:
            found.append(part[0].item())
    reads = [event for event in transport.events.list if event[0] == "read" and event[2] == "starts"]
    transport.let_all_go()
    assert found == [0, 3, 0, 3] and len(reads) == 4


def test_who_reads_more_than_was_written_waits_for_the_write(tmp_path):
    make, made = gated()
    home = NvmeHome(SwapFile(tmp_path, 0, transport=make), 3 * PAGE, 6)
    vector = home.hold(torch.zeros(3 * NUMEL))
    home.flush()
    made[0].held.add("write")
    with vector.at_hand(NUMEL, 2 * NUMEL, reads=False, writes=True) as part:
        part.fill_(1)
    threading.Timer(0.1, made[0].let_all_go).start()
    with vector.at_hand() as values:
        assert values.view(3, NUMEL).sum(1).tolist() == [0, NUMEL, 0]


def test_nothing_is_read_or_written_of_an_empty_part(tmp_path):
    home, transport, vectors = gated_home(tmp_path)
    for vector, place in ((home.hold(torch.empty(0)), (0, None)), (vectors[0], (5, 5))):
        vector.prefetch(*place)
        with vector.at_hand(*place, writes=True) as part:
            assert part.shape == (0,) and part.dtype == torch.float32
        vector.free()
    home.flush()
    assert not transport.events.list


def test_a_vector_is_here_when_all_of_it_has_been_read(tmp_path):
    home, transport, vectors = gated_home(tmp_path)
    transport.held.add("read")
    vectors[0].prefetch()
    assert not vectors[0].is_here
    transport.let_all_go()
    home.swap.close()  # waits for it
    assert vectors[0].is_here and not vectors[1].is_here


def test_the_buffer_of_what_was_read_ahead_comes_back_with_a_vector_that_is_freed(tmp_path):
    home, transport, others = gated_home(tmp_path)
    for _ in range(10):
        transport.events.list.clear()
        vector = home.hold(torch.ones(NUMEL))
        vector.prefetch()
        transport.events.wait("read", len(others) * PAGE, "ends")
        vector.free()
    assert home.nbytes <= 6 * PAGE


def test_what_is_written_has_left_before_there_is_a_buffer_larger_than_the_others(tmp_path):
    home, transport, vectors = gated_home(tmp_path)
    transport.held.add("write")
    update(vectors[:1])
    threading.Timer(0.1, transport.let_all_go).start()
    home.take(2 * PAGE)
    assert ("write", 0, "ends") in transport.events.list


def test_what_is_written_does_not_stay_in_memory(tmp_path):
    """Also where it is larger than the buffers, and nobody has asked for the vector since."""
    with SwapFile(tmp_path, 0) as swap:
        home = home_of(swap)
        region, buffer = swap.allocate(PAGE), aligned_empty(PAGE)
        write = swap.write(region, buffer)
        write.then(lambda _, kept=buffer: None)
        write.wait()
        there = weakref.ref(buffer)
        del buffer
        vectors = [home.hold(torch.ones(64 * NUMEL)) for _ in range(3)]
        home.flush()
        with vectors[0].at_hand():
            pass
        assert home.take(1).nbytes == home.buffer_nbytes, "the larger one is gone"
    gc.collect()
    assert there() is None and home.nbytes <= 8 * home.buffer_nbytes and len(vectors) == 3
