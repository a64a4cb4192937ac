"""The command line of tokenizing: flags, file names, one JSON line, errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_tools import preprocess_data
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.tokenizer import build_tokenizer
from tests.vocabularies import make_gpt2_vocabulary, make_sentencepiece, make_texts, write_jsonl

SCRIPT = Path(preprocess_data.__file__)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_gpt2_vocabulary(tmp_path / "v")
    write_jsonl(tmp_path / "in.jsonl", make_texts(30))
    return tmp_path


def run(capsys, *flags):
    preprocess_data.main([*flags])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_files_and_statistics_of_each_key(folder, capsys):
    results = run(
        capsys,
        *(
            "--input",
            "in.jsonl",
            "--json-keys",
            "text",
            "url",
            "--output-prefix",
            "out/c",
            "--append-eod",
            "--workers",
            "1",
        ),
        *("--vocab-file", "v/vocab.json", "--merge-file", "v/merges.txt", "--dataset-impl", "mmap"),
    )
    tokenizer = build_tokenizer("GPT2BPETokenizer", model_file="v")
    assert [r["prefix"] for r in results] == ["out/c_text_document", "out/c_url_document"]
    assert sorted(os.listdir("out")) == [
        f"c_{key}_document.{end}" for key in ("text", "url") for end in ("bin", "idx", "json")
    ]
    for result, texts in zip(results, (make_texts(30), [f"u{i}" for i in range(30)]), strict=True):
        data = IndexedDataset(result["prefix"])
        assert [data.get(i).tolist() for i in range(30)] == [[*tokenizer.encode(text), tokenizer.eod] for text in texts]
        assert (result["documents"], result["tokens"], result["lines"], result["bad_lines"]) == (
            30,
            data.num_tokens,
            30,
            0,
        )
        assert result["tokenizer_sha256"] == tokenizer.sha256


def test_without_append_eod_documents_end_with_their_text(folder, capsys):
    run(capsys, "--input", "in.jsonl", "--output-prefix", "c", "--tokenizer-path", "v", "--workers", "1")
    tokenizer = build_tokenizer("GPT2BPETokenizer", model_file="v")
    assert IndexedDataset("c_text_document").get(0).tolist() == tokenizer.encode(make_texts(30)[0])


def test_other_tokenizers(folder, capsys):
    make_sentencepiece(folder / "s.model")
    common = ("--input", "in.jsonl", "--workers", "1")
    run(
        capsys,
        *common,
        "--output-prefix",
        "s",
        "--tokenizer-type",
        "SentencePieceTokenizer",
        "--tokenizer-path",
        "s.model",
    )
    run(capsys, *common, "--output-prefix", "h", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-path", "v")
    run(capsys, *common, "--output-prefix", "g", "--tokenizer-path", "v")
    s, h, g = (IndexedDataset(f"{name}_text_document").get(3).tolist() for name in "shg")
    assert h == g != s


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--input", "absent.jsonl", "--tokenizer-path", "v"], "error: --input absent.jsonl: there is no such file"),
        (["--input", "in.jsonl"], "error: GPT2BPETokenizer needs --vocab-file"),
        (["--input", "in.jsonl", "--tokenizer-path", "v", "--workers", "0"], "error: --workers must be at least 1"),
        (
            ["--input", "in.jsonl", "--tokenizer-path", "v", "--json-keys", "body"],
            "error: no line of in.jsonl holds a text",
        ),
        (["--input", "bad.jsonl", "--tokenizer-path", "v", "--strict"], "error: bad.jsonl:2: bad JSON"),
    ],
)
def test_errors_are_one_line(folder, flags, message):
    (folder / "bad.jsonl").write_text('{"text": "a"}\n{\n')
    with pytest.raises(SystemExit) as error:
        preprocess_data.main([*flags, "--output-prefix", "c"])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_script_runs_by_itself_and_keeps_standard_output_for_the_result(folder):
    flags = ["--input", "in.jsonl", "--output-prefix", "c", "--tokenizer-path", "v", "--log-interval", "10"]
    done = subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["documents"] == 30 and "tokens/s" in done.stderr
    again = subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=True)
    assert "is there already" in again.stderr
