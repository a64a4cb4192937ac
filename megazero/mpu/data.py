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

# In place of a number of dimensions: why the first rank has nothing to send. Every rank gets to know, and raises.
_MISSING, _NOT_A_TENSOR, _WRONG_DTYPE, _TOO_MANY_DIMS = -1, -2, -3, -4


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

    header = torch.zeros(len(keys), 1 + MAX_DIMS, dtype=torch.int64)
    if is_source:
        for row, key in zip(header, keys, strict=True):
            _describe(row, given.get(key), dtype)
    if group.size() > 1:  # alone, the header need not pass through the device, which would make the host wait for it
        header = header.to(device)
        comm.broadcast_(header, source, group)
    shapes = {key: _shape(key, row, dtype, source, given) for key, row in zip(keys, header.tolist(), strict=True)}

    numels = [math.prod(shape) for shape in shapes.values()]
    flat = torch.empty(sum(numels), dtype=dtype, device=device)
    if is_source and keys:
        torch.cat([given[key].detach().reshape(-1).to(device, non_blocking=True) for key in keys], out=flat)
    if flat.numel():
        comm.broadcast_(flat.view(torch.uint8), source, group)  # bytes: every backend sends them, whatever the dtype
    return {key: part.view(shape) for (key, shape), part in zip(shapes.items(), flat.split(numels), strict=True)}


def _describe(row: Tensor, value: object, dtype: torch.dtype) -> None:
    """Writes [number of dimensions, sizes...] of `value` into `row`, or a fault in place of the number."""
    if value is None:
        row[0] = _MISSING
    elif not isinstance(value, Tensor):
        row[0] = _NOT_A_TENSOR
    elif value.dtype != dtype:
        row[0] = _WRONG_DTYPE
    elif value.dim() > MAX_DIMS:
        row[0] = _TOO_MANY_DIMS
    else:
        row[0] = value.dim()
        row[1 : 1 + value.dim()] = torch.tensor(value.shape, dtype=torch.int64)


def _shape(key: str, row: list[int], dtype: torch.dtype, source: int, given: Mapping[str, object]) -> tuple[int, ...]:
    dims = row[0]
    if dims >= 0:
        return tuple(row[1 : 1 + dims])
    found = f" (keys there: {', '.join(given)})" if given else ""
    value = given.get(key)
    what = {
        _MISSING: f"is not in the data{found}",
        _NOT_A_TENSOR: "is not a tensor",
        _WRONG_DTYPE: f"is of dtype {value.dtype}" if isinstance(value, Tensor) else "is of another dtype",
        _TOO_MANY_DIMS: f"has more than {MAX_DIMS} dimensions",
    }[dims]
    raise ValueError(
        f"broadcast_data: {key!r} {what} on rank {source}, the first of the model-parallel group. "
        f"That rank must pass a tensor of {dtype} for every key."
    )
