"""The main function of a script that runs on many ranks: its checks, its work, and one clear line when the input is wrong."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from megazero.comm import OtherRankError
from megazero.logging import setup_logging

T = TypeVar("T")

# What wrong input, a full disk or a run that diverged raise; anything else is a fault of ours and keeps its traceback.
USER_ERRORS = (ValueError, OSError, FloatingPointError, OtherRankError)


def run_script(check: Callable[[int], T], work: Callable[[T], object]) -> None:
    """`work(check(world_size))`, with the log set up, and an exit with one line on the user's errors.

    Args:
        check: reads the command line and looks at files; communicates nothing and is the same on every rank.
        work: the rest.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    setup_logging(rank)
    try:
        work(check(world_size))
    except USER_ERRORS as error:
        _exit(error, rank)


def _exit(error: Exception, rank: int) -> NoReturn:
    # Most errors are the same on every rank. The first rank of a node speaks at once, and the launcher then ends the others,
    # which have waited; one that is still there afterwards has an error of its own.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the job has nothing left to save
    if int(os.environ.get("LOCAL_RANK", 0)) != 0:
        time.sleep(10)
    sys.exit(f"error: {error}" if rank == 0 else f"error (rank {rank}): {error}")
