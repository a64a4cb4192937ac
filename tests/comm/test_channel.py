"""Collectives of a channel: values, bits, order, counts, groups."""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
import threading
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from megazero import comm
from megazero.comm import join
from megazero.comm.lane import ThreadLane
from megazero.comm.shared_memory import area_bytes
from tests.comm.ways import PIECE_BYTES, WAYS, open_channel
from tests.ranks import run_ranks

comm_world = importlib.import_module("megazero.comm.world")  # comm.world is a function of it
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


def numels(size, dtype):
    """One element per part, less than a piece, a piece, one more, several pieces with an odd rest."""
    piece = PIECE_BYTES // dtype.itemsize
    return [size * n for n in (1, piece - 1, piece, piece + 1, 5 * piece + 7)]


def random_buffer(numel, dtype, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    x = torch.randn(numel, generator=generator, dtype=torch.float64) * 10
    return x.to(dtype)


def ordered_sum(buffer):
    """The sum over the world in rank order, in fp32 for 16-bit floats, by one process."""
    terms = comm.all_gathered(buffer.view(torch.uint8), dist.group.WORLD)
    terms = [term.view(buffer.dtype) for term in terms]
    if buffer.dtype.itemsize == 2:
        terms = [term.float() for term in terms]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.to(buffer.dtype)


def bits_case(way):
    channel = open_channel(way)
    rank, size = channel.rank, channel.size
    for dtype in DTYPES:
        for numel in numels(size, dtype):
            mine = random_buffer(numel, dtype)
            want, n = ordered_sum(mine), numel // size
            own = slice(rank * n, (rank + 1) * n)
            reduced, scattered = mine.clone(), mine.clone()
            channel.all_reduce_(reduced).wait()
            assert torch.equal(reduced, want), (dtype, numel)
            channel.reduce_scatter_(scattered).wait()
            assert torch.equal(scattered[own], want[own]), (dtype, numel)
            channel.all_gather_(scattered).wait()
            assert torch.equal(scattered, want), (dtype, numel)
    channel.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_reduce_equals_reduce_scatter_then_all_gather_equals_the_sum_in_rank_order_bit_for_bit(size, way):
    run_ranks(size, bits_case, way)


def native_case():
    warnings.simplefilter("error", FutureWarning)  # torch's renamed operations
    channel = open_channel("native")
    rank, size = channel.rank, channel.size
    mine = random_buffer(size * 1001, torch.float32)
    want = ordered_sum(mine)
    own = slice(rank * 1001, (rank + 1) * 1001)
    reduced, scattered = mine.clone(), mine.clone()
    channel.all_reduce_(reduced).wait()
    channel.reduce_scatter_(scattered).wait()
    torch.testing.assert_close(reduced, want)
    torch.testing.assert_close(scattered[own], want[own])
    channel.all_gather_(scattered).wait()
    torch.testing.assert_close(scattered, want)


def test_native_collectives_work_in_place():
    run_ranks(3, native_case)


def copies_case(way):
    channel, rank = open_channel(way), dist.get_rank()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint32):
        want = torch.arange(2 * 3).to(dtype)
        gathered = torch.where(torch.arange(6) // 3 == rank, want.view(-1).float(), -1).to(dtype)
        channel.all_gather_(gathered).wait()
        sent = want if rank == 1 else torch.zeros_like(want)
        for shape in ((6,), (2, 3)):
            comm.broadcast_(sent.view(shape), dist.group.WORLD, 1)
        assert torch.equal(gathered.float(), want.float()) and torch.equal(sent.float(), want.float()), dtype
    comm.broadcast_(torch.tensor(1.0), dist.group.WORLD)  # without dimensions
    channel.close()


@pytest.mark.parametrize("way", [*WAYS, "native"])
def test_copies_of_dtypes_that_no_backend_knows(way):
    run_ranks(2, copies_case, way)


def shared_communicators_case():
    def known() -> int:
        return len(dist.distributed_c10d._world.pg_map)

    before = known()
    one, counts = open_channel("native"), [known()]
    other = open_channel("native")
    counts.append(known())
    sets = open_channel("native", shard_size=2)
    counts.append(known())
    assert counts[1] == counts[0] == before + 1 < counts[2], "the second channel has the communicator of the first one"
    buffers = [torch.full([4], 1.0 + dist.get_rank()) for _ in range(3)]
    works = [channel.all_reduce_(buffer) for channel, buffer in zip((one, other, sets), buffers, strict=True)]
    for work, buffer in zip(works, buffers, strict=True):
        work.wait()
        assert buffer.eq(10).all()
    assert one.traffic["all_reduce"].collectives == other.traffic["all_reduce"].collectives == 1


def test_channels_of_one_group_have_one_communicator_in_common():
    run_ranks(4, shared_communicators_case)


def lanes_case(way):
    channel = open_channel(way)
    rank, size, n, count = channel.rank, channel.size, 333, 30
    reductions = [torch.full([size * n], float((rank + 1) * (i + 1))) for i in range(count)]
    gathers = [torch.full([size * n], float(100 * rank + i)) for i in range(count)]
    order = ["reduce"] * count + ["gather"] * count
    random.Random(rank).shuffle(order)  # another on every rank
    works, reduced, gathered = [], iter(range(count)), iter(range(count))
    for kind in order:
        if kind == "gather":
            works.append(channel.all_gather_(gathers[next(gathered)]))
        else:
            i = next(reduced)
            works.append((channel.all_reduce_ if i % 2 else channel.reduce_scatter_)(reductions[i]))
    random.Random(rank + 7).shuffle(works)
    for work in works:
        work.wait()
    ranks_sum = size * (size + 1) / 2
    for i in range(count):
        part = slice(None) if i % 2 else slice(rank * n, (rank + 1) * n)
        assert (reductions[i][part] == ranks_sum * (i + 1)).all()
        assert gathers[i].view(size, n).eq(torch.arange(size)[:, None] * 100.0 + i).all()
    channel.close()


@pytest.mark.parametrize("way", WAYS)
def test_reductions_and_gathers_in_flight_in_another_order_on_every_rank(way):
    run_ranks(3, lanes_case, way)


def inference_case(way):
    """A lane's thread has its own mode; what it keeps from one caller's mode must serve the other's."""
    channel = open_channel(way)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            x = torch.arange(4.0)
            for work in (channel.reduce_scatter_, channel.all_gather_, channel.all_reduce_):
                work(x).wait()
        assert x.tolist() == [0.0, 4.0, 8.0, 12.0] and x.is_inference() == (mode is torch.inference_mode)
    x += 1
    channel.close()


@pytest.mark.parametrize("way", WAYS)
def test_buffers_that_were_made_in_inference_mode(way):
    run_ranks(2, inference_case, way)


def worlds_of_scripts_case(path, backend):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # the other one may still connect
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size)
    channel = comm.Channel(comm.world())
    x, y = torch.ones(2 * size), torch.full([2 * size], float(rank))
    issue = [lambda: channel.reduce_scatter_(x, "x"), lambda: channel.all_gather_(y, "y")]
    for work in [one() for one in (issue[::-1] if rank else issue)]:
        work.wait()
    assert x[2 * rank] == size and y.tolist() == [float(i // 2) for i in range(2 * size)]
    return channel.transport


@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
def test_a_world_with_a_backend_for_each_kind_of_device_has_the_channel_of_this_ones(backend, tmp_path):
    assert run_ranks(2, worlds_of_scripts_case, str(tmp_path / "world"), backend) == ["shared memory"] * 2


def unserved_case():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_world, "local_device", lambda: torch.device("xla", 0))
        with pytest.raises(ValueError, match=r"computes on xla:0, and its process group has backends for cpu, .* only"):
            comm.Channel(comm.world())


def test_a_group_that_does_not_serve_the_device_is_refused():
    run_ranks(2, unserved_case)


def objects_case():
    rank, size, told = dist.get_rank(), dist.get_world_size(), []
    gather = dist.all_gather_object
    dist.all_gather_object = lambda out, value, group: told.append(value) or gather(out, value, group=group)
    odd = dist.new_group([1, 2, 3])
    assert comm.all_gathered_objects(("alike", 1.5, None)) == [("alike", 1.5, None)] * size and not told
    one_differs = [0] * (size - 1) + [1]
    assert comm.all_gathered_objects(one_differs[rank]) == one_differs and told.pop() == one_differs[rank]
    assert comm.all_gathered_objects(rank) == list(range(size)) and told.pop() == rank
    if rank in (1, 2, 3):
        assert comm.all_gathered_objects(rank > 0, odd) == [True] * 3 and not told
        assert comm.all_gathered_objects(str(rank), odd) == ["1", "2", "3"]
    assert comm.largest_of_each([rank, -rank, -1 << 62, rank == 1]) == [size - 1, 0, -1 << 62, 1]


@pytest.mark.parametrize("size", [4, 6])
def test_objects_that_all_ranks_have_alike_are_not_sent_however_many_ranks_there_are(size):
    run_ranks(size, objects_case)


def sockets():
    paths = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(path) and os.readlink(path).startswith("socket:") for path in paths)


def object_group_case(most):
    comm_world.MOST_IN_MESH = most
    before = sockets()
    group = comm.new_object_group()
    made = sockets() - before
    dist.barrier()  # the exchange of who is ahead connects it with the others
    assert comm.all_gathered_objects(dist.get_rank(), group) == list(range(dist.get_world_size()))
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    return made


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")
def test_ranks_of_a_large_world_do_not_connect_with_every_other_one_to_exchange_objects():
    assert min(run_ranks(4, object_group_case, 4)) >= 3
    assert max(run_ranks(4, object_group_case, 3)) <= 1, "a place to be called at"


def test_a_rank_takes_its_device_also_where_the_script_has_joined(one_rank, monkeypatch):
    taken, current = [], [0]
    for name in AS_IT_WAS:
        monkeypatch.setenv(name, "as it was")
    played = {"is_available": lambda: True, "device_count": lambda: 4, "current_device": lambda: current[-1]}
    for name, value in {**played, "set_device": taken.append}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    comm.init_distributed()
    assert taken == [], "nobody has numbered it: the script may have set a device itself"
    monkeypatch.setenv("LOCAL_RANK", "6")
    comm.init_distributed()
    assert taken == [2]
    current.append(3)
    comm.init_distributed()
    assert taken == [2], "the script has made another one current"
    monkeypatch.setattr(dist.group.WORLD, "bound_device_id", torch.device("cuda", 1))
    comm.init_distributed()
    assert taken == [2, torch.device("cuda", 1)], "the script has bound one to the world"


@pytest.mark.parametrize("older", [None, "0"])
def test_torch_records_collectives_over_nccl_unless_the_user_has_chosen(monkeypatch, older):
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    for name in (*names, "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "before")  # so that it is put back
        monkeypatch.delenv(name)
    if older is not None:
        monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", older)
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("_take_device", "_join_by_environment"):
        monkeypatch.setattr(join, name, lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.append([os.environ.get(n) for n in names]))
    comm.init_distributed("nccl", init_method="file:///unused", rank=0, world_size=1)
    assert seen[0] == (["2000", None, "1"] if older is None else [None, older, "1"])


@pytest.mark.parametrize(
    ("release", "chosen", "name"),
    [
        ("2.8.0", None, "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.9.1+cu128", None, "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.10.0", None, "PYTORCH_ALLOC_CONF"),
        ("2.13.0", "PYTORCH_ALLOC_CONF", None),
        ("2.13.0", "PYTORCH_CUDA_ALLOC_CONF", None),
    ],
)
def test_torch_grows_its_segments_unless_the_user_has_chosen(monkeypatch, release, chosen, name):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for each in names:
        monkeypatch.setenv(each, "before")  # so that it is put back
        monkeypatch.delenv(each)
    if chosen is not None:
        monkeypatch.setenv(chosen, "max_split_size_mb:64")
    monkeypatch.setattr(torch, "__version__", TorchVersion(release))
    join._grow_segments()
    found = {each: os.environ[each] for each in names if each in os.environ}
    assert found == ({name: "expandable_segments:True"} if chosen is None else {chosen: "max_split_size_mb:64"})


MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
AS_IT_WAS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "PYTORCH_ALLOC_CONF")


def play_rank_on_two_gpus(monkeypatch, rank: int, local_rank: int, world_size: int) -> None:
    played = {"is_available": lambda: True, "device_count": lambda: 2, "current_device": lambda: local_rank % 2}
    for name, value in {**played, "set_device": lambda _: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    for name, value in {**ranks, **MEETING, **dict.fromkeys(AS_IT_WAS, "as it was")}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "said",
    [
        "Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 1b000",
        # from NCCL 2.30 on
        "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.",
    ],
)
def test_more_ranks_than_gpus_over_nccl_are_told_what_to_change(monkeypatch, said):
    def init(*_, **__):
        raise dist.DistBackendError(f"...\nLast error:\n{said}")

    play_rank_on_two_gpus(monkeypatch, rank=2, local_rank=2, world_size=4)
    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(
        ValueError,
        match="rank 2: another rank has the same GPU, cuda:0.*each. Start as many.*as it has GPUs, of which 2 are",
    ):
        comm.init_distributed()
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ValueError, match="another rank has the same GPU, cuda:0.*LOCAL_RANK, .*, is not set. Start"):
        comm.init_distributed()


@pytest.mark.parametrize(("world_size", "bound"), [(1, None), (2, torch.device("cuda", 1))])
def test_a_world_over_nccl_is_bound_to_devices_unless_it_is_one_rank(monkeypatch, world_size, bound):
    seen = []
    play_rank_on_two_gpus(monkeypatch, rank=0, local_rank=1, world_size=world_size)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: seen.append((backend, how["device_id"])))
    comm.init_distributed()
    assert seen == [("nccl", bound)]


def test_what_lies_in_host_memory_is_gathered_by_way_of_the_device_over_nccl(monkeypatch):
    collectives, sent = importlib.import_module("megazero.comm.collectives"), []

    def all_gather(out, x, group):
        sent.extend(each.device.type for each in (x, *out))
        out[:] = [torch.full(x.shape, float(rank)) for rank in range(group.size())]  # as meta tensors have no values

    monkeypatch.setattr(collectives, "backend_of", lambda _: "nccl")
    monkeypatch.setattr(collectives, "local_device", lambda: torch.device("meta"))
    monkeypatch.setattr(dist, "all_gather", all_gather)
    parts = comm.all_gathered(torch.zeros(2, 3), SimpleNamespace(size=lambda: 2))
    assert sent == ["meta"] * 3
    assert [part.tolist() for part in parts] == [[[0.0] * 3] * 2, [[1.0] * 3] * 2]


def subset_case(way):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    channel = open_channel(way, groups[rank % 2])
    second = open_channel(way, groups[rank % 2])  # two channels of one group do not mix
    assert (channel.rank, channel.size) == (rank // 2, 2)
    x, y = torch.full([2000], 1.0 + rank), torch.full([2000], 10.0 + rank)
    works = [channel.all_reduce_(x), second.all_reduce_(y)]
    channel.meet("both")
    for work in reversed(works):
        work.wait()
    assert (x == (4 if rank % 2 == 0 else 6)).all() and (y == (22 if rank % 2 == 0 else 24)).all()
    third = open_channel(way, groups[rank % 2]) if rank % 2 else None  # the others of the world need not come
    if third:
        third.all_gather_(x).wait()
    channel.close()


@pytest.mark.parametrize("way", WAYS)
def test_strided_groups_work_at_the_same_time(way):
    run_ranks(4, subset_case, way)


def traffic_case():
    channel = open_channel("shared memory")
    for _ in range(2):
        channel.all_reduce_(torch.ones(12)).wait()
        channel.reduce_scatter_(torch.ones(24)).wait()
        channel.all_gather_(torch.ones(36)).wait()
    counts = {kind: (t.collectives, t.elements) for kind, t in channel.traffic.items()}
    channel.reset_traffic()
    return counts, {t.elements for t in channel.traffic.values()}


def test_traffic_is_what_a_rank_sends():
    for size, counts in ((1, [(0, 0)] * 3), (3, [(2, 2 * 16), (2, 2 * 16), (2, 2 * 24)])):
        for got, after_reset in run_ranks(size, traffic_case):
            assert got == dict(zip(("all_reduce", "reduce_scatter", "all_gather"), counts, strict=True))
            assert after_reset == {0}


def test_the_memory_that_ranks_share_grows_with_their_number_and_not_with_its_square():
    assert area_bytes(2) == 2 << 20 and area_bytes(17) == area_bytes(128) == 8 << 20


def test_a_group_of_one_does_nothing(one_rank):
    channel, x = comm.Channel(dist.group.WORLD), torch.ones(5)
    for collective in (channel.all_reduce_, channel.reduce_scatter_, channel.all_gather_):
        collective(x).wait()
    channel.meet("alone")
    channel.close()
    assert x.eq(1).all()


def refusals_case():
    channel = comm.Channel(dist.group.WORLD)
    for bad in (torch.ones(3), torch.ones(2, 2), torch.ones(8)[::2]):
        with pytest.raises(ValueError, match="contiguous 1-D buffer of a multiple of 2 elements"):
            channel.all_reduce_(bad)
    channel.all_reduce_(torch.ones(0)).wait()
    channel.close()
    with pytest.raises(RuntimeError, match="all_gather on rank . of ranks .0, 1.: the channel is closed"):
        channel.all_gather_(torch.ones(2))


def test_bad_buffers_and_closed_channels_are_refused():
    run_ranks(2, refusals_case)


def threads_case():
    torch.set_num_threads(2)
    channel, x = comm.Channel(dist.group.WORLD), torch.ones(2, requires_grad=True)
    channel.all_reduce_(x.detach()).wait()
    return torch.get_num_threads()


def test_a_channel_leaves_the_thread_count_of_its_caller():
    assert run_ranks(2, threads_case) == [2, 2]


def test_a_lane_whose_thread_cannot_start_says_nothing_else(monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start new thread"):
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        ThreadLane(Mock(), "rank 0")
    gc.collect()
    assert not unraisable


def sets_case(way, shard_size):
    channel, kind = open_channel(way, shard_size=shard_size), "native" if way == "native" else f"{way} in sets of 2"
    rank, world = dist.get_rank(), dist.get_world_size()
    assert channel.transport.startswith(kind) and channel.num_ranks == world
    assert (channel.set_rank, channel.rank) == divmod(rank, shard_size)
    for n in (1, 7, 1001):  # less than there are sets, odd, several pieces
        mine = torch.arange(shard_size * n) + 1000.0 * rank  # integers: every order of the sum gives the same bits
        want, own = world * torch.arange(shard_size * n) + 1000.0 * sum(range(world)), slice(channel.rank * n, None)
        reduced, scattered = mine.clone(), mine.clone()
        works = [channel.reduce_scatter_(scattered, "scattered"), channel.all_reduce_(reduced, "reduced")]
        works[0].wait()
        assert torch.equal(scattered[own][:n], want[own][:n]), n
        gather = channel.all_gather_(scattered, "gathered")
        for work in (works[1], gather):
            work.wait()
        assert torch.equal(reduced, want) and torch.equal(scattered, want), n
    channel.meet("the end")
    channel.reset_traffic()
    channel.reduce_scatter_(torch.ones(shard_size * 12)).wait()
    channel.all_gather_(torch.ones(shard_size * 12)).wait()
    sets, counts = world // shard_size, channel.traffic
    assert counts["all_gather"].elements == 12 * (shard_size - 1)
    assert counts["reduce_scatter"].elements == 12 * (shard_size - 1) + 2 * 12 * (sets - 1) // sets
    channel.close()


@pytest.mark.parametrize("way", [*WAYS, "native"])
@pytest.mark.parametrize("size", [4, 6])
def test_sets_of_ranks_gather_within_and_sum_over_all(size, way):
    run_ranks(size, sets_case, way, 2)


def other_groups_case(way, by_members):
    """Some ranks are in groups of the script's own: torch names a new one after how many a process is in, or has heard of."""
    for ranks in ([0], [3], [3]) if by_members else ([0], [0, 1], [3]):
        if not by_members or dist.get_rank() in ranks:
            dist.new_group(ranks, use_local_synchronization=by_members)
    sets_case(way, 2)


@pytest.mark.parametrize("by_members", [False, True])
@pytest.mark.parametrize("way", ["point to point", "native"])
def test_ranks_that_are_in_different_numbers_of_groups_open_a_channel(way, by_members):
    run_ranks(4, other_groups_case, way, by_members, timeout_s=30.0)


def successive_case(way):
    groups, held = dist.distributed_c10d._world.pg_names, []
    for _ in range(3):
        sets_case(way, 2)
        held.append((len(groups), len(os.listdir("/dev/fd"))))
    assert held == held[:1] * 3, "a group has threads and sockets, and stays as long as the world"


@pytest.mark.parametrize("way", [*WAYS, "native"])
def test_channels_with_sets_that_come_and_go_have_their_groups_in_common(way):
    run_ranks(4, successive_case, way)


def uneven_case():
    with pytest.raises(ValueError, match="shard_size=2 does not divide a group of 3 ranks"):
        comm.Channel(dist.group.WORLD, shard_size=2)


def test_sets_of_unequal_size_are_refused():
    run_ranks(3, uneven_case)


def cuda_case():
    channel = comm.Channel(dist.group.WORLD)
    x = torch.full([1000], 1.0 + channel.rank, device="cuda")
    y = torch.full([1000], 1.0 + channel.rank, device="cuda")
    works = [channel.all_reduce_(x), channel.all_gather_(y)]
    if channel.rank:
        works.reverse()
    for work in works:
        work.wait()
    assert x.eq(3).all() and y.view(2, -1).eq(torch.tensor([[1.0], [2.0]], device="cuda")).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_buffers_on_gloo():
    run_ranks(2, cuda_case)
