"""The link between host memory and the device that computes: each way a stream of its own, so that copies go beside computing.

PyTorch's allocators expect that memory is used in one order, that of the stream that computes. So a crossing keeps what it
reads and writes until the computing stream was told to wait for it (`join`: device memory may go back), or the host has waited
(`wait`: host memory as well). `Tensor.record_stream` is not used: it gives memory back whenever the host happens to ask, and
then what a step needs could not be planned. Few crossings are under way at a time instead, and the host waits for the oldest.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megazero import comm
from megazero.nvme import aligned_empty

# Gradients on their way keep device memory. With one of them the host waits for that of two blocks ago, as one is being reduced:
# the device has the last block's backward to go on with, and idles only where the link is slower than that, whatever the number.
MOST_TO_HOST = 1
MOST_TO_DEVICE = 3  # what comes ahead has its memory already
OUTBOX_BUFFERS = 2  # one is filled while the other is sent


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Returns when everything before it is done."""


class CopyStream(Protocol):
    """A queue of a device's work, beside the stream that computes; a test brings its own."""

    def start(self, work: Callable[[], object]) -> Event:
        """Queues what `work` issues, behind all that the computing stream has been given so far; returns the place after it."""
        ...

    def hold_back(self, event: Event) -> None:
        """Has whatever the computing stream is given from now on wait for `event`."""
        ...


@dataclass(frozen=True)
class CudaEvent:
    """An event on a CUDA stream."""

    recorded: torch.cuda.Event
    device: torch.device

    def synchronize(self) -> None:
        """As `Event.synchronize`, in any thread: a new one is on the first device, and would start CUDA there."""
        with torch.cuda.device(self.device):
            self.recorded.synchronize()


class CudaCopyStream:
    """A CUDA stream. The one that computes is the current stream of whoever calls."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, work: Callable[[], object]) -> CudaEvent:
        """As `CopyStream.start`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            with torch.cuda.stream(self._stream):
                work()
        except BaseException:  # nobody will wait for what is under way of it, and its memory goes
            self._stream.synchronize()
            raise
        event = torch.cuda.Event(blocking=True)  # who waits sleeps: the cores are Adam's
        self._stream.record_event(event)
        return CudaEvent(event, self._stream.device)

    def hold_back(self, event: Event) -> None:
        """As `CopyStream.hold_back`."""
        assert isinstance(event, CudaEvent)
        torch.cuda.current_stream(self._stream.device).wait_event(event.recorded)


class DirectStream:
    """For devices without streams: what is started is done. PyTorch's meta device has memory to plan and nothing to wait for."""

    def start(self, work: Callable[[], object]) -> Event:
        """Does it."""
        work()
        return self

    def hold_back(self, event: Event) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Crossing:
    """What is on its way, and its memory.

    Args:
        on_device, on_host: the memory that it reads and writes.
        then: called when it is known to be over.
        earlier: the one before it in its stream, which is done when this one is.
    """

    def __init__(
        self,
        stream: CopyStream,
        event: Event,
        on_device: Sequence[Tensor],
        on_host: Sequence[Tensor],
        then: Callable[[], None],
        earlier: Crossing | None,
    ) -> None:
        self._stream, self._event, self._then, self._earlier = stream, event, then, earlier
        self._on_device, self._on_host = tuple(on_device), tuple(on_host)
        self.is_over = False

    def join(self) -> None:
        """Has what the device computes next find it done. The host goes on."""
        if not self.is_over:
            self._stream.hold_back(self._event)
            self._let_go()

    def wait(self) -> None:
        """Returns when it is done."""
        if not self.is_over:
            self._event.synchronize()
            self.is_over = True
            self._let_go()
            self._on_host = ()
            self._then()

    def _let_go(self) -> None:
        """Of the device's memory."""
        crossing: Crossing | None = self
        while crossing is not None:
            crossing._on_device, crossing._earlier, crossing = (), None, crossing._earlier


class Way:
    """One direction of the link. If it is dropped, the host waits first for what is under way, whose memory is used until then.

    Args:
        most: crossings under way at a time; one more has the host wait for the oldest.
    """

    def __init__(self, stream: CopyStream, most: int) -> None:
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
        """Starts `work`, which issues copies between these tensors, behind what the device was given to compute so far."""
        self.make_room()
        earlier = self._under_way[-1] if self._under_way else None
        crossing = Crossing(self._stream, self._stream.start(work), on_device, on_host, then, earlier)
        self._under_way.append(crossing)
        return crossing

    def make_room(self) -> None:
        """Waits for the oldest where `most` are under way: before memory is taken for one more."""
        while len(self._under_way) >= self._most:
            self._under_way.popleft().wait()

    def finish(self) -> None:
        """Returns when nothing is under way."""
        _wait_for_all(self._under_way)


def _wait_for_all(crossings: deque[Crossing]) -> None:
    while crossings:
        crossings.popleft().wait()


class Outbox:
    """Host memory through which the host's results go to the device, while it computes the next ones.

    Args:
        pin: page-lock it.
    """

    def __init__(self, way: Way, pin: bool) -> None:
        self._way, self._is_pinned = way, pin and torch.cuda.is_available()
        self._sent: deque[tuple[Tensor, Crossing]] = deque()

    @property
    def nbytes(self) -> int:
        """Of its buffers, which are as large as the most that was filled in."""
        return sum(buffer.nbytes for buffer, _ in self._sent)

    @contextmanager
    def fill(self, target: Tensor, parts: Sequence[slice] = (slice(None),)) -> Iterator[Tensor]:
        """Host memory like `target`, 1-D on the device. What is in its `parts` when the block ends goes there.

        What the device computes next finds it there; the host need not wait.
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
        return aligned_empty(nbytes, pin=True) if self._is_pinned else torch.empty(nbytes, dtype=torch.uint8)


@dataclass(frozen=True)
class Link:
    """Both ways between host memory and a device.

    Attributes:
        device: that computes.
        outbox: for what the host computes.
    """

    device: torch.device
    to_device: Way
    to_host: Way
    outbox: Outbox

    @classmethod
    def over(cls, device: torch.device, streams: tuple[CopyStream, CopyStream], pin: bool = False) -> Link:
        """The link to `device` over two streams: to it, and from it."""
        to_device = Way(streams[0], MOST_TO_DEVICE)
        return cls(device, to_device, Way(streams[1], MOST_TO_HOST), Outbox(to_device, pin))

    @classmethod
    def to(cls, device: torch.device, pin: bool = False) -> Link | None:
        """The link to `device`; None where that is the host itself.

        Args:
            pin: host memory is page-locked. Without that CUDA's copies are right as well, but each keeps the host waiting.
        """
        if device.type == "cpu":
            return None
        if comm.has_streams(device):
            return cls.over(device, (CudaCopyStream(device), CudaCopyStream(device)), pin)
        return cls.over(device, (DirectStream(), DirectStream()), pin)

    def close(self) -> None:
        """Returns when nothing is under way, so that memory may go."""
        self.to_device.finish()
        self.to_host.finish()
