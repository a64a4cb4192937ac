"""The trace of a few steps: which it holds, where it goes, and that it is whole or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megazero.arguments import load_config
from megazero.profiling import StepProfiler
from tests.tiny import TINY_MODEL, make_corpus, run_job


def names(file: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]}


def run(profiler: StepProfiler, steps: int) -> None:
    for step in range(1, steps + 1):
        with profiler.step(step), torch.profiler.record_function(f"step {step}"):
            torch.ones(2) + step
    profiler.finish(steps)


@pytest.mark.parametrize("steps, taken, last", [((2, 3), 5, 3), ((4, 4), 4, 4), ((2, 9), 3, 3), ((7, 9), 3, None)])
def test_the_trace_has_the_steps_that_were_asked_for_and_no_others(tmp_path, steps, taken, last):
    run(StepProfiler(steps, tmp_path / "profile"), taken)
    files = list(tmp_path.rglob("*"))
    if last is None:
        assert not files, "no step, no trace"
        return
    file = tmp_path / "profile" / f"rank0_steps_{steps[0]}-{last}.pt.trace.json"
    assert set(files) == {file.parent, file}, "and nothing beside it"
    found = {name for name in names(file) if name.startswith("step ")}
    assert found == {f"step {step}" for step in range(steps[0], last + 1)} and "aten::add" in names(file)


def test_a_step_that_fails_is_the_last_in_the_trace(tmp_path):
    profiler = StepProfiler((1, 3), tmp_path)
    with profiler.step(1):
        torch.ones(2) + 1
    with pytest.raises(FloatingPointError), profiler.step(2):
        raise FloatingPointError
    assert not torch.autograd._profiler_enabled()
    assert "aten::add" in names(tmp_path / "rank0_steps_1-2.pt.trace.json")


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "profile").write_text("a file")
    run(StepProfiler((1, 1), tmp_path / "profile"), 2)
    assert "no trace in " in caplog.text and "training goes on" in caplog.text


def test_the_job_traces_its_first_rank_and_says_where(tmp_path):
    save = str(tmp_path / "run")
    flags = [*TINY_MODEL, *make_corpus(tmp_path), "--save", save, "--load", save, "--profile-steps", "2-3"]
    for iters, said in (("3", "steps 2 to 3 of rank 0 are in "), ("4", "--profile-steps 2-3: iteration 2 is over")):
        done = run_job([*flags, "--train-iters", iters], 2)
        assert done.returncode == 0 and done.stdout.count(said) == 1, done.stdout
    (file,) = (tmp_path / "run" / "profile").iterdir()
    assert file.name == "rank0_steps_2-3.pt.trace.json" and "aten::addmm" in names(file)


def test_flags():
    assert load_config([]).training.profiled_steps is None
    config = load_config("--profile-steps 5 --save x".split())
    assert config.training.profiled_steps == (5, 5) and config.profile_dir == "x/profile"
    assert load_config("--profile-steps 5-7 --save x --profile-dir y".split()).profile_dir == "y"
    for wrong in ("5-4", "0-3", "5-", "a-b", "-", "5:7"):
        with pytest.raises(ValueError, match="give the first and the last iteration to trace"):
            load_config([f"--profile-steps={wrong}", "--save", "x"])
    with pytest.raises(ValueError, match="--profile-steps 50-60 begins behind --train-iters 10"):
        load_config("--profile-steps 50-60 --save x --train-iters 10".split())
    assert not load_config([]).training.skips(1)
    training = load_config("--iterations-to-skip 5-7 3 --train-iters 5".split()).training
    assert [i for i in range(10) if training.skips(i)] == [3, 5, 6, 7]
    with pytest.raises(
        ValueError, match="--iterations-to-skip 3 5-4: give the first and the last iteration to leave out"
    ):
        load_config("--iterations-to-skip 3 5-4".split())
    with pytest.raises(ValueError, match="--iterations-to-skip 3 11 goes beyond --train-iters 10"):
        load_config("--iterations-to-skip 3 11 --train-iters 10".split())
    with pytest.raises(ValueError, match="--profile-dir is where --profile-steps writes to"):
        load_config("--profile-dir x".split())
    with pytest.raises(ValueError, match="give --save, or --profile-dir"):
        load_config("--profile-steps 5".split())
