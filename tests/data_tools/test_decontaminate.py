"""Documents that share a sequence of words with an evaluation set are found, whatever their punctuation, and no others."""

from __future__ import annotations

import random
from functools import cache

import pytest

from data_tools import decontaminate
from data_tools.decontaminate import evaluation_table
from data_tools.dedup_minhash import ngrams
from data_tools.options import RunOptions
from tests.data_tools.steps import dropped, read_documents, run_step, write_documents

QUESTION = "Which of the two rivers that meet below the old town carries more water in a dry summer?"  # 18 words
WORDS = [f"w{i}" for i in range(300)]


def sentence(seed, count=200):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def test_shared_sequences_and_no_others(tmp_path):
    words = QUESTION.split()
    other_form = ",\n - ".join(words).upper()
    documents = {
        "clean": sentence(1),
        "whole": f"{sentence(2)} {QUESTION} {sentence(3)}",
        "other form": f"{sentence(4)} {other_form} {sentence(5)}",
        "thirteen words": " ".join([*words[3:16], *words[3:16]]),
        "fifteen words": " ".join(words[:15]),
        "twelve words": f"{sentence(6)} {' '.join(words[3:15])} {sentence(7)}",
        "other order": " ".join(sorted(words)),
        "from the text file": " ".join(f"line{i}" for i in range(20)),
        "short": "few words",
    }
    path = write_documents(tmp_path / "a.jsonl", [{"id": name, "text": text} for name, text in documents.items()])
    write_documents(tmp_path / "questions.jsonl", [{"question": QUESTION}, {"question": "Too short?"}])
    (tmp_path / "plain.txt").write_text(" ".join(f"line{i}" for i in range(40)))
    flags = ("--input", path, "--evaluation", tmp_path / "questions.jsonl", tmp_path / "plain.txt")
    with pytest.raises(ValueError, match="questions.jsonl:1: no key 'text'.*--evaluation-key"):
        run_step("decontaminate", *flags, "--output", tmp_path / "b.jsonl")
    flags = (*flags, "--evaluation-key", "question")
    statistics = run_step("decontaminate", *flags, "--output", tmp_path / "b.jsonl")
    assert [d["id"] for d in read_documents(tmp_path / "b.jsonl")] == ["clean", "twelve words", "other order", "short"]
    assert statistics["evaluation_sequences"] == 6 + 28 and statistics["evaluation_texts_too_short"] == 1
    reasons = dropped(tmp_path / "b.jsonl")
    sequence = "two rivers that meet below the old town carries more water in a"
    assert reasons["thirteen words"] == f"contaminated questions.jsonl: {sequence}"
    assert reasons["from the text file"].startswith("contaminated plain.txt: line0 line1 ")
    run_step("decontaminate", *flags, "--output", tmp_path / "c.jsonl", "--min-matches", 3)
    assert list(dropped(tmp_path / "c.jsonl")) == ["whole", "other form", "fifteen words", "from the text file"]
    assert run_step("decontaminate", *flags, "--output", tmp_path / "c.jsonl", "--min-matches", 4)["kept"] == 6
    assert run_step("decontaminate", *flags, "--output", tmp_path / "d.jsonl", "--ngram", 12)["kept"] == 3


def test_scripts_without_spaces_are_compared_letter_by_letter(tmp_path):
    question = "在旧城下游汇合的两条河流中哪一条在干旱的夏天水量更大"
    texts = {
        "copy": f"今天的文章说{question}没有人知道",
        "other": f"今天的文章说{question[::-1]}",
        "latin": f"see{question}x2",
    }
    path = write_documents(tmp_path / "a.jsonl", [{"id": name, "text": text} for name, text in texts.items()])
    (tmp_path / "e.txt").write_text(question, encoding="utf-8")
    run_step("decontaminate", "--input", path, "--output", tmp_path / "b.jsonl", "--evaluation", tmp_path / "e.txt")
    assert list(dropped(tmp_path / "b.jsonl")) == ["copy", "latin"]


def test_one_form_of_each_letter_is_compared(tmp_path):
    words = [f"w{i}" for i in range(12)]
    texts = {"accents": " ".join([*words, "E\u0301TE\u0301"]), "ligature": " ".join([*words, "\ufb01ne"])}
    path = write_documents(tmp_path / "a.jsonl", [{"id": name, "text": text} for name, text in texts.items()])
    (tmp_path / "e.txt").write_text(" ".join([*words, "\u00e9t\u00e9", *words, "fine"]), encoding="utf-8")
    run_step("decontaminate", "--input", path, "--output", tmp_path / "b.jsonl", "--evaluation", tmp_path / "e.txt")
    assert list(dropped(tmp_path / "b.jsonl")) == ["accents", "ligature"]


def test_evaluation_files_that_cannot_be_read_are_named_with_their_flag(tmp_path):
    path = write_documents(tmp_path / "a.jsonl", [{"text": QUESTION}])
    flags = ("--input", path, "--output", tmp_path / "b.jsonl", "--evaluation", tmp_path / "e.txt")
    with pytest.raises(FileNotFoundError, match="--evaluation .*e.txt: there is no such file"):
        run_step("decontaminate", *flags)
    (tmp_path / "e.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="--evaluation .*e.txt is not UTF-8 text, at byte 3"):
        run_step("decontaminate", *flags)
    (tmp_path / "e.txt").write_text("too short")
    with pytest.raises(ValueError, match="--evaluation: none of the texts has --ngram 13 words"):
        run_step("decontaminate", *flags)
    for name, content in {"e.jsonl": "", "f.jsonl": '{"text": ""}\n', "f.txt": "\n"}.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=f"--evaluation .*{name}: it holds no text"):
            run_step("decontaminate", *flags, tmp_path / name)


def test_sequences_of_no_word_no_matches_and_too_little_memory_are_refused(tmp_path, monkeypatch):
    path = write_documents(tmp_path / "a.jsonl", [{"text": QUESTION}])
    flags = ("--input", path, "--output", tmp_path / "b.jsonl", "--evaluation", path)
    for wrong in ("--ngram", "--min-matches"):
        with pytest.raises(ValueError, match=f"{wrong} 0 .*must be at least 1"):
            run_step("decontaminate", *flags, wrong, 0)
    monkeypatch.setattr(decontaminate, "_BYTES_PER_NGRAM", 1 << 28)
    with pytest.raises(ValueError, match="--evaluation: more than 6 sequences .*Give at least 6144M"):
        run_step("decontaminate", *flags)


def test_more_evaluation_files_than_16_bits_can_number(tmp_path, monkeypatch):
    monkeypatch.setattr(decontaminate, "ngrams", cache(ngrams))
    (tmp_path / "many.txt").write_text("a b")
    (tmp_path / "last.txt").write_text("c d")
    paths = [tmp_path / "many.txt"] * (1 << 16) + [tmp_path / "last.txt"]
    table, source, _ = evaluation_table(paths, "text", 2, RunOptions())
    assert source[table == ngrams("c d", 2)[0]] == 1 << 16


def test_hashes_differ_by_word_and_order_and_are_those_of_every_process():
    hashes, spans = ngrams("A b, c! a B c d", 3)
    assert spans.tolist() == [[0, 8], [2, 10], [5, 12], [8, 14], [10, 15]] and len(hashes) == 5
    assert hashes[0] == hashes[3] and len(set(hashes.tolist())) == 4
    assert ngrams("a b c", 3)[0].tolist() == [hashes[0]]
    assert all(len(ngrams(text, 3)[0]) == 0 for text in ("a b", "", "...", " " * 3))


def test_sequences_of_a_long_text_are_those_of_its_parts():
    text = " ".join(f"w{i % 1009}" for i in range(200_000))
    assert len(text) > 1 << 19  # it is hashed in pieces
    hashes, spans = ngrams(text, 13)
    assert len(spans) == len(hashes) == 200_000 - 12
    words = text.split()
    for i in (0, 1000, 104_000, 199_980):
        sequence = text[slice(*spans[i])]
        assert sequence.split() == words[i : i + 13] and ngrams(sequence, 13)[0].tolist() == [hashes[i]]


@pytest.mark.parametrize("before", [0, 3, 12, 30])
def test_sequences_behind_a_word_longer_than_a_piece_are_found_in_their_place(before):
    text = " ".join([*WORDS[:before], "x" * 600_000, QUESTION, "end"])
    found = dict(zip(*ngrams(text, 13), strict=True))
    for sequence, (start, stop) in zip(*ngrams(QUESTION, 13), strict=True):
        assert text[slice(*found[sequence])].strip() == QUESTION[start:stop].strip()
