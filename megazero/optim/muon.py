"""Muon: momentum made orthogonal for the matrices of hidden layers, and AdamW for everything else."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# Of the quintic Newton-Schulz iteration: steep at 0, so that five steps bring singular values of any size to about 0.7 - 1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MOMENTUM = "momentum_buffer"  # the state of a matrix
ADJUST_LR = ("original", "match_rms_adamw")

_Matrix = tuple[dict[str, Any], Tensor, Tensor]  # its group, the parameter, and the direction to make orthogonal


def orthogonalized(matrix: Tensor, steps: int = 5) -> Tensor:
    """U S V^T with all singular values S moved towards 1, in bf16 (kellerjordan.github.io/posts/muon, "Newton-Schulz").

    Args:
        matrix: [rows, columns].
        steps: of the iteration, each three matrix products.

    Returns:
        [rows, columns], bf16. Permuted rows or columns give the permuted result; zeros stay zeros.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16().T if is_tall else matrix.bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T  # of the short side
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def rate_factor(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """The factor on the learning rate for a matrix of this shape.

    "original", or None: sqrt(max(1, rows / columns)). "match_rms_adamw": 0.2 sqrt(max(rows, columns)); elements then move as
    far as under AdamW, so AdamW's learning rate and weight decay can be kept (arXiv:2502.16982, sec. 2.2).
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


class Muon(torch.optim.AdamW):
    """Muon (K. Jordan et al. 2024) for parameter groups with `use_muon`, AdamW for the others.

    The numbers are those of torch.optim.Muon and torch.optim.AdamW. A step is elementwise except for the part that makes matrices
    orthogonal. An engine, whose parameters are flat ranges instead of matrices, replaces that part: it sets `orthogonalize` while
    it steps.

    Args:
        params: groups; those with `use_muon: True` hold the matrices of hidden layers, and no embeddings, biases or norms.
        momentum, nesterov, ns_steps, adjust_lr_fn: for groups with `use_muon`, as in torch.optim.Muon.
        betas, eps: for the other groups.

    Attributes:
        orthogonalize: replaces each given direction, a parameter's `grad`, with the step to take at a learning rate of 1; None if
            parameters are whole matrices.

    Raises:
        ValueError: a setting is out of range.
    """

    orthogonalize: Callable[[Sequence[_Matrix]], None] | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        if ns_steps < 1:
            raise ValueError(f"ns_steps must be at least 1, got {ns_steps}")
        if adjust_lr_fn not in (None, *ADJUST_LR):
            raise ValueError(f"adjust_lr_fn must be one of {', '.join(ADJUST_LR)}, got {adjust_lr_fn!r}")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        self.defaults.update(own, use_muon=False)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Bypasses AdamW's own, which expects a step count in every state; a matrix's state has none."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient. Overwrites the gradients of matrices."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices = [
            (group, parameter, parameter.grad)
            for group in self.param_groups
            if group["use_muon"]
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for group, parameter, direction in matrices:
            state, momentum = self.state[parameter], group["momentum"]
            if not state:
                state[MOMENTUM] = torch.zeros_like(parameter, requires_grad=False)
            buffer = state[MOMENTUM].lerp_(direction, 1 - momentum)
            if group["nesterov"]:
                direction.lerp_(buffer, momentum)
            else:
                direction.copy_(buffer)
        (self.orthogonalize or _orthogonalize_whole)(matrices)
        for group, parameter, direction in matrices:
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
            parameter.grad = None  # so that AdamW skips it
        inspect.unwrap(torch.optim.AdamW.step)(self)  # super().step() would run hooks a second time
        return loss


def _orthogonalize_whole(matrices: Sequence[_Matrix]) -> None:
    """What takes the place of `orthogonalize` without an engine: parameters are whole matrices."""
    for group, _, direction in matrices:
        if direction.ndim != 2:
            raise ValueError(
                f"Muon takes matrices, and a group with use_muon has a parameter of shape {tuple(direction.shape)}."
            )
        direction.copy_(orthogonalized(direction, group["ns_steps"]))
        direction.mul_(rate_factor(group["adjust_lr_fn"], *direction.shape))
