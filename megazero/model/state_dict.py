"""Full state dicts and this rank's part of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megazero import comm, mpu
from megazero.comm import ProcessGroup


def slice_full(full: Mapping[str, Tensor], model: nn.Module, rank: int, size: int) -> dict[str, Tensor]:
    """Rank `rank`'s part, of `size` ranks, of a full (unpadded) state dict: what `model.load_state_dict` takes on that rank.

    Communicates nothing. Sharded tensors are copies, replicated ones are those of `full`.

    Args:
        model: built for a model-parallel group of `size` ranks; its parameters' shapes and cuts are used, not their values.

    Raises:
        ValueError: names are missing or unknown, or shapes differ from the model's; names the parameter, found and expected.
    """
    parameters = dict(model.named_parameters())
    missing, unknown = sorted(parameters.keys() - full.keys()), sorted(full.keys() - parameters.keys())
    if missing or unknown:
        raise ValueError(
            f"the full state dict does not match the model: missing {', '.join(missing) or 'nothing'}; "
            f"unknown {', '.join(unknown) or 'nothing'}. Build the model with the sizes that the state dict was saved with."
        )
    cuts = mpu.partitions(model)
    out = {}
    for name, parameter in parameters.items():
        cut = cuts.get(name)
        expected = tuple(parameter.shape) if cut is None else cut.full_shape(parameter.shape)
        if tuple(full[name].shape) != expected:
            raise ValueError(
                f"parameter {name}: the full state dict has shape {list(full[name].shape)}, the model expects "
                f"{list(expected)}. Build the model with the sizes that the state dict was saved with."
            )
        out[name] = full[name] if cut is None else cut.slice_like(parameter.shape, full[name], rank, size)
    return out


def merge_full(
    shards: Mapping[str, Tensor], cuts: Mapping[str, mpu.Partition], group: ProcessGroup
) -> dict[str, Tensor]:
    """The full (unpadded) tensors of which `shards` are this rank's parts: parameters, or anything of their shapes (gradients).

    A collective over `group`; the result is on every rank, in the memory of the shards' device.

    Args:
        cuts: `mpu.partitions` of the model; a name that it does not have is replicated.
    """
    return {
        name: cuts[name].merge(comm.all_gathered(shard.detach(), group)) if name in cuts else shard.detach()
        for name, shard in shards.items()
    }
