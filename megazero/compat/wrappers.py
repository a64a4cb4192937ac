"""What the entry points share: a module and a torch optimizer that delegate everything to one engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.deepspeed.engine import DeepSpeedEngine
from megazero.logging import setup_logging
from megazero.nested import moved

logger = logging.getLogger(__name__)


def join(backend: str | None = None) -> None:
    """Joins the world that the environment describes, and shows megazero's log if the script shows none of its own."""
    comm.init_distributed(backend)
    if not logger.hasHandlers():
        setup_logging(comm.world().rank())


class EngineModule(nn.Module):
    """A model whose forward is its engine's, once it has one.

    Args:
        module: the user's model. The engine trains its parameters, whose names here begin with "module.".
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._engine: DeepSpeedEngine | None = None

    @property
    def engine(self) -> DeepSpeedEngine:
        """The engine, for everything that the other system has no name for (checkpoints, norms, memory).

        Raises:
            RuntimeError: there is no engine yet.
        """
        if self._engine is None:
            raise RuntimeError(
                f"{type(self).__name__} has no engine before its optimizer is made, which decides what is kept for each "
                "parameter. Make the optimizer first."
            )
        return self._engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. If it computes in 16 bits, floating-point tensors among the arguments are cast."""
        dtype = self.engine.config.cast_to
        return self.engine(*moved(args, floating=dtype), **moved(kwargs, floating=dtype))

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Tensor]:
        """Full values under the names of the user's own model, as copies on the CPU, the same on every rank. Collective."""
        state = {prefix + name: value for name, value in self.engine.module_state_dict().items()}
        if destination is None:
            return state
        destination.update(state)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> None:
        """Loads full values, the same on every rank, into the parameters and their fp32 master weights. Collective.

        Raises:
            RuntimeError: names are missing or unknown (with `strict`), or a shape differs.
        """
        self.engine.load_module_state_dict(dict(state_dict), strict)


class EngineOptimizer(torch.optim.Optimizer):
    """The optimizer of an engine, for schedulers and loops that expect a torch optimizer.

    Parameter groups and state are those of the torch optimizer that the engine steps.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine  # no super().__init__(): groups and state have one owner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups: learning rates, weight decay, and flat slices instead of parameters."""
        return self.engine.optimizer.param_groups

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The state of each flat slice. For a parameter's: `megazero.utils.safe_get_full_optimizer_state`."""
        self.engine.optimizer.finish()  # else an update in the background might be writing it
        return self.engine.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the parameter groups."""
        return self.engine.optimizer.torch_optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """The factor by which the next loss is scaled."""
        return self.engine.loss_scale()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards the gradients since the last step. A step does so by itself."""
        self.engine.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Makes one update, or none if a gradient is inf or NaN; the loss scale adapts to the outcome.

        Raises:
            ValueError: a closure was given.
            RuntimeError: there was no backward before this step.
        """
        if closure is not None:
            raise ValueError(f"{type(self).__name__}.step takes no closure: call backward(loss) first.")
        self.engine.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the buckets are laid out already.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("Parameter groups cannot be added later. Freeze parameters by requires_grad instead.")

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refused, as `load_state_dict` is: a rank holds only a part of the state, which no other number of ranks could load.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.state_dict and load_state_dict: each rank holds a part of the optimizer's state. Use "
            "model.engine.save_checkpoint(directory) and load_checkpoint(directory), for weights, optimizer and loss scale, at "
            "any number of ranks."
        )

    load_state_dict = state_dict
