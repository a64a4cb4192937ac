"""The world of ranks: joining it, and small plain Python data that all of them exchange."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

ProcessGroup = dist.ProcessGroup

# By default gloo connects every rank with every other one. With about a thousand a process runs out of descriptors, and ranks
# refuse each other (gloo's issue 327); so in larger worlds than this a connection is made when it is needed.
MOST_IN_MESH = 256
_LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"  # torch asks it when a group is made
_WITH_STREAMS = ("cuda",)  # types of devices


class OtherRankError(RuntimeError):
    """What went wrong on another rank, so that this one cannot go on either."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Joins the world that the environment describes, unless this process is in one; a world of one process without such.

    The arguments are those of DeepSpeed; `verbose` and `config` have no effect.

    Args:
        dist_backend: "nccl" or "gloo"; by default nccl where CUDA is available.
        auto_mpi_discovery: take Open MPI's variables, and `distributed_port`, where torchrun's are not there.
        timeout: after which a collective that some rank never entered raises (default 10 minutes, or DEEPSPEED_TIMEOUT minutes).
        init_method, rank, world_size: where and as what to join, instead of the environment.
        dist_init_required: False says that the caller has joined already.

    Raises:
        ValueError: nccl was asked for on a machine without CUDA, or for more ranks than GPUs; DEEPSPEED_TIMEOUT is no number; or
            Open MPI's ranks on several hosts were not given a MASTER_ADDR.
        OSError: the rendezvous port is taken.
    """
    if dist.is_initialized() or dist_init_required is False:
        _take_device_of_joined()
        return
    has_cuda = torch.cuda.is_available()
    backend = dist_backend or ("nccl" if has_cuda else "gloo")
    if backend == "nccl" and not has_cuda:
        raise ValueError(
            "--distributed-backend nccl needs a CUDA device and none is visible here. Use --distributed-backend gloo."
        )
    if auto_mpi_discovery and init_method is None:
        _adopt_open_mpi(distributed_port)
    _take_device()
    if backend == "nccl":
        _record_collectives()
    timeout = timeout or _default_timeout()
    if init_method is not None:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _join_by_environment(backend, timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def get_local_rank() -> int:
    """This process's rank on its node, as the launcher counts them; 0 without a launcher."""
    return int(_told_local_rank() or "0")


def _told_local_rank() -> str | None:
    return os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK"))


def _take_device() -> None:
    """Makes the CUDA device of this rank, where a launcher has numbered it, the current one."""
    if torch.cuda.is_available() and _told_local_rank() is not None:
        torch.cuda.set_device(get_local_rank() % torch.cuda.device_count())


def _take_device_of_joined() -> None:
    """The same in a world that the script made, unless it has chosen: bound a device to its group, or made another current."""
    if not torch.cuda.is_available():
        return
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None:
        torch.cuda.set_device(bound)
    elif torch.cuda.current_device() == 0:  # as in DeepSpeed, where `initialize` sets it
        _take_device()


def _record_collectives() -> None:
    """Has torch keep the last collectives of each rank, and write them to a file when one times out, unless the user has chosen.

    Newer releases do so by themselves; 2.8 does not.
    """
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def _default_timeout() -> timedelta:
    minutes = os.environ.get("DEEPSPEED_TIMEOUT", "10")
    try:
        return timedelta(minutes=float(minutes))
    except ValueError:
        raise ValueError(f"DEEPSPEED_TIMEOUT={minutes!r} in the environment must be a number of minutes.") from None


def _adopt_open_mpi(port: int) -> None:
    """Says in torchrun's variables what Open MPI's say, where torchrun has said nothing."""
    theirs = "OMPI_COMM_WORLD_"
    if "RANK" in os.environ or f"{theirs}RANK" not in os.environ:
        return
    size = os.environ[f"{theirs}SIZE"]
    if size == os.environ.get(f"{theirs}LOCAL_SIZE"):  # all on one host
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_ADDR" not in os.environ:
        raise ValueError(
            f"rank {os.environ[f'{theirs}RANK']}: Open MPI's variables describe {size} ranks on several hosts and do not say "
            "where these meet. Set MASTER_ADDR to the host of rank 0 (mpirun -x MASTER_ADDR=...)."
        )
    os.environ.setdefault("MASTER_PORT", str(port))
    names = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
    for ours, name in names.items():
        os.environ.setdefault(ours, os.environ[theirs + name])


def _join_by_environment(backend: str, timeout: timedelta) -> None:
    # Then torch makes each further group by a split of the world's communicator. One rank gains nothing by that, and NCCL 2.29,
    # which comes with torch 2.13, may fail to split a communicator of one ("device not ready", DeepSpeed's issue 8248).
    is_bound = backend == "nccl" and int(os.environ["WORLD_SIZE"]) > 1
    how: dict[str, Any] = {"timeout": timeout, "device_id": local_device() if is_bound else None}
    try:
        if attempt := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            # torchrun's store still has the addresses of the ranks before, under the same keys. On several nodes each counts its
            # own restarts, so that they would look for each other under different keys until the timeout.
            if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
                raise OtherRankError(
                    f"restart {attempt} by torchrun: the ranks of several nodes cannot meet again. Let the batch system start "
                    "the whole job again (Slurm: --requeue), and give torchrun no --max-restarts."
                )
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
            how |= {"store": dist.PrefixStore(f"megazero/attempt/{attempt}", store)}
            how |= {"rank": rank, "world_size": world_size}
        dist.init_process_group(backend, **how)
    except (RuntimeError, dist.DistNetworkError) as error:
        if "Duplicate GPU" in str(error):  # as NCCL says it
            raise ValueError(
                f"rank {os.environ['RANK']}: another rank has the same GPU, {local_device()}, and NCCL wants one for each. Start "
                f"as many ranks on a node as it has GPUs, of which {torch.cuda.device_count()} are visible here (NPROC; torchrun "
                "--nproc-per-node), or let them share GPUs by --distributed-backend gloo, which is slow."
            ) from error
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise
        port = os.environ.get("MASTER_PORT", "unset")
        raise OSError(
            f"rank {os.environ['RANK']}: MASTER_PORT={port} is already in use on this host, so the ranks cannot meet there. "
            "Choose a free port (MASTER_PORT=29501), or let torchrun choose one with --standalone."
        ) from error


def world() -> ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None, "init_distributed comes first"
    return group


def local_device() -> torch.device:
    """The device that this process computes on: its CUDA device where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def has_streams(device: torch.device) -> bool:
    """Whether a device works off queues, `torch.cuda`'s streams, beside the host: what it was given to do need not be done."""
    return device.type in _WITH_STREAMS


def backend_of(group: ProcessGroup) -> str:
    """What carries tensors of `local_device` in `group`: "nccl" or "gloo". A group may have one backend for each kind of device.

    Raises:
        ValueError: nothing carries them.
    """
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    kind = local_device().type
    if kind not in backends:
        raise ValueError(
            f"rank {dist.get_rank()} computes on {local_device()}, and its process group has backends for "
            f"{', '.join(backends)} only. Join by megazero.comm.init_distributed(), or by init_process_group('nccl')."
        )
    return backends[kind]


def all_gathered_objects(value: object, group: ProcessGroup | None = None) -> list:
    """`value` of every rank of `group` (the world by default): small plain Python data, never tensors."""
    out: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out


def broadcast_object(value: Any) -> Any:
    """The first rank's `value`, on every rank of the world: plain Python data, which may be large, never tensors."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def even_out_groups(group: ProcessGroup) -> None:
    """Makes new groups of ranks of `group` possible: brings all to as many groups as the one has that is in most. Collective.

    torch names a group that its own ranks make after how many each of them is in. A script may have made some for a part of the
    ranks, and then these would wait for each other under different names.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    for _ in range(max(all_gathered_objects(count, group)) - count):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def new_group_like(group: ProcessGroup, ranks: Sequence[int], timeout_s: float) -> ProcessGroup:
    """A group of these ranks of the world, with the backend that `group` has. Collective over `ranks`.

    They must be in equally many groups (see `even_out_groups`).

    Collective over the world where that is bound to devices, as `init_distributed` binds several ranks over NCCL: there torch
    splits the world's communicator, which all of its ranks must enter at the same time, each for its own group.
    """
    return dist.new_group(
        ranks, timeout=timedelta(seconds=timeout_s), backend=backend_of(group), use_local_synchronization=True
    )


def new_object_group() -> ProcessGroup:
    """A group of all ranks over gloo, beside the world: for small data that another thread exchanges. Collective."""
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
    result, error = None, None
    try:
        result = action() if action is not None else None
    except Exception as caught:
        error = caught
    messages = all_gathered_objects(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise OtherRankError(f"rank {rank} failed: {message}")
    return result
