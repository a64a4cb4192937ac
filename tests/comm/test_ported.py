"""`megazero.comm` under torch.distributed's names does what `deepspeed.comm` does: a ported script computes the same."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed

import megazero.comm
from megazero.comm import ported
from tests.ranks import run_ranks


def script(dist: Any) -> None:
    """Written for deepspeed.comm, on two ranks: every collective in DeepSpeed's order of arguments."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.is_available() and dist.is_initialized() and size == 2 and dist.get_local_rank() == rank
    own, other = torch.tensor([1.0 + rank]), torch.tensor([2.0 - rank])

    loss = own.clone()
    assert dist.all_reduce(loss) is None and loss.item() == 3.0
    dist.all_reduce(loss, op=dist.ReduceOp.MAX, group=dist.get_world_group())
    assert loss.item() == 3.0
    work = dist.all_reduce(loss, dist.ReduceOp.SUM, None, True)
    work.wait()
    assert loss.item() == 6.0

    parts = [torch.empty(1) for _ in range(size)]
    dist.all_gather(parts, own)
    assert torch.cat(parts).tolist() == [1.0, 2.0]
    whole = torch.empty(2)
    for gather in (dist.all_gather_into_tensor, dist.allgather_fn):
        gather(whole.zero_(), own)
        assert whole.tolist() == [1.0, 2.0]
    for scatter in (dist.reduce_scatter_tensor, dist.reduce_scatter_fn):
        part = torch.empty(1)
        scatter(part, torch.tensor([1.0, 10.0]) * own)
        assert part.item() == (3.0 if rank == 0 else 30.0)
    dist.reduce_scatter(part, [torch.ones(1), torch.zeros(1)])
    assert part.item() == (2.0 if rank == 0 else 0.0)
    dist.all_to_all_single(whole, torch.stack([own[0], 10 * own[0]]))
    assert whole.tolist() == ([1.0, 2.0] if rank == 0 else [10.0, 20.0])

    value = own.clone()
    dist.broadcast(value, 1)
    assert value.item() == 2.0
    dist.reduce(value, 0)
    assert rank or value.item() == 4.0
    gathered = [torch.empty(1), torch.empty(1)] if rank == 0 else None
    dist.gather(own, gathered, dst=0)
    assert rank or torch.cat(gathered).tolist() == [1.0, 2.0]
    dist.scatter(value, [torch.zeros(1), torch.ones(1)] if rank == 0 else None, src=0)
    assert value.item() == rank

    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    objects = ["first", 1] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, src=0)
    assert objects == ["first", 1]

    received = torch.empty(1)
    if rank == 0:
        dist.send(own, 1)
        dist.recv(received, 1)
    else:
        dist.recv(received, 0)
        dist.send(own, 0)
    assert torch.equal(received, other)
    operations = [dist.P2POp(dist.isend, own, 1 - rank), dist.P2POp(dist.irecv, received.zero_(), 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(received, other)

    groups = [dist.new_group([r]) for r in range(size)]
    mine = groups[rank]
    dist.all_reduce(own, group=mine)
    assert own.item() == 1.0 + rank and dist.get_world_size(mine) == 1 and dist.get_rank(mine) == 0
    assert dist.get_global_rank(mine, 0) == rank and dist.get_rank(groups[1 - rank]) == -1
    dist.barrier()
    dist.barrier(group=mine)
    dist.monitored_barrier()


def with_deepspeeds_keywords(dist: Any) -> None:
    """DeepSpeed's own names of arguments, and its profiler's, where they are not torch's."""
    rank, profiler = dist.get_rank(), {"prof": True, "log_name": "mine", "debug": "here"}
    value, whole, part = torch.tensor([1.0 + rank]), torch.empty(2), torch.empty(1)
    dist.all_gather_into_tensor(output_tensor=whole, tensor=value, **profiler)
    assert whole.tolist() == [1.0, 2.0]
    dist.reduce_scatter_tensor(output_tensor=part, tensor=whole, **profiler)
    assert part.item() == 2.0 + 2 * rank
    dist.all_to_all_single(output=whole, tensor=whole.clone(), **profiler)
    dist.all_reduce(tensor=value, op=dist.ReduceOp.SUM, group=None, async_op=False, **profiler)
    assert value.item() == 3.0
    dist.broadcast(tensor=value, src=0, **profiler)
    dist.barrier(**profiler)


def ported_case() -> None:
    script(megazero.comm)
    with_deepspeeds_keywords(megazero.comm)


def test_a_script_for_deepspeeds_comm_computes_the_same():
    run_ranks(2, ported_case)


def test_a_barrier_over_nccl_is_told_the_device_that_it_takes(one_rank, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.distributed, "barrier", lambda group, async_op, device_ids: seen.append(device_ids))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    megazero.comm.barrier()
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    megazero.comm.barrier()
    megazero.comm.barrier(device_ids=[1])
    megazero.comm.barrier(None, False, [2])
    megazero.comm.leave_distributed()
    assert seen == [None, [3], [1], [2], [3]]


def test_names_of_torch_mean_what_torch_means():
    shared = {name for name in vars(megazero.comm) if callable(getattr(torch.distributed, name, None))}
    ours = {name for name in shared if name not in ported.__all__}
    assert ours == {"ProcessGroup", "Work"}, "a ported script would get a function of ours"
    for name in shared - ours:
        there = getattr(torch.distributed, name)
        assert inspect.unwrap(getattr(ported, name)) is inspect.unwrap(there), name
