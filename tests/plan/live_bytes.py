"""Counts the bytes of all tensors that operations have made and that are still alive, at every operation."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Within `with`, `now` and `peak` are bytes of storages made there, by type of device; those of `known` do not count."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known = [tensor.untyped_storage() for tensor in known]
        self._size_of: dict[int, tuple[str, int]] = {s._cdata: (s.device.type, s.nbytes()) for s in self._known}
        self._storage: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resized: list[torch.UntypedStorage] = []
        self._resized_to: list[int] = []
        self._has_grown = False
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._lap: Counter[str] = Counter()

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Looks at the storages of `tensors` at every operation: they are resized where no operation tells."""
        self._resized, self._resized_to = [tensor.untyped_storage() for tensor in tensors], []

    def restart(self) -> None:
        """Looks at everything, and lets `peak` begin anew."""
        self._look_at(storage for storage in [find() for find in self._storage.values()] if storage is not None)
        self.peak, self._resized_to = Counter(self.now), []

    def lap(self) -> Counter[str]:
        """The peak since the last call of this."""
        lap, self._lap = self._lap | self.now, Counter(self.now)
        return lap

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [storage.nbytes() for storage in self._resized]
        if sizes != self._resized_to:
            self._look_at(self._resized)
            self._resized_to = sizes
        for tensor in tensors_in((out,)):
            if tensor.layout == torch.strided:
                self._count(tensor.untyped_storage(), tensor.device.type)
        if self._has_grown:
            self.peak |= self.now  # the larger of each
            self._lap |= self.now
            self._has_grown = False
        return out

    def _look_at(self, storages: Iterable[torch.UntypedStorage]) -> None:
        for storage in storages:
            self._count(storage, self._size_of[storage._cdata][0])

    def _count(self, storage: torch.UntypedStorage, device: str) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._size_of:
            self._size_of[key], self._storage[key] = (device, 0), weakref.ref(storage)
            weakref.finalize(storage, self._gone, key)
        device, before = self._size_of[key]
        if nbytes != before:
            self._size_of[key] = device, nbytes
            self._has_grown |= nbytes > before
            self.now[device] += nbytes - before

    def _gone(self, key: int) -> None:
        (device, nbytes), _ = self._size_of.pop(key), self._storage.pop(key)
        self.now[device] -= nbytes


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operation, and in the lists among these."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
