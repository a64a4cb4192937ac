"""What a value of --train-data stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_tools.merge_datasets import find_prefixes
from megazero.data.corpora import Corpus, find_corpora, find_sets, has_split_off, is_json
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import Sidecar, write_sidecar


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = "plain.bin plain.idx c_text_document.bin c_text_document.idx v1.5.idx loose.jsonl l.json.gz t.txt"
    for name in names.split():
        (tmp_path / name).write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    "entry, path, is_indexed",
    [
        ("plain", "plain", True),
        ("plain.bin", "plain", True),
        ("plain.idx", "plain", True),
        ("c", "c_text_document", True),
        ("c_text_document", "c_text_document", True),
        ("v1.5", "v1.5", True),
        ("loose.jsonl", "loose.jsonl", False),
        ("l.json.gz", "l.json.gz", False),
    ],
)
def test_entries(folder, entry, path, is_indexed):
    assert find_corpora([entry]) == [Corpus(Path(path), is_indexed)]


def test_record_of_an_indexed_corpus_stands_for_the_corpus(folder):
    write_sidecar("plain", Sidecar("t", "s", 1, 0, 0, 0))
    assert find_corpora(["plain.json"]) == [Corpus(Path("plain"), True)]
    (folder / "c_text_document.json").write_text('{"text": "a corpus of its own"}\n')
    assert find_corpora(["c_text_document.json"]) == [Corpus(Path("c_text_document.json"), False)]


def test_weights(folder):
    assert find_corpora(["0.3", "plain", "7e-1", "c"]) == [
        Corpus(Path("plain"), True, 0.3),
        Corpus(Path("c_text_document"), True, 0.7),
    ]
    assert [c.weight for c in find_corpora(["plain", "c"])] == [None, None]


@pytest.mark.parametrize(
    "entries", [["0.3", "plain", "c"], ["plain", "0.3"], ["0.3", "0.7"], ["plain", "c", "0.3", "plain"], ["3"]]
)
def test_weights_for_some_corpora_only_are_refused(folder, entries):
    with pytest.raises(ValueError, match="--valid-data .*: give a weight before every corpus .* or none at all"):
        find_corpora(entries, "--valid-data")


@pytest.mark.parametrize("weight", ["0", "-1"])
def test_weights_that_are_not_positive_are_refused(folder, weight):
    with pytest.raises(ValueError, match="the weight .* of c is not a positive number"):
        find_corpora(["1", "plain", weight, "c"])


@pytest.mark.parametrize("entries", [["plain", "c", "plain"], ["0.3", "plain", "0.7", "./plain.bin"], ["webtext"] * 2])
def test_a_corpus_that_is_named_twice_is_refused(folder, entries):
    """Both have the same order, so every batch would have the same samples twice."""
    (folder / "data/webtext").mkdir(parents=True)
    (folder / "data/webtext/data.json").write_text("")
    with pytest.raises(ValueError, match="--valid-data names .* more than once. Name it once, with the sum"):
        find_corpora(entries, "--valid-data")


def test_sets_have_names_before_their_first_corpora(folder):
    assert find_sets(["plain", "c"], "--valid-data") == {"": find_corpora(["plain", "c"])}
    assert find_sets(["a=plain", "b=0.3", "plain", "0.7", "c", "d=./c"], "--valid-data") == {
        "a": find_corpora(["plain"]),
        "b": find_corpora(["0.3", "plain", "0.7", "c"]),
        "d": find_corpora(["c"]),
    }
    (folder / "a=b.idx").write_bytes(b"")
    assert find_sets(["./a=b"], "--valid-data") == {"": [Corpus(Path("a=b"), True)]}


@pytest.mark.parametrize("entries", [["=plain"], ["a=", "plain"], ["a=plain", "a=c"], ["plain", "a=c"]])
def test_sets_without_a_name_or_a_corpus_or_with_the_name_of_another_are_refused(folder, entries):
    with pytest.raises(ValueError, match="--test-data .*: give every set a name of its own .* or none at all; .* ./"):
        find_sets(entries, "--test-data")


def test_number_as_a_file_name(folder):
    (folder / "7.idx").write_bytes(b"")
    assert find_corpora(["./7"]) == [Corpus(Path("7"), True)]


def test_webtext_and_wikipedia(folder):
    with pytest.raises(
        FileNotFoundError, match="neither data/webtext/\\*.bin nor data/webtext/data.json below .*ln -s"
    ):
        find_corpora(["webtext"])
    (folder / "data/webtext").mkdir(parents=True)
    (folder / "data/wikipedia").mkdir(parents=True)
    (folder / "data/webtext/data.json").write_text("")
    (folder / "data/wikipedia/wikidump_lines.json").write_text("")
    assert find_corpora(["webtext"]) == [Corpus(Path("data/webtext/data.json"), False)]
    assert find_corpora(["wikipedia"]) == [Corpus(Path("data/wikipedia/wikidump_lines.json"), False)]
    for name in ("b.bin", "a.v2.bin"):
        (folder / "data/webtext" / name).write_bytes(b"")
    assert find_corpora(["0.5", "webtext", "0.5", "plain"]) == [
        Corpus(Path("data/webtext/a.v2"), True, 0.25),
        Corpus(Path("data/webtext/b"), True, 0.25),
        Corpus(Path("plain"), True, 0.5),
    ]
    parts = ("train", "valid", "test")
    for part in parts:  # as scripts/prepare_webtext.sh leaves them
        (folder / f"data/webtext/{part}_text_document.bin").write_bytes(b"")
    for part in parts:
        assert find_corpora(["webtext"], f"--{part}-data") == [Corpus(Path(f"data/webtext/{part}_text_document"), True)]
    assert len(find_corpora(["webtext"], "inspect")) == 5
    (folder / "data/webtext/test_text_document.bin").unlink()
    with pytest.raises(FileNotFoundError, match="--test-data webtext: .* has train_.*, but no test_.*.bin"):
        find_corpora(["webtext"], "--test-data")
    assert has_split_off(["webtext"], "valid") and not has_split_off(["webtext"], "test")
    (folder / "data/webtext/train_text_document.bin").unlink()  # then the rest is trained on
    assert not has_split_off(["webtext"], "valid")


def test_missing_and_foreign_files(folder):
    with pytest.raises(
        FileNotFoundError, match="--train-data nothing: found no nothing.idx, no nothing_text_document.idx"
    ):
        find_corpora(["nothing"])
    with pytest.raises(
        ValueError, match="t.txt is neither an indexed corpus .* nor loose JSON .*made JSON lines first"
    ):
        find_corpora(["t.txt"])
    Path("tokens.npy").touch()
    with pytest.raises(ValueError, match="tokens.npy is neither .*python -m data_tools import_tokens"):
        find_corpora(["tokens.npy"])
    Path("train.bin").touch()
    with pytest.raises(
        FileNotFoundError, match="train.idx is missing.*python -m data_tools import_tokens of .*nanoGPT, llm.c"
    ):
        IndexedDataset(find_corpora(["train.bin"])[0].path)


def test_names_of_json():
    names = ("a.json", "a.jsonl", "a.ndjson", "a.json.gz", "a.jsonl.xz", "a.jsonl.zst", "a.txt", "a.gz", "json")
    assert [is_json(Path(name)) for name in names] == [True] * 6 + [False] * 3


def test_tokens_that_are_still_being_made_are_not_left_out_of_a_name_or_a_folder(folder):
    (folder / "data/webtext").mkdir(parents=True)
    for name in ("train_a", "train_b", "valid"):
        (folder / f"data/webtext/{name}_text_document.bin").write_bytes(b"")
        (folder / f"data/webtext/{name}_text_document.idx").write_bytes(b"")
    (folder / "data/webtext/clean.jsonl.partial.json").write_text("{}")  # of a step before
    assert len(find_corpora(["webtext"])) == 2
    for suffix in (".bin", ".idx"):
        (folder / f"data/webtext/train_b_text_document{suffix}").unlink()
    (folder / "data/webtext/train_b_text_document.partial.json").write_text("{}")
    with pytest.raises(ValueError, match="^data/webtext/train_b_text_document: the run that makes .* has not finished"):
        find_corpora(["webtext"])
    with pytest.raises(ValueError, match="train_b_text_document: the run that makes .* has not finished"):
        find_prefixes(["data/webtext"])
    assert len(find_corpora(["webtext"], "--valid-data")) == 1
    (folder / "data/wikipedia").mkdir()
    (folder / "data/wikipedia/a_text_document.partial.json").write_text("{}")
    with pytest.raises(ValueError, match="a_text_document: the run that makes .* has not finished"):
        find_corpora(["wikipedia"])
