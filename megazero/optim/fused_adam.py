"""torch's fused Adam under DeepSpeed's and apex's name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Adam):
    """torch's fused AdamW, or Adam, under the signature of DeepSpeed's and apex's FusedAdam, with their defaults.

    Args:
        params: parameters, or dicts of parameter groups, on any device that torch has a fused kernel for.
        bias_correction: must be true, because torch always corrects the bias. CPUAdam and HybridAdam accept false.
        adam_w_mode: true: decoupled weight decay (AdamW). False: weight decay is added to the gradient (Adam).
        set_grad_none: must be true: zero_grad() drops gradients, as every torch optimizer's does.

    Raises:
        ValueError: bias_correction or set_grad_none is false, or a number is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ValueError(
                "FusedAdam is torch's fused Adam, which always corrects the bias, got bias_correction=False. Use HybridAdam."
            )
        if not set_grad_none:
            raise ValueError(
                "FusedAdam drops gradients, got set_grad_none=False. To fill them with zeros, call zero_grad(set_to_none=False)."
            )
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            fused=True,
            decoupled_weight_decay=adam_w_mode,
        )

    # Without torch's wrappers, which import torch._dynamo: that takes a process longer than torch.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))
