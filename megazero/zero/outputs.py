"""What a unit's output means for its weights: views of them that would outlive their memory, and where its backward begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from megazero.nested import mapped, tensors_in
from megazero.zero.bucket import Bucket
from megazero.zero.storage import storage_id


def without_views(output: Any, buckets: list[Bucket]) -> Any:
    """A module's output, with copies in place of views of its weights.

    Such a view would outlive the weights' memory, and reading it would crash the interpreter.

    Raises:
        RuntimeError: a view is inside an object other than a list, tuple or mapping.
    """
    storages = {storage_id(bucket.weights.flat): bucket for bucket in buckets if bucket.sharding.parameters}

    def bucket_behind(tensor: Tensor) -> Bucket | None:
        has_storage = tensor.layout is torch.strided and tensor.numel()  # a sparse tensor has none of its own
        return storages.get(storage_id(tensor)) if has_storage else None

    if not any(map(bucket_behind, tensors_in(output))):
        return output
    output = mapped(output, lambda tensor: tensor.clone() if bucket_behind(tensor) else tensor)
    for tensor in tensors_in(output):
        if (bucket := bucket_behind(tensor)) is not None:
            raise RuntimeError(
                f"Unit {bucket.name!r} returns a parameter, or a view of one (shape {tuple(tensor.shape)}), within an object. "
                "Its memory is freed when the unit has run, because parameters are sharded. Return a copy: .clone()."
            )
    return output


def makers(values: Any) -> list[tuple[Tensor, Node | None]]:
    """The tensors in `values`, those behind the views among them, and the nodes that have made all of these.

    A view's own node leaves the graph when the view is written to in place (`y = linear(x); y += x`); that of the tensor behind
    it stays. But that tensor has none, or not all of what the view depends on, if an autograd.Function has made the view.
    """
    tensors = list(tensors_in(values))
    return [(tensor, tensor.grad_fn) for tensor in (*tensors, *(t._base for t in tensors if t._base is not None))]


def first_nodes(output: Any, inputs: Sequence[tuple[Tensor, Node | None]]) -> list[Node]:
    """The nodes with which a module's backward begins: those of its output, and of inputs that it has changed in place.

    Excludes those of tensors that it passes on unchanged, such as other units' tensors in a cache, and of views of these.

    Args:
        inputs: the `makers` of its inputs before the module ran.
    """
    made_before = {id(tensor): node for tensor, node in inputs}

    def is_unchanged(tensor: Tensor | None) -> bool:
        return tensor is not None and made_before.get(id(tensor), ...) is tensor.grad_fn

    now = makers((output, [tensor for tensor, _ in inputs]))
    own = [
        node
        for tensor, node in now
        if node is not None
        and not is_unchanged(tensor)
        and (isinstance(node, BackwardCFunction) or not is_unchanged(tensor._base))
    ]
    return list(dict.fromkeys(own))
