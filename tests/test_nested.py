"""Tensors inside nested containers."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megazero.nested import tensors_in


@dataclass(slots=True)
class Slotted:
    x: Tensor


class Made(dict):
    """Makes its values when they are asked for."""

    def values(self):
        return ([x] for x in super().values())


@pytest.mark.parametrize(
    "nested",
    [
        lambda tensors: [Slotted(x) for x in tensors],
        lambda tensors: [(Slotted if i % 2 else SimpleNamespace)(x=x) for i, x in enumerate(tensors)],
        lambda tensors: Made(enumerate(tensors)),
    ],
)
def test_every_tensor_is_found_once(nested):
    tensors = [torch.zeros(1) for _ in range(9)]
    value = nested(tensors)
    assert list(map(id, tensors_in([value, value]))) == list(map(id, tensors))


def test_objects_may_be_linked_more_deeply_than_python_recurses():
    tensor = torch.zeros(1)
    linked = SimpleNamespace(x=tensor)
    for _ in range(3000):
        linked = SimpleNamespace(next=linked)
    assert list(tensors_in(linked)) == [tensor]


def test_what_can_be_called_is_not_looked_into():
    assert not list(tensors_in([torch.nn.Linear(1, 1), SimpleNamespace(f=torch.nn.Linear(1, 1).forward)]))
