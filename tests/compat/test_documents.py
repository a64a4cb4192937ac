"""The programs in docs/coming_from_other_systems.md and examples/ run as they stand."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "coming_from_other_systems.md"


def test_the_programs_of_the_document_run_from_top_to_bottom(own_world):
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        exec(compile(code, DOCUMENT.name, "exec"), names)
    assert names["trainer"].cur_step == 8 and names["trainer"].states["metrics"]["train"] > 0
    assert names["logits"].shape == (8, 10)
    assert names["optimizer"].loss_scale == 2**10 and names["model"].engine.global_steps == 3
    assert all(
        (DOCUMENT.parent.parent / name).exists() for name in re.findall(r"examples/\w+\.py", DOCUMENT.read_text())
    )


@pytest.mark.skipif(find_spec("transformers") is None, reason="there is no transformers")
def test_the_tutorial_of_colossalai_learns_with_the_flags_that_it_advises_for_a_laptop(own_world):
    from examples import colossalai_gpt2

    flags = re.search(r"python examples/colossalai_gpt2.py (.*?) +#", colossalai_gpt2.__doc__)[1].split()
    losses = colossalai_gpt2.main([*flags, "--policy", "auto"])
    assert len(losses) == 3 and all(10 < loss < 12 for loss in losses), "random tokens: the logarithm of 50257 is 10.8"
