"""The engine: a DeepSpeed-shaped facade over buckets, schedule and optimizer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.checkpoint import store
from megazero.checkpoint.rng import rng_states, set_rng_states
from megazero.mpu.groups import ParallelGroups
from megazero.mpu.partition import partitions
from megazero.optim.adam import OptimizerFactory
from megazero.optim.loss_scaler import LossScaler
from megazero.zero.bucket import Bucket
from megazero.zero.layout import Segment
from megazero.zero.optimizer import BucketOptimizer
from megazero.zero.schedule import Schedule, build_buckets

logger = logging.getLogger(__name__)

MASTER = "master"  # the fp32 weights' name among the optimizer's states
CONSTANT = "constant"  # frozen parameters and buffers, which have no optimizer state


def weight_decay_groups(model: nn.Module, weight_decay: float) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Megatron's two parameter groups: matrices and embeddings decay, biases and normalisation weights do not.

    Returns:
        The group index of each trainable parameter by name, and the settings of the groups.
    """
    group_of = {name: int(p.ndim < 2) for name, p in model.named_parameters() if p.requires_grad}
    return group_of, [{"weight_decay": weight_decay}, {"weight_decay": 0.0}]


class Engine:
    """Trains a module under tensor and data parallelism.

    Use: `loss = engine(batch)`, `engine.backward(loss)`, `engine.step()`, once per micro-batch; the step updates the weights
    at every `gradient_accumulation_steps`-th call. Gradients are averaged over micro-batches and data-parallel ranks.

    Args:
        model: on its device and in its compute dtype, equal on all data-parallel ranks.
        groups: the tensor- and data-parallel groups.
        optimizer_factory: makes an elementwise torch optimizer from parameter groups.
        group_of, group_settings: the optimizer's parameter groups, as `weight_decay_groups` gives them.

    Raises:
        ValueError: data-parallel ranks start with different weights, nothing is trainable, two units share a parameter, or
            the optimizer is not elementwise.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: ParallelGroups,
        optimizer_factory: OptimizerFactory,
        group_of: dict[str, int],
        group_settings: list[dict[str, Any]],
        *,
        loss_scaler: LossScaler | None = None,
        clip_grad: float = 0.0,
        gradient_accumulation_steps: int = 1,
        lr_scheduler: Callable[[BucketOptimizer], Any] | None = None,
    ) -> None:
        self.module = model
        self.groups = groups
        self.partitions = partitions(model)
        replicated = set(group_of) - set(self.partitions)
        self.buckets = build_buckets(model, groups.data, group_of, replicated)
        self._check_replicas()
        self.schedule = Schedule(self.buckets)
        self.optimizer = BucketOptimizer(
            self.buckets, optimizer_factory, group_settings, groups.model, loss_scaler or LossScaler(), clip_grad
        )
        self.lr_scheduler = lr_scheduler(self.optimizer) if lr_scheduler else None
        self._accumulation_steps = gradient_accumulation_steps
        self.micro_steps = 0
        self.global_steps = 0
        self.skipped_steps = 0
        self.exposed_reduce_s = 0.0  # seconds spent waiting for reductions that backward did not hide
        self._grad_norm = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Falls through to the module, so that the engine stands in for it."""
        if name == "module":  # not set yet: __init__ has failed before
            raise AttributeError(name)
        return getattr(self.module, name)

    def train(self, mode: bool = True) -> Engine:
        """Sets the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Sets the module's evaluation mode."""
        return self.train(False)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._accumulation_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch in hand is the last one before an update."""
        return (self.micro_steps + 1) % self._accumulation_steps == 0

    def backward(self, loss: Tensor) -> Tensor:
        """Accumulates the gradient of `loss / gradient_accumulation_steps`; reduces it at the last micro-batch.

        Args:
            loss: scalar, the mean over this rank's micro-batch.

        Returns:
            The loss divided by the number of accumulation steps.

        Raises:
            ValueError: the loss is not a scalar, or does not depend on any parameter.
        """
        if loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"engine.backward needs a scalar loss that depends on the parameters, got shape {tuple(loss.shape)} and "
                f"requires_grad={loss.requires_grad}. Average the per-token loss first, and call the engine outside no_grad."
            )
        loss = loss / self._accumulation_steps
        self.schedule.restart()
        self.schedule.is_last_micro_batch = self.is_gradient_accumulation_boundary()
        (loss * self.optimizer.cur_scale).backward()
        start = time.perf_counter()
        self.schedule.finish_backward()
        self.exposed_reduce_s += time.perf_counter() - start
        return loss.detach()

    def step(self) -> None:
        """Counts the micro-batch; at the last one updates weights and learning rate, unless a gradient has overflowed.

        Raises:
            RuntimeError: there was no backward before it.
        """
        at_boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not at_boundary:
            return
        if not all(bucket.is_reduced for bucket in self.buckets):
            raise RuntimeError(
                "engine.step() has no gradients to apply: call engine.backward(loss) before every step()."
            )
        self._grad_norm = self.optimizer.step()
        self.global_steps += 1
        if self.optimizer.overflow:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def zero_grad(self) -> None:
        """Forgets the gradients accumulated since the last update; `step` does so by itself."""
        for bucket in self.buckets:
            bucket.zero_grad()

    def was_step_applied(self) -> bool:
        """Whether the last update changed the weights."""
        return self.global_steps > 0 and not self.optimizer.overflow

    def get_global_grad_norm(self) -> float:
        """The global gradient norm of the last update, before clipping; inf or NaN for a skipped one."""
        return self._grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def loss_scale(self) -> float:
        """The current loss scale."""
        return self.optimizer.cur_scale

    def segments(self) -> list[tuple[Bucket, Segment]]:
        """Every trainable parameter's place, in storage order."""
        return [(bucket, segment) for bucket in self.buckets for segment in bucket.layout.segments]

    def full_grad(self, name: str) -> Tensor:
        """The mean gradient of one parameter on this tensor-parallel rank, fp32, valid between backward and step.

        Scaled by the loss scale.

        Raises:
            KeyError: no trainable parameter has this name.
        """
        for bucket, segment in self.segments():
            if segment.name == name:
                return Bucket.view(bucket.grad, segment).clone()
        raise KeyError(f"no trainable parameter is called {name!r}")

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        save_optimizer: bool = True,
        save_rng: bool = True,
        keep_last: int = 0,
    ) -> Path:
        """Writes weights, optimizer, counters, schedule, loss scale and generator states. Collective over the world.

        Args:
            tag: name of the checkpoint (default: global_step{N}).
            client_state: plain JSON data that `load_checkpoint` gives back, equal on every rank.

        Returns:
            The checkpoint's directory.
        """
        tensors = {}
        for bucket, segment in self.segments():
            for key, value in self.optimizer.state_of(bucket, segment).items():
                if key == MASTER or save_optimizer:
                    tensors[f"{key}/{segment.name}"] = value
        tensors.update({f"{CONSTANT}/{name}": value for name, value in self._constants().items()})
        index = {
            "global_steps": self.global_steps,
            "skipped_steps": self.skipped_steps,
            "model_parallel_size": self.groups.model_parallel_size,
            "world_size": torch.distributed.get_world_size(),
            "device": comm.local_device().type,
            "shapes": self._full_shapes(),
            "partitions": {name: asdict(cut) for name, cut in self.partitions.items()},
            "optimizer": self.optimizer.counters() if save_optimizer else None,
            "optimizer_type": type(self.optimizer.torch_optimizer).__name__,
            "loss_scaler": self.optimizer.loss_scaler.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler else None,
            "client_state": client_state or {},
        }
        rng = rng_states() if save_rng else {}
        return store.save(save_dir, tag or store.tag_of(self.global_steps), tensors, rng, index, self.groups, keep_last)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        *,
        load_optimizer_states: bool = True,
        load_rng: bool = True,
        load_module_only: bool = False,
    ) -> tuple[Path, dict[str, Any]]:
        """Continues from a checkpoint of any model-parallel and data-parallel size.

        Args:
            tag: which checkpoint (default: the one that `latest` names).
            load_module_only: read the weights and nothing else.

        Returns:
            The checkpoint's directory and the client state it was saved with.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it is damaged, or of a model of another shape.
        """
        reader = store.Reader(load_dir, tag)
        self._check_shapes(reader)
        load_optimizer_states = load_optimizer_states and not load_module_only and reader.index["optimizer"] is not None
        if load_optimizer_states:
            kinds = {key.partition("/")[0] for key in reader.tensors} - {MASTER, CONSTANT}
            self._check_optimizer(reader)
            self.optimizer.allocate_state(sorted(kinds), reader.index["optimizer"])
        size, rank = self.groups.model_parallel_size, self.groups.model_parallel_rank
        for bucket, segment in self.segments():
            for key, target in self.optimizer.state_of(bucket, segment).items():
                if key == MASTER or load_optimizer_states:
                    full = reader.read(f"{key}/{segment.name}")
                    target.detach().copy_(self._cut(segment.name, full, segment.shape, size, rank))
        for name, value in self._constants().items():
            value.copy_(self._cut(name, reader.read(f"{CONSTANT}/{name}"), tuple(value.shape), size, rank))
        for bucket in self.buckets:
            bucket.publish()
        if not load_module_only:
            if not load_optimizer_states:
                logger.warning("the optimizer starts with empty moments: its state was not loaded from %s", reader.path)
            self._load_counters(reader.index)
            if load_rng:
                self._load_rng(reader)
        return reader.path, reader.index["client_state"]

    def memory(self) -> dict[str, int]:
        """Bytes held on this rank for parameters (P), gradients (G) and optimizer (O: master weights and moments)."""
        total = {"P": 0, "G": 0, "O": 0}
        for bucket in self.buckets:
            for key, value in bucket.nbytes.items():
                total[key] += value
        states = self.optimizer.torch_optimizer.state.values()
        total["O"] += sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))
        return total

    def _check_replicas(self) -> None:
        """Raises on every rank unless all data-parallel ranks start with equal weights."""
        if not self.buckets:
            raise ValueError("the model has no trainable parameter: set requires_grad on what is to be trained.")
        sums = torch.stack([bucket.flat.double().sum() for bucket in self.buckets])
        if any(not torch.equal(sums, other) for other in comm.all_gather(sums, self.groups.data)):
            raise ValueError(
                "The data-parallel ranks start with different weights and would train different models. Call torch.manual_seed "
                "with the same seed on every rank before the model is built, or load the same weights."
            )

    def _constants(self) -> dict[str, Tensor]:
        """Frozen parameters and persistent buffers, by name; tied names of trained parameters are not among them."""
        trained = {bucket.flat.untyped_storage().data_ptr() for bucket in self.buckets}
        state = self.module.state_dict()
        return {name: t.detach() for name, t in state.items() if t.untyped_storage().data_ptr() not in trained}

    def _full_shapes(self) -> dict[str, list[int]]:
        """The unpadded, uncut shape of everything that a checkpoint holds of the module."""
        local = {segment.name: segment.shape for _, segment in self.segments()}
        local.update({name: tuple(value.shape) for name, value in self._constants().items()})
        cuts = self.partitions
        return {name: list(cuts[name].full_shape(shape) if name in cuts else shape) for name, shape in local.items()}

    def _check_shapes(self, reader: store.Reader) -> None:
        saved, wanted = reader.index["shapes"], self._full_shapes()
        different = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
        if different:
            first = different[0]
            raise ValueError(
                f"The checkpoint {reader.path} is of a model of another shape: {len(different)} parameters differ, the first is "
                f"{first}: saved {saved.get(first, 'nothing')}, model {wanted.get(first, 'nothing')}. Give the --num-layers, "
                "--hidden-size, --max-position-embeddings and vocabulary that it was trained with."
            )

    def _check_optimizer(self, reader: store.Reader) -> None:
        saved, wanted = reader.index["optimizer_type"], type(self.optimizer.torch_optimizer).__name__
        if saved != wanted:
            raise ValueError(
                f"The checkpoint {reader.path} holds the state of {saved}, and this run uses {wanted}. Use the same optimizer, "
                "or start it anew with --no-load-optim."
            )

    def _cut(self, name: str, full: Tensor, shape: tuple[int, ...], size: int, rank: int) -> Tensor:
        cut = self.partitions.get(name)
        return full if cut is None else cut.slice_like(shape, full, rank, size)

    def _load_counters(self, index: dict[str, Any]) -> None:
        self.global_steps, self.skipped_steps = index["global_steps"], index["skipped_steps"]
        self.micro_steps = 0
        self.optimizer.loss_scaler.load_state_dict(index["loss_scaler"])
        if self.lr_scheduler is not None and index["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(index["lr_scheduler"])

    def _load_rng(self, reader: store.Reader) -> None:
        index, world_size = reader.index, torch.distributed.get_world_size()
        same_world = (index["world_size"], index["model_parallel_size"]) == (
            world_size,
            self.groups.model_parallel_size,
        )
        states = reader.rng(torch.distributed.get_rank()) if same_world else None
        if states is not None:
            set_rng_states(states)
        else:
            logger.info("random generators are seeded anew: the checkpoint has no states for these ranks and devices")
