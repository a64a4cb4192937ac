"""Log output: plain lines on rank 0, warnings from every rank with its number; and numbers, lists and tables as text."""

from __future__ import annotations

import atexit
import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from functools import partial
from pathlib import PurePath

ALIKE = {"alike": True}  # get_logger(...).warning(..., extra=ALIKE): every rank says the same, so the first is enough
SLOW_S = 10.0  # after which `told_if_slow` says what takes so long


def get_logger(name: str) -> logging.Logger:
    """The logger of a module that marks records ALIKE: these pass on the first rank only, whoever prints the log."""
    logger = logging.getLogger(name)
    logger.addFilter(_is_first_of_alike)
    return logger


def _is_first_of_alike(record: logging.LogRecord) -> bool:
    if not hasattr(record, "alike"):
        return True
    import torch.distributed as dist  # slow to import, and already imported wherever ranks say things ALIKE

    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0


def told_if_slow(logger: logging.Logger, what: str) -> AbstractContextManager[None]:
    """Logs `what` once if the block still runs after `SLOW_S` seconds, so that a long silence is not taken for a hang."""
    return if_slow(SLOW_S, partial(logger.info, what))


@contextmanager
def if_slow(seconds: float, tell: Callable[[], object]) -> Iterator[None]:
    """Calls `tell` once, in a thread, if the block still runs after so many seconds."""
    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started, and the block may do without
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def prepare_output() -> None:
    """Gives a process a standard output and error that accept every line: logging never ends the work.

    A process started without them (`>&-`), for example by a daemon, has None in their place, which has no `flush`. A file opened
    later would get their descriptor numbers, and with them whatever C code writes there. Characters that the locale's encoding
    lacks are written as on standard error: `\\u20ac`.
    """
    if sys.stdout is None or sys.stderr is None:
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for the life of the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def until_reader_leaves() -> Iterator[None]:
    """For what a command prints: if its reader has seen enough (`... | head`), the block ends there, without an error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names, `most` at most, and how many more there are: "a, b, c and 2 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(number: int, thing: str) -> str:
    """A number with its noun: "1 rank", "2 ranks", "3 micro-batches"."""
    return f"{number} {thing}" + ("" if number == 1 else "es" if thing.endswith("batch") else "s")


# Escape sequences begin with one of the first; the others turn the direction of what follows.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with control characters spelled out, so that it cannot command the terminal; lines and tabs stay."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Two aligned columns under a title."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


class PrintableFormatter(logging.Formatter):
    """Lines in which names and data of others cannot command the terminal, nor end the line, to pass for the next one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line to print."""
        if record.msg != "%s" and isinstance(args := record.args, tuple):  # "%s" is for tables
            record = copy(record)  # which other handlers get as well
            record.args = tuple(map(_in_one_line, args))
        return printable(super().format(record))


def _in_one_line(value: object) -> object:
    is_text = isinstance(value, str | PurePath | Exception)
    return text.replace("\n", r"\n") if is_text and "\n" in (text := str(value)) else value


def log_to_stderr() -> None:
    """Sends the log of a command to standard error, as it is said; its result goes to standard output."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO)


class _Formatter(PrintableFormatter):
    """INFO without a prefix, which reads best in a training log; other levels with their name, and the rank unless it is 0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = f"[rank {rank}] " if rank else ""

    def format(self, record: logging.LogRecord) -> str:
        """The line to print."""
        text = super().format(record)
        return text if record.levelno == logging.INFO else f"{record.levelname}: {self._rank}{text}"


class _Output(logging.StreamHandler):
    """Standard output. If it cannot be written, because the disk is full or its reader has ended, standard error gets one line.

    Python's handler would print a traceback there for every line. The job is worth more than its log, and continues.
    """

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Reports once that lines are lost."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            atexit.register(_drop_output)
            with suppress(OSError):
                print(f"WARNING: the log cannot be written, the job goes on: {error}", file=sys.stderr)


def _drop_output() -> None:
    """Discards what Python would try to write at exit, which would make it exit with status 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def setup_logging(rank: int, level: int | None = None) -> None:
    """Sends the library's log to standard output: INFO from rank 0, warnings and errors from all.

    Handlers that the script has added to the logger stay. Those of the root, such as `logging.basicConfig` sets, get nothing: on
    the terminal they would repeat each line, and that of every rank.

    Args:
        level: of the logger; by default what has been set, else INFO.
    """
    handler = _Output()
    handler.setFormatter(_Formatter(rank))
    handler.addFilter(lambda record: rank == 0 or not logging.DEBUG < record.levelno < logging.WARNING)
    root = logging.getLogger("megazero")
    root.handlers[:] = [handler, *(own for own in root.handlers if not isinstance(own, _Output))]
    root.setLevel(level or root.level or logging.INFO)
    root.propagate = False
