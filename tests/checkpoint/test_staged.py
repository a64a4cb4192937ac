"""What a save in the background copies to host memory: values, and pages that go back to the system."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file

from megazero.checkpoint.tensor_file import LazyTensor, write_tensors
from megazero.checkpoint.writer import Piece, Snapshot
from megazero.nvme import pages

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def snapshot(device: str, read=lambda: torch.arange(5.0)) -> Snapshot:
    """States of two pieces, one beyond reach and one odd, and blobs of no dimension and of no element."""
    first, second = Piece("a", 0, 0, 7), Piece("b", 0, 3, 8)
    lazy = LazyTensor(torch.float32, (5,), read)
    return Snapshot(
        {
            first: {"master": torch.randn(7, device=device), "exp_avg": torch.randn(7, device=device).bfloat16()},
            second: {"master": torch.randn(9, device=device)[2:7], "exp_avg": lazy},
        },
        {"step": torch.tensor(3.0, device=device), "none": torch.empty(0), "rng": torch.arange(9, dtype=torch.uint8)},
    )


@pytest.fixture
def mapped(monkeypatch) -> list[tuple[weakref.ref, bool]]:
    """The mappings that were made, and whether they were to be pinned."""
    made, map_pages = [], pages._map

    def noted(nbytes: int, pin: bool) -> pages._Pages:
        mapping = map_pages(nbytes, pin)
        made.append((weakref.ref(mapping), pin))
        return mapping

    monkeypatch.setattr(pages, "_map", noted)
    return made


@pytest.mark.parametrize("device", DEVICES)
def test_a_staged_snapshot_is_a_copy_on_the_host_that_gives_its_memory_back(device, mapped):
    given = snapshot(device)
    want = {key: t.clone().cpu() for key, t in given.tensors().items() if isinstance(t, torch.Tensor)}
    staged = given.staged()
    for tensor in given.tensors().values():
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()  # as training does
    got = staged.tensors()
    assert got.keys() == given.tensors().keys() and torch.equal(got.pop("exp_avg/b"), torch.arange(5.0))
    for key, value in got.items():
        assert value.device.type == "cpu" and value.dtype == want[key].dtype and torch.equal(value, want[key]), key
        if device == "cuda" and given.tensors()[key].is_cuda:
            assert value.is_pinned(), key
    assert [pin for _, pin in mapped] == ([True, False] if device == "cuda" else [False]), (
        "one mapping, however many tensors"
    )
    del staged, got, value
    gc.collect()
    assert all(mapping() is None for mapping, _ in mapped)


def test_a_snapshot_that_cannot_be_read_leaves_no_memory_behind(mapped):
    def fails() -> torch.Tensor:
        raise OSError("injected")

    with pytest.raises(OSError, match="injected"):
        snapshot("cpu", fails).staged()
    gc.collect()
    assert mapped and all(mapping() is None for mapping, _ in mapped)


def test_a_tensor_may_be_written_part_by_part(tmp_path):
    def write(numel: int) -> dict[str, torch.Tensor]:
        values = torch.arange(10.0)
        parts = LazyTensor(torch.float32, (numel,), read=values.clone, parts=lambda: iter(values.split(4)))
        write_tensors(tmp_path / "file", {"before": values[:3], "parts": parts, "behind": values[:2]})
        return load_file(tmp_path / "file")

    read = write(10)
    assert torch.equal(read["parts"], torch.arange(10.0)) and read["behind"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="parts is 40 bytes, announced as 44"):
        write(11)
    assert not (tmp_path / "file").exists()
