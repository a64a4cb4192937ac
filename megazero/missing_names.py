"""The error that a module raises for a name that it lacks, with what to do instead."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def missing(module: str, name: str, advice: str | None = None) -> Exception:
    """What the `__getattr__` of the package `module` raises for `name`.

    It is an AttributeError, so that `hasattr` works. Of `from module import name`, however, Python shows "cannot import name"
    in place of that error's message, and scripts import most names in this way: with advice, they get an ImportError,
    unless the name is a module of the package that nothing has imported yet: Python imports it after an AttributeError.
    """
    # importlib's, which asks a package by hasattr
    is_from_import = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    said = f"module {module!r} has no attribute {name!r}" + (f": {advice}." if advice else "")
    if advice and is_from_import and find_spec(f"{module}.{name}") is None:
        return ImportError(said, name=module)
    return AttributeError(said)
