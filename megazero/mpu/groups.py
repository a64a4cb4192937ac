"""Which ranks share a model and which share the data: the process groups of tensor and data parallelism.

World of 8 ranks, model-parallel size 2: model-parallel groups are neighbours (they talk most, so they share a node),
data-parallel groups are strided.

    model [0 1] [2 3] [4 5] [6 7]        data [0 2 4 6] [1 3 5 7]

`ParallelGroups` is the object that library code is given. Megatron's `get_model_parallel_*` functions read the one that
`initialize_model_parallel` made last: with those that it has made before, the only state of this package besides the RNG tracker
and the channels of `sequence_mappings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megazero.comm import ProcessGroup, differing_names, even_out_groups, is_destroyed, timeout_of, world
from megazero.logging import counted


@dataclass(frozen=True)
class ParallelGroups:
    """The two groups that this rank belongs to.

    Attributes:
        model: ranks that hold shards of the same layers and see the same data.
        data: ranks that hold the same shards and see different data.
    """

    model: ProcessGroup
    data: ProcessGroup

    @property
    def model_parallel_size(self) -> int:
        """Number of shards that a layer is cut into."""
        return self.model.size()

    @property
    def model_parallel_rank(self) -> int:
        """Which of those shards this rank holds."""
        return self.model.rank()

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the model."""
        return self.data.size()

    @property
    def data_parallel_rank(self) -> int:
        """Which of those replicas this rank is part of."""
        return self.data.rank()


_groups: ParallelGroups | None = None
# All that were made, by world, size and time limit: torch keeps a group, with threads and sockets, as long as the world.
_made: dict[tuple[ProcessGroup, int, float], ParallelGroups] = {}


def check_model_parallel_size(world_size: int, size: int, allowed: Sequence[int] | None = None) -> None:
    """Returns if `size` model-parallel ranks fit into `world_size` ranks; needs no process group.

    Args:
        allowed: sizes that the model can be cut over, for the advice; all by default.

    Raises:
        ValueError: `size` is no integer, or not a divisor of `world_size`.
    """
    if type(size) is not int:
        raise ValueError(f"the model-parallel size must be an integer, got {size!r}.")
    if size < 1 or world_size % size:
        sizes = ", ".join(str(d) for d in allowed or range(1, world_size + 1) if world_size % d == 0)
        raise ValueError(
            f"--model-parallel-size {size} does not divide the world of {counted(world_size, 'rank')} into equal groups. "
            f"Use {sizes}, or start a multiple of the model-parallel size (torchrun --nproc-per-node)."
        )


def initialize_model_parallel(model_parallel_size: int, *, timeout_s: float | None = None) -> ParallelGroups:
    """Makes the groups of every rank and returns this rank's. Every rank of the world calls it, with the same size.

    Args:
        model_parallel_size: ranks that one copy of the model is cut over.
        timeout_s: seconds after which a collective of these groups that some rank never entered raises (default: the world's).

    Raises:
        RuntimeError: torch.distributed is not initialised, or the groups exist already.
        ValueError: the size does not divide the world, or is not the same on every rank.
    """
    global _groups
    if not dist.is_initialized():
        raise RuntimeError(
            "initialize_model_parallel needs torch.distributed. Call megazero.comm.init_distributed() "
            "(or torch.distributed.init_process_group) first."
        )
    if model_parallel_is_initialized():
        raise RuntimeError(
            f"initialize_model_parallel({model_parallel_size}): the groups exist already, with model-parallel size "
            f"{get_groups().model_parallel_size}. get_groups() returns them. Call destroy_model_parallel() first to change it."
        )
    world_size = dist.get_world_size()
    if differing_names({"size": repr(model_parallel_size)}, world()):
        raise ValueError(
            f"initialize_model_parallel({model_parallel_size}) on rank {dist.get_rank()}, and another size on another rank. Give "
            "every rank the same."
        )
    check_model_parallel_size(world_size, model_parallel_size)
    for key, groups in list(_made.items()):
        if any(is_destroyed(group) for group in (key[0], groups.model, groups.data)):
            del _made[key]
    timeout_s = timeout_of(world()) if timeout_s is None else timeout_s
    key = (world(), model_parallel_size, timeout_s)
    if key not in _made:
        _made[key] = _new_groups(world_size, model_parallel_size, timeout_s)
    _groups = _made[key]
    return _groups


def groups_of_size(model_parallel_size: int, *, timeout_s: float) -> ParallelGroups:
    """The groups that exist, with their own time limit, if they are of this size; else as `initialize_model_parallel`."""
    if model_parallel_is_initialized() and get_groups().model_parallel_size == model_parallel_size:
        return get_groups()
    return initialize_model_parallel(model_parallel_size, timeout_s=timeout_s)


def _new_groups(world_size: int, model_parallel_size: int, timeout_s: float) -> ParallelGroups:
    first = dist.get_rank() // model_parallel_size * model_parallel_size
    neighbours = range(first, first + model_parallel_size)
    strided = range(dist.get_rank() % model_parallel_size, world_size, model_parallel_size)
    even_out_groups(world())
    data = _new_group(strided, "data_parallel", timeout_s)
    model = _new_group(neighbours, "model_parallel", timeout_s)
    return ParallelGroups(model, data)


def _new_group(ranks: Sequence[int], name: str, timeout_s: float) -> ProcessGroup:
    """This rank's group: the world itself if that has the same ranks and time limit.

    On NCCL a group takes some 500 MB of each GPU (NVIDIA/nccl#964), if only for the loss of an evaluation.

    A collective over the world, whose other ranks make theirs at the same time, each its own alone. On NCCL that is one split
    of the world's communicator into all of them. Where every rank made all groups it would be a split for each, which the whole
    world enters: more than a hundred for a thousand ranks.
    """
    if len(ranks) == dist.get_world_size() and timeout_of(world()) == timeout_s:
        return world()
    return dist.new_group(
        list(ranks), timeout=timedelta(seconds=timeout_s), group_desc=name, use_local_synchronization=True
    )


def model_group_of(mpu: Any) -> ProcessGroup:
    """The ranks that split layers, of any Megatron's mpu: in one with pipelines `get_model_parallel_group` is wider."""
    name = "tensor_model" if hasattr(mpu, "get_tensor_model_parallel_group") else "model"
    return getattr(mpu, f"get_{name}_parallel_group")()


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` has been called and not been undone, nor its groups destroyed with their world."""
    if _groups is None or torch.compiler.is_compiling():  # torch 2.8 cannot trace what follows
        return _groups is not None
    return not any(is_destroyed(group) for group in (_groups.model, _groups.data))


def is_unitialized() -> bool:
    """Whether there are no groups yet: Megatron-LM's own spelling (v1.1.5 and later)."""
    return not model_parallel_is_initialized()


def destroy_model_parallel() -> None:
    """Forgets the groups. Layers that were built with them keep working, and groups of the same size will be the same ones."""
    global _groups
    _groups = None


def get_groups() -> ParallelGroups:
    """The groups of this rank.

    Raises:
        RuntimeError: `initialize_model_parallel` has not been called in this world.
    """
    if _groups is None or not model_parallel_is_initialized():
        raise RuntimeError(
            "the model-parallel groups do not exist. Call megazero.mpu.initialize_model_parallel(model_parallel_size) "
            "once on every rank, after torch.distributed is initialised."
        )
    return _groups


def get_model_parallel_group() -> ProcessGroup:
    """The group whose ranks hold shards of the same layers."""
    return get_groups().model


def group_or_default(group: ProcessGroup | None) -> ProcessGroup:
    """`group`, or this rank's model-parallel group where it is None."""
    return get_groups().model if group is None else group


def get_data_parallel_group() -> ProcessGroup:
    """The group whose ranks hold the same shards."""
    return get_groups().data


def get_model_parallel_rank() -> int:
    """This rank's position in its model-parallel group."""
    return get_groups().model_parallel_rank


def get_data_parallel_rank() -> int:
    """This rank's position in its data-parallel group."""
    return get_groups().data_parallel_rank


def get_model_parallel_world_size() -> int:
    """Number of ranks in the model-parallel group."""
    return get_groups().model_parallel_size


def get_data_parallel_world_size() -> int:
    """Number of ranks in the data-parallel group."""
    return get_groups().data_parallel_size


def get_model_parallel_src_rank() -> int:
    """The global rank that is first in this rank's model-parallel group: the source of its broadcasts."""
    return dist.get_global_rank(get_groups().model, 0)


def get_data_parallel_src_rank() -> int:
    """The global rank that is first in this rank's data-parallel group: the source of broadcasts to its replicas."""
    return dist.get_global_rank(get_groups().data, 0)


# The words that Megatron-core and DeepSpeed use for the same functions.
get_tensor_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_src_rank = get_model_parallel_src_rank
