"""The engine: trains a module under tensor and ZeRO data parallelism; a facade over buckets, schedule and optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from megazero import activation_checkpointing, comm
from megazero.checkpoint import loader
from megazero.checkpoint.capture import capture
from megazero.checkpoint.folder import Keep
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.saver import Saver
from megazero.checkpoint.tags import check_tag, tag_of
from megazero.checkpoint.training_state import TrainingState
from megazero.mpu.groups import ParallelGroups
from megazero.mpu.parallel_module import ParallelModule
from megazero.mpu.partition import partitions
from megazero.mpu.sequence_mappings import sequence_channel
from megazero.optim.loss_scaler import LossScaler
from megazero.optim.optimizers import OptimizerFactory
from megazero.zero import access
from megazero.zero.build import build_buckets, dissolve, leave
from megazero.zero.config import ZeroConfig
from megazero.zero.gemini_trace import Meter
from megazero.zero.homes import Homes
from megazero.zero.hooks import uncompiled
from megazero.zero.model_watch import ModelWatch
from megazero.zero.optimizer import BucketOptimizer, idle_optimizer
from megazero.zero.param_groups import matrices_of, weight_decay_groups
from megazero.zero.placement import Placement, placed
from megazero.zero.replicas import Replicas
from megazero.zero.schedule import Schedule
from megazero.zero.tiling import tile_places
from megazero.zero.unfit import refuse_other_models, refuse_other_optimizers, refuse_unfit
from megazero.zero.units import plan_buckets, select_units, share_buckets

logger = logging.getLogger(__name__)

__all__ = ["Engine", "EngineStateError", "weight_decay_groups"]


class EngineStateError(RuntimeError, AssertionError):
    """A method was called in a state in which it cannot do its work. An AssertionError too, as DeepSpeed asserts there."""


class Engine:
    """Trains a module under tensor and data parallelism.

    Call `loss = engine(batch)`, `engine.backward(loss)` and `engine.step()` once per micro-batch. Every
    `gradient_accumulation_steps`-th step updates the weights. Gradients are averaged over micro-batches and data-parallel ranks.

    Args:
        model: on its device, equal on all data-parallel ranks; or built under `zero.Init`.
        groups: the tensor- and data-parallel groups.
        optimizer_factory: makes an elementwise torch optimizer, or a `Muon`, from parameter groups. With None, the
            engine only evaluates: every parameter is frozen, there is neither G nor O, and `optimizer` and `lr_scheduler` are
            None.
        group_of, group_settings: the optimizer's parameter groups, as returned by `weight_decay_groups`. A parameter in no
            group is not trained.
        zero: which states are sharded over the data-parallel group.
        loss_scaler: scales the loss, as fp16 needs it.
        clip_grad: the most that the gradients' global norm may be; 0: no clipping.
        lr_scheduler: makes a schedule from the engine's optimizer, whose `torch_optimizer` is what torch's schedules take.
        dtype: dtype to compute in, if it differs from the parameters' own; master weights keep the parameters' current values.
        zero_units: modules, or classes of modules, each to be gathered and released as a unit, instead of those that
            `find_units` finds.
        allow_untested_optimizer: the caller vouches that an optimizer unknown to this library updates each element independently.
        placement_meter: measures the device for `placement="auto"`; by default PyTorch's statistics of the CUDA device.

    Attributes:
        optimizer: the `BucketOptimizer`; None without `optimizer_factory`.
        saver: `saver.claim(directory)` makes a directory this job's, before hours are spent on what could not be saved there.

    Raises:
        TypeError: an argument is of another type, such as the name of a dtype.
        OtherRankError: another rank has raised one of these errors, or one of its factories has failed.
        ValueError: data-parallel ranks have different models, start with different weights or would get different ones
            (`nn.Embedding(max_norm=)`), nothing is trainable, the optimizer is not elementwise or not the same on every rank,
            `group_of` does not fit the model and `group_settings`, `clip_grad` is negative, or the groups do not make up the
            world; or a parameter that is not declared as cut is missing on a tensor-parallel rank, or has another shape there.
    """

    optimizer: Any

    def __init__(
        self,
        model: nn.Module,
        groups: ParallelGroups,
        optimizer_factory: OptimizerFactory | None,
        group_of: dict[str, int],
        group_settings: list[dict[str, Any]],
        *,
        zero: ZeroConfig | None = None,
        loss_scaler: LossScaler | None = None,
        clip_grad: float = 0.0,
        gradient_accumulation_steps: int = 1,
        lr_scheduler: Callable[[BucketOptimizer], Any] | None = None,
        dtype: torch.dtype | None = None,
        zero_units: Sequence[nn.Module | type[nn.Module]] | None = None,
        allow_untested_optimizer: bool = False,
        placement_meter: Meter | None = None,
    ) -> None:
        self.placement: Placement | None = None
        self.module, self.groups = model, groups

        def prepare() -> tuple[Meter | None, int, list[nn.Module]]:
            """The meter, how many shards, and the units, if nothing in this rank's arguments cannot be trained."""
            _check_kinds(
                model=(model, nn.Module),
                groups=(groups, ParallelGroups),
                optimizer_factory=(optimizer_factory, Callable | None),
                group_of=(group_of, Mapping),
                group_settings=(group_settings, Sequence),
                zero=(zero, ZeroConfig | None),
                loss_scaler=(loss_scaler, LossScaler | None),
                clip_grad=(clip_grad, Real),
                lr_scheduler=(lr_scheduler, Callable | None),
                dtype=(dtype, torch.dtype | None),
            )
            if not clip_grad >= 0:
                raise ValueError(f"clip_grad must be a norm, or 0 for none, got {clip_grad}.")
            self._accumulation_steps = _micro_batches(gradient_accumulation_steps)
            self.zero, meter = placed(zero or ZeroConfig(), placement_meter)
            units = select_units(model, zero_units)
            refuse_unfit(model, units, groups, group_of, len(group_settings), self.zero)
            return meter, self.zero.num_shards(groups.data_parallel_size), units

        if optimizer_factory is None:
            group_of, group_settings, lr_scheduler = {}, [], None  # so that every parameter is frozen
        meter, num_shards, units = comm.together(prepare)
        self.sharding = self.zero.sharding
        refuse_other_models(model.named_parameters(), group_of, groups.data, units)
        cuts = partitions(model)
        plans = plan_buckets(
            model,
            units,
            num_shards,
            group_of,
            self.zero,
            dtype,
            replicated=set(group_of) - set(cuts),
            matrices=matrices_of(group_of, group_settings),
        )
        plans = share_buckets(plans, self.zero.shared_numel(groups.data_parallel_size))
        if not plans or (optimizer_factory is not None and not any(plan.is_trainable for plan in plans)):
            raise ValueError("the model has no trainable parameter: set requires_grad on what is to be trained.")
        self._replicas = Replicas(model, groups)
        self.channel = comm.Channel(groups.data, shard_size=num_shards)
        _connect(model)
        self.homes = Homes.of(self.zero, plans)
        self.buckets = build_buckets(plans, self.channel, self.zero, self.homes)

        def make_optimizer() -> tuple[BucketOptimizer, Any]:
            optimizer = BucketOptimizer(
                self.buckets,
                optimizer_factory or idle_optimizer,
                group_settings,
                groups,
                cuts,
                loss_scaler=loss_scaler or LossScaler(),
                clip_grad=clip_grad,
                zero=self.zero,
                allow_untested=allow_untested_optimizer,
            )
            return optimizer, lr_scheduler(optimizer) if lr_scheduler else None

        try:
            self._optimizer, lr_schedule = comm.together(make_optimizer)
            refuse_other_optimizers(self._optimizer.torch_optimizer)
        except BaseException:  # from the caller's optimizer or schedule
            leave(self.buckets)
            raise
        self.optimizer = None if optimizer_factory is None else self._optimizer
        self._optimizer.refuse_other_uses()
        for bucket in self.buckets:
            bucket.optimizer = self._optimizer
        self.schedule = Schedule(model, units, self.buckets, self.zero)
        if meter is not None and (host := self.homes.optimizer) is not None:
            self.placement = Placement(self.schedule, self._optimizer, self.zero, meter, host, self._accumulation_steps)
        self._training_state = TrainingState(
            model, groups, cuts, tile_places(model), self.buckets, self._optimizer, lr_schedule, self.zero.stage
        )
        self.saver = Saver()
        self._watch = ModelWatch(self.buckets)
        self._boundary: bool | None = None  # as given to set_gradient_accumulation_boundary
        self._syncs = True
        self._micro_steps = 0
        self._since_update = 0  # micro-batches
        self._last_backward = -1  # the micro-batch of which it was
        self._has_told_of_gap = False
        self._is_applied = False
        self._grad_norm = 0.0
        self._is_destroyed = False

    # ---- forward, backward, step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if torch.is_grad_enabled():
            self._follow_requires_grad()
        try:
            return self.module(*args, **kwargs)
        except BaseException:  # torch runs no hook of modules that Ctrl-C leaves
            self.schedule.forwards.clear()
            raise

    forward = __call__

    @uncompiled
    def _follow_requires_grad(self) -> None:
        """Starts training parameters that the user has unfrozen since the last call, and stops training newly frozen ones."""
        if not self._watch.has_other_trained():
            return
        self._optimizer.finish()
        for bucket in self.buckets:
            if bucket.trained_segments:
                bucket.make_trainable()
                self.schedule.watch_gradients(bucket)
        self._optimizer.refresh()
        self.schedule.restart()

    @torch.enable_grad()  # as loss.backward(), it may be called inside of no_grad
    @uncompiled
    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Accumulates the gradient of `loss / gradient_accumulation_steps`; reduces it at the last micro-batch.

        Args:
            loss: scalar, the mean over this rank's micro-batch.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: divide by the number of accumulation steps; if False, the caller has done so.

        Returns:
            The loss whose gradient was accumulated: divided by the number of accumulation steps if `scale_wrt_gas`.

        Raises:
            AssertionError: the loss is not a scalar, or does not depend on any parameter; or there is no optimizer.
            EngineStateError: an earlier call has failed, and its gradients have not been discarded by `zero_grad`.
        """
        self._refuse_without_optimizer("engine.backward()")
        self._refuse_partial_gradients("engine.backward()")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise AssertionError(
                f"engine.backward needs a scalar loss that depends on the parameters, got {_described(loss)}. Take the loss out "
                "of what the model returns, average a per-token loss first, and call the engine outside no_grad. A checkpoint "
                "with use_reentrant=True gives gradients only if an input of it requires them, which one behind frozen layers "
                "does not: pass use_reentrant=False."
            )
        self._follow_requires_grad()  # again: the script may have called a part of the module without the engine
        if scale_wrt_gas:
            loss = loss / self._accumulation_steps
        is_last_micro_batch = self.is_gradient_accumulation_boundary() and self._syncs
        self._optimizer.has_partial_gradients = True  # until this succeeds
        with self.schedule.backward(is_last_micro_batch):
            (loss * self._optimizer.cur_scale).backward(retain_graph=retain_graph)
        self.schedule.finish_backward()
        self._optimizer.has_gradients, self._optimizer.has_partial_gradients = True, False
        self._last_backward = self._micro_steps
        return loss.detach()

    @uncompiled
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Counts the micro-batch; at the last one, updates weights and learning rate unless a gradient has overflowed.

        Args:
            lr_kwargs: arguments for the schedule's `step` at an update, such as `{"metrics": loss}` for torch's
                ReduceLROnPlateau. They must be the same on every rank; otherwise ranks train with different rates.

        Raises:
            TypeError: `lr_kwargs` is no dict, or the schedule's `step` does not take it; nothing has been updated.
            ValueError: tensor-parallel ranks have different gradients of a parameter that each of them holds whole, in the first
                update with one that is no rounding error; nothing has been updated.
            EngineStateError: at the last micro-batch, no backward preceded it, or the model's parameters are not those that the
                engine was made for; at any, a backward has failed, it is called inside `no_sync`, or there is no optimizer.
            RuntimeError: the optimizer's parameters are not those that it was made for; or, in the first update over NCCL,
                ranks have run different units, or the same ones in different orders.
        """
        self._refuse_without_optimizer("engine.step()")
        self._is_applied = False
        self._refuse_partial_gradients("engine.step()")
        if not self._syncs:
            raise EngineStateError(
                "engine.step() was called inside of no_sync(), where gradients are not reduced. Leave it first."
            )
        if not self.is_gradient_accumulation_boundary():
            self._micro_steps += 1
            self._since_update += 1
            return
        lr_kwargs = lr_kwargs or {}
        self._refuse_unready(lr_kwargs)
        if self._boundary is None and self._last_backward != self._micro_steps and not self._has_told_of_gap:
            self._has_told_of_gap = True
            logger.warning(
                "rank %d: engine.step() updates without a backward of the step's last micro-batch, so by fewer than the "
                "%d micro-batches of a step. Call step() once for each backward. Later steps are not checked.",
                *(torch.distributed.get_rank(), self._accumulation_steps),
            )
        self.allreduce_gradients()  # no_sync may have been left, or the boundary set, after the last backward
        self.channel.compare_first()  # before the first wait for the device, which might never return
        self._replicas.compare()
        self._micro_steps += 1
        self._since_update = 0
        self._optimizer.finish()
        self._optimizer.refuse_torn()
        for bucket in self.buckets:
            bucket.adopt_written()
        self.empty_partition_cache()  # also of frozen units, which an update does not outdate
        delayed = 0 < self.zero.delayed_param_update <= self.global_steps
        self._grad_norm = self.schedule.waiting.until(partial(self._optimizer.update, delayed), "engine.step()")
        if self.placement is not None:
            self.placement.follow()
        self._count_step(is_skipped=self._optimizer.overflow)
        if self._optimizer.overflow:
            return
        self._is_applied = True
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)

    @uncompiled
    def grad_norms(self) -> dict[str, float]:
        """The 2-norm of each trained parameter's gradient, by name, before `step` applies them. Collective over the world.

        Unscaled, before clipping, and of whole parameters where ranks hold parts. The squares add up to that of the step's
        `get_global_grad_norm()`. One collective and one wait for the device, without gathering any gradient.

        Raises:
            EngineStateError: it is not called between the last micro-batch's `backward` and `step`, or there is no optimizer.
            RuntimeError: as in `step`.
        """
        self._refuse_without_optimizer("engine.grad_norms()")
        self._refuse_partial_gradients("engine.grad_norms()")
        is_whole = self._optimizer.has_gradients and self._last_backward == self._micro_steps
        if not (is_whole and self._syncs and self.is_gradient_accumulation_boundary()):
            raise EngineStateError(
                "engine.grad_norms(): the gradients of a step are not there. Call it on every rank between engine.backward(loss) "
                "of the step's last micro-batch and engine.step(), outside of no_sync()."
            )
        self.allreduce_gradients()
        self.channel.compare_first()
        return self.schedule.waiting.until(self._optimizer.grad_norms, "engine.grad_norms()")

    def skip_step(self) -> None:
        """Counts an optimizer step that is left out: the weights and moments stay, and the schedule moves on. On every rank.

        Gradients accumulated since the last update are discarded. A delayed update of the step before arrives.
        """
        self._refuse_without_optimizer("engine.skip_step()")
        self._optimizer.finish()
        self.zero_grad()
        self.empty_partition_cache()  # which a graph made by a backward may have kept
        self._since_update, self._is_applied = 0, False
        self._count_step(is_skipped=True)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def _count_step(self, is_skipped: bool) -> None:
        self._training_state.global_steps += 1
        self._training_state.skipped_steps += is_skipped
        self.schedule.waiting.steps_done = self.global_steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards the gradients accumulated since the last update; `step` does so by itself. `set_to_none` has no effect."""
        self._optimizer.zero_grad()

    def _refuse_destroyed(self, what: str) -> None:
        if self._is_destroyed:
            raise EngineStateError(
                f"{what}: this engine was destroyed, and holds nothing. Call it before engine.destroy(), or initialize again."
            )

    def _refuse_without_optimizer(self, what: str) -> None:
        self._refuse_destroyed(what)
        if self.optimizer is None:
            raise EngineStateError(
                f"{what} needs an optimizer, and this engine was made without one, for evaluation. To train, give optimizer= to "
                'initialize, or an "optimizer" section in its configuration.'
            )

    def _refuse_partial_gradients(self, what: str) -> None:
        if self._optimizer.has_partial_gradients:
            raise EngineStateError(
                f"{what}: there are no gradients to apply or to add to, only what a failed engine.backward(loss) has left of "
                "them. Call engine.zero_grad() on every rank first, which discards it."
            )

    def _refuse_changed_model(self, what: str, may_have_frozen: bool = False) -> None:
        """Raises if the model's parameters are not those that the engine holds, trains and saves, or it holds none any more.

        Args:
            may_have_frozen: accept frozen parameters that were added to the model; they are a problem only when it is saved.
        """
        self._refuse_destroyed(what)
        if changes := self._watch.came_and_left(self.module, may_have_frozen):
            raise EngineStateError(
                f"{what}: {changes} since the engine was made, which trains and saves those of that time. Add, replace and tie "
                "parameters before initialize; or call engine.destroy() on every rank first, and initialize again."
            )

    def _refuse_unready(self, lr_kwargs: dict[str, Any]) -> None:
        """Raises if an update could not do what it should, before the update changes anything."""
        self._refuse_changed_model("engine.step()", may_have_frozen=True)
        self._optimizer.refuse_other_parameters()
        self._refuse_lr_kwargs(lr_kwargs)
        for bucket in self.buckets:
            bucket.refuse_if_held("engine.step()")
            bucket.refuse_untaken_gradients()
        if not self._optimizer.has_gradients:
            raise EngineStateError(
                "engine.step() has no gradients to apply: call engine.backward(loss) before every step()."
            )

    def _refuse_lr_kwargs(self, lr_kwargs: dict[str, Any]) -> None:
        """Raises if the schedule does not take these arguments, before the weights are updated."""
        if not isinstance(lr_kwargs, Mapping):
            raise TypeError(
                f"engine.step({lr_kwargs!r}): it takes lr_kwargs, a dict of arguments for the schedule's step, and calls no "
                "closure. Call engine.backward(loss) first, and engine.step() without an argument."
            )
        if self.lr_scheduler is None:
            return
        try:
            signature(self.lr_scheduler.step).bind(**lr_kwargs)
        except TypeError as error:
            raise TypeError(
                f"engine.step(lr_kwargs={lr_kwargs}): {error}, for {type(self.lr_scheduler).__name__}.step. Give what it takes, "
                'as engine.step(lr_kwargs={"metrics": loss}), the same on every rank; or keep the schedule out of initialize, '
                "and step it yourself."
            ) from None

    # ---- when an update is due

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._accumulation_steps

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Changes the number of micro-batches per optimizer step; call it between two steps.

        Raises:
            EngineStateError: there are gradients of a step's first micro-batches, each of which counts by the old number.
        """
        steps = _micro_batches(steps)
        if steps != self._accumulation_steps and self._optimizer.has_gradients:
            raise EngineStateError(
                f"gradient_accumulation_steps {steps} in the middle of a step, of which each micro-batch so far counts "
                f"1/{self._accumulation_steps}. Set it between two steps; or let the next micro-batch be this step's last by "
                "set_gradient_accumulation_boundary(True)."
            )
        self._accumulation_steps = steps
        if self.placement is not None:
            self.placement.expect(steps)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before an update."""
        if self._boundary is not None:
            return self._boundary
        return self._since_update + 1 >= self._accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Declares whether micro-batches from now on are the last before an update, instead of counting them.

        If it is called before a micro-batch's backward, gradients are reduced during that backward; if after, by `step`.
        """
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block, each rank's backward only accumulates. The next backward outside, or `step`, reduces everything.

        Raises:
            EngineStateError: gradients are sharded (stages 2 and 3), so every backward has to reduce them.
        """
        if self.sharding.gradients:
            raise EngineStateError(
                f"no_sync() cannot be used with ZeRO stage {self.zero.stage}: no rank has room for the gradients of another's "
                "shard. Use stage 0 or 1, or gradient_accumulation_steps."
            )
        outside, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = outside

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduces what `no_sync` has accumulated; `backward` and `step` do so by themselves. `bucket_size` has no effect."""
        self.schedule.reduce_rest()

    # ---- what has been done

    @property
    def micro_steps(self) -> int:
        """Micro-batches done. Setting it, for example to 0 at the start of an epoch, determines when the next update is due."""
        return self._micro_steps

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        self._micro_steps = count
        self._since_update = count % self._accumulation_steps

    @property
    def global_steps(self) -> int:
        """Optimizer steps done, skipped ones included."""
        return self._training_state.global_steps

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped because gradients were not finite, and those that `skip_step` left out."""
        return self._training_state.skipped_steps

    @property
    def lr_scheduler(self) -> Any | None:
        """The schedule that every update advances and checkpoints save; None if there is none. It may be set."""
        return self._training_state.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any | None) -> None:
        self._training_state.lr_scheduler = schedule

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights: it did not between boundaries, nor if a gradient overflowed."""
        return self._is_applied

    def get_global_grad_norm(self) -> float:
        """The global gradient norm of the last update, before clipping; inf or NaN for a skipped one."""
        return self._grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group; 0 for one without, as in DeepSpeed."""
        return [group.get("lr", 0.0) for group in self._optimizer.param_groups]

    def loss_scale(self) -> float:
        """The current loss scale."""
        return self._optimizer.cur_scale

    # ---- the module

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.buckets[0].device

    def train(self, mode: bool = True) -> Engine:
        """Sets the module's training mode. Switching to evaluation first completes an update that goes on: all ranks do it."""
        if not mode:
            self._optimizer.finish()
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Sets the module's evaluation mode."""
        return self.train(False)

    def to(self, *args: Any, **kwargs: Any) -> Engine:
        """The module's `to`, for what is so anyway: the engine has put the parameters where they are."""
        self.module.to(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        """Falls through to the module, so that the engine stands in for it."""
        if name == "module":  # not set yet, because __init__ failed earlier
            raise AttributeError(name)
        return getattr(self.module, name)

    def __reduce__(self) -> NoReturn:
        """Refuses `copy.copy`, `copy.deepcopy` and pickle, which all call it.

        Raises:
            TypeError: always.
        """
        gathered = " inside of megazero.zero.GatheredParameters(list(engine.module.parameters()))"
        raise TypeError(
            "An engine cannot be copied or pickled: it is bound to its process's groups, hooks and shards. Copy engine.module"
            f"{gathered if self.sharding.parameters else ''}, which gives a plain module; or engine.save_checkpoint(directory)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuses as `__reduce__` does; otherwise the module's own `__deepcopy__`, if any, would answer for the engine."""
        self.__reduce__()

    # ---- full values

    def module_state_dict(self, *, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The module's state dictionary with full values on the CPU, whatever is sharded.

        Collective at stage 3, and with `delayed_param_update`.

        Args:
            exclude_frozen_parameters: leave out what is not trained now, such as all but adapters.
        """
        self._refuse_changed_model("module_state_dict()")
        self._meet_to_gather("module_state_dict")
        self._optimizer.finish()
        return access.state_dict(self.module, self.buckets, exclude_frozen_parameters)

    state_dict = module_state_dict  # otherwise the module's own would answer, with placeholders

    def _meet_to_gather(self, what: str) -> None:
        """Meets the other ranks if whole parameters may need them: each has a part, or an update whose values it has not sent."""
        if self.sharding.parameters or self.zero.delays_update:
            self.channel.meet(what)

    # ---- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        save_optimizer: bool = True,
        save_rng: bool = True,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        keep_last: int = 0,
        keep_every: int = 0,
        in_background: bool = False,
    ) -> Path:
        """Writes weights, optimizer, counters, schedule, loss scale and generator states. Collective over the world.

        Gradients accumulated since the last update are not saved. An engine without an optimizer saves the weights but no
        optimizer states; an engine with an optimizer can load them.

        Args:
            tag: name of the checkpoint (default: global_step{N}).
            client_state: what `load_checkpoint` will return; the first rank's is saved. Plain containers, numbers, strings,
                tensors and numpy arrays.
            save_latest: whether the file `latest` names this checkpoint afterwards.
            exclude_frozen_parameters: leave out what is not trained now, also if it has been.
            keep_last: afterwards, delete all but this many of the newest checkpoints with tags like global_step20; 0 keeps all.
            keep_every: of these, those whose steps are multiples of this stay as well.
            in_background: return once everything is copied to host memory; `wait_for_checkpoint` and the next save wait until it
                is written.

        Returns:
            The checkpoint's directory.

        Raises:
            TypeError: the client state holds something else; the message says where.
            OSError: a file could not be written, on whichever rank. The previous checkpoint stays the latest.
            DirectoryInUseError: another job saves there.
            ValueError: `tag` cannot name a directory; `keep_last` or `keep_every` is negative, or no integer; or
                `exclude_frozen_parameters` is given without an optimizer: nothing is trained, and nothing would be saved.
        """
        if exclude_frozen_parameters and self.optimizer is None:
            raise ValueError(
                "save_checkpoint(exclude_frozen_parameters=True): this engine was made without an optimizer, so every parameter "
                "is frozen, and none would be saved. Drop it."
            )
        if tag is not None:
            check_tag(tag)
        keep = Keep(_integer("save_checkpoint's keep_last", keep_last), _integer("its keep_every", keep_every))
        if min(keep) < 0:
            raise ValueError(
                f"save_checkpoint(keep_last={keep.last}, keep_every={keep.every}): say how many to keep, where 0 keeps all, and "
                "after how many steps each to keep one for good, where 0 keeps none."
            )
        self._refuse_changed_model("save_checkpoint()")
        comm.meet_world("save_checkpoint", self.channel.timeout_s)
        self._optimizer.finish()
        snapshot, index = capture(
            self._training_state,
            client_state or {},
            save_optimizer=save_optimizer and self.optimizer is not None,
            save_rng=save_rng,
            exclude_frozen=exclude_frozen_parameters,
        )
        tag = tag_of(self.global_steps) if tag is None else tag
        return self.saver.save(
            snapshot, index, save_dir, tag, save_latest=save_latest, keep=keep, in_background=in_background
        )

    def wait_for_checkpoint(self) -> None:
        """Waits until no save is running in the background.

        Raises:
            OSError: the background save failed.
            RuntimeError: a rank was lost in it.
        """
        self.saver.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        *,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_rng: bool = True,
        load_module_only: bool = False,
        strict: bool = True,
        fallback: bool = False,
        prepare: Callable[[Reader], None] | None = None,
    ) -> tuple[Path, dict[str, Any]]:
        """Continues from a checkpoint of any model-parallel size, data-parallel size and stage. Collective over the world.

        Args:
            tag: which checkpoint (default: the one that `latest` names).
            load_optimizer_states: otherwise the optimizer starts with empty moments, as where the checkpoint has none.
            load_module_only: read only the weights; always the case without an optimizer.
            strict: the checkpoint must hold every parameter of the model, and no others. Otherwise what it has not keeps its
                values, and a warning names what is only in one of them.
            fallback: if the checkpoint is damaged, or files of it are missing, take the newest older one that is whole.
            prepare: called on every rank before anything is read; an error on one rank ends the load on all of them.

        Returns:
            The checkpoint's directory and the client state it was saved with.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            CheckpointError: it is damaged; the message names the file and the parameter. If a part had been read by then, another
                must be loaded before the engine trains or saves.
            OSError: a file of it cannot be read now. With `fallback` too, as it may be whole.
            ValueError: it belongs to another model, or holds another optimizer's state.
        """
        load_module_only = load_module_only or self.optimizer is None
        self._refuse_changed_model("load_checkpoint()")
        comm.meet_world("load_checkpoint", self.channel.timeout_s)
        self._optimizer.finish()
        self._follow_requires_grad()  # so that parameters unfrozen since then get their moments back
        self.saver.wait()
        was_torn = self._optimizer.is_torn
        path, client = loader.load(
            self._training_state,
            load_dir,
            tag,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_rng=load_rng,
            load_module_only=load_module_only,
            strict=strict,
            fallback=fallback,
            prepare=prepare,
        )
        self.zero_grad()  # from before the load
        self._since_update = 0
        # Its moments are still those of the failure, if it has any.
        self._optimizer.is_torn = was_torn and load_module_only and self.optimizer is not None
        if not load_module_only:
            self.micro_steps, self._boundary = 0, None
            self.schedule.waiting.steps_done = self.global_steps
        return path, client

    # ---- memory, and the end

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds now: parameters (P), gradients (G), optimizer (O: master weights, moments), and buffers.

        Buffers are the whole copies of sharded parameters and gradients, and whatever is being reduced. G exists from backward to
        the update. Offloaded is the part of P, G and O that does not rest on the device, and staging the host memory that it
        passes through.
        """
        total = {"P": 0, "G": 0, "O": 0, "buffers": 0, "offloaded": 0, "staging": self.homes.nbytes}
        for bucket in self.buckets:
            for key, value in bucket.nbytes.items():
                total[key] += value
        states = list(self._optimizer.state.values())  # to which an update in the background may add
        total["O"] += sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor) and v.ndim == 0)
        return total

    def empty_partition_cache(self) -> None:
        """Frees all gathered copies of sharded parameters. Call it on every rank; otherwise the ranks' next gathers differ."""
        for bucket in self.buckets:
            bucket.weights.let_go()

    def destroy(self) -> None:
        """Gives the module whole parameters of its own again, and removes every hook. Collective where `module_state_dict` is.

        The torch optimizer has these parameters afterwards, and no state; the engine trains, saves and loads nothing any more. A
        second call does nothing: the module may have another engine by then.

        Without it, at stage 3 and with `overlap_param_gather`, all that the engine holds lives as long as the module, which needs
        a part of it for its parameters.

        Waits for a background save.
        """
        if self._is_destroyed:
            return
        try:
            self.saver.close()
        finally:
            self._dissolve()

    def _dissolve(self) -> None:
        self._meet_to_gather("destroy")
        self._is_destroyed = True
        try:
            self._optimizer.finish()
        finally:  # even if an update has failed
            self._optimizer.let_go()
            self.schedule.close()
            if self.placement is not None:
                self.placement.close()
                self.placement = None
            dissolve(self.buckets)
            self.homes.close()
            self.channel.close()


def _integer(name: str, value: Any) -> int:
    """The value as Python's int: a checkpoint's counters follow from it, and JSON takes none of numpy's."""
    if not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, got {value!r}.")
    return int(value)


def _micro_batches(steps: Any) -> int:
    """The number of micro-batches per optimizer step, if it is one."""
    steps = _integer("gradient_accumulation_steps", steps)
    if steps < 1:
        raise ValueError(f"gradient_accumulation_steps must be at least 1, got {steps}.")
    return steps


def _described(loss: Any) -> str:
    """A description of what was given as a loss, for an error message."""
    if not isinstance(loss, Tensor):
        return type(loss).__name__
    return f"shape {tuple(loss.shape)} {'without' if loss.grad_fn is None else 'with'} a grad_fn"


def _connect(model: nn.Module) -> None:
    """Opens the channels that the model's first forward would open.

    On NCCL this is a collective over the world, whose ranks are all here at this point.
    """
    activation_checkpointing.default.connect()
    for module in model.modules():
        if isinstance(module, ParallelModule) and module.sequence_parallel and module.group.size() > 1:
            sequence_channel(module.group)
        own = getattr(module, "checkpointer", None)
        if isinstance(own, activation_checkpointing.ActivationCheckpointer):
            own.connect()  # does nothing the second time


def _check_kinds(**given: tuple[Any, Any]) -> None:
    """Raises if an argument of `Engine`, given with its type, is of another type."""
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            raise TypeError(f"Engine's {name} must be {getattr(kind, '__name__', kind)}, got {value!r}.")
