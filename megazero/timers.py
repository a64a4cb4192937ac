"""Named stopwatches for the phases of a training step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MOST_KEPT = 1000  # phases that the device is done with, and whose events are not read yet


class Timers:
    """Sums the time spent in named phases. On CUDA it records events, so that timing never stalls the device's queue."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time of the `with` block to `name`."""
        if self._on_cuda:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            stop.record()
            self._events.append((name, start, stop))
            while len(self._events) > MOST_KEPT and self._events[0][-1].query():  # nobody may ever read them
                self._read_event()
        else:
            begin = time.perf_counter()
            yield
            self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def read_and_reset(self) -> dict[str, float]:
        """Seconds by name since the last call. On CUDA it waits for the device."""
        if self._events:
            torch.cuda.synchronize()
            while self._events:
                self._read_event()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _read_event(self) -> None:
        name, start, stop = self._events.popleft()
        self.add(name, start.elapsed_time(stop) / 1e3)
