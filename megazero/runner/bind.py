"""Runs a command on one rank's share of the cores: `python -m megazero.runner.bind CORES COMMAND...`, started by torchrun."""

from __future__ import annotations

import os
import sys

from megazero.cgroups import available_cores
from megazero.runner.arguments import parse_cores


def share(cores: list[int], rank: int, ranks: int) -> list[int]:
    """The cores of rank `rank` out of `ranks`: consecutive ones, as many as every rank can have."""
    count = len(cores) // ranks
    if count == 0:
        raise ValueError(f"--bind_cores_to_rank: {ranks} ranks on a node cannot each have one of {len(cores)} cores.")
    return cores[rank * count : (rank + 1) * count]


def main() -> None:
    """Replaces this process by the command, bound to its cores."""
    if not hasattr(os, "sched_setaffinity"):
        sys.exit(f"error: --bind_cores_to_rank: {sys.platform} cannot bind a process to cores, Linux can. Drop it.")
    cores = parse_cores(sys.argv[1]) if sys.argv[1] else sorted(os.sched_getaffinity(0))
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    most_threads = max(1, available_cores() // ranks)  # a container's quota may be less than the cores that it sees
    try:
        mine = share(cores, int(os.environ["LOCAL_RANK"]), ranks)
        os.sched_setaffinity(0, mine)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error} (cores {cores})")
    os.environ["OMP_NUM_THREADS"] = str(min(len(mine), most_threads))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
