"""Foreign torch.save files are read as data: nothing in them runs, and what is not data is refused by name."""

from __future__ import annotations

import argparse
import collections
import os
import pickle
import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from megazero.checkpoint.importers.torch_files import Record, load_torch_file, plain_data
from tests.checkpoint.importers.deepspeed_checkpoints import fake_deepspeed


class Reduced:
    """Pickles as a call of `function`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def saved(tmp_path: Path, content, **options) -> Path:
    torch.save(content, tmp_path / "file.pt", **options)
    return tmp_path / "file.pt"


CALLED = [os.system, eval, getattr, __import__, open, pickle.loads, torch.load]


def call_of(function, marker: Path) -> Reduced:
    """What pickles as a call of one of CALLED, which would leave `marker` if it can leave anything."""
    args = {
        os.system: (f"touch {marker}",),
        eval: (f"open({str(marker)!r}, 'w')",),
        getattr: (collections.OrderedDict(), "clear"),
        __import__: ("this",),
        open: (str(marker), "w"),
        pickle.loads: (pickle.dumps(Reduced(os.system, f"touch {marker}")),),
        torch.load: (str(marker),),
    }[function]
    return Reduced(function, *args)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("function", CALLED)
def test_a_call_in_a_file_does_not_run(tmp_path, function, is_zip):
    marker = tmp_path / "ran"
    path = saved(tmp_path, {"module": call_of(function, marker)}, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ValueError, match="file.pt") as error:
        load_torch_file(path)
    assert not marker.exists()
    if function is not getattr:
        assert function.__name__ in str(error.value) and "weights_only=False" in str(error.value)


def test_an_object_of_an_unknown_class_is_refused_by_name(tmp_path):
    path = saved(tmp_path, {"args": random.Random(1)})
    with pytest.raises(ValueError, match=r"file\.pt wants to run 'random\.Random', which is not data"):
        load_torch_file(path)


def test_a_damaged_file_is_named(tmp_path):
    path = saved(tmp_path, {"weight": torch.zeros(1000)})
    content = path.read_bytes()
    for size in range(0, len(content) - 100, 100):  # torch fails in several ways
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"file\.pt .*cannot be read"):
            load_torch_file(path)
    path.write_text("no torch file")
    with pytest.raises(ValueError, match=r"file\.pt \(13 bytes\) cannot be read"):
        load_torch_file(path)
    with pytest.raises(FileNotFoundError):
        load_torch_file(tmp_path / "absent.pt")


@pytest.mark.parametrize("is_zip", [True, False])
def test_data_is_read_as_it_was(tmp_path, is_zip):
    weight = torch.rand(3, 4)
    content = {
        "weight": weight,
        "tied": weight,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "size": weight.shape,
        "ordered": collections.OrderedDict(a=1),
        "state": collections.defaultdict(dict, {0: {"step": 1}}),
        "random": random.getstate(),
        "numpy": np.random.RandomState(1).get_state(),
        "scalars": [np.float64(0.5), np.int64(3), np.bool_(True)],
        "arrays": [np.arange(4, dtype=np.int32), np.ones((2, 3), order="F"), np.array(["a", "bc"]), np.ones(2, ">i2")],
        "paths": Path("a/b"),
    }
    read = load_torch_file(saved(tmp_path, content, _use_new_zipfile_serialization=is_zip))
    assert_close([read["weight"], read["parameter"]], [weight, torch.nn.Parameter(torch.ones(2))])
    assert read["tied"].data_ptr() == read["weight"].data_ptr()
    assert read["size"] == (3, 4) and read["ordered"] == {"a": 1} and read["state"] == {0: {"step": 1}}
    assert read["random"] == random.getstate() and read["paths"] == "a/b"
    assert read["numpy"][0] == "MT19937" and np.array_equal(read["numpy"][1], content["numpy"][1])
    assert read["scalars"] == content["scalars"] and isinstance(read["scalars"][0], np.float64)
    assert all(
        np.array_equal(a, b) and a.dtype == b.dtype.newbyteorder("=")
        for a, b in zip(read["arrays"], content["arrays"], strict=True)
    )


def test_the_flags_of_a_numpy_dtype_are_not_taken_from_the_file(tmp_path):
    """A dtype whose flags say that its items are pointers would make numpy follow the numbers in the file."""

    class Flagged:
        def __reduce__(self):
            return np.dtype, ("f8", False, True), (3, "<", None, None, None, -1, -1, 63)

    class Array:
        def __reduce__(self):
            rebuild = np.empty(0).__reduce__()[0]
            return rebuild, (np.ndarray, (0,), b"b"), (1, (2,), Flagged(), False, np.array([1.0, 2.0]).tobytes())

    array = plain_data(load_torch_file(saved(tmp_path, Array())), "array")
    assert type(array) is np.ndarray and array.dtype.flags == 0 and array.tolist() == [1.0, 2.0]


def test_arrays_of_objects_are_refused(tmp_path):
    with pytest.raises(ValueError, match="numpy array of dtype 'O"):
        load_torch_file(saved(tmp_path, {"array": np.array([Path("a"), None], dtype=object)}))


def test_a_path_as_python_3_13_names_its_class_is_text(tmp_path, monkeypatch):
    module = types.ModuleType("pathlib._local")
    module.PosixPath = type("PosixPath", (), {"__module__": "pathlib._local"})
    monkeypatch.setitem(sys.modules, "pathlib._local", module)
    assert load_torch_file(saved(tmp_path, Reduced(module.PosixPath, "a", "b"))) == "a/b"


def test_a_namespace_is_a_record(tmp_path):
    read = load_torch_file(saved(tmp_path, argparse.Namespace(lr=0.1, nested=argparse.Namespace(names=("a", "b")))))
    assert isinstance(read, Record) and vars(read)["lr"] == 0.1
    assert plain_data(read, "args") == {"lr": 0.1, "nested": {"names": ("a", "b")}}


def test_an_enum_is_its_value_also_as_python_3_11_2_writes_it(tmp_path):
    with fake_deepspeed() as names:
        by_value = saved(tmp_path, Reduced(names.ZeroStageEnum, 2))
        assert load_torch_file(by_value) == 2
        by_name = saved(tmp_path, Reduced(getattr, names.ZeroStageEnum, "weights"))
    assert load_torch_file(by_name) == 3


def test_what_is_no_data_is_left_out_with_a_warning(caplog):
    value = {"dtype": torch.float16, "kept": 1, "layout": torch.strided, "list": [1, torch.strided], Record(): 2}
    assert plain_data(value, "client") == {"dtype": "torch.float16", "kept": 1}
    assert "the key Record({}) of client is" in caplog.text
    assert "client['layout']" in caplog.text and "client['list'][1]" in caplog.text
