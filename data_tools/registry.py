"""The table of steps, and their command lines."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megazero import option

STEPS = {
    "filter_urls": "data_tools.filter_urls",
    "clean": "data_tools.clean",
    "quality": "data_tools.quality",
    "dedup": "data_tools.dedup",
    "decontaminate": "data_tools.decontaminate",
    "apply": "data_tools.apply",
    "merge": "data_tools.merge",
    "shuffle": "data_tools.shuffle",
    "split": "data_tools.split",
    "train_tokenizer": "data_tools.train_tokenizer",
    "tokenize": "data_tools.preprocess_data",
    "import_tokens": "data_tools.import_tokens",
    "merge_datasets": "data_tools.merge_datasets",
    "inspect": "data_tools.inspect_dataset",
    "sample_corpus": "data_tools.make_sample_corpus",
    "find_duplicates": "data_tools.find_duplicates",
    "group_duplicates": "data_tools.group_duplicates",
    "remove_group_duplicates": "data_tools.remove_group_duplicates",
    "run": "data_tools.pipeline",
}
"""Step -> module, whose docstring is the help, with

- `add_arguments(parser)`, which adds the flags of the step;
- `run(args)`, which does the step and returns its statistics, all JSON values. It raises a ValueError or OSError for bad flags,
  bad or missing input, a missing package, and a full disk; a RuntimeError where a worker process has died.
"""

ALIASES = {
    "blacklist_urls": "filter_urls",
    "cleanup_dataset": "clean",
    "group_duplicate_url": "group_duplicates",
    "group_duplicates_url": "group_duplicates",
    "filter_ngrams": "decontaminate",
    "merge_data": "merge",
    "merge_jsons": "merge",
    "preprocess_data": "tokenize",
}
"""Megatron-LM's names of scripts -> step."""


class Parser(option.Parser):
    """Names a flag that does not exist before one that is missing for its sake."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """The flags.

        Raises:
            ValueError: one is unknown, missing, or has a bad value.
        """
        known = self.takes_value
        for flag in (word.partition("=")[0] for word in args or () if word.startswith("--")):
            if flag not in known:
                close = difflib.get_close_matches(flag, known, 1)
                self.error(f"there is no flag {flag}{f', only {close[0]}' if close else ''}")
        return super().parse_args(args, namespace)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Ends the help of a flag with its default, where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        default = action.default
        if not default or default == argparse.SUPPRESS:
            return action.help or ""
        return f"{action.help} (default: {' '.join(default) if isinstance(default, list) else default})"


def summary(step: str) -> str:
    """The first line of a step's help; read, not imported, since some packages take long to load."""
    path = Path(__file__).with_name(f"{STEPS[step].rpartition('.')[2]}.py")
    return (ast.get_docstring(ast.parse(path.read_bytes())) or "").partition("\n")[0]


def step_parser(step: str) -> Parser:
    """The command line of a step; what it parses has as `run` the step's function, whose statistics it completes."""
    module = importlib.import_module(STEPS[step])
    prog = f"python -m data_tools {step}"
    parser = Parser(prog=prog, description=module.__doc__, formatter_class=_Help, allow_abbrev=False)
    module.add_arguments(parser)
    parser.set_defaults(run=partial(_timed, step, module.run))
    return parser


def _timed(step: str, run: Callable[[argparse.Namespace], dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    statistics = run(args)
    return {"step": step, **statistics, "seconds": round(time.perf_counter() - start, 2)}
