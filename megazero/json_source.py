"""Reads a JSON configuration from a dict, a file, or base64, and refuses keys that are given twice.

As a program, it prints the top-level keys that a configuration decides; it imports neither torch nor this package.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class DeepSpeedConfigError(ValueError, AssertionError):
    """The configuration asks for something that is wrong, unknown, or not possible here.

    DeepSpeed raises AssertionError for some of these mistakes and ValueError for others; ported code may catch either.
    """


@contextmanager
def errors_of(section: str) -> Iterator[None]:
    """Raises a ValueError of the block, which does not name the section, as that section's error."""
    try:
        yield
    except ValueError as error:
        raise DeepSpeedConfigError(f"{section}: {error}") from error


# What is not closed is matched too: else each quote or comment in it would be tried anew.
_STRING = r'("(?:\\.|[^"\\\n])*"?)'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|\#[^\n]*|/\*.*?\*/|(/\*.*)", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")


def read_source(source: Mapping[str, Any] | str | os.PathLike) -> dict[str, Any]:
    """The configuration as a new dict, from a mapping, the path of a JSON file, or URL-safe base64 of JSON text.

    In JSON text, comments (`//`, `#`, `/* */`) and trailing commas are accepted.

    Raises:
        DeepSpeedConfigError: the source is none of these, is not valid JSON, or gives a key twice.
    """
    if isinstance(source, Mapping):
        return _as_json(source)
    if not isinstance(source, (str, os.PathLike)):
        raise DeepSpeedConfigError(f"A configuration is a dict, a path or base64 text, got {type(source).__name__}.")
    if os.path.isfile(source):
        try:
            return parse_json(Path(source).read_text(encoding="utf-8-sig"), str(source))
        except (OSError, UnicodeDecodeError) as error:
            raise DeepSpeedConfigError(f"The configuration {str(source)!r} cannot be read: {error}.") from error
    try:
        text = base64.b64decode(str(source), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        text = ""
    if not text.lstrip().startswith("{"):  # a short file name can be valid base64 by chance
        raise DeepSpeedConfigError(f"The configuration {str(source)!r} is neither an existing file nor base64 of JSON.")
    return parse_json(text, "the base64 configuration")


def _as_json(value: Any) -> Any:
    """A new copy of `value` in the types that a file would give: of other mappings, sequences, paths, and numpy's numbers."""
    if isinstance(value, Mapping):
        return {str(name): _as_json(item) for name, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy's scalars and arrays, and tensors
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_as_json(item) for item in value]
    return copy.deepcopy(value)


def parse_json(text: str, name: str) -> dict[str, Any]:
    """The object in JSON text, once comments and trailing commas are dropped.

    Args:
        name: the text's name, for error messages.
    """
    plain = strip_comments(text)
    try:
        document = json.loads(plain, object_pairs_hook=_without_duplicates, parse_constant=_constant)
    except json.JSONDecodeError as error:
        if not plain.strip():
            raise DeepSpeedConfigError(f"{name} is empty: write a JSON object, at least {{}}.") from None
        if not plain[error.pos :].strip():
            raise DeepSpeedConfigError(f"{name} ends too early: {error.msg}. Is a }} or a ] missing?") from error
        line = text.split("\n")[error.lineno - 1].strip()  # the lines that the error counts
        hint = " Often a comma is missing at the end of the line before." if error.lineno > 1 else ""
        raise DeepSpeedConfigError(
            f"{name}, line {error.lineno}, column {error.colno}: {error.msg}: {line!r} is not JSON, even with comments and "
            f"trailing commas dropped.{hint}"
        ) from error
    except RecursionError:
        raise DeepSpeedConfigError(f"{name} nests objects or lists deeper than Python can read.") from None
    except ValueError as error:  # of the functions below, or an integer of more digits than Python reads
        raise DeepSpeedConfigError(f"{name}: {error}") from None
    if not isinstance(document, dict):
        raise DeepSpeedConfigError(f"{name} must hold a JSON object, got {type(document).__name__}.")
    return document


def strip_comments(text: str) -> str:
    """`text` with blanks in place of comments and trailing commas outside strings, so that everything else keeps its position."""
    for pattern in (_COMMENT, _TRAILING_COMMA):
        text = pattern.sub(lambda m: m[0] if m.lastindex else re.sub(r"[^\n]", " ", m[0]), text)
    return text


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise DeepSpeedConfigError(f"keys are given twice in one object: {', '.join(twice)}. Keep one of each.")
    return dict(pairs)


def _constant(name: str) -> float:
    if name == "Infinity":  # as Python writes it; each key decides whether it accepts it
        return math.inf
    raise DeepSpeedConfigError(f"{name} is not a number that JSON knows.")


def decided_keys(document: Mapping[str, Any]) -> list[str]:
    """The keys of a configuration that are not left to the flags: neither "auto" nor a section with `"enabled": "auto"`."""
    enabled = {key: value.get("enabled") if isinstance(value, dict) else value for key, value in document.items()}
    return [key for key, value in enabled.items() if value != "auto"]


if __name__ == "__main__":  # asked by scripts/common.sh, which has no time to import torch
    try:
        print(*decided_keys(read_source(sys.argv[1])))
    except DeepSpeedConfigError as error:
        sys.exit(f"error: {error}")
