"""torchrun with readable errors: `python -m megazero.launch [torchrun's options] script.py [the script's flags]`.

torchrun itself buries a job's own error message under two screens of traceback; this module prints one line per cause.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import traceback
from argparse import Namespace
from contextlib import ExitStack, suppress
from functools import partial
from tempfile import TemporaryDirectory
from types import FrameType
from uuid import uuid4

from megazero.children import children, keep_exit_statuses

if __name__ == "__main__":
    # The default action, until torchrun has ranks, which it ends itself: otherwise imports would print a traceback, and C++ code
    # that waits would not react.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep_exit_statuses()

# While a meeting point does not answer, torch would print a stack of C++ frames at every attempt. It reads this variable once, at
# import; the ranks must not inherit it.
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_is_set = _LOG_LEVEL in os.environ
os.environ.setdefault(_LOG_LEVEL, "ERROR")

from torch.distributed import DistNetworkError, DistStoreError, HashStore, TCPStore, run  # noqa: E402
from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure  # noqa: E402
from torch.distributed.elastic.rendezvous import (  # noqa: E402
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from megazero.cgroups import available_cores  # noqa: E402
from megazero.logging import if_slow  # noqa: E402

if not _is_set:
    del os.environ[_LOG_LEVEL]

_PATIENCE_S = 30.0  # in which the nodes of a job usually meet
_ONE_NODE = "megazero_one_node"
_HERE = "127.0.0.1"  # no name, which a host may not know


class _OneNode(RendezvousHandler):
    """The meeting of a job on one node, whose ranks share a store that no other host reaches.

    That of torchrun listens at every address, without a password, and torchrun unpickles what anybody writes there.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id

    def get_backend(self) -> str:
        return _ONE_NODE

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((_HERE, 0))
        port = listener.getsockname()[1]
        # Kept here while the ranks run; a restart gets a new one, without the addresses of the ranks before.
        self._store = TCPStore(_HERE, port, is_master=True, master_listen_fd=listener.detach())
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_HERE, port))

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(_ONE_NODE, _OneNode)


def describe(rank: int, failure: ProcessFailure, log_dir: str = "") -> str:
    """One line: which rank ended, how, and the likely reason if there is one; `log_dir`, if set, is where its output went."""
    if failure.exitcode == -signal.SIGKILL:
        return (
            f"rank {rank} was killed (SIGKILL), most likely by the kernel for lack of host memory. Use less memory per rank: "
            "a smaller batch (--batch-size), recomputed activations (--checkpoint-activations), or fewer ranks per node."
        )
    if failure.exitcode == -signal.SIGABRT:
        return (
            f"rank {rank} was ended by SIGABRT; on GPUs most likely by NCCL's watchdog, because a collective did not end in time "
            "(--distributed-timeout-s): a rank did not come, or ran another part of the model, or the network failed. The log "
            'says which collective ("Watchdog"). The last ones of each rank are in ~/.cache/torch/*_trace_rank_* of its node, or '
            "where TORCH_FR_DUMP_TEMP_FILE says; torchfrtrace reads them."
        )
    if failure.exitcode == -signal.SIGBUS:
        return (
            f"rank {rank} was ended by SIGBUS: a page of a mapped file is not there. A file of the data (.bin, .idx, or in "
            "--data-cache-path) has become shorter since the start, or its disk fails, which the kernel's log says (dmesg); or "
            "/dev/shm is full (df /dev/shm). Leave the data as it is while a job runs."
        )
    if failure.exitcode < 0:
        number = -failure.exitcode  # most real-time signals have no name
        name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
        return f"rank {rank} was ended by {name}."
    where = f"under {log_dir}" if log_dir else "above"
    return f"rank {rank} ended with exit status {failure.exitcode}; its message is {where}."


def cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed first, and how; of several in the same second, the killed one, whose loss made the others fail."""
    rank, first = error.get_first_failure()
    for other, failure in error.failures.items():
        # torchrun's own SIGKILL comes 30 s later
        if failure.exitcode == -signal.SIGKILL and failure.timestamp <= first.timestamp:
            return other, failure
    return rank, first


def share_cores(ranks: int) -> None:
    """Sets OMP_NUM_THREADS, unless it is set, to the cores of this process divided by `ranks` (torchrun's default is 1)."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // ranks)))


def run_ranks(args: Namespace) -> int:
    """Runs torchrun under its parsed options and returns 0, the status of the rank that failed first, or 128 + a signal's number.

    Returns 1 if the nodes cannot meet, or their meeting point is lost.
    """
    # Without a port, newer versions of torchrun use 29500 on several nodes, and a free port of this host on one.
    meeting_point = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
    nodes = run.parse_min_max_nnodes(args.nnodes)[1]
    has_no_port = args.rdzv_backend == "static" and not (args.rdzv_endpoint or args.master_port)
    if nodes == 1 and (args.standalone or has_no_port):
        args.standalone, args.rdzv_backend = False, _ONE_NODE
        if args.rdzv_id == "none":  # torchrun's default
            args.rdzv_id = str(uuid4())
        args.rdzv_endpoint = _HERE  # unused; torchrun would warn if there were none
    elif not args.standalone and (args.rdzv_endpoint or args.master_port or nodes > 1):
        print(f"the ranks meet at {meeting_point}", file=sys.stderr)
        _warn_of_unknown(re.sub(r":\d+$", "", meeting_point).strip("[]"))
    log_dir = args.log_dir if args.log_dir and args.redirects != "0" else ""
    try:
        with ExitStack() as at_end:
            if args.log_dir is None and args.redirects == args.tee == "0":
                # torchrun makes a directory anyway, and would leave it among the system's temporary files.
                folder = TemporaryDirectory(prefix="megazero_", ignore_cleanup_errors=True)
                args.log_dir = at_end.enter_context(folder)
            if nodes > 1:
                say = partial(_say_if_waiting, f"{nodes} nodes at {meeting_point}")
                at_end.enter_context(if_slow(_PATIENCE_S, say))
            run.run(args)
    except ChildFailedError as error:
        rank, first = cause(error)
        print(f"{describe(rank, first, log_dir)} All ranks of {socket.gethostname()} were ended.", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as error:
        for pid in children(os.getpid()):  # torchrun knows none of its ranks while it is still starting some
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        print(f"torchrun was ended by {error.sigval.name}, and with it all ranks of this node.", file=sys.stderr)
        return 128 + error.sigval
    except (DistNetworkError, DistStoreError, RendezvousError) as error:
        # Some errors of torchrun's c10d rendezvous name their cause, and some have no text.
        reason = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
        what = f"the nodes cannot meet at {meeting_point}"
        hint = "Is the port free, the address right, and every node started?"
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if any(map(_is_in_agent, frames)) and all(frame.f_code.co_name != "_rendezvous" for frame in frames):
            what = f"this node has lost {meeting_point}, where the nodes met, and its ranks were ended"
            hint = "The process that serves it has ended, or the network failed. Each job needs a port of its own."
        print(f"error: {what}: {reason} {hint}", file=sys.stderr)
        return 1
    return 0


def _warn_of_unknown(host: str) -> None:
    """Says if this host does not know that name. torchrun then waits for many minutes without a word: it may become known."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        said = f"warning: this host does not know the name {host} ({error.strerror}), and waits until it does."
        print(f"{said} It should be that of the first host, in /etc/hosts or DNS.", file=sys.stderr)


def _say_if_waiting(whom: str) -> None:
    """Says if this node has no ranks yet: torchrun waits for the other nodes without a word, for many minutes."""
    if not children(os.getpid()):
        said = f"this node has waited {_PATIENCE_S:g} s for the others of {whom}. Is each of them started, with this number"
        print(f"{said} and this address, and with a number of its own, from 0 (NODE_RANK)?", file=sys.stderr)


def _is_in_agent(frame: FrameType) -> bool:
    """Whether this frame belongs to torchrun's agent, which starts the ranks and waits for them."""
    module = frame.f_globals["__name__"]
    return frame.f_code.co_name == "run" and module.startswith("torch.distributed.elastic.agent")


def main() -> None:
    """Runs torchrun with the command line's options; exits with the status of `run_ranks`."""
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        # Their messages are repeated here; the second logger has its own level.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    args = run.parse_args(sys.argv[1:])
    if args.max_restarts:  # only the last failure is repeated here
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
    try:
        ranks = run.determine_local_world_size(args.nproc_per_node)
        if ranks < 1:
            raise ValueError(f"--nproc-per-node must be at least 1, got {ranks}.")
        share_cores(ranks)
        sys.exit(run_ranks(args))
    except (OSError, RuntimeError, ValueError, AssertionError) as error:  # torchrun asserts some of its options
        if any(_is_in_agent(frame) for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise  # the options were valid, and the ranks may have run for days: a fault of torchrun's own
        sys.exit(f"error: torchrun cannot start with these options: {error} (see torchrun --help)")


if __name__ == "__main__":
    main()
