"""Weights in several files with an index, as transformers has them.

Like `reader` a part of the zero_to_fp32.py that lies beside every checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazero.checkpoint.tensor_file import LazyTensor


def sharded(stem: str, suffix: str, tensors: Mapping[str, LazyTensor], limit: int) -> dict[str, dict[str, LazyTensor]]:
    """By the names of files, as transformers has them, the tensors in each, in order.

    Args:
        limit: of the bytes in a file; a single larger tensor has one of its own.
    """
    shards: list[dict[str, LazyTensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.nbytes > limit:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += tensor.nbytes
    if len(shards) == 1:
        return {stem + suffix: shards[0]}
    return {f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}": shard for number, shard in enumerate(shards, 1)}


def shard_index(shards: Mapping[str, Mapping[str, LazyTensor]]) -> dict[str, dict[str, Any]]:
    """What the .index.json beside several files holds: in which of them each tensor is, and the bytes of all."""
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}
