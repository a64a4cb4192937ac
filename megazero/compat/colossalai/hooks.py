"""Colossal-AI's trainer hooks, which a `Trainer` calls at fixed points."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megazero.compat.colossalai.reports import DistributedLogger

if TYPE_CHECKING:
    from megazero.compat.colossalai.trainer import Trainer


class BaseHook:
    """Methods that a `Trainer` calls; override those you need. Hooks with a lower `priority` are called first."""

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """At the start of `fit` and `evaluate`."""

    def before_train(self, trainer: Trainer) -> None:
        """Before the first epoch."""

    def after_train(self, trainer: Trainer) -> None:
        """After the last epoch."""

    def before_train_epoch(self, trainer: Trainer) -> None:
        """Before each epoch."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        """After each epoch."""

    def before_train_iter(self, trainer: Trainer) -> None:
        """Before each batch."""

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor) -> None:
        """After each batch, with the detached loss."""

    def before_test(self, trainer: Trainer) -> None:
        """Before an evaluation."""

    def after_test(self, trainer: Trainer) -> None:
        """After an evaluation."""

    def before_test_epoch(self, trainer: Trainer) -> None:
        """After `before_test`."""

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Before `after_test`."""

    def before_test_iter(self, trainer: Trainer) -> None:
        """Before each batch of an evaluation."""

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor) -> None:
        """After each batch of an evaluation."""


class LossHook(BaseHook):
    """Keeps this rank's mean loss of the epoch in `trainer.states["metrics"]`, under "train" and "test"; NaN without a batch."""

    def __init__(self, priority: int = 0) -> None:  # before hooks that read it
        super().__init__(priority)

    def before_train_epoch(self, trainer: Trainer) -> None:
        """Starts a new mean."""
        self._sum: Tensor | float = 0.0  # fp64: of any number of batches
        self._count = 0

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor) -> None:
        """Adds a loss, without waiting for the device."""
        self._sum = self._sum + loss.double()
        self._count += 1

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Stores the mean loss."""
        trainer.states.setdefault("metrics", {})["train"] = self._mean()

    before_test_epoch = before_train_epoch
    after_test_iter = after_train_iter

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Stores the mean loss."""
        trainer.states.setdefault("metrics", {})["test"] = self._mean()

    def _mean(self) -> float:
        return float(self._sum) / self._count if self._count else math.nan


class LRSchedulerHook(BaseHook):
    """Steps a learning-rate schedule after every epoch, or with `by_epoch=False` after every batch."""

    def __init__(self, lr_scheduler: Any, by_epoch: bool = True, priority: int = 1) -> None:
        super().__init__(priority)
        self.lr_scheduler, self.by_epoch = lr_scheduler, by_epoch

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Steps the schedule if it steps by epoch."""
        if self.by_epoch:
            self.lr_scheduler.step()

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor) -> None:
        """Steps the schedule if it steps by batch."""
        if not self.by_epoch:
            self.lr_scheduler.step()


class LogMetricByEpochHook(BaseHook):
    """Logs what `LossHook` stored in `trainer.states["metrics"]`, on the first rank.

    That is the loss of every `interval`-th epoch of training, and of every evaluation.
    """

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self.logger, self.interval = logger, interval

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Logs the training loss."""
        if trainer.cur_epoch % self.interval == 0:
            self._log(trainer, "train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Logs the loss of an evaluation."""
        self._log(trainer, "test")

    def _log(self, trainer: Trainer, mode: str) -> None:
        loss = trainer.states.get("metrics", {}).get(mode)
        if loss is not None:
            self.logger.info(f"[Epoch {trainer.cur_epoch} / {mode.capitalize()}]: Loss = {loss:.4g}", ranks=[0])
