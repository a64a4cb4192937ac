"""The checkpoint format's foundations: names, and what an index begins with.

Like `reader` a part of the zero_to_fp32.py that lies beside every checkpoint; numpy and torch are all that it needs.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

try:
    from isal.isal_zlib import crc32  # zlib's numbers, several times as fast
except ImportError:
    from zlib import crc32

FORMAT, FORMAT_VERSION = "megazero", 2
CONSTANT = "constant"  # the one state of parameters that are not trained, and of buffers
# What the keys of tensors begin with that are no part of the model.
RNG, CLIENT, SCHEDULE = "rng/", "client", "lr_scheduler"
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
_TAKEN = ("latest", "zero_to_fp32.py")  # other files beside checkpoints
_MAX_TAG = 200  # file systems have names of at most 255 bytes, and the directory aside has a longer one
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
REMEDY = (
    "Copy the checkpoint again, or load another one: by load_checkpoint's tag=, --load-fallback (pretrain_gpt2.py) or --tag (the "
    "other scripts)."
)


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or of another format."""


def check_tag(tag: str) -> str:
    """The tag, if it can name a directory inside of another.

    Raises:
        ValueError: it cannot.
    """
    is_wrong = not tag or tag.startswith(".") or tag != tag.strip() or re.search(r"[/\\\x00-\x1f]", tag)
    if is_wrong or len(os.fsencode(tag)) > _MAX_TAG or tag in _TAKEN:
        raise ValueError(
            f"A checkpoint's tag becomes the name of its directory; {tag[:300]!r} cannot. Leave out slashes, control characters, "
            f"spaces at the ends and a dot in front, take at most {_MAX_TAG} bytes, and none of {', '.join(_TAKEN)}."
        )
    return tag


def latest_tag(directory: str | Path) -> str | None:
    """The tag of the newest whole checkpoint in `directory`; None where there is none.

    Raises:
        CheckpointError: the file `latest` holds something else.
    """
    pointer = Path(directory) / "latest"
    if not pointer.is_file():
        return None
    with open(pointer, "rb") as file:
        content = file.read(4096)
    try:
        return check_tag(content.decode().strip())
    except ValueError as error:  # UnicodeDecodeError too
        raise CheckpointError(
            f"{pointer} should hold the name of a checkpoint directory and holds {content[:60]!r}. Write the name of an intact "
            "one beside it into the file."
        ) from error


def replaced_path(directory: str | Path, tag: str) -> Path:
    """Where a checkpoint rests while a save of the same tag takes its place."""
    return Path(directory) / f".{tag}.replaced"


def tag_at(path: Path) -> str:
    """The tag of the checkpoint at `path`, which may be a `replaced_path`."""
    return path.name.removeprefix(".").removesuffix(".replaced")


def checkpoint_path(directory: str | Path, tag: str) -> Path:
    """Where the checkpoint is: under its tag, unless a save of the same tag died between its two renames."""
    path, replaced = Path(directory) / tag, replaced_path(directory, tag)
    return replaced if replaced.exists() and not path.exists() else path


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
