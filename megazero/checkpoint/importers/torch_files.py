"""Reading other frameworks' `torch.save` files without running anything that is in them.

A pickle names classes and functions that its reader shall import and call. Here nothing is imported: torch's weights-only reader
refuses every name but its own, and the names that real checkpoints contain as plain data holders stand for inert ones of this
module: an argparse.Namespace or a loss scaler becomes a `Record`, the member of an enum its value. A new name is one line below.
"""

from __future__ import annotations

import errno
import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megazero.checkpoint.plain import encode

logger = logging.getLogger(__name__)


class Record:
    """The attributes of an object whose class was not imported: read them with `vars(record)`."""

    def __new__(cls, *_: Any) -> Record:
        """An empty one: an exception's or a BytesIO's arguments say nothing that a checkpoint needs."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """What pickle calls with the attributes: a dict, or with __slots__ a pair of dicts."""
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)

    def __repr__(self) -> str:
        return f"Record({self.__dict__})"


class _Enum:
    """An enum: a member is read as its value; Python 3.11.0-3.11.3 wrote the name alone, which is then read."""

    def __init__(self, **members: Any) -> None:
        self.members = members

    def __call__(self, value: Any) -> Any:
        return value


def _enum_member(enum: Any, name: str) -> Any:
    """What `getattr(enum, name)` in a pickle stands for; any other use of getattr is refused."""
    if not isinstance(enum, _Enum):
        raise TypeError(f"getattr of {enum!r}, which is no enum")
    return enum.members.get(name, name)


class _Dtype:
    """A numpy dtype of numbers or text. The real one is not given its state from a file: its flags say what is a pointer."""

    def __init__(self, name: str, *_: Any) -> None:
        if not re.fullmatch(r"[biufcSU?]\d*", name):
            raise TypeError(f"a numpy array of dtype {name!r}")
        self.name, self.byte_order = name, "="

    def __setstate__(self, state: tuple) -> None:
        self.byte_order = {"<": "<", ">": ">"}.get(state[1], "=")

    def numpy(self) -> np.dtype:
        return np.dtype(self.byte_order + self.name)


class _Array(np.ndarray):
    """A numpy array, whose dtype is a `_Dtype` in the file."""

    def __setstate__(self, state: tuple) -> None:
        *version, shape, dtype, is_fortran, data = state
        super().__setstate__((*version, shape, dtype.numpy(), is_fortran, data))

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()  # saved again, it is a common one


def _path(*parts: str) -> str:
    return str(Path(*parts))


def _numpy_scalar(dtype: _Dtype, data: bytes) -> Any:
    (value,) = np.frombuffer(data, dtype.numpy())
    return value


_ZERO_STAGES = _Enum(disabled=0, optimizer_states=1, gradients=2, weights=3, max_stage=3)
_RECORDS = """
argparse.Namespace types.SimpleNamespace _io.BytesIO
deepspeed.runtime.fp16.loss_scaler.LossScaler deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler
deepspeed.pt.loss_scaler.LossScaler deepspeed.pt.loss_scaler.DynamicLossScaler
deepspeed.utils.tensor_fragment.fragment_address
fp16.loss_scaler.LossScaler fp16.loss_scaler.DynamicLossScaler
megatron.fp16.loss_scaler.LossScaler megatron.fp16.loss_scaler.DynamicLossScaler
megatron.core.rerun_state_machine.RerunDiagnostic
""".split()
_ENUMS = """
deepspeed.runtime.fp16.loss_scaler.LossScaleProfile signal.Signals
megatron.enums.PositionEmbeddingType megatron.model.enums.PositionEmbeddingType
megatron.model.enums.ModelType megatron.core.enums.ModelType
megatron.core.transformer.enums.AttnBackend
megatron.core.rerun_state_machine.RerunMode megatron.core.rerun_state_machine.RerunState
""".split()
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath")
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")  # before numpy 2, and since

# What is called, and the name for which it stands in.
_STAND_INS: list[Any] = [
    (_ZERO_STAGES, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    *((Record, name) for name in _RECORDS),
    *((_Enum(), name) for name in _ENUMS),
    (_enum_member, "builtins.getattr"),
    (lambda *_: {}, "collections.defaultdict"),
    *((kind, f"builtins.{kind.__name__}") for kind in (dict, list, int, float)),
    *((_path, f"pathlib.{name}") for name in _PATHS),
    *((_path, f"pathlib._local.{name}") for name in _PATHS),  # Python 3.13
    (_Array, "numpy.ndarray"),
    (_Dtype, "numpy.dtype"),
    *((lambda *_: _Array(0), f"{module}._reconstruct") for module in _MULTIARRAY),
    *((_numpy_scalar, f"{module}.scalar") for module in _MULTIARRAY),
]


def load_torch_file(path: str | Path) -> Any:
    """The content of a `torch.save` file: tensors on the CPU (mapped from the file where it is a zip), the rest as plain data.

    Nothing in the file is executed: see the module. Do not overwrite it while its tensors live: replace it by another file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file wants something else than data, or is damaged or no torch file.
    """
    path = Path(path)
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"  # torch before 1.6 wrote bare pickles, which cannot be mapped
    return _load(str(path), is_zip, str(path), path.stat().st_size)


def load_torch_bytes(data: bytes, name: str) -> Any:
    """What `load_torch_file` gives, of a file's content. Messages call it `name`."""
    return _load(io.BytesIO(data), False, name, len(data))


def _load(source: str | io.BytesIO, mmap: bool, name: str, size: int) -> Any:
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        # In what is left of a zip, torch may look for something in front of its beginning.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if wanted:
            raise ValueError(
                f"{name} wants to run {wanted[1]!r}, which is not data, and was not read: a checkpoint of unknown origin can "
                "run any program that way. If you trust the file, read it where it was written with torch.load(..., "
                "weights_only=False), replace such objects by dicts, numbers and tensors, and save it again."
            ) from None
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(
            f"{name} ({size} bytes) cannot be read as a torch file: {lines[-1] if lines else repr(error)}. It is damaged, not "
            "complete, or of another kind; copy it again and compare its size."
        ) from error


def load_torch_dict(path: Path, key: str, what: str) -> dict[str, Any]:
    """The dict in a `torch.save` file. Without a dict under `key` it is no `what`, and raises as `load_torch_file` does."""
    content = load_torch_file(path)
    if not isinstance(content, dict) or not isinstance(content.get(key), dict):
        raise ValueError(f"{path} has no dict {key!r}: it is no {what}.")
    return content


@contextmanager
def as_saved_by(system: str, folder: Path) -> Iterator[None]:
    """Inside, what was read from the folder is taken for what `system` saves; of data of other types, a ValueError says so."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{folder} holds other values than {system} saves ({error!r}). It is damaged or of another version; copy it again."
        ) from error


def plain_data(value: Any, name: str) -> Any:
    """`value` as data that a checkpoint of ours can hold: records as dicts of attributes, torch dtypes and devices as names.

    What is left out because it is no data (see `plain.encode`) is named in a warning: an entry of a dict, or a whole list.

    Args:
        name: of `value`, for the warnings.
    """
    kept = _plain(value, name)
    return None if kept is _LEFT_OUT else kept


_LEFT_OUT = object()


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Record):
        value = vars(value)
    if isinstance(value, dict):
        items = {
            key: _plain(item, f"{name}[{key!r}]")
            for key, item in value.items()
            if _is_data(key, f"the key {key!r} of {name}")
        }
        return {key: item for key, item in items.items() if item is not _LEFT_OUT}
    if type(value) in (list, tuple):
        parts = [_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
        return _LEFT_OUT if any(part is _LEFT_OUT for part in parts) else type(value)(parts)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, _Array):
        value = np.asarray(value)
    return value if _is_data(value, name) else _LEFT_OUT


def _is_data(value: Any, name: str) -> bool:
    """Whether a checkpoint of ours can hold it; a warning says why not."""
    try:
        encode(value, name)
    except (TypeError, ValueError) as error:
        logger.warning("left out of the import: %s", error)
        return False
    return True
