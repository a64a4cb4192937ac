"""Joining the world of ranks that a launcher describes: torchrun, Open MPI, or nobody."""

from __future__ import annotations

import atexit
import os
import socket
import time
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megazero.comm.reach import refuse_unreachable
from megazero.comm.world import OtherRankError, all_gathered_objects, barrier, local_device
from megazero.files import allow_many_files

UNLOCKED_S = 0.02  # on a busy machine a thread that waits for the interpreter's lock does not run at once

# In the whole job's store, without any prefix: a rank asks all others to write down their last collectives and to end. NCCL's
# watchdogs look at it, and would end the ranks of a restart minutes after it for a timeout before it.
_DUMP_KEY = "exception_dump"  # ProcessGroupNCCL.hpp: kStoreDumpKey


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
    """Joins the world that the environment describes, or makes a world of one process, unless this process is in one already.

    The arguments are those of DeepSpeed; `verbose` and `config` have no effect.

    Args:
        dist_backend: "nccl" or "gloo"; by default nccl if CUDA is available.
        auto_mpi_discovery: without torchrun's variables, use Open MPI's and `distributed_port`.
        timeout: a collective that some rank never enters raises after it (default 10 minutes, or DEEPSPEED_TIMEOUT minutes).
        init_method: where to join, instead of what the environment says.
        rank, world_size: this process's rank and the number of ranks; by default the environment's, which may not say otherwise
            without `init_method`.
        dist_init_required: False if the caller has joined already.

    Raises:
        ValueError: nccl was asked for on a machine without CUDA, or for more ranks than GPUs; DEEPSPEED_TIMEOUT is no number; or
            the launcher's variables are not as `told_world` wants them, or contradict `rank` or `world_size`; or the ranks are on
            several hosts, which cannot reach each other over gloo.
        OSError: the rendezvous port is taken, or does not answer.
    """
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        _grow_segments()
    allow_many_files()  # over gloo each group has a connection with every rank, and links have several
    _settle_at_exit()
    if dist.is_initialized() or dist_init_required is False:
        _take_device_of_joined()
        return
    backend = dist_backend or ("nccl" if has_cuda else "gloo")
    if backend == "nccl" and not has_cuda:
        raise ValueError(
            "--distributed-backend nccl needs a CUDA device and none is visible here. Use --distributed-backend gloo; or in "
            "a call, init_distributed() without a backend, which takes the one for this machine."
        )
    if init_method is None:
        if auto_mpi_discovery:
            _adopt_open_mpi(distributed_port)
        _adopt_arguments(rank, world_size)
        told_world(None)
    _take_device()
    _share_interface()
    if backend == "nccl":
        _record_collectives()
    timeout = timeout or _default_timeout()
    if init_method is not None:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    elif "RANK" in os.environ:
        _join_by_environment(backend, timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def leave_distributed() -> None:
    """Leaves the world, together with all its ranks; does nothing in none.

    A script should do so at its end: gloo's threads take the interpreter's lock to drop the tensors of finished collectives, and
    one that waits for it when the interpreter ends aborts the process. Without it, the process waits a moment at its exit.
    """
    if dist.is_initialized():
        barrier()
        time.sleep(UNLOCKED_S)
        dist.destroy_process_group()


def is_left_by_nodes(leaves: bool) -> bool:
    """Whether ranks of other nodes leave the job, none of this one does, and torchrun can go on without them.

    It does if this node's ranks fail: it starts them again, with those of the nodes that are there. Collective over the world.

    Args:
        leaves: whether this rank leaves.
    """
    node = os.environ.get("GROUP_RANK")
    left = {where for where, leaves in all_gathered_objects((node, leaves)) if leaves}
    count, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return bool(left) and node not in left and count < most and not _is_in_store_of_torchrun()


@cache
def _settle_at_exit() -> None:
    """Has the process wait for gloo's threads before the interpreter ends, for scripts that do not call `leave_distributed`."""
    atexit.register(lambda: time.sleep(UNLOCKED_S) if dist.is_initialized() else None)


def told_world(open_mpi_port: int | None = 29500) -> tuple[int, int]:
    """This process's rank and the size of the world, according to the launcher's variables; (0, 1) without any.

    Args:
        open_mpi_port: MASTER_PORT to use with Open MPI's variables, if torchrun's are not set; None ignores Open MPI's.

    Raises:
        ValueError: a variable is missing, is no number, or contradicts another one; or there are several processes, of which
            none knows its rank.
    """
    if open_mpi_port is not None:
        _adopt_open_mpi(open_mpi_port)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if not (value := os.environ.get(name, "0")).isdecimal():
            raise ValueError(
                f"{name}={value} in the environment must be a number, which a launcher sets there. Without one, unset {name}."
            )
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    is_told = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    if not is_told:
        _refuse_unnumbered()
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if is_told and missing:
        raise ValueError(
            f"the environment has no {', '.join(missing)}: a launcher sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for "
            "every rank. Without a launcher, unset all of them."
        )
    if rank >= world_size:
        raise ValueError(
            f"RANK={rank} in the environment must be below WORLD_SIZE={world_size}: ranks are numbered from 0. A launcher sets "
            "both. Without one, unset them."
        )
    return rank, world_size


def _refuse_unnumbered() -> None:
    """Raises if srun or MPI has started this process as one of several: without a rank, each would train by itself."""
    for name, starter in (("SLURM_STEP_NUM_TASKS", "srun"), ("PMI_SIZE", "MPI"), ("MV2_COMM_WORLD_SIZE", "MVAPICH")):
        if (size := os.environ.get(name, "1")).isdecimal() and int(size) > 1:
            raise ValueError(
                f"this process is one of {size} of {starter} ({name}), and nothing says which rank it is: each would train by "
                "itself. Start one task per node, which starts the ranks by torchrun (`megazero`, scripts/pretrain_gpt2.sbatch); "
                "or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each (srun: RANK=$SLURM_PROCID, "
                f"LOCAL_RANK=$SLURM_LOCALID). If each is a job of its own, unset {name}."
            )


def get_local_rank() -> int:
    """This process's rank on its node, as the launcher counts them; 0 without a launcher."""
    return int(_told_local_rank() or "0")


def _told_local_rank() -> str | None:
    return os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK"))


def _take_device() -> None:
    """Makes this rank's CUDA device the current one, if a launcher has numbered the ranks of the node."""
    if torch.cuda.is_available() and _told_local_rank() is not None:
        torch.cuda.set_device(get_local_rank() % torch.cuda.device_count())


def _take_device_of_joined() -> None:
    """As `_take_device`, in a world that the script made; a device that the script has bound to it or made current stays."""
    if not torch.cuda.is_available():
        return
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None:
        torch.cuda.set_device(bound)
    elif torch.cuda.current_device() == 0:  # as in DeepSpeed, where `initialize` sets it
        _take_device()


def _share_interface() -> None:
    """Has gloo, which carries plain data beside NCCL, use the network interface that the user has named to NCCL.

    NCCL also takes prefixes of names, lists, and what to leave out, which gloo does not: such a value is left to NCCL.
    """
    name = os.environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if name in (interface for _, interface in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _grow_segments() -> None:
    """Has torch's allocator grow the segments that it cuts memory from, unless the user has configured it.

    By default a segment keeps its size, and whatever stays in it while the rest is free keeps it from being of use for large
    tensors. torch reads the variable when it first allocates on a device.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # Up to 2.9, the newer name is ignored (pytorch/pytorch#183387); from 2.9 on, the older one warns.
        name = "PYTORCH_ALLOC_CONF" if torch.__version__ >= "2.10" else "PYTORCH_CUDA_ALLOC_CONF"
        os.environ[name] = "expandable_segments:True"


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
    except (ValueError, OverflowError):
        raise ValueError(
            f"DEEPSPEED_TIMEOUT={minutes!r} in the environment must be a number of minutes, no more than a timedelta holds."
        ) from None


def _adopt_arguments(rank: int, world_size: int) -> None:
    """Has the environment say what the caller says of this process."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if value >= 0 and (found := os.environ.setdefault(name, str(value))) != str(value):
            raise ValueError(
                f"init_distributed({name.lower()}={value}), and the environment has {name}={found}. Drop the argument or the "
                "variable; or give init_method too, which does not ask the environment."
            )


def _adopt_open_mpi(port: int) -> None:
    """Copies Open MPI's variables to torchrun's names, if torchrun has not set them."""
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
    # torchrun's store still has the addresses of the ranks before, under the same keys. On several nodes each counts its own
    # restarts, so that they would look for each other under different keys until the timeout. A store of rank 0's is new.
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if _is_in_store_of_torchrun() else 0
    if attempt and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        raise OtherRankError(
            f"restart {attempt} by torchrun: the ranks of several nodes cannot meet again in torchrun's own store. Set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node, and give torchrun --rdzv-backend c10d; or let the batch system "
            "start the whole job again (Slurm: --requeue), and give torchrun no --max-restarts."
        )
    # Then torch makes each further group by a split of the world's communicator. One rank gains nothing by that, and NCCL 2.29,
    # which comes with torch 2.13, may fail to split a communicator of one ("device not ready", DeepSpeed's issue 8248).
    is_bound = backend == "nccl" and int(os.environ["WORLD_SIZE"]) > 1
    how: dict[str, Any] = {"timeout": timeout, "device_id": local_device() if is_bound else None}
    try:
        if attempt or 0 < int(os.environ.get("LOCAL_WORLD_SIZE", "0")) < int(os.environ["WORLD_SIZE"]):
            store, how["rank"], how["world_size"] = next(rendezvous("env://", timeout=timeout))
            if attempt:
                store.delete_key(_DUMP_KEY)
            else:
                apart = dist.PrefixStore("megazero/reach/", store)
                refuse_unreachable(apart, how["rank"], how["world_size"], timeout.total_seconds())
            how["store"] = dist.PrefixStore(f"megazero/attempt/{attempt}", store)
        dist.init_process_group(backend, **how)
    except RuntimeError as error:
        if explained := _explained(error):
            raise explained from error
        raise


def _is_in_store_of_torchrun() -> bool:
    """Whether the ranks meet in torchrun's store, which it keeps when it starts them again, and not in one that rank 0 makes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _explained(error: RuntimeError) -> Exception | None:
    """An error that says what to do about this one of torch's; None if it is not known."""
    who, text = f"rank {os.environ['RANK']}", str(error)
    if "Duplicate GPU" in text or "using the same GPU" in text:  # as NCCL says it, before 2.30 and since
        untold = "" if _told_local_rank() else "LOCAL_RANK, by which each takes its own, is not set. "
        return ValueError(
            f"{who}: another rank has the same GPU, {local_device()}, and NCCL wants one for each. {untold}Start as "
            f"many ranks on a node as it has GPUs, of which {torch.cuda.device_count()} are visible here (NPROC; torchrun "
            "--nproc-per-node). To try more, let them share GPUs, which is slow: by --distributed-backend gloo, or by "
            "NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment (NCCL 2.30 and newer)."
        )
    if isinstance(error, dist.DistNetworkError) and "trying to connect" in text:
        return OSError(f"{who}: {_why_unanswered()} ({text.rstrip('.')})")
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return OSError(
            f"{who}: MASTER_PORT={os.environ['MASTER_PORT']} is already in use on this host, so the ranks cannot meet there. "
            "Choose a free port (MASTER_PORT=29501), or let torchrun choose one with --standalone."
        )
    return None


def _why_unanswered() -> str:
    """What is wrong with the place where ranks meet, which does not answer."""
    host = os.environ["MASTER_ADDR"]
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        return f"MASTER_ADDR={host} is a name that this host does not know. It should be that of the host of rank 0."
    return (
        f"nothing answers at MASTER_ADDR={host}, MASTER_PORT={os.environ['MASTER_PORT']}. Rank 0 has not started there, or "
        "has ended; or that is not its address; or the port is closed to this host."
    )
