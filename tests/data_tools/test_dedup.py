"""Deduplication from files to files: planted copies go, look-alikes stay, the same for any number of workers, resumable."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil

import pytest

from data_tools import dedup, dedup_signatures, dedup_signing, done_marker
from tests.data_tools.planted import planted_documents, score
from tests.data_tools.steps import read_documents, run_step
from tests.data_tools.test_dedup_minhash import jaccard

COUNT = 1200


def write_lines(path, lines):
    content = b"".join(json.dumps(line).encode() + b"\n" if not isinstance(line, bytes) else line for line in lines)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def dropped(*paths):
    return [line for path in paths for line in read_documents(path.with_name(f"{path.name}.dropped.jsonl"))]


def deduplicate(inputs, output, *flags):
    return run_step("dedup", "--input", *inputs, "--output", output, *flags)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Planted documents in three files, an unequal number in each, one compressed; and one run over them."""
    folder = tmp_path_factory.mktemp("planted")
    documents = list(planted_documents(COUNT, seed=7))
    paths = [folder / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl")]
    for path, (start, stop) in zip(paths, ((0, 300), (300, 1000), (1000, COUNT)), strict=True):
        write_lines(path, [document.line for document in documents[start:stop]])
    statistics = deduplicate(paths, folder / "out", "--workers", "2")
    return documents, paths, folder / "out", statistics


def test_planted_copies_go_and_look_alikes_stay(planted):
    documents, _, out, statistics = planted
    records = dropped(*(out / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl")))
    recall, precision = score(documents, {record["id"] for record in records})
    assert recall >= 0.98 and precision >= 0.99, (recall, precision)
    kept = [line for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl") for line in read_documents(out / name)]
    gone = {record["id"] for record in records}
    assert kept == [document.line for document in documents if document.id not in gone], "in order, unchanged"
    assert statistics["documents"] == COUNT == statistics["kept"] + sum(statistics["dropped"].values())
    assert set(statistics["dropped"]) == {"exact copy", "near copy"}
    assert statistics["uncompared"] == 0
    assert statistics["groups"] > 0
    assert statistics["signatures"].startswith("megazero")


def test_without_the_comparison_of_signatures_look_alikes_would_go(planted, tmp_path):
    """Not a use of the step: it shows that the documents above include some that share a band and are no copies."""
    documents, paths, _, _ = planted
    deduplicate(paths, tmp_path / "out.jsonl", "--similarity", "0.01")
    recall, precision = score(documents, {record["id"] for record in dropped(tmp_path / "out.jsonl")})
    assert recall >= 0.98 and precision < 0.99


def test_the_dropped_list_says_of_which_document_and_how_similar(planted):
    documents, paths, out, _ = planted
    by_id = {document.id: document for document in documents}
    order = {document.id: number for number, document in enumerate(documents)}
    lines = {str(path): read_documents(path) for path in paths}
    records = dropped(*(out / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl")))
    gone = {record["id"] for record in records}
    errors = []
    for record in records:
        share, first = re.fullmatch(r"similarity ([01]\.[0-9]{2}) to (doc-[0-9]+)", record["detail"]).groups()
        assert first not in gone and order[first] < order[record["id"]], "the first one of a group stays"
        assert lines[record["file"]][record["line"] - 1]["id"] == record["id"]
        errors.append(abs(jaccard(by_id[record["id"]].text, by_id[first].text) - float(share)))
        assert (record["reason"] == "exact copy") <= (errors[-1] < 0.01)
        if len(errors) == 100:
            break
    assert max(errors) < 0.2 and sum(errors) / len(errors) < 0.03


@pytest.mark.parametrize("flags", [["--workers", "2", "--block-kb", "100"], ["--memory", "300M"]])
def test_output_does_not_depend_on_workers_blocks_or_memory(planted, tmp_path, flags):
    _, paths, out, _ = planted
    deduplicate(paths, tmp_path / "out", *flags)
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl"):
        if name == "a.jsonl" or "--block-kb" not in flags:
            assert (tmp_path / "out" / name).read_bytes() == (out / name).read_bytes()
        assert read_documents(tmp_path / "out" / name) == read_documents(out / name)
        sidecar = f"{name}.dropped.jsonl"
        assert (tmp_path / "out" / sidecar).read_bytes() == (out / sidecar).read_bytes()


def signature_times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.signatures")}


def test_reads_may_give_less_than_they_were_asked_for(planted, tmp_path, monkeypatch):
    """As on a FUSE mount with direct_io; seven bytes at a time here."""

    class Short(io.FileIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:7])

    def open_short(path, mode, buffering=io.DEFAULT_BUFFER_SIZE):
        return io.BufferedReader(Short(path), buffering) if buffering else Short(path)

    preadv, pread = os.preadv, os.pread
    monkeypatch.setattr(os, "preadv", lambda file, views, place: preadv(file, [view[:7] for view in views], place))
    monkeypatch.setattr(os, "pread", lambda file, size, place: pread(file, min(size, 7), place))
    monkeypatch.setattr(dedup_signatures, "open", open_short, raising=False)
    _, paths, out, statistics = planted
    assert deduplicate(paths, tmp_path / "out", "--workers", "1")["dropped"] == statistics["dropped"]
    assert dropped(tmp_path / "out" / "c.jsonl") == dropped(out / "c.jsonl")


def test_finished_work_is_not_done_again(tmp_path):
    documents = [document.line for document in planted_documents(60, seed=2)]
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    write_lines(first, documents)
    deduplicate([first], tmp_path / "out")
    before = signature_times(tmp_path / "out.dedup")
    again = deduplicate([first], tmp_path / "out")
    assert again["shards_skipped"] == 1 and signature_times(tmp_path / "out.dedup") == before
    write_lines(second, documents[:30])  # all of them are copies of what is in the first file
    both = deduplicate([first, second], tmp_path / "out")
    after = signature_times(tmp_path / "out.dedup")
    assert len(after) == 2 and before.items() <= after.items()
    assert both["shards_skipped"] == 0, "whether a document is a copy depends on all inputs"
    assert (tmp_path / "out" / "second.jsonl").read_bytes() == b""
    shutil.rmtree(tmp_path / "out.dedup")
    assert deduplicate([first, second], tmp_path / "out")["shards_skipped"] == 2
    assert not (tmp_path / "out.dedup").exists(), "finished output needs no signatures"
    deduplicate([first, second], tmp_path / "out", "--similarity", "0.8")
    after = signature_times(tmp_path / "out.dedup")
    looser = deduplicate([first, second], tmp_path / "out", "--similarity", "0.9")
    assert looser["kept"] >= both["kept"] and signature_times(tmp_path / "out.dedup") == after


def test_killed_run_goes_on_from_the_last_commit(tmp_path, monkeypatch):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    documents = [document.line for document in planted_documents(200, seed=4)]
    write_lines(paths[0], documents[:120])
    write_lines(paths[1], documents[120:])
    flags = ("--block-kb", "20")
    deduplicate(paths, tmp_path / "want", *flags)

    signed: list[int] = []
    signer = dedup_signing.BlockSigner.__call__

    def sign(self, item):
        if stop_at is not None and len(signed) == stop_at:
            raise KeyboardInterrupt
        signed.append(item[1].start)
        return signer(self, item)

    monkeypatch.setattr(dedup_signing.BlockSigner, "__call__", sign)
    options = dedup_signing.RunOptions.__init__
    monkeypatch.setattr(
        dedup_signing.RunOptions, "__init__", lambda self, **kw: options(self, **{**kw, "commit_interval_s": 0.0})
    )
    for stop_at in (5, 20, None):
        if stop_at is not None:
            with pytest.raises(KeyboardInterrupt):
                deduplicate(paths, tmp_path / "out", *flags)
            assert not list((tmp_path / "out").glob("*.jsonl"))
        else:
            deduplicate(paths, tmp_path / "out", *flags)
    blocks = sum(-(-path.stat().st_size // 20_480) for path in paths)
    assert 20 < len(signed) <= blocks, "no block was signed twice"
    for name in ("a.jsonl", "b.jsonl", "a.jsonl.dropped.jsonl", "b.jsonl.dropped.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "want" / name).read_bytes()


def test_the_result_of_a_search_that_was_stopped_is_not_taken_for_that_of_other_settings(tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl", [document.line for document in planted_documents(60, seed=2)])
    work = ("--work-folder", tmp_path / "work", "--similarity")
    deduplicate([tmp_path / "a.jsonl"], tmp_path / "want.jsonl", *work, "0.7")
    write_marker = done_marker.write_marker

    def dies(record, *arguments):
        if record.name == "copies":
            raise KeyboardInterrupt
        write_marker(record, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(done_marker, "write_marker", dies)
        deduplicate([tmp_path / "a.jsonl"], tmp_path / "other.jsonl", *work, "1")
    deduplicate([tmp_path / "a.jsonl"], tmp_path / "out.jsonl", *work, "0.7")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "want.jsonl").read_bytes()
    assert (tmp_path / "work" / "copies").exists() and not list(tmp_path.glob("*.dedup"))


def test_signatures_of_another_version_are_made_again(tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl", [document.line for document in planted_documents(40, seed=2)])
    deduplicate([tmp_path / "a.jsonl"], tmp_path / "out")
    before = signature_times(tmp_path / "out.dedup")
    for module in (dedup, dedup_signing):
        monkeypatch.setattr(module, "VERSION", "another one")
    deduplicate([tmp_path / "a.jsonl"], tmp_path / "out")
    after = signature_times(tmp_path / "out.dedup")
    assert after.keys() == before.keys() and after != before


BAD = [b"\xff\xfe\n", b"{\n", b"\n", b'{"other": 1}\n', b'{"text": 5}\n']


def test_bad_lines_are_reported_once_with_their_place(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    write_lines(
        path, [{"text": "some words", "url": "u"}, *BAD, {"text": "Some, words", "url": "u"}, {"text": "", "url": "v"}]
    )
    statistics = deduplicate([path], tmp_path / "out.jsonl")
    counted = {name: statistics[name] for name in ("lines", "documents", "kept", "bad_lines", "blank_lines")}
    assert counted == {"lines": 8, "documents": 3, "kept": 2, "bad_lines": 4, "blank_lines": 1}
    assert [record["line"] for record in dropped(tmp_path / "out.jsonl")] == [2, 3, 5, 6, 7]
    assert sum(record.getMessage().count(":2: invalid UTF-8") for record in caplog.records) == 1
    last = dropped(tmp_path / "out.jsonl")[-1]
    assert (last["id"], last["reason"], last["detail"]) == ("u", "exact copy", "similarity 1.00 to u"), (
        "an id may be there twice"
    )
    with pytest.raises(ValueError, match=r"a\.jsonl:2: invalid UTF-8 at byte 0"):
        deduplicate([path], tmp_path / "strict.jsonl", "--strict", "--block-kb", "0.02")
    assert not (tmp_path / "strict.jsonl").exists()


def test_a_file_without_lines_is_no_error_but_one_without_documents_is(tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "blank.jsonl").write_bytes(b"\n \n")
    write_lines(tmp_path / "bad.jsonl", BAD)
    files = [tmp_path / f"{name}.jsonl" for name in ("empty", "blank", "bad")]
    statistics = deduplicate(files[:2], tmp_path / "out")
    assert statistics["documents"] == 0 and statistics["empty_files"] == 1
    assert (tmp_path / "out" / "empty.jsonl").read_bytes() == b""
    with pytest.raises(ValueError, match="no line of .*bad.jsonl holds a text under the key 'text': .*; the first: "):
        deduplicate(files, tmp_path / "all.jsonl")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--similarity", "1.5"], r"--similarity must lie in \(0, 1\], got 1.5"),
        (["--bands", "0"], "--bands and --rows must be positive"),
        (["--rows", "500"], r"1024 at most, got 14 x 500"),
    ],
)
def test_bad_flags_are_named(tmp_path, flags, message):
    write_lines(tmp_path / "a.jsonl", [{"text": "some words"}])
    with pytest.raises(ValueError, match=message):
        deduplicate([tmp_path / "a.jsonl"], tmp_path / "out", *flags)
