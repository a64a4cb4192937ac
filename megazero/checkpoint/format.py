"""The checkpoint format's foundations: names, checksums, and files that are checked block by block as they are read.

Like `reader` a part of the zero_to_fp32.py that lies beside every checkpoint; numpy and torch are all that it needs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from io import BufferedReader
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


def no_number(text: str) -> None:
    """For json.loads: refuses NaN and Infinity."""
    raise ValueError(f"{text} is no number in JSON")


def is_count(value: Any) -> bool:
    """Whether it is an integer from 0 on that fits into 64 bits: no bool, no 2.0."""
    return type(value) is int and 0 <= value < 2**63


def integers(values: Sequence[Any]) -> np.ndarray:
    """The values as int64, and no others: "1", 1.0 and what is too large are not what was written."""
    array = np.array(values)
    if len(values) and array.dtype.kind != "i":
        raise ValueError(f"{str(values)[:60]} are not all integers")
    return array.astype(np.int64)


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor, as [bytes] uint8."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


class CheckedFile:
    """A file whose blocks are checked against their CRC-32 as they are read.

    Args:
        checksums: of every `block_bytes` of the file.

    Raises:
        ValueError: the number of checksums does not suit the size.
    """

    def __init__(self, path: Path, nbytes: int, checksums: list[int], block_bytes: int) -> None:
        self._file: BufferedReader | None = None
        is_wrong = not is_count(nbytes) or not is_count(block_bytes) or not isinstance(checksums, list)
        if is_wrong or block_bytes < 1 or len(checksums) != -(-nbytes // block_bytes):
            found = f"the checksums {str(checksums)[:60]} for blocks of {block_bytes}"
            raise ValueError(f"{path.name} of {nbytes} bytes cannot have {found}")
        self.path, self.nbytes, self.checksums, self.block_bytes = path, nbytes, checksums, block_bytes
        self._block, self._content = -1, np.empty(0, dtype=np.uint8)  # the last one that was needed in part

    def found_size(self) -> int | None:
        """The bytes that it has in fact; None if it is missing."""
        return self.path.stat().st_size if self.path.is_file() else None

    def check_size(self) -> None:
        """Returns if the file is there and as large as it should be. Reading asks before it opens the file.

        Raises:
            CheckpointError: it is not.
        """
        found = self.found_size()
        if found != self.nbytes:
            raise CheckpointError(
                f"Checkpoint file {self.path} has {'no' if found is None else found} bytes where the index says {self.nbytes}: "
                f"it is damaged. {REMEDY}"
            )

    def read_into(self, out: np.ndarray, start: int, what: str) -> None:
        """Fills `out`, [bytes] uint8, from the file's bytes at `start` on; `what` is in messages what is read.

        Raises:
            CheckpointError: a block is not what was written.
            OSError: the disk does not give it.
        """
        stop = start + len(out)
        if not 0 <= start <= stop <= self.nbytes:
            raise CheckpointError(f"{self.path} has {self.nbytes} bytes, and the index says {start}..{stop} for {what}")
        for block in range(start // self.block_bytes, -(-stop // self.block_bytes)):
            low, high = self._bounds(block)
            if start <= low and high <= stop:
                self._read_block(block, what, out[low - start : high - start])
                continue
            if block != self._block:
                self._content = self._read_block(block, what)
                self._block = block
            first, last = max(low, start), min(high, stop)
            out[first - start : last - start] = self._content[first - low : last - low]

    def verify(self) -> Iterator[tuple[int, int, bool]]:
        """Reads the whole file: of every block [low, high) in bytes, and whether it is as it was written."""
        for block in range(len(self.checksums)):
            low, high = self._bounds(block)
            try:
                self._read_block(block, "a check")
                yield low, high, True
            except CheckpointError:
                yield low, high, False

    def close(self) -> None:
        """Gives the descriptor back; a later read opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self.close()

    def _bounds(self, block: int) -> tuple[int, int]:
        return block * self.block_bytes, min((block + 1) * self.block_bytes, self.nbytes)

    def _read_block(self, block: int, what: str, out: np.ndarray | None = None) -> np.ndarray:
        low, high = self._bounds(block)
        out = np.empty(high - low, dtype=np.uint8) if out is None else out
        if self._file is None:
            self.check_size()
            self._file = open(self.path, "rb")  # noqa: SIM115 (until `close`)
        self._file.seek(low)
        try:
            count = self._file.readinto(out.data)
        except OSError as error:  # of a disk that fails; it does not say which file it was
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if count < high - low or crc32(out.data) != self.checksums[block]:
            raise CheckpointError(
                f"Checkpoint file {self.path} is damaged: bytes {low} to {high} are not what was written (read for "
                f"{what}). {REMEDY}"
            )
        return out
