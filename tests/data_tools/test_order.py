"""merge, shuffle and split: nothing lost, nothing added, the same result for any workers, memory and order of the input."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from data_tools import shards
from data_tools.inputs import list_inputs
from data_tools.options import RunOptions
from data_tools.shuffle import plan_layout
from megazero.lines.compressed import open_bytes
from tests.bad_disks import full
from tests.data_tools.steps import dropped, read_documents, run_step, write_documents

pytest.importorskip("zstandard")

ROOT = Path(__file__).resolve().parents[2]
LITTLE = ("--block-kb", 4, "--max-line-mb", 0.05)


@pytest.fixture
def corpus(tmp_path):
    """Three files of 200 documents."""
    for number in range(3):
        documents = [{"id": f"{number}.{i}", "text": f"document {i} of {number} " * (i % 9 + 1)} for i in range(200)]
        write_documents(tmp_path / "in" / f"part{number}.jsonl.gz", documents)
    return tmp_path / "in"


def ids(path):
    return [document["id"] for document in read_documents(path)]


def test_merge_keeps_all_in_order_and_reports_a_repeated_id(tmp_path, corpus):
    write_documents(
        corpus / "z.jsonl",
        [{"id": "1.7", "text": "again"}, {"text": "no id"}, {"text": "no id"}, {"id": 7, "text": ""}],
    )
    flags = ("--input", corpus, "--output", tmp_path / "all.jsonl.zst")
    statistics = run_step("merge", *flags)
    expected = [f"{number}.{i}" for number in range(3) for i in range(200)]
    assert [d.get("id") for d in read_documents(tmp_path / "all.jsonl.zst")] == [*expected, None, None, 7]
    assert dropped(tmp_path / "all.jsonl.zst") == {"1.7": "duplicate id"}
    assert statistics["first_errors"] == [f"{corpus}/z.jsonl:1: duplicate id 1.7"]
    with pytest.raises(ValueError, match=r"z.jsonl:1: duplicate id 1.7.*--strict"):
        run_step("merge", "--input", corpus, "--output", tmp_path / "strict.jsonl", "--strict")
    assert not (tmp_path / "strict.jsonl").exists()
    assert run_step("merge", *flags, "--id-key", "")["kept"] == 604


@pytest.mark.parametrize("step", ["merge", "shuffle"])
def test_each_line_is_parsed_once(tmp_path, corpus, monkeypatch, step):
    """And once more, to say what it is, where it is left out; and up to a file's first document, to see that it has one."""
    (corpus / "z.jsonl").write_text('{"id": "bad"\n{"id": "1.7", "text": "again"}\n\n')
    parsed, loads = [], json.loads
    monkeypatch.setattr("megazero.lines.jsonl.json.loads", lambda text: parsed.append(text) or loads(text))
    statistics = run_step(step, "--input", corpus, "--output", tmp_path / "a.jsonl")
    again = [] if step == "shuffle" else ['{"id": "1.7", "text": "again"}', '{"id": "bad"']
    files = [open_bytes(path).read().decode().splitlines() for path in sorted(corpus.iterdir())]
    lines = [line for file in files for line in (*file[: 1 + file[0].endswith('"bad"')], *file) if line]
    assert sorted(text for text in parsed if isinstance(text, str) and '"id"' in text) == sorted([*lines, *again])
    assert (statistics["kept"], statistics["bad_lines"], statistics["blank_lines"]) == (601 - (step == "merge"), 1, 1)


def test_shuffle_is_a_permutation_that_only_the_seed_changes(tmp_path, corpus):
    flags = ("--input", corpus, *LITTLE)
    run_step("shuffle", *flags, "--output", tmp_path / "a.jsonl.gz")
    run_step("shuffle", *flags, "--output", tmp_path / "b.jsonl.gz", "--workers", 2, "--memory", "400M")
    # Other order of the input, other files.
    run_step("merge", "--input", *sorted(corpus.iterdir(), reverse=True), "--output", tmp_path / "reverse.jsonl")
    run_step("shuffle", "--input", tmp_path / "reverse.jsonl", *LITTLE, "--output", tmp_path / "c.jsonl.gz")
    run_step("shuffle", *flags, "--output", tmp_path / "d.jsonl.gz", "--seed", 5)
    expected = [f"{number}.{i}" for number in range(3) for i in range(200)]
    order = ids(tmp_path / "a.jsonl.gz")
    assert sorted(order) == sorted(expected) and order != expected
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert ids(tmp_path / "c.jsonl.gz") == order
    other = ids(tmp_path / "d.jsonl.gz")
    assert sorted(other) == sorted(expected) and sum(a == b for a, b in zip(order, other, strict=True)) < 20
    assert sum(order[i].split(".")[0] == order[i + 1].split(".")[0] for i in range(599)) == pytest.approx(200, abs=50)


def test_shuffle_through_many_buckets_into_shards_equals_one_bucket(tmp_path, corpus, monkeypatch):
    flags = ("--input", corpus, "--shards", 3, *LITTLE, "--format", "jsonl.zst")
    run_step("shuffle", *flags, "--output", tmp_path / "one")
    layout = plan_layout(sorted(corpus.iterdir()), 3, RunOptions(block_bytes=4096))
    assert layout.buckets == 1 and layout.frames > 5
    many = replace(layout, buckets=layout.frames)
    monkeypatch.setattr("data_tools.shuffle.plan_layout", lambda *_: many)
    run_step("shuffle", *flags, "--output", tmp_path / "many")
    names = sorted(path.name for path in (tmp_path / "one").glob("*.zst"))
    assert len(names) == 3 and sorted(path.name for path in (tmp_path / "many").glob("*.zst")) == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()
        assert len(ids(tmp_path / "one" / name)) > 100
    assert not (tmp_path / "many" / "shuffled.buckets").exists()


@pytest.mark.parametrize("seed", ["1234", "5"])
@pytest.mark.parametrize("where", ["_gather", "finish"])
def test_a_shuffle_that_fails_while_sorting_goes_on_unless_it_was_another(tmp_path, corpus, monkeypatch, where, seed):
    (corpus / "z.jsonl").write_text('{"id": "bad"\n{"text": "good"}\n')
    flags = ("--input", corpus, "--output", tmp_path / "a.jsonl", *LITTLE)
    with monkeypatch.context() as patch:
        patch.setattr(f"data_tools.shuffle.{where}", full)
        with pytest.raises(OSError, match="No space left"):
            run_step("shuffle", *flags, "--seed", seed)
    assert not (tmp_path / "a.jsonl").exists() and (tmp_path / "a.jsonl.buckets").exists()
    run_step("shuffle", *flags)
    run_step("shuffle", "--input", corpus, "--output", tmp_path / "b.jsonl", *LITTLE)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert (tmp_path / "a.jsonl.dropped.jsonl").read_text().count("\n") == 1
    before = (tmp_path / "a.jsonl").stat().st_mtime_ns
    (tmp_path / "a.jsonl.buckets").mkdir()  # a kill at the very end leaves them
    assert run_step("shuffle", *flags)["shards_skipped"] == 1 and (tmp_path / "a.jsonl").stat().st_mtime_ns == before
    assert not (tmp_path / "a.jsonl.buckets").exists()


def test_a_shuffle_for_which_memory_is_too_little_is_refused(tmp_path, corpus, monkeypatch):
    flags = ("--input", corpus, "--output", tmp_path / "a.jsonl", *LITTLE)
    monkeypatch.setattr("data_tools.shuffle._bucket_memory", lambda options: 1000)
    with pytest.raises(ValueError, match="larger than its files let expect: a worker needs 0M. Give more --memory"):
        run_step("shuffle", *flags)
    monkeypatch.setattr("data_tools.shuffle.open_files", lambda most: most - 1)
    with pytest.raises(ValueError, match="--memory is too little to shuffle 0M of text with [0-9]+ files open"):
        run_step("shuffle", *flags)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["shuffle", "merge"])
def test_a_corpus_larger_than_the_memory_is_no_trouble(tmp_path, step):
    lines = "".join(
        json.dumps({"id": i, "text": hashlib.sha256(str(i).encode()).hexdigest() * 60}) + "\n" for i in range(100_000)
    )
    (tmp_path / "a.jsonl").write_text(lines)  # 386 MB
    flags = [step, *"--input a.jsonl --output b.jsonl --memory 256M --max-line-mb 1 --workers 1".split()]
    program = (
        "import sys; from data_tools.__main__ import main; main(sys.argv[1:]); "
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program, *flags], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) * 1024 < 256 << 20
    assert sorted((tmp_path / "b.jsonl").read_text().splitlines()) == sorted(lines.splitlines())


def test_split_puts_each_document_into_one_part_that_only_its_id_and_the_seed_decide(tmp_path, corpus):
    flags = ("--parts", "train=0.8", "valid=0.15", "test=0.05")
    statistics = run_step("split", "--input", corpus, "--output", tmp_path / "a", *flags)
    assert set(statistics["parts"]) == {"train.jsonl.gz", "valid.jsonl.gz", "test.jsonl.gz"}
    parts = {name: ids(tmp_path / "a" / f"{name}.jsonl.gz") for name in ("train", "valid", "test")}
    assert sorted(sum(parts.values(), [])) == sorted(f"{number}.{i}" for number in range(3) for i in range(200))
    assert [len(part) for part in parts.values()] == pytest.approx([480, 90, 30], abs=25)
    # A part of the corpus, in another order and format.
    some = ("--input", corpus / "part2.jsonl.gz", corpus / "part0.jsonl.gz", "--format", "jsonl")
    run_step("split", *some, "--output", tmp_path / "b", *flags, "--workers", 2, *LITTLE)
    for name, part in parts.items():
        expected = [i for number in "20" for i in part if i[0] == number]
        assert ids(tmp_path / "b" / f"{name}.jsonl") == expected
    run_step("split", *some, "--output", tmp_path / "c", *flags, "--seed", 1)
    assert ids(tmp_path / "c" / "valid.jsonl") != ids(tmp_path / "b" / "valid.jsonl")


@pytest.mark.parametrize(
    "parts", [["train=0.5"], ["a=0.5", "a=0.5"], ["a=x", "b=0.5"], ["../a=0.5", "b=0.5"], ["a=1", "b=0"]]
)
def test_parts_are_checked(tmp_path, corpus, parts):
    with pytest.raises(ValueError, match="--parts"):
        run_step("split", "--input", corpus, "--output", tmp_path / "a", "--parts", *parts)


def test_several_files_do_not_fit_into_one(tmp_path, corpus):
    flags = ("--input", corpus, "--output", tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="a.jsonl: each part is a file of its own"):
        run_step("split", *flags)
    with pytest.raises(ValueError, match="--shards 2 files do not fit into the file --output .*a.jsonl"):
        run_step("shuffle", *flags, "--shards", 2)
    with pytest.raises(ValueError, match="--shards must be at least 1, got 0"):
        run_step("shuffle", "--input", corpus, "--output", tmp_path / "a", "--shards", 0)


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_a_part_without_a_document_is_an_error(tmp_path, corpus, kind):
    flags = ("--input", corpus, "--output", tmp_path / "a", "--parts", "train=0.9999", "test=0.0001", "--format", kind)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"--parts: test.{kind} of .*a got none of the 600 documents"):
            run_step("split", *flags)


def test_files_of_an_earlier_run_do_not_stay_among_those_of_a_later_one(tmp_path, corpus):
    more = {"split": ("--parts", "train=0.5", "valid=0.25", "test=0.25"), "shuffle": ("--shards", 3)}
    less = {"split": ("--parts", "train=0.5", "valid=0.5"), "shuffle": ("--shards", 2)}
    for step in more:
        flags = ("--input", corpus, "--output", tmp_path / step)
        run_step(step, *flags, *more[step])
        made = {path: path.read_bytes() for path in (tmp_path / step).iterdir()}
        for other, stays in (
            (less[step], "(test|shuffled-00000-of-00003).jsonl.gz"),
            ((*more[step], "--format", "jsonl"), "(train|shuffled-00000-of-00003).jsonl.gz"),
        ):
            with pytest.raises(ValueError, match=f"{step} holds {stays}.* of an earlier run"):
                run_step(step, *flags, *other)
        assert {path: path.read_bytes() for path in (tmp_path / step).iterdir()} == made
        for path in made:
            path.unlink()
        assert run_step(step, *flags, *less[step])["kept"] == 600
        assert sum(len(ids(path)) for path in (tmp_path / step).glob("*.gz")) == 600
        assert run_step(step, *flags, *less[step])["shards_skipped"] == 1


def test_an_empty_id_is_none(tmp_path):
    path = write_documents(tmp_path / "a.jsonl", [{"text": text, "id": ""} for text in "abc"])
    assert run_step("merge", "--input", path, "--output", tmp_path / "b.jsonl")["kept"] == 3


@pytest.mark.parametrize(
    ("step", "flags"), [("shuffle", ("--shards", 3)), ("split", ("--parts", "train=0.5", "valid=0.5"))]
)
def test_a_folder_whose_step_was_killed_between_its_files_is_no_input(tmp_path, corpus, monkeypatch, step, flags):
    made, replace_file = [], os.replace

    def killed_at_the_second(source, target):
        if Path(target).parent == tmp_path / "out" and "dropped" not in Path(target).name:
            made.append(target)
        if len(made) == 2:
            raise KeyboardInterrupt
        replace_file(source, target)

    monkeypatch.setattr(shards.os, "replace", killed_at_the_second)
    arguments = (step, "--input", corpus, "--output", tmp_path / "out", *flags)
    with pytest.raises(KeyboardInterrupt):
        run_step(*arguments)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has not finished"):
        list_inputs([tmp_path / "out"])
    run_step(*arguments)
    assert sum(len(read_documents(path)) for path in list_inputs([tmp_path / "out"])) == 600
