"""The optimizer over buckets: an elementwise torch optimizer on flat fp32 ranges, the global norm, and overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.optim.loss_scaler import LossScaler
from megazero.zero.bucket import Bucket
from megazero.zero.layout import Segment, Span

# Elementwise: the update of an element depends on nothing but that element's gradient and state, so any range can step alone.
ELEMENTWISE = {
    "Adam",
    "AdamW",
    "SGD",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "Adagrad",
    "RMSprop",
    "Rprop",
    "ASGD",
    "FusedAdam",
}


class BucketOptimizer:
    """Steps every bucket's fp32 master weights from its fp32 gradients.

    Each parameter group is handed to the torch optimizer as a few flat slices of the buckets' storages, not as named
    parameters, so the number of kernels does not grow with the number of parameters.

    Args:
        factory: makes the torch optimizer from a list of parameter-group dicts.
        group_settings: for each parameter group the options beyond "params" (weight_decay, ...).
        clip_grad: the gradients are scaled so that their global norm is at most this; 0 turns clipping off.

    Raises:
        ValueError: the optimizer is not known to be elementwise.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        factory: Callable[[Iterable[Any]], torch.optim.Optimizer],
        group_settings: list[dict[str, Any]],
        model_group: comm.ProcessGroup,
        loss_scaler: LossScaler,
        clip_grad: float,
    ) -> None:
        self.buckets = buckets
        self.model_group = model_group
        self.loss_scaler = loss_scaler
        self.clip_grad = clip_grad
        self.overflow = False
        self._slices: list[tuple[Bucket, Span, nn.Parameter]] = []
        for bucket in buckets:
            for span in bucket.layout.spans:
                master = nn.Parameter(bucket.master[span.start : span.stop])
                master.grad = bucket.grad[span.start : span.stop]
                self._slices.append((bucket, span, master))
        groups = [
            {**settings, "params": [master for _, span, master in self._slices if span.group == index]}
            for index, settings in enumerate(group_settings)
        ]
        self.torch_optimizer = factory([group for group in groups if group["params"]])
        name = type(self.torch_optimizer).__name__
        if name not in ELEMENTWISE:
            raise ValueError(
                f"{name} is not known to be elementwise: it may need whole parameters, while the engine steps flat ranges that "
                f"cut across them. Use one of {', '.join(sorted(ELEMENTWISE))}."
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's parameter groups (learning rates, weight decay)."""
        return self.torch_optimizer.param_groups

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scaler.scale

    def step(self) -> float:
        """One update from the reduced gradients. Returns the global gradient norm, unscaled and before clipping.

        A norm that is not finite (`overflow`) leaves weights and optimizer state untouched.
        """
        norm = self.grad_norm()
        self.overflow = not norm < float("inf")  # also true for NaN
        if not self.overflow:
            factor = 1.0 / self.cur_scale
            if self.clip_grad > 0:
                factor *= min(1.0, self.clip_grad / (norm + 1e-6))
            if factor != 1.0:
                for bucket in self.buckets:
                    bucket.grad.mul_(factor)
            self.torch_optimizer.step()
            for bucket in self.buckets:
                bucket.publish()
        for bucket in self.buckets:
            bucket.zero_grad()
        self.loss_scaler.update(self.overflow)
        return norm

    def grad_norm(self) -> float:
        """The 2-norm of the mean gradient of the whole model, equal on every rank; one collective, one device sync.

        Parameters that tensor-parallel ranks hold in common count once.
        """
        squares: list[Tensor] = []
        for bucket, span, _ in self._slices:
            if not span.is_replicated or self.model_group.rank() == 0:
                squares.append(torch.linalg.vector_norm(bucket.grad[span.start : span.stop]).square())
        device = self.buckets[0].grad.device
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
        total = comm.all_reduce(total, self.model_group)
        return float(total.sqrt()) / self.cur_scale

    def state_of(self, bucket: Bucket, segment: Segment) -> dict[str, Tensor]:
        """The optimizer's tensors of one parameter, as views in the parameter's shape: "master", "exp_avg", ..."""
        state = {"master": Bucket.view(bucket.master, segment)}
        for owner, span, master in self._slices:
            if owner is bucket and span.start <= segment.start < span.stop:
                for key, value in self.torch_optimizer.state.get(master, {}).items():
                    if _is_flat(value):
                        begin = segment.start - span.start
                        state[key] = value[begin : begin + segment.numel].view(segment.shape)
        return state

    def counters(self) -> dict[str, float]:
        """The optimizer's scalar state, one set for all parameters: Adam's "step"."""
        if "step" in self.param_groups[0]:  # NVIDIA apex counts in the group
            return {"step": float(self.param_groups[0]["step"])}
        for state in self.torch_optimizer.state.values():
            return {key: float(value) for key, value in state.items() if not _is_flat(value)}
        return {}

    def allocate_state(self, keys: Iterable[str], counters: dict[str, float]) -> None:
        """Creates the state that a first step would create, zeroed, so that a checkpoint can be read into it."""
        counts_in_group = type(self.torch_optimizer).__module__.startswith("apex")
        for _, _, master in self._slices:
            state = self.torch_optimizer.state[master]
            for key in keys:
                state[key] = torch.zeros_like(master, requires_grad=False)
            for key, value in counters.items():
                if not counts_in_group:
                    state[key] = torch.tensor(value, dtype=torch.float32, device=master.device)
        for group in self.param_groups:
            if counts_in_group:
                group.update({key: int(value) for key, value in counters.items()})


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1
