"""A client state comes back as it was, types included, from strict JSON and tensors; what cannot is refused by name."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import json
import pathlib
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from megazero.checkpoint.plain import decode, encode


def round_trip(value):
    """Through the bytes of a JSON file and of a safetensors file, as in a checkpoint."""
    encoded, tensors = encode(value)
    assert list(tensors) == [f"client/{i}" for i in range(len(tensors))]
    text = json.dumps(encoded, allow_nan=False, ensure_ascii=False).encode()
    return decode(json.loads(text), load(save({name: tensor.clone() for name, tensor in tensors.items()})))


def in_order(key) -> str:
    """A hashable's repr that does not depend on the order within sets."""
    if isinstance(key, (tuple, frozenset)):
        items = map(in_order, key)
        return f"{type(key)}{list(items) if isinstance(key, tuple) else sorted(items)}"
    return repr(key)


def assert_same(got, want):
    """Equal values of equal types, at every depth; nan equals nan, and 0.0 is not -0.0."""
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.reshape(-1).view(torch.uint8).equal(want.detach().reshape(-1).view(torch.uint8))
    elif isinstance(want, np.generic):
        assert (got.dtype, repr(got)) == (want.dtype, repr(want))  # of a nan's bits the sign is not kept
    elif isinstance(want, np.ndarray):
        assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())
    elif isinstance(want, dict):
        assert len(got) == len(want)
        for (key, item), (other_key, other) in zip(got.items(), want.items(), strict=True):
            assert_same(key, other_key)
            assert_same(item, other)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for item, other in zip(got, want, strict=True):
            assert_same(item, other)
    elif isinstance(want, (set, frozenset)):
        assert sorted(map(in_order, got)) == sorted(map(in_order, want))
    elif isinstance(want, (float, complex)):
        assert repr(got) == repr(want)
    else:
        assert got == want


texts = st.text(st.characters(exclude_categories=())) | st.sampled_from(["$", "items", "name", "client/0"])
plain_keys = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=3)
keys = st.recursive(plain_keys, lambda k: st.tuples(k, k) | st.frozensets(k, max_size=2), max_leaves=3)
numpy_scalars = st.one_of(
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.just(np.True_),
)
shapes = st.sampled_from([(), (0,), (3,), (2, 0), (2, 3)])
dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.complex128, torch.float8_e5m2]
tensors = st.builds(lambda shape, dtype: (torch.rand(shape) * 3).to(dtype), shapes, st.sampled_from(dtypes))
codes = st.sampled_from(["<f4", ">i4", "<u2", "?", "<c16", "<u4", "<f2", "|i1"])
arrays = st.builds(lambda shape, code: (np.random.rand(*shape) * 3 * np.ones(shape)).astype(code), shapes, codes)
states = st.recursive(
    keys | numpy_scalars | tensors | arrays | st.complex_numbers(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(texts, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.sets(keys, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(states)
def test_every_plain_state_comes_back_as_it_was(state):
    assert_same(round_trip(state), state)


def test_real_states():
    state = {
        "epoch": 3,
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "legacy-free": np.random.default_rng(7).bit_generator.state,
        "torch": torch.get_rng_state(),
        "best": float("inf"),
        "history": {10: (2.5, float("nan")), (1, "a"): -0.0},
        "args": vars(argparse.Namespace(lr=1e-3, betas=(0.9, 0.95), layers=[1, 2], none=None)),
        "milestones": torch.optim.lr_scheduler.MultiStepLR(
            torch.optim.SGD([torch.zeros(1)], lr=1.0), [2, 2, 5]
        ).state_dict()["milestones"],
        "hash": 2**200 - 1,
        "digits": -(10**5000),
        "file": {"caf\udce9": "\ud83d\ude00"},
    }
    got = round_trip(state)
    assert_same(got, state)
    random.setstate(got["random"])
    np.random.set_state(got["numpy"])
    torch.set_rng_state(got["torch"])


@pytest.mark.parametrize(
    "marker",
    [
        {"$": "tuple", "items": [1]},
        {"$": "tensor", "dtype": "float32", "shape": [1], "name": "client/0"},
        {"$": "dict", "items": [["$", {"$": None}]]},
        {"$": 1},
        {1: {"$": "float", "value": "nan"}},
    ],
)
def test_a_dict_that_looks_like_the_encoding_is_a_dict(marker):
    assert_same(round_trip(marker), marker)
    assert_same(round_trip(encode(marker)[0]), encode(marker)[0])


def test_tensors_come_back_plain_and_on_the_cpu():
    module = nn.Linear(3, 2)
    got = round_trip(
        {"state": module.state_dict(), "parameter": module.weight, "strided": torch.arange(6).view(2, 3).t()}
    )
    assert type(got["state"]) is collections.OrderedDict and got["state"]["weight"].equal(module.weight)
    assert type(got["parameter"]) is torch.Tensor and not got["parameter"].requires_grad
    assert got["strided"].equal(torch.arange(6).view(2, 3).t())
    assert round_trip(torch.tensor([1 + 2j]).conj()).equal(torch.tensor([1 - 2j]))
    assert_same(round_trip(module.weight.shape), (2, 3))
    frozen = np.broadcast_to(np.float32(1.5), (2, 2))
    assert_same(round_trip(frozen), np.full((2, 2), 1.5, np.float32))


def test_equal_sets_are_equal_files():
    assert encode({"b", "a", "c"}) == encode({"c", "b", "a"}) == ({"$": "set", "items": ["a", "b", "c"]}, {})


class Color(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int = 1


Pair = collections.namedtuple("Pair", "a b")

REFUSED = [
    (argparse.Namespace(a=1), "an argparse.Namespace", "vars"),
    (Color.RED, "a tests.checkpoint.test_plain.Color", ".value"),
    (Point(), "Point", "asdict"),
    (Pair(1, 2), "Pair", "tuple"),
    (collections.defaultdict(list), "collections.defaultdict", "dict"),
    (collections.UserDict(a=1), "collections.UserDict", "dict(...)"),  # as omegaconf's DictConfig and ListConfig
    (collections.UserList([1]), "collections.UserList", "list(...)"),
    (pathlib.Path("a"), "Path", "str"),
    (torch.float16, "torch.dtype", "str"),
    (torch.device("cpu"), "torch.device", "str"),
    (nn.Linear(1, 1), "Linear", "state_dict"),
    (print, "a builtin_function_or_method", "leave it out"),
    (int, "a type", "leave it out"),
    (object(), "an object", "pass"),
    (bytearray(b"a"), "a bytearray", "bytes"),
    (np.array([None]), "numpy.ndarray", "numbers"),
    (np.array("text"), "numpy.ndarray", "numbers"),
    (np.longdouble(1), "numpy.longdouble", "numbers"),
    (np.ma.array([1]), "MaskedArray", "numbers"),
    (torch.zeros(2).to_sparse(), "sparse", "dense"),
    (torch.zeros(2, device="meta"), "meta", "dense"),
]


@pytest.mark.parametrize("value, found, advice", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_anything_else_is_refused_with_its_place(value, found, advice):
    with pytest.raises(TypeError) as error:
        encode({"a": [1, ({"b": value},)]})
    assert str(error.value).startswith("client_state['a'][1][0]['b'] is a")
    assert found in str(error.value) and advice in str(error.value)


def test_a_refused_key_has_a_place_too():
    with pytest.raises(TypeError, match=r"^the key <Color.RED: 1> of saved\['x'\] is a"):
        encode({"x": {Color.RED: 1}}, path="saved")


def test_a_container_that_holds_itself_is_refused_and_one_that_is_there_twice_is_not():
    loop: list = [1]
    loop.append({"again": (loop,)})
    with pytest.raises(ValueError, match=r"client_state\[1\]\['again'\]\[0\] is a list that holds itself"):
        encode(loop)
    twice = [1, 2]
    assert round_trip([twice, twice]) == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    "damaged",
    [
        {"$": "code", "value": "print()"},
        {"$": "tensor", "dtype": "load", "shape": [], "name": "client/0"},
        {"$": "tensor", "dtype": "uint16", "shape": [99], "name": "client/0"},
        {"$": "tensor", "dtype": "float32", "shape": [1], "name": "client/9"},
        {"$": "numpy", "dtype": "O", "shape": [1], "name": "client/0"},
        {"$": "numpy_scalar", "dtype": "V3", "value": 1},
        {"$": "numpy_scalar", "dtype": "u1", "value": 300},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "int", "value": 3},
        {"$": "bytes", "value": "?"},
        {"$": ["tuple"]},
        {"$": "tuple"},
    ],
)
def test_what_encode_has_not_written_is_a_value_error(damaged):
    with pytest.raises(ValueError, match="client state"):
        decode([damaged], {"client/0": torch.zeros(3)})
