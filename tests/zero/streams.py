"""Streams for the tests: queues of a pretended device, which do nothing before somebody has to see that it is done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
        self._done, self.lock = 0, threading.RLock()

    def start(self, work: Callable[[], object]) -> int:
        """Queues the work; returns its place."""
        with self.lock:
            self._queue.append(work)
            place = self._done + len(self._queue)
            self.log.append((self.name, "starts", place))
            return place

    def hold_back(self, place: int) -> None:
        """The computing stream of this device is the host."""
        self.log.append((self.name, "joins", place))
        self.reach(place)

    def wait(self, place: int) -> None:
        """The host waits."""
        self.log.append((self.name, "waits", place))
        self.reach(place)

    def reach(self, place: int) -> None:
        """Does the work up to a place."""
        with self.lock:
            while self._done < place:
                self._queue.popleft()()
                self._done += 1


class DeviceStream(SlowStream):
    """As of a device whose computing stream is not the host: to hold that back does nothing that the host could see."""

    def hold_back(self, place: int) -> None:
        """Logged alone."""
        self.log.append((self.name, "joins", place))


@contextmanager
def slow_link() -> Iterator[list[Entry]]:
    """Homes made inside are beyond a link of slow streams, as if this process computed on an accelerator. Yields their log."""
    log: list[Entry] = []
    with pytest.MonkeyPatch.context() as patch:

        def make(device: torch.device, pin: bool = False) -> Link:
            return Link.over(device, (SlowStream("to device", log), SlowStream("to host", log)), pin)

        patch.setattr(Link, "to", make)
        yield log
