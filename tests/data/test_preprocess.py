"""Tokenizing: the same files from any number of workers and from killed runs, and every bad line accounted for."""

from __future__ import annotations

import gzip
import json
import logging
import lzma
import multiprocessing
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data import mmidx, preprocess
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.preprocess import tokenize_json
from megazero.data.sidecar import Sidecar, check_free, read_sidecar, remove_sidecar, write_sidecar
from megazero.data.tokenizer import build_tokenizer
from megazero.lines.jsonl import Block, block_lines, read_blocks
from megazero.lines.partial_shard import PartialShard
from megazero.lines.resumable import WorkOptions
from tests.bad_disks import full
from tests.vocabularies import make_gpt2_vocabulary, make_texts, write_jsonl

SMALL = WorkOptions(1, block_bytes=500, commit_interval_s=0)


def contents(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".json")]


def documents(prefix):
    data = IndexedDataset(prefix)
    return [data.get(i).tolist() for i in range(len(data))]


@settings(max_examples=300)
@given(
    lines=st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=12),
    block_bytes=st.integers(1, 60),
    limit=st.integers(1, 60),
    ends=st.booleans(),
    packed=st.booleans(),
    data=st.data(),
)
def test_blocks_are_whole_lines_from_any_start(tmp_path_factory, lines, block_bytes, limit, ends, packed, data):
    """Each line once; one that is longer than the limit is a block of its own, which names the fault."""
    text = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    path = tmp_path_factory.mktemp("b") / ("f.gz" if packed else "f")
    path.write_bytes(gzip.compress(text) if packed else text)
    blocks = list(read_blocks(path, block_bytes, max_line_bytes=limit))
    found = [line for block in blocks for line in ([None] if block.fault else whole_lines(block.read()))]
    assert found == [None if len(line) > limit else line for line in whole_lines(text)]
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks)][: len(blocks)]
    if blocks:
        begin = data.draw(st.sampled_from(blocks)).start
        rest = list(read_blocks(path, block_bytes, begin, max_line_bytes=limit))
        assert sum(block.disk_bytes for block in blocks) == path.stat().st_size
        assert packed or sum(block.disk_bytes for block in rest) == len(text) - begin
        assert [(b.start, b.stop) for b in rest] == [(b.start, b.stop) for b in blocks if b.start >= begin]
        assert b"".join(block.read() for block in read_blocks(path, 7, begin)) == text[begin:]


def whole_lines(text):
    return re.findall(rb"[^\n]*\n|[^\n]+", text)


def test_lines_of_a_block(tmp_path):
    assert list(block_lines(Block(tmp_path, 0, 0, 9, b"\xef\xbb\xbfa\n\nb"))) == [(0, b"a"), (2, b""), (3, b"b")]
    assert list(block_lines(Block(tmp_path, 0, 5, 9, b"a\nb\n"))) == [(5, b"a"), (7, b"b")]


def test_a_block_of_a_file_that_has_become_shorter_loses_no_lines_silently(tmp_path):
    (path := tmp_path / "in.jsonl").write_bytes(b"one\ntwo\n")
    [block] = read_blocks(path, 100)
    os.truncate(path, 4)
    with pytest.raises(ValueError, match="in.jsonl has become shorter while it was read"):
        list(block_lines(block))


def test_tokens_are_those_of_the_documents_in_order(tmp_path, tokenizer):
    texts = make_texts(100)
    path = write_jsonl(tmp_path / "in.jsonl", texts)
    sidecar = tokenize_json([path], tmp_path / "out", tokenizer, options=SMALL)
    assert documents(tmp_path / "out") == [[*tokenizer.encode(text), tokenizer.eod] for text in texts]
    assert sidecar == read_sidecar(tmp_path / "out")
    assert (sidecar.documents, sidecar.eod, sidecar.vocab_size) == (100, tokenizer.eod, tokenizer.vocab_size)
    assert sidecar.tokens == IndexedDataset(tmp_path / "out").num_tokens
    assert sidecar.tokenizer_sha256 == tokenizer.sha256
    assert IndexedDataset(tmp_path / "out").dtype == np.uint16
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.bin", "out.idx", "out.json"], (
        "nothing is left over"
    )


def test_other_key_and_no_end_of_text(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(3))
    tokenize_json([path], tmp_path / "out", tokenizer, key="url", append_eod=False, options=SMALL)
    assert documents(tmp_path / "out") == [tokenizer.encode(f"u{i}") for i in range(3)]


def test_output_does_not_depend_on_workers_or_blocks(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(400))
    tokenize_json([path], tmp_path / "one", tokenizer, options=WorkOptions(1))
    for workers, block_bytes in ((1, 100), (2, 1000), (3, 5000)):
        prefix = tmp_path / f"{workers}"
        tokenize_json([path], prefix, tokenizer, options=WorkOptions(workers, block_bytes=block_bytes))
        assert contents(prefix) == contents(tmp_path / "one")


def test_several_files_and_compressed_ones(tmp_path, tokenizer):
    texts = make_texts(60)
    parts = [write_jsonl(tmp_path / f"{i}.jsonl", texts[i * 20 : i * 20 + 20]) for i in range(3)]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(parts[1].read_bytes()))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(parts[2].read_bytes()))
    tokenize_json(
        [parts[0], tmp_path / "b.jsonl.gz", tmp_path / "c.jsonl.xz"], tmp_path / "out", tokenizer, options=SMALL
    )
    assert documents(tmp_path / "out") == [[*tokenizer.encode(text), tokenizer.eod] for text in texts]


BAD_LINES = [
    (b'{"text": "\xff\xfe"}', "invalid UTF-8 at byte 10"),
    (b"[" * 100_000, "bad JSON"),
    (b'{"title": "x", "url": "y"}', "no key 'text' \\(its keys: title, url\\)"),
    (b'{"text": "' + b" " * 1_500_000 + b'a"}', "cannot be tokenized"),
]  # of the others tests/data_tools/test_every_step.py


def write_bad(path):
    """Good lines around bad ones, blank ones and empty documents: errors at lines 3, 6, 9, ..."""
    lines = []
    for bad, _ in BAD_LINES:
        lines += [b'{"text": "good"}', b"", bad]
    path.write_bytes(b"\n".join([*lines, b'{"text": ""}', b'  {"text": "\\ud800 last"}\r']))
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_are_left_out_counted_and_named(tmp_path, tokenizer, caplog, workers):
    good = write_jsonl(tmp_path / "good.jsonl", ["first"])
    path = write_bad(tmp_path / "bad.jsonl")
    options = WorkOptions(workers, block_bytes=50)
    sidecar = tokenize_json([good, path], tmp_path / "out", tokenizer, options=options)
    texts = ["first", *["good"] * len(BAD_LINES), "\ufffd last"]
    assert documents(tmp_path / "out") == [[*tokenizer.encode(text), tokenizer.eod] for text in texts]
    statistics, count = sidecar.statistics, len(BAD_LINES)
    found = tuple(statistics[name] for name in ("bad_lines", "empty_documents", "lines"))
    assert found == (count, 1, 3 * count + 3)
    for i, (_, reason) in enumerate(BAD_LINES):
        assert statistics["first_errors"][i].startswith(f"{path}:{3 * i + 3}: ")
        assert re.search(reason, statistics["first_errors"][i])
    assert f"left out {len(BAD_LINES)} of {statistics['lines']} lines" in caplog.text


def test_no_documents_at_all_names_the_keys(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "in.jsonl", ["a", "b"])
    with pytest.raises(ValueError, match="under the key 'body': 2 lines, 2 bad.*its keys: text, url.*--json-keys"):
        tokenize_json([path], tmp_path / "out", tokenizer, key="body", options=SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"], (
        "where the input is at fault nothing is left over"
    )
    with pytest.raises(FileNotFoundError, match="absent.jsonl"):
        tokenize_json([tmp_path / "absent.jsonl"], tmp_path / "out", tokenizer)
    with pytest.raises(ValueError, match="--workers"):
        WorkOptions(0)


def test_an_empty_file_among_others_is_named(tmp_path, tokenizer, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(3))
    (tmp_path / "b.jsonl.gz").write_bytes(b"")
    assert tokenize_json([path, tmp_path / "b.jsonl.gz"], tmp_path / "out", tokenizer, options=SMALL).documents == 3
    assert "b.jsonl.gz is empty" in caplog.text


def test_nothing_is_removed_while_it_is_mapped_which_smb_shares_refuse(tmp_path, tokenizer, mapped_files_stay):
    write_jsonl(tmp_path / "a.jsonl", make_texts(3))
    tokenize_json([tmp_path / "a.jsonl"], tmp_path / "p", tokenizer, options=SMALL)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "p.bin", "p.idx", "p.json"]


def test_finished_run_is_found_and_a_changed_one_is_not(tmp_path, tokenizer, gpt2_folder, caplog):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(10))
    first = tokenize_json([path], tmp_path / "out", tokenizer, options=SMALL)
    stamp = (tmp_path / "out.bin").stat().st_mtime_ns
    with caplog.at_level(logging.INFO, "megazero"):
        assert tokenize_json([path], tmp_path / "out", tokenizer, options=SMALL) == first
    assert "is there already" in caplog.text and (tmp_path / "out.bin").stat().st_mtime_ns == stamp
    other = build_tokenizer("HuggingFaceTokenizer", tokenizer_path=gpt2_folder)
    with caplog.at_level(logging.INFO, "megazero"):
        assert tokenize_json([path], tmp_path / "out", other, options=SMALL).tokenizer_sha256 == other.sha256
    assert "out.bin is not whole, or of other input or settings: it stays until" in caplog.text
    assert tokenize_json([path], tmp_path / "out", other, append_eod=False, options=SMALL).tokens == first.tokens - 10
    write_jsonl(path, make_texts(11))
    assert tokenize_json([path], tmp_path / "out", tokenizer, options=SMALL).documents == 11


def test_a_stop_between_the_last_renames_is_not_taken_for_a_finished_run(tmp_path, tokenizer, monkeypatch):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(10))
    tokenize_json([path], tmp_path / "out", tokenizer, options=SMALL)
    write_jsonl(path, make_texts(11))

    def stop(*arguments):
        write_sidecar(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "write_sidecar", stop)  # the new record is there, the new tokens are not
        with pytest.raises(KeyboardInterrupt):
            tokenize_json([path], tmp_path / "out", tokenizer, options=SMALL)
    assert not list(tmp_path.glob("out.idx*"))
    tokenize_json([path], tmp_path / "out", tokenizer, options=SMALL)
    assert len(documents(tmp_path / "out")) == 11


def test_what_a_stopped_run_has_left_of_a_finished_corpus_is_removed(tmp_path, tokenizer, monkeypatch):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(50))

    def stop(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PartialShard, "remove", stop)  # the corpus is whole
        with pytest.raises(KeyboardInterrupt):
            tokenize_json([path], tmp_path / "out", tokenizer, options=SMALL)
    with pytest.raises(KeyboardInterrupt):  # of other settings
        tokenize_json([path], tmp_path / "out", StopAfter(tokenizer, 30), append_eod=False, options=SMALL)
    assert len(list(tmp_path.glob("out.*partial*"))) == 4
    whole = contents(tmp_path / "out")
    tokenize_json([path], tmp_path / "out", StopAfter(tokenizer, 0), options=SMALL)
    assert contents(tmp_path / "out") == whole and not list(tmp_path.glob("out.*partial*"))


def test_a_disk_that_is_full_before_the_index_is_written_costs_no_tokens(tmp_path, tokenizer, monkeypatch, caplog):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(10))
    tokenize_json([path], tmp_path / "one", tokenizer, options=SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(mmidx, "write_index", full)
        with pytest.raises(OSError, match="No space left on device while writing .*what is done is kept"):
            tokenize_json([path], tmp_path / "out", tokenizer, options=SMALL)
    assert not (tmp_path / "out.bin").exists()
    with caplog.at_level(logging.INFO, "megazero"):
        tokenize_json(
            [path], tmp_path / "out", StopAfter(tokenizer, 0), options=SMALL
        )  # no document is tokenized again
    assert "continuing after 0.0 MB" in caplog.text and contents(tmp_path / "out") == contents(tmp_path / "one")
    assert not list(tmp_path.glob("out.*partial*"))


def test_a_record_of_many_input_files_is_read_again(tmp_path):
    inputs = [{"name": f"part{i:06}.jsonl", "bytes": 10**9, "pieces_sha256": "0" * 64} for i in range(20_000)]
    sidecar = Sidecar("T", "s", 100, 0, 1, 1, {"inputs": inputs})
    write_sidecar(tmp_path / "c", sidecar)
    assert read_sidecar(tmp_path / "c") == sidecar


def test_a_corpus_of_text_is_never_overwritten_by_a_record(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "c.json", make_texts(3))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="c.json exists and is not a record"):
        tokenize_json([path], tmp_path / "c", tokenizer, options=SMALL)
    assert path.read_bytes() == before


def test_a_record_that_cannot_be_looked_at_now_is_not_taken_for_missing(tmp_path, make_stale):
    write_sidecar(tmp_path / "c", Sidecar("T", "s", 100, 0, 1, 1))
    make_stale("c.json")
    for use in (read_sidecar, remove_sidecar, check_free):
        with pytest.raises(OSError, match="Stale file handle: '.*c.json'"):
            use(tmp_path / "c")


class StopAfter:
    """A tokenizer that stops the run, as Ctrl-C does, after some documents."""

    def __init__(self, tokenizer, count):
        self.__dict__.update(vars(tokenizer), name=tokenizer.name, inner=tokenizer, left=count)

    def encode_array(self, text):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.inner.encode_array(text)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("commit_interval_s", [0, 1e9])
def test_stopped_anywhere_and_continued_equals_one_run(tmp_path, tokenizer, packed, commit_interval_s):
    parts = [write_jsonl(tmp_path / f"{i}.jsonl", make_texts(25, seed=i)) for i in range(2)]
    if packed:
        for i, part in enumerate(parts):
            parts[i] = part.with_suffix(".jsonl.gz")
            parts[i].write_bytes(gzip.compress(part.read_bytes()))
    tokenize_json(parts, tmp_path / "one", tokenizer, options=SMALL)
    options = WorkOptions(1, block_bytes=500, commit_interval_s=commit_interval_s)
    stops = 0
    for count in range(1, 1000, 7):
        try:
            tokenize_json(parts, tmp_path / "out", StopAfter(tokenizer, count), options=options)
            break
        except KeyboardInterrupt:
            stops += 1
            assert not (tmp_path / "out.idx").exists()
    assert stops >= 3 and contents(tmp_path / "out") == contents(tmp_path / "one")


def test_bad_lines_are_counted_once_over_a_stop(tmp_path, tokenizer):
    path = write_bad(tmp_path / "bad.jsonl")
    whole = tokenize_json([path], tmp_path / "one", tokenizer, options=SMALL)
    options = WorkOptions(1, block_bytes=1, commit_interval_s=0)
    with pytest.raises(KeyboardInterrupt):
        tokenize_json([path], tmp_path / "out", StopAfter(tokenizer, 5), options=options)
    assert tokenize_json([path], tmp_path / "out", tokenizer, options=options) == whole


def test_strict_deletes_nothing_that_was_done(tmp_path, tokenizer):
    path = write_bad(tmp_path / "bad.jsonl")
    whole = tokenize_json([path], tmp_path / "one", tokenizer, options=SMALL)
    options = WorkOptions(1, block_bytes=1, commit_interval_s=0)
    strict = replace(options, strict=True)
    with pytest.raises(ValueError, match="bad.jsonl:3: invalid UTF-8 .*drop --strict"):
        tokenize_json([path], tmp_path / "out", tokenizer, options=strict)
    # Of seven texts one is done, and without --strict it goes on from there.
    with pytest.raises(KeyboardInterrupt):
        tokenize_json([path], tmp_path / "out", StopAfter(tokenizer, 4), options=options)
    with pytest.raises(ValueError, match=r"bad.jsonl:3: .*\(found before the run was stopped\).*drop --strict"):
        tokenize_json([path], tmp_path / "out", tokenizer, options=strict)
    assert tokenize_json([path], tmp_path / "out", StopAfter(tokenizer, 2), options=options) == whole
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_an_input_that_changes_while_it_is_read_is_started_over(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(10))
    versions = iter(([{"version": 1}], [{"version": 2}]))
    with pytest.raises(ValueError, match="in.jsonl: changed while it was read. Start again"):
        tokenize_json([path], tmp_path / "out", tokenizer, options=SMALL, describe=lambda _: next(versions))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("damage", ["journal", "short", "other run", "no journal"])
def test_unusable_partial_files_are_started_over(tmp_path, tokenizer, damage):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(50))
    with pytest.raises(KeyboardInterrupt):
        tokenize_json([path], tmp_path / "out", StopAfter(tokenizer, 30), options=SMALL)
    journal = tmp_path / "out.partial.json"
    if damage == "journal":
        journal.write_text("{")
    elif damage == "short":
        os.truncate(tmp_path / "out.partial.0", 4)
    elif damage == "other run":
        write_jsonl(path, make_texts(50, seed=1))
    else:
        journal.unlink()
    tokenize_json([path], tmp_path / "one", tokenizer, options=SMALL)
    tokenize_json([path], tmp_path / "out", tokenizer, options=SMALL)
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_a_finished_corpus_that_is_damaged_is_made_again(tmp_path, tokenizer, suffix, caplog):
    """As the message says to whom it meets: `make them anew with data_tools/preprocess_data.py`."""
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(20))
    tokens = tokenize_json([path], tmp_path / "out", tokenizer, options=SMALL).tokens
    good = contents(tmp_path / "out")
    damaged = tmp_path / f"out{suffix}"
    if suffix == ".json":
        damaged.write_text(damaged.read_text().replace(f'"tokens": {tokens},', '"tokens": 3,'))
    else:
        os.truncate(damaged, damaged.stat().st_size - 2)
    tokenize_json([path], tmp_path / "out", tokenizer, options=SMALL)
    assert contents(tmp_path / "out") == good and "tokenizing again what is damaged" in caplog.text


def tokenize_and_count(path, prefix, folder, results):
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path=folder)
    results.put(tokenize_json([path], prefix, tokenizer, options=WorkOptions(2, block_bytes=5000)).tokens)


def test_several_processes_with_one_output(tmp_path, tokenizer, gpt2_folder):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(2000))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=tokenize_and_count, args=(path, tmp_path / "out", gpt2_folder, results), daemon=True)
        for _ in range(4)
    ]  # daemons may not have workers of their own
    for process in processes:
        process.start()
    assert len({results.get(timeout=60) for _ in processes}) == 1
    tokenize_json([path], tmp_path / "one", tokenizer, options=WorkOptions(1))
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_large_vocabulary_is_stored_in_32_bits(tmp_path, gpt2_folder):
    folder = make_gpt2_vocabulary(tmp_path / "v", 300)
    entries = json.loads((folder / "vocab.json").read_text())
    entries["<|endoftext|>"] = 70_000
    (folder / "vocab.json").write_text(json.dumps(entries))
    large = build_tokenizer("GPT2BPETokenizer", tokenizer_path=folder / "vocab.json")
    path = write_jsonl(tmp_path / "in.jsonl", ["the"])
    tokenize_json([path], tmp_path / "out", large, options=SMALL)
    data = IndexedDataset(tmp_path / "out")
    assert data.dtype == np.int32 and data.get(0)[-1] == 70_000


def test_log_lines_where_there_is_no_terminal(tmp_path, tokenizer, caplog):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(100))
    with caplog.at_level(logging.INFO, "megazero"):
        tokenize_json([path], tmp_path / "out", tokenizer, options=WorkOptions(1, block_bytes=200), log_interval=40)
    lines = [r.message for r in caplog.records if "MB/s" in r.message and "tokens/s" in r.message]
    assert len(lines) == 2
