"""What every layer with a sharded weight shares: its group, the cut of its parameters, its initial values."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

from torch import Tensor, nn

from megazero.comm import ProcessGroup
from megazero.logging import counted
from megazero.mpu.groups import group_or_default
from megazero.mpu.init import InitMethod, init_weight_
from megazero.mpu.partition import Partition, mark


class ParallelModule(nn.Module):
    """A module that belongs to a process group and says how its parameters are cut over it.

    Attributes:
        group: the ranks that hold the other shards.
        sequence_parallel: whether what it takes, or what it returns, is a slice of the sequence on each of them.
        partitions: the cut of each sharded parameter, by its name in this module.
        master_weight: the full fp32 weight as drawn, where it was asked for; else None.
        is_tile: of a linear layer: `forward` communicates nothing and returns `(product, bias)`; whoever calls it calls `enter`
            and `leave`, once for all tiles.
    """

    weight: nn.Parameter

    def __init__(self, group: ProcessGroup | None, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group_or_default(group), sequence_parallel
        self.partitions: dict[str, Partition] = {}
        self.master_weight: Tensor | None = None
        self.is_tile = False

    def _shard_size(self, argument: str, full: int, stride: int = 1) -> int:
        """What one rank holds of `full`, which is `stride` equal matrices cut one by one.

        Raises:
            ValueError: it does not come out even; the message names the layer and `argument`.
        """
        ranks = self.group.size()
        if full % (ranks * stride):
            each = f" in {stride} stacked matrices" if stride > 1 else ""
            raise ValueError(
                f"{type(self).__name__}: {argument}={full}{each} cannot be cut evenly over "
                f"{counted(ranks, 'model-parallel rank')}. Make it a multiple of {ranks * stride}, or choose another "
                "--model-parallel-size."
            )
        return full // ranks

    def _init_weight(self, init_method: InitMethod, keep_master_weight: bool = False) -> None:
        """Draws `weight`. Called last in a constructor, when parameters and partitions are in place."""
        self._mark_partitions()
        full = init_weight_(self.weight, init_method, self.partitions["weight"], self.group)
        self.master_weight = full if keep_master_weight else None

    def _mark_partitions(self) -> None:
        for name, cut in self.partitions.items():
            if (parameter := getattr(self, name)) is not None:  # a script may have taken a bias away
                mark(parameter, cut)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A copy that shares the process group, which cannot be copied; torch drops a copied parameter's attributes."""
        memo[id(self.group)] = self.group
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        new._mark_partitions()
        return new

    def __copy__(self) -> ParallelModule:
        """A shallow copy, which would call `__reduce__` otherwise."""
        new = type(self).__new__(type(self))
        new.__setstate__(self.__dict__)
        return new

    def __reduce__(self) -> NoReturn:
        """Refuses pickle, and so `torch.save` of a whole model: a shard alone does not say of which ranks it is one.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: it has a part of its weight, and belongs to a process group of this job. "
            "Save state_dict() on every rank, or engine.save_checkpoint(directory), which any number of ranks loads. "
            "copy.deepcopy() makes a copy."
        )
