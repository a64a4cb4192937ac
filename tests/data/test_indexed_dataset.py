"""Indexed files: byte for byte Megatron's format, whole or absent, and clear errors about anything else."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import re
import resource
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data import indexed_dataset, mmidx
from megazero.data.arrays import read_array
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, published
from megazero.data.mmidx import token_dtype, write_index
from megazero.data.sidecar import Sidecar, read_sidecar, sidecar_path, write_sidecar
from tests.bad_disks import fails, full

# Three sequences in two documents, written out by hand from the description of the format.
TOKENS = [[1, 2, 65535], [7], [9, 10]]
GOLDEN_BIN = struct.pack("<6H", 1, 2, 65535, 7, 9, 10)
GOLDEN_IDX = (
    b"MMIDIDX\x00\x00"
    + struct.pack("<Q", 1)  # version
    + struct.pack("<B", 8)  # uint16
    + struct.pack("<Q", 3)  # sequences
    + struct.pack("<Q", 3)  # entries of doc_idx
    + struct.pack("<3i", 3, 1, 2)  # sizes in tokens
    + struct.pack("<3q", 0, 6, 8)  # pointers in bytes
    + struct.pack("<3q", 0, 2, 3)  # documents
)


@pytest.fixture
def golden(tmp_path):
    (tmp_path / "g.bin").write_bytes(GOLDEN_BIN)
    (tmp_path / "g.idx").write_bytes(GOLDEN_IDX)
    return tmp_path / "g"


@pytest.mark.parametrize("which", ["idx", "bin"])
def test_a_file_that_its_file_system_cannot_map_is_named(golden, monkeypatch, which):
    """As on a FUSE mount with direct_io."""
    map_file, left = mmap.mmap, ["idx", "bin"]

    def mapped(*arguments, **options):
        if left.pop(0) == which:
            raise OSError(errno.ENODEV, "No such device")
        return map_file(*arguments, **options)

    monkeypatch.setattr(mmap, "mmap", mapped)
    with pytest.raises(
        OSError, match=rf"could not map .*g\.{which} into memory: No such device\. Its file system must"
    ):
        IndexedDataset(golden)


@pytest.fixture(params=[1 << 20, 1])
def chunk(request, monkeypatch):
    """How many entries of an index are worked off at a time."""
    monkeypatch.setattr(mmidx, "_CHUNK", request.param)


def test_writer_equals_the_hand_made_file(tmp_path, chunk):
    with IndexedDatasetWriter(tmp_path / "new" / "one" / "w", np.uint16) as writer:
        writer.add_sequence(TOKENS[0])
        writer.add_sequence(np.array(TOKENS[1]))
        writer.end_document()
        writer.add_document(TOKENS[2])
    assert (tmp_path / "new" / "one" / "w.bin").read_bytes() == GOLDEN_BIN
    assert (tmp_path / "new" / "one" / "w.idx").read_bytes() == GOLDEN_IDX
    assert sorted(p.name for p in (tmp_path / "new" / "one").iterdir()) == ["w.bin", "w.idx"]


def test_reader_reads_the_hand_made_file(golden):
    data = IndexedDataset(golden)
    assert len(data) == 3 and data.num_tokens == 6 and data.dtype == np.uint16 and data.token_range() == (1, 65535)
    assert data.sizes.tolist() == [3, 1, 2] and data.doc_idx.tolist() == [0, 2, 3]
    assert [data.get(i).tolist() for i in range(3)] == TOKENS
    assert data.get(0, offset=1).tolist() == [2, 65535]
    assert data.get(0, 1, 1).tolist() == [2]
    assert data.get(2, 2).tolist() == []
    assert data.token_starts(np.array([3, 1, 0])).tolist() == [6, 3, 0]
    assert not data.get(0).flags.writeable
    assert pickle.loads(pickle.dumps(data)).get(2).tolist() == [9, 10]


def test_the_range_of_tokens_is_that_of_all_pieces_that_are_read(tmp_path):
    with IndexedDatasetWriter(tmp_path / "w", np.uint8) as writer:
        writer.add_document(np.frombuffer(bytes([2]) + bytes([5]) * (1 << 24) + bytes([3, 9]), np.uint8))
    assert IndexedDataset(tmp_path / "w").token_range() == (2, 9)


@pytest.mark.parametrize("code, dtype", [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_reader_knows_all_integer_types(tmp_path, code, dtype):
    (tmp_path / "g.bin").write_bytes(struct.pack(f"<3{dtype}", 3, 100, 5))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 1, 2)
    (tmp_path / "g.idx").write_bytes(head + struct.pack("<iq2q", 3, 0, 0, 1))
    assert IndexedDataset(tmp_path / "g").get(0).tolist() == [3, 100, 5]


@settings(max_examples=40)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=3), max_size=6),
    dtype=st.sampled_from([np.int32, np.int64]),
)
def test_what_is_written_is_read(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("w") / "w"
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    data = IndexedDataset(prefix)
    assert [data.get(i).tolist() for i in range(len(data))] == [s for d in documents for s in d]
    assert np.diff(data.doc_idx).tolist() == [len(d) for d in documents]


def test_sequences_that_are_documents_need_no_boundaries(tmp_path, chunk):
    parts = [(np.array(sizes, np.int32), None) for sizes in ([3, 1], [], [2])]
    a, b = BytesIO(), BytesIO()
    write_index(a, np.dtype("<u2"), parts)
    write_index(b, np.dtype("<u2"), [(np.array([3, 1, 2], np.int32), np.arange(4))])
    assert a.getvalue() == b.getvalue()


@pytest.mark.parametrize("boundaries", [[0], [0, 2]])
def test_boundaries_that_a_merge_has_left_out_make_each_sequence_a_document(golden, caplog, boundaries):
    head = GOLDEN_IDX[:26] + struct.pack("<Q", len(boundaries)) + GOLDEN_IDX[34:-24]
    golden.with_suffix(".idx").write_bytes(head + struct.pack(f"<{len(boundaries)}q", *boundaries))
    data = IndexedDataset(golden)
    assert data.doc_idx.tolist() == [0, 1, 2, 3] and [data.get(i).tolist() for i in range(3)] == TOKENS
    assert "g.idx does not say where documents end" in caplog.text
    caplog.clear()
    assert pickle.loads(pickle.dumps(data)).doc_idx.tolist() == [0, 1, 2, 3] and not caplog.text


def test_megatrons_choice_of_dtype():
    assert [token_dtype(v) for v in (50257, 65499, 65500, 128000)] == [np.uint16, np.uint16, np.int32, np.int32]


def test_a_writer_removes_the_record_of_the_tokens_that_it_replaces(golden):
    write_sidecar(golden, Sidecar("GPT2BPETokenizer", "0" * 64, 50257, 50256, documents=2, tokens=6))
    with IndexedDatasetWriter(golden, np.uint16) as writer:
        writer.add_document([1, 2, 3, 4, 5, 6])
    assert read_sidecar(golden) is None
    sidecar_path(golden).write_text('{"text": "a corpus"}\n')
    with IndexedDatasetWriter(golden, np.uint16) as writer:
        writer.add_document([1])
    assert sidecar_path(golden).exists(), "it is no record"


def test_a_failed_writer_leaves_nothing_and_keeps_the_old(golden):
    with pytest.raises(KeyboardInterrupt):
        with IndexedDatasetWriter(golden, np.uint16) as writer:
            writer.add_document([5])
            raise KeyboardInterrupt
    assert sorted(p.name for p in golden.parent.iterdir()) == ["g.bin", "g.idx"] and len(IndexedDataset(golden)) == 3


@pytest.mark.parametrize("last", ["write_index", "remove_sidecar"])
def test_a_writer_that_finds_a_full_disk_at_the_end_leaves_nothing(tmp_path, monkeypatch, last):
    monkeypatch.setattr(mmidx if last == "write_index" else indexed_dataset, last, full)
    with pytest.raises(OSError, match="No space left"):
        with IndexedDatasetWriter(tmp_path / "w", np.uint16) as writer:
            writer.add_document([5])
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_or_synced_is_named_before_anything_has_changed(golden, monkeypatch):
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=f"Input/output error: '{golden}.bin'"):
        with IndexedDatasetWriter(golden, np.uint16) as writer:
            writer.add_document([5])
    with pytest.raises(OSError, match=f"Input/output error: '{golden}.idx'"):
        with published(golden, golden.parent / "tokens", np.dtype("<u2"), []):
            raise AssertionError("records would be replaced")
    monkeypatch.setattr(mmidx, "write_index", fails)
    with pytest.raises(OSError, match=f"Input/output error: '{golden}.idx'"):
        with published(golden, golden.parent / "tokens", np.dtype("<u2"), []):
            raise AssertionError("records would be replaced")
    assert sorted(p.name for p in golden.parent.iterdir()) == ["g.bin", "g.idx"] and len(IndexedDataset(golden)) == 3


@pytest.mark.parametrize("tokens", [[0, 65536], [0, -1], np.array([1.5]), np.array([70000]), [[1, 2]]])
def test_tokens_that_do_not_fit_are_refused(tmp_path, tokens):
    with pytest.raises(ValueError, match="do not fit uint16|not integers|not one sequence"):
        with IndexedDatasetWriter(tmp_path / "w", np.uint16) as writer:
            writer.add_document(tokens)
    with pytest.raises(ValueError, match="cannot hold tokens"):
        IndexedDatasetWriter(tmp_path / "w", np.float32)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_missing_file_is_named(golden, ending):
    golden.with_suffix(ending).unlink()
    with pytest.raises(FileNotFoundError, match=f"g{ending} is missing.*preprocess_data.py"):
        IndexedDataset(golden)


def test_unfinished_run_is_named(tmp_path):
    (tmp_path / "g.partial.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="unfinished preprocessing run"):
        IndexedDataset(tmp_path / "g")


def patched(offset: int, new: bytes) -> bytes:
    return GOLDEN_IDX[:offset] + new + GOLDEN_IDX[offset + len(new) :]


SIZES, POINTERS, DOCS = 34, 34 + 12, 34 + 12 + 24


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "not an MMIDIDX index"),
        (b"TNTIDX\x00\x00" + GOLDEN_IDX, "not an MMIDIDX index"),
        (GOLDEN_IDX[:20], "inside the header"),
        (GOLDEN_IDX[:-1], "take 94 bytes, found 93"),
        (GOLDEN_IDX + b"\x00", "take 94 bytes, found 95"),
        (patched(9, struct.pack("<Q", 2)), "version 2"),
        (patched(17, b"\x06"), "dtype code 6"),
        (patched(18, struct.pack("<Q", 2**60)), "found 94"),
        (patched(SIZES, struct.pack("<i", -3)), "negative length"),
        (patched(POINTERS, struct.pack("<q", 2)), "pointers do not follow"),
        (patched(POINTERS + 8, struct.pack("<q", 4)), "pointers do not follow"),
        (patched(DOCS + 16, struct.pack("<q", 1)), "do not rise from 0 to 3"),
        (patched(DOCS, struct.pack("<q", 1)), "do not rise from 0 to 3"),
        (patched(DOCS + 8, struct.pack("<q", 4)), "do not rise from 0 to 3"),
    ],
)
def test_damaged_index_is_one_clear_error(golden, content, message, chunk):
    golden.with_suffix(".idx").write_bytes(content)
    with pytest.raises(ValueError, match=f"g.idx .*{message}.*preprocess_data.py"):
        IndexedDataset(golden)


@pytest.mark.parametrize("content, state", [(GOLDEN_BIN[:-1], "truncated"), (GOLDEN_BIN + b"xx", "of another run")])
def test_tokens_that_do_not_match_the_index_are_one_clear_error(golden, content, state):
    golden.with_suffix(".bin").write_bytes(content)
    with pytest.raises(ValueError, match=f"g.bin has {len(content)} bytes, g.idx describes 12 .* {state}"):
        IndexedDataset(golden)


@pytest.mark.parametrize("i, offset, length", [(0, 0, 4), (0, 4, None), (0, -1, 1), (1, 0, -1), (3, 0, None)])
def test_tokens_outside_a_sequence_are_refused(golden, i, offset, length):
    with pytest.raises(IndexError):
        IndexedDataset(golden).get(i, offset, length)


def test_more_corpora_than_the_soft_limit_of_files_can_be_open(golden):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    try:
        opened = [IndexedDataset(golden) for _ in range(60)]
        assert all(data.get(2).tolist() == [9, 10] for data in opened)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_empty_corpus(tmp_path):
    with IndexedDatasetWriter(tmp_path / "e", np.uint16):
        pass
    data = IndexedDataset(tmp_path / "e")
    assert len(data) == 0 and data.num_tokens == 0 and data.token_range() == (0, -1)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_the_range_of_a_corpus_is_found_without_its_pages_becoming_memory_of_the_process(tmp_path):
    with IndexedDatasetWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document(np.arange(1 << 20) % 300)
    data = IndexedDataset(tmp_path / "c")
    assert data.token_range() == (0, 299)
    (resident,) = re.findall(rf" {tmp_path}/c\.bin\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    assert int(resident) < 1024, "kB, of 2 MiB"


def test_the_range_of_a_corpus_is_that_of_all_chunks_in_which_it_is_read(tmp_path, monkeypatch):
    counts, tokens = [], np.full((1 << 24) + 9, 7, np.uint16)
    tokens[0], tokens[-1] = 3, 9

    def read(path, dtype, count, offset):
        counts.append(count)
        return read_array(path, dtype, count, offset)

    monkeypatch.setattr(indexed_dataset, "read_array", read)
    with IndexedDatasetWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document(tokens)
    assert IndexedDataset(tmp_path / "c").token_range() == (3, 9) and counts == [1 << 24, 9]


def test_fingerprint_tells_indices_apart(tmp_path, golden):
    prints = {IndexedDataset(golden).fingerprint}
    for name, sizes, documents in (("a", [3, 1, 2], [0, 3]), ("b", [1, 3, 2], [0, 2, 3]), ("c", [6], [0, 1])):
        (tmp_path / f"{name}.bin").write_bytes(GOLDEN_BIN)
        with open(tmp_path / f"{name}.idx", "wb") as file:
            write_index(file, np.dtype("<u2"), [(np.array(sizes, np.int32), np.array(documents))])
        prints.add(IndexedDataset(tmp_path / name).fingerprint)
    assert len(prints) == 4
