"""Transports for the tests: short, gated, failing and recording ones, all over a real file."""

from __future__ import annotations

import errno
import threading
from collections import defaultdict

from megazero.nvme import FileTransport

TIMEOUT_S = 30  # of what must happen; a test that waits so long has failed


class Buffered(FileTransport):
    """As on a file system without O_DIRECT."""

    def _try_direct(self):
        return "the test says so"


class Short(Buffered):
    """Every call moves at most 1000 bytes."""

    def read(self, view, offset):
        return super().read(view[:1000], offset)

    def write(self, view, offset):
        return super().write(view[:1000], offset)


class Events:
    """What happened in which order, and waiting for it."""

    def __init__(self):
        self.list = []
        self._changed = threading.Condition()

    def add(self, *event):
        with self._changed:
            self.list.append(event)
            self._changed.notify_all()

    def wait(self, *event):
        with self._changed:
            assert self._changed.wait_for(lambda: event in self.list, TIMEOUT_S), f"{event} is not in {self.list}"


class Gated(FileTransport):
    """Records when requests start and end, by kind and offset; keeps those of `held` kinds until they are let go."""

    def __init__(self, file):
        self.events, self.held, self.failing = Events(), set(), {}
        self._gates = defaultdict(threading.Event)
        self._is_tried = False
        super().__init__(file)
        self._is_tried = True

    def let_go(self, kind, offset):
        self._gates[kind, offset].set()

    def let_all_go(self):
        self.held.clear()
        for gate in list(self._gates.values()):
            gate.set()

    def read(self, view, offset):
        return self._pass("read", super().read, view, offset)

    def write(self, view, offset):
        return self._pass("write", super().write, view, offset)

    def _pass(self, kind, call, view, offset):
        if not self._is_tried:
            return call(view, offset)
        gate = self._gates[kind, offset]
        is_held = kind in self.held
        self.events.add(kind, offset, "starts")
        if is_held:
            assert gate.wait(TIMEOUT_S)
        if (kind, offset) in self.failing:
            raise OSError(self.failing[kind, offset], "injected")
        moved = call(view, offset)
        self.events.add(kind, offset, "ends")
        return moved


def gated():
    """A factory for SwapFile(transport=...), and a list that the transport will be in."""
    made = []

    def make(file):
        made.append(Gated(file))
        return made[0]

    return make, made


BROKEN_DRIVE = errno.EIO
