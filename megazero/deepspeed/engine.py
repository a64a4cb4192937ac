"""The engine as DeepSpeed's users know it: configured by JSON, with DeepSpeed's data loader and log lines."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from megazero import comm
from megazero.deepspeed.absent import OF_ENGINE
from megazero.deepspeed.checkpoints import CheckpointingEngine
from megazero.deepspeed.schedule import client_scheduler
from megazero.json_config import JsonConfig
from megazero.json_config.zero_section import OffloadOptimizerSection, OffloadParamSection
from megazero.logging import ALIKE, counted, get_logger
from megazero.nested import moved
from megazero.optim.loss_scaler import LossScaler
from megazero.timers import Timers

logger = get_logger(__name__)


class DeepSpeedEngine(CheckpointingEngine):
    """What `megazero.initialize` returns.

    An `Engine`, except that `save_checkpoint` returns True instead of the checkpoint's directory, and `load_checkpoint` the
    directory as a string, or (None, None) instead of an error where there is no checkpoint, as DeepSpeed's do.

    Args:
        config: the resolved configuration.
        of_engine: the first arguments of `Engine`, from the model to the parameter groups' settings.
        lr_scheduler: see `initialize`.
        collate_fn: for the data loaders that `deepspeed_io` makes.
        zero_units: see `Engine`.
    """

    def __init__(
        self,
        config: JsonConfig,
        *of_engine: Any,
        lr_scheduler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        zero_units: Any = None,
    ) -> None:
        super().__init__(
            *of_engine,
            zero=config.zero,
            # Without ZeRO, DeepSpeed goes on at the least scale.
            loss_scaler=LossScaler.from_config(config.precision, raise_error_at_min_scale=config.zero.stage > 0),
            clip_grad=config.gradient_clipping,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            lr_scheduler=lambda optimizer: client_scheduler(config, lr_scheduler, optimizer),
            dtype=config.cast_to,
            zero_units=zero_units,
            allow_untested_optimizer=config.zero_allow_untested_optimizer,
        )
        if self.lr_scheduler is not None and torch.distributed.get_rank() == 0:
            micro = counted(config.gradient_accumulation_steps, "micro-batch")
            logger.info("the schedule counts optimizer steps, of %s each; a skipped one does not count", micro)
        self.config = config
        self.collate_fn = collate_fn
        self.training_dataloader: DataLoader[Any] | None = None
        self.timers = Timers(self.device)
        self._losses: Tensor | float = 0.0  # sum since the last update, on the device; read if a step was skipped

    def __getattr__(self, name: str) -> Any:
        """Falls through to the module. For attributes that only DeepSpeed's engine has, the error says what to do instead."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = f"its module, {type(self.module).__name__}," if "module" in self.__dict__ else "its module"
            instead = f": {OF_ENGINE[name]}" if name in OF_ENGINE else ""
            raise AttributeError(f"neither the engine nor {module} has an attribute {name!r}{instead}.") from error

    # ---- training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; with `fp16.auto_cast`, floating-point inputs are cast to fp16 first."""
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            args, kwargs = moved(args, floating=torch.float16), moved(kwargs, floating=torch.float16)
        is_of_step = torch.is_grad_enabled() and self.optimizer is not None  # whose end reads the time
        with self._timed("forward") if is_of_step else nullcontext():
            return super().__call__(*args, **kwargs)

    forward = __call__

    @torch.enable_grad()  # around the product, too
    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """See `Engine.backward`. `gradient_allreduce_op` "sum" sums gradients over ranks; the returned loss is this rank's."""
        with self._timed("backward"):
            if self.config.gradient_allreduce_op == "mean" or not isinstance(loss, Tensor):  # super() raises if not
                own = super().backward(loss, retain_graph, scale_wrt_gas)
            else:
                ranks = self.groups.data_parallel_size  # the mean of N times the gradients is their sum
                own = super().backward(loss * ranks, retain_graph, scale_wrt_gas) / ranks
            self._losses = self._losses + own.float()
            return own

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """See `Engine.step`. Logs progress every `steps_per_print` updates."""
        at_boundary, before = self.is_gradient_accumulation_boundary(), self.micro_steps
        try:
            with self._timed("step"):
                super().step(lr_kwargs)
        finally:  # even if the loss scale can fall no further, but not of a step that was refused and may come again
            if at_boundary and self.micro_steps > before:
                self._report_loss()
        if at_boundary:
            self.global_samples += self.train_batch_size()
            self._report()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `Engine.zero_grad`."""
        super().zero_grad(set_to_none)
        self._losses = 0.0

    def _timed(self, phase: str) -> AbstractContextManager[None]:
        """Times a phase if its time is logged, because reading the time waits for the device."""
        return self.timers(phase) if self.config.wall_clock_breakdown else nullcontext()

    def _report_loss(self) -> None:
        """Distinguishes a step skipped because the loss was not finite from one whose gradients overflowed."""
        losses, self._losses = self._losses, 0.0
        if self._optimizer.overflow and isinstance(losses, Tensor) and not math.isfinite(losses.item()):
            logger.warning(
                "rank %d: the loss itself was not finite (%g), which no smaller loss scale changes. Look at this step's data, at "
                "what the model computes of it, and whether the learning rate is too high.",
                *(torch.distributed.get_rank(), losses.item()),
            )

    def _report(self) -> None:
        every = self.config.steps_per_print
        phases = self.timers.read_and_reset()  # on every rank, so that the times are those of one step
        if torch.distributed.get_rank() != 0:
            return
        if every and self.global_steps % every == 0:
            logger.info(
                "step %d, skipped %d, lr %s, loss scale %.1f, gradient norm %.4f",
                *(self.global_steps, self.skipped_steps, self.get_lr(), self.loss_scale(), self.get_global_grad_norm()),
            )
        if self.config.wall_clock_breakdown:
            logger.info("time (ms) | %s", " | ".join(f"{name}: {1000 * s:.2f}" for name, s in phases.items()))
        if self.config.memory_breakdown:
            held = " | ".join(f"{name}: {count / 2**20:.2f}" for name, count in self.memory().items())
            logger.info("memory (MiB) | %s", held)

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of this data-parallel rank's micro-batches.

        Args:
            batch_size: by default the micro-batch size.
            route: "train" shuffles, in the same order every epoch unless `loader.sampler.set_epoch(epoch)` is called before it;
                anything else keeps the dataset's order.
            data_sampler: which samples this rank gets; by default every data-parallel rank gets equally many, and some come again
                if the samples do not divide. A warning says so where that would change an evaluation.
        """
        groups, sampler = self.groups, data_sampler
        if sampler is None and not isinstance(dataset, IterableDataset):  # which splits itself
            sampler = DistributedSampler(
                dataset,
                num_replicas=groups.data_parallel_size,
                rank=groups.data_parallel_rank,
                shuffle=route == "train",
            )
            samples = len(dataset)  # type: ignore[arg-type]
            if route != "train" and samples < sampler.total_size:
                logger.warning(
                    "%d samples do not divide by %d data-parallel ranks: %d come again, and count again in a mean over all ranks",
                    *(samples, groups.data_parallel_size, sampler.total_size - samples),
                    extra=ALIKE,
                )
        return DataLoader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
            drop_last=self.config.dataloader_drop_last,
        )

    # ---- batch size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of micro-batches per step.

        Raises:
            ValueError: `train_batch_size` is not a multiple of micro-batch size x data-parallel size.
            EngineStateError: as of `set_gradient_accumulation_steps`.
        """
        micro, ranks = self.train_micro_batch_size_per_gpu(), self.dp_world_size
        one = micro * ranks
        if train_batch_size < one or train_batch_size % one:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): it must be a multiple of micro-batch size {micro} x "
                f"data-parallel size {ranks} = {one}."
            )
        self.set_gradient_accumulation_steps(train_batch_size // one)

    # ---- queries

    def train_batch_size(self) -> int:
        """Samples per optimizer step on all ranks."""
        return self.train_micro_batch_size_per_gpu() * self._accumulation_steps * self.dp_world_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro-batch size, accumulation steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self._accumulation_steps

    @property
    def global_rank(self) -> int:
        """This process's rank in the world."""
        return torch.distributed.get_rank()

    @property
    def local_rank(self) -> int:
        """This process's rank on its node, as the launcher counts them."""
        return comm.get_local_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks in the world."""
        return torch.distributed.get_world_size()

    @property
    def dp_world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.groups.data_parallel_size

    @property
    def data_parallel_group(self) -> comm.ProcessGroup:
        """The ranks that have the same part of the model."""
        return self.groups.data

    @property
    def mp_world_size(self) -> int:
        """Number of model-parallel ranks."""
        return self.groups.model_parallel_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return self.config.train_micro_batch_size_per_gpu

    def get_mom(self) -> list:
        """The momentum, or Adam's betas, of every parameter group."""
        groups = self._optimizer.param_groups
        # A group that Muon leaves to AdamW has a momentum as well, but it has no effect.
        return [group.get("momentum" if group.get("use_muon", "momentum" in group) else "betas") for group in groups]

    def gradient_clipping(self) -> float:
        """The global norm that gradients are clipped to; 0 for no clipping."""
        return self._optimizer.clip_grad

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return self._optimizer.loss_scaler.dynamic

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self.config.bf16.enabled

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.zero.stage

    def zero_offload_optimizer(self) -> OffloadOptimizerSection | None:
        """The section `offload_optimizer` of the configuration; its `device` may be "none"."""
        return self.config.zero_optimization.offload_optimizer

    def zero_offload_param(self) -> OffloadParamSection | None:
        """The section `offload_param` of the configuration; its `device` may be "none"."""
        return self.config.zero_optimization.offload_param

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.sharding.gradients

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.sharding.parameters

    def wall_clock_breakdown(self) -> bool:
        """Whether the times of forward, backward and step are logged."""
        return self.config.wall_clock_breakdown

    def steps_per_print(self) -> int | None:
        """Optimizer steps between log lines; None for no lines."""
        return self.config.steps_per_print
