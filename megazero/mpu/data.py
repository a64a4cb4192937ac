"""Giving one rank's batch to all ranks of its model-parallel group, so that only that rank reads the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megazero import comm
from megazero.comm import ProcessGroup
from megazero.mpu.groups import group_or_default

MAX_DIMS = 64  # torch's own limit for a tensor that is computed with


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    dtype: torch.dtype,
    group: ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """The tensors `data[key]` of the first rank of `group`, on every rank of it.

    Two messages whatever the number of keys: all shapes, then all values.

    Args:
        keys: which entries to send, in the same order on every rank; others are ignored.
        data: on the first rank, tensors of any shape and device; not looked at elsewhere.
        dtype: of all of them.
        group: the model-parallel group by default.
        device: where the results are put; the device that this process computes on by default.

    Returns:
        New tensors by key: views of one buffer.

    Raises:
        ValueError: on every rank alike, if on the first rank a key is missing, is no tensor, or has another dtype.
    """
    keys = list(dict.fromkeys(keys))
    group = group_or_default(group)
    source = torch.distributed.get_global_rank(group, 0)
    device = comm.local_device() if device is None else torch.device(device)
    is_source = group.rank() == 0
    given = dict(data or {}) if is_source else {}

    header = torch.full((len(keys), 1 + MAX_DIMS), -1)  # [dimensions, sizes...]; -1 where there is nothing to send
    faults = {key: _fault(given.get(key), dtype, given) for key in keys} if is_source else {}
    for row, (key, fault) in zip(header, faults.items(), strict=False):
        if fault is None:
            row[: 1 + given[key].dim()] = torch.tensor([given[key].dim(), *given[key].shape])
    if group.size() > 1:  # alone, the header need not pass through the device, which would make the host wait for it
        header = header.to(device)
        comm.broadcast_(header, source, group)
    shapes = {}
    for key, (dims, *sizes) in zip(keys, header.tolist(), strict=True):
        if dims < 0:
            raise ValueError(
                f"broadcast_data: {key!r} {comm.all_gathered_objects(faults.get(key), group)[0]} on rank {source}, the first of "
                f"the model-parallel group. That rank must pass a tensor of {dtype} for every key."
            )
        shapes[key] = tuple(sizes[:dims])

    numels = [math.prod(shape) for shape in shapes.values()]
    flat = torch.empty(sum(numels), dtype=dtype, device=device)
    if is_source and keys:
        torch.cat([given[key].detach().reshape(-1).to(device, non_blocking=True) for key in keys], out=flat)
    if flat.numel():
        comm.broadcast_(flat.view(torch.uint8), source, group)  # bytes: every backend sends them, whatever the dtype
    return {key: part.view(shape) for (key, shape), part in zip(shapes.items(), flat.split(numels), strict=True)}


def _fault(value: object, dtype: torch.dtype, given: Mapping[str, object]) -> str | None:
    """Why `value` cannot be sent, None if it can."""
    if value is None:
        return "is not in the data" + (f" (keys there: {', '.join(given)})" if given else "")
    if not isinstance(value, Tensor):
        return "is not a tensor"
    if value.dtype != dtype:
        return f"is of dtype {value.dtype}"
    return f"has more than {MAX_DIMS} dimensions" if value.dim() > MAX_DIMS else None
