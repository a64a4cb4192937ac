"""Arrays in files: read whole or not at all, from disks that fail or give less than they are asked for; written as by numpy."""

from __future__ import annotations

import builtins
import errno
import io

import numpy as np
import pytest

from data_tools.dedup_index import pairs_of
from data_tools.dedup_signatures import SignatureFiles, row_type, same_content
from data_tools.inspect_dataset import document_tokens
from data_tools.inspect_statistics import count_tokens
from data_tools.repeats import repeats_in
from megazero.data import arrays
from megazero.data.arrays import read_array, save_array
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter

ROW = np.dtype([("key", "<u8", (2,)), ("place", "<i4")])


class SlowDisk(io.FileIO):
    """Gives three bytes at a time."""

    def readinto(self, buffer):
        return super().readinto(memoryview(buffer)[:3])


class BadDisk(io.FileIO):
    """Gives 16 bytes, and then none."""

    def readinto(self, buffer):
        if self.tell() >= 16:
            raise OSError(errno.EIO, "Input/output error")
        return super().readinto(memoryview(buffer)[:16])


@pytest.fixture
def disk(monkeypatch):
    """Makes `read_array` read from a disk of this kind."""
    return lambda kind: monkeypatch.setattr(arrays, "open", lambda path, *_, **__: kind(path), raising=False)


def test_an_array_is_read_whole_or_in_part(tmp_path, disk):
    rows = np.frombuffer(bytes(range(7 * ROW.itemsize)), ROW)
    rows.tofile(path := tmp_path / "rows")
    for kind in (io.FileIO, SlowDisk):
        disk(kind)
        assert np.array_equal(read_array(path, ROW), rows)
        assert np.array_equal(read_array(path, ROW, 3, 2 * ROW.itemsize), rows[2:5])
        assert not len(read_array(path, ROW, 0)) and not len(read_array(path, ROW, offset=7 * ROW.itemsize))
        with pytest.raises(ValueError, match="rows has become shorter"):
            read_array(path, ROW, 3, 5 * ROW.itemsize)


def test_a_disk_that_fails_gives_no_array(tmp_path, disk):
    (path := tmp_path / "rows").write_bytes(bytes(7 * ROW.itemsize))
    disk(BadDisk)
    with pytest.raises(OSError, match="Input/output error: .*rows'"):
        read_array(path, ROW)


def test_whoever_reads_arrays_hears_of_a_disk_that_fails(tmp_path, disk):
    with IndexedDatasetWriter(prefix := tmp_path / "corpus", dtype="uint16") as writer:
        writer.add_document(range(100))
    corpus = IndexedDataset(prefix)
    (tmp_path / "rows").write_bytes(bytes(5 * row_type(4).itemsize))
    signatures = SignatureFiles([tmp_path / "rows"], 4)
    (tmp_path / "keys").write_bytes(bytes(160))
    (tmp_path / "digests").write_bytes(bytes(192))
    disk(BadDisk)
    for read in (
        corpus.token_range,
        lambda: count_tokens(corpus, None),
        lambda: document_tokens(corpus, 0, 100),
        lambda: list(signatures.chunks_of_file(0, 5)),
        lambda: pairs_of(signatures, same_content, tmp_path / "keys"),
        lambda: repeats_in(tmp_path / "digests"),
    ):
        with pytest.raises(OSError, match="Input/output error"):
            read()


@pytest.mark.parametrize("array", [np.arange(5), np.ones((2, 3)).T, np.empty(0, "<u4"), np.zeros(3, ROW)])
def test_arrays_are_saved_as_numpy_saves_them(tmp_path, array):
    np.save(tmp_path / "a.npy", np.ascontiguousarray(array))
    with builtins.open(tmp_path / "b.npy", "wb") as file:
        save_array(file, array)
    assert (tmp_path / "b.npy").read_bytes() == (tmp_path / "a.npy").read_bytes()
