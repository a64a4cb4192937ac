"""Imports go one way: every module imports only from lower levels, or from its own package."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import megazero
from tests.tiny import TINY_MODEL, make_corpus, run_command

ROOT = Path(__file__).parent.parent

# Lowest first. Packages and modules of one level do not import each other.
LEVELS = [
    {"cgroups", "children", "files", "logging", "missing_names", "timers"},
    {
        "option",
        "nested",
        "json_source",
        "comm",
        "foreign_flags",
        "launch",
        "nvme",
        "throughput",
    },
    {"accelerator", "late_ranks", "mpu", "optim", "profiling", "lines", "runner", "stop_signal", "wandb_log"},
    {"ops", "zero", "data", "entry", "metrics", "texts"},
    {"json_config"},
    {"activation_checkpointing"},
    {"model"},
    {"checkpoint"},
    {"utils", "config", "engine", "evaluation"},
    {"arguments", "backends", "job", "deepspeed"},
    {"job_batches", "job_checkpoints", "reporting", "plan", "inference"},
    {"out_of_memory"},
    {"training"},
    {"compat"},
]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}

# Megatron's names live in one namespace, mpu; those of higher levels are looked up there when first asked for.
ALLOWED = {("mpu", "model"), ("mpu", "activation_checkpointing")}


def imported(path: Path) -> set[str]:
    """Top-level parts of megazero that a file imports, anywhere in it: `megazero.zero.bucket` counts as "zero"."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "megazero":
            names |= {f"megazero.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            names.add(node.module or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("megazero."):
            names.add(node.value)  # a module named for importlib
    return {name.split(".")[1] for name in names if name.startswith("megazero.") and name.split(".")[1] in LEVEL_OF}


def edges() -> set[tuple[str, str]]:
    found = set()
    for path in (ROOT / "megazero").rglob("*.py"):
        source = path.relative_to(ROOT / "megazero").parts[0].removesuffix(".py")
        if source != "__init__":
            found |= {(source, target) for target in imported(path) if target != source}
    return found


def test_every_module_has_a_level():
    paths = [path for path in (ROOT / "megazero").iterdir() if path.suffix in ("", ".py") and path.name[0] not in "._"]
    unlike = {path.stem for path in paths} ^ LEVEL_OF.keys()
    assert not unlike, "LEVELS above has every module and package of megazero/: above all that it imports"


def test_no_module_imports_from_its_own_level_or_above():
    upward = {(a, b) for a, b in edges() if LEVEL_OF[b] >= LEVEL_OF[a]}
    assert upward <= ALLOWED, f"upward imports: {sorted(upward - ALLOWED)}"


def test_the_test_sees_imports():
    assert ("engine", "zero") in edges() and ("zero", "optim") in edges()


def test_only_comm_calls_collectives():
    names = {
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "irecv",
        "isend",
        "monitored_barrier",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "send",
    }
    comm = ROOT / "megazero" / "comm"
    for path in (ROOT / "megazero").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.value, ast.Name):
                assert node.value.id != "dist" or path.parent == comm, f"{path}:{node.lineno} calls dist.{node.attr}"


def test_what_is_looked_up_late_is_what_type_checkers_and_dir_see():
    tree = ast.parse((ROOT / "megazero" / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {alias.asname or alias.name for node in block.body for alias in node.names}
    assert seen | {"__version__"} == set(megazero.__all__) <= set(dir(megazero))
    assert seen == {*megazero._HOMES, *megazero._MODULES}
    assert all(getattr(megazero, name) is not None for name in seen)


def test_a_job_that_compiles_nothing_does_not_import_the_compiler(tmp_path):
    dear = "{'torch._dynamo', 'sympy'}.intersection(sys.modules)"  # each takes a process longer than torch
    code = f"import runpy, sys; runpy.run_path('pretrain_gpt2.py', {{}}, '__main__'); print({dear})"
    flags = ["--recompute", "full", "--train-iters", "2"]
    done = run_command([sys.executable, "-c", code, *TINY_MODEL, *make_corpus(tmp_path), *flags])
    assert "iterations                 2 of 2" in done.stdout and done.stdout.endswith("\nset()\n"), done.stdout
