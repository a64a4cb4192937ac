"""The optimizer of the GPT-2 job: AdamW over flat fp32 tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megazero.option import option

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv:1711.05101) and gradient clipping."""

    weight_decay: float = option(0.01, "decoupled weight decay of matrices and embeddings; biases and norms have none")
    clip_grad: float = option(1.0, "clip the global gradient norm to this; 0 turns clipping off")
    adam_beta1: float = option(0.9, "decay of the first moment")
    adam_beta2: float = option(0.999, "decay of the second moment")
    adam_eps: float = option(1e-8, "added to the root of the second moment")
    optimizer: str = option(
        "adamw",
        "apex-adamw needs an NVIDIA apex built from source (the package index's apex is unrelated)",
        choices=("adamw", "apex-adamw"),
    )

    def __post_init__(self) -> None:
        if self.weight_decay < 0 or self.clip_grad < 0:
            raise ValueError(
                f"--weight-decay and --clip-grad must be 0 or more, got {self.weight_decay} and {self.clip_grad}."
            )
        if self.adam_eps < 0:
            raise ValueError(f"--adam-eps must be 0 or more, got {self.adam_eps}.")
        if not (0 <= self.adam_beta1 < 1 and 0 <= self.adam_beta2 < 1):
            raise ValueError(
                f"--adam-beta1 and --adam-beta2 must lie in [0, 1), got {self.adam_beta1} and {self.adam_beta2}."
            )

    def factory(self) -> OptimizerFactory:
        """A callable that makes the optimizer from parameter groups.

        Raises:
            ValueError: apex was asked for and NVIDIA's apex is not importable.
        """
        settings: dict[str, Any] = {"lr": 0.0, "betas": (self.adam_beta1, self.adam_beta2), "eps": self.adam_eps}
        if self.optimizer == "apex-adamw":
            try:
                from apex.optimizers import FusedAdam
            except ImportError as error:
                raise ValueError(
                    "--optimizer apex-adamw needs NVIDIA apex, built from its source repository (the package called apex on the "
                    f"package index is something else): {error}. Use --optimizer adamw, which is fused as well."
                ) from error
            return lambda groups: FusedAdam(groups, adam_w_mode=True, **settings)
        return lambda groups: torch.optim.AdamW(groups, fused=True, **settings)
