"""What the tutorial uses for its output: memory in one line, and a logger that logs on chosen ranks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from functools import partialmethod

import torch

from megazero import comm
from megazero.throughput import memory_bytes


def get_current_device() -> torch.device:
    """The device that this process computes on."""
    return comm.local_device()


def get_mem_info(prefix: str = "") -> str:
    """A line with the MB (2^20 bytes) that this process holds: allocated on its GPU (0 without one), resident in host memory."""
    device, host = comm.local_device(), torch.device("cpu")
    on_gpu = memory_bytes(device) if device.type == "cuda" else 0
    return f"{prefix}GPU memory usage: {on_gpu / 2**20:.2f} MB, CPU memory usage: {memory_bytes(host) / 2**20:.2f} MB"


class DistributedLogger:
    """A logger; each call may choose the ranks that log.

    Args:
        name: the name of the underlying standard-library logger, which writes to standard output.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        if not self._logger.handlers:
            handler = logging.StreamHandler(sys.stdout)
            handler.setFormatter(logging.Formatter("%(name)s - %(levelname)s: %(message)s"))
            self._logger.addHandler(handler)
            self._logger.setLevel(logging.INFO)
            self._logger.propagate = False

    def set_level(self, level: str) -> None:
        """Sets the lowest level that is shown: "DEBUG", "INFO", "WARNING" or "ERROR"."""
        self._logger.setLevel(level)

    def _log(self, level: int, message: object, *, ranks: Sequence[int] | None = None) -> None:
        """Logs on all ranks, or only on `ranks`."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if ranks is None or rank in ranks:
            self._logger.log(level, "%s", message)

    debug = partialmethod(_log, logging.DEBUG)
    info = partialmethod(_log, logging.INFO)
    warning = partialmethod(_log, logging.WARNING)
    error = partialmethod(_log, logging.ERROR)


def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """The logger with the given name."""
    return DistributedLogger(name)


def disable_existing_loggers(include: Iterable[str] | None = None, exclude: Iterable[str] = ("colossalai",)) -> None:
    """Sets existing loggers to WARNING: those that `include` names, or by default all except those in `exclude`."""
    names = set(logging.root.manager.loggerDict).difference(exclude) if include is None else include
    for name in names:
        logging.getLogger(name).setLevel(logging.WARNING)
