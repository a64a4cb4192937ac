"""Transfers between memory and a file in the background: cut into requests, run by a few threads, chained where one must wait."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from megazero.nvme.pages import PAGE
from megazero.nvme.transport import FileTransport

Kind = Literal["read", "write"]
MAX_THREADS = 32
_LOST = "What the file should hold is lost, so nothing more is read or written: resume from a checkpoint"


class SwapFileError(OSError):
    """A request to a swap file has failed: it says nothing of any other file."""


@dataclass(frozen=True)
class AioConfig:
    """How a transfer is cut into requests, and how many of them are in flight: DeepSpeed's `aio` keys.

    A request is one system call (`preadv`, `pwritev`) in a thread of its own, so as many are in flight as there are threads.

    Attributes:
        block_size: most bytes of one request; whole pages. A transfer of more becomes several requests.
        queue_depth: requests that each of `thread_count` would have in flight.
        overlap_events: a transfer starts without waiting for those before it. False: one transfer at a time, so `read` and
            `write` wait for what is under way before they return.
        thread_count: multiplies `queue_depth`; DeepSpeed's `intra_op_parallelism`.

    Raises:
        ValueError: a value is out of range.
    """

    block_size: int = 1048576
    queue_depth: int = 8
    overlap_events: bool = True
    thread_count: int = 1

    def __post_init__(self) -> None:
        for name in ("block_size", "queue_depth", "thread_count"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"aio.{name} must be a positive integer, got {value!r}.")
        if not isinstance(self.overlap_events, bool):
            raise ValueError(f"aio.overlap_events must be true or false, got {self.overlap_events!r}.")
        if self.block_size % PAGE:
            raise ValueError(
                f"aio.block_size={self.block_size} must be a multiple of {PAGE}, the page size: requests that bypass the page "
                f"cache move whole pages. Use {max(PAGE, self.block_size // PAGE * PAGE)} or the default, 1048576."
            )

    @property
    def threads(self) -> int:
        """Requests in flight: `queue_depth` x `thread_count`, but at most 32, which are more than any one drive needs."""
        return min(self.queue_depth * self.thread_count, MAX_THREADS)


class Transfer:
    """A read or write under way. Its buffer must stay untouched (a read: also unread) until `wait` returns.

    Args:
        requests: that it consists of.
    """

    def __init__(self, requests: int) -> None:
        self._ended = threading.Event()
        self._lock = threading.RLock()  # `then` may be called by a finalizer, which runs while this thread has it
        self._left = requests
        self._error: BaseException | None = None
        self._calls: list[Callable[[BaseException | None], None]] | None = []  # None: it has ended

    def wait(self) -> None:
        """Returns when all bytes are where they belong.

        Raises:
            OSError: a request failed, or the transfer that this one comes after. The first error, of this or any later call.
        """
        if (error := self.error()) is not None:
            raise error

    def error(self) -> BaseException | None:
        """Waits; what `wait` would raise."""
        self._ended.wait()
        return self._error

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._ended.is_set()

    def then(self, call: Callable[[BaseException | None], None]) -> None:
        """Calls `call(error)` when the last request has ended, in the thread that ended it, or now if it has.

        That is before `wait` returns. `call` is dropped then, with what it refers to.
        """
        with self._lock:
            if self._calls is not None:
                self._calls.append(call)
                return
        call(self._error)

    def run(self, request: Callable[[], None]) -> None:
        """Runs one of the requests; after an error the others are skipped."""
        try:
            if self._error is None:
                request()
        except BaseException as error:
            self.request_ended(error)
        else:
            self.request_ended(None)

    def request_ended(self, error: BaseException | None) -> None:
        """One of the requests has ended, with `error` or well; the last one ends the transfer."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self.end(self._error)

    def end(self, error: BaseException | None) -> None:
        """Wakes those who wait and starts what comes after."""
        with self._lock:
            self._error, calls, self._calls = error, self._calls or [], None
        try:
            for call in calls:  # first: who has waited for a transfer finds its buffer given back
                call(error)
        finally:
            self._ended.set()


class Requests:
    """The threads that move the bytes of one file. All start here: a write that found no room for its thread would be lost."""

    def __init__(self, transport: FileTransport, aio: AioConfig, path: Path, rank: int) -> None:
        # Of the first write that went wrong: errno, text, path. Not the error, whose traceback holds the buffer.
        self._failure: tuple[int, str, str] | None = None
        self._transport, self._aio, self._path, self._rank = transport, aio, path, rank
        self._threads = _start_threads(aio.threads, rank)
        self._under_way: set[Transfer] = set()

    def start(
        self, kind: Kind, view: memoryview, offset: int, after: Transfer | None, ready: Callable[[], None] | None
    ) -> Transfer:
        """A transfer between `view` and the file at `offset`, whose requests are made when `after` has ended well.

        Args:
            ready: waited for by each request.

        Raises:
            OSError: as `raise_failure`.
        """
        self.raise_failure()
        if not self._aio.overlap_events:
            self.drain()
        block = self._aio.block_size
        starts = range(0, len(view), block)
        transfer = Transfer(len(starts))
        if kind == "write":
            transfer.then(self._end_write)

        def begin(error: BaseException | None) -> None:
            if error is not None or not starts:
                transfer.end(error)
                return
            for start in starts:
                request = partial(self._move, kind, view[start : start + block], offset + start, ready)
                try:
                    self._threads.submit(transfer.run, request)
                except RuntimeError as refusal:  # the interpreter is shutting down: nobody may wait for ever
                    transfer.request_ended(refusal)

        self._under_way.add(transfer)
        transfer.then(lambda _: self._under_way.discard(transfer))
        begin(None) if after is None else after.then(begin)
        return transfer

    def raise_failure(self) -> None:
        """Returns where every write that has ended has ended well.

        Raises:
            OSError: one has not; the first one's error, at every call.
        """
        if self._failure is not None:
            raise SwapFileError(*self._failure)

    def drain(self) -> None:
        """Waits until nothing is under way; errors stay with their transfers."""
        for transfer in list(self._under_way):
            transfer.error()

    def close(self) -> None:
        """Waits for what is under way and ends the threads."""
        self.drain()
        self._threads.shutdown()

    def _end_write(self, error: BaseException | None) -> None:
        if error is not None and self._failure is None:
            if isinstance(error, OSError):
                code, text = error.errno or errno.EIO, error.strerror or ""
            else:  # of the device that fills the buffer
                code, text = errno.EIO, f"rank {self._rank}: a write failed: {error}. {_LOST}"
            self._failure = code, text, str(self._path)

    def _move(self, kind: Kind, view: memoryview, offset: int, ready: Callable[[], None] | None) -> None:
        """All bytes of one request. A system call may move fewer: the next one goes on where it ended."""
        if ready is not None:
            ready()
        call = getattr(self._transport, kind)
        moved = 0
        while moved < len(view):
            try:
                count = call(view[moved:], offset + moved)
            except OSError as error:
                raise self._error(kind, view, offset, moved, error.errno or errno.EIO, error.strerror) from error
            if count == 0:
                what = "the file ends there: something has truncated it" if kind == "read" else "nothing was written"
                raise self._error(kind, view, offset, moved, errno.EIO, what)
            moved += count

    def _error(
        self, kind: Kind, view: memoryview, offset: int, moved: int, code: int, why: str | None
    ) -> SwapFileError:
        text = f"rank {self._rank}: {kind} of {len(view)} bytes at offset {offset} failed after {moved} bytes: {why}"
        if kind == "write":
            text += f". {_LOST}"
        return SwapFileError(code, text, str(self._path))


def _start_threads(count: int, rank: int) -> ThreadPoolExecutor:
    threads = ThreadPoolExecutor(count, thread_name_prefix=f"nvme-rank{rank}")
    all_run = threading.Barrier(count)  # an executor starts a thread only where none is idle
    try:
        for _ in range(count):
            threads.submit(all_run.wait)
    except RuntimeError as error:
        all_run.abort()
        threads.shutdown()
        what = f"rank {rank}: {count} threads for reads and writes: {error}"
        how = "Lower aio.queue_depth or aio.thread_count, or raise a limit: of processes (pids.max) or memory"
        raise OSError(errno.EAGAIN, f"{what}. {how}") from error
    return threads
