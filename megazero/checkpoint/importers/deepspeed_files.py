"""The files of a DeepSpeed checkpoint: which there must be, and which there are.

DIR/latest                                                 the tag
DIR/TAG/mp_rank_MM_model_states.pt                         stages 0 to 2: parameters, buffers, counters, the user's own state
DIR/TAG/zero_pp_rank_D_mp_rank_MM_model_states.pt          stage 3: the same, of each data-parallel rank D
DIR/TAG/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt   stages 1 to 3: see deepspeed_partitions
DIR/latest_universal, DIR/TAG/zero/                        in place of these two: see deepspeed_universal
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.checkpoint.importers.torch_files import load_torch_dict, load_torch_file
from megazero.checkpoint.tags import check_tag
from megazero.files import read_whole

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_REFUSED = re.compile(r"(layer|expert)_.*model_states\.pt|expp_rank_.*optim_states\.pt")


@dataclass(frozen=True)
class DeepSpeedFiles:
    """The files of one checkpoint by (model-parallel rank, data-parallel rank); below stage 3 only rank 0 writes its model."""

    folder: Path
    model: dict[tuple[int, int], Path]
    optimizer: dict[tuple[int, int], Path]

    @property
    def model_parallel(self) -> int:
        """Over how many ranks every layer is cut."""
        return 1 + max(rank for rank, _ in (*self.model, *self.optimizer))

    @property
    def universal(self) -> Path | None:
        """Where a universal checkpoint has its parameters; None of another."""
        return self.folder / "zero" if (self.folder / "zero").is_dir() else None

    @property
    def _model_name(self) -> str:
        is_stage_3 = any(path.name.startswith("zero_") for path in self.model.values())
        return ("zero_pp_rank_{dp}_" if is_stage_3 else "") + "mp_rank_{mp:02d}_model_states.pt"

    def load_model(self, rank: int) -> dict[str, Any]:
        """What the model file of one model-parallel rank, data-parallel rank 0, holds.

        Raises:
            FileNotFoundError: it, or a file of another model-parallel rank, is missing.
            ValueError: it is no model file, or one of a pipeline, whose parameters are elsewhere.
        """
        self._require(self.model, [(rank, 0)], self._model_name)
        model = load_torch_dict(self.model[rank, 0], "module", "model file of DeepSpeed, or one of a pipeline")
        declared = range(int(model.get("mp_world_size") or 1))
        self._require(self.model, [(mp, 0) for mp in declared], self._model_name)
        return model

    def load_models(self, rank: int, world: int) -> list[dict[str, Any]]:
        """What the stage 3 model files of all data-parallel ranks hold; arguments and errors as of the others."""
        keys = [(rank, dp) for dp in range(world)]
        self._require(self.model, keys, self._model_name)
        return [load_torch_file(self.model[key]) for key in keys]

    def load_optimizers(self, rank: int) -> list[dict[str, Any]]:
        """The optimizer's state dict of every data-parallel rank of one model-parallel rank.

        Raises:
            FileNotFoundError: the file of a rank is missing.
            ValueError: there are more files than the optimizer had ranks.
        """
        name = "zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
        self._require(self.optimizer, [(rank, 0)], name)
        first = _load_optimizer(self.optimizer[rank, 0])
        count = first.get("partition_count", 1)  # some stages and versions have one for each group
        world = max(count) if isinstance(count, (list, tuple)) else int(count)
        self._require(self.optimizer, [(rank, dp) for dp in range(world)], name)
        if extra := [path.name for (mp, dp), path in self.optimizer.items() if mp == rank and dp >= world]:
            raise ValueError(
                f"{self.folder} has {', '.join(extra)}, but its optimizer was cut into {world} partitions (partition_count): "
                "the files are of two saves with different numbers of ranks. Move those of one of them away."
            )
        return [first, *(_load_optimizer(self.optimizer[rank, dp]) for dp in range(1, world))]

    def _require(self, found: dict[tuple[int, int], Path], keys: Sequence[tuple[int, int]], name: str) -> None:
        missing = [name.format(mp=mp, dp=dp) for mp, dp in keys if (mp, dp) not in found]
        if missing:
            raise FileNotFoundError(
                f"{self.folder} is not complete: it has no {', '.join(missing)}. Every node writes its own files: "
                "copy those of all nodes into one folder."
            )


def _load_optimizer(path: Path) -> dict[str, Any]:
    return load_torch_dict(path, "optimizer_state_dict", "optimizer file of DeepSpeed")["optimizer_state_dict"]


def find_deepspeed_files(directory: str | Path, tag: str | None) -> DeepSpeedFiles:
    """The files of one checkpoint in a `save_dir` of DeepSpeed.

    Args:
        tag: the folder in `directory`; None for the one that DIR/latest names.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is of a kind that cannot be read, or has files of two saves.
    """
    folder = _folder(Path(directory), tag)
    files = DeepSpeedFiles(folder, {}, {})
    for path in sorted(folder.iterdir()):
        if _REFUSED.fullmatch(path.name):
            raise ValueError(f"{path} is a part of a pipeline or of a mixture of experts, which cannot be imported.")
        for pattern, found in ((_MODEL, files.model), (_OPTIMIZER, files.optimizer)):
            if match := pattern.fullmatch(path.name):
                key = (int(match[2]), int(match[1] or 0))
                if key in found:
                    raise ValueError(f"{found[key]} and {path.name} are of two saves: move those of one of them away.")
                found[key] = path
    if not files.model:
        raise FileNotFoundError(
            f"{folder} has no *mp_rank_00_model_states.pt: no DeepSpeed checkpoint, or not complete."
        )
    if files.universal and files.model_parallel > 1:
        raise ValueError(
            f"{folder} is a universal checkpoint of {files.model_parallel} model-parallel ranks, which cannot be imported: "
            "import the one that ds_to_universal has made it of."
        )
    return files


def _folder(directory: Path, tag: str | None) -> Path:
    if tag is None:
        pointer = next(filter(Path.is_file, (directory / "latest", directory / "latest_universal")), None)
        if pointer is None:
            raise FileNotFoundError(
                f"{directory / 'latest'} does not exist: DeepSpeed writes the name of its newest checkpoint there. Give the "
                "directory that was passed to save_checkpoint, or name the tag (the folder in it)."
            )
        tag = read_whole(pointer).decode(errors="replace").strip()
        if os.path.isdir(directory / tag):
            check_tag(tag)  # so that it leads to no other directory
    folder = directory / str(tag)
    if not os.path.isdir(folder):  # Path.is_dir raises for a name that is too long
        raise FileNotFoundError(
            f"There is no checkpoint with the tag {str(tag)[:60]!r} in {directory}: name one that is there, in its file `latest` "
            "or by --tag."
        )
    return folder
