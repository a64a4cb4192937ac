"""How a full parameter is cut over model-parallel ranks: arithmetic only, no process group.

A checkpoint stores full parameters; `Partition` is all that is needed to go from them to the shards of any
model-parallel size and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Partition:
    """The cut of one parameter.

    `stride` = k says that the full parameter is k matrices stacked along `dim`, each of which is cut on its own: with
    [Q; K; V] stacked, k = 3 and rank r holds [Q_r; K_r; V_r].

    Attributes:
        dim: the dimension that is cut.
        stride: number of stacked matrices.
        full_size: size of `dim` in the full parameter without padding. Shards may end in rows of zeros beyond it, as
            those of a vocabulary that is padded to a multiple of the model-parallel size do (only where stride is 1).
    """

    dim: int
    stride: int = 1
    full_size: int = field(kw_only=True)

    def slice(self, full: Tensor, rank: int, size: int, padded_size: int | None = None) -> Tensor:
        """The shard of `rank` of `size`: a contiguous copy of `full`'s dtype and device.

        Args:
            full: the full parameter, without padding.
            padded_size: what `dim` is padded to with zeros before it is cut; None does not pad.

        Raises:
            ValueError: `full` has another size, or it cannot be cut evenly.
        """
        if full.size(self.dim) != self.full_size:
            raise ValueError(
                f"dimension {self.dim} of {tuple(full.shape)} must be {self.full_size} to be cut by {self}"
            )
        padded = self.full_size if padded_size is None else padded_size
        chunk, rest = divmod(padded, size * self.stride)
        if rest or padded < self.full_size or (padded > self.full_size and self.stride > 1):
            raise ValueError(f"{self} cannot cut {padded} rows for {size} ranks: every shard must be of one size")
        shape = list(full.shape)
        shape[self.dim] = chunk * self.stride
        shard = full.new_zeros(shape)
        for k in range(self.stride):
            first = (k * size + rank) * chunk
            length = min(chunk, self.full_size - first)  # <= 0 where the rank holds only padding
            if length > 0:
                shard.narrow(self.dim, k * chunk, length).copy_(full.narrow(self.dim, first, length))
        return shard

    def slice_like(self, shard_shape: Sequence[int], full: Tensor, rank: int, size: int) -> Tensor:
        """The shard of `rank` of `size`, padded to the shape that a shard has in the model at hand."""
        return self.slice(full, rank, size, padded_size=shard_shape[self.dim] * size)

    def full_shape(self, shard_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the full parameter without padding, from that of a shard."""
        return (*shard_shape[: self.dim], self.full_size, *shard_shape[self.dim + 1 :])

    def merge(self, shards: list[Tensor]) -> Tensor:
        """The full parameter without padding, from the shards of every rank in rank order: the inverse of `slice`.

        Raises:
            ValueError: the shards differ in shape, or together do not make the full size.
        """
        shapes = {tuple(shard.shape) for shard in shards}
        if len(shapes) != 1:
            raise ValueError(f"shards of one parameter must have one shape, found {sorted(shapes)}")
        chunk, rest = divmod(shards[0].size(self.dim), self.stride)
        total = chunk * self.stride * len(shards)
        if rest or total < self.full_size or (total > self.full_size and self.stride > 1):
            raise ValueError(f"{len(shards)} shards of shape {shapes.pop()} do not make the parameter cut by {self}")
        pieces, room = [], self.full_size
        for k in range(self.stride):
            for shard in shards:
                length = min(chunk, room)
                pieces.append(shard.narrow(self.dim, k * chunk, length))
                room -= length
        return torch.cat(pieces, dim=self.dim)


def mark(parameter: Any, cut: Partition) -> None:
    """Sets the attributes by which code written for Megatron-LM knows a sharded parameter, of 2019 and of v1.1.5 on."""
    parameter.model_parallel = parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = cut.dim, cut.stride


def is_marked(parameter: Tensor) -> bool:
    """Whether a parameter has one of Megatron-LM's attributes of sharded ones. A copied parameter has lost them."""
    return any(getattr(parameter, name, False) for name in ("tensor_model_parallel", "model_parallel"))


def partitions(module: nn.Module) -> dict[str, Partition]:
    """The cut of every sharded parameter of `module`, by its full name; a parameter that is absent is replicated.

    A layer declares its own as an attribute `partitions: dict[str, Partition]` over its local parameter names. A tied
    parameter is listed under each of its names, also those of layers that declare nothing.
    """
    declared: dict[str, Partition] = {}
    for prefix, submodule in module.named_modules():
        own = getattr(submodule, "partitions", None)
        if isinstance(own, dict):
            declared.update({f"{prefix}.{name}" if prefix else name: cut for name, cut in own.items()})
    parameters = dict(module.named_parameters(remove_duplicate=False))
    cut_of = {id(parameter): declared[name] for name, parameter in parameters.items() if name in declared}
    return {name: cut_of[id(parameter)] for name, parameter in parameters.items() if id(parameter) in cut_of}
