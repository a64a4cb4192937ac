"""Calls that keep their inputs instead of their activations, and run again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils import _pytree as pytree

from megazero import comm
from megazero.activation_checkpointing.call import Call, refuse_graph
from megazero.activation_checkpointing.options import CheckpointSettings
from megazero.activation_checkpointing.storage import Storage
from megazero.comm import Channel
from megazero.json_source import DeepSpeedConfigError
from megazero.mpu.groups import get_groups, model_group_of, model_parallel_is_initialized
from megazero.timers import Timers


class ActivationCheckpointer:
    """Checkpoints calls in one way, and has all the state that this takes: a model can have one of its own.

    Attributes:
        mpu: whose `get_model_parallel_group()` names the ranks that inputs are cut over; None asks `megazero.mpu`.
        timers: with `profile`, sums the time of "checkpoint forward" and of "checkpoint backward", which has the recomputation
            in it.
        is_configured: whether `configure` has been called for it.
    """

    def __init__(
        self, settings: CheckpointSettings | None = None, *, mpu: Any = None, timers: Timers | None = None
    ) -> None:
        self.mpu, self.timers = mpu, timers
        self.is_configured = False
        self._channel: Channel | None = None
        self.settings = settings or CheckpointSettings()

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationCheckpointer:
        """A checkpointer of the same settings, for a copy of a model: what is kept belongs to the calls of the first one."""
        return memo.setdefault(id(self), ActivationCheckpointer(self.settings, mpu=self.mpu, timers=self.timers))

    @property
    def settings(self) -> CheckpointSettings:
        """How calls are checkpointed. May be set at any time, and holds from the next call on.

        Raises:
            DeepSpeedConfigError: contiguous storage is asked for, and not for how many calls.
        """
        return self._settings

    @settings.setter
    def settings(self, settings: CheckpointSettings) -> None:
        if settings.contiguous_checkpointing and settings.num_checkpoints is None:
            raise DeepSpeedConfigError(
                "contiguous_checkpointing (--contiguous-checkpointing) allocates its storage once and must know for how many "
                "checkpointed calls, and num_checkpoints is not given. Give num_checkpoints (--num-checkpoints; "
                "activation_checkpointing.number_checkpoints): the calls between a forward and its backward."
            )
        self._settings = settings
        self._storage: Storage | None = None

    @property
    def storage(self) -> Storage:
        """Where inputs are kept, with its counter. It is made when first asked for."""
        if self._storage is None:
            self._storage = Storage(self.settings)
        return self._storage

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `megazero.activation_checkpointing.checkpoint`, in this checkpointer's way."""
        return self._checkpoint(self._reentrant, False, function, *args, **kwargs)

    def checkpoint_sharded(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `checkpoint`, of arguments that are parts already, different ones on each model-parallel rank.

        A slice of a sequence, or the heads of one rank: whatever partition_activations says, they are kept as they are.
        """
        return self._checkpoint(self._reentrant, True, function, *args, **kwargs)

    def non_reentrant_checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `megazero.activation_checkpointing.non_reentrant_checkpoint`, in this checkpointer's way."""
        return self._checkpoint(self._non_reentrant, False, function, *args, **kwargs)

    def _checkpoint(
        self, run: Callable[[Call], Any], is_sharded: bool, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """What `run` makes of the call; just the function's result where no backward follows."""
        if not torch.is_grad_enabled():
            refuse_graph(args, kwargs)
            return function(*args, **kwargs)
        call = Call(function, args, kwargs, self.storage, None if is_sharded else self.connect())
        try:
            return run(call)
        except BaseException:
            call.drop()  # the error's traceback may hold on to the call
            raise

    def _reentrant(self, call: Call) -> Any:
        call.refuse_hidden()
        # Inputs may all be without gradient (token ids) while parameters are not: then an anchor makes autograd record the call.
        anchor = None if any(call.needs_grad) else torch.empty(0, requires_grad=True)
        return call.with_outputs(_Checkpoint.apply(self, call, anchor, *call.take_tensors()))

    def _non_reentrant(self, call: Call) -> Any:
        originals = [call.take_tensors()]
        held = [(x.detach(), x._version) for x in call.held(originals[0])]
        errors: list[BaseException] = []

        def run() -> Any:
            if originals:
                try:
                    with self.measured("checkpoint forward"):
                        return call.run(originals.pop())
                except BaseException as error:  # which torch 2.8 would not take down its hooks for
                    errors.append(error)
                    return None
            if any(x._version != version for x, version in held):
                raise RuntimeError(
                    "checkpoint: an argument has been modified by an inplace operation since, so its values are gone."
                )
            with self.measured("checkpoint backward"):
                return call.run_again(call.tensors_again([x for x, _ in held]))

        # Random streams and autocast are the call's own business, as the tracker's streams are none of torch's.
        outputs = torch.utils.checkpoint.checkpoint(run, use_reentrant=False, preserve_rng_state=False)
        if errors:
            raise errors.pop()
        return outputs

    def reset(self) -> None:
        """Gives up the storage of contiguous checkpoints, once what lies in it is gone; the next call takes a new one."""
        if self._storage is not None:
            self._storage.reset()

    def connect(self) -> Channel | None:
        """Connects the ranks that inputs are cut over, None where they are not. Collective in the first call for a group.

        On NCCL over the world (see `comm.Channel`), whose ranks need not come to their first forward at the same time: the engine
        calls it before. The group is looked up in every call: groups may have been made again with another size.
        """
        if not self.settings.partition_activations or (self.mpu is None and not model_parallel_is_initialized()):
            return None
        group = get_groups().model if self.mpu is None else model_group_of(self.mpu)
        if group.size() == 1:
            return None
        if self._channel is None or self._channel.group is not group:
            self._channel = Channel(group)
        return self._channel

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Times what is inside, also if it raises, and waits for the device around it: as far as the settings ask for it."""
        if self.settings.profile and self.timers is None:
            self.timers = Timers(comm.local_device())
        timing = self.timers(name) if self.settings.profile and self.timers else nullcontext()
        self._synchronize()
        timing.__enter__()
        try:
            yield
        finally:
            self._synchronize()
            timing.__exit__(None, None, None)

    def _synchronize(self) -> None:
        if self.settings.synchronize and comm.local_device().type == "cuda":
            torch.cuda.synchronize()


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, checkpointer: ActivationCheckpointer, call: Call, anchor: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...] | None:
        ctx.checkpointer, ctx.call = checkpointer, call
        ctx.set_materialize_grads(False)
        held = call.held(tensors)
        versions = [x._version for x in held]
        ctx.save_for_backward(*held)
        with checkpointer.measured("checkpoint forward"):
            outputs = call.take_outputs(call.run(tensors))
        for x, version in zip(held, versions, strict=True):  # autograd looks at them only from now on
            if x._version != version:
                raise RuntimeError(
                    f"checkpoint: the function has modified an argument of shape {list(x.shape)} by an inplace operation, so it "
                    "would find other values when it runs again. Let it work on a copy (clone())."
                )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "checkpoint: torch.autograd.grad (or backward(inputs=...)) cannot go through a checkpointed function, because "
                "the gradients of its parameters would be lost. Use backward(), non_reentrant_checkpoint, or turn off "
                "--checkpoint-activations."
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "checkpoint: backward(create_graph=True) cannot go through a checkpointed function, because the gradients that "
                "it makes have no graph, and a penalty on them would lose its own. Use non_reentrant_checkpoint, or turn off "
                "--checkpoint-activations."
            )
        call: Call = ctx.call
        with ctx.checkpointer.measured("checkpoint backward"):
            tensors = call.tensors_again(ctx.saved_tensors)
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                call.drop()  # as autograd does with what it saved, unless there is a retain_graph
            if call.before is not None:
                call.before.start()  # travels during what follows
            with torch.enable_grad():
                outputs = [x for x in pytree.tree_leaves(call.run_again(tensors)) if isinstance(x, Tensor)]
            call.refuse_other_outputs(outputs)
            pairs = [(x, g) for x, g in zip(outputs, grads, strict=True) if g is not None and x.requires_grad]
            if pairs:
                # What torch.autograd.backward calls, which would first import sympy: a second of each rank's start.
                engine = torch.autograd.Variable._execution_engine
                engine.run_backward(
                    *zip(*pairs, strict=True), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        return None, None, None, *(x.grad for x in tensors)
