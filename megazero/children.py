"""Which processes a process has started: a launcher's are its ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

PROC = Path("/proc")


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    if not (PROC / "self/stat").exists():  # macOS; a small container of Linux may have no ps instead
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True, check=True).stdout
        return [int(child) for child, parent in map(str.split, listing.splitlines()) if int(parent) == pid]
    found = []
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            # after the name, which may contain anything, and which the kernel cuts off at 15 bytes, in the middle of a letter
            fields = stat.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found
