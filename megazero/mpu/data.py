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
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """The tensors `data[key]` of the first rank of `group`, on every rank of it.

    Two messages whatever the number of keys: all shapes, then all values. To read the shapes the host waits until the device has
    done all that it was given, and the device then idles until it is given more: say `shapes` where they are known.

    Args:
        keys: which entries to send, in the same order on every rank; others are ignored.
        data: on the first rank, tensors of any shape and device; not looked at elsewhere.
        dtype: of all of them.
        group: the model-parallel group by default.
        device: where the results are put; the device that this process computes on by default.
        shapes: of every key, the same on every rank, so that the values alone are sent.

    Returns:
        New tensors by key: views of one buffer.

    Raises:
        ValueError: on every rank alike, if on the first rank a key is missing, is no tensor, or has another dtype. With
            `shapes` on the first rank alone, and also if a tensor has another shape.
    """
    keys = list(dict.fromkeys(keys))
    group = group_or_default(group)
    # Where messages are: NCCL takes no others, and the host would read a copy before it is done.
    local = comm.local_device()
    is_source = group.rank() == 0
    given = dict(data or {}) if is_source else {}

    faults = {key: _fault(given.get(key), dtype, given, (shapes or {}).get(key)) for key in keys} if is_source else {}
    if shapes is None:
        sent = {key: given[key].shape for key, fault in faults.items() if fault is None}
        shapes = _of_first_rank(sent, keys, group, local)
        if len(shapes) < len(keys):
            faults = comm.all_gathered_objects(faults, group)[0]
    for key, fault in faults.items():
        if fault is not None:
            source = torch.distributed.get_global_rank(group, 0)
            raise ValueError(
                f"broadcast_data: {key!r} {fault} on rank {source}, the first of the model-parallel group. That rank must pass a "
                f"tensor of {dtype} for every key."
            )

    numels = [math.prod(shapes[key]) for key in keys]
    flat = torch.empty(sum(numels), dtype=dtype, device=local)
    if is_source and keys:
        torch.cat([given[key].detach().reshape(-1).to(local, non_blocking=True) for key in keys], out=flat)
    if flat.numel():
        comm.broadcast_(flat, group)
    flat = flat.to(local if device is None else device)
    return {key: part.view(tuple(shapes[key])) for key, part in zip(keys, flat.split(numels), strict=True)}


def _of_first_rank(
    shapes: Mapping[str, Sequence[int]], keys: Sequence[str], group: ProcessGroup, device: torch.device
) -> dict[str, tuple[int, ...]]:
    """The `shapes` that the first rank has, on every rank."""
    header = torch.full((len(keys), 1 + MAX_DIMS), -1)  # [dimensions, sizes...]; -1 where there is nothing to send
    for row, key in zip(header, keys, strict=True):
        if key in shapes:
            row[: 1 + len(shapes[key])] = torch.tensor([len(shapes[key]), *shapes[key]])
    if group.size() > 1:  # alone, the header need not pass through the device, which would make the host wait for it
        header = header.to(device)
        comm.broadcast_(header, group)
    rows = zip(keys, header.tolist(), strict=True)
    return {key: tuple(sizes[:dims]) for key, (dims, *sizes) in rows if dims >= 0}


def _fault(value: object, dtype: torch.dtype, given: Mapping[str, object], shape: Sequence[int] | None) -> str | None:
    """Why `value` cannot be sent, None if it can."""
    if value is None:
        return "is not in the data" + (f" (keys there: {', '.join(given)})" if given else "")
    if not isinstance(value, Tensor):
        return "is not a tensor"
    if value.dtype != dtype:
        return f"is of dtype {value.dtype}"
    if shape is not None and tuple(value.shape) != tuple(shape):
        return f"is of shape {tuple(value.shape)}, not {tuple(shape)},"
    return f"has more than {MAX_DIMS} dimensions" if value.dim() > MAX_DIMS else None
