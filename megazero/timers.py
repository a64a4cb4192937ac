"""Named stopwatches for the phases of a training step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Timers:
    """Sums the time spent in named phases. On CUDA it records events, so that timing never stalls the device's queue."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time of the `with` block to `name`."""
        if self._on_cuda:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            stop.record()
            self._events.append((name, start, stop))
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
            for name, start, stop in self._events:
                self.add(name, start.elapsed_time(stop) / 1e3)
            self._events.clear()
        seconds, self._seconds = self._seconds, {}
        return seconds
