"""Packages that only some steps need."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from types import ModuleType


def require(module: str, purpose: str, package: str | None = None) -> ModuleType:
    """The imported module.

    Args:
        purpose: what needs it ("reading a.parquet").
        package: its name for pip, where that is another one.

    Raises:
        ValueError: it is not installed; names the pip command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{purpose} needs the package {package or module} ({error}): pip install {package or module}, "
            "or pip install 'megazero[webtext]' for all that data_tools can use"
        ) from error


def version_of(module: str, purpose: str, package: str | None = None) -> str:
    """The version of the package that has this module; arguments and errors as of `require`."""
    require(module, purpose, package)
    return version(package or module)
