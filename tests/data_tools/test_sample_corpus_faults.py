"""Planted faults: known in number, the same every time, and the clean documents untouched among them."""

from __future__ import annotations

import json

import pytest

from data_tools.sample_corpus_faults import FAULTS, plant_faults
from megazero.lines.jsonl import LineError, read_object
from tests.vocabularies import make_texts

DOCUMENTS = [{"text": text, "url": f"u{i}"} for i, text in enumerate(make_texts(400, longest=300))]


@pytest.fixture(scope="module")
def dump():
    return plant_faults(DOCUMENTS)


def test_same_documents_same_dump(dump):
    assert plant_faults(DOCUMENTS) == dump and plant_faults(DOCUMENTS, seed=1)[0] != dump[0]


def test_clean_documents_are_all_there_in_order_before_what_was_made_of_them(dump):
    lines = dump[0].split(b"\n")
    clean = [line for line in lines if b'"url": "u' in line and b"planted" not in line]
    assert [json.loads(line) for line in clean] == DOCUMENTS
    seen = set()
    for line in lines:
        if b"planted/exact_duplicate" in line:
            assert json.loads(line)["text"] in seen
        elif line in clean:
            seen.add(json.loads(line)["text"])


def test_numbers_of_faults_are_those_reported(dump):
    content, planted = dump
    assert planted == {fault: max(1, round(share * len(DOCUMENTS))) for fault, (share, _) in FAULTS.items()}
    lines = content.removesuffix(b"\n").split(b"\n")
    assert len(lines) == len(DOCUMENTS) + sum(planted.values())
    reasons = {"blank": 0, "bad": 0}
    for line in lines:
        try:
            if line.strip():
                read_object(line, "text")
            else:
                reasons["blank"] += 1
        except LineError:
            reasons["bad"] += 1
    bad = ("cut_json", "invalid_utf8", "no_text_key", "no_object")
    assert reasons == {"blank": planted["blank_line"], "bad": sum(planted[fault] for fault in bad)}
    texts = [json.loads(line)["text"] for line in lines if b"planted/unpaired_surrogate" in line]
    with pytest.raises(UnicodeEncodeError):
        texts[0].encode()
    assert len(texts) == planted["unpaired_surrogate"]


def test_broken_encodings_are_those_that_ftfy_mends(dump):
    ftfy = pytest.importorskip("ftfy")
    broken = [json.loads(line)["text"] for line in dump[0].split(b"\n") if b"planted/broken_encoding" in line]
    mended = [text for text in broken if ftfy.fix_text(text) != text]
    assert len(mended) > 0.9 * len(broken)
