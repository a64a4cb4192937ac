"""Every benchmark still runs, at a tiny size: by the command that its first lines mark with "does it work?"."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
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
