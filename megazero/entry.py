"""The main function of a script that runs on many ranks: its checks, its work, and one clear line when the input is wrong."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from glob import glob
from types import FrameType
from typing import NoReturn, TypeVar

import torch

from megazero.children import children
from megazero.comm import OtherRankError, get_local_rank, leave_distributed, told_world
from megazero.logging import ALIKE, get_logger, prepare_output, printable, setup_logging
from megazero.runner import CPU_RANKS
from megazero.runner.environment import hides_gpus, refuse_other_nodes
from megazero.stop_signal import StopSignal

logger = get_logger(__name__)

T = TypeVar("T")

OURS = ("__main__", "megazero", "data_tools", "pretrain_gpt2")  # their errors say what to change

# Raised for wrong input, a full disk, too little memory or a diverged run. Any other error is a fault of this code and keeps its
# traceback. So do a ValueError that another library raises, and an error without text.
USER_ERRORS = (ValueError, OSError, MemoryError, FloatingPointError, OtherRankError)

# What a rank sees when another rank has ended (in this library's channels, in gloo, in NCCL), or when torchrun has (in its
# store).
LOST_RANK = (
    "has ended, or closed its channel",
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process exited",
    "Did the remote server shutdown or crash?",
    "Broken pipe",
)

# The address of the rank that gloo has lost, for any reason that the kernel has; on another host if nothing else reports its end.
LOST_ADDRESS = re.compile(r"(?:Connection closed by peer|Read error|Write error|writev) \[([^]]+)\]:\d+")

# What a rank sees when gloo cannot connect it to another one.
UNCONNECTED = re.compile(r"connectFullMesh failed with \[[^]]*\] (.*)")

# What a rank sees when it may start no more threads, from C++ and from Python; neither says which limit was reached.
NO_THREADS = ("Resource temporarily unavailable", "can't start new thread")

WAIT_S = 10.0  # how long a rank waits if another may report the error

# What a rank sees when it has waited for another until the time limit: in this library's channels and meetings; in gloo; in
# torchrun's store. The last two do not say what the rank waited for.
TIMED_OUT = (
    "did not come within",
    " s not on ranks",
    "Timed out waiting",
    "Timed out after",
    "has timed out after",
    "wait timeout after",
)


def run_script(check: Callable[[int], T], work: Callable[[T], object]) -> None:
    """Runs `work(check(world_size))` with logging set up; exits with one line on a user's error.

    If the environment variable MEGAZERO_CHECK is set to a file descriptor's number, only `check` runs, and the number of ranks
    for this node is written to that descriptor. scripts/common.sh asks one process in this way before it starts all ranks,
    because starting them takes seconds.

    Args:
        check: reads the command line and looks at files; communicates nothing and does the same on every rank.
        work: everything else.
    """
    # As for SIGTERM: C++ code that waits for other ranks runs no Python handler. A job that trains installs a handler, and saves.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prepare_output()
    descriptor = os.environ.get("MEGAZERO_CHECK")
    try:
        # The process that checks beforehand is not a rank, and may run where a batch system has numbered nodes in these
        # variables.
        rank, world_size = (0, 1) if descriptor is not None else told_world()
    except ValueError as error:
        sys.exit(f"error: {error}")
    is_later = descriptor is None and get_local_rank() != 0
    setup_logging(rank, None if descriptor is None else logging.ERROR)  # the job itself logs warnings
    if restarts := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        logger.warning("a rank has failed, and all were started again: restart %d of %s", restarts, most, extra=ALIKE)
    try:
        _refuse_idle_gpus()
        if descriptor is None:
            work(check(world_size))
            leave_distributed()
        else:
            ranks = str(_checked_ranks(check))
            with suppress(BrokenPipeError):  # the script that asked has been ended
                os.write(int(descriptor), ranks.encode())
    except USER_ERRORS as error:
        _exit(error, rank, waits=is_later)
    except RuntimeError as error:
        message, has_lost = _explained(error)
        if message is None:
            raise
        _exit(RuntimeError(message), rank, waits=is_later or has_lost, has_lost=has_lost)


def _explained(error: RuntimeError) -> tuple[str | None, bool]:
    """What to say of an error that another rank or the machine has caused, None of any other; and whether that rank is lost."""
    text = str(error)
    if match := LOST_ADDRESS.search(text):
        what = f"lost the connection to a rank at {match[1]}, in {_our_calls(error)}"
        why = "It has ended, or its host or the network has failed"
        # Those who lose this rank in turn say the same of it, so an address may be that of a host which is well.
        ways = (
            "Ranks that have lost another end too: look for the cause on a host that says something else, or nothing."
        )
        return f"{what}. {why}. {ways}", True
    if any(part in text for part in LOST_RANK):
        if isinstance(error, torch.distributed.DistNetworkError):
            text = f"lost the process where the ranks meet, torchrun or the first rank, in {_our_calls(error)}: {text}"
        return text, True
    if match := UNCONNECTED.search(text):
        what = f"no connection to another rank over gloo ({match[1].rstrip('.')})"
        why = "That rank has ended, or its address or a port is closed to this host"
        ways = "open it, or name the interface between the hosts (NCCL_SOCKET_IFNAME, or GLOO_SOCKET_IFNAME for gloo alone)."
        return f"{what}. {why}: {ways}", True
    if text.startswith(NO_THREADS):
        what = f"no more threads can be started ({text})"
        ways = "Raise `ulimit -u` or `ulimit -v`, or the limit on processes of the container (docker run --pids-limit)."
        return f"{what}. {ways}", False
    if any(part in text for part in TIMED_OUT):
        what = f"waited in vain for another rank, in {_our_calls(error)}: {text.rstrip('.')}"
        why = "That rank hangs or is cut off, runs something else, or needs longer than the time limit"
        return f"{what}. {why} (in training, --distributed-timeout-s).", False
    return None, False


def _refuse_idle_gpus() -> None:
    """Raises if the machine has NVIDIA GPUs that PyTorch cannot use: the job would train on the CPU, unnoticed for hours."""
    gpus = [path for path in glob("/dev/nvidia[0-9]*") if _may_open(path)]
    if hides_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) or not gpus or torch.cuda.is_available():
        return
    why = "it finds none"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # the former if it was built without CUDA
        why = str(error).partition("\n")[0].rstrip(".")
    raise ValueError(
        f"this machine has NVIDIA GPUs ({', '.join(sorted(gpus))}), and PyTorch {torch.__version__} in {sys.prefix} cannot use "
        f"them: {why}. Install a PyTorch for their driver there (https://pytorch.org/get-started/locally), or name a Python that "
        "has one by PYTHON=. To train on the CPU instead, set CUDA_VISIBLE_DEVICES= (empty)."
    )


def _may_open(path: str) -> bool:
    """Whether this process may use the device: a batch system shows a job all devices of a node, and lets it open its own."""
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def _checked_ranks(check: Callable[[int], object]) -> int:
    """The number of ranks for this node: NPROC, else one per GPU, else CPU_RANKS.

    With one node, or under CHECK_ONLY, `check` has passed for the whole world.
    """
    wanted = os.environ.get("NPROC", "")
    if wanted and not (wanted.isdecimal() and int(wanted)):
        raise ValueError(f"NPROC={wanted} must be the number of ranks on this node, or unset.")
    ranks = int(wanted) if wanted else torch.cuda.device_count() or CPU_RANKS
    if not os.environ.get("NNODES"):
        refuse_other_nodes("NNODES=$WORLD_SIZE NODE_RANK=$RANK", "NNODES=1")
    nodes = int(os.environ.get("NNODES") or 1)
    # With several nodes, none may exit before they have met: the others would wait for it.
    if nodes == 1 or os.environ.get("CHECK_ONLY"):
        check(nodes * ranks)
    return ranks


def _launcher_has_reaped() -> bool:
    """Whether torchrun has noticed that a rank of this node has ended; until then, the rank remains its child process."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return torch.distributed.is_torchelastic_launched() and len(children(os.getppid())) < ranks


def _is_ours(error: Exception) -> bool:
    """Whether this library or the script raised it, so that it says what to change. torch's shape errors do not say where."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return _module(frame).split(".")[0] in OURS


def _our_calls(error: Exception) -> str:
    """This project's last calls that led to the error, as module, function and line; other libraries' are left out."""
    frames = traceback.walk_tb(error.__traceback__)
    every = [(_module(frame), frame.f_code.co_name, line) for frame, line in frames]
    ours = [f"{module}.{name}:{line}" for module, name, line in every if module.split(".")[0] in OURS]
    return " > ".join(ours[-4:])


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _exit(error: Exception, rank: int, waits: bool, has_lost: bool = False) -> NoReturn:
    # Most errors are the same on every rank. The first rank of a node reports at once, and the launcher then ends the others,
    # which have waited. A rank that is still running afterwards has an error of its own. A rank that has lost another one waits
    # too: the launcher, or the lost rank itself, reports the reason. A launcher that was killed reports nothing.
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the job has nothing left to save
    stop = handler if has_lost and isinstance(handler, StopSignal) else None
    end = time.monotonic() + (WAIT_S if waits else 0)
    while time.monotonic() < end:
        time.sleep(0.5)
        if stop is not None and (lost := stop.lost_launcher) is not None:
            error = lost
            break
        # The launcher's SIGTERM may have come earlier, while this rank was busy, and gone to the job's handler.
        if stop is not None and stop.received is not None and _launcher_has_reaped():
            signal.raise_signal(signal.SIGTERM)
    if not str(error) or (isinstance(error, ValueError) and not _is_ours(error)):
        traceback.print_exception(error)
    text = printable(re.sub(r"^\[Errno \d+\] ", "", str(error)))  # drop the number that an OSError begins with
    # With its end of line in one write: two ranks' errors would else run together in one line.
    with suppress(OSError):  # a log that cannot be written changes nothing
        sys.stderr.write(f"error: {text}\n" if rank == 0 else f"error (rank {rank}): {text}\n")
    sys.exit(1)
