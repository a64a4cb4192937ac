"""The numbers of log lines, of metrics.jsonl and of TensorBoard: those of one run, also where runs are lost and disks fail."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest

from megazero.metrics import MetricsWriter, StepReport, append_json, by_section, plot_losses
from tests.tiny import logged

ROOT = Path(__file__).parent.parent
NUMBERS = {
    "step_s": 0.5,
    "lr": 1e-3,
    "loss": 2.5,
    "loss_max": 3.5,
    "loss_scale": 1.0,
    "grad_norm": 0.25,
    "grad_norm_max": 0.5,
    "skipped": 0,
    "tokens_per_s": 640.0,
    "tflops": 0.125,
}


@dataclass(frozen=True)
class _WithOneMore(StepReport):
    param_norm: float = 7.0


def test_every_number_of_a_report_is_a_scalar_of_its_name_unless_it_is_not_known():
    rest = {"iteration": 2, "train_iters": 8, "phases_s": {"forward": 0.125}}
    assert StepReport(**NUMBERS, mfu=None, **rest).scalars() == {**NUMBERS, "time_s/forward": 0.125}
    known = {**NUMBERS, "mfu": 0.5, "time_s/forward": 0.125}
    assert StepReport(**NUMBERS, mfu=0.5, **rest).scalars() == known
    assert _WithOneMore(**NUMBERS, mfu=0.5, **rest).scalars() == {**known, "param_norm": 7.0}


def test_the_page_about_the_log_shows_a_line_as_it_is():
    def words(text: str) -> str:
        return " ".join(re.sub(r"\d[\d.:E+-]*", "N", text).split())

    line = StepReport(**NUMBERS, mfu=None, iteration=2, train_iters=8, phases_s={}).line()
    assert words(line) in words((ROOT / "docs" / "training.md").read_text()), f"docs/training.md lacks {line}"


def test_phases_are_told_in_megatrons_order_and_a_scripts_own_after_them():
    seconds = {"augment": 1e-3, "data loader": 2e-3, "allgather": 5e-3, "forward": 3e-3, "backward": 4e-3}
    report = StepReport(**NUMBERS, mfu=None, iteration=2, train_iters=8, phases_s=seconds)
    want = "time (ms) | forward: 3.00 | backward: 4.00 | allgather: 5.00 | data loader: 2.00 | augment: 1.00"
    assert report.phases_line() == want


def test_lines_of_a_part_are_told_by_section_in_the_order_of_its_sets():
    lines = [{"iteration": n, "section": s} for n in (1, 2) for s in ("train", "valid/web", "valid/code", "test")]
    assert by_section(lines, "valid") == {"valid/web": lines[1::4], "valid/code": lines[2::4]}
    assert by_section(lines, "train") == {"train": lines[::4]}


def test_numbers_that_are_not_finite_are_null_in_the_metrics_file_as_json_has_no_word_for_them(tmp_path):
    """The norm of an overflow, and the perplexity of a large loss; also those that an earlier version has written."""
    path, refuse = tmp_path / "metrics.jsonl", {"parse_constant": lambda word: pytest.fail(f"{word} is no JSON")}
    path.write_text('{"iteration": 1, "section": "train", "perplexity": Infinity, "grad_norm": Infinity}\n')
    for start, x in ((1, math.nan), (2, -math.inf), (3, 0.5)):
        MetricsWriter(str(tmp_path), None, start).write(start + 1, {"perplexity": x, "grad_norm": x}, "train")
    lines = [json.loads(line, **refuse) for line in path.read_text().splitlines()]
    assert [(line["perplexity"], line["grad_norm"]) for line in lines] == [(x, x) for x in (None, None, None, 0.5)]
    resumed = MetricsWriter(str(tmp_path), None, 4)
    assert math.isnan(resumed.lines[0]["perplexity"]), "a number, for the summary and the plot"


def test_a_log_that_cannot_be_looked_at_for_a_moment_is_continued(tmp_path, monkeypatch):
    MetricsWriter(str(tmp_path), None, 0).write(1, {"loss": 8.0}, "train")
    monkeypatch.setattr(Path, "is_file", lambda _: False)  # what Python says from 3.14 on where a disk does not answer
    MetricsWriter(str(tmp_path), None, 1).write(2, {"loss": 7.0}, "train")
    assert [line["loss"] for line in logged(tmp_path)] == [8.0, 7.0]


FOREIGN = """{"note": "lr lowered"}
{"iteration": 1}
{"iteration": "1", "section": "train"}
{"iteration": 1, "section": ["train"]}
["iteration", "section"]
7

{"iteration": 1, "sec"""


@pytest.mark.parametrize("text", [*FOREIGN.splitlines(), "9" * 5000, "[" * 200_000], ids=lambda text: text[:20])
def test_a_line_of_another_program_or_a_damaged_one_takes_none_behind_it_along(tmp_path, text):
    path, lines = tmp_path / "metrics.jsonl", ['{"iteration": 1, "section": "train", "loss": 8.0}', text]
    path.write_text("\n".join([*lines, '{"iteration": 2, "section": "train", "loss": 7.0}', ""]))
    MetricsWriter(str(tmp_path), None, 2).write(3, {"loss": 6.0}, "train")
    assert [line["loss"] for line in logged(tmp_path)] == [8.0, 7.0, 6.0]


def test_a_run_that_continues_elsewhere_starts_a_log_and_one_that_cannot_be_read_is_not_replaced(tmp_path, unreadable):
    MetricsWriter(str(tmp_path), None, 1).write(2, {"loss": 7.0}, "train")
    assert [line["loss"] for line in logged(tmp_path)] == [7.0]
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to(unreadable)
    with pytest.raises(OSError, match="Input/output error"):
        MetricsWriter(str(tmp_path), None, 2)
    assert (tmp_path / "metrics.jsonl").is_symlink()


def test_a_run_that_starts_again_drops_the_points_of_the_one_that_was_lost(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for run, (start, losses) in enumerate([(0, (9.0, 8.0)), (0, (7.0, 6.0)), (1, (5.0,))]):
        metrics = MetricsWriter(None, str(tmp_path), start)
        for iteration, loss in enumerate(losses, start + 1):
            metrics.write(iteration, {"loss": loss}, "train")
        metrics.close()
        (events,) = tmp_path.glob(f"*.{os.getpid()}.*")
        events.rename(tmp_path / f"events.out.tfevents.{run}")  # those of one second might be read in another order
    points = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [(point.step, point.value) for point in points] == [(1, 7.0), (2, 5.0)]


def test_what_a_run_that_was_killed_has_left_aside_goes_when_the_next_one_writes(tmp_path):
    names = [f"{name}.tmp0123abcd" for name in ("metrics.jsonl", "loss.png", "notes.txt")]
    for name in names:
        (tmp_path / name).touch()
    metrics = MetricsWriter(str(tmp_path), None, 0)
    assert plot_losses(metrics.lines, tmp_path / "loss.png")
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "loss.png", names[2]}


def test_an_evaluation_that_is_repeated_replaces_its_line(tmp_path):
    for start in (0, 2):
        metrics = MetricsWriter(str(tmp_path), None, start)
        for iteration in range(start + 1, 3):
            metrics.write(iteration, {"loss": 8.0}, "train")
        for section in ("valid", "test"):
            metrics.write(2, {"loss": 7.0 - start}, section)
    want = [(1, "train", 8.0), (2, "train", 8.0), (2, "valid", 5.0), (2, "test", 5.0)]
    for lines in (logged(tmp_path), metrics.lines):
        assert [(line["iteration"], line["section"], line["loss"]) for line in lines] == want


def test_the_norms_of_all_parameters_stay_in_the_file_and_not_in_memory(tmp_path):
    norms = {f"grad_norm/layers.{layer}.weight": 0.5 for layer in range(9)}
    for start in (0, 1):
        metrics = MetricsWriter(str(tmp_path), None, start)
        metrics.write(start + 1, {"loss": 8.0, **norms}, "train")
        for _ in range(2):  # the second replaces the first, in a file that has the rest
            metrics.write(start + 1, {"loss": 7.0}, "valid")
    kept = {"iteration", "section", "loss"}
    assert [line.keys() for line in metrics.lines] == [kept] * 4
    names = [line.keys() - {"timestamp"} for line in logged(tmp_path)]
    assert names == [kept | norms.keys(), kept] * 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_a_disk_that_is_full_is_named():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        append_json("/dev/full", {"loss": 8.0})


def test_a_scripts_number_of_a_name_that_every_line_has_takes_nothing_from_it(tmp_path):
    own = {"iteration": 7.0, "section": 8.0, "timestamp": 9.0, "loss": 2.0}
    MetricsWriter(str(tmp_path), None, 0).write(1, own, "train")
    (line,) = MetricsWriter(str(tmp_path), None, 1).lines
    assert line == {"iteration": 1, "section": "train", "loss": 2.0}
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["timestamp"] > 9.0


def test_every_line_has_the_time_of_its_events(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("megazero.metrics.time.time", lambda: 1.75e9 + 0.12345)
    metrics = MetricsWriter(str(tmp_path), str(tmp_path / "board"), 0)
    for section in ("train", "valid"):
        metrics.write(1, {"loss": 8.0}, section)
    metrics.close()
    want = {"iteration": 1, "timestamp": 1.75e9 + 0.123, "loss": 8.0}
    assert logged(tmp_path) == [{**want, "section": section} for section in ("train", "valid")]
    points = EventAccumulator(str(tmp_path / "board")).Reload()
    assert {points.Scalars(f"{section}/loss")[0].wall_time for section in ("train", "valid")} == {1.75e9 + 0.123}


def test_a_file_in_the_place_of_the_tensorboard_folder_names_the_flag(tmp_path):
    (tmp_path / "board").touch()
    with pytest.raises(OSError, match=f"--tensorboard-dir {tmp_path / 'board'} cannot be written: .*File exists"):
        MetricsWriter(str(tmp_path), str(tmp_path / "board"), 0)


def test_a_tensorboard_folder_that_is_not_utf8_names_the_ways_out(tmp_path):
    with pytest.raises(
        OSError, match="--tensorboard-dir .* takes names in UTF-8 alone.*PYTHONUTF8=1.*--no-tensorboard"
    ):
        MetricsWriter(None, os.fsdecode(os.fsencode(tmp_path) + b"/s\xe4ve"), 0)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tensorboard_folder_that_vanishes_ends_the_log_with_one_warning_and_no_traceback(tmp_path, caplog):
    metrics = MetricsWriter(None, str(tmp_path / "board"), 0)
    metrics.write(1, {"loss": 8.0}, "train")
    shutil.rmtree(tmp_path / "board")
    for iteration in (2, 3):
        metrics.write(iteration, {"loss": 7.0, "lr": 1.0}, "train")
    metrics.close()
    (end,) = [record.getMessage() for record in caplog.records]
    assert f"the log in {tmp_path / 'board'} ends at iteration 2, training goes on" in end


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard writes in a thread
def test_a_full_disk_ends_the_logs_with_a_warning_and_not_the_run(tmp_path, caplog):
    metrics = MetricsWriter(str(tmp_path), str(tmp_path / "board"), 0)
    metrics.write(1, {"loss": 8.0}, "train")
    (events,) = (tmp_path / "board").iterdir()
    for file in (metrics.path, events):
        file.rename(f"{file}.whole")
        file.symlink_to("/dev/full")
    for iteration in (2, 3, 4):
        metrics.write(iteration, {"loss": 7.0}, "train")
    metrics.close()
    ends = [record.getMessage() for record in caplog.records]
    assert len(ends) == 2, ends
    waits = f"the log in {metrics.path} waits from iteration 2 on, to be written later, training goes on: [Errno 28]"
    assert waits in ends[0], ends
    assert f"the log in {tmp_path / 'board'} ends" in ends[1]
    (tmp_path / "loss.png").mkdir()
    assert not plot_losses([{"iteration": 1, "section": "train", "loss": 8.0}], tmp_path / "loss.png")
    assert "no loss plot: " in caplog.text


def test_a_repeated_line_that_a_full_disk_does_not_take_is_written_with_a_later_one(tmp_path, monkeypatch, caplog):
    MetricsWriter(str(tmp_path), None, 0).write(1, {"loss": 8.0}, "test")
    metrics = MetricsWriter(str(tmp_path), None, 1)
    with monkeypatch.context() as full:
        full.setattr("megazero.metrics.written_aside", Mock(side_effect=OSError(28, "No space left on device")))
        metrics.write(1, {"loss": 7.0}, "test")
    assert "waits from iteration 1 on, to be written later" in caplog.text
    metrics.close()
    assert [line["loss"] for line in logged(tmp_path)] == [7.0]


def test_lines_of_a_time_when_the_disk_was_full_are_written_with_a_later_one(tmp_path, caplog):
    metrics = MetricsWriter(str(tmp_path), None, 0)
    metrics.write(1, {"loss": 8.0}, "train")
    limit = metrics.path.stat().st_size + 100  # of a line of some 75 bytes, a part is taken
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    for iteration in (2, 3, 4):
        metrics.write(iteration, {"loss": 7.0}, "train")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)
    assert [json.loads(line)["iteration"] for line in metrics.path.read_text().splitlines()] == [1, 2]
    metrics.write(5, {"loss": 6.0}, "train")
    assert [json.loads(line)["iteration"] for line in metrics.path.read_text().splitlines()] == [1, 2, 3, 4, 5]
    (warning,) = caplog.messages
    assert "waits from iteration 3 on" in warning
    (tmp_path / "metrics.jsonl").rename(tmp_path / "whole")
    (tmp_path / "metrics.jsonl").mkdir()
    metrics.write(6, {"loss": 6.0}, "train")
    (tmp_path / "metrics.jsonl").rmdir()
    metrics.close()
    assert json.loads(metrics.path.read_text())["iteration"] == 6, "the last are written at the end"


@pytest.mark.parametrize("end", [b"\x00\x88\xff", b'{"iteration": 3, "sec', b"[3]\n"])
def test_a_metrics_file_with_a_damaged_end_does_not_keep_a_run_from_going_on(tmp_path, end):
    for iteration in (1, 2):
        MetricsWriter(str(tmp_path), None, iteration - 1).write(iteration, {"loss": 8.0}, "train")
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(end)
    assert [line["iteration"] for line in MetricsWriter(str(tmp_path), None, 3).lines] == [1, 2]
