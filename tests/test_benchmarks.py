"""Every benchmark still runs, at a tiny size: by the command that its first lines mark with "does it work?"."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.vocabularies import make_gpt2_vocabulary, make_texts, write_jsonl

ROOT = Path(__file__).parent.parent


def commands() -> dict[str, str]:
    """The marked command of each benchmark that is a program, by its file's name; "" where it has none."""
    programs = [path for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    marked = {path.name: re.search(r"^    python (.*?) +# does it work\?", path.read_text(), re.M) for path in programs}
    return {name: found.group(1) if found else "" for name, found in sorted(marked.items())}


def test_every_benchmark_says_how_to_try_it():
    assert [name for name, command in commands().items() if not command] == []


@pytest.fixture
def harness():
    spec = importlib.util.spec_from_file_location("harness", ROOT / "benchmarks/harness.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quartiles_of_few_rounds_lie_among_them_and_a_single_round_is_refused(harness, capsys):
    assert harness.quartiles([1.0, 5.0]) == [2.0, 4.0]
    assert harness.quartiles_ms([0.001, 0.005]) == [2.0, 3.0, 4.0]
    with pytest.raises(SystemExit):
        harness.make_parser("about", rounds=9).parse_args(["--rounds", "1"])
    assert "--rounds: 1: quartiles need at least 2" in capsys.readouterr().err


def test_two_sides_are_compared_by_medians_and_within_rounds(harness):
    figures = {"ratio": 3.0, "ratio_by_rounds": 2.5, "quartiles_by_rounds": [1.75, 3.25]}
    assert harness.compared([1.0, 8.0], [1.0, 2.0]) == figures


def test_a_peer_that_is_not_installed_is_told_once(harness, capsys):
    assert not harness.is_installed("no_such_peer", "pip install it")
    assert not harness.is_installed("no_such_peer", "pip install it")
    assert capsys.readouterr().err == "without no_such_peer, which is not installed here (pip install it)\n"


@pytest.mark.parametrize("name", ["offload", "placement"])
def test_no_side_has_a_home_without_effect(monkeypatch, name):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    sides = importlib.import_module(name).side_names(argparse.Namespace(stages=[1, 2, 3], only=[]))
    assert len(set(sides)) > 8
    assert [side for side in sides if re.search(r"(-none|^0.0)-(cpu|nvme)$", side)] == []


@pytest.mark.parametrize("losses", ["equal bit for bit", "different"])
def test_offload_fails_if_its_sides_trained_different_things(monkeypatch, losses):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    args = argparse.Namespace(side=None, nvme_path=None)
    with pytest.raises(SystemExit) if losses == "different" else nullcontext():
        importlib.import_module("offload").play(args, None, lambda _: {"losses": losses})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data_tools", "preprocess", "timeline"])
def test_a_benchmark_finds_what_is_not_installed_in_its_checkout(name):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, ROOT / f"benchmarks/{name}.py", "--help"], env=environment, cwd="/", check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", commands())
def test_benchmark_runs(name, tmp_path):
    script, *arguments = shlex.split(commands()[name])
    make_gpt2_vocabulary(tmp_path / "v")
    write_jsonl(tmp_path / "in.jsonl", make_texts(300))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert isinstance(json.loads(done.stdout.splitlines()[-1]), dict)
    assert '"error"' not in done.stdout and '"different"' not in done.stdout, done.stdout
