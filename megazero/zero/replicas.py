"""Whether parameters that every tensor-parallel rank holds whole are trained alike there."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.json_source import DeepSpeedConfigError
from megazero.mpu.groups import ParallelGroups
from megazero.mpu.partition import partitions
from megazero.zero.access import safe_get_local_grad
from megazero.zero.registry import bucket_of
from megazero.zero.units import shape_of

# Gradients with at least this relative difference belong to different parameters: rounding errors are far smaller.
_UNLIKE = 0.1
# Relative to the largest: a gradient that cancels out, as that of the keys' bias in attention, is all rounding error. How large
# this is, the differences of those that are alike show: none, unless ranks sum in another order.
_TOO_SMALL, _LARGE_ENOUGH = 1e-5, 1e-3
_DECLARE = (
    "Declare those that are parts, as an embedding with a column for each of a rank's heads is: in their module, partitions = "
    "{name: mpu.Partition(dim, full_size=size)}; for initialize(mpu=), parameter.model_parallel = True and "
    "parameter.partition_dim do as well."
)
_MOST = 10  # updates without a gradient to judge by: each comparison waits for the device


class Replicas:
    """The parameters that each tensor-parallel rank holds whole, until their gradients have been seen to be the same there.

    Parameters that are split, but not declared to be, have other gradients, even if their parts were drawn from one seed and
    started out equal.
    """

    def __init__(self, model: nn.Module, groups: ParallelGroups) -> None:
        """Collective over the tensor-parallel group.

        Raises:
            DeepSpeedConfigError: one of them is missing on a rank, or has another shape there.
        """
        self._groups = groups
        self._whole: dict[str, nn.Parameter] = {}
        self._asked: Counter[str] = Counter()  # updates in which it was compared
        if groups.model_parallel_size > 1:
            cuts, named = partitions(model), model.named_parameters()
            self._whole = {name: p for name, p in named if name not in cuts and all(shape_of(p))}
            shapes = {name: tuple(shape_of(p)) for name, p in self._whole.items()}
            if unlike := comm.differing_names(shapes, groups.model):
                raise DeepSpeedConfigError(
                    f"{', '.join(unlike)}: not marked as parts of larger parameters, but not of one shape on the "
                    f"{groups.model_parallel_size} model-parallel ranks, or missing on one. {_DECLARE}"
                )
        self._unseen = set(self._whole)

    def compare(self) -> None:
        """Compares the mean gradients of those that have not been seen to be alike, up to rounding. Collective over the world.

        A gradient of zero says nothing: where a factor of an adapter starts at zero, the other factor has no other at first. Nor
        does a difference of what may be all rounding error.

        Raises:
            DeepSpeedConfigError: the gradients of some parameter differ.
        """
        if not any(self._whole[name].requires_grad for name in self._unseen):
            return
        # Of all: what is small is so beside the others' gradients of this update. Those of an earlier one may be much smaller.
        local = {name: safe_get_local_grad(p) for name, p in self._whole.items() if p.requires_grad}
        rows = {name: self._squares(self._whole[name], grad) for name, grad in local.items() if grad is not None}
        if not rows:
            return
        squares = torch.stack(list(rows.values()))  # [parameters, 2]
        squares = torch.stack(comm.all_gathered(squares, self._groups.model)).amax(0)
        if not squares.isfinite().all():  # the step will be skipped
            return
        apart, size = squares.T
        are_alike = apart <= _UNLIKE**2 * size
        rounding, largest = torch.where(are_alike, apart, 0).max(), size.max()
        small = rounding.clamp(_TOO_SMALL**2 * largest, _LARGE_ENOUGH**2 * largest)
        may_be_alike = dict(zip(rows, (are_alike | (size <= small)).tolist(), strict=True))
        if unlike := [name for name, may_be in may_be_alike.items() if name in self._unseen and not may_be]:
            raise DeepSpeedConfigError(
                f"{', '.join(unlike)}: not marked as parts of larger parameters, but their gradients are not the same on the "
                f"{self._groups.model_parallel_size} model-parallel ranks. Nothing has been updated. {_DECLARE} The others get "
                "one gradient where model-parallel ranks have one batch, and one seed for dropout outside of the tracker's "
                "fork(), and where what they compute enters split layers through mpu.copy_to_model_parallel_region. Those used "
                "on slices of the sequence pass through mpu.copy_parameters_to_sequence_parallel_region."
            )
        for name, is_seen in zip(rows, (are_alike & (size > 0)).tolist(), strict=True):
            self._asked[name] += 1
            if is_seen or self._asked[name] == _MOST:
                self._unseen.discard(name)

    def _squares(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """[2]: the squared distance of the gradient, here in part, from the first rank's, and the sum of their squares."""
        # Whole, because tensor-parallel ranks have other parts of it if another parameter in the bucket is not cut evenly.
        bucket = bucket_of(parameter)
        assert bucket is not None  # it has a gradient
        segment = bucket.segment_of(parameter)
        low, high = segment.clip(bucket.owned_range.start, bucket.owned_range.stop)
        mine = torch.zeros(segment.numel, dtype=torch.float32, device=comm.local_device())
        mine[low - segment.start : high - segment.start] = part
        mine = comm.all_reduced(mine, self._groups.data)
        first = mine.clone()  # the first tensor-parallel rank's, after the broadcast
        comm.broadcast_(first, self._groups.model)
        return torch.stack([(mine - first).square().sum(), mine.square().sum() + first.square().sum()])
