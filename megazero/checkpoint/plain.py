"""A user's nested state as strict JSON and tensors, and back: exactly what was saved, and nothing is executed.

Most values are their own JSON. What JSON does not have is an object with the key "$": `{"$": "tuple", "items": [1, 2]}`. A user's
dict that has such a key itself, or keys that are no strings, is written as a list of pairs: `{"$": "dict", "items": [["$", 1]]}`.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import json
import math
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megazero.checkpoint.format import CLIENT, CheckpointError
from megazero.checkpoint.reader import Reader

MARK = "$"
_JSON_INT_BITS = 63  # larger ones are in hexadecimal: other readers of JSON round them, and Python limits digits
_DICTS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_SCALARS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "bytes": lambda text: base64.b64decode(text, validate=True),
}
# Tensors of these are saved as they are, those of others as their bytes: this is what every version of safetensors can hold.
_STORED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
_STORED_IN_NUMPY = {str(dtype).removeprefix("torch.") for dtype in _STORED}


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Of an optimizer's parameter group the settings that JSON holds as they are, but for tuples, which become lists."""
    values = {k: v.item() if isinstance(v, Tensor) and v.ndim == 0 else v for k, v in group.items() if k != "params"}
    return {key: value for key, value in values.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def encode(value: Any, path: str = "client_state", prefix: str = CLIENT) -> tuple[Any, dict[str, Tensor]]:
    """`value` as data that `json.dumps(allow_nan=False)` takes, and the tensors in it under the names `prefix`0, `prefix`1, ...

    Supported are None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, OrderedDict, Counter (keys may
    be anything hashable of this list), tensors, and numpy arrays and scalars of numbers or bools. A torch.Size comes back as a
    tuple, a tensor on the CPU and without requires_grad. Tensors that are on the CPU already are not copied.

    Args:
        path: what messages call `value`.

    Raises:
        TypeError: something else is in it; the message says where.
        ValueError: a container holds itself.
    """
    encoder = _Encoder(prefix)
    return encoder.encode(value, path), encoder.tensors


def decode(encoded: Any, tensors: dict[str, Tensor]) -> Any:
    """The value of which `encode` made `encoded` and `tensors`, which are not copied.

    Raises:
        ValueError: it was not written by `encode`, or by that of a newer version; or a tensor is missing.
    """
    if isinstance(encoded, list):
        return [decode(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if MARK not in encoded:
        return {key: decode(value, tensors) for key, value in encoded.items()}
    try:
        return _decode_marked(encoded, tensors)
    except (KeyError, TypeError, RuntimeError, AttributeError, OverflowError, binascii.Error) as error:
        raise ValueError(f"the saved client state is damaged at {str(encoded)[:100]}: {error!r}") from error


def client_state(reader: Reader) -> dict[str, Any]:
    """What the user had saved beside the model.

    Raises:
        CheckpointError: it is damaged.
    """
    with reader.well_formed("client_state"):
        encoded, tensors = reader.index["client_state"], reader.blobs(CLIENT)
    try:
        return decode(encoded, tensors)
    except (ValueError, RecursionError, SyntaxError) as error:
        raise CheckpointError(f"{reader.path}: {error}") from error


class _Encoder:
    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self._open: set[int] = set()  # ids of the containers that are being encoded

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)  # not isinstance: an object of a subclass would come back as one of another class
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if value.bit_length() <= _JSON_INT_BITS else {MARK: "int", "value": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {MARK: "float", "value": repr(value)}
        if kind is complex:
            return {MARK: "complex", "parts": [self.encode(part, path) for part in (value.real, value.imag)]}
        if kind is str:
            return value if _is_unicode(value) else {MARK: "str", "value": value.encode("utf-8", "surrogatepass").hex()}
        if kind is bytes:
            return {MARK: "bytes", "value": base64.b64encode(value).decode()}
        if kind in (Tensor, nn.Parameter):
            return self._tensor(value, path)
        if kind is np.ndarray and _is_numeric(value.dtype):
            name = self._store_array(value)
            return {MARK: "numpy", "dtype": value.dtype.str, "shape": list(value.shape), "name": name}
        if isinstance(value, np.generic) and _is_numeric(value.dtype):
            return {MARK: "numpy_scalar", "dtype": value.dtype.str, "value": self.encode(value.item(), path)}
        if kind in (list, torch.Size, *_SEQUENCES.values(), *_DICTS.values()):
            return self._container(value, path)
        raise TypeError(
            f"{path} is {_with_article(kind)}: only plain containers, numbers, strings, tensors and numpy arrays can be saved; "
            f"{_advice(value)}."
        )

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._open:
            raise ValueError(f"{path} is a {type(value).__name__} that holds itself: only trees can be saved.")
        self._open.add(id(value))
        encoded = self._dict(value, path) if isinstance(value, dict) else self._items(value, path)
        self._open.remove(id(value))
        return encoded

    def _dict(self, value: dict, path: str) -> Any:
        if type(value) is dict and MARK not in value and all(type(key) is str and _is_unicode(key) for key in value):
            return {key: self.encode(item, f"{path}[{key!r}]") for key, item in value.items()}
        pairs = [
            [self.encode(key, f"the key {key!r} of {path}"), self.encode(item, f"{path}[{key!r}]")]
            for key, item in value.items()
        ]
        return {MARK: type(value).__name__, "items": pairs}

    def _items(self, value: Any, path: str) -> Any:
        if isinstance(value, (set, frozenset)):  # sorted, so that equal states are equal files
            items = sorted((self.encode(item, f"{item!r} in {path}") for item in value), key=json.dumps)
        else:
            items = [self.encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if type(value) is list:
            return items
        return {MARK: "tuple" if isinstance(value, tuple) else type(value).__name__, "items": items}

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            found = "quantized" if value.is_quantized else "meta" if value.device.type == "meta" else value.layout
            raise TypeError(f"{path} is a tensor without plain values ({found}): pass a dense tensor, as x.to_dense().")
        tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        name = self._store(tensor if tensor.dtype in _STORED else tensor.reshape(-1).view(torch.uint8))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {MARK: "tensor", "dtype": dtype, "shape": list(tensor.shape), "name": name}

    def _store_array(self, value: np.ndarray) -> str:
        array = np.array(value, order="C")  # a copy: torch does not take those that are read-only
        is_stored = array.dtype.isnative and array.dtype.name in _STORED_IN_NUMPY
        return self._store(torch.from_numpy(array if is_stored else array.reshape(-1).view(np.uint8)))

    def _store(self, tensor: Tensor) -> str:
        name = f"{self.prefix}{len(self.tensors)}"
        self.tensors[name] = tensor
        return name


def _decode_marked(encoded: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    kind = encoded[MARK]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, tensors) for item in encoded["items"])
    if kind in _DICTS:
        return _DICTS[kind]({decode(key, tensors): decode(item, tensors) for key, item in encoded["items"]})
    if kind in _SCALARS:
        return _SCALARS[kind](encoded["value"])
    if kind == "complex":
        return complex(*decode(encoded["parts"], tensors))
    if kind == "numpy_scalar":
        value = decode(encoded["value"], tensors)
        scalar = _numpy_dtype(encoded["dtype"]).type(value)
        if scalar != value == value:  # numpy before 2.0 wraps it; a NaN equals nothing
            raise ValueError(f"the client state holds {value!r} as {encoded['dtype']}, which cannot hold it.")
        return scalar
    if kind == "numpy":
        stored = tensors[encoded["name"]].contiguous().reshape(-1).view(torch.uint8).numpy()
        return stored.view(_numpy_dtype(encoded["dtype"])).reshape(encoded["shape"])
    if kind == "tensor":
        dtype, tensor = getattr(torch, encoded["dtype"], None), tensors[encoded["name"]]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"the client state holds a tensor of {encoded['dtype']}, unknown to this torch: update it."
            )
        if dtype in _STORED:
            return tensor
        return tensor.clone().view(dtype).reshape(encoded["shape"])  # a clone is aligned
    raise ValueError(f"the client state holds a value of kind {kind!r}, unknown to this version: update megazero.")


def _numpy_dtype(text: str) -> np.dtype:
    dtype = np.dtype(text)
    if not _is_numeric(dtype):
        raise ValueError(f"the client state holds an array of {dtype}: only numbers and bools are ever saved.")
    return dtype


def _is_numeric(dtype: np.dtype) -> bool:
    return dtype.kind in "biufc" and dtype.char not in "gG"  # long doubles differ from machine to machine


def _is_unicode(text: str) -> bool:
    """Whether JSON gives the text back; file names that are no UTF-8 hold lone surrogates, two of which it may join to one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_article(kind: type) -> str:
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    name = f"{module}{kind.__qualname__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


_ADVICE = (
    (enum.Enum, "pass its .value"),
    *((base, f"pass {base.__name__}(...) of it") for base in (int, float, str, bytes, dict, list, set, tuple)),
    (bytearray, "pass bytes(...) of it"),
    ((os.PathLike, torch.dtype, torch.device), "pass str(...) of it"),
    (Mapping, "pass dict(...) of it"),
    (Sequence, "pass list(...) of it"),
    (Tensor, "pass a plain tensor with all of its values"),
    ((np.ndarray, np.generic), "pass an array of numbers or bools, or a list"),
)


def _advice(value: Any) -> str:
    """What to save instead of `value`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, enum.Enum)):
        return "pass dataclasses.asdict of it"
    if advice := next((advice for kinds, advice in _ADVICE if isinstance(value, kinds)), None):
        return advice
    if callable(getattr(value, "state_dict", None)):
        return "pass its state_dict()"
    if callable(value):
        return "leave it out"
    return "pass vars(...) of it" if hasattr(value, "__dict__") else "pass what it holds"
