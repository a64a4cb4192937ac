"""Reads a section of the JSON from a dict: checks names, types and bounds, resolves "auto", and accepts old names."""

from __future__ import annotations

import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, is_dataclass
from typing import Any, TypeVar

from megazero.json_config.schema import ALWAYS, AUTO, REFUSED, default_of, every_key, join, keys, show
from megazero.json_source import DeepSpeedConfigError
from megazero.option import did_you_mean, without_none

Section = TypeVar("Section")


class Reader:
    """Reads sections, and collects what to report about them.

    Attributes:
        warnings: one sentence each.
        given: the paths of the keys that were given, under their current names.
        undecided: the paths of keys that are "auto" without a given meaning; they are left out.
    """

    def __init__(self, auto: Mapping[str, Any]) -> None:
        self.auto = auto
        self.warnings: list[str] = []
        self.given: set[str] = set()
        self.undecided: list[str] = []
        self._paths: list[str] = []  # of all keys of the document

    def section(self, section: type[Section], given: Any, path: str) -> Section | None:
        """The section at `path`, checked; None if it lacks values whose "auto" nothing decides: `refuse_undecided` will say so.

        Raises:
            DeepSpeedConfigError: a key is unknown, missing, given under two names, or has a bad value.
        """
        values = self.values(section, given, path)
        for name, f in keys(section):
            if default_of(f) is MISSING and f.name not in values:
                raise DeepSpeedConfigError(f"{join(path, name)} is missing.")
        lacks_some = any(undecided.startswith(f"{path}.") for undecided in self.undecided)
        return None if lacks_some else section(**values)

    def values(self, section: type, given: Any, path: str) -> dict[str, Any]:
        """The values that were given in a section, converted, by field name."""
        if not isinstance(given, Mapping):
            first, _ = next(keys(section))
            raise _wrong(path, f'an object such as {{"{first}": ...}}' if path else "an object", given)
        if not path:
            self._paths = [full for full, _ in every_key(section)]
        described, hints = _spellings(section), typing.get_type_hints(section)
        values: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for name, value in given.items():
            if name not in described:
                raise DeepSpeedConfigError(f"Unknown key {join(path, name)}. {self._advice(name, section, path)}")
            current, f = described[name]
            if current in spelled:
                raise DeepSpeedConfigError(
                    f"{join(path, spelled[current])} and {join(path, name)} are two names of one key. Keep {current}."
                )
            spelled[current] = name
            if name in f.metadata["old"]:
                self.warnings.append(f"{join(path, name)} is an old or misspelled name, read as {current}.")
            full = join(path, current)
            if value == AUTO and AUTO not in f.metadata["choices"]:
                if full not in self.auto:
                    if not path:  # in a section the key counts as absent
                        self.undecided.append(full)
                    continue
                value = self.auto[full]
            self._check_effect(value, full, f)
            values[f.name] = self._convert(hints[f.name], value, full, f)
            self.given.add(full)
        return values

    def refuse_undecided(self) -> None:
        """Raises if there was an "auto" whose meaning nothing decides; the message names all such keys.

        Raises:
            DeepSpeedConfigError: there are such keys.
        """
        if self.undecided:
            decided = f" (only for {', '.join(sorted(self.auto))})" if self.auto else ""
            raise DeepSpeedConfigError(
                f'Nothing here decides what "auto" is for {", ".join(self.undecided)}{decided}. Give values, or drop these keys.'
            )

    def _advice(self, name: str, section: type, path: str) -> str:
        """What to do about a key that the section at `path` lacks."""
        homes = [full.rpartition(".")[0] for full in self._paths if name in (full, full.rpartition(".")[2])]
        if len(homes) == 1:
            return f"It is a key of {homes[0] or 'the top level'}: put it there, or drop it."
        advice = did_you_mean(name, [known for known, _ in keys(section)])
        if not path:  # only at top level does DeepSpeed ignore unknown keys
            advice += " If it is none of DeepSpeed's, drop it: DeepSpeed passes over such a key, silently."
        return advice

    def _convert(self, hint: Any, value: Any, path: str, f: Field) -> Any:
        kind = without_none(hint)
        if value is None and (kind is not hint or default_of(f) is None):
            return None
        if is_dataclass(kind):
            return self.section(typing.cast(type, kind), value, path)
        if typing.get_origin(kind) is dict:
            if not isinstance(value, Mapping):
                raise _wrong(path, "an object", value)
            decided = {}
            for name, item in value.items():
                full = join(path, name)
                if item == AUTO and full not in self.auto:
                    self.undecided.append(full)
                else:
                    decided[name] = self.auto[full] if item == AUTO else item
            return decided
        value = _scalar(kind, value, path, f.metadata["choices"])
        _check_bounds(value, path, **f.metadata["bounds"])
        return value

    def _check_effect(self, value: Any, path: str, f: Field) -> None:
        effect, note, default = f.metadata["effect"], f.metadata["note"], default_of(f)
        if effect == REFUSED and value != default:
            raise DeepSpeedConfigError(
                f"{path} {show(value)} is not possible here: {note}. Drop it, or set it to {show(default)}."
            )
        if effect == ALWAYS and value is False and default is True:
            self.warnings.append(f"{path} false changes nothing: {note}.")


class _TypesOnly(Reader):
    """Reads values without making sections, whose own checks involve several keys."""

    def section(self, section: type, given: Any, path: str) -> Any:
        return self.values(section, given, path)


def check_types(section: type, given: Mapping[str, Any]) -> None:
    """Checks the names, types and bounds of all given keys, each on its own; "auto" is accepted.

    Raises:
        DeepSpeedConfigError: a key is unknown, given under two names, or has a bad value.
    """
    _TypesOnly({}).values(section, given, "")


def _spellings(section: type) -> dict[str, tuple[str, Field]]:
    """The current name and the field for every accepted spelling."""
    return {spelling: (name, f) for name, f in keys(section) for spelling in (f.name, *f.metadata["old"], name)}


def _scalar(hint: type, value: Any, path: str, choices: Sequence[str]) -> Any:
    if hint is bool:
        if not isinstance(value, bool):
            raise _wrong(path, "true or false", value)
        return value
    if hint is str:
        if not isinstance(value, str):
            raise _wrong(path, "a string", value)
        if not choices:
            return value
        for choice in choices:
            if value.lower() == choice.lower():
                return choice
        raise DeepSpeedConfigError(f"{path} must be one of {', '.join(choices)}, got {show(value)}.")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if hint is int:
        if not is_number or value != int(value):
            raise _wrong(path, "an integer", value)
        return int(value)
    if not is_number:
        raise _wrong(path, "a finite number", value)
    return float(value)


def _check_bounds(value: Any, path: str, at_least: float | None, above: float | None, at_most: int | None) -> None:
    is_low = (at_least is not None and value < at_least) or (above is not None and value <= above)
    if not is_low and (at_most is None or value <= at_most):
        return
    if at_most is not None:
        *others, last = range(int(at_least or 0), at_most + 1)
        wanted = f"{', '.join(map(str, others))} or {last}"
    else:
        wanted = f"at least {at_least}" if at_least is not None else f"greater than {above}"
    raise DeepSpeedConfigError(f"{path} must be {wanted}, got {value}.")


def _wrong(path: str, wanted: str, value: Any) -> DeepSpeedConfigError:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    kind = kinds.get(type(value))
    found = show(value) if not isinstance(value, (dict, list)) else kind
    hint = f" ({kind})" if isinstance(value, str) else ""
    return DeepSpeedConfigError(f"{path or 'The configuration'} must be {wanted}, got {found}{hint}.")
