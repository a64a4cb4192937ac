"""Training a vocabulary: lossless, deterministic, and free of traces of this machine."""

from __future__ import annotations

import gzip
import json
import os
import sys

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_tools import train_tokenizer
from data_tools.__main__ import main
from megazero.data.gpt2_bpe import END_OF_TEXT
from megazero.data.tokenizer import SentencePieceTokenizer, build_tokenizer
from tests.vocabularies import make_texts, write_jsonl


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")
    path = write_jsonl(folder / "in.jsonl", make_texts(400))
    flags = ["--input", str(path), "--vocab-size", "430", "--model-type", request.param]
    main(["train_tokenizer", *flags, "--model-prefix", str(folder / "new" / "spm")])
    return SentencePieceTokenizer(folder / "new" / "spm.model")


def test_size_and_end_of_text(trained):
    assert trained.vocab_size == 430 and trained.eod == 1 and trained.decode([1]) == END_OF_TEXT


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_every_text_survives(trained, text):
    ids = trained.encode(text)
    assert trained.decode(ids) == text and 0 not in ids and trained.eod not in ids


def test_white_space_and_ascii_are_not_spelled_in_bytes(trained):
    ids = trained.encode("!#$%&*+0123456789~ \n  ")
    bytes_from = 3  # unknown, end of text, the line's end; 256 bytes follow
    assert not any(bytes_from <= i < bytes_from + 256 for i in ids)


def test_same_text_gives_the_same_file_wherever_it_lies(tmp_path, capsys):
    contents = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        path = write_jsonl(tmp_path / name / f"{name}.jsonl", make_texts(100))
        flags = ["--input", str(path), "--vocab-size", "400", "--model-prefix", str(tmp_path / name / "m")]
        main(["train_tokenizer", *flags])
        contents.append((tmp_path / name / "m.model").read_bytes())
        result = json.loads(capsys.readouterr().out)
    assert contents[0] == contents[1] and str(tmp_path).encode() not in contents[0]
    assert result["vocab_size"] == 400 and result["bytes_per_token"] > 1.5


def test_sample_is_spread_and_always_the_same(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [f"document {i}" for i in range(2000)])
    size = path.stat().st_size / 1e6
    one, same = (train_tokenizer.sample_documents([path], "text", size / 4).texts for _ in range(2))
    assert one == same and 400 < len(one) < 600
    numbers = [int(line.split()[1]) for line in one]
    assert numbers == sorted(numbers) and 800 < sum(numbers) / len(numbers) < 1200
    assert len(train_tokenizer.sample_documents([path], "text", 1e3).texts) == 2000
    lines = path.read_bytes().splitlines(keepends=True)
    parts = [tmp_path / f"{i}.jsonl" for i in range(2)]
    for i, part in enumerate(parts):
        part.write_bytes(b"".join(lines[i * 1000 :][:1000]))
    in_parts = train_tokenizer.sample_documents(parts, "text", size / 4).texts
    assert in_parts == one, "how the corpus is cut into files does not matter"


def test_compressed_input_another_key_and_bad_lines(tmp_path):
    path = tmp_path / "in.jsonl.gz"
    lines = b'{"body": "one\\ntwo"}\n\nnot json\n{"body": "three \\ud800"}\n{"body": "", "id": 7}\n'
    path.write_bytes(gzip.compress(lines))
    sample = train_tokenizer.sample_documents([path], "body", 1)
    assert sample.texts == ["one\ntwo", "three \ufffd"] and sample.counts.bad_lines == 1
    assert sample.counts.errors[0].startswith(f"{path}:3: bad JSON")
    assert (sample.counts.lines, sample.counts.changed) == (5, 1)
    records = map(json.loads, b"".join(sample.left_out).splitlines())
    assert [(r["line"], r["id"], r["reason"]) for r in records] == [(3, None, "bad line"), (5, "7", "no text")]
    with pytest.raises(ValueError, match=":3: bad JSON.*drop --strict"):
        train_tokenizer.sample_documents([path], "body", 1, strict=True)


def run(capsys, *flags):
    main(["train_tokenizer", *flags])
    return json.loads(capsys.readouterr().out)


def test_byte_level_bpe_is_laid_out_as_gpt2s(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", make_texts(300))
    flags = ("--input", "in.jsonl", "--vocab-size", "400", "--model-type", "byte_level_bpe", "--model-prefix")
    result = run(capsys, *flags, "v")
    ours, reference = (
        build_tokenizer("GPT2BPETokenizer", tokenizer_path="v"),
        tokenizers.Tokenizer.from_file("v/tokenizer.json"),
    )
    assert result["sha256"] == ours.sha256 and ours.vocab_size == 400 and ours.eod == 399
    vocabulary = json.loads((tmp_path / "v" / "vocab.json").read_text())
    assert [len(token) for token, i in vocabulary.items() if i < 256] == [1] * 256, (
        "the bytes come first, as GPT-2's do"
    )
    for text in (*make_texts(100, seed=7), train_tokenizer.PROBE.replace(END_OF_TEXT, ""), "\U0001f44b \u0645\u0631"):
        assert ours.encode(text) == reference.encode(text).ids and ours.decode(ours.encode(text)) == text
    before = [(tmp_path / "v" / name).read_bytes() for name in ("vocab.json", "merges.txt", "tokenizer.json")]
    run(capsys, *flags, "w")
    assert [(tmp_path / "w" / name).read_bytes() for name in ("vocab.json", "merges.txt", "tokenizer.json")] == before


@pytest.mark.parametrize("model_type", train_tokenizer.MODEL_TYPES)
def test_a_word_of_a_megabyte_costs_no_more_than_others(tmp_path, capsys, model_type):
    long = ["x " + " " * 1_000_000 + "y", "z" * 1_000_000]  # on the first of which tiktoken gives up
    path = write_jsonl(tmp_path / "in.jsonl", [*make_texts(100), *long])
    flags = ["--input", str(path), "--vocab-size", "400", "--model-type", model_type]
    # With the square of the word, it would take hours.
    main(["train_tokenizer", *flags, "--model-prefix", str(tmp_path / "v")])
    assert json.loads(capsys.readouterr().out)["sampled_documents"] == 102


@pytest.mark.parametrize("model_type", ["bpe", "byte_level_bpe"])
def test_what_is_there_is_not_made_again(tmp_path, monkeypatch, capsys, model_type):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", make_texts(100))
    flags = ("--input", "in.jsonl", "--vocab-size", "400", "--model-type", model_type, "--model-prefix", "m")
    first = run(capsys, *flags)
    again = run(capsys, *flags)
    assert again == {**first, "skipped": True, "seconds": again["seconds"]}
    assert not run(capsys, *flags, "--sample-mb", "31")["skipped"]
    model = tmp_path / ("m.model" if model_type == "bpe" else "m/merges.txt")
    whole = model.read_bytes()
    model.write_bytes(whole[: len(whole) // 2])
    assert not run(capsys, *flags)["skipped"] and model.read_bytes() == whole


@pytest.mark.parametrize("model_type", ["bpe", "byte_level_bpe"])
def test_a_kill_while_it_trains_leaves_the_old_one_and_a_kill_later_nothing_half(
    tmp_path, monkeypatch, capsys, model_type
):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", make_texts(100))
    flags = ("--input", "in.jsonl", "--model-type", model_type, "--model-prefix", "m", "--vocab-size")
    folder = tmp_path / "m" if model_type == "byte_level_bpe" else tmp_path

    def content():
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".model", ".txt")}

    def dies(*_):
        raise KeyboardInterrupt

    run(capsys, *flags, "400")
    old = content()
    for name in ("train_tokenizer._train", "done_marker.write_marker"):
        with monkeypatch.context() as patch:
            patch.setattr(f"data_tools.{name}", dies)
            with pytest.raises(SystemExit, match="stopped"):
                main(["train_tokenizer", *flags, "410"])
        if name == "train_tokenizer._train":
            assert content() == old and run(capsys, *flags, "400")["skipped"]
    assert not (tmp_path / "m.done.json").exists() and content().keys() == old.keys()
    assert not run(capsys, *flags, "410")["skipped"] and content().keys() == old.keys() and content() != old
    assert not list(tmp_path.glob("m.partial*")) and run(capsys, *flags, "410")["skipped"]


def test_the_sample_of_a_parquet_file_has_the_size_that_was_asked_for(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts, path = make_texts(4000), tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), path, compression="gzip")
    whole = sum(len(text.encode()) for text in texts) / 1e6
    assert 2.5 < whole * 1e6 / path.stat().st_size < 6  # as text is compressed
    sample = train_tokenizer.sample_documents([path], "text", whole / 8).texts
    assert 0.5 < sum(len(text.encode()) for text in sample) / 1e6 / (whole / 8) < 1.5


def test_memory_bounds_the_sample(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(10))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "%s"}\n' % (b"x" * 1000) * 5000))
    with pytest.raises(ValueError, match="larger than its files let expect: more than --sample-mb 0.01 after"):
        train_tokenizer.sample_documents([tmp_path / "a.jsonl.gz"], "text", 0.01, max_line_bytes=2000)
    with pytest.raises(
        SystemExit, match="error: --memory 512M is too little to train bpe on --sample-mb 1000, which needs"
    ):
        main(
            ["train_tokenizer", "--input", str(path), "--model-prefix", "m", "--memory", "512M", "--sample-mb", "1000"]
        )


@pytest.mark.parametrize(
    "flags, message",
    [
        ("absent.jsonl", "error: --input absent.jsonl: there is no such file"),
        ("in.jsonl --json-key body", "error: no line of in.jsonl holds a text under the key 'body'"),
        ("in.jsonl --sample-mb 0", "error: --sample-mb must be positive, got 0"),
        ("in.jsonl --vocab-size 100000", "error: --vocab-size 100000 cannot be trained on this text"),
        ("in.jsonl --vocab-size 100", "error: --vocab-size 100 cannot be trained on this text"),
        (
            "in.jsonl --model-type byte_level_bpe",
            "error: --vocab-size 8192 cannot be trained on this text: it has merges for",
        ),
        ("in.jsonl --model-type byte_level_bpe --vocab-size 256", "error: --vocab-size 256 cannot"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", make_texts(50))
    with pytest.raises(SystemExit) as error:
        main(["train_tokenizer", "--model-prefix", "m", "--input", *flags.split()])
    assert str(error.value).startswith(message)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["in.jsonl"]


def test_a_missing_package_is_named_and_only_where_it_is_needed(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(100))
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if not installed
    flags = ["--input", str(path), "--vocab-size", "400", "--model-prefix", str(tmp_path / "m")]
    with pytest.raises(SystemExit, match="error: --model-type byte_level_bpe needs .*: pip install tokenizers"):
        main(["train_tokenizer", *flags, "--model-type", "byte_level_bpe"])
    assert os.listdir(tmp_path) == ["in.jsonl"]
    main(["train_tokenizer", *flags])
    assert (tmp_path / "m.model").exists()
