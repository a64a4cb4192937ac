"""The examples in the README and the ZeRO tutorial are programs: they run as they stand, and train."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from megazero import mpu

README = Path(__file__).parent.parent / "README.md"
ZERO = README.parent / "docs" / "zero.md"


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


def test_the_zero_tutorial_runs_from_top_to_bottom():
    names: dict = {}
    try:
        for code in re.findall(r"```python\n(.*?)```", ZERO.read_text(), re.DOTALL):
            exec(compile(code, "docs/zero.md", "exec"), names)
        assert names["engine"].zero_optimization_stage() == 3
        assert names["grad"].shape == names["moment"].shape == (10, 32) and names["grad"].abs().max() > 0
        assert names["master"].count_nonzero() > 0, "the step has moved the weights away from zero"
        assert torch.equal(names["state"]["head.weight"], names["master"].cpu())
    finally:
        mpu.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def test_every_file_that_the_readme_names_exists():
    for page in (README, ZERO):
        for name in re.findall(r"(?:scripts|docs|data_tools|benchmarks)/[\w./-]+\w", page.read_text()):
            assert (README.parent / name).exists(), f"{page.name}: {name}"


def test_the_architecture_page_names_every_module_of_the_library():
    table = (README.parent / "docs" / "architecture.md").read_text().split("## The bucket")[0]
    named = set(re.findall(r"`([\w/]+?)/?`", table))
    library = README.parent / "megazero"
    whole = {
        "data",
        "plan",
        "runner",
        "checkpoint",
        "compat",
        "json_config",
        "utils",
        "ops",
    }  # small, or with a list of their own
    for path in library.rglob("*.py"):
        package = path.relative_to(library).parts[0] if path.parent != library else ""
        if path.name not in ("__init__.py", "__main__.py") and package not in whole:
            assert path.stem in named, f"docs/architecture.md does not say what {path.relative_to(library)} is"
    for package in whole:
        assert package in named, f"docs/architecture.md does not say what {package}/ is"
