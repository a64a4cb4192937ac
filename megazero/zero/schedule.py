"""Which parameters share a bucket, and when buckets are filled and reduced: the hooks between a model and its buckets."""

from __future__ import annotations

import torch
from torch import nn

from megazero import comm
from megazero.zero.bucket import Bucket
from megazero.zero.layout import BucketLayout, Segment

ROOT = -1  # unit number of the parameters outside all units


def find_units(model: nn.Module) -> list[nn.Module]:
    """The model's units in execution order: the entries of its first ModuleList that own parameters (transformer blocks)."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            return [unit for unit in child if any(True for _ in unit.parameters())]
        if units := find_units(child):
            return units
    return []


def build_buckets(
    model: nn.Module, data_group: comm.ProcessGroup, group_of: dict[str, int], replicated: set[str]
) -> list[Bucket]:
    """Lays the trainable parameters of `model` into buckets, one per unit and dtype; the root is what no unit holds.

    Args:
        group_of: index of the optimizer's parameter group for each trainable parameter, by its full name.
        replicated: names of the parameters that are equal on every tensor-parallel rank.

    Returns:
        Buckets in the order in which backward completes them: last unit first, root at the end. Frozen parameters have
        neither gradient nor optimizer state, so they stay where they are.

    Raises:
        ValueError: two units share a parameter.
    """
    units = find_units(model)
    unit_of: dict[nn.Parameter, int] = {}
    for index, unit in enumerate(units):
        for name, parameter in unit.named_parameters():
            if unit_of.setdefault(parameter, index) != index:
                raise ValueError(
                    f"Parameter {name!r} is shared by units {unit_of[parameter]} and {index} of the model. A tied weight must "
                    "lie in one unit: move both uses into one module, or keep the weight outside the ModuleList."
                )
    members: dict[tuple[int, torch.dtype], dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():  # names a tied parameter once
        if parameter.requires_grad:
            key = (unit_of.get(parameter, ROOT), parameter.dtype)
            members.setdefault(key, {})[name] = parameter
    buckets = []
    for _, parameters in sorted(members.items(), key=lambda item: (-item[0][0], str(item[0][1]))):
        entries = [(name, tuple(p.shape), group_of[name], name in replicated) for name, p in parameters.items()]
        buckets.append(Bucket(parameters, BucketLayout.build(entries, data_group.size()), data_group))
    return buckets


class Schedule:
    """Reduces each bucket as soon as the last micro-batch's backward has filled it, while backward goes on.

    Reductions are issued in one order on every rank (last unit first, the root at the end), never in order of arrival,
    which may differ between ranks and would then pair one rank's bucket with another's.
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets  # in backward order
        self.is_last_micro_batch = True
        for index, bucket in enumerate(self.buckets):
            for segment in bucket.layout.segments:
                self._register(index, bucket, segment)
        self.restart()

    def restart(self) -> None:
        """Expects a new backward, also after one that an exception cut short."""
        self._waiting = [{segment.name for segment in bucket.layout.segments} for bucket in self.buckets]
        self._next = 0  # index of the first bucket that has not been reduced

    def finish_backward(self) -> None:
        """After `loss.backward()`: reduces what the hooks have left (unused parameters, late gradients), waits for all."""
        if self.is_last_micro_batch:
            for bucket in self.buckets:
                if not bucket.is_reduced:
                    bucket.reduce()
            for bucket in self.buckets:
                bucket.wait()
        self.restart()

    def _register(self, index: int, bucket: Bucket, segment: Segment) -> None:
        def on_grad(_: torch.Tensor) -> None:
            bucket.accumulate(segment)
            self._waiting[index].discard(segment.name)
            if self.is_last_micro_batch and not self._waiting[index]:
                self._reduce_ready()

        bucket.parameters[segment.name].register_post_accumulate_grad_hook(on_grad)

    def _reduce_ready(self) -> None:
        while self._next < len(self.buckets) and not self._waiting[self._next]:
            self.buckets[self._next].reduce()
            self._next += 1
