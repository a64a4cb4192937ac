"""Describes a section of the JSON as a dataclass of `key`s."""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any

from megazero.option import without_none

# What a key does here.
OBEYED = "obeyed"
IF_GIVEN = "obeyed where given"  # the default is DeepSpeed's, and is not applied
ALWAYS = "always so"  # true asks for what always happens; false, if not the default, only draws a warning
NO_EFFECT = "without effect"  # accepted: it sizes or tunes something that is done another way here
REFUSED = "refused"  # unless it has its default, which turns the feature off

AUTO = "auto"


def key(
    default: Any,
    effect: str,
    note: str = "",
    *,
    stage3: bool = False,
    old: Sequence[str] = (),
    choices: Sequence[str] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: int | None = None,
) -> Any:
    """A dataclass field that describes one key of the JSON.

    Args:
        default: its value if it is absent; MISSING if the key is required.
        effect, note: what it does here, for the documentation and for messages.
        stage3: the key's name in the JSON is the field's with `stage3_` in front, which may be omitted.
        old: old names and known misspellings, which are accepted with a warning.
        choices: the accepted strings, matched in any case.
        at_least, above, at_most: bounds of a number; `at_most` is for integers, together with `at_least`.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most}
    prefix = "stage3_" if stage3 else ""
    metadata = {"effect": effect, "note": note, "prefix": prefix, "old": old, "choices": choices, "bounds": bounds}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def keys(section: type) -> Iterator[tuple[str, Field]]:
    """The keys of a section: the name in the JSON, and the field."""
    for f in fields(section):
        if "effect" in f.metadata:
            yield f.metadata["prefix"] + f.name, f


def default_of(f: Field) -> Any:
    """The default of a field; MISSING if it has none."""
    return f.default_factory() if f.default_factory is not MISSING else f.default


def every_key(section: type, path: str = "") -> Iterator[tuple[str, Field]]:
    """All keys of a section and of the sections in it, by path; the sections themselves are left out."""
    hints = typing.get_type_hints(section)
    for name, f in keys(section):
        kind = without_none(hints[f.name])
        if is_dataclass(kind):
            yield from every_key(typing.cast(type, kind), join(path, name))
        else:
            yield join(path, name), f


def describe(section: Any, given: Collection[str], path: str = "") -> list[str]:
    """A line with the values of a section's keys that are obeyed or `given`; then one for each section in it."""
    values, below = [], []
    for name, f in keys(type(section)):
        value, full = getattr(section, f.name), join(path, name)
        if is_dataclass(value):
            below += describe(value, given, full)
        elif f.metadata["effect"] == OBEYED or full in given:
            values.append(f"{name}={show(value)}")
    return [f"{path or 'top level'}: {', '.join(values)}"] * bool(values) + below


def join(path: str, name: str) -> str:
    """The path of a key in the section at `path`."""
    return f"{path}.{name}" if path else name


def show(value: Any) -> str:
    """A value as JSON writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f'"{value}"' if isinstance(value, str) else str(value)
