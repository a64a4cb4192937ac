"""Initial values that do not depend on how many ranks a layer is cut over.

Every rank draws the full weight on the CPU in fp32, keeps its own slice and drops the rest: fan-in and fan-out are those of
the full shape, and the numbers are those of one rank. Two things would still leak the model-parallel size, or the device,
into later draws; both are closed here. A vocabulary is drawn WITHOUT its padding, whose size depends on the number of ranks.
And a weight has a random stream of its own: only its seed, one int64, is taken from the default CPU generator, so that the
generator stands at the same place afterwards whatever was drawn, also on the meta device where nothing is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megazero.comm import ProcessGroup
from megazero.mpu.partition import Partition

InitMethod = Callable[[Tensor], object]  # fills its argument in place, as the functions of torch.nn.init do


def init_weight_(
    weight: Tensor, init_method: InitMethod, partition: Partition | None = None, group: ProcessGroup | None = None
) -> Tensor | None:
    """Fills `weight` with this rank's slice of what `init_method` draws for the full weight.

    Collective in the sense that every rank must call it in the same order with the same default CPU generator; it
    communicates nothing. For a moment the full weight exists in fp32 on the CPU, one weight at a time.

    Args:
        weight: the parameter, any dtype and device; on the meta device only the generator advances.
        partition: how the full weight is cut over `group`; None for a replicated weight.
        group: the ranks that hold the shards; needed with `partition`.

    Returns:
        The full fp32 weight without padding, which most callers drop at once; None on the meta device.
    """
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    if weight.is_meta:
        return None
    shape = weight.shape if partition is None else partition.full_shape(weight.shape)
    full = torch.empty(shape, dtype=torch.float32, device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reset the generators of CUDA devices too
        init_method(full)
    local = full
    if partition is not None and group is not None:
        local = partition.slice_like(weight.shape, full, group.rank(), group.size())
    with torch.no_grad():
        weight.copy_(local)
    return full
