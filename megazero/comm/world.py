"""The world of ranks: its devices, groups of it, and small plain Python data that all of them exchange."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

ProcessGroup = dist.ProcessGroup

# By default gloo connects every rank with every other one. With about a thousand a process runs out of descriptors, and ranks
# refuse each other (gloo's issue 327); so in larger worlds than this a connection is made when it is needed.
MOST_IN_MESH = 256
_LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"  # torch asks it when a group is made
_WITH_STREAMS = ("cuda",)  # types of devices


class OtherRankError(RuntimeError):
    """Another rank has failed, so this one cannot continue either."""


def world() -> ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None, "init_distributed comes first"
    return group


def is_destroyed(group: ProcessGroup) -> bool:
    """Whether a script has ended the group by `destroy_process_group(group)`."""
    return group not in dist.distributed_c10d._world.pg_names


def local_device() -> torch.device:
    """The device that this process computes on: its CUDA device where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def has_streams(device: torch.device) -> bool:
    """Whether a device works asynchronously, in `torch.cuda`'s streams: what the host has given it may not be done yet."""
    return device.type in _WITH_STREAMS


def backend_of(group: ProcessGroup) -> str:
    """The backend, "nccl" or "gloo", of tensors on `local_device` in `group`; a group may have one for each type of device.

    Raises:
        ValueError: the group has no backend for this device.
    """
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    kind = local_device().type
    if kind not in backends:
        raise ValueError(
            f"rank {dist.get_rank()} computes on {local_device()}, and its process group has backends for "
            f"{', '.join(backends)} only. Join by megazero.comm.init_distributed(), or by init_process_group('nccl')."
        )
    return backends[kind]


@wraps(dist.barrier)
def barrier(group: ProcessGroup | None = None, async_op: bool = False, device_ids: list[int] | None = None) -> Any:
    """torch's. Over NCCL in a world that is bound to no device it is told the current one, which it would take with a warning."""
    is_world = group is None or group is dist.group.WORLD
    if device_ids is None and is_world and dist.get_backend() == "nccl" and world().bound_device_id is None:
        device_ids = [torch.cuda.current_device()]
    return dist.barrier(group, async_op, device_ids)


def all_gathered_objects(value: object, group: ProcessGroup | None = None) -> list:
    """`value` of every rank of `group` (the world by default): small plain Python data, never tensors.

    If all have the same, which ranks tell each other first, nothing else is sent, and the list has this rank's own object at all
    places: thousands of ranks would each receive, and unpickle, thousands of copies.
    """
    out = [value] * dist.get_world_size(group)
    digest = int.from_bytes(hashlib.blake2b(pickle.dumps(value), digest_size=7).digest(), "little")
    ends = [digest, -digest]
    if largest_of_each(ends, group) != ends:
        dist.all_gather_object(out, value, group=group)
    return out


def largest(value: int, group: ProcessGroup | None = None) -> int:
    """The largest `value` of the ranks of `group` (the world by default)."""
    return largest_of_each([int(value)], group)[0]


def largest_of_each(values: Sequence[int], group: ProcessGroup | None = None) -> list[int]:
    """At each place, the largest of what the ranks of `group` have there: as many integers of 64 bits on every rank."""
    devices = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    found = torch.tensor(values, dtype=torch.int64, device="cpu" if "cpu" in devices else local_device())
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return found.tolist()


def broadcast_object(value: Any) -> Any:
    """The first rank's `value`, on every rank of the world: plain Python data, which may be large, never tensors."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def even_out_groups(group: ProcessGroup) -> None:
    """Makes the ranks of `group` able to make further groups among themselves. Collective.

    If only its own ranks make a group, torch names it by the number of groups that each of them is in (from 2.14 on: has made or
    heard of). If a script has made groups of some ranks only, these numbers differ, and ranks would wait for each other under
    different names. So every rank makes groups of its own until it has as many as the rank with the most.
    """
    known = dist.distributed_c10d._world
    count = known.group_count if torch.__version__ >= "2.14" else len(known.pg_names)
    for _ in range(largest(count, group) - count):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def new_group_like(group: ProcessGroup, ranks: Sequence[int], timeout_s: float) -> ProcessGroup:
    """A group of these ranks of the world, with the backend of `group`. Collective over `ranks`.

    The ranks must be in equally many groups (see `even_out_groups`).

    It is collective over the whole world if the world is bound to devices, as `init_distributed` does for several ranks over
    NCCL. Then torch splits the world's communicator, which all ranks must do at the same time, each for its own group.
    """
    return dist.new_group(
        ranks, timeout=timedelta(seconds=timeout_s), backend=backend_of(group), use_local_synchronization=True
    )


def new_object_group() -> ProcessGroup:
    """A second group of all ranks, over gloo, for small data that another thread exchanges. Collective."""
    given = os.environ.get(_LAZY_GLOO)
    if given is None and dist.get_world_size() > MOST_IN_MESH:
        os.environ[_LAZY_GLOO] = "1"
    try:
        return dist.new_group(backend="gloo", timeout=timedelta(hours=1))
    finally:
        if given is None:
            os.environ.pop(_LAZY_GLOO, None)


def together(action: Callable[[], Any] | None, group: ProcessGroup | None = None) -> Any:
    """Runs `action` on the ranks that have one, waits for all ranks, and returns what this rank's action returned.

    A rank that raises alone would leave the others waiting in their next collective; here its error reaches all of them.

    Raises:
        Exception: this rank's own error.
        OtherRankError: another rank's error, with its rank and message.
    """
    try:
        result = None if action is None else action()
    except Exception as error:  # not kept for longer, as its traceback keeps this frame and its callers'
        all_gathered_objects(f"{type(error).__name__}: {error}", group)
        raise
    for rank, message in enumerate(all_gathered_objects(None, group)):
        if message is not None:
            raise OtherRankError(
                f"rank {rank if group is None else dist.get_global_rank(group, rank)} failed: {message}"
            )
    return result


def differing_names(mine: dict[str, Any], group: ProcessGroup) -> list[str]:
    """The names whose values are not the same on all ranks of `group`, or are missing on one; sorted, on every rank. Collective.

    Args:
        mine: this rank's values, which are hashable.
    """
    return sorted({name for theirs in all_gathered_objects(mine, group) for name, _ in theirs.items() ^ mine.items()})


def refuse_differences(mine: dict[str, Any], advice: str) -> None:
    """Returns if all ranks bring the same values by the same names, and have one release of torch. Collective over the world.

    Raises:
        ValueError: on every rank. They do not; the message names the first rank that differs from rank 0, how, and the advice.
    """
    mine = {**mine, "the release of torch": str(torch.__version__)}
    first = broadcast_object(mine)
    other = [(name, value) for name, value in mine.items() if value != first[name]]
    found = [f"{name} is {value!r}, and on rank 0 {first[name]!r}" for name, value in other]
    told = f"on rank {dist.get_rank()}, {'; '.join(found)}" if found else None
    different = [text for text in all_gathered_objects(told) if text]
    if different:
        more = f" ({len(different) - 1} more ranks differ from it)" if len(different) > 1 else ""
        raise ValueError(f"ranks differ and would train different models: {different[0]}{more}. {advice}")
