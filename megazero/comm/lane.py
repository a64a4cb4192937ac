"""Lanes: queues of collectives, which run one after another in the order of issue, concurrently with the thread that issues them.

A `ThreadLane` has its own thread, which runs them through a `Transport`. A `NativeLane` hands them to the backend, NCCL.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.transport import Transport, describe
from megazero.comm.world import ProcessGroup, has_streams
from megazero.timers import Timers

_PATIENCE_S = 2.0  # how long closing a lane waits for what is under way
_NOTED = 1024  # most collectives that a `NativeLane` notes before they are compared

# torch 2.13 renamed these, and warns at the old names.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class Work(Protocol):
    """A collective that is under way."""

    def wait(self) -> object:
        """Returns when the result may be used (on CUDA: by what the current stream does next). Ignore what it returns.

        Raises:
            RuntimeError: the collective failed or timed out; the message says which one, where and why.
        """


class Finished:
    """A collective that had nothing to do: the `Work` of a group of one."""

    def wait(self) -> None:
        """Returns at once."""


class Timed:
    """A collective whose `wait` is timed: the host's, or on NCCL the current stream's."""

    def __init__(self, work: Work, timers: Timers, phase: str) -> None:
        self._work, self._timers, self._phase = work, timers, phase

    def wait(self) -> None:
        """See `Work.wait`."""
        with self._timers(self._phase):
            self._work.wait()


class ThreadLane:
    """A thread that carries out the collectives of a transport.

    It ends with `close`, with this object, or with the program: it is a daemon, so no stuck collective keeps the program alive.
    """

    def __init__(self, transport: Transport, where: str) -> None:
        """`where` names rank and group in errors."""
        self._where = where
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        is_ready, num_threads = threading.Event(), torch.get_num_threads()
        thread = threading.Thread(target=_serve, args=(self._jobs, transport, is_ready), daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._jobs, thread)
        is_ready.wait()
        torch.set_num_threads(num_threads)  # threads that torch meets later start with what was set last, in any thread

    def issue(self, action: str, buffer: Tensor, name: str) -> Work:
        """Queues "all_reduce", "reduce_scatter" or "all_gather" in place, and returns at once.

        CUDA buffers go through host memory; `name` is what errors call it.
        """
        if not self._end.alive:
            raise RuntimeError(f"{action} on {self._where}: the channel is closed. Close it after its last collective.")
        job = _Job(action, buffer, name, self._where)
        self._jobs.put(job)
        return job

    def take_noted(self) -> list[str] | None:
        """None: there is nothing to compare, because the transport compares every collective as it runs."""
        return None

    def close(self) -> None:
        """Ends the thread once everything issued is done; waits for that, but only for a short time."""
        self._end()


def _end(jobs: queue.SimpleQueue[_Job | None], thread: threading.Thread) -> None:
    """Ends a lane's thread, at the latest before the interpreter ends: a daemon that is in C++ code then aborts the process."""
    jobs.put(None)
    if thread is not threading.current_thread():  # the collector may run there
        thread.join(_PATIENCE_S)


@torch.inference_mode()  # writes into tensors of a caller in that mode as well, and leaves others what they are
def _serve(jobs: queue.SimpleQueue[_Job | None], transport: Transport, is_ready: threading.Event) -> None:
    """The thread of a lane. After a failure the ranks are no longer in step, so whatever follows fails too."""
    torch.set_num_threads(1)  # the cores belong to the thread that computes
    is_ready.set()
    failure: str | None = None
    while (job := jobs.get()) is not None:
        if failure is None:
            failure = job.run(transport)
            if failure is not None:
                transport.close()
        else:
            job.finish(f"was not started, because of an earlier failure: {failure}")
        del job  # and its buffer, while waiting for the next
    transport.close()


class _Job:
    """One collective of a `ThreadLane`: the `Work` of its caller."""

    def __init__(self, action: str, buffer: Tensor, name: str, where: str) -> None:
        self._description = f"{describe(action, buffer, name)} on {where}"
        self._action, self._name = action, name
        self._buffer: Tensor | None = buffer.detach()
        is_queued = has_streams(buffer.device)
        self._is_written = torch.cuda.current_stream(buffer.device).record_event() if is_queued else None
        self._is_done = threading.Event()
        self._failure: str | None = None
        self._error: Exception | None = None

    def wait(self) -> None:
        """Returns when the buffer holds the result.

        Raises:
            RuntimeError: the collective failed or timed out, or an earlier one of the lane did.
        """
        self._is_done.wait()
        if self._failure is not None:
            raise RuntimeError(self._failure) from self._error

    def run(self, transport: Transport) -> str | None:
        """Carries the collective out. Returns None, or a message if it failed."""
        assert self._buffer is not None
        start = time.monotonic()
        try:
            if self._is_written is None:
                self._carry_out(transport, self._buffer)
            else:
                with torch.cuda.device(self._buffer.device):
                    self._is_written.synchronize()
                    on_host = self._buffer.cpu()
                    self._carry_out(transport, on_host)
                    self._buffer.copy_(on_host)
                    torch.cuda.current_stream().synchronize()
        except Exception as error:
            self._error = error
            return self.finish(f"failed after {time.monotonic() - start:.1f} s: {error}")
        return self.finish(None)

    def finish(self, problem: str | None) -> str | None:
        """Lets `wait` return, or raise if there is a problem. Returns the full message of the problem."""
        self._buffer = None
        self._failure = problem and f"{self._description} {problem}"
        self._is_done.set()
        return self._failure

    def _carry_out(self, transport: Transport, buffer: Tensor) -> None:
        if self._action != "all_gather":
            transport.reduce_scatter_(buffer, self._name)
        if self._action != "reduce_scatter":
            transport.all_gather_(buffer, self._name)


class NativeLane:
    """The backend's own collectives, on one or two process groups that only lanes use (in NCCL's terms: communicators).

    Reductions and gathers share a communicator. With two, a gather could overlap a reduction; but if kernels of two communicators
    run in different orders on different ranks, they can wait for each other forever, so NCCL wants one order over all
    communicators. One queue has one order, the order of issue, which is the same on all ranks as long as they run the same graph.
    Nothing compares the names of collectives here: if ranks issue them in different orders, they hang or take each other's data.
    So the first ones are noted, and the channel compares them once.

    Sums between sets of ranks need a second communicator, whose kernels may overlap a gather. They are issued in the same one
    order, as FSDP2's are on a two-dimensional mesh.
    """

    def __init__(self, group: ProcessGroup, across: ProcessGroup | None = None) -> None:
        """Does not communicate.

        Args:
            group: the ranks that a buffer is cut over.
            across: this rank and those that have the same part in other sets; their sums are added up. None if there is one set.
        """
        self._group, self._across = group, across
        self._beside: torch.cuda.Stream | None = None  # on it, each step of a two-level sum waits for the step before
        self._noted: list[str] | None = []

    def issue(self, action: str, buffer: Tensor, name: str) -> Work:
        """Starts the collective; the `Work` is torch's, whose `wait` makes the current stream wait, not the host."""
        if self._noted is not None and len(self._noted) < _NOTED:
            self._noted.append(describe(action, buffer, name))
        if self._across is None or action == "all_gather":
            return self._start(action, buffer)
        if has_streams(buffer.device):
            self._beside = self._beside or torch.cuda.Stream(buffer.device)
            self._beside.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._beside):
            self._start("reduce_scatter", buffer).wait()
            work = dist.all_reduce(self._part(buffer), group=self._across, async_op=True)
            if action == "all_reduce":
                work.wait()
                work = self._start("all_gather", buffer)
        return work

    def take_noted(self) -> list[str] | None:
        """Descriptions of the collectives issued so far, in order, up to a limit. Ends the noting: later calls return None."""
        noted, self._noted = self._noted, None
        return noted

    def _start(self, action: str, buffer: Tensor) -> Work:
        if action == "all_reduce":
            return dist.all_reduce(buffer, group=self._group, async_op=True)
        if action == "reduce_scatter":
            return _reduce_scatter(self._part(buffer), buffer, group=self._group, async_op=True)
        whole = buffer.view(torch.uint8)  # NCCL does not send every dtype
        return _all_gather(whole, self._part(whole), group=self._group, async_op=True)

    def _part(self, buffer: Tensor) -> Tensor:
        return buffer.view(self._group.size(), -1)[self._group.rank()]

    def close(self) -> None:
        """Does nothing: `destroy_process_group` ends the groups. None may end earlier, because torch names new ones by count."""
