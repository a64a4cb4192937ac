"""Folders of torch.distributed.checkpoint are read piece by piece; nothing in them runs, and what is damaged is named."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as m

from megazero.checkpoint.importers.torch_dist import is_torch_dist, read_torch_dist
from tests.checkpoint.importers.test_torch_files import CALLED, call_of
from tests.checkpoint.importers.torch_dist_files import write_torch_dist


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_saves_is_read(tmp_path):
    state = {
        "a": {"weight": torch.randn(5, 3)},
        "scalar": torch.tensor(2.5),
        "half": torch.randn(4).bfloat16(),
        "step": 7,
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert is_torch_dist(tmp_path)
    found = {name: tensor.read() for name, tensor in read_torch_dist(tmp_path).items()}
    assert found.keys() == {"a.weight", "scalar", "half"}  # step is no tensor
    for name, tensor in (("a.weight", state["a"]["weight"]), ("scalar", state["scalar"]), ("half", state["half"])):
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


@pytest.mark.parametrize("cuts", [{}, {0: 1}, {0: 3}, {1: 2}, {0: 2, 2: 3}])
def test_pieces_of_any_cut_are_joined(tmp_path, cuts):
    full = torch.randn(6, 5, 7)
    write_torch_dist(tmp_path, {"x": (full, cuts)}, {"_extra_state": None})
    for _ in range(2):
        (saved,) = read_torch_dist(tmp_path).values()
        assert saved.shape == (6, 5, 7) and torch.equal(saved.read(), full)
        edit_metadata(tmp_path, list_in_another_order)


@pytest.mark.parametrize("cuts", [{0: 6}, {0: 6, 1: 2}])
def test_a_stack_gives_its_layers_and_reads_no_other(tmp_path, cuts):
    full = torch.randn(6, 4, 3)
    write_torch_dist(tmp_path, {"x": (full, cuts)}, {})
    edit_metadata(tmp_path, list_in_another_order)
    layers = read_torch_dist(tmp_path)["x"].unstacked()
    for file in {piece.path for i, layer in enumerate(layers) if i != 2 for piece in layer.pieces}:
        file.unlink()
    assert len(layers) == 6 and torch.equal(layers[2].read(), full[2])
    with pytest.raises(FileNotFoundError):
        layers[3].read()


def test_a_stack_without_one_of_its_layers_is_refused(tmp_path):
    write_torch_dist(tmp_path, {"x": (torch.randn(3, 4), {0: 3})}, {})
    edit_metadata(tmp_path, lambda contents: contents.state_dict_metadata["x"].__dict__.update(size=(10**15, 4)))
    with pytest.raises(ValueError, match=r"x of shape \[1000000000000000, 4\] is not complete: it has 3 layers"):
        read_torch_dist(tmp_path)["x"].unstacked()


def test_a_piece_of_several_layers_cannot_be_unstacked(tmp_path):
    write_torch_dist(tmp_path, {"x": (torch.randn(6, 4), {0: 3})}, {})
    with pytest.raises(ValueError, match=r"x of shape \[6, 4\] has pieces of several layers"):
        read_torch_dist(tmp_path)["x"].unstacked()


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("function", CALLED)
def test_a_call_in_the_list_of_contents_does_not_run(tmp_path, function, protocol):
    marker = tmp_path / "ran"
    contents = m.Metadata({}, planner_data=call_of(function, marker), storage_data={})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(contents, protocol))
    assert read_torch_dist(tmp_path) == {} and not marker.exists()


def edit_metadata(folder: Path, edit) -> None:
    contents = pickle.loads((folder / ".metadata").read_bytes())
    edit(contents)
    (folder / ".metadata").write_bytes(pickle.dumps(contents))


def list_in_another_order(contents):
    contents.state_dict_metadata["x"].chunks.reverse()


def lead_elsewhere(contents):
    next(iter(contents.storage_data.values())).relative_path = "../other"


def compress(contents):
    next(iter(contents.storage_data.values())).transform_descriptors = ["zstd"]


def lose_a_place(contents):
    contents.storage_data.pop(next(iter(contents.storage_data)))


def change_place(**changes):
    return lambda contents: vars(next(iter(contents.storage_data.values()))).update(changes)


def change_shape(size):
    return lambda contents: vars(contents.state_dict_metadata["x"]).update(size=size)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change_place(offset=-4), r"\[-4, \d+\] are no sizes"),
        (change_place(length="9"), "TypeError"),
        (change_shape((4, 4)), r"a piece of shape \[3, 4\] at \[3, 0\] is outside of \[4, 4\]"),
        (change_shape((6, 4, 1)), "zip"),
        (lead_elsewhere, "'../other' is no file of the folder"),
        (compress, "is compressed.*zstd"),
        (lose_a_place, "KeyError"),
    ],
)
def test_a_list_of_contents_that_cannot_be_followed_is_refused(tmp_path, edit, message):
    write_torch_dist(tmp_path, {"x": (torch.randn(6, 4), {0: 2})}, {})
    edit_metadata(tmp_path, edit)
    with pytest.raises(ValueError, match=f"{tmp_path}/.metadata cannot be read.*{message}.*copy the folder again"):
        read_torch_dist(tmp_path)


ENDLESS = b"\x80\x04\x95" + (2**62).to_bytes(8, "little")  # a pickle that announces so many bytes


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", ENDLESS, pickle.dumps({}), pickle.dumps(m.Metadata({}))[:-9]])
def test_another_file_in_place_of_the_list_of_contents_is_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/.metadata cannot be read"):
        read_torch_dist(tmp_path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def exchange(path: Path) -> None:
    path.write_bytes((path.parent / "__0_0.distcp").read_bytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "__1_0.distcp, .* cannot be read as a torch file"),
        (exchange, r"__1_0.distcp has no tensor of shape \[2, 4\] at byte 0"),
    ],
)
def test_a_damaged_piece_is_named(tmp_path, damage, message):
    write_torch_dist(tmp_path, {"x": (torch.randn(5, 4), {0: 2})}, {})
    damage(tmp_path / "__1_0.distcp")
    with pytest.raises(ValueError, match=message):
        read_torch_dist(tmp_path)["x"].read()


@pytest.mark.parametrize(("rows", "cuts", "left"), [(6, {0: 2}, 1), (0, {}, 0)])
def test_a_tensor_without_one_of_its_pieces_is_refused(tmp_path, rows, cuts, left):
    write_torch_dist(tmp_path, {"x": (torch.randn(rows, 4), cuts)}, {})
    edit_metadata(tmp_path, lambda contents: contents.state_dict_metadata["x"].chunks.pop())
    with pytest.raises(ValueError, match=rf"x of shape \[{rows}, 4\] is not complete: it has {left} pieces"):
        read_torch_dist(tmp_path)["x"].read()


def test_pieces_that_overlap_are_refused_instead_of_leaving_a_gap(tmp_path):
    write_torch_dist(tmp_path, {"x": (torch.randn(6, 4), {0: 3})}, {})

    def move(contents):
        moved, index = contents.state_dict_metadata["x"].chunks[2], m.MetadataIndex("x", (3, 0), 2)
        contents.storage_data[index] = contents.storage_data.pop(m.MetadataIndex("x", (4, 0), 2))
        moved.offsets = index.offset

    edit_metadata(tmp_path, move)
    with pytest.raises(ValueError, match=r"x of shape \[6, 4\] is not complete: it has 3 pieces"):
        read_torch_dist(tmp_path)["x"].read()


@pytest.mark.parametrize("place", [{"offset": 2**70}, {"offset": 8, "length": 2**62}])
def test_a_place_that_the_file_has_not_is_named_and_asks_for_no_memory(tmp_path, place):
    write_torch_dist(tmp_path, {"x": (torch.randn(6, 4), {})}, {})
    edit_metadata(tmp_path, change_place(**place))
    with pytest.raises(ValueError, match=f"__0_0.distcp, .* from byte {place['offset']} on, .*cannot be read"):
        read_torch_dist(tmp_path)["x"].read()


def test_a_copy_without_the_hidden_list_of_contents_is_told_what_is_missing(tmp_path):
    write_torch_dist(tmp_path, {"x": (torch.randn(6, 4), {})}, {})
    (tmp_path / ".metadata").unlink()
    assert is_torch_dist(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"\.metadata"):
        read_torch_dist(tmp_path)
