"""The flags of the job that say where it saves and when, and what it continues from."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from megazero.checkpoint.tags import list_tags, listed, named, step_of
from megazero.option import check_options, option

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and when the job saves, and what it continues from."""

    save: str | None = option(None, "directory to save checkpoints in", per_host=True)
    load: str | None = option(
        None,
        "directory to continue from, or one checkpoint in it; a missing or empty one starts from scratch",
        per_host=True,
    )
    save_interval: int = option(5000, "iterations between checkpoints", at_least=1)
    keep_last: int = option(0, "keep only this many newest checkpoints; 0 keeps all", at_least=0)
    keep_every: int = option(
        0,
        "of what --keep-last deletes, keep the iterations that are multiples of this; 0: none",
        at_least=0,
        aliases=("--save-retain-interval",),
    )
    async_save: bool = option(False, "copy what is saved to host memory and write it while training goes on")
    no_save_optim: bool = option(False, "do not save the optimizer's state")
    no_save_rng: bool = option(False, "do not save the random generators' states")
    no_load_optim: bool = option(False, "do not load the optimizer's state")
    no_load_rng: bool = option(False, "do not load the random generators' states")
    load_fallback: bool = option(False, "where the newest checkpoint is damaged, take the newest that is not")
    exit_on_missing_checkpoint: bool = option(False, "end with an error if there is nothing in --load to continue from")
    finetune: bool = option(False, "load the weights only and start at iteration 0")
    pretrained_checkpoint: str | None = option(
        None,
        "where to take the weights from, as --load and --finetune do, until there is a checkpoint to continue from in --load",
        per_host=True,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.exit_on_missing_checkpoint and not self.load:
            raise ValueError("--exit-on-missing-checkpoint: name where there has to be one by --load, or drop it.")
        if self.keep_every and not self.keep_last:
            raise ValueError(
                f"--keep-every {self.keep_every} keeps some of what --keep-last deletes, which is not given: all checkpoints "
                "stay. Give --keep-last 1 to keep only these and the newest, or drop it."
            )
        if self.finetune and not self.load:
            raise ValueError("--finetune takes the weights of a checkpoint: name its directory by --load, or drop it.")
        if self.pretrained_checkpoint and (self.finetune or not self.is_saved_where_loaded):
            raise ValueError(
                f"--pretrained-checkpoint {self.pretrained_checkpoint} is for a command that continues its own run when it is "
                "given again: give --load the directory of --save, and no --finetune. To start over each time, give --load "
                f"{self.pretrained_checkpoint} --finetune instead."
            )

    def resolved(self) -> CheckpointConfig:
        """The same without --pretrained-checkpoint: with --load and --finetune, until a checkpoint is in --load.

        Raises:
            ValueError: none is in --pretrained-checkpoint either.
        """
        base = self.pretrained_checkpoint
        if not base or list_tags(self.loaded[0]):
            return replace(self, pretrained_checkpoint=None)
        if not list_tags(named(base)[0]):
            raise ValueError(
                f"--pretrained-checkpoint {base}: there is no checkpoint in it. `python -m megazero.checkpoint import` makes one "
                "of another system's."
            )
        logger.info("no checkpoint in --load %s yet: starting from the weights in %s", self.load, base)
        return replace(self, load=base, finetune=True, pretrained_checkpoint=None)

    @property
    def loaded(self) -> tuple[Path, str | None]:
        """The directory that --load names, and the tag where it names one checkpoint in it.

        Raises:
            ValueError: it has the name of one, and there is none.
        """
        assert self.load is not None
        directory, tag = named(self.load)
        if tag is None and step_of(directory.name) >= 0:
            there = listed(directory.parent)
            raise ValueError(
                f"--load {self.load}: there is no such checkpoint. In {directory.parent} there {there}. `python -m "
                "megazero.checkpoint import` makes one of another system's."
            )
        return directory, tag

    @property
    def is_saved_where_loaded(self) -> bool:
        """Whether --save is the directory of --load, as where a job that was stopped is started again."""
        if not self.load or not self.save:
            return False
        return self.loaded[0].resolve() == Path(self.save).resolve()
