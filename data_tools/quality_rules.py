"""The rules of `quality`: functions of a text that return the name and the value of what is wrong with it, or None."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Broken = tuple[str, float] | None
Rule = Callable[[str, "Thresholds"], Broken]

_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))  # Gopher, A.1.1
_BULLETS = ("•", "‣", "▶", "◀", "◦", "■", "□", "▪", "▫", "–", "-", "*")
_TERMINAL = (".", "?", "!", '"', "'", "”", "’", "。", "？", "！")
_PARAGRAPH = re.compile(r"\n{2,}")
_LINE = re.compile(r"\n+")
_LETTER = re.compile(r"[^\W\d_]")
_ELLIPSIS = re.compile(r"\.\.\.|…")


@dataclass(frozen=True)
class Thresholds:
    """The papers' numbers. A document is dropped below a `min` and above a `max`; shares are between 0 and 1.

    Attributes:
        gopher_max_top_2gram: share of the characters that the most frequent sequence of 2 words makes up (3, 4 likewise).
        gopher_max_duplicate_5gram: share of the characters in sequences of 5 words that occur before (to 10 likewise).
    """

    gopher_min_words: float = 50
    gopher_max_words: float = 100_000
    gopher_min_mean_word: float = 3
    gopher_max_mean_word: float = 10
    gopher_max_symbols: float = 0.1  # hashes or ellipses per word
    gopher_max_bullet_lines: float = 0.9
    gopher_max_ellipsis_lines: float = 0.3
    gopher_min_letter_words: float = 0.8  # words with a letter in them
    gopher_min_stop_words: float = 2
    gopher_max_duplicate_lines: float = 0.30
    gopher_max_duplicate_paragraphs: float = 0.30
    gopher_max_duplicate_line_characters: float = 0.20
    gopher_max_duplicate_paragraph_characters: float = 0.20
    gopher_max_top_2gram: float = 0.20
    gopher_max_top_3gram: float = 0.18
    gopher_max_top_4gram: float = 0.16
    gopher_max_duplicate_5gram: float = 0.15
    gopher_max_duplicate_6gram: float = 0.14
    gopher_max_duplicate_7gram: float = 0.13
    gopher_max_duplicate_8gram: float = 0.12
    gopher_max_duplicate_9gram: float = 0.11
    gopher_max_duplicate_10gram: float = 0.10
    fineweb_min_terminal_lines: float = 0.12  # lines that end a sentence
    fineweb_max_duplicate_line_characters: float = 0.10
    fineweb_max_short_lines: float = 0.67  # lines of fewer than 30 characters
    fineweb_short_line: float = 30


def gopher_quality(text: str, limits: Thresholds) -> Broken:
    """Gopher's quality filter: length, words, symbols, bullets, ellipses, letters, stop words."""
    words = text.split()
    count = max(len(words), 1)
    lines = [line for line in text.split("\n") if line.strip()] or [""]
    bullets = sum(line.lstrip().startswith(_BULLETS) for line in lines) / len(lines)
    ellipses = sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)
    # Most words are letters alone, and need no search.
    letters = sum(word.isalpha() or _LETTER.search(word) is not None for word in words) / count
    stop_words = len(_STOP_WORDS.intersection(words))
    return _first_broken(
        limits,
        ("gopher_min_words", len(words)),
        ("gopher_max_words", len(words)),
        ("gopher_min_mean_word", sum(map(len, words)) / count),
        ("gopher_max_mean_word", sum(map(len, words)) / count),
        ("gopher_max_symbols", text.count("#") / count),
        ("gopher_max_symbols", len(_ELLIPSIS.findall(text)) / count),
        ("gopher_max_bullet_lines", bullets),
        ("gopher_max_ellipsis_lines", ellipses),
        ("gopher_min_letter_words", letters),
        ("gopher_min_stop_words", stop_words),
    )


def gopher_repetition(text: str, limits: Thresholds) -> Broken:
    """Gopher's repetition filter: duplicate lines and paragraphs, one frequent sequence of words, sequences that come again."""
    characters = max(len(text), 1)
    for name, pattern in (("paragraph", _PARAGRAPH), ("line", _LINE)):
        parts = [part for part in pattern.split(text.strip()) if part]
        count, length = _repeated(parts)
        broken = _first_broken(
            limits,
            (f"gopher_max_duplicate_{name}s", count / max(len(parts), 1)),
            (f"gopher_max_duplicate_{name}_characters", length / characters),
        )
        if broken:
            return broken
    for n, top, repeated in ngram_characters(text.split(), 10):
        kind, length = ("top", top) if n <= 4 else ("duplicate", repeated)
        broken = _first_broken(limits, (f"gopher_max_{kind}_{n}gram", length / characters))
        if broken:
            return broken
    return None


def fineweb(text: str, limits: Thresholds) -> Broken:
    """FineWeb's three filters: lines that end a sentence, characters in duplicate lines, short lines."""
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return "fineweb_min_terminal_lines", 0.0
    terminal = sum(line.rstrip().endswith(_TERMINAL) for line in lines) / len(lines)
    short = sum(len(line) < limits.fineweb_short_line for line in lines) / len(lines)
    repeated = _repeated(lines)[1] / max(len(text.replace("\n", "")), 1)
    # The paper drops a document at the threshold itself, too.
    if terminal <= limits.fineweb_min_terminal_lines:
        return "fineweb_min_terminal_lines", terminal
    if repeated >= limits.fineweb_max_duplicate_line_characters:
        return "fineweb_max_duplicate_line_characters", repeated
    if short >= limits.fineweb_max_short_lines:
        return "fineweb_max_short_lines", short
    return None


RULES: dict[str, Rule] = {
    "gopher_quality": gopher_quality,
    "gopher_repetition": gopher_repetition,
    "fineweb": fineweb,
}


def _first_broken(limits: Thresholds, *found: tuple[str, float]) -> Broken:
    """The first (name of a threshold, value) of which the value is below the minimum or above the maximum of that name."""
    for name, value in found:
        limit = getattr(limits, name)
        is_broken = value < limit if "_min_" in name else value > limit
        if is_broken:
            return name, value
    return None


def _repeated(parts: Sequence[str]) -> tuple[int, int]:
    """How many parts are equal to an earlier one, and their characters."""
    extra = {part: count - 1 for part, count in Counter(parts).items() if count > 1}
    return sum(extra.values()), sum(len(part) * count for part, count in extra.items())


def ngram_characters(words: Sequence[str], longest: int) -> Iterator[tuple[int, int, int]]:
    """(n, top, repeated) for each n from 2 to `longest` words, as far as there are so many words.

    `top`: characters, with the spaces between words, in all occurrences of the most frequent sequence of n words (of several, the
    longest); 0 if none repeats. `repeated`: characters of the words in sequences of n words that occur earlier, each word once.
    """
    number_of: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    word = np.fromiter(map(number_of.__getitem__, words), np.int64, len(words))  # numbered as they come up
    length = np.fromiter(map(len, words), np.int64, len(words))
    before = np.concatenate(([0], np.cumsum(length)))  # characters before each word
    ngram, place = word, np.arange(len(words))  # a number for each sequence that may come again, and where it begins
    for n in range(2, min(longest, len(words)) + 1):
        is_inside = place + n <= len(words)
        ngram, place = ngram[is_inside], place[is_inside]
        # There are fewer sequences than words, so that a pair (sequence of n - 1 words, word) has a number of its own.
        pairs = ngram * len(words) + word[place + n - 1]
        _, first, ngram, counts = np.unique(pairs, return_index=True, return_inverse=True, return_counts=True)
        again = place[first[ngram] != np.arange(len(ngram))]
        if not len(again):
            # No longer sequence comes again either.
            yield from ((longer, 0, 0) for longer in range(n, min(longest, len(words)) + 1))
            return
        most = int(counts.max())
        starts = place[first[counts == most]]
        top = int((before[starts + n] - before[starts]).max() + n - 1) * most
        changes = np.zeros(len(words) + 1, np.int64)
        changes[again] += 1
        changes[again + n] -= 1
        yield n, top, int(length[np.cumsum(changes)[:-1] > 0].sum())
        # What occurs once is no beginning of what occurs twice.
        repeats = counts[ngram] > 1
        ngram, place = ngram[repeats], place[repeats]
