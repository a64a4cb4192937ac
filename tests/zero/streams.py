"""Streams for the tests: queues of a pretended device, which do nothing before somebody has to see that it is done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from megazero.zero.link import Link

Entry = tuple  # ("to host", "starts", 3): the third of that stream's works; or what a test adds


class SlowStream:
    """Work waits in the queue until the host or the device waits for a place behind it, and is done then, in order.

    So whoever reads too early finds old values, and whoever writes or frees too early has them copied.
    """

    def __init__(self, name: str, log: list[Entry]) -> None:
        self.name, self.log = name, log
        self._queue: deque[Callable[[], object]] = deque()
        self._done, self._lock = 0, threading.RLock()

    def start(self, work: Callable[[], object]) -> SlowEvent:
        """Queues the work."""
        with self._lock:
            self._queue.append(work)
            event = SlowEvent(self, self._done + len(self._queue))
            self.log.append((self.name, "starts", event.place))
            return event

    def hold_back(self, event: SlowEvent) -> None:
        """The computing stream of this device is the host."""
        self.log.append((self.name, "joins", event.place))
        self.reach(event.place)

    def reach(self, place: int) -> None:
        """Does the work up to a place."""
        with self._lock:
            while self._done < place:
                self._queue.popleft()()
                self._done += 1


class DeviceStream(SlowStream):
    """As of a device whose computing stream is not the host: to hold that back does nothing that the host could see."""

    def hold_back(self, event: SlowEvent) -> None:
        """Logged alone."""
        self.log.append((self.name, "joins", event.place))


@dataclass
class SlowEvent:
    """A place in a `SlowStream`."""

    stream: SlowStream
    place: int

    def synchronize(self) -> None:
        """The host waits."""
        self.stream.log.append((self.stream.name, "waits", self.place))
        self.stream.reach(self.place)


@contextmanager
def slow_link() -> Iterator[list[Entry]]:
    """Homes made inside are beyond a link of slow streams, as if this process computed on an accelerator. Yields their log."""
    log: list[Entry] = []
    with pytest.MonkeyPatch.context() as patch:

        def make(device: torch.device, pin: bool = False) -> Link:
            return Link.over(device, (SlowStream("to device", log), SlowStream("to host", log)), pin)

        patch.setattr(Link, "to", make)
        yield log
