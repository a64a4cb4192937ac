"""A function mapped over a stream of items by worker processes: in order, bounded in memory, quick to stop.

Each worker has a pipe of its own and at most one item, and gets the next one after it has handed in a result. No thread and no
lock stands between it and this process: when either of them dies, the other one sees the pipe close.
"""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from multiprocessing import current_process, get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from megazero.children import WORKERS_NEED, blocked

A = TypeVar("A")
B = TypeVar("B")

_LEAD = 3  # items per worker that may be in work, or finished before their turn
_REAP_S = 10.0  # until how a worker ended is known, after its pipe has closed
_UNGUARDED = (
    "a worker process died before its work began; its own message is above. Workers run the main script again: put what it does, "
    "and what starts them, under if __name__ == '__main__'."
)
_NEEDS = f"They need {WORKERS_NEED}. With --workers 1 there are none."


def ordered_map(function: Callable[[A], B], items: Iterable[A], workers: int) -> Generator[tuple[A, B], None, None]:
    """Each item with the function's result, in the order of the items.

    With one worker it is computed in this process itself, as it is where this is a daemon, which may not have children. To
    leave it early, close the generator (contextlib.closing): that ends the workers at once.

    Args:
        function: picklable, as items and results are.

    Raises:
        ValueError, OSError: the function raised it.
        RuntimeError: a worker died, or the function raised another error in it; then the message holds the traceback.
    """
    if workers == 1 or current_process().daemon:
        for item in items:
            yield item, function(item)
        return
    pending: dict[int, A] = {}  # handed out and not yet yielded, in order
    results: dict[int, B] = {}
    pool = _Pool(function, workers)
    try:
        for number, item in enumerate(items):
            pending[number] = item
            pool.submit(number, item)
            while not pool.has_idle or len(pending) >= _LEAD * workers:
                results.update(pool.collect())
                yield from _in_turn(pending, results)
        while pending:
            results.update(pool.collect())
            yield from _in_turn(pending, results)
    finally:
        pool.stop()


def _in_turn(pending: dict[int, A], results: dict[int, B]) -> Iterator[tuple[A, B]]:
    while pending and (turn := next(iter(pending))) in results:
        yield pending.pop(turn), results.pop(turn)


class _Pool:
    """Worker processes that are idle or have one numbered item each."""

    def __init__(self, function: Callable, workers: int) -> None:
        # forkserver: a plain fork would copy the locks of this process's threads (torch, tqdm) in whatever state they are.
        context, pickled = get_context("forkserver"), pickle.dumps(function)
        self._processes: list[Any] = []
        self._idle: list[Connection] = []
        self._busy: dict[Connection, int] = {}
        resource_tracker.ensure_running()  # which would lift the block
        with blocked(signal.SIGINT):  # Ctrl-C never reaches the workers, which would print a traceback
            for _ in range(workers):
                here, there = context.Pipe()
                process = context.Process(target=_work, args=(there, pickled), daemon=True)
                try:
                    process.start()
                except (EOFError, ConnectionError) as gone:  # the server's, which runs the main script from 3.14 on
                    raise RuntimeError(_UNGUARDED) from gone
                except OSError as error:  # Python names neither the limit nor the place
                    raise OSError(f"worker processes cannot be started: {error.strerror or error}. {_NEEDS}") from error
                there.close()  # the worker's copy is now the only one, so its death closes the pipe
                self._processes.append(process)
                self._idle.append(here)

    @property
    def has_idle(self) -> bool:
        """Whether `submit` can be called."""
        return bool(self._idle)

    def submit(self, number: int, item: Any) -> None:
        """Hands an item to an idle worker, which reads it at once: nothing can be stuck in both directions of a pipe."""
        worker = self._idle.pop()
        try:
            worker.send(item)
        except OSError as error:
            raise self._died() from error
        self._busy[worker] = number

    def collect(self) -> Iterator[tuple[int, Any]]:
        """Waits for results and yields them with the numbers of their items."""
        for worker in wait(list(self._busy)):
            assert isinstance(worker, Connection)
            try:
                error, content = worker.recv()
            except (EOFError, OSError) as gone:
                raise self._died() from gone
            if error is not None:
                raise error
            self._idle.append(worker)
            yield self._busy.pop(worker), content

    def _died(self) -> RuntimeError:
        """The error to raise where a pipe has closed."""
        wait([process.sentinel for process in self._processes], _REAP_S)
        # Python ends with 1 where it fails to start a worker.
        if any(process.exitcode == 1 for process in self._processes):
            return RuntimeError(_UNGUARDED)
        return RuntimeError(
            "a worker process died, perhaps for want of memory. Start again (what is done is kept), with fewer --workers."
        )

    def stop(self) -> None:
        """Ends the workers, whatever they are doing."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for pipe in (*self._idle, *self._busy):
            pipe.close()


def _work(pipe: Connection, pickled: bytes) -> None:
    function: Callable | None = None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group of processes; the first one decides
    with suppress(EOFError, OSError):  # the process that wanted the results is gone
        while True:
            item = pipe.recv()
            answer: tuple[Exception | None, Any]
            try:
                function = function or pickle.loads(pickled)  # which may read files, as tokenizers do
                answer = None, function(item)
            except (ValueError, OSError) as error:  # of the user's input, or of the machine
                answer = error, None
            except (Exception, SystemExit):  # the latter of a user's function
                answer = RuntimeError(f"a worker process failed:\n{traceback.format_exc()}"), None
            pipe.send(answer)
