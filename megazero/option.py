"""Lets a configuration dataclass describe its own command-line flags, so that none is written twice; command-line errors."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import Field, field, fields, is_dataclass
from itertools import takewhile
from numbers import Integral, Real
from typing import Any, NoReturn


def option(
    default: Any,
    help: str = "",
    *,
    choices: Sequence[Any] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    flag: str | None = None,
    aliases: Sequence[str] = (),
    per_host: bool = False,
    unsaid: bool = False,
) -> Any:
    """A dataclass field with a default, one line of help, and what the command line needs to know about it.

    Args:
        default: the field's default.
        choices, at_least, at_most, above, below: the values that `check_options` accepts; None is always accepted as a default.
        flag: the flag's name, if it is not `--` + the field's name with dashes.
        aliases: further flag names that mean the same (old spellings).
        per_host: hosts may have different values, such as paths; a job's ranks need only agree on whether it is given.
        unsaid: it changes nothing in what is trained, or follows from the ranks, so a run that continues a checkpoint does not
            say that it has changed.
    """
    names = {"flag": flag, "aliases": tuple(aliases), "per_host": per_host, "unsaid": unsaid}
    bounds = {"at_least": at_least, "at_most": at_most, "above": above, "below": below}
    return field(default=default, metadata={"help": help, "choices": choices, **bounds, **names})


def flag_of(field: str) -> str:
    """The flag that sets a field, unless `option` gives another name."""
    return "--" + field.replace("_", "-")


def own_flag(described: Field) -> str:
    """The flag that sets a field described by `option`."""
    return described.metadata["flag"] or flag_of(described.name)


def as_given(described: Field, value: Any) -> str:
    """The flag of a field with its value, as on a command line."""
    name = own_flag(described)
    if isinstance(value, bool):
        return name if value else f"--no-{name[2:]}"
    return f"{name} {value}"


def check_options(config: Any) -> None:
    """Raises if a field of a configuration dataclass has a value that its type, or its option if it is one, does not accept.

    Raises:
        TypeError: it is of another type, such as the string "2" for a number.
        ValueError: it is none of the choices, or out of bounds.
    """
    hints = typing.get_type_hints(type(config))
    for each in fields(config):
        choices, least, most, above, below = (
            each.metadata.get(name) for name in ("choices", "at_least", "at_most", "above", "below")
        )
        flag = own_flag(each) if each.metadata else f"{type(config).__name__}'s {each.name}"
        value = getattr(config, each.name)
        if choices and (value not in (each.default, *choices) or isinstance(value, bool)):  # True is not 1
            raise ValueError(f"{flag} must be one of {', '.join(map(str, choices))}, got {value!r}.")
        if value is None:
            continue
        if (wanted := _unlike(value, hints[each.name])) is not None:
            raise TypeError(f"{flag} must be {wanted}, got {value!r}.")
        if isinstance(value, Real) and not math.isfinite(value):
            raise ValueError(f"{flag} must be a finite number, got {value}.")
        if above is not None and not value > above:
            raise ValueError(f"{flag} must be above {above}, got {value}.")
        if below is not None and not least <= value < below:
            raise ValueError(f"{flag} must lie in [{least}, {below}), got {value}.")
        if least is not None and not value >= least:
            raise ValueError(f"{flag} must be {f'at least {least}' if least else '0 or more'}, got {value}.")
        if most is not None and not value <= most:
            raise ValueError(f"{flag} must be at most {most:,}, got {value}.")


def _unlike(value: Any, hint: Any) -> str | None:
    """What a field of this type should have instead of `value`; None if that will do, as numpy's numbers do."""
    kind, is_truth = without_none(hint), isinstance(value, bool)
    if isinstance(kind, type) and is_dataclass(kind) and not isinstance(value, kind):
        return f"of class {kind.__name__}"
    if kind is bool and not is_truth:
        return "true or false"
    if kind is int and (is_truth or not isinstance(value, Integral)):
        return "an integer"
    if kind is float and (is_truth or not isinstance(value, Real)):
        return "a number"
    return None


def without_none(hint: Any) -> Any:
    """The type T of a field that is annotated T or T | None."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)  # the former of a Literal
    return typing.get_args(hint)[0] if is_union else hint


def iterations_named(text: str) -> range:
    """The iterations that "100-102" or "100" names; empty if it names none."""
    first, dash, last = text.partition("-")
    last = last if dash else first
    is_right = first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)
    return range(int(first), int(last) + 1) if is_right else range(0)


class Parser(argparse.ArgumentParser):
    """A command-line parser that raises its errors, so that the caller decides which rank reports them."""

    def error(self, message: str) -> NoReturn:
        """Raises a ValueError."""
        raise ValueError(f"{message} (see {self.prog} --help)")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As in argparse, which takes the `--` of `--flag=--` for no value at all in Python 3.11."""
        args = sys.argv[1:] if args is None else list(args)
        for argument in takewhile("--".__ne__, args):
            flag, _, value = argument.partition("=")
            if value == "--" and flag in self.takes_value:
                self.error(f"argument {flag}: -- is no value")
        return super().parse_known_args(args, namespace)

    def print_help(self, file: Any = None) -> None:
        """Prints the help on the first rank alone: all ranks of a launch have the same command line."""
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)

    @property
    def takes_value(self) -> dict[str, bool]:
        """Whether each flag takes a value."""
        return {flag: action.nargs != 0 for action in self._actions for flag in action.option_strings}

    def contradictions(self, given: Mapping[str, Sequence[str]]) -> list[list[str]]:
        """For each setting that has different values under several of its names: these names.

        Args:
            given: the flags of a command line that parses, each with the words of its value.
        """
        found = []
        for action in self._actions:
            names = [name for name in action.option_strings if name in given]
            read = action.type if callable(action.type) else str
            if action.nargs != 0 and len({tuple(map(read, given[name])) for name in names}) > 1:
                found.append(names)
        return found


def check_known(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises a ValueError for an unknown name, with `what` ("Adam has no parameter"), the name and the nearest known one."""
    for name in given:
        if name not in known:
            raise ValueError(f"{what} {name!r}. {did_you_mean(name, known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the nearest known one, else all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
