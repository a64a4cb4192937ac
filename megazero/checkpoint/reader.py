"""Reads a checkpoint: any range of any parameter, checked against checksums, whatever ranks have written it.

docs/checkpoint_format.md describes the files. They are data: nothing in them is executed, and no name in them leads out of the
directory. This module, `format`, `tags`, `ranges`, `pieces` and `tensor_file` need nothing but numpy and torch, because they are
part of the zero_to_fp32.py that lies beside every checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.format import (
    DTYPES,
    FORMAT,
    FORMAT_VERSION,
    NAME_ONE,
    PLAIN_NAME,
    REMEDY,
    CheckpointError,
    TensorEntry,
    bytes_of,
    has_own_checksum,
    is_count,
)
from megazero.checkpoint.pieces import Pieces
from megazero.checkpoint.ranges import Cut, RangeMap, shard_to_full
from megazero.checkpoint.tags import NOTHING_THERE, check_tag, checkpoint_path, latest_tag, listed, read_bytes
from megazero.checkpoint.tensor_file import CheckedFile


class Reader:
    """One checkpoint, open for reading. Every method raises CheckpointError where what it needs is damaged or not there.

    Args:
        tag: None takes the newest.
        content: of its index.json, where another process has read it and found all files there; a file's size is then looked
            at when it is first read.

    Attributes:
        path: its directory.
        content: of index.json, as bytes.
        index: the same, parsed.
        tensors: what the index says of every parameter and buffer, by name.
        aliases: further names of tied ones -> the name in `tensors`.
        nbytes: of all files together.

    Raises:
        FileNotFoundError: there is no checkpoint of this tag.
        CheckpointError: it is damaged or of another format.
        ValueError: the tag cannot name a directory.
    """

    def __init__(self, directory: str | Path, tag: str | None = None, content: bytes | None = None) -> None:
        # What was located last, and what was wanted: the states of a parameter lie alike.
        self._located: tuple[tuple[Any, ...], Pieces, RangeMap] | None = None
        self._maps: dict[tuple[Any, ...], tuple[Pieces, RangeMap]] = {}  # of a layer whose tiles are read in turns
        tag = latest_tag(directory) if tag is None else check_tag(tag)
        if tag is None:
            why = f"it has no file `latest`. {NAME_ONE}" if Path(directory).is_dir() else "there is no such directory."
            if Path(directory, "config.json").is_file():
                why = (
                    "it looks like a model of Hugging Face's. Make one of it that can be loaded: `python -m megazero.checkpoint "
                    f"import --from huggingface {directory} OUT`."
                )
            raise FileNotFoundError(f"No checkpoint at {directory}: {why}")
        self.path = checkpoint_path(directory, tag)
        self.content = read_index(self.path) if content is None else content
        self.index = self._parse_index(self.content)
        self._opened: dict[Path, BufferedReader] = {}
        with self.well_formed("files"):
            self.files = [self._open(name, entry) for name, entry in self.index["files"].items()]
            self.nbytes = sum(file.nbytes for file in self.files)
            self.size: int = self.index["model_parallel_size"]
            if not is_count(self.size) or not 1 <= self.size <= len(self.files):
                raise ValueError(f"{len(self.files)} files cannot be those of {self.size} tensor-parallel ranks")
        with self.well_formed("tensors"):
            self.tensors = {name: self._parse_entry(name, saved) for name, saved in self.index["tensors"].items()}
        with self.well_formed("aliases"):
            self.aliases = {alias: str(name) for alias, name in self.index.get("aliases", {}).items()}
        if content is None:
            for file in self.files:
                file.check_size()

    def entry(self, name: str) -> TensorEntry:
        """What is saved of a parameter or buffer."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: the index has no {name}")
        return self.tensors[name]

    def read(self, name: str, state: str) -> Tensor:
        """The full, unpadded tensor, in its saved dtype, on the CPU."""
        out = torch.empty(self.entry(name).shape, dtype=self._dtype(name, state), device="cpu")
        self.read_part(name, state, out.reshape(-1))
        return out

    def read_weight(self, name: str) -> Tensor:
        """The full parameter or buffer: fp32 for what is trained."""
        return self.read(name, self.entry(name).weight_state)

    def read_part(
        self,
        name: str,
        state: str,
        out: Tensor,
        *,
        cut: Cut | None = None,
        rank: int = 0,
        size: int = 1,
        start: int = 0,
    ) -> None:
        """Reads a range of the flattened part that a tensor-parallel rank holds; padding becomes zero.

        Args:
            out: 1-D; on another device or of another dtype values are converted.
            cut, rank, size: of the rank that wants it; by default the full parameter.
            start: in the flattened shard, of the first element.
        """
        if not out.numel():
            return
        dtype = self._dtype(name, state)
        wanted = (name, cut, rank, size, start, out.numel())
        if self._located is None or self._located[0] != wanted:
            self._located = (wanted, *self._locate(*wanted))
        _, pieces, plan = self._located
        is_direct = out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
        target = out.detach() if is_direct else torch.empty(out.shape, dtype=dtype, device="cpu")
        if plan.numel < out.numel():
            target.zero_()
        pieces.read(state, plan, bytes_of(target), f"{state} of {name}")
        if not is_direct:
            out.copy_(target)

    def missing(self, name: str) -> int:
        """How many elements of a parameter the index does not list."""
        return self.entry(name).numel - self._pieces(name).full_to_saved.numel

    def blobs(self, *prefixes: str, rank: int = 0) -> dict[str, Tensor]:
        """The tensors that a rank has saved beside the model, by key: those whose key begins with one of `prefixes`."""
        with self.well_formed("blobs"):
            entries = self.index["blobs"][rank].items()
            return {key: self._blob(*entry) for key, entry in entries if key.startswith(prefixes)}

    def _blob(self, file: int, offset: int, code: str, shape: Sequence[int]) -> Tensor:
        nbytes = math.prod(shape) * DTYPES[code].itemsize
        if not all(map(is_count, (file, offset, *shape))) or offset + nbytes > self.files[file].nbytes:
            raise ValueError(f"{nbytes} bytes of {shape} at {offset} of file {file} lie beyond it")
        out = torch.empty(shape, dtype=DTYPES[code], device="cpu")
        if out.numel():
            self.files[file].read_into(bytes_of(out), offset, "what was saved beside the model")
        return out

    def close(self) -> None:
        """Gives all descriptors back."""
        for file in self.files:
            file.close()

    def _parse_index(self, content: bytes) -> dict[str, Any]:
        with self.well_formed("its top level"):
            index: dict[str, Any] = json.loads(content, parse_constant=_no_number)
            found = (index.get("format"), index.get("format_version"))
        if found != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"{self.path} has format {found[0]}, version {found[1]}; this version reads {FORMAT}, version {FORMAT_VERSION}."
            )
        if not has_own_checksum(content):
            path = self.path / "index.json"
            raise CheckpointError(f"{path} is damaged: its checksum is not that of what it holds. {REMEDY}")
        return index

    def _open(self, name: str, entry: dict[str, Any]) -> CheckedFile:
        if not PLAIN_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a file in the checkpoint's own directory")
        return CheckedFile(self.path / name, entry["bytes"], entry["crc32"], self.index["block_bytes"], self._opened)

    def _parse_entry(self, name: str, saved: Any) -> TensorEntry:
        with self.well_formed(name):
            entry = TensorEntry.from_json(saved, self.size)
            if entry.saved_numel * max(dtype.itemsize for dtype in entry.states.values()) > self.nbytes:
                raise ValueError(f"it would be larger than all files: shape {entry.shape}, {entry.cut}")
            return entry

    def _dtype(self, name: str, state: str) -> torch.dtype:
        states = self.entry(name).states
        if state not in states:
            found = ", ".join(states) or "nothing"
            raise CheckpointError(f"{self.path}: the index has no {state} of {name}, only {found}")
        return states[state]

    def _pieces(self, name: str) -> Pieces:
        entry = self.entry(name)
        with self.well_formed(name):
            return Pieces(self.index["tensors"][name]["pieces"], entry, self.size, self.files)

    def _locate(
        self, name: str, cut: Cut | None, rank: int, size: int, start: int, length: int
    ) -> tuple[Pieces, RangeMap]:
        """A parameter's pieces, and where they hold what `read_part` is asked for."""
        key = (name, cut, rank, size)
        if key not in self._maps:
            if len(self._maps) == 2:  # weight and bias
                self._maps.clear()
            self._maps[key] = self._pieces(name), shard_to_full(self.entry(name).shape, cut, rank, size)
        pieces, to_full = self._maps[key]
        wanted = to_full.sources_from(start, start + length)
        plan = wanted.then(pieces.full_to_saved)
        if plan.numel != wanted.numel:
            raise CheckpointError(f"{self.path}: the index lists {plan.numel} of {wanted.numel} elements of {name}")
        return pieces, plan

    @contextmanager
    def well_formed(self, what: str) -> Iterator[None]:
        """Inside, only what the index says is looked at: whatever goes wrong is its fault.

        Raises:
            CheckpointError: it names `what`.
        """
        try:
            yield
        except (CheckpointError, OSError, MemoryError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.path / 'index.json'} is malformed at {what}: {type(error).__name__}: {error}. It is not what was "
                f"written. {REMEDY}"
            ) from error


def read_index(path: Path) -> bytes:
    """What index.json of the checkpoint at `path` holds.

    Raises:
        FileNotFoundError: there is no checkpoint.
        OSError: it cannot be read.
    """
    with suppress(*NOTHING_THERE):
        return read_bytes(path / "index.json")
    if any(path.glob("*_model_states.pt")):
        raise FileNotFoundError(
            f"{path} is a checkpoint of DeepSpeed's. Make one of it that can be loaded: `python -m megazero.checkpoint import "
            f"--from deepspeed {path.parent} OUT`."
        )
    raise FileNotFoundError(f"No checkpoint at {path}, beside which there {listed(path.parent)}. {NAME_ONE}")


def _no_number(text: str) -> None:
    """For json.loads: refuses NaN and Infinity."""
    raise ValueError(f"{text} is no number in JSON")
