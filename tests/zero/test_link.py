"""Copies between host and device beside what it computes: numbers, order, and how long memory is kept, over pretended queues."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from megazero import comm, mpu
from megazero.nvme import PAGE, SwapFile
from megazero.zero.arrival import Arrival
from megazero.zero.home import MemoryHome
from megazero.zero.homes import TILE_MULTIPLE
from megazero.zero.link import (
    MOST_TO_DEVICE,
    MOST_TO_HOST,
    OUTBOX_BUFFERS,
    CudaCopyStream,
    Link,
    Outbox,
    Way,
)
from megazero.zero.nvme_home import NvmeHome
from megazero.zero.residency import GatherLimits
from tests.ranks import run_ranks
from tests.zero.models import Wide, compare, make_engine, my_batch, one_step, run, token_batches, train
from tests.zero.streams import DeviceStream, SlowStream, slow_link
from tests.zero.test_offload import homes

CPU = torch.device("cpu")


# ---- numbers: whatever has not been waited for has not happened


def numbers_case(path: str, stages: tuple[int, ...], options: dict) -> None:
    mpu.initialize_model_parallel(1)
    settings = {"sub_group_size": TILE_MULTIPLE, **options}
    engine_options = {k: settings.pop(k) for k in ("dtype", "micro", "optimizer") if k in settings} | {"steps": 2}
    for stage in stages:
        want = run(Wide, stage, clip_grad=0.5, zero=options_of(settings, {}), **engine_options)
        for home in homes(stage, path):
            if "delayed_param_update" in options and home["offload_optimizer"] == "none":
                continue
            delayed = options_of(settings, home)
            expected = want
            if "delayed_param_update" in options:  # its losses are those of the same update without a link
                expected = run(Wide, stage, clip_grad=0.5, zero=delayed, **engine_options)
            with slow_link() as log:
                got = run(Wide, stage, clip_grad=0.5, zero=delayed, **engine_options)
            compare(got, expected, f"stage {stage}, {home}", bitwise=True)
            is_used = home["offload_optimizer"] != "none"  # else the shards are master weights on the device
            assert bool(log) == is_used


def options_of(settings: dict, home: dict) -> dict:
    return {k: v for k, v in {**settings, **home}.items() if home or k != "delayed_param_update"}


@pytest.mark.parametrize(("world_size", "dtype"), [(1, torch.float32), (2, torch.bfloat16)], ids=str)
def test_every_home_over_a_slow_link_trains_as_without_it_bit_for_bit(world_size, dtype, tmp_path):
    run_ranks(world_size, numbers_case, str(tmp_path), (1, 2, 3), {"dtype": dtype})


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16, "micro": 2, "grad_dtype": "compute"},
        {"dtype": torch.bfloat16, "delayed_param_update": 1},
        {"optimizer": "sgd", "dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "gather_limits": GatherLimits(prefetch=60_000)},
    ],
    ids=str,
)
def test_every_home_over_a_slow_link_trains_as_without_it_with(options, tmp_path):
    run_ranks(2, numbers_case, str(tmp_path), (1, 2, 3), options)


# ---- order


def order_case(offload_param: str, stage: int = 3) -> list:
    """What happens in one step on 2 ranks, with the beginning of each block's forward and the end of its backward in it."""
    mpu.initialize_model_parallel(1)
    with slow_link() as log:
        options = {"offload_optimizer": "cpu", "offload_param": offload_param, "sub_group_size": TILE_MULTIPLE}
        engine = make_engine(Wide(), stage, zero=options, dtype=torch.bfloat16)
        dict(train(engine, token_batches(1, 1, 2)))
        for index, block in enumerate(engine.module.blocks):

            def before(_, inputs, index=index):
                log.append(("block", index))
                inputs[0].register_hook(lambda _: log.append(("block's backward", index)))

            block[0].register_forward_pre_hook(before)
        log.clear()
        loss = engine(my_batch())
        log.append(("backward",))
        engine.backward(loss)
        log.append(("step",))
        engine.step()
        engine.optimizer.finish()
        log.append(("end",))
        return list(log)


def test_shards_are_on_their_way_to_the_device_two_units_ahead():
    log = run_ranks(2, order_case, "cpu")[0]
    forward = log[: log.index(("backward",))]
    starts = [len(of("to device", "starts", forward[: forward.index(("block", i))])) for i in range(4)]
    # Before block i runs: root and blocks up to i + 1 are being gathered, and the shards of 1, 2, ... i + 3 have been sent for.
    assert starts == [1 + 2 + 3, 1 + 3 + 3, 1 + 4 + 3, 1 + 4 + 3]
    backward = log[len(forward) : log.index(("step",))]
    starts = [len(of("to device", "starts", backward[: backward.index(("block's backward", i))])) for i in range(4)]
    # The mirror. Block 3 has stayed; before its backward is over, block 2 is being gathered and the shards of 1 and 0 have been
    # sent for. Before those of 2 and 1 are, the shards of 1 and 0 are put into place.
    assert starts[::-1] == [1 + 2, 1 + 2 + 1, 1 + 2 + 2, 1 + 2 + 2]


def part_case() -> None:
    """The shards of two units after the next one are on the device, which do not run."""
    mpu.initialize_model_parallel(1)
    with slow_link():
        engine = make_engine(Wide(), 3, zero={"offload_optimizer": "cpu", "offload_param": "cpu"})
        loss = engine.module.blocks[0](torch.ones(1, 67)).sum()
        assert sum(len(bucket.weights.buffers) - 1 for bucket in engine.buckets) == 2
        engine.backward(loss)
        assert all(len(bucket.weights.buffers) == 1 for bucket in engine.buckets)


def test_a_shard_that_has_come_for_nothing_leaves_the_device_with_the_backward():
    run_ranks(2, part_case)


def of(stream: str, what: str, log: list) -> list[int]:
    """The places of such events."""
    return [event[2] for event in log if event[:2] == (stream, what)]


def lags(stream: str, log: list) -> set[int]:
    """How many works have been started since the one that the host waits for, itself included; at each wait."""
    last, found = 0, set()
    for event in log:
        last = event[2] if event[:2] == (stream, "starts") else last
        if event[:2] == (stream, "waits") and last:
            found.add(last - event[2] + 1)
    return found


def delayed_case() -> tuple[int, int, list]:
    """Most staged weights at a time, and the buckets; and what the link does at the end of a delayed update."""
    mpu.initialize_model_parallel(1)
    alive: list[weakref.ref] = []
    most = [0]
    empty = MemoryHome.empty

    def counted(home: MemoryHome, numel: int, dtype: torch.dtype) -> torch.Tensor:
        memory = empty(home, numel, dtype)
        if dtype == torch.bfloat16:  # states and gradients are fp32
            alive.append(weakref.ref(memory))
            most[0] = max(most[0], sum(tensor() is not None for tensor in alive))
        return memory

    with slow_link() as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryHome, "empty", counted)
        options = {"offload_optimizer": "cpu", "delayed_param_update": 1, "sub_group_size": TILE_MULTIPLE}
        engine = make_engine(Wide(), 2, zero=options, dtype=torch.bfloat16)
        dict(train(engine, token_batches(4, 1, 2)))
        assert len(alive) == 3 * len(engine.buckets), "the first update of four is not delayed"
        one_step(engine, token_batches(1, 1, 2)[0, 0, 0])
        log.clear()
        engine.optimizer.finish()
        return most[0], len(engine.buckets), list(log)


def test_the_weights_of_a_delayed_update_go_to_the_device_from_where_they_are_and_leave_their_memory_to_the_next_ones():
    for most, buckets, log in run_ranks(2, delayed_case):
        assert most == buckets
        starts = of("to device", "starts", log)
        assert len(starts) == buckets == len(of("to device", "joins", log))
        assert lags("to device", log) <= {MOST_TO_DEVICE}, "the host waits only to have few under way"


def test_a_gradient_has_a_blocks_backward_to_leave_in_before_the_host_waits_for_it():
    log = run_ranks(2, order_case, "none")[0]
    backward = log[log.index(("backward",)) : log.index(("step",))]
    starts, waits = of("to host", "starts", backward), of("to host", "waits", backward)
    assert len(starts) == 5 and not of("to host", "joins", backward)
    assert lags("to host", backward) == {MOST_TO_HOST} and waits == starts[:-MOST_TO_HOST]
    for place in waits[:-1]:  # the last one is waited for when all blocks are done
        events = backward[backward.index(("to host", "starts", place)) : backward.index(("to host", "waits", place))]
        assert [event for event in events if event[0] == "block's backward"], f"the device has computed beside {place}"


def test_new_weights_go_to_the_device_while_the_next_tile_is_updated():
    log = run_ranks(2, order_case, "none")[0]
    update = log[log.index(("step",)) : log.index(("end",))]
    starts = of("to device", "starts", update)
    assert len(starts) > 8 and of("to device", "joins", update) == starts
    assert lags("to device", update) == {OUTBOX_BUFFERS}


def test_whole_gradients_come_from_the_device_while_the_tile_before_is_updated():
    log = run_ranks(2, order_case, "none", 1)[0]
    update = log[log.index(("step",)) : log.index(("end",))]
    starts = [event[0] for event in update if event[1:2] == ("starts",)]
    tiles = len(starts) // 2
    assert tiles > 8 and starts == ["to host", *["to host", "to device"] * (tiles - 1), "to device"]


# ---- memory


@pytest.mark.parametrize("joins", [True, False])
def test_device_memory_is_kept_until_the_device_waits_and_host_memory_until_the_host_does(joins):
    log: list = []
    way = Way(SlowStream("to host", log), most=2)
    device, host = torch.ones(3), torch.zeros(3)
    there, here = weakref.ref(device), weakref.ref(host)
    crossing = way.start(lambda: None, on_device=[device], on_host=[host])
    del device, host
    gc.collect()
    assert there() is not None and here() is not None
    if joins:
        crossing.join()
        assert there() is None and here() is not None
    crossing.wait()
    assert there() is None and here() is None and crossing.is_over


def test_who_waits_for_a_crossing_lets_go_of_what_those_before_it_have_used():
    way = Way(SlowStream("to host", []), most=3)
    values = [torch.ones(3) for _ in range(3)]
    there = [weakref.ref(x) for x in values]
    crossings = [way.start(lambda: None, on_device=[x]) for x in values]
    del values
    gc.collect()
    crossings[1].join()
    assert [x() is None for x in there] == [True, True, False]


def test_a_shard_comes_from_the_drive_to_the_host_and_to_the_device_as_it_is_announced_and_stays_until_it_is_placed():
    at_once = SimpleNamespace(start=lambda work: work(), hold_back=lambda _: None, wait=lambda _: None)
    shard = SimpleNamespace(link=Link.over(CPU, (at_once, at_once)), is_here=False, numel=3, dtype=torch.float32)
    shard.at_hand = lambda: nullcontext(torch.ones(3))
    reads: list[None] = []

    def read() -> None:
        reads.append(None)
        shard.is_here = True

    shard.prefetch = read
    arrival, found = Arrival(CPU, comes_ahead=True), []
    for _ in range(3):
        arrival.prefetch(shard)
        found.append(arrival.ahead)
    assert len(reads) == 1 and found[0] is None and found[1] is found[2] is not None
    shard.link.to_device.finish()  # it is there
    part = torch.zeros(3)
    there = [weakref.ref(part), weakref.ref(found.pop())]
    found.clear()
    work = arrival.fill(shard, part, lambda: SimpleNamespace(wait=lambda: None))
    assert part.tolist() == [1, 1, 1] and arrival.ahead is None
    del part
    assert all(x() is not None for x in there), "whatever the memory is needed for next would come in between"
    work.wait()
    assert all(x() is None for x in there)
    arrival.prefetch(shard)
    arrival.settle()
    assert arrival.ahead is None, "what is written to the shard now would be missing in it"


def test_no_more_than_so_many_crossings_are_under_way():
    log: list = []
    way, done = Way(SlowStream("to host", log), most=2), []
    for index in range(5):
        way.start(lambda: None, then=lambda index=index: done.append(index))
    assert done == [0, 1, 2]
    way.finish()
    assert done == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [MemoryHome, NvmeHome])
def test_what_is_held_may_be_written_to_if_a_copy_was_asked_for(tmp_path, kind):
    to_host, values = SlowStream("to host", []), torch.arange(5.0)
    link = Link.over(CPU, (SlowStream("to device", []), to_host))
    home = MemoryHome(CPU, link=link) if kind is MemoryHome else NvmeHome(SwapFile(tmp_path, 0), PAGE, 2, link=link)
    with to_host.lock:  # no thread sends it yet
        vector = home.hold(values, copy=True)
        values.zero_()
    assert not vector.is_here
    with vector.at_hand() as got:
        assert torch.equal(got, torch.arange(5.0)) and vector.is_here == (kind is MemoryHome)


def test_the_outbox_has_two_buffers_of_what_was_asked_and_waits_before_it_fills_one_again():
    way = Way(DeviceStream("to device", []), most=3)
    box = Outbox(way, pin=False)
    target, want = torch.zeros(4, 6, dtype=torch.bfloat16), torch.arange(24.0).view(4, 6).bfloat16()
    taken = []
    for row, values in zip(target, want, strict=True):
        with box.fill(row) as filled:
            filled.copy_(values)
            taken.append(filled)
    assert not target[3].any() and box.nbytes == 2 * 6 * 2
    assert len({filled.data_ptr() for filled in taken}) == 2
    way.finish()
    assert torch.equal(target, want)
    with box.fill(target[0], [slice(0, 2), slice(5, 6)]) as filled:
        filled.fill_(7)
    way.finish()
    assert target[0].tolist() == [7, 7, 2, 3, 4, 7]


def memory_case(path: str) -> None:
    mpu.initialize_model_parallel(1)
    options = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": path, "sub_group_size": TILE_MULTIPLE}
    for make in (nullcontext, slow_link):
        with make():
            engine = make_engine(Wide(), 3, zero=options, dtype=torch.bfloat16)
            dict(train(engine, token_batches(1, 1, comm.world().size())))
            buffers = {home: home.nbytes for home in (engine.homes.param, engine.homes.optimizer)}
            assert engine.memory()["staging"] == sum(buffers.values()) and min(buffers.values()) > 0
            engine.destroy()


def test_buffers_of_nvme_are_in_the_engines_memory(tmp_path):
    run_ranks(1, memory_case, str(tmp_path))


# ---- what CUDA is asked for


class PretendedCuda:
    """Streams and events that record what is asked of them."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.current = self.Stream("compute")

    def Stream(self, name: object) -> PretendedCuda._Stream:  # noqa: N802
        return self._Stream(self, name)

    class _Stream:
        def __init__(self, cuda: PretendedCuda, name: object) -> None:
            self.cuda, self.name, self.device = cuda, name, name

        def wait_stream(self, other: PretendedCuda._Stream) -> None:
            self.cuda.log.append((self.name, "waits for the stream", other.name))

        def wait_event(self, event: PretendedEvent) -> None:
            self.cuda.log.append((self.name, "waits for what is recorded on", event.stream.name))

        def record_event(self, event: PretendedEvent) -> None:
            event.stream = self
            self.cuda.log.append((self.name, "records"))

        def synchronize(self) -> None:
            self.cuda.log.append((self.name, "is waited for by the host"))

    @contextmanager
    def stream(self, stream: PretendedCuda._Stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class PretendedEvent:
    def __init__(self, blocking: bool) -> None:
        assert blocking, "the host must not spin"


def test_a_cuda_stream_runs_behind_what_was_computed_and_holds_back_what_is_computed_next(monkeypatch):
    cuda = PretendedCuda()
    monkeypatch.setattr(torch.cuda, "Stream", cuda.Stream)
    monkeypatch.setattr(torch.cuda, "Event", PretendedEvent)
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: cuda.current)
    stream = CudaCopyStream("side")
    event = stream.start(lambda: cuda.log.append(("copies on", cuda.current.name)))
    stream.hold_back(event)
    assert cuda.log == [
        ("side", "waits for the stream", "compute"),
        ("copies on", "side"),
        ("side", "records"),
        ("compute", "waits for what is recorded on", "side"),
    ]
    cuda.log.clear()
    with pytest.raises(ZeroDivisionError):
        stream.start(lambda: 1 / 0)
    assert cuda.log[1:] == [("side", "is waited for by the host")], (
        "what it has issued may still read memory that is freed"
    )


def test_there_is_no_link_to_the_host_itself():
    assert Link.to(CPU) is None
