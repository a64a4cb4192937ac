"""Signatures: the 5-grams that plain Python finds, an unbiased estimate of their Jaccard similarity, the same however cut up."""

from __future__ import annotations

import hashlib
import random
import re

import numpy as np
import pytest

from data_tools import dedup_minhash as minhash
from tests.data_tools.planted import planted_documents

PERMUTATIONS = 112


def word_5_grams(text: str) -> list[tuple[str, ...]]:
    """The slow way, for texts of scripts with spaces."""
    words = re.findall(r"[^\W_]+", text.casefold())
    return [tuple(words[i : i + 5]) for i in range(max(len(words) - 4, min(len(words), 1)))]


def shingles(text: str) -> np.ndarray:
    return np.concatenate([hashes for hashes, _ in minhash._long_shingles(text, minhash.SHINGLE_WORDS)])


def jaccard(a: str, b: str) -> float:
    first, second = set(word_5_grams(a)), set(word_5_grams(b))
    return len(first & second) / len(first | second)


def texts_of(count: int) -> list[str]:
    return [document.text for document in planted_documents(count, seed=3)]


def test_hashes_are_those_of_the_5_grams_of_words():
    texts = [
        *texts_of(40),
        "One two THREE four -- five, six\nseven",
        "four words, no more",
        "Größe ÉTÉ, Σίσυφος: ναί? 3,14 x_y",
        "a",
    ]
    hash_of: dict = {}
    for text in texts:
        hashes, grams = shingles(text).tolist(), word_5_grams(text)
        assert len(hashes) == len(grams)
        for value, gram in zip(hashes, grams, strict=True):
            assert hash_of.setdefault(gram, value) == value
    assert len(set(hash_of.values())) == len(hash_of) > 10_000


@pytest.mark.parametrize(
    "a, b, are_equal",
    [
        ("The quick brown fox jumps.", "the  QUICK\tbrown-fox\njumps!", True),
        ("don\u2019t do it", "don't \u201cdo\u201d it\ufeff", True),
        ("one two three four five six", "one two three four six five", False),
        ("ab c d e f", "a bc d e f", False),
        ("one two", "two one", False),
        ("ΣΑΣ", "σας", True),
        ("", " ", False),
        ("...", "!!!", False),
        ("\U0001f600", "\U0001f601", False),
        ("...", "...", True),
        ("\ud800 lone", "\udfff LONE", True),
    ],
)
def test_content_is_the_words_in_their_order(a, b, are_equal):
    content, minima = minhash.signatures([a, b], PERMUTATIONS)
    assert (content[0] == content[1]).all() == are_equal == (minima[0] == minima[1]).all()


def test_letters_of_scripts_without_spaces_are_words():
    text = "\u6211\u4eec\u4eca\u5929\u53bb\u516c\u56ed\u73a9"  # eight Han letters
    assert len(shingles(text)) == 4
    assert len(shingles(f"{text}abc{text}")) == 13, "a Latin word between them is one word"
    assert len(shingles("\uc11c\uc6b8\uc5d0\uc11c \ub9cc\ub098\uc694")) == 1, "Korean has spaces"
    assert len(shingles("a\u0301b c d e f g")) == 2, "an accent of its own belongs to its letter"


@pytest.mark.parametrize("size", [30, 400])
def test_estimate_is_unbiased_and_as_sharp_as_independent_permutations(size):
    rng = random.Random(5)
    texts, true = [], []
    for _ in range(500):
        words = [str(rng.randrange(10**6)) for _ in range(size)]
        cut = rng.randrange(size // 3, size - 5)
        texts += [" ".join(words), " ".join(words[:cut] + [str(rng.randrange(10**6)) for _ in range(size - cut)])]
        true.append(jaccard(*texts[-2:]))
    _, minima = minhash.signatures(texts, PERMUTATIONS)
    share = np.array(true)
    errors = ((minima[::2] == minima[1::2]).mean(axis=1) - share) / np.sqrt(share * (1 - share) / PERMUTATIONS)
    assert abs(errors.mean()) < 4 / 500**0.5  # in standard errors of the mean
    assert 0.88 < errors.std() < 1.12


def test_signature_does_not_depend_on_the_batch():
    texts = [*texts_of(60), "", "...", "a b", "x" * 5000]
    content, minima = minhash.signatures(texts, PERMUTATIONS)
    for number in range(len(texts)):
        alone = minhash.signatures(texts[number : number + 1], PERMUTATIONS)
        long = minhash._signature_of_long(texts[number], PERMUTATIONS)
        for c, m in (alone, long):
            assert (c == content[number]).all() and (m == minima[number]).all()


def test_signatures_are_those_of_their_version():
    """They stay on disk, and are compared with new ones: what changes them must change `_ALGORITHM` and this test."""
    texts = ["One two THREE four -- five, six\nseven", "Größe ÉTÉ, Σίσυφος: ναί?", "วันนี้ 今天去公园 ひらがな", "...", ""]
    content, minima = minhash.signatures(texts, PERMUTATIONS)
    found = hashlib.sha256(content.tobytes() + minima.tobytes()).hexdigest()[:16]
    assert (minhash.VERSION.split()[0], found) == ("megazero-minhash-1", "fe696727f3e2bce7")


def test_long_text_is_hashed_in_pieces_as_if_it_were_one():
    rng = random.Random(1)
    words = [f"w{rng.randrange(10**6)}" for _ in range(200_000)]
    text = " ".join(words)
    assert len(text) > 2 * minhash._PIECE
    hashes = shingles(text)
    assert len(hashes) == len(words) - 4
    small = [np.concatenate([shingles(" ".join(words[i : i + 1004])) for i in range(0, len(words) - 4, 1000)])]
    assert (hashes == np.concatenate(small)).all()
    content, minima = minhash.signatures([text, text.upper(), text + " more"], PERMUTATIONS)
    assert (content[0] == content[1]).all() and not (content[0] == content[2]).all()
    assert (minima[0] == minima[1]).all() and (minima[0] == minima[2]).mean() > 0.95


@pytest.mark.parametrize("text", ["x" * 3_000_000, "a b c d e f " + "y" * 2_000_000 + " g h", " " * 2_000_000 + "end"])
def test_words_longer_than_a_piece_end(text):
    content, _ = minhash.signatures([text, text + "!"], PERMUTATIONS)
    assert (content[0] == content[1]).all()


def test_bands_share_a_key_exactly_where_they_are_equal():
    minima = np.random.default_rng(0).integers(0, 3, size=(500, 12), dtype=np.uint16)
    keys = minhash.band_keys(minima, 4)
    assert keys.shape == (500, 4)
    rows = minima.reshape(500, 4, 3)
    seen = {(band, *rows[i, band].tolist()): int(keys[i, band]) for i in range(500) for band in range(4)}
    assert all(seen[(band, *rows[i, band].tolist())] == keys[i, band] for i in range(500) for band in range(4))
    assert len(set(seen.values())) == len(seen) == 4 * 27
