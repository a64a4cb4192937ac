"""Tensors inside nested containers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def moved(value: Any, device: torch.device | None = None, floating: torch.dtype | None = None) -> Any:
    """`value` with the tensors in its lists, tuples and mappings on `device`, floating-point ones in the dtype `floating`."""
    return mapped(
        value, lambda tensor: tensor.to(device=device, dtype=floating if tensor.is_floating_point() else None)
    )


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` applied to each tensor in its lists, tuples and mappings; other objects stay as they are."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named tuple, which may have a constructor of its own
        return type(value)._make(mapped(item, function) for item in value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, function) for item in value)
    if isinstance(value, MutableMapping):
        result = copy.copy(value)  # keeps classes such as transformers' BatchEncoding, whose entries are attributes too
        for key in value:
            result[key] = mapped(value[key], function)
        return result
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors inside nested lists, tuples, dicts and objects with attributes (dataclasses); each object is visited once."""
    seen: dict[int, Any] = {}
    waiting = [value]  # the next one last: objects may be linked more deeply than Python recurses
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif id(value) not in seen:
            seen[id(value)] = value  # held, as the id of what is freed would come back for another object
            waiting += [part for part in reversed(_parts(value)) if type(part) not in _PLAIN]


_PLAIN = {type(None), bool, int, float, complex, str, bytes}  # most of what metadata consist of


def _parts(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, (dict, Mapping)):  # dict first, for speed
        return list(value.values())
    if callable(value):
        return []
    slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    return [getattr(value, name, None) for name in ("__dict__", *sorted(slots))]
