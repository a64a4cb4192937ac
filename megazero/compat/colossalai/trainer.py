"""Colossal-AI's `Trainer`: runs an engine for epochs over data loaders, and calls hooks at fixed points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sized
from typing import Any

import torch
from tqdm import tqdm

from megazero.compat.colossalai.hooks import BaseHook
from megazero.compat.colossalai.launch import Engine
from megazero.compat.colossalai.reports import DistributedLogger


class Trainer:
    """Runs an engine for epochs of training and evaluation.

    Args:
        engine: the engine that `initialize` returned.
        timer: must be None; use `torch.profiler` or the engine's own timers.
        logger: logs when `max_steps` ends the training.

    Attributes:
        states: a dict through which hooks pass values to each other.
        cur_epoch, cur_step: epochs and batches done.
    """

    def __init__(self, engine: Engine, timer: None = None, logger: DistributedLogger | None = None) -> None:
        if timer is not None:
            raise ValueError("Trainer(timer=...) cannot be obeyed: use torch.profiler. Drop it.")
        self.engine = engine
        self.hooks: list[BaseHook] = []
        self.states: dict[str, Any] = {}
        self.cur_epoch = self.cur_step = 0
        self._logger = logger

    def fit(
        self,
        train_dataloader: Iterable,
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Iterable | None = None,
        test_interval: int = 1,
        hooks: list[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Trains until `epochs` epochs, or `max_steps` batches, are done, counted over all calls.

        Args:
            test_dataloader: evaluated after every `test_interval`-th epoch, including the first one.
            display_progress: whether to show a bar on the first rank.
            return_output_label: whether hooks get output and label; otherwise they get None.
        """
        most = math.inf if max_steps is None else max_steps
        self._attach(hooks)
        self._call("before_train")
        for epoch in range(self.cur_epoch, epochs):
            if self.cur_step >= most:
                break
            self.engine.train()
            self._call("before_train_epoch")
            batches = iter(train_dataloader)
            for _ in self._bar(train_dataloader, f"[Epoch {epoch} / Train]", display_progress):
                if self.cur_step >= most:
                    break
                self._call("before_train_iter")
                self.engine.zero_grad()
                result = self.engine.execute_schedule(batches, return_output_label=return_output_label)
                self.engine.step()
                self.cur_step += 1
                self._call("after_train_iter", *result)
            self._call("after_train_epoch")
            if test_dataloader is not None and epoch % test_interval == 0:
                self._test(test_dataloader, display_progress, return_output_label)
            self.cur_epoch += 1
            if self.cur_step >= most and self._logger is not None:
                self._logger.info(f"max_steps {max_steps} is reached, training ends", ranks=[0])
        self._call("after_train")

    def evaluate(
        self,
        test_dataloader: Iterable,
        hooks: list[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Runs the model over the data in evaluation mode; hooks see the outputs and losses."""
        self._attach(hooks)
        self._test(test_dataloader, display_progress, return_output_label)

    def predict(self, data: Any) -> Any:
        """The model's output in evaluation mode, for a tensor, or for a list or dict of the model's arguments."""
        self.engine.eval()
        output, _, _ = self.engine.execute_schedule(iter([(data, None)]), forward_only=True, return_loss=False)
        return output

    def _test(self, dataloader: Iterable, display_progress: bool, return_output_label: bool) -> None:
        self.engine.eval()
        self._call("before_test")
        self._call("before_test_epoch")
        batches = iter(dataloader)
        for _ in self._bar(dataloader, "Evaluation", display_progress):
            self._call("before_test_iter")
            result = self.engine.execute_schedule(batches, forward_only=True, return_output_label=return_output_label)
            self._call("after_test_iter", *result)
        self._call("after_test_epoch")
        self._call("after_test")

    def _attach(self, hooks: list[BaseHook] | None) -> None:
        self.states = {}
        self.hooks = sorted(hooks or [], key=lambda hook: hook.priority)
        self._call("after_hook_is_attached")

    def _call(self, point: str, *result: Any) -> None:
        for hook in self.hooks:
            getattr(hook, point)(self, *result)

    def _bar(self, dataloader: Iterable, what: str, is_shown: bool) -> Iterable[int]:
        if not isinstance(dataloader, Sized):
            raise ValueError(
                "Trainer needs a data loader with a length, so that every rank runs the same number of batches."
            )
        is_shown = is_shown and torch.distributed.get_rank() == 0
        return tqdm(range(len(dataloader)), desc=what, disable=not is_shown)
