"""The summary at the end of a run, and what is kept for it."""

from __future__ import annotations

import shlex
import shutil
from types import SimpleNamespace

from megazero import reporting
from megazero.arguments import load_config
from megazero.metrics import MetricsWriter
from megazero.model.gpt2 import GPT2Model
from megazero.reporting import describe_hosts, metrics_writer, summary
from tests.ranks import run_ranks


def test_the_speed_in_the_summary_is_that_of_the_run_and_not_of_those_that_it_continues(tmp_path):
    for start, speeds in ((0, (500, 600, 700)), (3, (20, 30))):
        metrics = MetricsWriter(str(tmp_path), None, start)
        for iteration, speed in enumerate(speeds, start + 1):
            metrics.write(iteration, {"loss": 8.0, "tokens_per_s": speed, "tflops": speed / 1e3}, "train")
    job = SimpleNamespace(config=load_config(["--train-data", "x"], world_size=1), iteration=5, first_loss=9.0)
    table = summary(job, metrics, [0])
    assert "30 (median log line)" in table and "0.030 (in the same line)" in table and "9.0000 at the first" in table


def test_the_summary_of_a_run_without_save_has_its_losses_and_speed():
    metrics = MetricsWriter(None, None, 0)
    metrics.write(5, {"loss": 8.0, "tokens_per_s": 30, "tflops": 0.5}, "train")
    metrics.write(5, {"loss": 8.5, "perplexity": 4914.77}, "valid")
    job = SimpleNamespace(config=load_config([], world_size=1), iteration=5, first_loss=9.0)
    table = summary(job, metrics, [0])
    assert "-> 8.0000 at the last log line" in table and "4914.77 (loss 8.5000)" in table and "30 (median" in table
    job.iteration = 9
    assert "4914.77 (loss 8.5000, at iteration 5)" in summary(job, metrics, [0])


def test_the_peaks_of_many_ranks_are_told_in_short():
    job = SimpleNamespace(config=load_config([], world_size=1), iteration=5, first_loss=None)
    peaks = [mb * 2**20 for mb in (7, *range(100, 116))]
    assert "7, 100, 101" in summary(job, MetricsWriter(None, None, 0), peaks[:16])
    assert "7 to 115 (rank 16), median 107" in summary(job, MetricsWriter(None, None, 0), peaks)


def test_the_command_in_the_summary_can_be_pasted_whatever_the_folders_name(tmp_path, monkeypatch):
    save = tmp_path / "it's $mine"
    (save / "global_step5").mkdir(parents=True)
    (save / "global_step5" / "index.json").touch()
    config = load_config(["--save", str(save), "--no-tensorboard"], world_size=1)
    engine = SimpleNamespace(module=object.__new__(GPT2Model))
    job = SimpleNamespace(config=config, iteration=5, first_loss=None, engine=engine)
    command = summary(job, MetricsWriter(None, None, 0), [0]).partition("generate text")[2].strip()
    assert shlex.split(command) == [f"LOAD={save}", "bash", "scripts/generate_text.sh"]
    monkeypatch.setattr("megazero.reporting.__file__", str(tmp_path / "site-packages/megazero/reporting.py"))
    assert "generate text" not in summary(job, MetricsWriter(None, None, 0), [0]), "an installed package has no scripts"


def test_the_first_rank_alone_keeps_what_is_logged():
    assert run_ranks(2, _lines_kept) == [3, 0]


def _lines_kept() -> int:
    job = SimpleNamespace(config=load_config(["--train-data", "x"], world_size=2), iteration=0)
    metrics = metrics_writer(job)
    for iteration in range(3):
        metrics.write(iteration, {"loss": 8.0}, "train")
    return len(metrics.lines)


def test_the_hosts_of_a_job_are_named_with_their_ranks():
    assert describe_hosts(["a", "a", "a", "b", "c", "c"]) == "ranks 0-2 on a, 3 on b, 4-5 on c"
    assert describe_hosts([f"h{rank // 8}" for rank in range(800)]).endswith("504-511 on h63 and 36 more")


def test_too_little_space_for_one_more_checkpoint_is_told_at_the_start(tmp_path, monkeypatch, caplog):
    kinds = {"adam": (True, False), "muon": (True, True), "frozen": (False, False)}
    plans = [
        SimpleNamespace(parameters={name: None}, is_trainable=is_trainable, has_matrices=has_matrices)
        for name, (is_trainable, has_matrices) in kinds.items()
    ]
    checkpoint = SimpleNamespace(save=str(tmp_path), no_save_optim=False)
    job = SimpleNamespace(
        config=SimpleNamespace(checkpoint=checkpoint),
        engine=SimpleNamespace(buckets=[SimpleNamespace(plan=plan) for plan in plans]),
        has_own_optimizer=False,
    )
    numels = dict.fromkeys(kinds, 500_000)  # 3 + 2 + 1 numbers for each
    for free, warnings in ((12_000_000, 0), (11_999_999, 1)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        ((_, row),) = reporting._space(job, numels)
        assert row == "about 12.00 MB; --save has 12.00 MB of free space" and len(caplog.records) == warnings
    assert "make room before the first save" in caplog.text
    checkpoint.no_save_optim = True
    ((_, row),) = reporting._space(job, numels)
    assert row.startswith("about 6.00 MB;")
