"""The examples in the README and the pages about ZeRO, offload and memory are programs: they run as they stand."""

from __future__ import annotations

import ast
import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from data_tools.registry import ALIASES, STEPS
from megazero.arguments import config_of, make_parser, parse
from megazero.config import Config
from megazero.data.tokenizer import build_tokenizer
from megazero.plan import Setup, plan_job
from megazero.plan.__main__ import main as plan
from tests.ranks import run_ranks

README = Path(__file__).parent.parent / "README.md"
DOCS = README.parent / "docs"
ZERO = DOCS / "zero.md"


def test_the_library_example_changes_the_weights_also_a_second_time(own_world):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(
        compile(
            code.replace("engine.step()", "before = model.word_embeddings.weight.clone(); engine.step()"),
            "README",
            "exec",
        ),
        names,
    )
    weight = names["model"].word_embeddings.weight
    assert not torch.equal(names["before"], weight)

    (again,) = re.findall(r"a second time, (.*)", code)
    exec(compile(code.replace("mpu.initialize_model_parallel(1)", again), "README", "exec"), names)
    again = names["model"].word_embeddings.weight
    assert again is not weight and torch.equal(again, weight)


def library_example_case() -> tuple[list, list]:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, "README", "exec"), names)
    return names["tokens"].tolist(), names["model"].word_embeddings.weight.tolist()


def test_the_library_example_trains_on_other_data_on_each_rank():
    (tokens, weight), (other_tokens, other_weight) = run_ranks(2, library_example_case)
    assert tokens != other_tokens and weight == other_weight


def test_the_zero_tutorial_runs_from_top_to_bottom(own_world):
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", ZERO.read_text(), re.DOTALL):
        exec(compile(code, "docs/zero.md", "exec"), names)
    assert names["engine"].zero_optimization_stage() == 3
    assert names["grad"].shape == names["moment"].shape == (10, 32) and names["grad"].abs().max() > 0
    assert names["master"].count_nonzero() > 0, "the step has moved the weights away from zero"
    assert torch.equal(names["state"]["head.weight"], names["master"].cpu())
    check_average(names)


def check_average(names: dict) -> None:
    """The tutorial's moving average is that of the weights after each step, and is put in their place and back."""
    engine, p, get, seen = names["averaging"], names["net"].head.bias, names["safe_get_full_fp32_param"], []
    for _ in range(3):
        engine.backward(engine(names["x"]).square().mean())
        engine.step()
        seen.append(get(p))
    average = seen[0].lerp(seen[1], 1 - 0.999).lerp(seen[2], 1 - 0.999)
    for expected in (average, seen[2]):
        names["swap_average"](engine)
        assert torch.equal(get(p), expected)


def test_the_example_of_a_model_that_no_memory_holds_trains(own_world, tmp_path):
    """After the ZeRO tutorial's `Net`, with another directory."""
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "offload.md").read_text(), re.DOTALL)
    net = re.findall(r"```python\n(.*?)```", ZERO.read_text(), re.DOTALL)[0].split("torch.manual_seed")[0]
    names: dict = {}
    exec(compile(net + code.replace("/local_nvme", str(tmp_path)), "docs/offload.md", "exec"), names)
    engine = names["engine"]
    engine.backward(engine(torch.ones(1, 32)).square().mean())
    engine.step()
    assert engine.global_steps == 1


def test_the_plan_on_the_page_about_memory_gives_the_table_below_it(own_world):
    page = (DOCS / "memory.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(compile(code, "docs/memory.md", "exec"), names)
    for name, planned in names["rows"][1:]:
        assert re.search(rf"^ +{re.escape(name)} +{re.escape(planned.split('  ')[0].strip())}\b", page, re.M), name


def test_recipes_for_one_long_text_give_its_paragraphs_and_its_characters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "A book.\n\nIts chapter one,\nof two lines. <|endoftext|>\n\nThe end: caf\u00e9."
    (tmp_path / "input.txt").write_text(text, "utf-8")
    page = (DOCS / "data.md").read_text().split("**One long text**")[1].split("**What a rule")[0]
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "docs/data.md", "exec"), {})
    documents = [json.loads(line)["text"] for line in Path("input.jsonl").read_text().splitlines()]
    assert len(documents) == 3 and "".join(documents) == text + "\n\n"
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_path="characters.json")
    assert len(tokenizer.encode(text)) == len(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len({*text}) + 1 and tokenizer.end == "<|endoftext|>"


def test_the_example_on_the_page_about_planning_is_what_the_command_prints(capsys, monkeypatch):
    """Both of its runs, the second with --zero-stage 2 in place of the file, of which the page shows the last table."""
    monkeypatch.chdir(README.parent)
    _, page = (DOCS / "planning.md").read_text().split("    $ python -m megazero.plan ")
    command, shown = re.split(r"(?<!\\)\n", page.split("## What the numbers are")[0], maxsplit=1)
    shown, of_stage_2 = re.sub(r"^    ", "", shown, flags=re.M).split("With `--zero-stage 2`")
    words = shlex.split(command.replace("\\\n", " "))
    plan(words)
    assert capsys.readouterr().out.strip() == shown.strip()
    file = words.index("--deepspeed_config")
    plan([*words[:file], "--zero-stage", "2", *words[file + 2 :]])
    printed = capsys.readouterr().out
    assert printed[printed.index("\nfit\n") :].strip() == of_stage_2[of_stage_2.index("\nfit\n") :].strip()


def test_the_recipe_of_other_trainers_is_a_gpt2_of_124_million_that_fits_by_the_plan(capsys):
    page = (DOCS / "training.md").read_text().split("## GPT-2 124M")[1]
    flags = page.split("pretrain_gpt2.py ")[1].split("\n\n")[0]
    plan([*shlex.split(flags.replace("\\\n", " ")), *"--vocab-size 50257 --gpus 8 --gpu-memory 80GB".split()])
    planned = capsys.readouterr().out
    assert "124,439,808" in planned and "64 sequences x 1024 tokens, 1 per step" in planned
    assert re.search(r"fits +yes", planned)


def test_the_table_of_stages_names_the_first_that_fits_by_the_plan():
    """Of the stages in order, then O, then O and P in host memory; a single GPU has nothing to cut."""
    table = README.read_text().split("## Which stage for which model")[1].split("## ")[0]
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line)
    machines = [[int(number) for number in re.findall(r"\d+", cell)] for cell in header[1:]]  # GPUs, GB
    components = list(get_type_hints(Config).values())
    asked = "--seq-length 1024 --max-position-embeddings 1024 --vocab-size 50257 --bf16 --batch-size 4 --checkpoint-activations"
    choices = {
        **{str(stage): f"--zero-stage {stage}" for stage in range(4)},
        "2, O": "--zero-stage 2 --offload-optimizer cpu",
        "3, O, P": "--zero-stage 3 --offload-optimizer cpu --offload-param cpu",
        "-": "--zero-stage 3 --offload-optimizer cpu --offload-param cpu --batch-size 1",
    }
    assert len(rows) == len(machines) == 5
    for size, *cells in rows:
        layers, width = re.search(r"(\d+) x (\d+)", size).groups()
        model = f"--num-layers {layers} --hidden-size {width} --num-attention-heads 1"
        for cell, (gpus, gigabytes) in zip(cells, machines, strict=True):
            fits, useless = [], ("0",) if gpus > 1 else ("1", "2", "3")
            for choice in (name for name in choices if name not in useless):
                flags = f"{asked} {model} {choices[choice]}".split()
                config = config_of(parse(make_parser(components, ""), flags), gpus)
                setup = Setup.of(config, world_size=gpus, ranks_per_node=8, device_type="cuda")
                if plan_job(setup).device <= gigabytes * 10**9:
                    fits.append(choice)
            assert cell == fits[0], f"{size}, {gpus} of {gigabytes} GB: {fits}"


def test_the_messages_that_the_page_about_errors_explains_are_printed():
    """Each piece of a quoted message between what differs ("...", a rank, a name), in the sources with split strings joined."""
    files = [path for folder in ("megazero", "scripts") for path in (README.parent / folder).rglob("*.*")]
    sources = "".join(path.read_text() for path in files if path.suffix in (".py", ".sh"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    table = (DOCS / "training.md").read_text().split("| you see |")[1].split("\n\n")[0]
    messages = [message for row in table.splitlines()[2:] for message in re.findall(r"`(.*?)`", row.split("|")[1])]
    assert len(messages) > 8
    for message in messages:
        for piece in re.split(r"\.\.\.|rank N|--train-data webtext:", message):
            assert piece.strip() in sources, f"docs/training.md: no program says {piece!r} of {message!r}"


def test_every_file_that_the_readme_names_exists():
    for page in (README, ZERO):
        for name in re.findall(r"(?:scripts|docs|data_tools|benchmarks)/[\w./-]+\w", page.read_text()):
            assert (README.parent / name).exists(), f"{page.name}: {name}"


def test_every_file_that_the_page_for_contributors_names_exists():
    _, page = (README.parent / "CONTRIBUTING.md").read_text().split("## Where a change goes\n\nIn `megazero/`")
    names = re.findall(r"`([\w/]+\.py|\w+/)`", page.split("## How the code is kept")[0])
    assert len(names) > 20
    for name in names:
        folder = README.parent if name.startswith(("data_tools/", "tests/")) else README.parent / "megazero"
        assert (folder / name).exists(), name


def test_the_architecture_page_names_every_module_of_the_library():
    table = (README.parent / "docs" / "architecture.md").read_text().split("## The bucket")[0]
    named = set(re.findall(r"`([\w/]+?)/?`", table))
    library = README.parent / "megazero"
    whole = {
        "data",
        "lines",
        "plan",
        "runner",
        "checkpoint",
        "compat",
        "utils",
        "ops",
    }  # small, or with a list of their own
    for path in library.rglob("*.py"):
        package = path.relative_to(library).parts[0] if path.parent != library else ""
        if path.name not in ("__init__.py", "__main__.py") and package not in whole:
            assert path.stem in named, f"docs/architecture.md does not say what {path.relative_to(library)} is"
    for package in whole:
        assert package in named, f"docs/architecture.md does not say what {package}/ is"


@pytest.mark.parametrize("package", ["megazero/checkpoint", "megazero/data", "megazero/lines", "data_tools"])
def test_a_package_with_a_list_of_its_own_names_every_file(package):
    folder = README.parent / package
    listed = re.findall(r"`([\w*]+)`", ast.get_docstring(ast.parse((folder / "__init__.py").read_text())))
    listed += ["__init__", "__main__", *ALIASES, *(module.split(".")[1] for module in STEPS.values())]
    for path in folder.glob("*.py"):
        assert any(fnmatch(path.stem, name) for name in listed), (
            f"{package}/__init__.py does not say what {path.name} is"
        )


def test_the_architecture_page_names_every_private_part_of_torch_that_is_used():
    page = (README.parent / "docs" / "architecture.md").read_text().split("## Beyond torch's public interface")[1]
    private = re.compile(r"(?:torch|dist)\.(?:\w+\.)*(_[a-z]\w+)")
    used = set()
    for path in (README.parent / "megazero").rglob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        used.update(match[1] for node in nodes if (match := private.fullmatch(ast.unparse(node))))
    assert len(used) > 5
    for name in used:
        assert re.search(rf"{name}\b", page), f"docs/architecture.md does not say what torch's {name} is used for"
