"""Which tensors lie in one memory. Asked of their storages, so that it holds for tensors without any (meta, fake) as well."""

from __future__ import annotations

from torch import Tensor

from megazero.zero.layout import Segment


def storage_id(tensor: Tensor) -> int:
    """A number that tensors of one storage have in common, and no others that are alive. Stays as the storage is resized."""
    return tensor.untyped_storage()._cdata


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether both begin at the same place of one storage."""
    return storage_id(a) == storage_id(b) and a.storage_offset() == b.storage_offset()


def view_of(flat: Tensor, segment: Segment) -> Tensor:
    """The parameter-shaped view of `segment` in a flat tensor of its bucket's layout."""
    return flat[segment.start : segment.stop].view(segment.shape)
