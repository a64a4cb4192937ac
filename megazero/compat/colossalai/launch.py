"""How a Colossal-AI script starts: `launch_from_torch(config)`, then `initialize` with the `zero` part of that configuration."""

from __future__ import annotations

import logging
import runpy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.compat.colossalai.sharded import ShardedModelV2, ShardedOptimizerV2
from megazero.compat.wrappers import join
from megazero.nested import moved
from megazero.option import check_known, did_you_mean

logger = logging.getLogger(__name__)

# Parts of a configuration that ask for an engine other than ZeRO's. A script may keep anything else in there.
_REFUSED = {
    "parallel": "pipelines and tensor parallelism by configuration are not built; megazero.mpu has tensor-parallel layers",
    "fp16": "precision is part of zero: fp16, or model_config=dict(bf16=True)",
    "gradient_handler": "the engine reduces gradients",
    "torch_ddp": "the engine takes the place of DistributedDataParallel",
}


class Config(dict):
    """A configuration whose keys, and those of the dicts in it, are attributes too: `config.zero.model_config`."""

    def __init__(self, values: Iterable[tuple[Any, Any]] = ()) -> None:
        pairs = ((key, Config(value.items()) if type(value) is dict else value) for key, value in values)
        super().__init__(pairs)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name}. {did_you_mean(name, map(str, self))}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = Config(value.items()) if type(value) is dict else value


class GlobalContext:
    """The object that scripts know as `gpc`: holds the configuration that was launched."""

    def __init__(self) -> None:
        self.config = Config()

    def get_global_rank(self) -> int:
        """This process's rank in the world."""
        return comm.world().rank()


gpc = GlobalContext()  # scripts for Colossal-AI read their settings from it everywhere


def launch_from_torch(
    config: dict[str, Any] | str | Path, backend: str | None = None, seed: int = 1024, verbose: bool = True
) -> None:
    """Joins the world that torchrun describes, keeps the configuration in `gpc.config`, and seeds this process.

    Args:
        config: a dict, or the path of a Python file whose top-level names are the configuration.
        backend: "nccl" or "gloo"; by default nccl if CUDA is available.
        seed: the same on every rank, so that models start with equal weights.
        verbose: whether to log the number of ranks.
    """
    join(backend)
    values = config if isinstance(config, dict) else runpy.run_path(str(config))
    gpc.config = Config((key, value) for key, value in values.items() if not str(key).startswith("__"))
    torch.manual_seed(seed)
    if verbose:
        logger.info("%d ranks on %s", comm.world().size(), comm.local_device())


class Engine:
    """The engine that `initialize` returns.

    Use: `engine.train()`, `engine.zero_grad()`, `output = engine(x)`, `loss = engine.criterion(output, y)`,
    `engine.backward(loss)`, `engine.step()`.

    Args:
        clip_grad_norm: the maximum global norm of the gradients; 0 for no clipping.
    """

    def __init__(
        self,
        model: ShardedModelV2,
        optimizer: ShardedOptimizerV2,
        criterion: Callable[..., Tensor] | None = None,
        clip_grad_norm: float = 0.0,
    ) -> None:
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self._clip_grad_norm = clip_grad_norm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.model(*args, **kwargs)

    def train(self) -> None:
        """Sets the model's training mode."""
        self.model.train()

    def eval(self) -> None:
        """Sets the model's evaluation mode."""
        self.model.eval()

    def zero_grad(self) -> None:
        """Discards gradients, except those that are accumulating for an update."""
        engine = self.optimizer.engine
        if engine.micro_steps % engine.gradient_accumulation_steps() == 0:
            self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of `loss`, the mean over this rank's batch."""
        self.optimizer.backward(loss)

    def step(self) -> None:
        """Counts the batch, and makes an update at every `gradient_accumulation`-th one."""
        self.optimizer.clip_grad_norm(self.model, self._clip_grad_norm)
        self.optimizer.step()

    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, Tensor | None]:
        """Forward, loss and, unless `forward_only`, backward of the next batch.

        A batch is a pair of data and label, or data alone (label None). A dict is passed to the model as keyword arguments, a
        list or tuple as positional ones. Without a criterion, the loss is the output's `loss` attribute, or the output itself.

        Returns:
            Output and label (None without `return_output_label`), and the detached loss (None without `return_loss`).
        """
        batch = moved(next(data_iter), comm.local_device())
        data, label = batch if isinstance(batch, (list, tuple)) and len(batch) == 2 else (batch, None)
        with torch.set_grad_enabled(not forward_only):
            output = self._forward(data)
            loss = self._loss(output, label) if return_loss or not forward_only else None
        if loss is not None and not forward_only:
            self.backward(loss)
        kept = (output, label) if return_output_label else (None, None)
        return *kept, loss.detach() if loss is not None and return_loss else None

    def _forward(self, data: Any) -> Any:
        if isinstance(data, (list, tuple)):
            return self(*data)
        return self(**data) if hasattr(data, "keys") else self(data)

    def _loss(self, output: Any, label: Any) -> Tensor:
        if self.criterion is None:
            return getattr(output, "loss", output)
        return self.criterion(output) if label is None else self.criterion(output, label)


def _sizes_of(parallel: dict[str, Any]) -> set[Any]:
    """The sizes in a `parallel` section, such as dict(pipeline=1, tensor=dict(size=1, mode=None))."""
    return {part.get("size") if isinstance(part, dict) else part for part in parallel.values()}


def initialize(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
    criterion: Callable[..., Tensor] | None = None,
    train_dataloader: Iterable | None = None,
    test_dataloader: Iterable | None = None,
    lr_scheduler: Any = None,
    ophooks: None = None,
    verbose: bool = True,
) -> tuple[Engine, Iterable | None, Iterable | None, Any]:
    """An engine configured by `gpc.config.zero = dict(model_config=..., optimizer_config=...)`, and the rest unchanged.

    Also obeys `gradient_accumulation`, `clip_grad_norm`, `cudnn_benchmark` and `cudnn_deterministic` in the configuration.

    Args:
        model: a model that was built in `ZeroInitContext`, a function that builds it, or any other model.
        optimizer: an optimizer over the model's parameters, or a class or function that makes one from them.
        ophooks: must be None.

    Raises:
        ValueError: there is no `zero` in the configuration, or a part of it asks for something that does not exist here.
        TypeError: `model_config` or `optimizer_config` has an unknown key.
    """
    config = gpc.config
    zero = config.get("zero")
    if not isinstance(zero, dict):
        raise ValueError(
            "initialize needs zero = dict(model_config=dict(shard_strategy=...), optimizer_config=dict(...)) in the "
            f"configuration that launch_from_torch was given, found zero = {zero!r}."
        )
    check_known("zero has no", zero, ("model_config", "optimizer_config"))
    for key, reason in _REFUSED.items():
        if config.get(key) and not (key == "parallel" and _sizes_of(config[key]) <= {None, 1}):
            raise ValueError(f"{key} in the configuration cannot be obeyed: {reason}. Drop it.")
    if ophooks:
        raise ValueError("initialize(ophooks=...) cannot be obeyed: use torch's module hooks. Drop it.")
    torch.backends.cudnn.benchmark = config.get("cudnn_benchmark", False)
    torch.backends.cudnn.deterministic = config.get("cudnn_deterministic", False)
    built = model if isinstance(model, nn.Module) else model()
    sharded = ShardedModelV2(built, **zero.get("model_config") or {})
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(sharded.parameters())
    sharded_optimizer = ShardedOptimizerV2(
        sharded,
        optimizer,
        **zero.get("optimizer_config") or {},
        gradient_accumulation_steps=config.get("gradient_accumulation", 1),
    )
    engine = Engine(sharded, sharded_optimizer, criterion, config.get("clip_grad_norm", 0.0))
    if verbose:
        logger.info("ZeRO engine made: %s", engine.model.engine.zero)
    return engine, train_dataloader, test_dataloader, lr_scheduler
