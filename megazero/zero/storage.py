"""Which tensors lie in one memory, asked of their storages, so that meta and fake ones may be; and what is a parameter's part."""

from __future__ import annotations

from torch import Tensor

from megazero.zero.layout import Segment


def storage_id(tensor: Tensor) -> int:
    """A number that tensors of one storage have in common, and no others that are alive. Stays as the storage is resized."""
    return tensor.untyped_storage()._cdata


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether both begin at the same place of one storage."""
    return storage_id(a) == storage_id(b) and a.storage_offset() == b.storage_offset()


def part_of(values: Tensor, start: int, segment: Segment) -> tuple[Tensor, slice]:
    """What a bucket's elements from `start` on hold of a parameter: a 1-D view, and where it lies in the flattened parameter."""
    low, high = segment.clip(start, start + values.numel())
    return values[low - start : high - start], slice(low - segment.start, high - segment.start)


def view_of(flat: Tensor, segment: Segment) -> Tensor:
    """The parameter-shaped view of `segment` in a flat tensor of its bucket's layout."""
    return flat[segment.start : segment.stop].view(segment.shape)
