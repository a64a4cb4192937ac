"""Training a vocabulary: lossless, deterministic, and free of traces of this machine."""

from __future__ import annotations

import gzip
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_tools import train_tokenizer
from megazero.data.gpt2_bpe import END_OF_TEXT
from megazero.data.tokenizer import SentencePieceTokenizer
from tests.vocabularies import make_texts, write_jsonl


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")
    path = write_jsonl(folder / "in.jsonl", make_texts(400))
    flags = ["--input", str(path), "--vocab-size", "430", "--model-type", request.param, "--threads", "1"]
    train_tokenizer.main([*flags, "--model-prefix", str(folder / "new" / "spm")])
    return SentencePieceTokenizer(folder / "new" / "spm.model")


def test_size_and_end_of_text(trained):
    assert trained.vocab_size == 430 and trained.eod == 1 and trained.decode([1]) == END_OF_TEXT


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        flags = [
            "--input",
            str(path),
            "--vocab-size",
            "400",
            "--model-prefix",
            str(tmp_path / name / "m"),
            "--threads",
            "1",
        ]
        train_tokenizer.main(flags)
        contents.append((tmp_path / name / "m.model").read_bytes())
        result = json.loads(capsys.readouterr().out)
    assert contents[0] == contents[1] and str(tmp_path).encode() not in contents[0]
    assert result["vocab_size"] == 400 and result["bytes_per_token"] > 1.5


def test_sample_is_spread_and_always_the_same(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [f"document {i}" for i in range(2000)])
    size = path.stat().st_size / 1e6
    one, same = (train_tokenizer.sample_lines([path], "text", size / 4) for _ in range(2))
    assert one == same and 400 < len(one) < 600
    numbers = [int(line.split()[1]) for line in one]
    assert numbers == sorted(numbers) and 800 < sum(numbers) / len(numbers) < 1200
    assert len(train_tokenizer.sample_lines([path], "text", 1e3)) == 2000


def test_compressed_input_and_another_key(tmp_path):
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"body": "one\\ntwo"}\nnot json\n{"body": "three"}\n'))
    assert train_tokenizer.sample_lines([path], "body", 1) == ["one", "two", "three"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--input", "absent.jsonl"], "error: --input absent.jsonl: there is no such file"),
        (["--input", "in.jsonl", "--json-key", "body"], "error: no line of in.jsonl holds a text under the key 'body'"),
        (
            ["--input", "in.jsonl", "--vocab-size", "100000"],
            "error: --vocab-size 100000 cannot be trained on this text",
        ),
        (["--input", "in.jsonl", "--vocab-size", "100"], "error: --vocab-size 100 cannot be trained on this text"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", make_texts(50))
    with pytest.raises(SystemExit) as error:
        train_tokenizer.main([*flags, "--model-prefix", "m", "--threads", "1"])
    assert str(error.value).startswith(message)
    assert not (tmp_path / "m.model").exists()


def test_a_megabyte_takes_seconds(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(6000))
    start = time.perf_counter()
    train_tokenizer.main(["--input", str(path), "--vocab-size", "500", "--model-prefix", str(tmp_path / "m")])
    assert time.perf_counter() - start < 30
