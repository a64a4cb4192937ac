"""Child processes: which a process has (a launcher's are its ranks), by which signals they end, with what status, and with it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROC = Path("/proc")
# They ask a job to end, at its launcher or at a rank. Batch systems send the last two if told to: #SBATCH --signal=USR1@120.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# What processes that read or compute for another one need, for its error when they cannot be started.
WORKERS_NEED = (
    "files and processes within `ulimit` (-n, -u), and room for a socket in a folder of a short name (TMPDIR)"
)


def end_with_parent(number: signal.Signals, parent: int | None) -> None:
    """Makes the kernel (Linux) send this process a signal when `parent`, which started it, ends, however that happens."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
        if os.getppid() != parent:  # it has ended before
            os.kill(os.getpid(), number)


def keep_exit_statuses() -> None:
    """Handles SIGCHLD by default, though a daemon may hand down that it is ignored: every child would count as a success."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def blocked(number: signal.Signals) -> Iterator[None]:
    """Inside the block, the signal waits for its end; processes that start there inherit this, and decide for themselves."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    if not (PROC / "self/stat").exists():  # macOS; a small Linux container, in turn, may have no ps
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True, check=True).stdout
        return [int(child) for child, parent in map(str.split, listing.splitlines()) if int(parent) == pid]
    found = []
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            # The fields follow the name, which may contain anything. The kernel truncates it at 15 bytes, possibly inside a
            # character.
            fields = stat.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # the process has ended
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found
