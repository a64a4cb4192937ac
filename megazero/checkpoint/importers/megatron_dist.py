"""Reads GPT-2 checkpoints of megatron-core in Megatron-LM's format "torch_dist", its default since 2024.

    DIR/iter_0000500/.metadata, *.distcp    tensors in full, see torch_dist.py
    DIR/iter_0000500/common.pt              arguments, the iteration, and the optimizer's groups

Layers that are alike are one tensor: "decoder.layers.mlp.linear_fc1.bias" is [layers, 4h]. The optimizer's tensors have the
parameter's shape, and its name after theirs: "optimizer.state.exp_avg.decoder. ...". The distributed optimizer saves them so with
--dist-ckpt-optim-fully-reshardable; otherwise it saves its buffers, which only it can read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.importers.megatron_files import MegatronFiles, optimizer_or_none, our_name
from megazero.checkpoint.importers.megatron_optimizer import MegatronOptimizer, read_common
from megazero.checkpoint.importers.torch_dist import SavedTensor, read_torch_dist
from megazero.checkpoint.importers.torch_files import load_torch_file
from megazero.zero.bucket import MASTER

_WEIGHT = "weight"
# With 16-bit parameters, the fp32 copies: of the distributed optimizer, and of the other.
_STATES = {"param": MASTER, "fp32_param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_STATE = re.compile(rf"optimizer\.state\.({'|'.join(_STATES)})\.(.*)")
_STACK = re.compile(r"(.*\.layers\.)([a-z].*)")
_QKV_VERSION = 3.0


def read_megatron_dist(folder: Path) -> MegatronFiles:
    """The checkpoint, as one rank that holds everything.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged, or not Megatron-LM's.
    """
    common = load_torch_file(folder / "common.pt")
    if not isinstance(common, dict):
        raise ValueError(f"{folder / 'common.pt'} holds no dict: it is not Megatron-LM's.")
    found = _by_state(read_torch_dist(folder))
    weights = found.pop(_WEIGHT, {})
    optimizer = optimizer_or_none(folder, common, lambda: _optimizer(common["optimizer"], found, weights))
    states = {name: {MASTER: tensor} for name, tensor in weights.items()}
    if optimizer is not None:
        states = {name: kept | {state: found[state][name] for state in found} for name, kept in states.items()}
    return MegatronFiles(
        shards=[{name: torch.empty(tensor.shape, device="meta") for name, tensor in weights.items()}],
        states=[{name: {key: x.read for key, x in tensors.items()} for name, tensors in states.items()}],
        common={**common, "checkpoint_version": _QKV_VERSION},
        optimizer=optimizer,
    )


def _by_state(saved: Mapping[str, SavedTensor]) -> dict[str, dict[str, SavedTensor]]:
    """By state ("weight", or the optimizer's) and our name of the parameter."""
    found: dict[str, dict[str, SavedTensor]] = defaultdict(dict)
    for key, tensor in saved.items():
        match = _STATE.fullmatch(key)
        if match is None and key.startswith("optimizer."):
            continue
        state, name = (_STATES[match[1]], match[2]) if match else (_WEIGHT, key)
        for layer_name, layer in _unstacked(name, tensor):
            found[state][our_name(layer_name)] = layer
    return found


def _unstacked(name: str, tensor: SavedTensor) -> Iterator[tuple[str, SavedTensor]]:
    if match := _STACK.fullmatch(name):
        for i, layer in enumerate(tensor.unstacked()):
            yield f"{match[1]}{i}.{match[2]}", layer
    else:
        yield name, tensor


def _optimizer(
    saved: Any, found: Mapping[str, Mapping[str, SavedTensor]], weights: Mapping[str, SavedTensor]
) -> MegatronOptimizer:
    if not set(_STATES.values()) - {MASTER} <= found.keys():
        if "param_state_sharding_type" in saved:
            raise ValueError("buffers of a distributed optimizer that ran without --dist-ckpt-optim-fully-reshardable")
        raise ValueError("Adam's moments are not there: another optimizer's, or it has not taken a step")
    for state, tensors in found.items():
        if {name: x.shape for name, x in tensors.items()} != {name: x.shape for name, x in weights.items()}:
            raise ValueError(f"{state} has not the model's parameters or shapes")
    return read_common(saved)
