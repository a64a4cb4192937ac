"""The link between host memory and the device that computes: one stream per direction, so that copies overlap computing.

PyTorch's allocators expect that memory is used in one order, that of the computing stream. So a crossing keeps the memory that it
reads and writes until the computing stream has been told to wait for it (`join`, which lets go of device memory), or the host has
waited for it (`wait`, which lets go of host memory too). `Tensor.record_stream` is not used: it would return memory whenever the
host happens to ask, and then a step's memory could not be planned. Instead, few crossings are under way at a time, and the host
waits for the oldest.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.nvme import aligned_empty

# Gradients on their way keep device memory. If one may be on its way, while another is being reduced, the host waits for the one
# of two blocks ago. Meanwhile the device has the last block's backward to work on. It idles only if the link is slower than that,
# and then a larger number would not help.
MOST_TO_HOST = 1
MOST_TO_DEVICE = 3  # shards that come ahead have their memory already
OUTBOX_BUFFERS = 2  # one is filled while the other is sent


class CudaCopyStream:
    """A queue of a device's work, separate from the computing stream, which is the caller's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, work: Callable[[], object]) -> torch.cuda.Event:
        """Queues what `work` issues, after all that the computing stream was given so far; returns the point after it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            with torch.cuda.stream(self._stream):
                work()
        except BaseException:  # its memory is freed, and nobody else will wait for the work already issued
            self._stream.synchronize()
            raise
        event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps, and leaves the cores to Adam
        self._stream.record_event(event)
        return event

    def hold_back(self, event: torch.cuda.Event) -> None:
        """Makes whatever the computing stream is given from now on wait for the point `event`."""
        torch.cuda.current_stream(self._stream.device).wait_event(event)

    def wait(self, event: torch.cuda.Event) -> None:
        """Returns when everything before the point `event` is done."""
        with torch.cuda.device(self._stream.device):  # a new thread is on the first one, and would start CUDA there
            event.synchronize()


class Crossing:
    """Copies on their way over the link, and the memory that they use.

    Args:
        on_device, on_host: the memory that the crossing reads and writes.
        then: called when the crossing is known to be over.
        earlier: the crossing before it in its stream, which is done when this one is.
    """

    def __init__(
        self,
        stream: CudaCopyStream,
        event: torch.cuda.Event,
        on_device: Sequence[Tensor],
        on_host: Sequence[Tensor],
        then: Callable[[], None],
        earlier: Crossing | None,
    ) -> None:
        self._stream, self._event, self._then, self._earlier = stream, event, then, earlier
        self._on_device, self._on_host = tuple(on_device), tuple(on_host)
        self.is_over = False

    def join(self) -> None:
        """Makes the device finish the crossing before whatever it computes next. The host does not wait."""
        if not self.is_over:
            self._stream.hold_back(self._event)
            self._let_go()

    def wait(self) -> None:
        """Returns when it is done."""
        if not self.is_over:
            self._stream.wait(self._event)
            self.is_over = True
            self._let_go()
            self._on_host = ()
            self._then()

    def _let_go(self) -> None:
        """Lets go of the device memory, its own and that of earlier crossings."""
        crossing: Crossing | None = self
        while crossing is not None:
            crossing._on_device, crossing._earlier, crossing = (), None, crossing._earlier


class Way:
    """One direction of the link. If it is dropped, the host first waits for crossings under way, which still use their memory.

    One thread at a time starts and joins crossings: those before a joined one let go of their memory, as if the same computing
    stream had used it. Any thread may wait for a crossing.

    Args:
        most: most crossings under way at a time; before one more, the host waits for the oldest.
    """

    def __init__(self, stream: CudaCopyStream, most: int) -> None:
        self._stream, self._most = stream, most
        self._under_way: deque[Crossing] = deque()
        weakref.finalize(self, _wait_for_all, self._under_way).atexit = False

    def start(
        self,
        work: Callable[[], object],
        *,
        on_device: Sequence[Tensor] = (),
        on_host: Sequence[Tensor] = (),
        then: Callable[[], None] = lambda: None,
    ) -> Crossing:
        """Starts `work`, which issues copies between these tensors, after what the device was given to compute so far."""
        self.make_room()
        earlier = self._under_way[-1] if self._under_way else None
        crossing = Crossing(self._stream, self._stream.start(work), on_device, on_host, then, earlier)
        self._under_way.append(crossing)
        return crossing

    def make_room(self) -> None:
        """If `most` are under way, waits for the oldest. Call it before taking memory for one more."""
        while len(self._under_way) >= self._most:
            self._under_way.popleft().wait()

    def finish(self) -> None:
        """Returns when nothing is under way."""
        _wait_for_all(self._under_way)


def _wait_for_all(crossings: deque[Crossing]) -> None:
    while crossings:
        crossings.popleft().wait()


class Outbox:
    """Host memory through which the host's results go to the device while the host computes the next ones.

    Args:
        pin: page-lock it.
    """

    def __init__(self, way: Way, pin: bool) -> None:
        self._way, self._pin = way, pin
        self._sent: deque[tuple[Tensor, Crossing]] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers, which are as large as the largest fill so far."""
        return sum(buffer.nbytes for buffer, _ in tuple(self._sent))  # which an update in the background may change

    @contextmanager
    def fill(self, target: Tensor, parts: Sequence[slice] = (slice(None),)) -> Iterator[Tensor]:
        """Host memory of the size and dtype of `target`, which is 1-D on the device. `parts` of it are copied to `target`.

        The copy starts when the block ends and is done before what the device computes next. The host does not wait.
        """
        buffer = self._take(target.nbytes)
        filled = buffer[: target.nbytes].view(target.dtype)
        yield filled

        def send() -> None:
            for part in parts:
                target[part].copy_(filled[part], non_blocking=True)

        crossing = self._way.start(send, on_device=[target], on_host=[buffer])
        crossing.join()
        self._sent.append((buffer, crossing))

    def _take(self, nbytes: int) -> Tensor:
        if len(self._sent) == OUTBOX_BUFFERS:
            buffer, crossing = self._sent.popleft()
            crossing.wait()
            if buffer.nbytes >= nbytes:
                return buffer
        return aligned_empty(nbytes, self._pin)


@dataclass(frozen=True)
class Link:
    """Both ways between host memory and a device.

    Attributes:
        device: the device that computes.
        outbox: for results of the host.
    """

    device: torch.device
    to_device: Way
    to_host: Way
    outbox: Outbox

    @classmethod
    def over(cls, device: torch.device, streams: tuple[CudaCopyStream, CudaCopyStream], pin: bool = False) -> Link:
        """The link to `device` over two streams, the first to it and the second from it; tests give their own."""
        to_device = Way(streams[0], MOST_TO_DEVICE)
        return cls(device, to_device, Way(streams[1], MOST_TO_HOST), Outbox(to_device, pin))

    @classmethod
    def to(cls, device: torch.device, pin: bool = False) -> Link | None:
        """The link to `device`; None if that is the host itself.

        Args:
            pin: page-lock host memory. CUDA's copies are correct without that too, but the host waits for each.
        """
        if device.type == "cpu":
            return None
        return cls.over(device, (CudaCopyStream(device), CudaCopyStream(device)), pin)

    def close(self) -> None:
        """Returns when nothing is under way, so that memory may be freed."""
        self.to_device.finish()
        self.to_host.finish()
