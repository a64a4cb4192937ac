"""The numbers of a log line, and of metrics.jsonl and TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.metrics import StepReport, by_section

NUMBERS = {
    "step_s": 0.5,
    "lr": 1e-3,
    "loss": 2.5,
    "loss_scale": 1.0,
    "grad_norm": 0.25,
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


def test_phases_are_told_in_megatrons_order_and_a_scripts_own_after_them():
    seconds = {"augment": 1e-3, "data loader": 2e-3, "forward": 3e-3, "backward": 4e-3}
    report = StepReport(**NUMBERS, mfu=None, iteration=2, train_iters=8, phases_s=seconds)
    want = "time (ms) | forward: 3.00 | backward: 4.00 | data loader: 2.00 | augment: 1.00"
    assert report.phases_line() == want


def test_lines_of_a_part_are_told_by_section_in_the_order_of_its_sets():
    lines = [{"iteration": n, "section": s} for n in (1, 2) for s in ("train", "valid/web", "valid/code", "test")]
    assert by_section(lines, "valid") == {"valid/web": lines[1::4], "valid/code": lines[2::4]}
    assert by_section(lines, "train") == {"train": lines[::4]}
