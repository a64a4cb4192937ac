"""Tests of the log of Weights & Biases: what the package is asked for, and with the package itself if it is installed."""

import math
import sys
from types import SimpleNamespace

import pytest

from megazero.arguments import load_config
from megazero.metrics import MetricsWriter
from megazero.reporting import metrics_writer
from megazero.wandb_log import WandbLog, require_wandb


class FakeWandb(SimpleNamespace):
    """What is used of the package, with the arguments and points that its runs were given."""

    class Error(Exception):
        """As the package's own, no OSError."""

    def __init__(self):
        super().__init__(runs=[], refusal=None)

    def init(self, **arguments):
        if self.refusal:
            raise self.refusal
        run = FakeRun(**arguments | {"id": arguments["id"] or f"run{len(self.runs)}"})
        self.runs.append(run)
        return run


class FakeRun(SimpleNamespace):
    def __init__(self, **arguments):
        super().__init__(arguments=arguments, id=arguments["id"], offline=True, dir="/there/wandb/offline-run/files")
        self.points, self.axes, self.status, self.failure = [], [], None, None

    def define_metric(self, name, step_metric):
        self.axes.append((name, step_metric))

    def log(self, point):
        if self.failure:
            raise self.failure
        self.points.append(point)

    def finish(self, exit_code=None):
        if self.failure:
            raise self.failure
        self.status = exit_code


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_every_number_is_a_point_over_iterations_under_tensorboards_name(wandb, tmp_path):
    writer = MetricsWriter(None, None, 0, wandb=WandbLog("gpt2", "small", str(tmp_path), 0, {"seed": 1}))
    writer.write(10, {"loss": 8.0, "grad_norm": math.inf}, "train")
    writer.write(10, {"loss": 7.5}, "valid")
    writer.close()
    (run,) = wandb.runs
    assert run.arguments == {
        "project": "gpt2",
        "name": "small",
        "id": "run0",
        "resume": "allow",
        "dir": str(tmp_path),
        "config": {"seed": 1},
    }
    assert run.axes == [("*", "iteration")], (
        "a resumed job repeats iterations, which the package's own count would drop"
    )
    assert run.points == [
        {"iteration": 10, "train/loss": 8.0, "train/grad_norm": math.inf},
        {"iteration": 10, "valid/loss": 7.5},
    ]
    assert run.status == 0


def test_a_resumed_job_goes_on_with_the_run_in_save_and_a_fresh_one_begins_another(wandb, tmp_path):
    for start in (0, 100, 200, 0, 50):
        WandbLog("gpt2", None, str(tmp_path), start, {})
    WandbLog("gpt2", None, None, 300, {})  # without --save
    assert [run.id for run in wandb.runs] == ["run0", "run0", "run0", "run3", "run3", "run5"]


def test_a_run_without_a_name_has_that_of_the_last_folder_of_save(wandb, one_rank, tmp_path, monkeypatch):
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path / "small")
    for save in (str(tmp_path / "small"), "."):
        config = load_config(["--wandb-project", "gpt2", "--save", save, "--no-tensorboard"])
        metrics_writer(SimpleNamespace(config=config, iteration=0)).close()
    assert [run.arguments["name"] for run in wandb.runs] == ["small", "small"]


class OtherError(Exception):
    """Of the package too, whose errors have no class in common."""


@pytest.mark.parametrize("kind", [FakeWandb.Error, OtherError])
@pytest.mark.parametrize("words", ["No API key configured", "No API key configured."])
def test_a_package_that_does_not_start_names_the_flag_and_the_ways_out(wandb, tmp_path, kind, words):
    wandb.refusal = kind(words)
    with pytest.raises(
        ValueError, match=r"^--wandb-project gpt2: .*No API key configured\. To .*set WANDB_MODE=offline"
    ):
        WandbLog("gpt2", None, str(tmp_path), 0, {})


def test_a_run_that_cannot_go_on_is_named_with_its_file(wandb, tmp_path):
    (tmp_path / "wandb_run").write_text("gone")
    wandb.refusal = wandb.Error("it was deleted")
    with pytest.raises(
        ValueError, match=rf"^--wandb-project gpt2, run gone of {tmp_path}/wandb_run: .* it was deleted\."
    ):
        WandbLog("gpt2", None, str(tmp_path), 5, {})


@pytest.mark.parametrize(
    "failure", [ConnectionResetError("reset by peer"), FakeWandb.Error("run is finished"), OtherError()]
)
def test_a_run_that_ends_early_ends_this_log_with_a_warning_and_not_the_job(wandb, tmp_path, caplog, failure):
    writer = MetricsWriter(str(tmp_path), None, 0, wandb=WandbLog("gpt2", None, None, 0, {}))
    wandb.runs[0].failure = failure
    for iteration in (1, 2):
        writer.write(iteration, {"loss": 8.0}, "train")
    writer.close()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "the log in /there/wandb/offline-run ends at iteration 1, training goes on" in warning
    assert len(writer.lines) == 2 and (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_without_the_package_the_flag_says_what_to_install_before_anything_starts(monkeypatch):
    monkeypatch.setattr("megazero.wandb_log.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--wandb-project needs the package wandb.*pip install wandb"):
        require_wandb()


def test_a_folder_that_is_called_like_the_package_is_not_taken_for_it(monkeypatch, tmp_path):
    (tmp_path / "wandb" / "offline-run").mkdir(parents=True)  # as runs without --save leave it where they were started
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match="--wandb-project needs the package wandb"):
        require_wandb()


def test_a_name_for_a_run_needs_a_project():
    with pytest.raises(ValueError, match="--wandb-exp-name names a run in --wandb-project"):
        load_config(["--train-data", "x", "--wandb-exp-name", "y"])


def test_the_real_package_keeps_a_run_offline_and_continues_it(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for start in (0, 5):
        log = WandbLog("gpt2", "small", str(tmp_path), start, {"training": {"batch_size": 4}})
        log.write({"iteration": start + 1, "section": "train"}, {"loss": 8.0})
        log.close()
        ids.append((tmp_path / "wandb_run").read_text())
        assert list((tmp_path / "wandb").glob(f"offline-run-*-{ids[-1]}/run-{ids[-1]}.wandb"))
    assert ids[0] == ids[1]
