"""Why a rank ends before its work is done: a signal, a time limit, or the end of its launcher."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from typing import Any

import torch

from megazero.children import STOP_SIGNALS
from megazero.comm import OtherRankError


class StopSignal:
    """Why this rank wants to end: a signal (TERM, INT, HUP, USR1, USR2) or a time limit. The loop then ends its step, and saves.

    Until `take_signals`, the signals do what they did before, which by default ends the process. From then on, this is their
    handler, and tells `megazero.entry` which one has come. It also checks whether torchrun is alive.
    """

    def __init__(self) -> None:
        self.received: str | None = None  # the signal
        self._end, self._limit = math.inf, ""  # in the time of time.monotonic()
        self._before: dict[int, Any] = {}  # the handlers in whose place this one is
        self._launcher = os.getppid() if torch.distributed.is_torchelastic_launched() else None

    def take_signals(self) -> None:
        """Makes the signals reasons to end, from here on. Before a loop begins, there is nothing to finish or to save.

        Outside of the main thread, where Python sets no handlers, they stay what they are.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has SIGHUP
                before = signal.signal(number, self)
                if isinstance(before, StopSignal):  # of a job that a signal has ended
                    before = before._before[number]
                self._before[number] = before or signal.SIG_DFL  # None is a handler of C code

    def give_signals_back(self) -> None:
        """Undoes `take_signals`, unless a signal has come: then the process is leaving, and launchers send the same one twice."""
        if self.received is None:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def __call__(self, number: int, _: Any) -> None:
        """Records the signal."""
        self.received = signal.Signals(number).name

    def end_at(self, moment: float, limit: str) -> None:
        """Sets a time limit: from `moment` of `time.monotonic()` on, this rank wants to end because of `limit`.

        Of several limits the earliest counts.
        """
        self._end, self._limit = min((self._end, self._limit), (moment, limit))

    @property
    def reason(self) -> str | None:
        """Why this rank wants to end now; None if it does not."""
        return self.received or (self._limit if time.monotonic() >= self._end else None)

    @property
    def lost_launcher(self) -> OtherRankError | None:
        """What to raise if the torchrun that started this rank has ended, which only SIGKILL makes it do; None if it runs."""
        if self._launcher is None or os.getppid() == self._launcher:
            return None
        return OtherRankError(
            f"torchrun (process {self._launcher}) was killed, and without it no rank can save. The last checkpoint is good."
        )
