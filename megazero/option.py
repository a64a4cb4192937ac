"""How a configuration dataclass describes its own command-line flag, so that no flag is written twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any


def option(
    default: Any,
    help: str = "",
    *,
    choices: Sequence[Any] | None = None,
    flag: str | None = None,
    aliases: Sequence[str] = (),
) -> Any:
    """A dataclass field with a default, one line of help, and what the command line needs to know of it.

    Args:
        default: the field's default.
        choices: the accepted values.
        flag: the flag's name where it is not `--` + the field's name with dashes.
        aliases: further flag names that mean the same (old spellings).
    """
    metadata = {"help": help, "choices": choices, "flag": flag, "aliases": tuple(aliases)}
    return field(default=default, metadata=metadata)
