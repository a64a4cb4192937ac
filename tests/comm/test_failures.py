"""What a rank hears when another one is late, absent, somewhere else, or dead."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import resource
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from megazero import comm
from megazero.comm import lane, links, meeting, shared_memory
from megazero.comm.meeting import Meeting
from tests.comm.ways import WAYS, open_channel
from tests.ranks import run_ranks


def failure_of(work):
    """(message, seconds) of a wait that raises."""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        work.wait()
    return str(caught.value), time.monotonic() - start


def absent_case(way, finished):
    """The second rank comes when the first one has failed, however long that takes."""
    group = dist.new_group([1, 2], timeout=timedelta(seconds=1.5))  # its own: gloo's groups do not survive a timeout
    if dist.get_rank() == 0:
        return None
    channel = open_channel(way, group)
    assert channel.timeout_s == 1.5
    if channel.rank == 1:
        while not finished.exists():
            time.sleep(0.02)
        return None
    failures = [failure_of(channel.all_reduce_(torch.ones(6))), failure_of(channel.reduce_scatter_(torch.ones(4)))]
    finished.touch()
    return failures


@pytest.mark.parametrize("way", WAYS)
def test_an_absent_rank_is_reported_after_the_timeout(way, tmp_path):
    (first, seconds), (second, no_seconds) = run_ranks(3, absent_case, way, tmp_path / "finished")[1]
    said = r"all_reduce of 6 elements \(torch.float32\) on rank 1 of ranks \[1, 2\] failed after (\d+\.\d) s"
    assert 1 < float(re.match(said, first)[1]) < seconds + 0.1 and no_seconds < 1
    assert second.startswith("reduce_scatter of 4 elements (torch.float32) on rank 1 of ranks [1, 2] was not started")
    if way == "shared memory":
        assert first.endswith("rank 2 did not come within 1.5 s")
    if way == "point to point":
        assert re.search(r" s: rank 2: .*Timed out waiting 1500ms", first)


def absent_from_sets_case():
    channel = open_channel("point to point", dist.new_group(timeout=timedelta(seconds=1.5)), shard_size=2)
    return None if dist.get_rank() == 3 else failure_of(channel.all_reduce_(torch.ones(8)))[0]


def test_a_rank_that_is_absent_from_its_set_is_reported_after_the_timeout_of_the_group():
    of_other_set, of_same_set = run_ranks(4, absent_from_sets_case, timeout_s=30.0)[1:3]
    for message in (of_other_set, of_same_set):
        assert re.search(r" s: rank 3: .*Timed out waiting 1500ms", message), message


def other_collective_case(way):
    channel = open_channel(way)
    if channel.rank == 0:
        return failure_of(channel.all_reduce_(torch.ones(6)))[0]
    return failure_of(channel.reduce_scatter_(torch.ones(channel.size * 4)))[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_call_different_collectives_are_told(way, size):
    for message in run_ranks(size, other_collective_case, way):
        assert "Issue the same collectives in the same order" in message


def other_name_case(way, names):
    """In a group without the first rank: ranks are named by their number in the world."""
    group = dist.new_group(list(range(1, dist.get_world_size())))
    if dist.get_rank() == 0:
        return None
    channel, x = open_channel(way, group), torch.ones(6)
    message, seconds = failure_of(channel.all_gather_(x, name=names[min(channel.rank, 1)]))
    return message, seconds


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3])
def test_equal_collectives_of_other_names_are_told_apart_on_all_ranks(way, size):
    heard = run_ranks(size + 1, other_name_case, way, ("blocks.0", "blocks.3"))[1:]
    for rank, (message, seconds) in enumerate(heard, 1):
        mine, other, peers = ("blocks.0", "blocks.3", "[23]") if rank == 1 else ("blocks.3", "blocks.0", "1")
        assert seconds < 5
        assert message.startswith(f"all_gather of {mine}, 6 elements (torch.float32) on rank {rank} of ranks")
        assert re.search(rf" rank {peers} is in all_gather of {other}, 6 elements \(torch.float32\)", message)
        assert f" while this rank is in all_gather of {mine}, 6 elements (torch.float32)" in message


@pytest.mark.parametrize("way", WAYS)
def test_long_names_that_differ_at_their_end_only_are_told_apart(way):
    for message, _ in run_ranks(3, other_name_case, way, ("\u00e4" * 300 + "0", "\u00e4" * 300 + "1"))[1:]:
        assert "Issue the same collectives in the same order" in message


def meet_case(present):
    channel = open_channel("shared memory", dist.new_group(timeout=timedelta(seconds=1)))
    channel.meet("first")
    if channel.rank not in present:
        time.sleep(2)
        return None
    with pytest.raises(RuntimeError) as caught:
        channel.meet("full_grad('wte')")
    return str(caught.value)


def test_meet_names_the_ranks_that_did_not_come():
    messages = run_ranks(3, meet_case, (0, 2))
    for rank in (0, 2):
        assert messages[rank] == (
            f"full_grad('wte') was called on rank {rank}, but within 1 s not on ranks [1] of [0, 1, 2]. "
            "It was called on some ranks only: call it on every rank."
        )


def meet_world_case():
    for what in ("first", "second"):
        comm.meet_world(what, timeout_s=1.0)
    if dist.get_rank() == 0:
        time.sleep(2)
    comm.meet_world("build_datasets", timeout_s=7 * 24 * 3600.0)  # which has a limit of its own
    if dist.get_rank() == 1:
        time.sleep(2)
        return None
    with pytest.raises(RuntimeError) as caught:
        comm.meet_world("save_checkpoint", timeout_s=1.0)
    return str(caught.value)


def test_meetings_of_the_world_name_those_that_did_not_come():
    messages = run_ranks(3, meet_world_case)
    for rank in (0, 2):
        assert messages[rank].startswith(
            f"save_checkpoint was called on rank {rank}, but within 1 s not on ranks [1] of"
        )


def meet_mismatch_case():
    channel = open_channel("point to point")
    for i in range(5):
        channel.meet(f"meeting {i}")
    with pytest.raises(RuntimeError, match="Call the same on every rank"):
        channel.meet(f"save_checkpoint({dist.get_rank()})")


def test_meet_names_different_calls():
    run_ranks(2, meet_mismatch_case)


def meet_one_other_case():
    channel = open_channel("point to point")
    with pytest.raises(RuntimeError) as caught:
        channel.meet("step on rank tables" if dist.get_rank() == 1 else "save")
    channel.meet("after it")
    return str(caught.value)


def test_every_rank_hears_at_once_that_one_calls_something_else():
    messages = run_ranks(3, meet_one_other_case)
    assert messages[1].startswith("step on rank tables was called on rank 1, but save on rank ")
    for rank in (0, 2):
        assert messages[rank].startswith(f"save was called on rank {rank}, but step on rank tables on rank 1. Call the")


def late_case(said):
    """Rank 1 comes when another one has said that it is late."""
    meeting.PATIENCE_S = 1.5
    records = []
    meeting.logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: (records.append(record), said.touch())
    while dist.get_rank() == 1 and not said.exists():
        time.sleep(0.02)
    comm.meet_world("save_checkpoint", timeout_s=60.0)
    return [record.getMessage() for record in records]


def test_the_first_rank_of_a_meeting_says_who_is_late(tmp_path):
    of_0, of_1, of_2 = run_ranks(3, late_case, tmp_path / "said")
    (said,) = of_0 + of_1 + of_2
    first = 0 if of_0 else 2
    later = "1.5 s later not yet on ranks [1] of [0, 1, 2]; waiting for 60 s in all"
    assert said == f"save_checkpoint was called on rank {first}, and {later}"


def test_ranks_that_have_all_come_and_cannot_meet_are_told_why():
    store = Mock(wraps=dist.HashStore())
    store.set("1/1", "here")
    store.wait.side_effect = RuntimeError("Connection reset by peer")
    with pytest.raises(RuntimeError, match="called on rank 0, and the ranks could not meet: Connection reset by peer"):
        Meeting(store, [0, 1], 0, 1.0).hold("save")


class CountedStore:
    """A store that counts what it is asked."""

    def __init__(self, store):
        self._store, self.questions = store, 0

    def __getattr__(self, name):
        self.questions += 1
        return getattr(self._store, name)


def on_threads(functions):
    """Calls them at the same time."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("size", [4, 16])
def test_a_meeting_asks_the_store_equally_much_whatever_the_number_of_ranks(size):
    shared = dist.HashStore()
    stores = [CountedStore(shared) for _ in range(size)]
    meetings = [Meeting(store, list(range(size)), rank, 10.0) for rank, store in enumerate(stores)]
    for number in range(3):
        on_threads([partial(meeting.hold, f"meeting {number}") for meeting in meetings])
    assert max(store.questions for store in stores) <= 3 * 12
    assert shared.num_keys() == 2 * size + 3, "the last meeting's, and each rank's count"


def test_collectives_that_all_ranks_have_alike_are_not_read_from_the_store_by_any():
    shared, lines = dist.HashStore(), [f"all_gather of block {number}" for number in range(1000)]
    stores = [Mock(wraps=shared) for _ in range(4)]
    meetings = [Meeting(store, list(range(4)), rank, 10.0) for rank, store in enumerate(stores)]
    on_threads([partial(meeting.compare, "the first step", lines) for meeting in meetings])
    asked = {call.args[0] for store in stores for call in store.get.call_args_list}
    assert "the first step/digest" in asked and "the first step/lines" not in asked
    assert not shared.check(["the first step/lines"]) and not shared.check(["the first step/digest"])


def test_many_ranks_that_wait_in_vain_ask_the_store_little_and_say_little():
    shared, size, messages = dist.HashStore(), 64, {}
    ranks = [3 * rank for rank in range(size)]
    stores = {rank: CountedStore(shared) for rank in range(size) if rank != 41}

    def wait_in_vain(rank):
        with pytest.raises(RuntimeError) as caught:
            Meeting(stores[rank], ranks, rank, 1.0).hold("save")
        messages[rank] = str(caught.value)

    on_threads([partial(wait_in_vain, rank) for rank in stores])
    assert messages.keys() == stores.keys() and max(store.questions for store in stores.values()) <= 5 + 1 + 2 * 6
    for rank, message in messages.items():
        said = f"save was called on rank {3 * rank}, but within 1 s not on ranks [123] of [0, 3, 6, 9, 12, "
        assert message.startswith(said) and "45 and 48 more]. It was called" in message, message


def start_ranks(target, size, *args):
    """Processes without the harness, which takes a rank that ends early for a failure; and what each sends, by rank."""
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [context.Process(target=target, args=(rank, size, *args, pipes[rank][1])) for rank in range(size)]
    for process in processes:
        process.start()
    return processes, [reader for reader, _ in pipes]


def join_world(rank, size, store, timeout_s):
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)


def mortal(rank, size, store, way, pipe):
    """The last rank dies in the middle of a run of all ranks but the first; each other one sends what it hears."""
    join_world(rank, size, store, timeout_s=60)
    group = dist.new_group(list(range(1, size)))
    if rank == 0:
        time.sleep(60)
    channel = open_channel(way, group)
    channel.all_reduce_(torch.ones(channel.size * 5000)).wait()
    if rank == size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.send(failure_of(channel.all_reduce_(torch.ones(channel.size))))
    os._exit(0)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_dies_ends_the_wait_of_the_others_at_once(way, tmp_path):
    processes, readers = start_ranks(mortal, 4, str(tmp_path / "store"), way)
    for reader in readers[1:-1]:
        assert reader.poll(60)
        message, seconds = reader.recv()
        assert message.startswith("all_reduce of 3 elements")
        assert seconds < 10, "not the timeout"
        if way == "shared memory":
            assert "rank 3 has ended, or closed its channel" in message
    for process in processes:
        process.kill()
        process.join()
    assert list(tmp_path.iterdir()) == [tmp_path / "store"]


def broken_case():
    channel = open_channel("shared memory")
    if channel.rank == 1:
        shared_memory.sum_ = Mock(side_effect=MemoryError("no memory"))
    work = channel.all_reduce_(torch.ones(2))
    with pytest.raises(RuntimeError) as caught:
        work.wait()
    return *failure_of(work), type(caught.value.__cause__)


def test_a_rank_whose_collective_fails_ends_the_wait_of_the_others_at_once():
    (other, seconds, _), (own, _, cause) = run_ranks(2, broken_case)
    assert own.endswith(": no memory") and cause is MemoryError and seconds < 5
    assert "rank 1 has ended, or closed its channel" in other


def parent(rank, size, store, end, pipe):
    """The last rank ends its channel, or dies, while a child that it has forked lives on; the other one sends what it hears."""
    join_world(rank, size, store, timeout_s=60)
    channel = open_channel("shared memory")
    channel.all_reduce_(torch.ones(size)).wait()
    if rank == size - 1:
        child = os.fork()
        if child == 0:
            time.sleep(15)
            os._exit(0)
        channel.all_reduce_(torch.ones(size)).wait()  # the child has not ended the parent's links
        pipe.send(child)
        if end == "close":
            channel.close()
            time.sleep(10)
        os.kill(os.getpid(), signal.SIGKILL)
    channel.all_reduce_(torch.ones(size)).wait()
    pipe.send(failure_of(channel.all_reduce_(torch.ones(size))))
    os._exit(0)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_channel_ends_for_the_others_although_a_forked_child_lives_on(end, tmp_path):
    processes, readers = start_ranks(parent, 2, str(tmp_path / "store"), end)
    assert readers[1].poll(60)
    child = readers[1].recv()
    assert readers[0].poll(60)
    message, seconds = readers[0].recv()
    assert seconds < 5 and "has ended, or closed its channel" in message
    os.kill(child, 0)  # is alive
    os.kill(child, signal.SIGKILL)
    for process in processes:
        process.kill()
        process.join()


def leaver(rank, size, store, way, pipe):
    """Rank 0 leaves with a collective under way that the others have not begun."""
    join_world(rank, size, store, timeout_s=60)
    channel = open_channel(way)
    if rank == 0:
        channel.all_reduce_(torch.ones(size))
    else:
        time.sleep(60)


@pytest.mark.parametrize("way", WAYS)
def test_a_collective_under_way_does_not_keep_a_process_from_ending(way, tmp_path):
    processes, _ = start_ranks(leaver, 2, str(tmp_path / "store"), way)
    processes[0].join()
    assert processes[0].exitcode == 0 and processes[1].is_alive()
    processes[1].kill()


def failing_call(number, function):
    """`function`, with an error at its call of that number."""
    calls = iter(range(1, 1000))

    def call(*args):
        if next(calls) == number:
            raise OSError("no memory")
        return function(*args)

    return call


def unmappable_case(step):
    records = []
    links.logger.addHandler(handler := logging.Handler())
    handler.emit = records.append
    if dist.get_rank() == 1:
        links._map = failing_call(step, links._map)
    channel = comm.Channel(dist.group.WORLD)
    x = torch.ones(4)
    channel.all_reduce_(x).wait()
    assert x.eq(2).all()
    return channel.transport, [record.getMessage() for record in records]


def several_hosts_case():
    links.host_identity = lambda: f"host of rank {dist.get_rank() // 2}"
    channel = comm.Channel(dist.group.WORLD)
    x = torch.ones(8)
    channel.all_reduce_(x).wait()
    return channel.transport, float(x.sum())


@pytest.mark.parametrize("step", [1, 2, 3, 4])  # own and peer's memory, of either lane
def test_all_ranks_go_point_to_point_if_one_cannot_map_its_peers(step):
    (transport, messages), other = run_ranks(2, unmappable_case, step)
    assert messages == ["no shared memory between the ranks of this host: rank 1 failed with OSError: no memory"]
    assert transport == "point to point" and other == (transport, [])


def few_files_case():
    """The limit leaves room for some connections, as 1024 does for 200 ranks on one host."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
    comm.init_distributed()
    return comm.Channel(dist.group.WORLD).transport


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")
def test_many_ranks_of_a_host_may_open_a_file_for_each_link():
    assert run_ranks(6, few_files_case) == ["shared memory"] * 6


def test_ranks_of_several_hosts_go_point_to_point():
    assert run_ranks(4, several_hosts_case) == [("point to point", 32.0)] * 4


def noted_case() -> None:
    lane._NOTED = 3
    for noted in (2, 3):
        channel = open_channel("native")
        for numel in range(2, 2 * noted + 2, 2):
            channel.all_gather_(torch.ones(numel), "block").wait()
        if noted < lane._NOTED:
            channel.compare_first()
        # After the comparison, or beyond the most that is noted.
        channel.all_gather_(torch.ones(12), f"on rank {channel.rank}").wait()
        channel.compare_first()
        channel.close()


def test_the_first_collectives_over_nccls_lane_are_compared_and_once():
    run_ranks(2, noted_case)


def other_noted_case(way: str, buffers: list[list[str]]) -> str:
    channel = open_channel(way)
    for name in buffers[channel.rank]:
        channel.all_gather_(torch.ones(6), name).wait()
    with pytest.raises(RuntimeError) as caught:
        channel.compare_first()
    return str(caught.value)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (
            ["a", "c"],
            "number 2 is all_gather of b, 6 elements (torch.float32) on rank 0, and all_gather of c, 6 elements ",
        ),
        (
            ["b", "a"],
            "number 1 is all_gather of a, 6 elements (torch.float32) on rank 0, and all_gather of b, 6 elements ",
        ),
    ],
)
def test_other_collectives_over_nccls_lane_are_named_on_every_rank(other, found):
    texts = run_ranks(3, other_noted_case, "native", [["a", "b"], ["a", "b"], other])
    assert len(set(texts)) == 1 and found in texts[0] and "on rank 2. Every rank must run" in texts[0]


def too_few_case() -> str:
    channel = open_channel("native")
    if channel.rank == 0:
        channel._reductions._noted.append("all_gather of b")  # as one that hangs for the others
    with pytest.raises(RuntimeError) as caught:
        channel.compare_first()
    return str(caught.value)


def test_a_rank_with_fewer_collectives_over_nccls_lane_is_named():
    assert "number 1 is all_gather of b on rank 0, and nothing more on rank 1." in run_ranks(2, too_few_case)[1]
