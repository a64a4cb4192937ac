"""megazero: GPT-2 pretraining with Megatron-style tensor parallelism and ZeRO built in.

`import megazero as deepspeed` runs a script that was written for DeepSpeed's `initialize`. Names are imported on first use, so
that a launcher or a data tool does not import torch needlessly.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from megazero.missing_names import missing

if TYPE_CHECKING:  # for type checkers and editors, which cannot follow __getattr__
    from megazero import accelerator, comm, mpu, ops, utils, zero
    from megazero import activation_checkpointing as checkpointing
    from megazero.accelerator import get_accelerator
    from megazero.comm import init_distributed
    from megazero.deepspeed.api import add_config_arguments, initialize
    from megazero.deepspeed.engine import DeepSpeedEngine
    from megazero.engine import Engine
    from megazero.json_config import DeepSpeedConfigError, JsonConfig
    from megazero.zero import ZeroConfig

if sys.platform == "win32":
    raise ImportError("megazero runs on Linux and macOS. On Windows, use WSL 2.")
try:
    __version__ = version("megazero")
except PackageNotFoundError:  # run from a checkout that is not installed
    from pathlib import Path

    __version__ = (Path(__file__).parent.parent / "VERSION").read_text().strip()
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split(".")[:3])
__git_hash__: str | None = None  # a release has a version; a checkout has git
__git_branch__: str | None = None

_HOMES = {
    "initialize": "megazero.deepspeed.api",
    "add_config_arguments": "megazero.deepspeed.api",
    "get_accelerator": "megazero.accelerator",
    "init_distributed": "megazero.comm",
    "DeepSpeedEngine": "megazero.deepspeed.engine",
    "DeepSpeedConfigError": "megazero.json_config",
    "JsonConfig": "megazero.json_config",
    "Engine": "megazero.engine",
    "ZeroConfig": "megazero.zero",
}
_MODULES = {name: f"megazero.{name}" for name in ("accelerator", "comm", "mpu", "ops", "utils", "zero")}
_MODULES["checkpointing"] = "megazero.activation_checkpointing"

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "Engine",
    "JsonConfig",
    "ZeroConfig",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "mpu",
    "ops",
    "utils",
    "zero",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(_MODULES[name])
    raise missing(__name__, name, import_module("megazero.deepspeed.absent").OF_MODULE.get(name))
