"""A trace of a few training steps by torch.profiler, as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megazero.files import written_aside

logger = logging.getLogger(__name__)


class StepProfiler:
    """Records what this rank's CPU and GPU do from the beginning of one step to the end of another.

    Args:
        steps: first and last, counted as in the log; None: no step is recorded.
        folder: gets `rank0_steps_FIRST-LAST.pt.trace.json`, which is whole or absent.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path) -> None:
        self.first, self.last = steps or (0, 0)
        self.folder = folder
        self._profile: profile | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The context in which each step runs."""
        if step == self.first:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile = profile(activities=kinds, record_shapes=True)
            self._profile.start()
        try:
            yield
        except BaseException:
            self.finish(step)  # else torch would go on recording whatever the process does
            raise
        if step == self.last:
            self.finish(step)

    def finish(self, step: int) -> None:
        """Writes the trace recorded up to `step`, if there is one. If it cannot be written, it only warns."""
        if self._profile is None:
            return
        path = self.folder / f"rank0_steps_{self.first}-{step}.pt.trace.json"
        try:
            self._profile.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            with written_aside(path) as file:
                self._profile.export_chrome_trace(file.name)
        except (OSError, RuntimeError) as error:
            logger.warning("no trace in %s, training goes on: %s", path, error)
        else:
            logger.info("steps %d to %d of rank 0 are in %s: open it at ui.perfetto.dev", self.first, step, path)
        self._profile = None
