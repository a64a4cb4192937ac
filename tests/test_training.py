"""The training job end to end: it learns, resumes bit for bit, stops when asked, and refuses what cannot work."""

from __future__ import annotations

import fcntl
import gc
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import pretrain_gpt2
from megazero import comm, mpu, training
from megazero.arguments import load_config
from megazero.children import STOP_SIGNALS, children
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.inference import InferenceConfig, load_model, open_checkpoint
from megazero.job import Job
from megazero.job_checkpoints import _changes, job_tokenizer
from megazero.launch import describe
from megazero.out_of_memory import tells_out_of_memory
from megazero.stop_signal import StopSignal
from megazero.timers import MOST_KEPT, Timers
from megazero.training import _evaluating, _raise_not_finite, evaluate
from tests.ranks import free_port, run_ranks, run_script
from tests.test_runner import ends_within
from tests.test_wandb_log import FakeWandb
from tests.tiny import TINY_MODEL, launch_job, logged, make_texts, make_vocabulary, run_command, run_job

ROOT = Path(__file__).parent.parent


def metrics(save: Path, section: str = "train") -> dict[int, float]:
    text = (save / "metrics.jsonl").read_text()
    whole = text[: text.rfind("\n") + 1]  # the last line may be on its way to the file
    lines = [json.loads(line) for line in whole.splitlines()]
    return {line["iteration"]: line["loss"] for line in lines if line["section"] == section}


def flags(corpus, save, iters: int, *more: str) -> list[str]:
    return [
        *TINY_MODEL,
        *corpus,
        "--train-iters",
        str(iters),
        "--log-interval",
        "1",
        "--save",
        str(save),
        "--load",
        str(save),
        *more,
    ]


def test_loss_falls_and_everything_promised_is_written(corpus, tmp_path):
    batches = ("--eval-iters", "8", "--eval-batch-size", "4")  # more than one epoch of the validation data
    evaluations = ("--eval-interval", "30", *batches)
    done = run_job(flags(corpus, tmp_path, 60, "--lr", "1e-2", "--log-interval", "10", *evaluations), 2)
    assert done.returncode == 0, done.stdout
    losses = metrics(tmp_path)
    assert losses[60] < 0.8 * losses[10]
    assert set(metrics(tmp_path, "valid")) == {30, 60} and set(metrics(tmp_path, "test")) == {60}
    consumed = {line["section"]: line["consumed_samples"] for line in logged(tmp_path) if line["iteration"] == 60}
    assert consumed == dict.fromkeys(("train", "valid", "test"), 2 * 2 * 60)
    assert {line.get("evaluated_samples") for line in logged(tmp_path)} == {None, 8 * 4 * 2}
    lines = [line for line in logged(tmp_path) if line["section"] == "train"]
    tokens = [line["tokens_per_s"] * line["step_s"] for line in lines]
    assert tokens == pytest.approx([2 * 2 * 32] * 6), "of a step, in each interval"
    assert [line["consumed_samples"] for line in lines] == [2 * 2 * n for n in range(10, 61, 10)]
    assert {line["world_size"] for line in lines} == {2}
    first = re.search(r"training loss +([\d.]+) at the first step", done.stdout)
    assert first and float(first[1]) > losses[10], "the mean of the first ten"
    for promised in ("loss.png", "latest", "tensorboard", "global_step60/index.json"):
        assert (tmp_path / promised).exists()
    for text in (
        "iteration       60/      60 |",
        "validation perplexity",
        "tokens/s",
        "% of the device's peak, in the same line)",
        "peak memory per rank",
        "generate text",
        "after 10 iterations memory",
        "run         60 iterations in all, 7,680 tokens, 1.76e+09 FLOP",
    ):
        assert text in done.stdout
    second = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.search(rf"^  started     {second}\n(?s:.*)^ \[{second}\] iteration", done.stdout, re.MULTILINE)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"train/loss", "train/lr", "train/grad_norm", "train/mfu", "valid/perplexity"} <= set(
        events.Tags()["scalars"]
    )


def test_the_largest_loss_and_norm_of_an_interval_are_those_of_its_steps_that_were_not_skipped(corpus, tmp_path):
    """In fp16, whose first loss scales are too large for a step."""
    more = ("--fp16", "--initial-loss-scale", "320000", "--hysteresis", "1", "--lr", "1e-1")
    for run, every in (("each", "1"), ("three", "3")):
        done = run_job(flags(corpus, tmp_path / run, 6, *more, "--log-interval", every), 1)
        assert done.returncode == 0, done.stdout
    each, three = ([line for line in logged(tmp_path / run) if line["section"] == "train"] for run in ("each", "three"))
    assert any(line["grad_norm"] is None for line in each) and any(line["grad_norm"] for line in each)
    for line, steps in zip(three, (each[:3], each[3:]), strict=True):
        norms = [step["grad_norm"] for step in steps if step["grad_norm"] is not None]
        assert line["loss_max"] == max(step["loss"] for step in steps) > line["loss"]
        assert line["grad_norm_max"] == max(norms)


def test_sets_with_names_have_the_losses_that_they_have_alone_and_leave_the_training_as_it_is(corpus, tmp_path):
    tiny, lines = corpus[1], tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": text[::-1]}) + "\n" for text in make_texts(30)))
    for run, sets in {"both": [f"a={tiny}", f"b={lines}"], "a": [tiny], "b": [str(lines)]}.items():
        evaluations = ("--eval-interval", "2", "--eval-iters", "3", "--valid-data", *sets)
        done = run_job(flags(corpus, tmp_path / run, 4, *evaluations), 1)
        assert done.returncode == 0, done.stdout
        if run == "both":
            for promised in ("a at iteration 2 |", "b at iteration 2 |", "b at the end of training |"):
                assert f" validation loss of {promised} LM loss: " in done.stdout, done.stdout
            assert all(f"validation perplexity of {name}  " in done.stdout for name in "ab")
            assert {line["section"] for line in logged(tmp_path / run)} == {"train", "valid/a", "valid/b", "test"}
        else:
            alone = metrics(tmp_path / run, "valid")
            assert set(alone) == {2, 4} and metrics(tmp_path / "both", f"valid/{run}") == alone
            assert metrics(tmp_path / "both") == metrics(tmp_path / run)


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param((), marks=pytest.mark.slow, id="data-parallel"),  # as in test_zero_job.py, but for the kill
        pytest.param(("--model-parallel-size", "2", "--bf16"), id="model-parallel bf16"),
    ],
)
def test_a_run_that_was_killed_and_resumed_equals_the_whole_run_bit_for_bit_with_dropout(corpus, tmp_path, extra):
    """The second run is killed without warning some steps after its checkpoint of step 20."""
    extra = ("--attention-dropout", "0.2", "--hidden-dropout", "0.2", "--save-interval", "20", *extra)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_job(flags(corpus, whole, 80, *extra), 2).returncode == 0
    process = start_job(flags(corpus, cut, 80, *extra), 2)
    wait_for_step(cut, 26)
    subprocess.run(["pkill", "-KILL", "-f", str(cut)], check=True)  # launcher, ranks and all
    process.wait()
    saved = int((cut / "latest").read_text().removeprefix("global_step"))
    assert 20 <= saved < 80
    done = run_job(flags(corpus, cut, 80, *extra), 2)
    assert f"continuing after iteration {saved}" in done.stdout
    assert metrics(cut) == metrics(whole)
    assert weights(cut) == weights(whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "extra",
    [("--zero-stage", "1", "--fp16"), ("--zero-stage", "3", "--offload-optimizer", "cpu", "--async-save")],
    ids=["fp16", "O in host memory"],
)
def test_a_job_on_a_gpu_that_goes_on_equals_the_whole_run_bit_for_bit_with_dropout(corpus, tmp_path, extra):
    """Its random streams, batches and timers are CUDA's."""
    extra = ("--attention-dropout", "0.2", "--hidden-dropout", "0.2", "--eval-iters", "2", *extra)
    job = flags(corpus, tmp_path / "whole", 8, "--deterministic-mode", *extra)
    assert (done := run_job(job, 1)).returncode == 0, done.stdout
    for _ in range(2):
        job = flags(corpus, tmp_path / "cut", 8, "--deterministic-mode", "--exit-interval", "4", *extra)
        assert (done := run_job(job, 1)).returncode == 0, done.stdout
    assert "continuing after iteration 4" in done.stdout
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def weights(save: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (save / "global_step80").glob("rank_*.safetensors")}


def test_data_order_continues_under_another_data_parallel_size(corpus, tmp_path):
    """10 steps on 2 ranks, then 10 on 1 rank with the same global batch: the losses of 20 steps on 1 rank, to round-off."""
    batch = ("--global-batch-size", "4", "--batch-size", "2")
    assert run_job(flags(corpus, tmp_path / "a", 20, *batch), 1).returncode == 0
    assert run_job(flags(corpus, tmp_path / "b", 20, *batch, "--exit-interval", "10"), 2).returncode == 0
    done = run_job(flags(corpus, tmp_path / "b", 20, *batch), 1)
    assert "stay as this run has seeded them" in done.stdout
    a, b = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    assert a.keys() == b.keys() == set(range(1, 21))
    torch.testing.assert_close(torch.tensor(list(b.values())), torch.tensor(list(a.values())), rtol=1e-4, atol=1e-4)


def test_iterations_to_skip_read_their_batches_count_and_leave_the_weights(corpus, tmp_path):
    """At a rate of 0 the iterations that are trained have the losses that they have in a run that leaves none out."""
    still = ("--lr", "0", "--batch-size", "1", "--global-batch-size", "4")
    assert run_job(flags(corpus, tmp_path / "whole", 8, *still), 2).returncode == 0
    done = run_job(flags(corpus, tmp_path / "left", 8, *still, "--iterations-to-skip", "8", "1", "3-5"), 2)
    assert re.search(r"left out +iterations 8, 1, 3 to 5\n", done.stdout), done.stdout
    assert done.stdout.count("memory after the first step") == 1
    whole, left = metrics(tmp_path / "whole"), metrics(tmp_path / "left")
    assert left == {iteration: whole[iteration] for iteration in (2, 6, 7)}
    last = logged(tmp_path / "left")[-1]
    assert (last["skipped"], last["consumed_samples"]) == (4, 28)
    assert last["tokens_per_s"] * last["step_s"] == pytest.approx(4 * 32), "of a step that is trained"
    assert (tmp_path / "left" / "global_step8").is_dir()
    done = run_job(flags(corpus, tmp_path / "left", 9, *still, "--iterations-to-skip", "9-1000000000000"), 1)
    assert (tmp_path / "left" / "global_step9").is_dir() and "memory after the first step" not in done.stdout


def test_a_phase_of_other_data_begins_at_its_first_sample_and_goes_on_when_resumed(corpus, tmp_path):
    """At a rate of 0 the phase's losses are those of a new run of its length; the trunk's are as if it ended there."""
    other = [*corpus, "--split", "4,5,1"]
    more = ("--lr", "0", "--batch-size", "1", "--global-batch-size", "4", "--save-interval", "2")
    for name, data, iters in (("first", corpus, 3), ("second", other, 5)):
        assert run_job(flags(data, tmp_path / name, iters, *more), 2).returncode == 0
    whole, phases = tmp_path / "whole", ("--phase-transition-iterations", "3")
    done = run_job(flags(corpus, whole, 8, *more, *phases), 2)
    assert "stopping after iteration 3: --phase-transition-iterations 3" in done.stdout
    assert "8 iterations in all, 1,024 tokens" in done.stdout, "of all phases"
    for world, exits in ((2, ("--exit-interval", "5")), (1, ())):
        done = run_job(flags(other, whole, 8, *more, *phases, *exits), world)
        assert done.returncode == 0 and "some samples come again" not in done.stdout, done.stdout
        begins = "a phase of the data begins" in done.stdout, "checkpoint: --split 8,1,1 -> 4,5,1" in done.stdout
        assert begins == (world == 2,) * 2
        assert " of 32 tokens, 20 asked for" in done.stdout
    expected = {**metrics(tmp_path / "first"), **{i + 3: loss for i, loss in metrics(tmp_path / "second").items()}}
    torch.testing.assert_close(metrics(whole), expected, rtol=1e-6, atol=0)
    done = run_job(flags(other, whole, 9, *more, "--phase-transition-iterations", "6"), 1)
    assert "at iteration 8, in a phase that began after 3. Name 8, or go back to global_step6" in done.stdout


def test_a_run_stopped_among_iterations_to_skip_equals_the_whole_run_bit_for_bit_with_dropout(corpus, tmp_path):
    extra = "--hidden-dropout 0.2 --model-parallel-size 2 --iterations-to-skip 3-5 --log-interval 2".split()
    assert run_job(flags(corpus, tmp_path / "whole", 8, *extra), 2).returncode == 0
    for _ in range(2):
        done = run_job(flags(corpus, tmp_path / "cut", 8, *extra, "--exit-interval", "4"), 2)
        assert done.returncode == 0, done.stdout
    assert re.search(r"left out +iterations 5\n", done.stdout), done.stdout
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole") and set(metrics(tmp_path / "cut")) == {2, 6, 8}


def test_gradients_norms_are_of_the_last_iteration_of_each_line_unless_it_is_skipped(corpus, tmp_path):
    more = ("--log-grad-norms", "--log-interval", "2", "--iterations-to-skip", "4")
    assert run_job(flags(corpus, tmp_path, 6, *more), 2).returncode == 0
    for line in (line for line in logged(tmp_path) if line["section"] == "train"):
        norms = [value for name, value in line.items() if name.startswith("grad_norm/")]
        assert math.hypot(*norms) == (0 if line["iteration"] == 4 else pytest.approx(line["grad_norm"], rel=1e-4))


def test_exit_interval_stops_a_run_and_its_end_is_evaluated_all_the_same(corpus, tmp_path):
    cut = flags(corpus, tmp_path, 4, "--exit-interval", "2", "--eval-iters", "1")
    done = run_job(cut, 1)
    assert "1 micro-batch of 2 sequences on each of 1 data-parallel rank\n" in done.stdout
    assert "stopping after iteration 2: --exit-interval 2" in done.stdout and "perplexity" not in done.stdout
    done = run_job(cut, 1)
    assert "stopping after" not in done.stdout and "validation perplexity" in done.stdout


def not_finite_case(arguments: list[str]) -> None:
    def fail(job: Job) -> None:
        job.own_scalars["update"] = job.iteration + 1
        if job.iteration == 6:
            raise FloatingPointError

    with pytest.raises(FloatingPointError):
        pretrained(arguments, before_update=fail)


def test_what_came_after_the_last_line_of_the_log_is_written_at_the_end(corpus, tmp_path):
    assert (
        run_job(flags(corpus, tmp_path / "stops", 20, "--log-interval", "4", "--exit-interval", "6"), 2).returncode == 0
    )
    run_ranks(2, not_finite_case, flags(corpus, tmp_path / "fails", 20, "--log-interval", "4"))
    for end in ("stops", "fails"):
        assert list(metrics(tmp_path / end)) == [4, 6]
    assert [line["update"] for line in logged(tmp_path / "fails")] == [4, 6]


def test_a_run_is_left_after_each_multiple_of_its_interval_and_at_the_end_of_each_phase(corpus):
    ends = ["--exit-interval", "4", "--phase-transition-iterations", "3", "6"]
    training = load_config([*TINY_MODEL, *corpus, *ends]).training
    assert [iteration for iteration in range(1, 9) if training.exits_after(iteration)] == [3, 4, 6, 8]


def test_a_run_ends_when_its_time_is_over_on_all_ranks_alike_and_goes_on(corpus, tmp_path):
    """The first rank's clock decides; the step that is under way at the end of 2 s is done, and saved."""
    arguments = flags(corpus, tmp_path, 1_000_000, "--exit-duration-in-mins")
    done = run_job([*arguments, f"{2 / 60:.4f}"], 2)
    assert done.returncode == 0, done.stdout
    last = max(metrics(tmp_path))
    assert f"stopping after iteration {last}: --exit-duration-in-mins 0.0333\n" in done.stdout
    assert (tmp_path / "latest").read_text() == f"global_step{last}"
    done = run_job([*arguments, "60", "--train-iters", str(last + 2)], 2)
    assert done.returncode == 0 and "stopping after" not in done.stdout, done.stdout
    assert list(metrics(tmp_path)) == list(range(1, last + 3))


def test_of_several_time_limits_the_earliest_counts():
    stop = StopSignal()
    stop.end_at(time.monotonic(), "now")
    stop.end_at(time.monotonic() + 1000, "later")
    assert stop.reason == "now"


# Each becomes the SIGTERM that the launcher passes on (tests/test_runner.py).
@pytest.mark.parametrize("name", [pytest.param("SIGTERM", marks=pytest.mark.slow), "SIGINT", "SIGUSR1"])
def test_signal_finishes_the_step_saves_and_exits_zero(corpus, tmp_path, name):
    process = start_job(flags(corpus, tmp_path, 100_000, "--num-workers", "2"), 1)
    wait_for_step(tmp_path, 3)
    process.send_signal(getattr(signal, name))
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    last = max(metrics(tmp_path))
    assert f"the launcher got {name}: " in output
    assert f"stopping after iteration {last}: SIGTERM" in output  # which is what the launcher passes on
    assert (tmp_path / "latest").read_text() == f"global_step{last}"


def test_a_signal_that_the_job_was_started_to_ignore_stays_ignored():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for ignored in (True, False):
            stop = StopSignal()
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
            stop.take_signals()
            signal.raise_signal(signal.SIGHUP)
            assert stop.reason == (None if ignored else "SIGHUP")
        for number in numbers:  # also those whose default action would end the job without a save
            signal.raise_signal(number)
            assert stop.reason == number.name
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_what_c_code_has_handled_gets_its_default_action_back(monkeypatch):
    given: dict[int, object] = {}
    monkeypatch.setattr(signal, "signal", given.__setitem__)  # None is what Python has of such a handler
    stop = StopSignal()
    stop.take_signals()
    taken = dict.fromkeys(given, stop)
    assert given and given == taken
    stop.give_signals_back()
    assert given == dict.fromkeys(taken, signal.SIG_DFL)


def pretrained(arguments: list[str], base: Path | None = None, **more: object) -> Job:
    """The job, trained in this process; from the weights in `base`, which are named in the configuration alone."""
    config = load_config(arguments)
    checkpoint = replace(config.checkpoint, pretrained_checkpoint=base and str(base))
    config = replace(config, checkpoint=checkpoint)
    return training.pretrain(
        config, job_tokenizer(config), pretrain_gpt2.make_model, pretrain_gpt2.forward_step, **more
    )


def handlers_case(arguments: list[str], when: str) -> bool:
    def ask(job: Job) -> None:
        if when == "a rank is signalled" and comm.get_rank() == comm.get_world_size() - 1:
            signal.raise_signal(signal.SIGUSR1)
        if when == "a limit is reached":
            job.stop.end_at(time.monotonic(), when)
        if "fails" in when:
            failed.append(job)
            raise FloatingPointError(when)

    failed: list[Job] = []
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    if when == "it fails under torchrun":
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
    work = partial(pretrained, arguments, before_update=ask)
    if when == "in another thread":
        with ThreadPoolExecutor() as pool:
            job = pool.submit(work).result()
    else:
        with pytest.raises(FloatingPointError) if "fails" in when else nullcontext():
            job = work()
        job = failed[0] if failed else job
    after = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    taken = {number: handler if handler is signal.SIG_IGN else job.stop for number, handler in before.items()}
    assert after in (before, taken)
    steps = {"a rank is signalled": 1, "a limit is reached": 1}
    assert job.iteration == (0 if failed else steps.get(when, 2))
    return after == before


@pytest.mark.parametrize(
    ("when", "ranks", "are_back"),
    [
        ("it ends by itself", 1, True),
        ("in another thread", 1, True),
        ("a limit is reached", 1, True),
        ("it fails", 1, True),
        ("it fails under torchrun", 1, False),
        ("a rank is signalled", 2, False),
    ],
)
def test_pretrain_gives_signals_back_to_its_caller_unless_the_process_is_leaving(
    corpus, tmp_path, when, ranks, are_back
):
    assert run_ranks(ranks, handlers_case, flags(corpus, tmp_path, 2), when) == [are_back] * ranks


def failed_case(arguments: list[str]) -> None:
    def fail(job: Job) -> None:
        engines.append(weakref.ref(job.engine))
        raise FloatingPointError

    engines: list[weakref.ref] = []
    sys.modules["wandb"] = wandb = FakeWandb()
    with pytest.raises(FloatingPointError):
        pretrained(arguments, before_update=fail)
    gc.collect()
    assert engines[0]() is None
    assert [run.status for run in wandb.runs] == [1], "else the package would go on with it in the next job"
    assert not any("Writer" in type(thread).__name__ for thread in threading.enumerate()), "of TensorBoard"


def test_nothing_stays_of_a_job_that_has_failed_in_its_first_step(corpus, tmp_path):
    run_ranks(1, failed_case, flags(corpus, tmp_path, 1, "--wandb-project", "gpt2"))


def own_scalars_case(arguments: list[str]) -> None:
    def measure(job: Job) -> None:
        job.own_scalars |= {"tensor": torch.tensor(1.5), "numpy": np.float32(2.5), "count": 3}

    pretrained(arguments, before_update=measure)


def test_a_scripts_own_numbers_may_be_tensors_and_numpys(corpus, tmp_path):
    run_ranks(1, own_scalars_case, flags(corpus, tmp_path, 1))
    (line,) = logged(tmp_path)
    assert (line["tensor"], line["numpy"], line["count"]) == (1.5, 2.5, 3)


def jobs_case(corpus: list[str], folder: Path) -> None:
    losses = [pretrained(flags(corpus, folder / name, 2)).first_loss for name in ("a", "b")]
    assert losses[0] == losses[1]
    tuned = pretrained(flags(corpus, folder / "c", 2), folder / "a")
    assert tuned.first_loss < losses[0] and tuned.iteration == 2
    trained = open_checkpoint(InferenceConfig(load=str(folder / "a")))
    _, groups = load_model(InferenceConfig(load=str(folder / "a")), trained)
    assert groups is mpu.get_groups()
    with pytest.raises(RuntimeError, match="the groups exist already, with model-parallel size 1"):
        load_model(InferenceConfig(load=str(folder / "a"), model_parallel_size=2), trained)


def test_a_process_runs_jobs_and_reads_models_over_the_same_groups(corpus, tmp_path):
    run_ranks(2, jobs_case, corpus, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends them")
def test_the_data_loaders_workers_end_with_a_rank_that_is_killed(corpus, tmp_path):
    command = [sys.executable, str(ROOT / "pretrain_gpt2.py"), *flags(corpus, tmp_path, 100_000, "--num-workers", "2")]
    rank = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
    )
    wait_for_step(tmp_path, 1)
    workers = children(rank.pid)
    rank.kill()
    rank.wait()
    assert len(workers) == 2
    assert all(ends_within(1.5, worker) for worker in workers), "torch's workers look for their rank every 5 s"


SIGNALLED_IN_AN_EVALUATION = """
import itertools, os, signal
import pretrain_gpt2
import torch
from megazero.entry import run_script
from megazero.training import pretrain

evaluated = itertools.count()

def forward_step(job, iterator):
    if os.environ["RANK"] == "1" and not torch.is_grad_enabled() and next(evaluated) == 2:
        signal.raise_signal(signal.SIGTERM)
    return pretrain_gpt2.forward_step(job, iterator)

parts = (pretrain_gpt2.make_model, forward_step, pretrain_gpt2.count_tokens)
run_script(pretrain_gpt2.check, lambda checked: pretrain(*checked, *parts))
"""


@pytest.mark.parametrize("iters", [pytest.param(100, id="in between"), pytest.param(2, id="at the end")])
def test_signal_to_one_rank_ends_an_evaluation_on_all_ranks_without_another_step(corpus, tmp_path, iters):
    """The evaluation would take minutes. Its last batch is done, and the training stays where it was."""
    script = tmp_path / "script.py"
    script.write_text(SIGNALLED_IN_AN_EVALUATION)
    evaluations = ("--eval-interval", "2", "--eval-iters", "100000", "--calculate-per-token-loss")
    done = run_script(2, str(script), flags(corpus, tmp_path, iters, *evaluations))
    output = done.stdout
    assert done.returncode == 0, output
    where = "iteration 2" if iters > 2 else "the end of training"
    assert f"no validation loss at {where}: SIGTERM, on rank 1" in output and "LM PPL" not in output, output
    assert "test loss" not in output, "no batch of the other part is evaluated, either"
    assert ("stopping after iteration 2: SIGTERM, on rank 1" in output) == (iters > 2), output
    assert list(metrics(tmp_path)) == [1, 2] and (tmp_path / "latest").read_text() == "global_step2"


SIGNALLED_IN_A_SAVE = """
import os, runpy, signal
from megazero import training

def save(job, save=training.save):
    save(job)
    if os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGTERM)

training.save = save
runpy.run_path("pretrain_gpt2.py", run_name="__main__")
"""


def test_signal_to_one_rank_in_a_save_ends_all_ranks_without_another_step(corpus, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SIGNALLED_IN_A_SAVE)
    done = run_script(2, str(script), flags(corpus, tmp_path, 9, "--save-interval", "2"))
    said = "stopping after iteration 2: SIGTERM, on rank 1"
    assert done.returncode == 0 and said in done.stdout, done.stdout
    assert list(metrics(tmp_path)) == [1, 2] and (tmp_path / "latest").read_text() == "global_step2"


def test_sigterm_to_every_process_of_a_job_saves_too(corpus, tmp_path):
    """As `timeout` does, and batch systems that know no tasks: the data loader's workers get it beside their rank."""
    command = [sys.executable, "pretrain_gpt2.py", *flags(corpus, tmp_path, 100_000, "--num-workers", "2")]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    wait_for_step(tmp_path, 3)
    workers = children(process.pid)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and len(workers) >= 2, output
    assert (tmp_path / "latest").read_text() == f"global_step{max(metrics(tmp_path))}"
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


STRIKES_WORKERS = """
import os, runpy, signal
from megazero import job_batches

def outlive_sigterm(number, really=job_batches._outlive_sigterm):
    os.kill(os.getpid(), signal.SIGTERM)
    really(number)

job_batches._outlive_sigterm = outlive_sigterm
runpy.run_path("pretrain_gpt2.py", run_name="__main__")
"""


def test_sigterm_while_the_workers_of_a_data_loader_start_ends_none_of_them(corpus, tmp_path):
    """torchrun signals the process group of a rank, in which an evaluation may just have begun."""
    script = tmp_path / "script.py"
    script.write_text(STRIKES_WORKERS)
    arguments = flags(corpus, tmp_path / "saved", 4, "--num-workers", "2", "--eval-interval", "2", "--eval-iters", "2")
    done = run_script(1, str(script), arguments)
    assert done.returncode == 0 and len(metrics(tmp_path / "saved", "valid")) == 2, done.stdout


IMPORTING = [["pretrain_gpt2.py"], ["evaluate_gpt2.py"], ["generate_samples.py"], ["-m", "megazero.launch", "x.py"]]


@pytest.mark.parametrize("command", IMPORTING, ids=lambda command: command[-1])
def test_ctrl_c_while_torch_is_imported_prints_nothing(command):
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(lambda: "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=200) == ("", None) and process.returncode == -signal.SIGINT


@pytest.mark.parametrize("by", ["itself", "the launcher"])
def test_ctrl_c_while_others_are_waited_for_ends_the_process(corpus, by):
    with socket.create_server(("127.0.0.1", 0)) as mute:  # in place of the first rank, or node
        mute.settimeout(60)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(mute.getsockname()[1])}
        where = ["--nnodes=2", "--node-rank=1", f"--master-port={address['MASTER_PORT']}"]
        launcher = ["-m", "megazero.launch", *where] if by == "the launcher" else []
        process = subprocess.Popen(
            [sys.executable, *launcher, "pretrain_gpt2.py", *TINY_MODEL, *corpus],
            cwd=ROOT,
            env={**os.environ, **address, "RANK": "1", "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            connection, _ = mute.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                output, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT and "Traceback" not in output, output
    assert len(output.splitlines()) == (by == "the launcher"), output  # where it waits


def test_a_rank_that_a_signal_ended_is_explained():
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=-signal.SIGABRT, error_file="")
    said = describe(5, failure)
    assert said.startswith(
        "rank 5 was ended by SIGABRT; on GPUs most likely by NCCL's watchdog, because a collective did not end"
    )
    assert "torchfrtrace" in said and "\n" not in said
    bus = describe(5, ProcessFailure(local_rank=1, pid=1, exitcode=-signal.SIGBUS, error_file=""))
    assert bus.startswith("rank 5 was ended by SIGBUS: a page of a mapped file is not there.") and "\n" not in bus
    other = ProcessFailure(local_rank=1, pid=1, exitcode=-signal.SIGSEGV, error_file="")
    assert describe(5, other) == "rank 5 was ended by SIGSEGV."
    nameless = ProcessFailure(local_rank=1, pid=1, exitcode=-(signal.SIGRTMIN + 1), error_file="")
    assert describe(5, nameless) == f"rank 5 was ended by signal {signal.SIGRTMIN + 1}."


KILLED_WHILE = """
import os
import signal
import time
import pretrain_gpt2
import torch
from megazero.entry import run_script
from megazero.training import pretrain

def forward_step(job, iterator):
    if job.iteration == 2:
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep({busy_s})
    return pretrain_gpt2.forward_step(job, iterator)

run_script(pretrain_gpt2.check, lambda checked: pretrain(*checked, pretrain_gpt2.make_model, forward_step))
"""


# The launcher's SIGTERM comes after the other rank has missed the killed one, or before, while it is busy and the job's handler
# takes the signal for a wish to save and end.
@pytest.mark.parametrize("busy_s", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_killed_rank_is_one_line_and_no_traceback_of_another(corpus, tmp_path, busy_s):
    script = tmp_path / "killed_while.py"
    script.write_text(KILLED_WHILE.format(busy_s=busy_s))
    process = start_job(flags(corpus, tmp_path / "saved", 5), 2, str(script), PYTHONPATH=str(ROOT))
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGKILL, output
    assert "rank 1 was killed (SIGKILL)" in output.splitlines()[-1]
    assert "Traceback" not in output and "error" not in output


@pytest.mark.parametrize("status", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_launch_leaves_nothing_among_the_temporary_files(tmp_path, monkeypatch, status):
    script, folder = tmp_path / "script.py", tmp_path / "tmp"
    script.write_text(f"raise SystemExit({status})\n")
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    done = run_command([sys.executable, "-m", "megazero.launch", "--standalone", "--nproc-per-node", "1", str(script)])
    assert done.returncode == status, done.stdout
    assert list(folder.iterdir()) == []


LEAVES_LATE = """
import time
import torch.distributed as dist
from megazero import comm
from megazero.entry import run_script

def work(_):
    comm.init_distributed()
    time.sleep(dist.get_rank())
    print(f"works until {time.monotonic()} ", flush=True)

run_script(int, work)
print(f"ends at {time.monotonic()} {dist.is_initialized()}", flush=True)
"""


def test_the_ranks_of_a_script_leave_the_world_together_at_its_end(tmp_path):
    """A gloo thread that drops the last collective's tensors while the interpreter ends aborts the process."""
    script = tmp_path / "leaves_late.py"
    script.write_text(LEAVES_LATE)
    done = run_script(2, str(script), [])
    # Not by lines: both ranks write at the same moment, and the ends of their lines may come after both.
    works = [float(until) for until in re.findall(r"works until (\d+\.\d+)", done.stdout)]
    (first, is_in), (second, too) = re.findall(r"ends at (\d+\.\d+) (True|False)", done.stdout)
    assert done.returncode == 0 and is_in == too == "False"
    assert len(works) == 2 and min(float(first), float(second)) >= max(works)


@pytest.mark.parametrize("said", ["Resource temporarily unavailable", "can't start new thread"])
def test_a_limit_on_threads_is_one_line(tmp_path, said):
    script = tmp_path / "short_of_threads.py"
    work = f'def work(_):\n    raise RuntimeError("{said}")\n'
    script.write_text(f"from megazero.entry import run_script\n{work}run_script(int, work)\n")
    done = run_script(1, str(script), [])
    assert done.returncode == 1 and "Traceback" not in done.stdout
    assert f"error: no more threads can be started ({said}). Raise `ulimit -u`" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch can use this machine's GPUs")
def test_gpus_that_pytorch_cannot_use_are_one_line_unless_they_are_hidden_or_another_jobs(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    script = tmp_path / "on_gpus.py"
    find = f"entry.glob = lambda pattern: {{'/dev/nvidia[0-9]*': [{str(tmp_path / 'nvidia0')!r}]}}[pattern]"
    script.write_text(f"from megazero import entry\n{find}\nentry.run_script(int, lambda _: print('trains'))\n")
    for hidden_by, trains in (
        (None, False),
        ("0", False),
        ("GPU-1", False),
        ("", True),
        ("-1", True),
        ("NoDevFiles", True),
    ):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if hidden_by is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden_by)
        done = run_script(1, str(script), [])
        if trains:
            assert done.returncode == 0 and "trains" in done.stdout, (hidden_by, done.stdout)
        else:
            said = f"error: this machine has NVIDIA GPUs ({tmp_path / 'nvidia0'}), and PyTorch {torch.__version__} in "
            check_one_line(done, said)
            assert "To train on the CPU instead, set CUDA_VISIBLE_DEVICES= (empty)." in done.stdout
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia0").unlink()  # one that this job may not open
    assert run_script(1, str(script), []).returncode == 0


PAGE = ROOT / "docs" / "own_scripts.md"


def pages_programs() -> list[str]:
    """A script, jobs, an optimizer, a block, an evaluation, LoRA and its merge, and hooks that find a NaN."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


BREAKS_A_LAYER = """
def broken(*arguments):
    model = make_model(*arguments)
    model.transformer.layers[1].mlp.dense_h_to_4h.register_forward_hook(lambda *given: given[2] / 0, prepend=True)
    return model

run_script(pretrain_gpt2.check, lambda checked: pretrain(*checked, broken, pretrain_gpt2.forward_step))
"""


@pytest.mark.parametrize("more", [(), ("--zero-stage", "3", "--checkpoint-activations"), ("--sequence-parallel",)])
def test_the_pages_hooks_name_the_layer_that_made_the_nan(corpus, tmp_path, more):
    code, *_, hooks = pages_programs()
    script = tmp_path / "script.py"
    script.write_text(code.partition("\ndef ")[0] + hooks + BREAKS_A_LAYER)
    split = ("--model-parallel-size", "2") if "--sequence-parallel" in more else ()
    done = run_script(2, str(script), flags(corpus, tmp_path / "a", 3, *more, *split))
    assert done.returncode == 1
    assert "error: the output of transformer.layers.1.mlp.dense_h_to_4h is not finite" in done.stdout, done.stdout


@pytest.mark.parametrize(("stage", "own_optimizer"), [("0", False), ("2", True), ("3", False)])
def test_the_pages_script_logs_each_gradients_norm_and_ends_when_it_says(corpus, tmp_path, stage, own_optimizer):
    code, _, lion, *_ = pages_programs()
    rate = 'job.engine.optimizer.param_groups[0]["lr"] = (job.iteration + 1) / 1000'
    code = code.replace("before_update(job):", f"before_update(job):\n    {rate}")
    if own_optimizer:
        given = re.search(r"`pretrain\(\.\.\., (make_optimizer=.*)\)`", PAGE.read_text())[1]
        code = lion + code.replace("before_update=before_update", f"before_update=before_update, {given}")
    script = tmp_path / "script.py"
    script.write_text(code)
    more = ("--zero-stage", stage, "--global-batch-size", "8", "--fp16")
    done = run_script(2, str(script), flags(corpus, tmp_path / "a", 3, *more, "--log-grad-norms"))
    assert done.returncode == 0, done.stdout
    assert ("Lion of make_optimizer" in done.stdout) == own_optimizer
    lines = [line for line in logged(tmp_path / "a") if line["section"] == "train"]
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["lr"] == line["iteration"] / 1000
        norms = [value for name, value in line.items() if name.startswith("grad_norm/")]
        assert math.hypot(*norms) == pytest.approx(line["grad_norm"], rel=1e-4) and line["grad_norm"] > 0
        assert max(norms) == line["largest_grad_norm"]

    script.write_text(
        code.replace("> 100", "> 0 and torch.distributed.get_rank() == job.iteration == 1").replace(
            "import time", "import time\nimport torch"
        )
    )
    done = run_script(2, str(script), flags(corpus, tmp_path / "b", 4, *more))
    assert "stopping after iteration 2: the embedding's gradient is large, on rank 1" in done.stdout, done.stdout
    assert (tmp_path / "b" / "latest").read_text() == "global_step2"


def jobs_of_the_page_case(arguments: list[str], folder: Path) -> None:
    code = re.sub(r'".*"\.split\(\)', repr(arguments), pages_programs()[1]).replace("checkpoints/", f"{folder}/")
    exec(compile(code, PAGE.name, "exec"), {})


def test_the_pages_jobs_from_python_train_one_after_the_other(corpus, tmp_path):
    run_ranks(1, jobs_of_the_page_case, [*TINY_MODEL, *corpus, "--train-iters", "2"], tmp_path)
    for lr in ("1e-3", "3e-3"):
        assert (tmp_path / f"lr{lr}" / "latest").read_text() == "global_step2"


SHORT_OF_MEMORY = """
import torch
import pretrain_gpt2
from megazero.entry import run_script
from megazero.training import pretrain

def forward_step(job, iterator):
    if job.iteration == 1 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        {what}
    return pretrain_gpt2.forward_step(job, iterator)

run_script(pretrain_gpt2.check, lambda checked: pretrain(*checked, pretrain_gpt2.make_model, forward_step))
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")',
            "CUDA out of memory. Tried to",
        ),
        ("torch.empty(1 << 58)", "DefaultCPUAllocator"),
    ],
    ids=["a device", "the host"],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_without_memory_says_what_is_held_and_what_takes_less(corpus, tmp_path, ranks, what, said):
    script = tmp_path / "short_of_memory.py"
    script.write_text(SHORT_OF_MEMORY.format(what=what))
    done = run_script(ranks, str(script), flags(corpus, tmp_path / "saved", 5, "--zero-stage", "1"))
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "ran out of memory" in line]
    assert line.startswith("error: rank 0 " if ranks == 1 else "error (rank 1): rank 1 ") and said in line
    assert "ran out of memory in iteration 2: " in line
    report = done.stdout.partition("ran out of memory")[2]
    assert "memory, planned and held when it failed" in report and "optimizer (O)" in report
    # A higher stage lowers what is held between steps, but not at this model's peak, which are its logits.
    assert "Each of these takes less: --checkpoint-activations; --batch-size 1." in report


def test_an_evaluation_without_memory_is_not_taken_for_a_step(corpus, tmp_path):
    script = tmp_path / "short_of_memory.py"
    script.write_text(SHORT_OF_MEMORY.format(what="torch.empty(1 << 58)"))
    done = run_script(1, str(script), flags(corpus, tmp_path / "saved", 1, "--eval-iters", "1"))
    assert "error: rank 0 ran out of memory in the evaluation at the end of training: " in done.stdout, done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error in: NCCLUtils.cpp, unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
    ],
)
def test_a_library_of_cuda_without_memory_is_known(one_rank, text):
    config = load_config(["--vocab-size", "64"])
    with pytest.raises(MemoryError, match=f"rank 0 ran out of memory .*: {re.escape(text)}"):
        with tells_out_of_memory(config):
            raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="Cuda failure 1"), tells_out_of_memory(config):
        raise RuntimeError("Last error: Cuda failure 1 'invalid argument'")


KILLED_ONCE = """
import os, signal
import pretrain_gpt2
import torch.distributed as dist
from megazero.entry import run_script
from megazero.training import pretrain

def forward_step(job, iterator):
    store = dist.distributed_c10d._get_default_store()  # where NCCL's watchdog asks all ranks to end
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        assert not store.check(["exception_dump"])
    elif job.iteration == 7 and os.environ["RANK"] == "1":
        store.set("exception_dump", "1")
        os.kill(os.getpid(), signal.SIGKILL)
    return pretrain_gpt2.forward_step(job, iterator)

run_script(pretrain_gpt2.check, lambda checked: pretrain(*checked, pretrain_gpt2.make_model, forward_step))
"""


def test_a_job_with_restarts_goes_on_from_its_checkpoint_when_a_rank_is_killed(corpus, tmp_path):
    script = tmp_path / "killed_once.py"
    script.write_text(KILLED_ONCE)
    arguments = flags(corpus, tmp_path / "saved", 10, "--save-interval", "5")
    process = start_job(arguments, 2, str(script), MAX_RESTARTS="1", PYTHONPATH=str(ROOT))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "failed (exitcode: -9) local_rank: 1" in output, output
    after = output.partition("WARNING: a rank has failed, and all were started again: restart 1 of 1\n")[2]
    assert "continuing after iteration 5" in after and "iteration       10/      10 |" in after, output


def start_nodes(script: str, arguments: list[str], restarts: str) -> list[subprocess.Popen[str]]:
    """The ranks of two nodes, as torchrun starts them in a store of rank 0's."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    where |= {"LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": restarts, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    where |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            cwd=ROOT,
            env={**os.environ, **where, "RANK": node, "GROUP_RANK": node},
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in "01"
    ]


@pytest.mark.parametrize("restarts", ["0", "1"])
@pytest.mark.parametrize("where", ["training", "the evaluation at its end"])
def test_ranks_of_the_other_nodes_fail_when_one_node_is_signalled_if_torchrun_starts_them_again(
    corpus, tmp_path, restarts, where
):
    is_training = where == "training"
    arguments = flags(corpus, tmp_path, 100_000 if is_training else 3, "--eval-iters", "100000")
    nodes = start_nodes("pretrain_gpt2.py", [*arguments, "--eval-interval", "100000"], restarts)
    if is_training:
        wait_for_step(tmp_path, 3)
    else:
        wait_for((tmp_path / "latest").exists)
    nodes[1].send_signal(signal.SIGTERM)
    said = [node.communicate(timeout=200)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [int(restarts), 0], said
    assert ("error: ranks of another node were signalled, and all have saved." in said[0]) == bool(int(restarts)), said
    assert (tmp_path / "latest").exists() and "Traceback" not in "".join(said), said


SIGNALLED_BEFORE_A_SAVE = """
import os, runpy, signal
from megazero import training

def save(*args, really=training.save, **options):
    if os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGTERM)
    really(*args, **options)

training.save = save
runpy.run_path("pretrain_gpt2.py", run_name="__main__")
"""


@pytest.mark.parametrize("save_interval", ["3", pytest.param("100", marks=pytest.mark.slow)])
def test_no_rank_is_started_again_after_exit_interval_when_a_node_is_signalled_then(corpus, tmp_path, save_interval):
    script = tmp_path / "script.py"
    script.write_text(SIGNALLED_BEFORE_A_SAVE)
    save = tmp_path / "saved"
    arguments = flags(corpus, save, 100, "--exit-interval", "3", "--save-interval", save_interval)
    nodes = start_nodes(str(script), arguments, "1")
    said = [node.communicate(timeout=200)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0] and (save / "latest").read_text() == "global_step3", said


WAITS_FOR_ITS_DATA = """
import runpy, time
from megazero import training

def datasets(job):
    with open(__file__ + ".waits", "a") as file:
        file.write("once ")
    time.sleep(60)

training.datasets = datasets
runpy.run_path("pretrain_gpt2.py", run_name="__main__")
"""


def test_a_signal_before_the_first_step_ends_a_job_at_once_and_no_restart_undoes_it(corpus, tmp_path):
    script, waits = tmp_path / "script.py", tmp_path / "script.py.waits"
    script.write_text(WAITS_FOR_ITS_DATA)
    process = start_job(flags(corpus, tmp_path / "saved", 5), 1, str(script), MAX_RESTARTS="1", PYTHONPATH=str(ROOT))
    wait_for(waits.exists)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM and waits.read_text() == "once ", output


def test_ranks_whose_torchrun_was_killed_end_at_once_and_say_why(corpus, tmp_path):
    process = start_job(flags(corpus, tmp_path, 100_000), 2)
    wait_for_step(tmp_path, 3)
    (launcher,) = children(process.pid)
    os.kill(launcher, signal.SIGKILL)
    output, _ = process.communicate(timeout=200)  # returns when the ranks have closed it
    # One rank may look, while the other one is in a collective by then and loses that rank.
    said = re.findall(rf"^error(?: \(rank 1\))?: torchrun \(process {launcher}\) was killed", output, re.MULTILINE)
    assert len(said) == 2 and "Traceback" not in output, output


KILLS_TORCHRUN = """
import os
import signal
import time
import pretrain_gpt2
from megazero.entry import run_script
from megazero.training import pretrain

launcher = os.getppid()

def forward_step(job, iterator):
    if job.iteration == 2:
        if os.environ["RANK"] == "0":
            os.kill(launcher, signal.SIGKILL)
        while os.getppid() == launcher:
            time.sleep(0.1)
    return pretrain_gpt2.forward_step(job, iterator)

run_script(pretrain_gpt2.check, lambda checked: pretrain(*checked, pretrain_gpt2.make_model, forward_step))
"""


def test_ranks_that_miss_torchrun_in_a_save_say_that_it_was_killed(corpus, tmp_path):
    script = tmp_path / "kills_torchrun.py"
    script.write_text(KILLS_TORCHRUN)
    arguments = flags(corpus, tmp_path / "saved", 100, "--save-interval", "1")
    process = start_job(arguments, 2, str(script), PYTHONPATH=str(ROOT))
    output, _ = process.communicate(timeout=200)  # returns when the ranks have closed it
    errors = [line for line in output.splitlines() if line.startswith("error")]
    assert len(errors) == 2 and "Traceback" not in output, output
    assert all(re.search(r"^error( \(rank 1\))?: torchrun \(process \d+\) was killed", line) for line in errors), output
    assert (tmp_path / "saved" / "latest").read_text() == "global_step2"


KILLS_TORCHRUN_EARLY = """
import os
import signal
import time
import pretrain_gpt2
from megazero import entry
from megazero.training import pretrain

launcher, entry.WAIT_S = os.getppid(), 0.0

def make_model(*arguments):
    if os.environ["RANK"] == "0":
        os.kill(launcher, signal.SIGKILL)
    while os.getppid() == launcher:
        time.sleep(0.1)
    time.sleep(0.5)  # the store's end has arrived
    return pretrain_gpt2.make_model(*arguments)

entry.run_script(pretrain_gpt2.check, lambda checked: pretrain(*checked, make_model, pretrain_gpt2.forward_step))
"""


def test_ranks_that_miss_torchrun_before_they_train_say_so_in_one_line(corpus, tmp_path):
    script = tmp_path / "kills_torchrun.py"
    script.write_text(KILLS_TORCHRUN_EARLY)
    process = start_job(flags(corpus, tmp_path / "saved", 100), 2, str(script), PYTHONPATH=str(ROOT))
    output, _ = process.communicate(timeout=200)  # returns when the ranks have closed it
    errors = [line for line in output.splitlines() if line.startswith("error")]
    assert len(errors) == 2 and "Traceback" not in output, output
    assert all(re.search(r"^error( \(rank 1\))?: lost the process where the ranks meet, tor", line) for line in errors)


def test_ranks_whose_script_was_killed_save_and_end(corpus, tmp_path):
    # torchrun kills ranks that do not end within 30 s, which a busy machine may take
    process = start_job(flags(corpus, tmp_path, 100_000), 2, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="200")
    wait_for_step(tmp_path, 3)
    process.kill()
    output, _ = process.communicate(timeout=200)  # returns when the ranks have closed it
    last = max(metrics(tmp_path))
    assert f"stopping after iteration {last}: SIGTERM" in output and "torchrun was ended by SIGTERM" in output, output
    assert (tmp_path / "latest").read_text() == f"global_step{last}"


def test_a_job_without_a_launcher_outlives_the_shell_that_started_it(corpus, tmp_path):
    """As with nohup: the shell ends, and the job trains on."""
    job = f'{sys.executable} -m megazero.launch --standalone --nproc-per-node 1 pretrain_gpt2.py "$@"'
    command = f"{job} & until [ -s {tmp_path}/metrics.jsonl ]; do sleep 0.1; done"
    arguments = flags(corpus, tmp_path, 300)
    done = run_command(["bash", "-c", command, "bash", *arguments])
    assert (tmp_path / "latest").read_text() == "global_step300", done.stdout


@pytest.mark.slow  # as in tests/test_runner.py, but for a job that saves when the launcher ends it
def test_sigquit_ends_all_ranks_with_the_script(corpus, tmp_path):
    process = start_job(flags(corpus, tmp_path, 100_000), 2)
    wait_for_step(tmp_path, 3)
    process.send_signal(signal.SIGQUIT)
    output, _ = process.communicate(timeout=200)  # returns when the ranks have closed it
    assert process.returncode == 128 + signal.SIGTERM and "torchrun was ended by SIGTERM" in output, output


def test_a_terminal_shows_a_bar_below_the_log_lines(corpus, tmp_path):
    ours, theirs = os.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "pretrain_gpt2.py", *flags(corpus, tmp_path, 20), "--log-interval", "10"]
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        output = b""
        while part := read(ours):
            output += part
    os.close(ours)
    lines = [line for line in output.decode().replace("\r", "\n").splitlines() if line]
    assert process.returncode == 0 and any(" iteration       20/      20" in line for line in lines)
    assert any("| 1/20 [" in line and "loss " in line for line in lines)
    assert "| 20/20 [" not in "\n".join(lines[-8:]), "the bar has gone when the run has ended"


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # so ends a terminal on Linux
        return b""


def test_a_job_without_standard_output_and_error_trains(corpus, tmp_path):
    command = ["bash", "-c", 'exec "$@" >&- 2>&-', "bash", sys.executable, "pretrain_gpt2.py"]
    assert run_command([*command, *flags(corpus, tmp_path, 2)]).returncode == 0
    assert (tmp_path / "latest").read_text() == "global_step2"


def test_workers_whose_sockets_would_have_too_long_names_are_told_instead_of_waited_for(corpus, tmp_path, monkeypatch):
    (temporary := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    done = run_command([sys.executable, "pretrain_gpt2.py", *flags(corpus, tmp_path, 2), "--num-workers", "1"])
    said = "error: no processes can be started that read the training data ahead: AF_UNIX path too long."
    # newer versions of Python put their sockets elsewhere then
    assert done.returncode == 0 or (said in done.stdout and "(TMPDIR). With --num-workers 0" in done.stdout), (
        done.stdout
    )


IMPATIENT = """
import runpy, sys, time
from megazero import logging, training
logging.SLOW_S = float(sys.argv[1])
load = training.load
training.load = lambda *args, **keywords: (time.sleep(0.5), load(*args, **keywords))
build = training.build_job
training.build_job = lambda *args, **keywords: (time.sleep(0.5), build(*args, **keywords))[1]
sys.argv[:2] = []
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_start_that_takes_long_says_what_it_does(corpus, tmp_path):
    script = tmp_path / "impatient.py"
    script.write_text(IMPATIENT)
    arguments = [str(ROOT / "pretrain_gpt2.py"), *flags(corpus, tmp_path, 1)]
    for patience, is_told in (("0.1", True), ("600", False)):
        done = run_script(1, str(script), [patience, *arguments])
        assert done.returncode == 0, done.stdout
        building = "building the model takes a while: every rank draws the initial values of all "
        for told in (building, "loading the checkpoint takes a while"):
            assert (told in done.stdout) == is_told, done.stdout


def test_fp16_trains_with_a_dynamic_loss_scale(corpus, tmp_path):
    done = run_job(flags(corpus, tmp_path, 30, "--fp16", "--lr", "1e-2", "--loss-scale-window", "10"), 1)
    losses = metrics(tmp_path)
    assert done.returncode == 0 and losses[30] < losses[1]
    assert "loss scale 131072.0" in done.stdout


def test_what_follows_an_end_of_text_token_counts_in_the_loss_as_the_flag_says(monkeypatch):
    tokens, losses = torch.tensor([[5, 0, 7], [0, 0, 9]]), torch.tensor([[1.0, 20.0, 3.0], [40.0, 50.0, 6.0]])
    monkeypatch.setattr(pretrain_gpt2, "get_batch", lambda iterator, job: (tokens, tokens))
    for argument, counted in (("--eod-mask-loss", [1.0, 3.0, 6.0]), ("--no-eod-mask-loss", losses.flatten().tolist())):
        job = SimpleNamespace(
            config=load_config([argument]),
            timers=lambda _: nullcontext(),
            tokenizer=SimpleNamespace(eod=0),
            engine=lambda tokens, **_: losses,
        )
        assert pretrain_gpt2.forward_step(job, None).item() == pytest.approx(sum(counted) / len(counted))
    assert load_config([]) == load_config(["--eod-mask-loss"])


def test_deterministic_mode_gives_on_a_cpu_what_a_run_without_does(corpus, tmp_path):
    every_kind = (
        "--reset-position-ids",
        "--reset-attention-mask",
        "--vocab-chunk-size",
        "64",
        "--attention-dropout",
        "0.1",
    )
    for name, mode in (("a", ()), ("b", ("--deterministic-mode",))):
        assert run_job(flags(corpus, tmp_path / name, 3, *every_kind, *mode), 1).returncode == 0
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def test_accumulation_equals_one_large_batch(corpus, tmp_path):
    for name, micro in (("a", "4"), ("b", "1")):
        assert (
            run_job(flags(corpus, tmp_path / name, 5, "--batch-size", micro, "--global-batch-size", "4"), 1).returncode
            == 0
        )
    a, b = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    torch.testing.assert_close(torch.tensor(list(a.values())), torch.tensor(list(b.values())), rtol=2e-3, atol=0)


def test_reset_flags_and_recomputation_run(corpus, tmp_path):
    plain, recomputed = tmp_path / "a", tmp_path / "b"
    reset = ("--reset-position-ids", "--reset-attention-mask", "--attention-dropout", "0.1", "--hidden-dropout", "0.1")
    assert run_job(flags(corpus, plain, 6, *reset), 1).returncode == 0
    assert (
        run_job(
            flags(corpus, recomputed, 6, *reset, "--checkpoint-activations", "--checkpoint-num-layers", "2"), 1
        ).returncode
        == 0
    )
    assert metrics(plain) == metrics(recomputed), "recomputation replays dropout, so nothing changes"


def test_finetune_takes_the_weights_and_starts_over(corpus, tmp_path):
    assert run_job(flags(corpus, tmp_path / "a", 5), 1).returncode == 0
    command = [
        *TINY_MODEL,
        *corpus,
        "--train-iters",
        "3",
        "--log-interval",
        "1",
        "--load",
        str(tmp_path / "a" / "global_step5"),  # as good as the directory above it
        "--finetune",
    ]
    done = run_job([*command, "--save", str(tmp_path / "b")], 1)
    assert done.returncode == 0 and set(metrics(tmp_path / "b")) == {1, 2, 3}
    assert metrics(tmp_path / "b")[1] < metrics(tmp_path / "a")[1]


def test_not_finite_loss_stops_all_ranks_and_names_the_place(corpus, tmp_path):
    command = flags(corpus, tmp_path, 50, "--lr", "1e30", "--clip-grad", "0", "--warmup", "0", "--save-interval", "1")
    done = run_job(command, 2)
    assert done.returncode != 0
    assert "The loss is not finite at iteration" in done.stdout and "rank 0: loss nan, samples" in done.stdout
    assert "The weights were not updated." in done.stdout
    newest = (tmp_path / "latest").read_text().removeprefix("global_step")  # its weights are those of this loss
    assert f"Checkpoints from before iteration {newest} are good" in done.stdout


def test_of_thousands_of_ranks_whose_loss_is_not_finite_a_few_are_named(one_rank, monkeypatch):
    monkeypatch.setattr(comm, "all_gathered_objects", lambda mine: [mine] * 4096)
    groups = SimpleNamespace(data_parallel_rank=3, data_parallel_size=4096)
    engine = SimpleNamespace(was_step_applied=lambda: False)
    job = SimpleNamespace(groups=groups, global_batch_size=8192, consumed_in_phase=0, iteration=0, engine=engine)
    named = r"\((rank 0: loss nan, samples 6 to 7 of the shuffled training data(, )?){8} and 4088 more\)\. The weights"
    with pytest.raises(FloatingPointError, match=named):
        _raise_not_finite(job, torch.tensor(math.nan))


INFINITE = """
import math
import pretrain_gpt2
from megazero.entry import run_script
from megazero.training import pretrain

def forward_step(job, iterator):
    return pretrain_gpt2.forward_step(job, iterator) + math.inf

run_script(pretrain_gpt2.check, lambda checked: pretrain(*checked, pretrain_gpt2.make_model, forward_step))
"""


def test_an_infinite_loss_whose_gradients_are_finite_is_told_as_the_update_that_it_is(corpus, tmp_path):
    script = tmp_path / "infinite.py"
    script.write_text(INFINITE)
    done = run_script(1, str(script), flags(corpus, tmp_path, 2))
    assert "rank 0: loss inf" in done.stdout and "The weights were updated, by finite gradients. Lower" in done.stdout


@pytest.mark.parametrize(
    "change, message",
    [
        (["--hidden-size", "30"], "--hidden-size 30 is not divisible by --num-attention-heads 4"),
        (["--model-parallel-size", "3"], "--model-parallel-size 3"),
        (["--seq-length", "4096"], "--seq-length 4096 is longer than --max-position-embeddings"),
        (["--hiden-size", "32"], "Did you mean --hidden-size"),
        (["--train-data", "no_such_corpus"], "no_such_corpus"),
        (["--train-data", "webtext"], "data/webtext"),
        (["--tokenizer-path", "no_such_vocabulary"], "no_such_vocabulary"),
        (["--vocab-size", "7"], "--vocab-size 7 is smaller than the tokenizer's vocabulary"),
        (["--split", "0,1,1"], "--split"),
        (["--distributed-backend", "nccl"], "--distributed-backend nccl needs a CUDA device"),
        (
            ["--zero-stage", "1", "--offload-optimizer", "nvme", "--nvme-path", "no_such_folder"],
            "error: --nvme-path or nvme_path must be an existing directory that this job may write to, on the drive to swap to: "
            "No such file or directory: 'no_such_folder'",
        ),
        (["--checkpoint-nvme-path", "README.md"], "to swap to: it is not a directory: 'README.md'"),
    ],
)
def test_bad_input_is_one_clear_line(corpus, tmp_path, change, message):
    if change[-1] == "nccl" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    check_one_line(run_job(flags(corpus, tmp_path, 3, *change), 1), message)


def test_a_rank_without_a_number_is_one_clear_line(monkeypatch):
    monkeypatch.setenv("RANK", "")
    check_one_line(run_job(TINY_MODEL, 1), "error: RANK= in the environment must be a number")


def test_a_run_that_has_ended_needs_no_data(corpus, tmp_path):
    assert run_job(flags(corpus, tmp_path, 1), 1).returncode == 0
    done = run_job(flags(corpus[2:], tmp_path, 1), 1)
    assert done.returncode == 0 and "nothing to train: iteration 1 of" in done.stdout, done.stdout


def test_no_data_and_no_checkpoint_to_finetune_are_refused(corpus, tmp_path):
    check_one_line(run_job(TINY_MODEL + corpus[2:], 1), "--train-data is missing")
    done = run_job([*TINY_MODEL, *corpus, "--load", str(tmp_path), "--finetune"], 1)
    check_one_line(done, f"there is no checkpoint in --load {tmp_path} to take the weights from")
    done = run_job(flags(corpus, tmp_path, 1, "--exit-on-missing-checkpoint"), 1)
    check_one_line(done, f"--exit-on-missing-checkpoint: there is no checkpoint in --load {tmp_path} to continue from.")


def test_bad_input_is_one_clear_line_on_two_ranks_too(corpus, tmp_path):
    check_one_line(run_job(flags(corpus, tmp_path, 3, "--hiden-size", "8"), 2), "Did you mean")
    check_one_line(launch_job(flags(corpus, tmp_path, 3, "--split", "0,1,1"), 2), "--split")


def check_one_line(done, message: str) -> None:
    errors = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert done.returncode != 0 and len(errors) == 1 and message in errors[0], done.stdout
    assert "Traceback" not in done.stdout


FILE_FAULTS = [("foreign", "60000"), ("text", "text.idx"), ("short", "short.bin")]


@pytest.mark.parametrize(
    "raised, has_traceback", [("raise ValueError('--lr is odd')", False), ("loss(logits, ids)", True)]
)
def test_an_error_that_another_library_raises_in_a_script_of_ones_own_says_where(tmp_path, raised, has_traceback):
    script = tmp_path / "own.py"
    script.write_text(
        "import torch\nfrom torch.nn.functional import cross_entropy as loss\nfrom megazero.entry import run_script\n"
        f"def forward(_):\n    logits, ids = torch.randn(4, 3), torch.zeros(5, dtype=torch.long)\n    {raised}\n"
        "run_script(lambda world_size: None, forward)\n"
    )
    done = run_script(2, str(script), [])
    said = "--lr is odd" if not has_traceback else "Expected input batch_size (4) to match target batch_size (5)."
    assert done.returncode == 1 and f"\nerror: {said}\n" in f"\n{done.stdout}"
    assert ("own.py" in done.stdout and "in forward" in done.stdout) == has_traceback, "where it happened, of one rank"
    assert done.stdout.count("Traceback") == has_traceback


WAITS = """
import time
from datetime import timedelta
import torch
from megazero import comm
from megazero.entry import run_script

def work(_):
    comm.init_distributed("gloo")
    group = torch.distributed.new_group(timeout=timedelta(seconds=1))
    channel = comm.Channel(group)
    comm.barrier()
    if torch.distributed.get_rank() == 1:
        time.sleep(60)
    {what}

run_script(lambda world_size: None, work)
"""


@pytest.mark.parametrize(
    "what, where, said",
    [
        (
            "channel.all_reduce_(torch.ones(64), 'x').wait()",
            "comm.lane.wait:",
            "of x, 64 elements .* rank 1 did not come",
        ),
        ("channel.meet('save')", "_wait:", r"save was called on rank 0, but within 1 s not on ranks \[1\] of \[0, 1\]"),
        ("torch.distributed.all_reduce(torch.ones(2), group=group)", ": ", "Timed out waiting 1000ms"),
    ],
    ids=["a channel", "a meeting", "gloo"],
)
def test_a_rank_that_has_waited_for_another_says_so_in_one_line(tmp_path, what, where, said):
    script = tmp_path / "waits.py"
    script.write_text(WAITS.format(what=what))
    done = run_script(2, str(script), [])
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout
    why = r"\. That rank hangs or is cut off, runs something else, or needs longer than .*"
    why += r"\(in training, --distributed-timeout-s\)\."
    one = rf"^error: waited in vain for another rank, in .*__main__.work:15.*{where}.*{said}.*[^.]{why}$"
    assert re.search(one, done.stdout, re.MULTILINE), done.stdout


REFUSED = "timed out connecting: SO_ERROR: Connection refused"
GLOO_FAILS = """
from megazero import entry

def work(_):
    raise RuntimeError({text!r})

entry.WAIT_S = 0
entry.run_script(lambda world_size: None, work)
"""


@pytest.mark.parametrize(
    "text, said",
    [
        (
            f"Gloo connectFullMesh failed with [/gloo/pair.cc:152] {REFUSED}",
            rf"no connection to another rank over gloo \({REFUSED}\)\. .*GLOO_SOCKET_IFNAME",
        ),
        (
            "x failed after 0.1 s: rank 1: [/gloo/pair.cc:553] Connection closed by peer [10.9.0.10]:7599. Check the logs. GLHF!",
            r"lost the connection to a rank at 10\.9\.0\.10, in .*__main__\.work:5\. It has ended, or its host .*nothing\.$",
        ),
        (
            "[/gloo/pair.cc:537] Read error [fd00::a]:19609: Connection reset by peer. Check the logs. GLHF!",
            r"lost the connection to a rank at fd00::a, in .*__main__\.work:5\. It has ended, or its host .*nothing\.$",
        ),
        (
            "[/gloo/pair.cc:537] Read error [10.9.0.10]:26285: Connection timed out. This is typically caused by a worker.",
            r"lost the connection to a rank at 10\.9\.0\.10, in .*__main__\.work:5\. It has ended, or its host .*nothing\.$",
        ),
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exited prematurely.",
            r"ncclRemoteError: .* exited prematurely\.$",
        ),
    ],
    ids=["unconnected", "closed", "reset", "cut off", "of NCCL"],
)
def test_what_gloo_or_nccl_says_of_another_rank_becomes_one_line(tmp_path, text, said):
    script = tmp_path / "fails.py"
    script.write_text(GLOO_FAILS.format(text=text))
    done = run_script(1, str(script), [])
    assert done.returncode == 1 and re.match(f"error: {said}", done.stdout), done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_data_of_another_vocabulary_foreign_and_truncated_files_are_refused(corpus, tmp_path):
    prefix = Path(corpus[corpus.index("--train-data") + 1])
    foreign = tmp_path / "foreign"
    with IndexedDatasetWriter(str(foreign), dtype="uint16") as writer:
        writer.add_document([60_000] * 50)
    (tmp_path / "text.bin").write_bytes(b"x" * 64)
    (tmp_path / "text.idx").write_bytes(b"not an index")
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"short{suffix}").write_bytes(
            Path(f"{prefix}{suffix}").read_bytes()[: -2 if suffix == ".bin" else None]
        )
    other = make_vocabulary(tmp_path / "other", make_texts(30), size=290)
    cases = [(["--train-data", str(tmp_path / name)], message) for name, message in FILE_FAULTS]
    for change, message in [*cases, (["--tokenizer-path", str(other)], "was tokenized with")]:
        done = run_job(flags(corpus, tmp_path / "run", 3, *change), 1)
        assert done.returncode != 0 and "error" in done.stdout and message in done.stdout, done.stdout


def test_checkpoint_of_another_model_is_refused_and_other_data_are_said(corpus, tmp_path):
    assert run_job(flags(corpus, tmp_path, 2), 1).returncode == 0
    other = flags(
        corpus, tmp_path, 4, "--num-layers", "3", "--num-attention-heads", "2", "--intermediate-size", "48", "--swiglu"
    )
    check_one_line(
        run_job(other, 1), "Give --num-layers 2 --intermediate-size 128 --no-swiglu --num-attention-heads 4."
    )
    quiet = ("--log-interval", "2", "--eval-interval", "7", "--save-interval", "9", "--num-workers", "1")
    said = ("--seed", "5", "--split", "7,2,1", "--no-eod-mask-loss", "--lr", "2e-3", "--bf16", "--zero-stage", "1")
    done = run_job(flags(corpus, tmp_path, 4, *quiet, *said), 2)
    warnings = [line for line in done.stdout.splitlines() if line.startswith("WARNING")]
    assert done.returncode == 0 and len(warnings) == 3, "of two ranks the first says it: " + done.stdout
    assert "a step now takes 4 sequences, not 2 as in the checkpoint's run: --global-batch-size sets" in warnings[0]
    assert "--seed, --split: not as in the run" in warnings[1]
    assert "--phase-transition-iterations 2 reads data from their first sample on" in warnings[1]
    assert "--eod-mask-loss: not as in the run that saved the checkpoint; losses from here on" in warnings[2]
    rest = "--train-iters 2 -> 4, --lr 0.001 -> 0.002, --bf16 False -> True, --zero-stage 0 -> 1"
    assert f"\nnot as in the run that saved the checkpoint: {rest}\n" in done.stdout


def test_a_longer_run_is_warned_of_only_where_that_changes_the_order_of_the_data(corpus, tmp_path):
    warned = []
    for iters, ends in ((40, 2), (30, 3), (4000, 4), (4001, 5), (40, 6)):  # an epoch, or a dozen of them
        done = run_job(flags(corpus, tmp_path, iters, "--exit-interval", str(ends)), 1)
        assert done.returncode == 0, done.stdout
        warned.append(f"now {2 * iters} samples long, which takes another number of epochs" in done.stdout)
    assert warned == [False, False, True, False, True]
    done = run_job(flags(corpus, tmp_path, 40, "--exit-interval", "7", "--split", "1,8,1"), 1)
    assert "--split: not as in the run" in done.stdout and "another number of epochs" not in done.stdout, done.stdout


def test_what_an_older_checkpoint_does_not_say_had_its_default(corpus):
    config = load_config([*TINY_MODEL, *corpus, "--clip-grad", "0.5"])
    ends = ["--exit-interval", "9", "--phase-transition-iterations", "9"]
    saved = asdict(load_config([*TINY_MODEL, *corpus, "--clip-grad", "0.5", *ends]))
    assert _changes(saved, config) == {}, "when a job ends changes nothing"
    del saved["activations"], saved["optimizer"]["clip_grad"], saved["optimizer"]["adam_beta2"]
    assert _changes(saved, config) == {"clip_grad": "--clip-grad 1.0 -> 0.5"}


def start_job(
    arguments: list[str], world_size: int, script: str = "pretrain_gpt2.py", **variables: str
) -> subprocess.Popen:
    """The job through scripts/common.sh's launch, in a session of its own.

    A function stands in for the process that checks the flags beforehand (tests/test_scripts.py): that takes as long as a rank.
    """
    folder, python = os.path.split(sys.executable)
    command = f'source scripts/common.sh; PYTHON={python}; {python}() {{ echo $NPROC >&3; }}; launch {script} "$@"'
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", command, "launch", *arguments],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "NPROC": str(world_size), "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(condition, timeout_s: float = 200.0) -> None:
    end = time.time() + timeout_s
    while not condition():
        assert time.time() < end, "the job did not come so far in time"
        time.sleep(0.02)


def wait_for_step(save: Path, step: int) -> None:
    wait_for(lambda: (save / "metrics.jsonl").exists() and max(metrics(save), default=0) >= step)


def test_other_documents_under_the_same_name_are_said(corpus, tmp_path):
    data = tmp_path / "text.jsonl"
    for iters, documents, said in ((2, 30, 0), (3, 30, 0), (4, 40, 1)):
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in make_texts(documents)))
        done = run_job(flags(corpus, tmp_path / "run", iters, "--train-data", str(data)), 1)
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("the documents of --train-data are not those") == said, done.stdout


def test_an_evaluation_that_fails_leaves_modes_and_timers_as_they_were():
    module = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    module[1].eval()  # a part that its user keeps so
    device = torch.device("cpu")
    timers = Timers(device)
    engine = SimpleNamespace(module=module, eval=module.eval, channel=SimpleNamespace(timers=timers))
    job = SimpleNamespace(engine=engine, timers=timers, device=device)
    with pytest.raises(ZeroDivisionError), _evaluating(job):
        assert job.timers is not timers and not module[0].training and not torch.is_grad_enabled()
        assert job.engine.channel.timers is job.timers
        raise ZeroDivisionError
    assert [part.training for part in module] == [True, False] and module.training
    assert job.engine.channel.timers is job.timers is timers and torch.is_grad_enabled()


def test_an_evaluation_loses_nothing_of_many_small_losses(one_rank, monkeypatch):
    monkeypatch.setattr(training, "batches", lambda *_: None)
    module, losses = torch.nn.Identity(), iter([2.0**24, 1.0, 1.0, 1.0])
    job = SimpleNamespace(
        config=SimpleNamespace(training=SimpleNamespace(eval_iters=4), eval_batch_size=1),
        engine=SimpleNamespace(module=module, eval=module.eval, channel=SimpleNamespace(timers=None)),
        forward_step=lambda *_: torch.tensor(next(losses)),
        count_tokens=None,
        device=torch.device("cpu"),
        groups=mpu.get_groups(),
        timers=None,
        stop=StopSignal(),
    )
    assert evaluate(job, None) == 2.0**22 + 0.75


def test_timers_that_nobody_reads_keep_few_events(monkeypatch):
    class Event:
        """Of a device that is `behind` events behind, and takes 2 ms for each phase."""

        recorded: ClassVar[int] = 0
        behind: ClassVar[int] = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.recorded += 1
            self.time = Event.recorded

        def query(self) -> bool:
            return self.time <= Event.recorded - Event.behind

        def elapsed_time(self, end) -> float:
            assert end.query(), "as CUDA does"
            return 2.0 * (end.time - self.time)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(Event, "behind", 0))
    timers = Timers(torch.device("cuda"))
    for behind, kept in (
        (10, MOST_KEPT),
        (2 * MOST_KEPT + 11, MOST_KEPT + 6),
    ):  # the second one is in the middle of a phase
        Event.behind = behind
        for _ in range(3000):
            with timers("forward"):
                pass
        assert len(timers._events) == kept, "those that the device may still be at, or as many as are kept anyway"
        assert timers.read_and_reset() == {"forward": pytest.approx(3000 * 0.002)} and timers.read_and_reset() == {}


OTHER_RANK = """
import os, runpy, sys

own = sys.argv.pop(1).split()
sys.argv += own if os.environ["RANK"] == "1" else []
runpy.run_path("pretrain_gpt2.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (
            "--lr 5e-3 --batch-size 4",
            "on rank 1, --batch-size is 4, and on rank 0 2; --lr is 0.005, and on rank 0 0.001.",
        ),
        ("--model-parallel-size 2", "on rank 1, --model-parallel-size is 2, and on rank 0 1."),
        ("--train-data {tmp_path}/more/tiny_text_document", "on rank 1, the fingerprint of the data is '"),
        ("--num-workers 1 --data-cache-path {tmp_path}/1", None),
    ],
)
def test_ranks_with_other_flags_or_data_are_refused_before_they_train(corpus, tmp_path, own, said):
    (tmp_path / "job.py").write_text(OTHER_RANK)
    (tmp_path / "more").mkdir()
    with IndexedDatasetWriter(f"{tmp_path}/more/tiny_text_document", dtype="uint16") as writer:  # other documents
        for length in range(40, 80):
            writer.add_document([7] * length)
    flags = [*TINY_MODEL, *corpus, "--train-iters", "2", "--data-cache-path", str(tmp_path / "0")]
    done = run_script(2, str(tmp_path / "job.py"), [own.format(tmp_path=tmp_path), *flags])
    assert (done.returncode != 0) == (said is not None), done.stdout
    if said is not None:
        assert f"error: ranks differ and would train different models: {said}" in done.stdout, done.stdout
        assert "iteration" not in done.stdout.partition("error: ")[2] and "Traceback" not in done.stdout
