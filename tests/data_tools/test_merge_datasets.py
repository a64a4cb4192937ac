"""Merging tokenized corpora: the bytes of one corpus with all documents, whatever the inputs were cut into."""

from __future__ import annotations

import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools import merge_datasets as merging
from data_tools.merge_datasets import merge_datasets
from megazero.data import mmidx, preprocess
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megazero.data.mmidx import write_index
from megazero.data.sidecar import Sidecar, read_sidecar, write_sidecar
from megazero.lines.partial_shard import PartialShard
from tests.lines.test_contents import change_a_byte


def write(prefix, documents, dtype=np.uint16, tokenizer=None):
    """A corpus of documents, each a list of sequences; with a record of its tokenizer if that is named."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    if tokenizer is not None:
        tokens = sum(len(sequence) for document in documents for sequence in document)
        write_sidecar(prefix, Sidecar("T", tokenizer, 100, 0, len(documents), tokens))
    return prefix


def files(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def interrupt(*_):
    raise KeyboardInterrupt


A, B, C = [[[1, 2, 65535], [7]], [[9, 10]]], [[], [[3]], [[]]], []


def test_bytes_written_by_hand(tmp_path):
    """Documents of several sequences, of one, of none, an empty corpus: field by field as the format describes them."""
    parts = [write(tmp_path / name, documents) for name, documents in zip("abc", (A, B, C), strict=True)]
    result = merge_datasets(parts, tmp_path / "new" / "m")
    tokens = struct.pack("<7H", 1, 2, 65535, 7, 9, 10, 3)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 5, 6)
    index += struct.pack("<5i", 3, 1, 2, 1, 0)  # sizes in tokens
    index += struct.pack("<5q", 0, 6, 8, 12, 14)  # pointers in bytes
    index += struct.pack("<6q", 0, 2, 3, 3, 4, 5)  # documents
    assert files(tmp_path / "new" / "m") == [tokens, index]
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["m.bin", "m.done.json", "m.idx"]
    assert (result["documents"], result["sequences"], result["tokens"], result["inputs"]) == (5, 5, 7, 3)


@settings(max_examples=25)
@given(
    corpora=st.lists(
        st.lists(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=3), max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_merged_equals_one_corpus_of_all_documents(tmp_path_factory, corpora):
    folder = tmp_path_factory.mktemp("m")
    parts = [write(folder / f"{i}", documents, np.int32) for i, documents in enumerate(corpora)]
    merge_datasets(parts, folder / "m")
    write(folder / "whole", [document for documents in corpora for document in documents], np.int32)
    assert files(folder / "m") == files(folder / "whole")


def test_pointers_beyond_32_bits():
    """2**31 bytes are no limit; only the index is written, nobody has to store the tokens."""
    big = (np.array([2**31 - 1], np.int32), np.array([0, 1]))
    file = BytesIO()
    write_index(file, np.dtype("<i4"), [big, big, big])
    assert struct.unpack("<3q", file.getvalue()[34 + 12 : 34 + 36]) == (0, 4 * (2**31 - 1), 8 * (2**31 - 1))


def test_a_record_is_kept_and_a_finished_merge_is_found(tmp_path):
    parts = [write(tmp_path / name, documents, tokenizer="s") for name, documents in (("a", A), ("b", B))]
    assert not merge_datasets(parts, tmp_path / "m")["skipped"]
    record = read_sidecar(tmp_path / "m")
    assert (record.tokenizer_sha256, record.vocab_size, record.documents, record.tokens) == ("s", 100, 5, 7)
    assert merge_datasets(parts, tmp_path / "m")["skipped"]
    assert not merge_datasets(parts[::-1], tmp_path / "m")["skipped"], "another order is another corpus"
    write(tmp_path / "a", A[:1], tokenizer="s")
    assert merge_datasets(parts, tmp_path / "m")["documents"] == 4


def test_without_a_record_nothing_is_vouched_for(tmp_path, caplog):
    parts = [write(tmp_path / "a", A, tokenizer="s"), write(tmp_path / "b", B)]
    merge_datasets(parts[:1], tmp_path / "m")
    merge_datasets(parts, tmp_path / "m")
    assert "b does not record its tokenizer (no b.json)" in caplog.text
    assert read_sidecar(tmp_path / "m") is None, "the record of an earlier merge is not left beside the new tokens"


def test_a_folder_stands_for_its_pairs_in_the_order_of_their_names(tmp_path):
    for name in ("b.v2", "a", "c"):
        write(tmp_path / "in" / name, [[[ord(name[0])]]])
    merge_datasets([tmp_path / "in"], tmp_path / "m")
    assert IndexedDataset(tmp_path / "m").get(1).tolist() == [ord("b")]
    assert merging.find_prefixes([tmp_path / "in" / "c.idx", tmp_path / "in" / "a"]) == [
        tmp_path / "in" / "c",
        tmp_path / "in" / "a",
    ]


def test_a_merge_into_a_folder_of_its_inputs_goes_on_after_a_kill_and_is_found(tmp_path, monkeypatch):
    for name in ("a_text_document", "b_text_document"):
        write(tmp_path / name, A)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(merging, "publish_corpus", interrupt)
        merge_datasets([tmp_path], tmp_path / "all_text_document")
    with pytest.raises(ValueError, match="all_text_document: the run that makes these tokens has not finished"):
        merge_datasets([tmp_path], tmp_path / "elsewhere")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(merging, "write_marker", interrupt)  # when the output has its name
        merge_datasets([tmp_path], tmp_path / "all_text_document")
    monkeypatch.chdir(tmp_path)
    for is_found in (False, True):
        result = merge_datasets([tmp_path], "all_text_document")
        assert (result["documents"], result["skipped"]) == (2 * len(A), is_found)


def test_a_name_that_looks_like_a_number_is_written_as_the_message_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with IndexedDatasetWriter("7", np.uint16) as writer:
        writer.add_document([1])
    with pytest.raises(ValueError, match="a path that looks like a number is written ./7"):
        merging.find_prefixes(["7"])
    assert merging.find_prefixes(["./7"]) == [Path("7")]


def test_inputs_that_do_not_fit_are_refused(tmp_path):
    a = write(tmp_path / "a", A, tokenizer="s")
    with pytest.raises(ValueError, match="--input .*a is named twice"):
        merge_datasets([tmp_path, a], tmp_path / "m")
    with pytest.raises(ValueError, match="b stores int32, .*a uint16"):
        merge_datasets([a, write(tmp_path / "b", A[1:], np.int32)], tmp_path / "m")
    with pytest.raises(ValueError, match="b was tokenized with T .*sha256 other.*a with T .*sha256 s"):
        merge_datasets([a, write(tmp_path / "b", A, tokenizer="other")], tmp_path / "m")
    with pytest.raises(ValueError, match="--output-prefix .*a is one of the inputs"):
        merge_datasets([a], tmp_path / "sub" / ".." / "a")
    with pytest.raises(FileNotFoundError, match="--input .*absent: found no"):
        merge_datasets([tmp_path / "absent"], tmp_path / "m")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="--input .*empty: the folder holds no .idx"):
        merge_datasets([tmp_path / "empty"], tmp_path / "m")
    (tmp_path / "t.jsonl").write_text("")
    with pytest.raises(ValueError, match="--input .*t.jsonl is text"):
        merge_datasets([tmp_path / "t.jsonl"], tmp_path / "m")
    (tmp_path / "a.bin").write_bytes(b"cut")
    with pytest.raises(ValueError, match="a.bin has 3 bytes, a.idx describes 12"):
        merge_datasets([a], tmp_path / "m")
    assert not list(tmp_path.glob("m*"))


def test_a_merge_that_stops_leaves_nothing_half_and_no_scraps(tmp_path, monkeypatch, caplog):
    a, b = write(tmp_path / "a", A), write(tmp_path / "b", A)
    merge_datasets([a], tmp_path / "m")
    old = files(tmp_path / "m")

    for module, name in ((mmidx, "write_index"), (preprocess, "remove_sidecar")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                merge_datasets([a, b], tmp_path / "m")
        if name == "write_index":  # what was there is whole, and what was copied is kept
            assert files(tmp_path / "m") == old and (tmp_path / "m.done.json").exists()
            assert (tmp_path / "m.partial.0").stat().st_size == 2 * len(old[0])
    assert not (tmp_path / "m.idx").exists() and not (tmp_path / "m.done.json").exists()
    with caplog.at_level("INFO"):
        assert merge_datasets([a, b], tmp_path / "m")["documents"] == 4
    assert "m: continuing after" in caplog.text
    assert sorted(path.name for path in tmp_path.glob("m.*")) == ["m.bin", "m.done.json", "m.idx"]


def test_what_a_stopped_merge_has_left_of_a_finished_one_is_removed(tmp_path, monkeypatch):
    part = write(tmp_path / "a", A)

    with monkeypatch.context() as patch:
        patch.setattr(PartialShard, "remove", interrupt)  # the merged corpus is whole
        with pytest.raises(KeyboardInterrupt):
            merge_datasets([part], tmp_path / "m")
    assert (tmp_path / "m.partial.json").exists()
    assert merge_datasets([part], tmp_path / "m")["skipped"]
    assert sorted(path.name for path in tmp_path.glob("m.*")) == ["m.bin", "m.done.json", "m.idx"]


def test_a_merge_that_is_killed_goes_on_where_it_stopped(tmp_path, monkeypatch, caplog):
    parts = [write(tmp_path / name, [[[i] * 50] for i in range(count)]) for name, count in (("a", 40), ("b", 60))]
    merge_datasets(parts, tmp_path / "whole")
    monkeypatch.setattr(merging, "_COPY_BYTES", 1000)
    commits, commit = [], PartialShard.commit

    def dies(partial, *_):
        commits.append(partial.sizes[0])
        if commits[-1] > 6000:
            raise KeyboardInterrupt
        commit(partial)

    with monkeypatch.context() as patch:
        patch.setattr(PartialShard, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            merge_datasets(parts, tmp_path / "m")
    assert not (tmp_path / "m.bin").exists() and not (tmp_path / "m.idx").exists()
    with caplog.at_level("INFO"):
        merge_datasets(parts, tmp_path / "m")
    assert "m: continuing after 0.0 MB" in caplog.text and commits[-2] == 6000
    assert files(tmp_path / "m") == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.glob("m.*")) == ["m.bin", "m.done.json", "m.idx"]


def test_an_input_that_changes_while_it_is_copied_is_an_error(tmp_path, monkeypatch):
    a, copy = write(tmp_path / "a", A), merging._copy

    def change(*arguments):
        copy(*arguments)
        change_a_byte(tmp_path / "a.bin")

    with monkeypatch.context() as patch:
        patch.setattr(merging, "_copy", change)
        with pytest.raises(ValueError, match="a.bin was changed while it was read"):
            merge_datasets([a], tmp_path / "m")
    assert not list(tmp_path.glob("m.*"))
    merge_datasets([a], tmp_path / "m")
    assert files(tmp_path / "m") == files(a)
