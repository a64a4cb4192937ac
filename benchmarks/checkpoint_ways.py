"""The ways of saving and loading that benchmarks/checkpoint.py compares, each as its documentation shows it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megazero_side import Megazero
from peers import FSDP2, Job
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class MegazeroWay:
    """The engine's own checkpoints, of ZeRO stage 3.

    Like every way it saves and loads what `trainer` trains, on all ranks; a save is on the disk when it returns.
    """

    has_background = True  # it can save while training goes on

    def __init__(self, job: Job, **settings: Any) -> None:
        """Args: settings: of ZeRO, beside the stage."""
        self.trainer = Megazero(job, stage=3, **settings)

    def save(self, folder: Path) -> None:
        """With its defaults."""
        self.trainer.engine.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        """With its defaults, which check the checksums."""
        self.trainer.engine.load_checkpoint(str(folder))

    def start_saving(self, folder: Path) -> None:
        """What --async-save does: returns when the training state may change."""
        self.trainer.engine.save_checkpoint(str(folder), in_background=True)

    def is_writing(self) -> bool:
        """Whether this rank's background is at work."""
        thread = self.trainer.engine.saver._thread
        return thread is not None and thread.is_alive()

    def wait(self) -> None:
        """Waits for the background; raises what went wrong there."""
        self.trainer.engine.wait_for_checkpoint()

    def tensors(self) -> Iterator[Tensor]:
        """Master weights and moments of every parameter, without the padding between them, which is not saved.

        Each is at hand for a moment; what is written to it stays.
        """
        engine, moments = self.trainer.engine, ("exp_avg", "exp_avg_sq")
        for tile in (tile for bucket in engine.buckets for tile in bucket.tiles):
            with engine.optimizer.state_at_hand(tile, moments, writes=True) as states:
                for segment, weights, _ in tile.bucket.weight_parts(tile):
                    yield weights
                    for key in moments:
                        yield from (view for view, _ in engine.optimizer.parts_of(states, tile, key, segment))


class DistributedWay:
    """torch.distributed.checkpoint with its defaults: one file per rank, synced; async_save in a thread."""

    has_background = True

    def __init__(self, side: FSDP2) -> None:
        self.trainer, self._model, (self._optimizer,) = side, side.model, side.optimizers
        self._future: Future | None = None
        self._group = dist.new_group()  # of the background alone: training uses the other at the same time

    def save(self, folder: Path) -> None:
        """get_state_dict and save."""
        dcp.save(self._state_dict(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """get_state_dict, load and set_state_dict."""
        state = self._state_dict()
        dcp.load(state, checkpoint_id=folder)
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def start_saving(self, folder: Path) -> None:
        """get_state_dict and async_save."""
        future = dcp.async_save(self._state_dict(), checkpoint_id=folder, process_group=self._group)
        self._future = future  # type: ignore[assignment]

    def is_writing(self) -> bool:
        """As the future says."""
        return self._future is not None and not self._future.done()

    def wait(self) -> None:
        """Waits for the future."""
        if self._future is not None:
            self._future.result()
            self._future = None

    def tensors(self) -> Iterable[Tensor]:
        """Of every parameter this rank's part and that of its moments."""
        states = self._optimizer.state
        parameters = ((p.detach(), states[p]["exp_avg"], states[p]["exp_avg_sq"]) for p in self._model.parameters())
        return [value.to_local() for values in parameters for value in values]

    def _state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


class PlainWay(DistributedWay):
    """torch.save of each rank's local shards into a file of its own, and fsync of file and directory; torch.load with mmap."""

    has_background = False

    def save(self, folder: Path) -> None:
        """A rank's list of tensors."""
        folder.mkdir(exist_ok=True)
        with open(self._file(folder), "wb") as file:
            torch.save(list(self.tensors()), file)
            file.flush()
            os.fsync(file.fileno())
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def load(self, folder: Path) -> None:
        """Copies out of the mapped file."""
        saved = torch.load(self._file(folder), weights_only=True, mmap=True)
        for tensor, value in zip(self.tensors(), saved, strict=True):
            tensor.copy_(value)

    def _file(self, folder: Path) -> Path:
        return folder / f"rank_{dist.get_rank()}.pt"


Way = MegazeroWay | DistributedWay


def all_ways(job: Job, directory: Path) -> dict[str, Way]:
    """By name; torch's two save the same model and optimizer, and ours with its states in a file in `directory` as well."""
    side, on_nvme = FSDP2(job), MegazeroWay(job, offload_optimizer="nvme", nvme_path=str(directory))
    return {
        "megazero": MegazeroWay(job),
        "megazero-nvme": on_nvme,
        "dcp": DistributedWay(side),
        "torch.save": PlainWay(side),
    }
