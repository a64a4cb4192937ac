"""Which tensors share memory, judged by their storages, so that it works for meta and fake tensors; and a parameter's part."""

from __future__ import annotations

from torch import Tensor

from megazero.zero.layout import Segment


def storage_id(tensor: Tensor) -> int:
    """A number shared by all live tensors of one storage and by no others. It stays the same when the storage is resized."""
    return tensor.untyped_storage()._cdata


def is_same_memory(a: Tensor, b: Tensor, start: int = 0) -> bool:
    """Whether `a` begins in one storage where `b` does, or `start` elements behind that."""
    return storage_id(a) == storage_id(b) and a.storage_offset() == b.storage_offset() + start


def is_same_view(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same elements of one storage, read in the same way."""
    return is_same_memory(a, b) and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def part_of(values: Tensor, start: int, segment: Segment) -> tuple[Tensor, slice]:
    """A parameter's part of a bucket's elements from `start` on: a 1-D view, and where it lies in the flattened parameter."""
    low, high = segment.clip(start, start + values.numel())
    return values[low - start : high - start], slice(low - segment.start, high - segment.start)


def view_of(flat: Tensor, segment: Segment) -> Tensor:
    """The parameter-shaped view of `segment` in a flat tensor of its bucket's layout."""
    return flat.as_strided(segment.shape, segment.strides, flat.storage_offset() + segment.start)
