"""The README's example is a program: it runs as it stands, and trains."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from megazero import mpu

README = Path(__file__).parent.parent / "README.md"


def test_the_library_example_runs_and_changes_the_weights():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    try:
        exec(
            compile(
                code.replace("engine.step()", "before = model.word_embeddings.weight.clone(); engine.step()"),
                "README",
                "exec",
            ),
            names,
        )
        assert not torch.equal(names["before"], names["model"].word_embeddings.weight)
    finally:
        mpu.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def test_every_file_that_the_readme_names_exists():
    for name in re.findall(r"(?:scripts|docs|data_tools|benchmarks)/[\w./]+\w", README.read_text()):
        assert (README.parent / name).exists(), name
