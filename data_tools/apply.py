"""Applies a function of your own to each document, which keeps, changes or drops it: a filter, a classifier, a label, other keys.

    def permissive(document):                         # in mine.py
        if document.get("license") not in ("MIT", "Apache-2.0"):
            return "license"
        document["source"] = "stack"
        return document

It is called with a dict, and returns the document to keep, changed or not, or the reason to drop it: one of a few strings, under
which documents are counted and listed. Each process runs the file once. Make the result depend on the document alone: outputs are
made again if the file has changed, but not if what it imports or reads has.

    python -m data_tools apply --input stack/ --output own/ --function mine.py:permissive --json-key content
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from data_tools.documents import Document, dump
from data_tools.line_functions import DocumentLines, Dropped, Failed, Kept
from data_tools.options import add_input_output, add_run_options, run_options
from data_tools.shard_plan import shards_of
from data_tools.shards import run_lines
from megazero.lines.jsonl import read_object

OwnFunction = Callable[[Document], "Document | str"]
"""The document, which it may change, or another one; or the reason to drop it."""


def load_function(path: Path, source: bytes, name: str) -> OwnFunction:
    """The function of that name in a file of Python, which is run.

    Args:
        source: what the file holds.

    Raises:
        ValueError: the file does not run, or has no such function.
    """
    module = ModuleType(str(path))  # a name that hides no other module's
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses look for theirs
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        raise ValueError(f"--function: {path} does not run:\n{_trace(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = "no such name" if function is None else f"it is no function but {type(function).__name__}"
        raise ValueError(f"--function {path}:{name}: {found}")
    return function


def _trace(error: Exception) -> str:
    """The traceback, without the frame of this module."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


class OwnLines(DocumentLines):
    """The line function that applies an `OwnFunction`; as that need not be picklable, each process loads it from its source."""

    def __init__(self, path: Path, source: bytes, name: str, key: str) -> None:
        self._source = path, source, name, key
        self._own, self._name, self.key = load_function(path, source, name), f"{path}:{name}", key

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnLines, self._source

    def __call__(self, line: bytes) -> Kept:
        """Raises LineError or Dropped, as a line function does, and Failed."""
        document = read_object(line, self.key)
        before = dump(document)  # which the function may change
        try:
            result = self._own(document)
        except Exception as error:
            raise Failed(f"{self._name} failed:\n{_trace(error)}", self.identify(line)) from error
        if isinstance(result, str):
            raise Dropped(result, self.identify(line))
        if not isinstance(result, dict):
            found = f"returned {type(result).__name__}, not the document, or a string, which is the reason to drop it"
            raise Failed(f"{self._name} {found}", self.identify(line))
        try:
            after = dump(result)
        except (TypeError, ValueError, RecursionError) as error:
            raise Failed(f"{self._name} returned what JSON cannot hold: {error}", self.identify(line)) from error
        return Kept(line + b"\n") if after == before else Kept(after, is_changed=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    add_input_output(parser)
    parser.add_argument("--function", required=True, metavar="FILE.py:NAME", help="what is applied to each document")
    add_run_options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Applies the function, and returns the statistics."""
    options = run_options(args)
    file, _, name = args.function.rpartition(":")
    path = Path(file)
    if not file or not name.isidentifier():
        raise ValueError(f"--function {args.function}: expected FILE.py:NAME")
    if not path.is_file():
        raise FileNotFoundError(f"--function {args.function}: there is no file {path}")
    source = path.read_bytes()
    lines = OwnLines(path, source, name, args.json_key)
    _, shards = shards_of(args, tables=[path])
    settings = {"key": args.json_key, "function": name, "sha256": hashlib.sha256(source).hexdigest()}
    return run_lines("apply", shards, lines, settings, options)
