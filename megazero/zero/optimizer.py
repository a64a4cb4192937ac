"""The optimizer over buckets: steps of an elementwise torch optimizer on flat fp32 ranges, the global norm, and overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megazero import comm
from megazero.optim.loss_scaler import LossScaler
from megazero.zero.bucket import Bucket
from megazero.zero.sliced import SlicedOptimizer

# Elementwise: the update of an element depends on nothing but that element's gradient and state, so any range can step alone.
_TORCH_ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
ELEMENTWISE = {"FusedAdam", *(cls.__name__ for cls in _TORCH_ELEMENTWISE)}

NORM_ROW = 256  # elements that one fp32 sum of the gradient norm runs over


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch's (or apex's) that are known to be elementwise; a class of that name is not."""
    kind = type(optimizer)
    is_fused_adam = kind.__name__ == "FusedAdam" and kind.__module__.partition(".")[0] in ("apex", "megazero")
    return kind in _TORCH_ELEMENTWISE or is_fused_adam


class BucketOptimizer(SlicedOptimizer):
    """Steps every bucket's fp32 master weights from its reduced gradients.

    Each parameter group is handed to the torch optimizer as a few flat slices of the buckets' storages, not as named
    parameters, so the number of kernels does not grow with the number of parameters.

    Args:
        factory: makes the torch optimizer from a list of parameter-group dicts.
        group_settings: for each parameter group the options beyond "params" (weight_decay, ...).
        norm_group: all ranks that hold a part of the model: the tensor-parallel and the data-parallel ones.
        counts_replicated: whether this rank counts, in the norm, the parameters that tensor-parallel ranks hold in common.
        clip_grad: the gradients are scaled so that their global norm is at most this; 0 turns clipping off.
        allow_untested: the caller vouches for an optimizer that is not in ELEMENTWISE.

    Raises:
        ValueError: the optimizer is not known to be elementwise.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        factory: Callable[[Iterable[Any]], torch.optim.Optimizer],
        group_settings: list[dict[str, Any]],
        norm_group: comm.ProcessGroup,
        counts_replicated: bool,
        loss_scaler: LossScaler,
        clip_grad: float,
        allow_untested: bool = False,
    ) -> None:
        self.norm_group = norm_group
        self.counts_replicated = counts_replicated
        self.loss_scaler = loss_scaler
        self.clip_grad = clip_grad
        self.overflow = False
        super().__init__(buckets, factory, group_settings)
        kind = type(self.torch_optimizer)
        if not is_elementwise(self.torch_optimizer) and not allow_untested:
            raise ValueError(
                f"{kind.__module__}.{kind.__name__} is not known to be elementwise: it may need whole parameters, while the "
                f"engine steps flat ranges that cut across them. Use one of {', '.join(sorted(ELEMENTWISE))} of torch.optim or "
                "apex."
            )
        fused = all(group.get("fused") for group in self.param_groups)
        self._scales_itself = kind in (torch.optim.Adam, torch.optim.AdamW) and fused

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scaler.scale

    @property
    def loss_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scaler.scale

    @property
    def loss_scale_config(self) -> LossScaler:
        """The loss scaler: `cur_scale`, `dynamic_loss_scale`, ..."""
        return self.loss_scaler

    def step(self) -> float:
        """One update from the reduced gradients. Returns the global gradient norm, unscaled and before clipping.

        A norm that is not finite (`overflow`) leaves weights and optimizer state untouched.
        """
        norm = self.grad_norm()
        self.overflow = not norm < float("inf")  # also true for NaN
        if not self.overflow:
            clip = min(1.0, self.clip_grad / (norm + 1e-6)) if self.clip_grad > 0 else 1.0
            self._update(clip / self.cur_scale)
        where = self._first_not_finite() if self.overflow else ""
        for bucket in self.buckets:
            if bucket.gradient is not None:
                bucket.gradient.zero()
        self.loss_scaler.update(self.overflow, where)
        return norm

    def _update(self, factor: float) -> None:
        """Steps bucket by bucket, so that the new parameters of one are on their way while the next is updated.

        Args:
            factor: by which mean gradients are multiplied.
        """
        trained = [bucket for bucket in self.buckets if bucket.is_trainable]
        if self._scales_itself and trained:
            self._set_scale(trained[0], factor)
        for batch in [[bucket] for bucket in trained] if self._steps_apart else [trained]:
            for bucket in batch:
                self._set_gradients(bucket, factor)
            self.torch_optimizer.step()  # skips what has no gradient
            for bucket in batch:
                for piece in self.slices_of(bucket):
                    piece.master.grad = None
                bucket.publish()
        for bucket in trained:
            bucket.wait_gathered()

    @property
    def _steps_apart(self) -> bool:
        """Whether several calls of the torch optimizer's step() are as good as one: none that it counts, and nobody watches."""
        hooks = (self.torch_optimizer._optimizer_step_pre_hooks, self.torch_optimizer._optimizer_step_post_hooks)
        return type(self.torch_optimizer) in _TORCH_ELEMENTWISE and not any(hooks)

    def _set_scale(self, bucket: Bucket, factor: float) -> None:
        """Has torch's fused kernels divide gradients in the pass that they make anyway. All buckets have one group's mean."""
        assert bucket.gradient is not None
        factor, device = factor * bucket.gradient.to_mean, bucket.gradient.device
        scale = None if factor == 1.0 else torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
        found_inf = None if scale is None else torch.zeros_like(scale)
        vars(self.torch_optimizer).update(grad_scale=scale, found_inf=found_inf)

    def _set_gradients(self, bucket: Bucket, factor: float) -> None:
        """Gives the bucket's slices their gradients, for an update with the mean gradient times `factor`."""
        assert bucket.gradient is not None
        low, factor = bucket.owned_range.start, factor * bucket.gradient.to_mean
        for piece in self.slices_of(bucket):
            if piece.is_trained:
                owned = bucket.gradient.owned[piece.span.start - low : piece.span.stop - low]
                piece.master.grad = owned.float()  # the same memory where G is fp32; else cast before 16 bits underflow
                if factor != 1.0 and not self._scales_itself:
                    piece.master.grad.mul_(factor)

    def grad_norm(self) -> float:
        """The 2-norm of the mean gradient of the whole model, equal on every rank; one collective, one device sync.

        Each rank takes its shard of every bucket, also where gradients are whole, so that the sum is the same bit for bit in
        every stage. Parameters that tensor-parallel ranks hold in common count once.
        """
        squares: list[Tensor] = []
        for bucket in self.buckets:
            if bucket.is_trainable:
                squares += self._squares(bucket)
        zero = torch.zeros((), dtype=torch.float64, device=self.buckets[0].flat.device)
        total = torch.stack(squares).sum() if squares else zero
        total = comm.all_reduce(total, self.norm_group)
        return float(total.sqrt()) / self.cur_scale

    def _first_not_finite(self) -> str:
        """The first parameter, in backward order, whose gradient is inf or NaN, and the rank that saw it. Collective."""
        mine = None
        for bucket in self.buckets:
            if bucket.gradient is not None and mine is None:
                owned = bucket.gradient.owned
                parts = {segment.name: bucket.owned_part(owned, segment)[0] for segment in bucket.layout.segments}
                name = next((name for name, part in parts.items() if not bool(torch.isfinite(part).all())), None)
                mine = name and f"{name} (rank {torch.distributed.get_rank()})"
        return next(filter(None, comm.all_gather_object(mine, self.norm_group)), "no single parameter")

    def _squares(self, bucket: Bucket) -> list[Tensor]:
        """Squared norms of the mean gradient in this rank's shard, float64."""
        assert bucket.gradient is not None
        low, squares = bucket.owned_range.start, []
        for span in bucket.layout.spans:
            part = span.clip(bucket.shard_range.start, bucket.shard_range.stop)
            if part.start < part.stop and (not span.is_replicated or self.counts_replicated):
                owned = bucket.gradient.owned[part.start - low : part.stop - low]
                squares.append(_square_sum(owned) * bucket.gradient.to_mean**2)
        return squares


def _square_sum(flat: Tensor) -> Tensor:
    """The sum of squares, float64. Row by row, because one fp32 sum over 10^7 elements is wrong in the third digit on a CPU."""
    rows = flat.numel() // NORM_ROW
    norms = torch.linalg.vector_norm(flat[: rows * NORM_ROW].view(rows, NORM_ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[rows * NORM_ROW :], dtype=torch.float32)
    return norms.double().square().sum() + rest.double().square()
