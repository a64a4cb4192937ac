"""The checkpoint format's foundations: dtypes, checksums, the index as bytes, and what it says of a tensor.

Like `reader` a part of the zero_to_fp32.py that lies beside every checkpoint; numpy and torch are all that it needs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.ranges import Cut, shard_shape

try:
    from isal.isal_zlib import crc32  # zlib's numbers, several times as fast
except ImportError:
    from zlib import crc32

FORMAT, FORMAT_VERSION = "megazero", 2
CONSTANT = "constant"  # the one state of parameters that are not trained, and of buffers
_WEIGHT_STATES = {"trained": "master", "frozen": CONSTANT, "buffer": CONSTANT}  # by the kind of a tensor
# What the keys of tensors begin with that are no part of the model.
RNG, CLIENT, SCHEDULE = "rng/", "client/", "lr_scheduler/"
# As in safetensors.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
ANOTHER = "another one: by load_checkpoint's tag=, --load-fallback (pretrain_gpt2.py) or --tag (the other scripts)."
NAME_ONE = f"Name one that is there in `latest`, or take {ANOTHER}"
REMEDY = f"Copy the checkpoint again, or load {ANOTHER}"


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or of another format."""


def dtype_code(dtype: torch.dtype) -> str:
    """The dtype as safetensors writes it: "F32".

    Raises:
        TypeError: the format has none for it.
    """
    if dtype not in _CODES:
        raise TypeError(f"tensors of {dtype} cannot be saved: safetensors files hold {', '.join(map(str, _CODES))}")
    return _CODES[dtype]


@dataclass(frozen=True)
class TensorEntry:
    """What an index says of a parameter or buffer, but for the places of its elements.

    Attributes:
        kind: "trained", "frozen" or "buffer".
        shape: full and without padding.
        cut: how the tensor-parallel ranks that saved it had cut it; None: each of them had all of it.
        states: dtypes of what is saved, by name: "master" and the optimizer's states, or "constant" alone.

    Raises:
        TypeError: a dtype cannot be saved.
    """

    kind: str
    shape: tuple[int, ...]
    cut: Cut | None
    states: Mapping[str, torch.dtype]

    def __post_init__(self) -> None:
        for dtype in self.states.values():
            dtype_code(dtype)

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def saved_numel(self) -> int:
        """Elements that all ranks together save of each state: with padding."""
        return math.prod(shard_shape(self.shape, self.cut, size=1))

    @property
    def weight_state(self) -> str:
        """The state that holds the values: "master", in fp32, or "constant" of what is not trained."""
        return _WEIGHT_STATES[self.kind]

    def as_json(self, pieces: list[Any]) -> dict[str, Any]:
        """The entry in the index."""
        codes = {state: dtype_code(dtype) for state, dtype in self.states.items()}
        cut = self.cut and {key: value for key, value in asdict(self.cut).items() if value != ()}
        return {"kind": self.kind, "shape": list(self.shape), "cut": cut, "states": codes, "pieces": pieces}

    @classmethod
    def from_json(cls, saved: dict[str, Any], size: int) -> TensorEntry:
        """The inverse of `as_json`, where `size` tensor-parallel ranks have saved.

        Raises:
            ValueError: it is not what a writer could have written. Other errors mean the same.
        """
        shape, cut = tuple(saved["shape"]), saved["cut"]
        if not all(map(is_count, shape)):
            raise ValueError(f"shape {shape}")
        if cut is not None:
            cut = Cut(cut["dim"], cut["stride"], cut["padded"], tuple(map(tuple, cut.get("tiles", ()))))
            counts = (cut.stride, cut.padded, *(start for bounds in cut.tiles for start in bounds))
            has_dim = is_count(cut.dim) or (cut.dim is None and cut.tiles)
            if not has_dim or not all(map(is_count, counts)) or not 1 <= cut.stride <= max(1, cut.padded):
                raise ValueError(f"{cut}")
            shard_shape(shape, cut, size)  # raises where it cannot be
        entry = cls(saved["kind"], shape, cut, {state: DTYPES[code] for state, code in saved["states"].items()})
        if entry.weight_state not in entry.states:
            raise ValueError(f"{entry.kind} without {entry.weight_state}")
        return entry


def index_bytes(index: dict[str, Any]) -> bytes:
    """The content of index.json: before all else "crc32", the checksum of the bytes behind the first comma and space."""
    rest = json.dumps({key: index[key] for key in index if key != "crc32"}, allow_nan=False).encode()[1:]
    return b'{"crc32": %d, ' % crc32(rest) + rest


def has_own_checksum(content: bytes) -> bool:
    """Whether `content` is what `index_bytes` gave."""
    head, _, rest = content.partition(b", ")
    return head == b'{"crc32": %d' % crc32(rest)


def is_count(value: Any) -> bool:
    """Whether it is an integer from 0 on that fits into 64 bits: no bool, no 2.0."""
    return type(value) is int and 0 <= value < 2**63


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor, as [bytes] uint8."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
