"""The frame of all steps: same output for any number of workers, resumable, every fault reported, nothing half-made."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from data_tools.__main__ import main
from data_tools.documents import document_blocks, dump
from data_tools.done_marker import made_once
from data_tools.inputs import list_inputs
from data_tools.line_functions import DocumentLines, Dropped, unchanged
from data_tools.options import RunOptions, size
from data_tools.repeats import RepeatedLines
from data_tools.shard_plan import plan_shards
from data_tools.shards import run_lines
from megazero.data.cache import ArrayCache
from megazero.lines.jsonl import Block
from megazero.lines.outputs import check_ours
from megazero.lines.partial_shard import PartialShard
from megazero.lines.progress import Progress
from tests.data_tools.steps import read_documents, run_step, write_documents
from tests.traced import traced_peak
from tests.vocabularies import make_texts

zstandard = pytest.importorskip("zstandard")

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = RunOptions(block_bytes=2000, max_line_bytes=50_000, commit_interval_s=0.0)


def shout(document):
    if len(document["text"]) < 40:
        raise Dropped("short", detail=f"{len(document['text'])} characters")
    return {**document, "text": document["text"].upper()} if "the" in document["text"] else document


class Fuse:
    """`shout`, but kills its process at one document as long as the file `fuse` exists."""

    def __init__(self, fuse, at):
        self.fuse, self.at = fuse, at

    def __call__(self, document):
        if document["id"] == self.at and self.fuse.exists():
            self.fuse.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return shout(document)


def make_files(folder, count=3, documents=60):
    folder.mkdir(exist_ok=True)
    texts = make_texts(count * documents, seed=1, longest=40)
    paths = []
    for number in range(count):
        part = [{"id": f"{number}-{i}", "text": texts[number * documents + i]} for i in range(documents)]
        paths.append(folder / f"part{number}.jsonl.gz")
        paths[-1].write_bytes(gzip.compress(b"".join(map(dump, part))))
    return paths


def run(inputs, output, function=shout, options=OPTIONS, format=None, **changes):
    options = RunOptions(**{**vars(options), **changes})
    shards = plan_shards(list_inputs(inputs), output, format, named=inputs)
    return run_lines("shout", shards, DocumentLines(function, "text"), {"shout": 1}, options)


def hashes(folder, *, markers=False):
    """Name -> SHA-256 of the outputs and dropped lists in a folder."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if markers or not path.name.endswith(".done.json")
    }


def documents_of(path):
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    return read_documents(path)


@pytest.mark.parametrize("format, workers", [("jsonl", 2), ("jsonl.gz", 2), ("jsonl.zst", 3), ("parquet", 2)])
def test_any_number_of_workers_writes_the_same_bytes_in_every_format(tmp_path, format, workers):
    inputs = make_files(tmp_path / "in")
    statistics = [run(inputs, tmp_path / f"out{n}", workers=n, format=format) for n in (1, workers)]
    assert hashes(tmp_path / "out1") == hashes(tmp_path / f"out{workers}")
    assert statistics[0] == statistics[1] and statistics[0]["documents"] == 180
    assert statistics[0]["kept"] + statistics[0]["dropped"]["short"] == 180
    expected = []
    for document in (document for path in inputs for document in documents_of(path)):
        try:
            expected.append(shout(document))
        except Dropped:
            continue
    found = [d for n in range(3) for d in documents_of(tmp_path / "out1" / f"part{n}.{format}")]
    assert found == expected
    # What was written is read again as an input of the next step: nothing changes any more.
    again = run([tmp_path / "out1"], tmp_path / "again.jsonl", workers=1)
    assert again["kept"] == len(expected)
    assert [d["id"] for d in documents_of(tmp_path / "again.jsonl")] == [d["id"] for d in expected]


def test_the_dropped_list_names_file_line_id_and_reason(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(dump({"text": "x" * 50, "url": "u0"}) + b"\n" + dump({"text": "few", "url": "u1"}) + b"no\n")
    run([path], tmp_path / "out.jsonl", workers=1)
    records = documents_of(tmp_path / "out.jsonl.dropped.jsonl")
    assert records[0] == {"file": str(path), "line": 3, "id": "u1", "reason": "short", "detail": "3 characters"}
    assert (records[1]["line"], records[1]["id"], records[1]["reason"]) == (4, None, "bad line")


def test_a_line_that_stays_keeps_its_bytes(tmp_path):
    odd = b'{ "text" : "\\u00e9 ' + b"x" * 60 + b'" ,"n": 1.0 }\r\n'
    (tmp_path / "a.jsonl").write_bytes(odd)
    run([tmp_path / "a.jsonl"], tmp_path / "b.jsonl", workers=1)
    assert (tmp_path / "b.jsonl").read_bytes() == odd


UNGUARDED = """
import argparse
from data_tools.options import add_input_output, add_run_options
from data_tools.shards import run_documents
parser = argparse.ArgumentParser()
add_input_output(parser)
add_run_options(parser)
run_documents("own", abs, {}, parser.parse_args())
"""


def test_a_step_of_ones_own_without_a_guarded_main_is_told_so(tmp_path):
    (tmp_path / "own.py").write_text(UNGUARDED)
    write_documents(tmp_path / "a.jsonl", [{"text": "some words"}] * 500)
    command = [sys.executable, "own.py", *"--input a.jsonl --output b.jsonl --workers 2 --block-kb 1".split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and run.stderr.endswith("under if __name__ == '__main__'.\n"), run.stderr


BAD_LINES = {
    b'{"text": "\xff\xfe"}': "invalid UTF-8",
    b'{"text": "cut off': "bad JSON",
    b'{"body": "no text"}': "no key 'text' (its keys: body)",
    b'{"text": 5}': "not a string but int",
    b"[1, 2]": "not a JSON object but list",
    b'{"text": "' + b"x" * 60_000 + b'"}': "a line of 60013 bytes, more than the 50000 allowed (--max-line-mb",
}


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_each_bad_line_is_counted_and_reported_with_file_and_line(tmp_path, ending):
    from data_tools.documents import compress

    good = dump({"text": "y" * 100})
    path = tmp_path / f"a.{ending}"
    path.write_bytes(compress(good + b"".join(bad + b"\n" + good for bad in BAD_LINES), path))
    statistics = run([path], tmp_path / "b.jsonl", workers=1)
    assert (statistics["bad_lines"], statistics["kept"]) == (len(BAD_LINES), len(BAD_LINES) + 1)
    for number, (error, reason) in enumerate(zip(statistics["first_errors"], BAD_LINES.values(), strict=True)):
        assert error.startswith(f"{path}:{2 * number + 2}: ") and reason in error
    assert len((tmp_path / "b.jsonl.dropped.jsonl").read_text().splitlines()) == len(BAD_LINES)


@pytest.mark.parametrize("bad", BAD_LINES)
def test_strict_stops_at_a_bad_line_and_leaves_no_output(tmp_path, bad):
    (tmp_path / "a.jsonl").write_bytes(dump({"text": "y" * 100}) + bad + b"\n")
    with pytest.raises(ValueError, match="a.jsonl:2: .*--strict"):
        run([tmp_path / "a.jsonl"], tmp_path / "b.jsonl", workers=1, strict=True)
    assert not (tmp_path / "b.jsonl").exists() and not (tmp_path / "b.jsonl.done.json").exists()
    assert run([tmp_path / "a.jsonl"], tmp_path / "b.jsonl", workers=1)["bad_lines"] == 1
    # A shard that was made without --strict does not hide its faults.
    with pytest.raises(ValueError, match="a.jsonl:2: "):
        run([tmp_path / "a.jsonl"], tmp_path / "b.jsonl", workers=1, strict=True)


def test_empty_files_make_empty_outputs_and_are_reported(tmp_path, caplog):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(b"")
    statistics = run([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "out", workers=1)
    assert statistics["empty_files"] == 2 and "a.jsonl is empty" in caplog.text
    assert (tmp_path / "out" / "b.jsonl").read_bytes() == b""


def test_a_zst_file_of_the_longest_window_is_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=31, hash_log=6, chain_log=6)
    # A stream knows no size, so its frame has the whole window.
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(stream.compress(dump({"text": "the " * 20})) + stream.flush())
    assert run([tmp_path / "a.jsonl.zst"], tmp_path / "b.jsonl", workers=1)["kept"] == 1


@pytest.mark.parametrize("ending", ["gz", "xz", "zst"])
def test_a_cut_off_file_is_an_error_that_names_it(tmp_path, ending):
    import lzma

    pack = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.ZstdCompressor().compress}[ending]
    data = pack(b"".join(dump({"text": f"{i} {random.Random(i).random()}" * 20}) for i in range(200)))
    (tmp_path / f"a.jsonl.{ending}").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=f"a.jsonl.{ending}: damaged or cut off"):
        run([tmp_path / f"a.jsonl.{ending}"], tmp_path / "b.jsonl", workers=1)
    assert not (tmp_path / "b.jsonl").exists()


@pytest.mark.parametrize("format", ["jsonl.zst", "parquet"])
def test_a_killed_run_goes_on_and_equals_an_uninterrupted_one(tmp_path, format, caplog):
    inputs = make_files(tmp_path / "in")
    fuse = tmp_path / "fuse"
    run(inputs, tmp_path / "whole", workers=1, format=format)
    fuse.touch()
    process = get_context("fork").Process(target=_killed_run, args=(inputs, tmp_path / "killed", fuse, format))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and not fuse.exists()
    names = set(os.listdir(tmp_path / "killed"))
    assert f"part0.{format}" in names and f"part1.{format}" not in names and f"part1.{format}.partial.json" in names
    # Nor does the next step take it for whole.
    with pytest.raises(ValueError, match=f"part1.{format} has not finished"):
        list_inputs([tmp_path / "killed"])
    for uncommitted in (f"part1.{format}.partial.0", f"part1.{format}.dropped.partial"):
        with open(tmp_path / "killed" / uncommitted, "ab") as file:
            file.write(b"written after the last commit " * 30_000)
    (tmp_path / "killed" / f"part1.{format}.tmp0123abcd").write_bytes(b"written aside")
    caplog.set_level("INFO")
    statistics = run(inputs, tmp_path / "killed", workers=1, format=format)
    assert statistics["shards_skipped"] == 1 and f"part1.{format}: continuing after" in caplog.text
    assert hashes(tmp_path / "killed", markers=True) == hashes(tmp_path / "whole", markers=True)


@pytest.mark.parametrize("value", [[1, "text"], "\ud800", 1 << 63, {}])
def test_documents_that_fit_into_no_table_are_said_to(tmp_path, value):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.jsonl").write_bytes(dump({"text": "some text " * 9, "value": value}))
    with pytest.raises(ValueError, match="a.parquet: the documents do not fit into a table: .*Use --format jsonl"):
        run([tmp_path / "a.jsonl"], tmp_path / "a.parquet", workers=1)


@pytest.mark.parametrize(
    ("source", "output", "module", "purpose"),
    [
        ("a.parquet", "b.jsonl", "pyarrow", "reading .*a.parquet"),
        ("a.wet", "b.jsonl", "fastwarc.warc", "reading .*a.wet"),
        ("a.jsonl", "b.parquet", "pyarrow", "writing .*b.parquet"),
        ("a.jsonl", "b.jsonl.zst", "zstandard", "writing .*b.jsonl.zst"),
    ],
)
def test_a_package_that_a_format_needs_is_named(tmp_path, monkeypatch, source, output, module, purpose):
    (tmp_path / source).write_bytes(dump({"text": "some text " * 9}))
    monkeypatch.setitem(sys.modules, module, None)  # as if not installed
    package = module.partition(".")[0]
    with pytest.raises(ValueError, match=f"{purpose} needs .*: pip install {package}"):
        run([tmp_path / source], tmp_path / output, workers=1)


def test_rows_are_not_longer_than_lines_may_be(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = ["z" * 60_000, *("a" * 400 for _ in range(9)), "b" * 60_000, "c", "d" * 60_000]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), path)
    counts = run([path], tmp_path / "out", function=unchanged, workers=1)
    assert (counts["kept"], counts["bad_lines"]) == (10, 3)
    assert re.match(f"{path}:11: a line of 60...? bytes, more than the 50000 allowed", counts["first_errors"][1])
    blocks = list(document_blocks(path, 2000, max_line_bytes=50_000))
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]
    assert sum(block.fault is not None for block in blocks) == 3
    assert sum(block.disk_bytes for block in blocks) == pytest.approx(path.stat().st_size, abs=1)
    for number, block in enumerate(blocks):
        assert list(document_blocks(path, 2000, block.start, 0, 50_000))[1:] == blocks[number + 1 :]
        others = list(document_blocks(path, 3000, block.start, 0, 50_000))  # of another size: no line is lost
        assert (others[0].start, others[-1].stop) == (block.start, blocks[-1].stop)


@pytest.mark.parametrize(
    "value, fault",
    [(float("nan"), "Out of range float"), (b"\0", "JSON has no bytes"), (timedelta(1), "JSON has no timedelta")],
)
def test_values_in_rows_that_json_has_not_are_told(tmp_path, value, fault):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "value": [None, value]}), tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match=f"a.parquet: row 2: {fault}.* Write such columns as strings, or leave them out"
    ):
        run([tmp_path / "a.parquet"], tmp_path / "out", function=unchanged, workers=1)


def test_times_and_decimals_in_rows_become_strings(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    noon = datetime(2024, 2, 29, 12, 0, 0, 250)
    column = {"at": [noon], "in": [[noon.replace(tzinfo=timezone.utc)]], "on": [noon.date()], "from": [noon.time()]}
    table = pyarrow.table({"text": ["a"], **column, "price": [Decimal("1.50")]})
    parquet.write_table(table, tmp_path / "a.parquet")
    run([tmp_path / "a.parquet"], tmp_path / "out.jsonl", function=unchanged, workers=1)
    times = {"at": "2024-02-29T12:00:00.000250", "in": ["2024-02-29T12:00:00.000250+00:00"], "on": "2024-02-29"}
    [document] = documents_of(tmp_path / "out.jsonl")
    assert document == {"text": "a", **times, "from": "12:00:00.000250", "price": "1.50"}


def test_the_memory_for_rows_does_not_grow_with_their_length(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, text = tmp_path / "a.parquet", "z" * (1 << 20)
    parquet.write_table(pyarrow.table({"text": [f"{number}{text}" for number in range(60)]}), path)
    with traced_peak() as peak:
        assert sum(1 for _ in document_blocks(path, 1 << 20)) == 60
        assert peak() < 30 << 20  # some rows and copies of one, not all 60


def test_an_output_in_the_input_folder_is_refused_at_once(tmp_path, monkeypatch):
    make_files(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    for output in ("in/all.jsonl", "in/clean"):
        with pytest.raises(
            ValueError, match=f"--output .*{output} lies in the folder --input .*in: the next run would"
        ):
            list_inputs([tmp_path / "in"], output=output)
    assert len(list_inputs([tmp_path / "in"], output=tmp_path / "input.jsonl")) == 3
    merge = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "in" / "all.jsonl")]
    with pytest.raises(SystemExit, match="lies in the folder"):
        main(["merge", *merge])
    assert not (tmp_path / "in" / "all.jsonl").exists()


def test_what_was_made_while_an_input_changed_is_made_again(tmp_path):
    path = write_documents(tmp_path / "in.jsonl", [{"text": f"{number} the letters " * 9} for number in range(60)])
    content = path.read_bytes()

    def changes(document):
        path.write_bytes(content.replace(b"letters", b"numbers"))
        return shout(document)

    with pytest.raises(ValueError, match="in.jsonl was changed while it was read"):
        run([path], tmp_path / "out", function=changes, workers=1)
    path.write_bytes(content)
    for folder in ("out", "alone"):
        run([path], tmp_path / folder, workers=1)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "alone")


def test_a_fault_that_was_found_before_a_stop_is_fatal_with_strict_afterwards(tmp_path):
    inputs = make_files(tmp_path / "in", count=1)
    lines = [b"{no document}", *gzip.decompress(inputs[0].read_bytes()).splitlines()]
    inputs[0].write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))

    def stops(document):
        if document["id"] == "0-59":
            raise KeyboardInterrupt
        return shout(document)

    with pytest.raises(KeyboardInterrupt):
        run(inputs, tmp_path / "out", stops, workers=1)
    assert json.loads((tmp_path / "out" / "part0.jsonl.gz.partial.json").read_bytes())["state"]["counts"]["bad_lines"]
    with pytest.raises(ValueError, match=r"part0.jsonl.gz:1: bad JSON.*\(found before the run was stopped\)"):
        run(inputs, tmp_path / "out", workers=1, strict=True)
    assert run(inputs, tmp_path / "out", workers=1)["bad_lines"] == 1


def _killed_run(inputs, output, fuse, format):
    run(inputs, output, Fuse(fuse, "1-40"), workers=1, format=format)


def test_a_worker_that_dies_is_an_error_after_which_the_run_goes_on(tmp_path):
    inputs = make_files(tmp_path / "in")
    fuse = tmp_path / "fuse"
    fuse.touch()
    with pytest.raises(RuntimeError, match="worker process died"):
        run(inputs, tmp_path / "out", Fuse(fuse, "1-40"), workers=2)
    assert not (tmp_path / "out" / "part1.jsonl.gz").exists()
    run(inputs, tmp_path / "out", workers=2)
    run(inputs, tmp_path / "whole", workers=1)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_finished_shards_are_skipped_until_input_settings_or_output_change(tmp_path):
    inputs = make_files(tmp_path / "in")
    out = tmp_path / "out"
    assert run(inputs, out, workers=1)["shards_skipped"] == 0
    before = hashes(out, markers=True)
    assert run(inputs, out, workers=1)["shards_skipped"] == 3 and hashes(out, markers=True) == before
    inputs[1].write_bytes(gzip.compress(dump({"id": "new", "text": "n" * 80})))
    assert run(inputs, out, workers=1)["shards_skipped"] == 2
    (out / "part2.jsonl.gz").write_bytes(b"cut")
    assert run(inputs, out, workers=1)["shards_skipped"] == 2
    assert run(inputs, out, workers=1, max_line_bytes=60_000)["shards_skipped"] == 0
    assert (out / "part2.jsonl.gz").stat().st_size > 3


def test_a_finished_shard_is_whole_although_a_run_with_other_settings_was_stopped(tmp_path):
    inputs = make_files(tmp_path / "in", count=1)
    run(inputs, tmp_path / "out", workers=1)
    before = hashes(tmp_path / "out", markers=True)

    def stops(document):
        if document["id"] == "0-59":
            raise KeyboardInterrupt
        return shout(document)

    with pytest.raises(KeyboardInterrupt):
        run(inputs, tmp_path / "out", stops, workers=1, max_line_bytes=60_000)
    with pytest.raises(ValueError, match="part0.jsonl.gz has not finished. Start it again"):
        list_inputs([tmp_path / "out"])
    assert run(inputs, tmp_path / "out", workers=1)["shards_skipped"] == 1
    assert list_inputs([tmp_path / "out"]) == [tmp_path / "out" / "part0.jsonl.gz"]
    assert hashes(tmp_path / "out", markers=True) == before


def test_an_output_that_is_an_input_is_refused(tmp_path):
    inputs = make_files(tmp_path / "in", count=1)
    (tmp_path / "link").symlink_to("in")
    for output in ("in", "link"):
        with pytest.raises(ValueError, match="is an input too"):
            run(inputs, tmp_path / output, workers=1)


def test_two_runs_with_an_output_in_common_do_not_write_it_at_once(tmp_path):
    inputs = make_files(tmp_path / "in", count=2, documents=5)
    (shard,) = plan_shards(inputs[1:], tmp_path / "out")
    other = PartialShard(shard, "of a run over other inputs")
    with pytest.raises(ValueError, match="part1.jsonl.gz: another process is writing it"):
        run(inputs, tmp_path / "out", workers=1)
    other.close()
    assert run(inputs, tmp_path / "out", workers=1)["documents"] == 10
    assert not [name for name in os.listdir(tmp_path / "out") if "writing" in name or "partial" in name]


@pytest.mark.parametrize("name", ["out.txt", "out.csv", "out.jsonl.xz"])
def test_a_file_of_another_kind_is_not_made_a_folder(tmp_path, name):
    inputs = make_files(tmp_path / "in", count=1, documents=5)
    with pytest.raises(
        ValueError, match=f"--output .*{name}: such files are not written. Name one that ends in .jsonl, "
    ):
        run(inputs, tmp_path / name, workers=1)
    assert not (tmp_path / name).exists()


def test_a_step_that_keeps_nothing_says_so(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(dump({"text": "few"}))
    assert run([tmp_path / "a.jsonl"], tmp_path / "b.jsonl", workers=1)["kept"] == 0
    assert "shout: kept none of 1 documents; dropped: {'short': 1}" in caplog.text


def test_inputs_are_checked(tmp_path):
    inputs = make_files(tmp_path / "in", count=1)
    (tmp_path / "link").symlink_to("in")
    for name in ("in", "link"):
        with pytest.raises(ValueError, match="named twice"):
            list_inputs([inputs[0], tmp_path / name])
    with pytest.raises(FileNotFoundError, match="no such file"):
        list_inputs([tmp_path / "absent.jsonl"])
    (tmp_path / "b.csv").touch()
    with pytest.raises(ValueError, match="unknown kind"):
        list_inputs([tmp_path / "b.csv"])
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="holds no files"):
        list_inputs([tmp_path / "other"])
    (tmp_path / "other" / "part0.jsonl").touch()
    with pytest.raises(ValueError, match="would both become"):
        run([inputs[0], tmp_path / "other" / "part0.jsonl"], tmp_path / "out", workers=1, format="jsonl")


def test_a_folder_does_not_get_the_same_documents_in_two_formats(tmp_path):
    inputs = make_files(tmp_path / "in", count=2)
    run(inputs, tmp_path / "out", workers=1, format="jsonl")
    with pytest.raises(ValueError, match="out holds part0.jsonl, part1.jsonl of an earlier run"):
        run(inputs, tmp_path / "out", workers=1, format="parquet")
    assert not list((tmp_path / "out").glob("*.parquet*"))
    (tmp_path / "out" / "part0.jsonl").unlink()
    (tmp_path / "out" / "part1.jsonl").unlink()
    assert run(inputs, tmp_path / "out", workers=1, format="parquet")["shards_skipped"] == 0


@pytest.mark.parametrize(
    "step, ending, flags",
    [
        ("clean", "jsonl", ["--min-tokens", 0, "--language", "any", "--no-fix"]),
        ("dedup", "jsonl", []),
        ("merge", "jsonl", []),
        ("filter_urls", "txt", []),
        ("apply", "jsonl", ["--function", "../../mine.py:same"]),
    ],
)
def test_what_lies_in_subfolders_comes_into_such_subfolders(tmp_path, monkeypatch, step, ending, flags):
    names = ["2024/a/0", "2024/b/0", "2025/0", "0"]
    for name in names:
        write_documents(tmp_path / "in" / f"{name}.{ending}", [{"text": f"of {name}"}])
    (tmp_path / "mine.py").write_text("def same(document):\n    return document\n")
    monkeypatch.chdir(tmp_path / "in" / "2025")

    def made(output, *inputs):
        statistics = run_step(step, "--input", *inputs, "--output", output, *flags)
        found = (path.relative_to(output).with_suffix("") for path in output.rglob(f"0.{ending}"))
        return sorted(map(str, found)), statistics["shards_skipped"]

    assert made(tmp_path / "out", tmp_path / "in") == (sorted(names), 0)
    assert made(tmp_path / "out", "..") == (sorted(names), 4)
    assert made(tmp_path / "next", tmp_path / "out") == (sorted(names), 0)
    assert made(tmp_path / "parts", ".", "../2024") == (["0", "a/0", "b/0"], 0)
    assert made(tmp_path / "file", f"../2024/a/0.{ending}") == (["0"], 0)
    with pytest.raises(ValueError, match=f"file holds 0.{ending} of an earlier run"):
        made(tmp_path / "file", "../2024")
    with pytest.raises(ValueError, match="would both become .* name a folder above both"):
        made(tmp_path / "both", "../2024/a", "../2024/b")


def test_inputs_that_differ_in_their_format_alone_have_an_output_each(tmp_path):
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_bytes(dump({"text": name}))
    for skipped in (0, 2):
        assert (
            run([tmp_path / "a.jsonl", tmp_path / "a.json"], tmp_path / "out", workers=1)["shards_skipped"] == skipped
        )


def test_a_folder_stands_for_all_documents_below_it(tmp_path, monkeypatch):
    (inputs,) = make_files(tmp_path / "in", count=1)
    (elsewhere,) = make_files(tmp_path / "elsewhere", count=1)
    (tmp_path / "in" / "linked").symlink_to(elsewhere.parent)
    (tmp_path / "in" / "latest").symlink_to(".")
    for name, target in {"latest": ".", "again": "part", "back": tmp_path / "in"}.items():
        (elsewhere.parent / name).symlink_to(target)
    (elsewhere.parent / "part").mkdir()
    (elsewhere.parent / "part" / "a.jsonl").touch()
    linked = tmp_path / "in" / "linked"
    assert list_inputs([tmp_path / "in"]) == [linked / "part" / "a.jsonl", linked / elsewhere.name, inputs]
    (tmp_path / "in" / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="gone.jsonl"):
        run([tmp_path / "in"], tmp_path / "out.jsonl", workers=1)
    scandir = os.scandir  # of root, who may run the tests, permissions are not asked

    def refused(path):
        if Path(path).name == "linked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(PermissionError, match="linked"):
        list_inputs([tmp_path / "in"])


def test_what_cannot_be_looked_at_now_is_neither_left_out_nor_kept_nor_overwritten(tmp_path, make_stale):
    write_documents(tmp_path / "in" / "a.jsonl", [{"text": "a"}])
    write_documents(tmp_path / "in" / "b.jsonl", [{"text": "b"}])
    repeated = RepeatedLines(tmp_path, [tmp_path / "in" / "a.jsonl"], "repeat")
    repeated.add(np.array([0]))
    for name in ("b.jsonl", "0.places"):
        make_stale(name)
    with pytest.raises(OSError, match="Stale file handle: '.*b.jsonl'"):
        list_inputs([tmp_path / "in"])
    with pytest.raises(OSError, match="Stale file handle: '.*b.jsonl'"):
        check_ours([tmp_path / "in" / "b.jsonl"], "--output")
    with pytest.raises(OSError, match="Stale file handle: '.*0.places'"):
        repeated(Block(tmp_path / "in" / "a.jsonl", 0, 0, 9))


def test_other_files_of_a_folder_are_told(tmp_path, caplog):
    for name in ("a.jsonl", "b.ndjson", "c.ndjson.gz"):
        write_documents(tmp_path / "in" / name, [{"text": name}])
    run_step("merge", "--input", tmp_path / "in", "--output", tmp_path / "made")
    assert [path.name for path in list_inputs([tmp_path / "made"])] == [
        "a.jsonl",
        "b.jsonl",
        "c.jsonl",
    ]
    assert not caplog.text
    for name in ("d.jsonl.bz2", "e.JSONL", ".hidden", "a.jsonl.tmp0123abcd", *(f"x{i}.md" for i in range(4))):
        (tmp_path / "in" / name).touch()
    (tmp_path / "in" / "manifest.json").touch()
    (tmp_path / "in" / ".ipynb_checkpoints").mkdir()
    for name in ("a-checkpoint.jsonl", "y.md"):
        (tmp_path / "in" / ".ipynb_checkpoints" / name).touch()
    assert len(list_inputs([tmp_path / "in"])) == 3
    assert "in: left out 6 files of other kinds: d.jsonl.bz2, e.JSONL, x0.md, x1.md, x2.md, ..." in caplog.text


def test_the_index_cache_of_a_job_is_no_input(tmp_path):
    (document,) = make_files(tmp_path / "in", count=1)
    cache = ArrayCache(tmp_path / "in" / "cache")
    cache.load_or_build({"kind": "gpt2", "name": "tr[a]in"}, lambda: {"doc_idx": np.arange(3)})
    (record,) = cache.folder.glob("*.json")
    assert list_inputs([tmp_path / "in"]) == [document]
    like_it = record.rename(record.with_name(f"page-{'0' * 32}.json"))  # without arrays
    assert list_inputs([tmp_path / "in"]) == sorted([document, like_it])


def test_progress_without_a_terminal_logs_rates_and_the_time_left(caplog):
    caplog.set_level("INFO")
    with Progress("clean", 400, log_documents=1) as progress:
        progress.skip(100)
        progress.update(3, 150, 100)
    assert re.search(r"clean: 50%, [\d,]+ documents/s, [\d.]+ MB/s, ETA 00:00", caplog.text)


def test_sizes_are_in_powers_of_1024():
    assert [size(text) for text in ("2G", "2gb", "2 GiB", "1.5K", "7")] == [2 << 30] * 3 + [1536, 7]


def test_workers_for_which_memory_is_too_little_are_told(tmp_path, caplog):
    caplog.set_level("INFO")
    path = write_documents(tmp_path / "a.jsonl", [{"text": "a"}])
    run_step("merge", "--input", path, "--output", tmp_path / "b.jsonl", "--workers", 64)
    assert "--memory allows 7 of 64 --workers" in caplog.text


def test_memory_bounds_the_number_of_workers():
    options = RunOptions(workers=64, memory_bytes=2 << 30)
    assert options.workers_in_memory * options.worker_bytes <= 2 << 30 and options.workers_in_memory > 1
    with pytest.raises(ValueError, match="--memory 10M is too little"):
        RunOptions(memory_bytes=10 << 20)
    holding = RunOptions(workers=64, memory_bytes=2 << 30, held_bytes=300 << 20)  # which each process has a copy of
    assert 1 <= holding.workers_in_memory < options.workers_in_memory
    assert (holding.workers_in_memory + 1) * holding.worker_bytes <= 2 << 30
    with pytest.raises(ValueError, match="--memory 512M is too little .* and 300M of what the step looks for"):
        RunOptions(memory_bytes=512 << 20, held_bytes=300 << 20)


def test_of_two_runs_at_a_time_one_makes_the_file_and_the_other_waits_for_it(tmp_path):
    begun, made, path = threading.Event(), [], tmp_path / "new" / "folder" / "a.txt"

    def make(file):
        made.append(file.write(b"text"))
        begun.set()
        time.sleep(0.5)
        return {"bytes": 4}

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(made_once, path, [path], "key", make)
        begun.wait(60)
        second = pool.submit(made_once, path, [path], "key", make)
    assert (first.result(), second.result(), made) == (({"bytes": 4}, False), ({"bytes": 4}, True), [4])
    assert sorted(os.listdir(path.parent)) == ["a.txt", "a.txt.done.json"]
