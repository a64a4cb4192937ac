"""Finds the child processes of a process; a launcher's children are its ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

PROC = Path("/proc")


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
