"""The rules of Gopher and FineWeb: one document that breaks each, and prose that breaks none."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.quality_rules import RULES, Thresholds, ngram_characters
from tests.data_tools.steps import dropped, read_documents, run_step, write_documents

PROSE = """The river rises in the hills to the north and winds for many miles before it comes to the sea.
People have lived along it for as long as there are records, and their boats still carry grain down to the harbour.
In spring the water is high and brown; by August a child can wade across it at the old ford below the mill.
Nobody knows who built the first bridge, but it had been standing for centuries when the town council replaced it.
They kept one arch of that bridge as a monument, and visitors stop to take pictures of it on their way to the market."""
NUMBERED = [f"word{i}" for i in range(400)]

BREAKS = {
    "gopher_min_words": "The end of the story and no more.",
    "gopher_max_mean_word": " ".join(["incomprehensibilities of", "the characteristically"] * 40),
    "gopher_min_mean_word": " ".join(["a", "of", "be", "I"] * 40),
    "gopher_max_symbols": " ".join(["#cats", "and", "#dogs", "of", "the"] * 20),
    "gopher_max_bullet_lines": "\n".join(f"- the {word} of {word}" for word in NUMBERED[:20]),
    "gopher_max_ellipsis_lines": "\n".join(f"the {a} of {b} was there for all of us to see in the morning..." for a, b in
                                           zip(NUMBERED[:9], NUMBERED[9:18], strict=True)),
    "gopher_min_letter_words": " ".join(["the", "of", "1234", "5678"] * 40),
    "gopher_min_stop_words": " ".join(NUMBERED[:60]),
    "gopher_max_duplicate_lines": "\n".join(["same", *NUMBERED[:3]] * 1 + ["same"] * 3),
    "gopher_max_duplicate_paragraphs": "\n\n".join(["same", *NUMBERED[:3], "same", "same", "same"]),
    "gopher_max_duplicate_line_characters": "\n".join(["a long line that comes twice here", *NUMBERED[:8],
                                                       "a long line that comes twice here"]),
    "gopher_max_duplicate_paragraph_characters": "\n\n".join(["a paragraph that is there twice", *NUMBERED[:8],
                                                             "a paragraph that is there twice"]),
    "gopher_max_top_2gram": " ".join(f"same pair {word}" for word in NUMBERED[:20]),
    "gopher_max_top_3gram": " ".join(f"a b c {a} {b}" for a, b in zip(NUMBERED[:20], NUMBERED[20:40], strict=True)),
    "gopher_max_duplicate_5gram": " ".join([*NUMBERED[:40], "x", *NUMBERED[:5], "y", *NUMBERED[9:14], "z", *NUMBERED[20:25]]),
    "fineweb_min_terminal_lines": "\n".join(f"the line number {word} has no full stop at its end" for word in NUMBERED[:9]),
    "fineweb_max_duplicate_line_characters": "\n".join([PROSE, PROSE.split("\n")[0]]),
    "fineweb_max_short_lines": "\n".join(f"Short, {word}." for word in NUMBERED[:9]),
}  # fmt: skip


def first_broken(text, thresholds=None):
    found = {name: rule(text, thresholds or Thresholds()) for name, rule in RULES.items()}
    return {name: broken[0] for name, broken in found.items() if broken is not None}


def test_prose_breaks_no_rule():
    assert first_broken(PROSE) == {}


@pytest.mark.parametrize("rule", BREAKS)
def test_each_rule_is_broken_by_what_it_is_for(rule):
    assert rule in first_broken(BREAKS[rule]).values()


VALUES = [  # computed by hand
    ("gopher_quality", "gopher_min_words", "a b c", 3),
    ("gopher_quality", "gopher_max_words", "a b c", 3),
    ("gopher_quality", "gopher_min_mean_word", "ab cdefg", 3.5),
    ("gopher_quality", "gopher_max_mean_word", "ab cdefg", 3.5),
    ("gopher_quality", "gopher_max_symbols", "#a #b c\nd", 2 / 4),
    ("gopher_quality", "gopher_max_symbols", "a... b… c d", 2 / 4),
    ("gopher_quality", "gopher_max_bullet_lines", "a\n \n  - b", 1 / 2),
    ("gopher_quality", "gopher_max_ellipsis_lines", "a\n\nb… \nc...", 2 / 3),
    ("gopher_quality", "gopher_min_letter_words", "12 3b _ d", 2 / 4),
    ("gopher_quality", "gopher_min_stop_words", "the The of the", 2),
    ("gopher_repetition", "gopher_max_duplicate_lines", "a\nb\n\na\na\n", 2 / 4),
    ("gopher_repetition", "gopher_max_duplicate_line_characters", "abcd\nabcd\nxy", 4 / 12),
    ("gopher_repetition", "gopher_max_duplicate_paragraphs", "a\n\nb\n\n\na", 1 / 3),
    ("gopher_repetition", "gopher_max_duplicate_paragraph_characters", "ab\n\nc\n\nab", 2 / 9),
    ("gopher_repetition", "gopher_max_top_2gram", "a b c d a b", 6 / 11),  # "a b", twice
    ("gopher_repetition", "gopher_max_top_4gram", "a b c d a b c d", 14 / 15),
    ("gopher_repetition", "gopher_max_duplicate_5gram", "p q r s t u v p q r s t w", 5 / 25),  # words without spaces
    ("gopher_repetition", "gopher_max_duplicate_10gram", " ".join("abcdefghij" * 2), 10 / 39),
    ("fineweb", "fineweb_min_terminal_lines", 'a.\n\nb? \nc!\nd”\ne" f', 4 / 5),
    ("fineweb", "fineweb_max_duplicate_line_characters", "ab\nc\n\nab", 2 / 5),
    ("fineweb", "fineweb_max_short_lines", f"{'a' * 29}\n{'b' * 30}", 1 / 2),
]


@pytest.mark.parametrize("rule, name, text, value", VALUES)
def test_at_its_limit_a_document_stays_by_gophers_rules_and_goes_by_finewebs(rule, name, text, value):
    free = {each: -1 if "_min_" in each else math.inf for each in vars(Thresholds())} | {"fineweb_short_line": 30}
    looser, stricter = (math.nextafter(value, end) for end in ((-9, 9) if "_min_" in name else (9, -9)))
    last_kept, first_dropped = (looser, value) if rule == "fineweb" else (value, stricter)
    assert RULES[rule](text, Thresholds(**{**free, name: last_kept})) is None
    assert RULES[rule](text, Thresholds(**{**free, name: first_dropped})) == (name, value)


@given(st.lists(st.sampled_from(["a", "bb", "ccc", "dddd"]), max_size=60))
def test_sequences_of_words_are_counted_as_one_by_one(words):
    found = {n: (top, repeated) for n, top, repeated in ngram_characters(words, 10)}
    assert set(found) == set(range(2, min(10, len(words)) + 1))
    for n, numbers in found.items():
        ngrams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        counts = Counter(ngrams)
        most = max(counts.values())
        top = max(len(" ".join(ngram)) for ngram, count in counts.items() if count == most) * most if most > 1 else 0
        again = {i + j for i, ngram in enumerate(ngrams) if ngram in ngrams[:i] for j in range(n)}
        assert numbers == (top, sum(len(words[i]) for i in again))


def test_nothing_is_dropped_but_by_the_rules_that_are_named(tmp_path):
    documents = [{"id": name, "text": text} for name, text in {**BREAKS, "prose": PROSE}.items()]
    path = write_documents(tmp_path / "a.jsonl", documents)
    flags = ("--input", path, "--output", tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match="required: --rules"):
        run_step("quality", *flags)  # none is on by itself
    run_step("quality", *flags, "--rules", "fineweb")
    reasons = dropped(tmp_path / "b.jsonl")
    assert all(reason.startswith("fineweb_") for reason in reasons.values())
    assert all(reasons[name].startswith(name) for name in BREAKS if name.startswith("fineweb"))
    run_step("quality", *flags, "--rules", *RULES)
    assert [d["id"] for d in read_documents(tmp_path / "b.jsonl")] == ["prose"]
    run_step(
        "quality", *flags, "--rules", "gopher_quality", "--threshold", "gopher_min_words=0", "gopher_max_mean_word=1e9"
    )
    assert "gopher_min_words" not in dropped(tmp_path / "b.jsonl")
    for wrong in ("gopher_words=1", "gopher_min_words=few"):
        with pytest.raises(ValueError, match="--threshold"):
            run_step("quality", *flags, "--rules", "fineweb", "--threshold", wrong)
