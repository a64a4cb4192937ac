"""The numbers of a run: its log lines, and what they are recorded in: a metrics file, TensorBoard, the loss plot."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from megazero.files import file_named, remove_asides, written_aside
from megazero.wandb_log import WandbLog

logger = logging.getLogger(__name__)

MOST_UNWRITTEN = 1000  # lines that are kept while the file cannot be written; then the oldest go


# Of a StepReport: what is written under another name, or not at all.
_NOT_SCALARS = ("iteration", "train_iters", "phases_s")
# Of a line: what the summary and the plot read. A line of --log-grad-norms has hundreds of other numbers.
_KEPT = ("iteration", "section", "loss", "perplexity", "tokens_per_s", "tflops", "mfu")
# The phases of a step, in the order of Megatron-LM's line.
_PHASES = ("forward", "backward", "allreduce", "allgather", "optimizer", "batch generator", "data loader")


@dataclass(frozen=True)
class StepReport:
    """Averages over the iterations since the last log line. Every field becomes a scalar of its name, unless it is None."""

    iteration: int
    train_iters: int
    step_s: float  # seconds per iteration
    lr: float
    loss: float
    loss_max: float  # of one iteration
    loss_scale: float
    grad_norm: float  # of the last iteration
    grad_norm_max: float  # of one iteration that was not skipped
    skipped: int  # iterations skipped for overflow or left out, in total
    tokens_per_s: float
    tflops: float  # model TFLOP/s of one rank
    mfu: float | None  # share of one rank's peak, if that is known
    phases_s: dict[str, float]  # seconds per iteration by phase

    def line(self) -> str:
        """Megatron-LM's log line of this moment, followed by throughput and the remaining time."""
        left = timedelta(seconds=round(self.step_s * (self.train_iters - self.iteration)))
        mfu = "" if self.mfu is None else f" MFU {100 * self.mfu:.1f}% |"
        return (
            f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {self.iteration:8d}/{self.train_iters:8d} |"
            f" elapsed time per iteration (ms): {self.step_s * 1e3:.1f} |"
            f" learning rate {self.lr:.3E} | lm loss {self.loss:.6E} | loss scale {self.loss_scale:.1f} |"
            f" grad norm {self.grad_norm:.3f} | skipped {self.skipped} | tokens/s {self.tokens_per_s:.0f} |"
            f" TFLOP/s per rank {self.tflops:.3f} |{mfu} ETA {left} |"
        )

    def phases_line(self) -> str:
        """Milliseconds per iteration by phase, in Megatron-LM's order; phases of a script's own come last."""
        names = [name for name in dict.fromkeys((*_PHASES, *self.phases_s)) if name in self.phases_s]
        return "time (ms)" + "".join(f" | {name}: {self.phases_s[name] * 1e3:.2f}" for name in names)

    def scalars(self) -> dict[str, float]:
        """The known values of the report, as flat numbers by name."""
        values = {name: value for name, value in vars(self).items() if name not in _NOT_SCALARS and value is not None}
        return {**values, **{f"time_s/{k}": v for k, v in self.phases_s.items()}}


class MetricsWriter:
    """Appends the scalars of a run to `metrics.jsonl`, TensorBoard and Weights & Biases, and keeps those that it ends with.

    A run drops what the logs have after its starting iteration, so that they describe a single run.

    Args:
        directory: holds metrics.jsonl and the plot; None writes nothing.
        tensorboard_dir: holds the event files; None writes none.
        start_iteration: lines after this one, from an earlier run that was lost, are dropped.
        keeps_lines: whether `lines` keeps something of what is recorded.
        wandb: records the scalars as well; closed with this writer.
    """

    def __init__(
        self,
        directory: str | None,
        tensorboard_dir: str | None,
        start_iteration: int,
        keeps_lines: bool = True,
        wandb: WandbLog | None = None,
    ) -> None:
        self.start_iteration, self._keeps_lines = start_iteration, keeps_lines
        self.path = Path(directory) / "metrics.jsonl" if directory else None
        self._lines: dict[tuple[int, str], dict[str, Any]] = {}
        # Lines, and whether each replaces one.
        self._unwritten: deque[tuple[dict[str, Any], bool]] = deque(maxlen=MOST_UNWRITTEN)
        # By place: what records a line there, of which the second argument are the scalars.
        self._logs: dict[str, Callable[[dict[str, Any], dict[str, float]], None]] = {}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            remove_asides(self.path)
            earlier = _read(self.path) if start_iteration else ()
            self._rewrite(line for line in earlier if line["iteration"] <= start_iteration)
            self._logs[str(self.path)] = self._append
        self._board: Any = None
        if tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and only one rank needs it

            try:
                self._board = SummaryWriter(tensorboard_dir, purge_step=start_iteration + 1)
            except OSError as error:
                raise OSError(f"--tensorboard-dir {tensorboard_dir} cannot be written: {error}") from error
            except UnicodeEncodeError as error:  # the name has bytes that the locale cannot decode
                raise OSError(
                    f"--tensorboard-dir {tensorboard_dir!r} cannot be written: TensorBoard takes names in UTF-8 alone, and this "
                    "one is none in this locale. Set PYTHONUTF8=1 in the environment, name another folder, or give "
                    "--no-tensorboard."
                ) from error
            self._logs[tensorboard_dir] = self._add_scalars
        self.wandb = wandb
        if wandb is not None:
            self._logs[wandb.place] = wandb.write

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What the summary and the plot read of all that was recorded, including by the run that this one continues.

        Oldest first, one line per iteration and section.
        """
        return list(self._lines.values())

    def write(self, iteration: int, scalars: dict[str, float], section: str) -> None:
        """Records scalars of one iteration under a section ("train", "valid", "test", or "valid/NAME" of a set that has a name).

        If the file cannot be written, because the disk is full for example, its lines are kept and written with a later one.
        Another log ends there. Either is a warning: the run, which is worth more, continues.
        """
        fixed = {"iteration": iteration, "section": section, "timestamp": round(time.time(), 3)}
        line = {**fixed, **scalars, **fixed}  # whatever a script calls its own numbers
        for name, record in [*self._logs.items()]:
            try:
                record(line, scalars)
            except OSError as error:
                del self._logs[name]
                logger.warning("the log in %s ends at iteration %d, training goes on: %s", name, iteration, error)
        if self._keeps_lines:
            self._keep(line)

    def _keep(self, line: dict[str, Any]) -> None:
        self._lines[_key(line)] = {name: line[name] for name in _KEPT if name in line}

    def _append(self, line: dict[str, Any], _: dict[str, float]) -> None:
        # A finished run that is started again repeats its last evaluations.
        self._unwritten.append((line, _key(line) in self._lines))
        try:
            self._write_rest()
        except OSError as error:
            if len(self._unwritten) == 1:  # else it has been said
                logger.warning(
                    "the log in %s waits from iteration %d on, to be written later, training goes on: %s",
                    self.path,
                    line["iteration"],
                    error,
                )

    def _write_rest(self) -> None:
        while self.path is not None and self._unwritten:
            line, replaces = self._unwritten[0]
            if replaces:
                self._rewrite(line if _key(earlier) == _key(line) else earlier for earlier in _read(self.path))
            else:
                append_json(self.path, line)
            self._unwritten.popleft()

    def _rewrite(self, lines: Iterable[dict[str, Any]]) -> None:
        """Makes these the lines of the file, from which they may come, one at a time."""
        assert self.path is not None
        with written_aside(self.path) as file, file_named(self.path):
            for line in lines:
                file.write(_as_json(line).encode())
                self._keep(line)

    def _add_scalars(self, line: dict[str, Any], scalars: dict[str, float]) -> None:
        if "://" not in self._board.log_dir:
            os.stat(self._board.log_dir)  # if it is gone, raise here: TensorBoard's thread would print a traceback
        for name, value in scalars.items():
            self._board.add_scalar(f"{line['section']}/{name}", value, line["iteration"], line["timestamp"])
        self._board.flush()

    def close(self, has_failed: bool = False) -> None:
        """Closes the event file, and ends the run of Weights & Biases, as a failed one if the job has failed."""
        with suppress(OSError):  # which has been said
            self._write_rest()
        with suppress(OSError):  # the log may have ended already
            if self._board is not None:
                self._board.close()
        with suppress(OSError):
            if self.wandb is not None:
                self.wandb.close(has_failed)


def _key(line: dict[str, Any]) -> tuple[int, str]:
    return line["iteration"], line["section"]


def _as_json(line: dict[str, Any]) -> str:
    """One line of a file of JSON lines. JSON has no nan or inf, such as the norm of an overflow: they become null."""
    known = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in line.items()}
    return json.dumps(known, allow_nan=False) + "\n"


def append_json(path: str | Path, line: dict[str, Any]) -> None:
    """Appends a line to a file of JSON lines, whole or not at all. An OSError names the file."""
    content = _as_json(line).encode()
    with file_named(Path(path)), open(path, "ab", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        try:
            while content:  # a disk that is nearly full takes a part
                content = content[file.write(content) :]
        except OSError:
            with suppress(OSError):  # such as of a pipe
                file.truncate(end)
            raise


def refuse_unwritable_output(path: str | None) -> None:
    """Makes the file of --output, if one is given, where there is none: what cannot be written fails before the work."""
    try:
        if path is not None:
            open(path, "a").close()
    except OSError as error:
        raise OSError(f"--output {path} cannot be written: {error.strerror}") from error


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file, with nan for null; none where there is no file.

    What no `MetricsWriter` has written is left out, and a line that is half-written or damaged.
    """
    # Not `is_file`: from Python 3.14 on it is False of a file that cannot be looked at, which would then be replaced.
    with suppress(FileNotFoundError), open(path, errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
                kinds = type(line["iteration"]), type(line["section"])
            except (ValueError, RecursionError, TypeError, KeyError):  # the last two: no object, or another one
                continue
            if kinds == (int, str):
                yield {name: math.nan if value is None else value for name, value in line.items()}


def by_section(lines: Iterable[dict[str, Any]], part: str) -> dict[str, list[dict[str, Any]]]:
    """The lines of a part such as "valid", by section: "valid", or, where its sets have names, "valid/NAME"."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line["section"].partition("/")[0] == part:
            found.setdefault(line["section"], []).append(line)
    return found


def plot_losses(lines: Iterable[dict[str, Any]], path: Path) -> bool:
    """Plots training and validation loss over iterations as a PNG; if it cannot, logs the reason and returns False."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no window system, no state
    except ImportError:
        logger.warning("no loss plot: matplotlib is not installed (pip install 'megazero[data]')")
        return False
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="tight")
    axes = figure.subplots()
    lines = list(lines)
    for part, style in (("train", {"linewidth": 1.2}), ("valid", {"marker": "o", "markersize": 4, "linewidth": 1})):
        for section, own in by_section(lines, part).items():
            points = [(line["iteration"], line["loss"]) for line in own]
            axes.plot(*zip(*points, strict=True), label=f"{section} loss", **style)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", title="GPT-2 pretraining")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    try:
        remove_asides(path)
        with written_aside(path) as file:
            figure.savefig(file, format="png")
    except OSError as error:
        logger.warning("no loss plot: %s", error)
        return False
    return True


def perplexity(loss: float) -> float:
    """exp(loss), or inf if that is more than a float can hold. Megatron-LM's stops at exp(20)."""
    return math.inf if loss > 709 else math.exp(loss)
