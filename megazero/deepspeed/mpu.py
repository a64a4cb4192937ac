"""What `initialize` reads from an `mpu`: its groups, and how other libraries' layers are cut over the model-parallel ranks.

Megatron-LM's layers mark their parameters with attributes: `model_parallel`, later `tensor_model_parallel`, is true if a rank
holds only a part; `partition_dim` and `partition_stride` (v1.1.5 and later) say which part. The source tree of 2019 and 2020
gives only the size of a part, in an attribute of the layer (`output_size_per_partition`, ...).
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor, nn

from megazero import comm
from megazero.checkpoint.format import bytes_of
from megazero.json_config import DeepSpeedConfigError
from megazero.logging import ALIKE, get_logger
from megazero.mpu import groups as mpu_groups
from megazero.mpu.groups import ParallelGroups
from megazero.mpu.partition import Partition, is_marked, partitions
from megazero.zero.parameter import ReleasedParameter
from megazero.zero.units import shape_of

logger = get_logger(__name__)

# Attributes of Megatron-LM's first layers, with the dimension along which their matrices are cut.
_DIM_BY_ATTRIBUTE = {
    "output_size_per_partition": 0,
    "num_embeddings_per_partition": 0,
    "input_size_per_partition": 1,
    "embedding_dim_per_partition": 1,
}


def parallel_groups(mpu: Any) -> ParallelGroups:
    """The groups of a foreign mpu, or megazero's own. If neither exists, every rank has the whole model.

    Raises:
        DeepSpeedConfigError: the mpu does not provide its groups.
    """
    if mpu is None or hasattr(mpu, "get_groups"):
        if not mpu_groups.model_parallel_is_initialized():
            mpu_groups.initialize_model_parallel(1)
        return mpu_groups.get_groups()
    try:
        return ParallelGroups(mpu_groups.model_group_of(mpu), mpu.get_data_parallel_group())
    except AttributeError as error:
        raise DeepSpeedConfigError(
            f"mpu={mpu!r} does not say which ranks share layers and which share data: {error}. Give Megatron-LM's mpu, "
            "megazero.mpu, or any object with get_model_parallel_group() and get_data_parallel_group()."
        ) from error


def declare_cuts(model: nn.Module, groups: ParallelGroups) -> None:
    """Sets `partitions`, as megazero's layers have it, on layers with split parameters. Collective.

    Norms, clipping and checkpoints rely on it: undeclared parameters are the same on all model-parallel ranks, and saved once.

    Raises:
        DeepSpeedConfigError: a parameter is not marked as a part, but differs between model-parallel ranks.
    """
    if groups.model_parallel_size == 1:
        return
    cuts, marked = partitions(model), []
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}".lstrip(".")
            if is_marked(parameter) and full_name not in cuts:
                marked.append((full_name, module, name, parameter, _dim_of(module, parameter)))
    # A tied parameter is cut as the layer that knows its dimension says; `partitions` then applies that to its other names.
    told = {id(parameter) for *_, parameter, dim in marked if dim is not None}
    guessed = [full_name for full_name, *_, parameter, _ in marked if id(parameter) not in told]
    for full_name, module, name, parameter, dim in marked:
        if dim is not None or full_name in guessed:
            declared = getattr(module, "partitions", None)
            declared = declared if isinstance(declared, dict) else {}
            module.partitions = declared | {name: _cut(parameter, dim or 0, groups.model_parallel_size)}
    if guessed:
        logger.warning(
            "these parameters are marked as parts of larger ones, but not along which dimension they are cut: %s. Rows are "
            "assumed: checkpoints load at model-parallel size %d alone. Set parameter.partition_dim for others.",
            ", ".join(guessed),
            groups.model_parallel_size,
            extra=ALIKE,
        )
    _check_replicated(model, groups)


def _dim_of(module: nn.Module, parameter: nn.Parameter) -> int | None:
    """The dimension along which a marked parameter is cut, according to it or its layer; None if neither says."""
    dim = getattr(parameter, "partition_dim", -1)
    if dim >= 0:
        return dim
    if len(shape_of(parameter)) == 1:  # a bias is cut like the rows
        return 0
    return next((dim for name, dim in _DIM_BY_ATTRIBUTE.items() if hasattr(module, name)), None)


def _cut(parameter: nn.Parameter, dim: int, size: int) -> Partition:
    """The partition of a parameter whose `size` parts are along `dim`."""
    stride = vars(parameter).get("stride", 1)  # v1.1.5's name on a bias, hiding the tensor's method
    stride = getattr(parameter, "partition_stride", stride)
    return Partition(dim, stride, full_size=shape_of(parameter)[dim] * size)


def _check_replicated(model: nn.Module, groups: ParallelGroups) -> None:
    """Compares unmarked parameters, and buffers, with those of the other model-parallel ranks, bit for bit: one copy is saved."""
    cuts = partitions(model)
    mine = {name: _described(p) for name, p in model.named_parameters() if name not in cuts}
    saved = model.state_dict(keep_vars=True)
    mine |= {name: _described(buffer) for name, buffer in model.named_buffers() if buffer is saved.get(name)}
    if differing := comm.differing_names(mine, groups.model):
        raise DeepSpeedConfigError(
            f"{', '.join(differing)}: not the same on the {groups.model_parallel_size} model-parallel ranks, and not "
            "marked as parts of larger parameters. Set parameter.model_parallel = True and parameter.partition_dim on those that "
            "are; the others must start with the same values, so give model-parallel ranks one seed. Register buffers "
            "of a rank's own with persistent=False, and set them in the constructor."
        )


def _described(parameter: Tensor) -> tuple[Any, ...]:
    """Shape, dtype and the hash of the values, which is equal for the same bits alone."""
    # Of a parameter that `zero.Init` has sharded, the shard's: model-parallel peers have the same data-parallel rank.
    values = parameter.ds_tensor if isinstance(parameter, ReleasedParameter) else parameter.detach()
    digest = hashlib.sha256(bytes_of(values.cpu().contiguous()).data).hexdigest()
    return tuple(shape_of(parameter)), str(parameter.dtype), digest
