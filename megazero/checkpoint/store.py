"""Checkpoint directories: how they are written so that nothing is lost, and read into any model-parallel size.

    SAVE/latest                                        the tag of the newest whole checkpoint
    SAVE/global_step20/index.json                      what is in it: parameters, cuts, counters, configuration
    SAVE/global_step20/model_parallel_00.safetensors   "<state>/<parameter>": fp32 master weights and optimizer state
    SAVE/global_step20/rng_00000.safetensors           random generator states of one rank

A checkpoint is written into a directory aside, made durable, and renamed; `latest` moves last. So a save that dies leaves
the previous checkpoint in place.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megazero import comm
from megazero.files import sync_folder, written_aside
from megazero.mpu.groups import ParallelGroups
from megazero.mpu.partition import Partition
from megazero.option import option

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_TAG = re.compile(r"global_step\d+")  # a copy under another name is the user's, and is never deleted


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and when the job saves, and what it continues from."""

    save: str | None = option(None, "directory to save checkpoints in")
    load: str | None = option(
        None, "directory to continue from; a missing or empty one starts from scratch with a note"
    )
    save_interval: int = option(5000, "iterations between checkpoints")
    keep_last: int = option(0, "keep only this many newest checkpoints; 0 keeps all")
    no_save_optim: bool = option(False, "do not save the optimizer's state")
    no_save_rng: bool = option(False, "do not save the random generators' states")
    no_load_optim: bool = option(False, "do not load the optimizer's state")
    no_load_rng: bool = option(False, "do not load the random generators' states")
    finetune: bool = option(False, "load the weights only and start at iteration 0")

    def __post_init__(self) -> None:
        if self.save_interval < 1 or self.keep_last < 0:
            raise ValueError(
                f"--save-interval must be 1 or more and --keep-last 0 or more, got {self.save_interval} and {self.keep_last}."
            )


def tag_of(iteration: int) -> str:
    """The name of the checkpoint after `iteration` optimizer steps."""
    return f"global_step{iteration}"


def latest_tag(directory: str | Path) -> str | None:
    """The tag of the newest whole checkpoint in `directory`; None where there is none."""
    pointer = Path(directory) / "latest"
    return pointer.read_text().strip() if pointer.is_file() else None


def save(
    directory: str | Path,
    tag: str,
    tensors: dict[str, Tensor],
    rng: dict[str, Tensor],
    index: dict[str, Any],
    groups: ParallelGroups,
    keep_last: int = 0,
) -> Path:
    """Writes one checkpoint. Collective over the world.

    Args:
        tensors: "<state>/<parameter>" -> this model-parallel rank's part, equal on all its data-parallel ranks.
        rng: this rank's generator states; may be empty.
        index: plain JSON data, equal on every rank.
        keep_last: afterwards delete all but this many newest checkpoints; 0 keeps all.

    Raises:
        OSError: a file could not be written, on whichever rank; the checkpoint before stays the latest.
    """
    directory = Path(directory)
    final, aside = directory / tag, directory / f".{tag}.partial"
    rank = torch.distributed.get_rank()

    def prepare() -> None:
        _clean_up(directory)
        aside.mkdir(parents=True)

    def write() -> None:
        if groups.data_parallel_rank == 0:
            _write_tensors(aside / _model_file(groups.model_parallel_rank), tensors)
        if rng:
            _write_tensors(aside / _rng_file(rank), rng)

    def publish() -> None:
        files = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
        _write_text(
            aside / "index.json", json.dumps({"format_version": FORMAT_VERSION, "files": files, **index}, indent=1)
        )
        if final.exists():  # the same step saved twice: the newer content wins
            os.rename(final, _replaced(directory, tag))
        os.rename(aside, final)
        sync_folder(directory)
        _write_text(directory / "latest", tag)
        shutil.rmtree(_replaced(directory, tag), ignore_errors=True)
        if keep_last:
            _delete_older(directory, tag, keep_last)

    comm.together(prepare if rank == 0 else None)
    comm.together(write)
    comm.together(publish if rank == 0 else None)
    return final


def list_tags(directory: str | Path) -> list[str]:
    """Tags of the checkpoints that jobs have saved in `directory`, in the order in which they were written."""
    indices = [path for path in Path(directory).glob("global_step*/index.json") if _TAG.fullmatch(path.parent.name)]
    return [path.parent.name for path in sorted(indices, key=lambda path: path.stat().st_mtime_ns)]


def _delete_older(directory: Path, newest: str, keep: int) -> None:
    older = [tag for tag in list_tags(directory) if tag != newest]
    for tag in older[: max(0, len(older) + 1 - keep)]:
        try:
            shutil.rmtree(directory / tag)
        except OSError as error:  # the job is fine without the space
            logger.warning("could not delete the old checkpoint %s: %s", directory / tag, error)


def _clean_up(directory: Path) -> None:
    """Removes what saves that died have left, and puts a checkpoint back that one of them was about to replace."""
    for partial in directory.glob(".*.partial"):
        shutil.rmtree(partial)
    for replaced in directory.glob(".*.replaced"):
        final = directory / replaced.name.removeprefix(".").removesuffix(".replaced")
        if final.exists():
            shutil.rmtree(replaced)
        else:
            os.rename(replaced, final)


def _replaced(directory: Path, tag: str) -> Path:
    return directory / f".{tag}.replaced"


class Reader:
    """Reads a checkpoint, parameter by parameter, into any model-parallel size.

    Raises:
        FileNotFoundError: there is no checkpoint of this tag.
        ValueError: the checkpoint is damaged or of another format.
    """

    def __init__(self, directory: str | Path, tag: str | None = None) -> None:
        tag = tag or latest_tag(directory)
        self.path = Path(directory) / (tag or "latest")
        if tag is not None and not self.path.exists() and _replaced(Path(directory), tag).exists():
            self.path = _replaced(Path(directory), tag)  # a save of the same tag died between its two renames
        if tag is None or not (self.path / "index.json").is_file():
            raise FileNotFoundError(f"No checkpoint at {self.path}: check --load; `latest` names the tag that is read.")
        self.index = json.loads((self.path / "index.json").read_text())
        if self.index.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{self.path} has format version {self.index.get('format_version')}; this version reads {FORMAT_VERSION}."
            )
        for name, size in self.index["files"].items():
            found = (self.path / name).stat().st_size if (self.path / name).is_file() else None
            if found != size:
                raise ValueError(
                    f"Checkpoint file {self.path / name} has {found or 'no'} bytes where the index says {size}: it is "
                    "damaged. Load another tag by writing its name into `latest`, or copy the checkpoint again."
                )
        self._saved_cuts = {name: Partition(**cut) for name, cut in self.index["partitions"].items()}
        self._shards = [self._open(_model_file(r)) for r in range(self.index["model_parallel_size"])]
        self.tensors = list(self._shards[0].keys())  # "<state>/<parameter>"

    def read(self, key: str) -> Tensor:
        """The full, unpadded tensor of `key`, merged over the model-parallel ranks that saved it; fp32, CPU."""
        cut = self._saved_cuts.get(key.partition("/")[2])
        if cut is None:
            return self._shards[0].get_tensor(key)
        return cut.merge([shard.get_tensor(key) for shard in self._shards])

    def rng(self, rank: int) -> dict[str, Tensor] | None:
        """The generator states that `rank` saved; None if it saved none."""
        if _rng_file(rank) not in self.index["files"]:
            return None
        file = self._open(_rng_file(rank))
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (safe_open is no dict)

    def _open(self, name: str) -> Any:
        try:
            return safe_open(self.path / name, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"Checkpoint file {self.path / name} cannot be read: {error}.") from error


def _model_file(model_parallel_rank: int) -> str:
    return f"model_parallel_{model_parallel_rank:02d}.safetensors"


def _rng_file(rank: int) -> str:
    return f"rng_{rank:05d}.safetensors"


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # a full disk, most of the time
        raise OSError(f"could not write {path}: {error}. The checkpoint before this one is untouched.") from error
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with written_aside(path) as file:
        file.write(text.encode())
