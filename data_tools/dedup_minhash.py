"""MinHash signatures (Broder 1997) of documents' sets of word 5-grams, computed with numpy for many documents at once.

A text becomes an array of code points; a table folds letter case and maps everything that is no letter, digit or combining mark
to a separator. Word 5-grams are hashed without making strings of them: with P[i] the i-th power of an odd number and C the
running sum of letter[i] * P[i] (mod 2^64), the letters [s, e) have the hash (C[e] - C[s]) / P[s], wherever in the batch they lie.
The first letter of a word carries a mark, so that "ab c" and "a bc" differ.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

SHINGLE_WORDS = 5
_ALGORITHM = "megazero-minhash-1"
VERSION = f"{_ALGORITHM} unicode-{unicodedata.unidata_version}"
"""Changes with everything that changes a signature; which characters are letters is Python's knowledge."""

_PIECE = 1 << 19  # characters hashed at a time: the arrays of a batch then stay in the cache of a core
_TABLE = 1 << 18  # code points beyond (tags, private use) separate words
_ALONE = 1 << 20  # a letter of a script without spaces: a word by itself
_FIRST = np.uint64(1 << 21)  # the first letter of a word
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, hence invertible mod 2^64
_MIXERS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
# First and last character of each range, every letter of which is taken for a word.
_SCRIPTS_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x0F00, 0x109F),  # Tibetan, Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),
    (0x3400, 0x9FFF),  # Han
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFD),
)


def signatures(texts: Sequence[str], permutations: int) -> tuple[U64, U16]:
    """A content hash [n, 2] and a signature [n, permutations] of each text.

    Texts with the same words in the same order have the same content hash, whatever their case, punctuation and white space (half
    a million characters of these in a row may part a text in two); a text without words has the hash of its characters. The share
    of places where two signatures agree estimates the Jaccard similarity J of the texts' sets of 5-grams with a standard
    deviation of sqrt(J (1 - J) / permutations). A text of fewer than five words counts as one 5-gram. Needs some 50 MB beyond the
    texts and the result, however long a text is.
    """
    content = np.empty((len(texts), 2), dtype=np.uint64)
    minima = np.empty((len(texts), permutations), dtype=np.uint16)
    for start, stop in _batches(texts):
        if len(texts[start]) > _PIECE:
            content[start], minima[start] = _signature_of_long(texts[start], permutations)
        else:
            content[start:stop], minima[start:stop] = _signatures_of_batch(texts[start:stop], permutations)
    return content, minima


def ngrams(text: str, size: int) -> tuple[U64, Places]:
    """Hashes of the sequences of `size` words of a text, in their order, and the characters from which and up to which each goes.

    The latter are [n, 2]; a sequence goes up to the next word.
    """
    hashes, spans = [], []
    for found, bounds in _long_shingles(text, size):
        spans.append(np.stack([bounds[:-size], bounds[size:]], axis=1)[: len(found)])
        hashes.append(found[: len(spans[-1])])  # what has fewer words has a hash as well
    return np.concatenate(hashes), np.concatenate(spans)


def band_keys(minima: U16, bands: int) -> U64:
    """One key [n, bands] per band of `permutations / bands` places; signatures that agree in a whole band share its key."""
    rows = minima.reshape(len(minima), bands, minima.shape[1] // bands)
    keys = np.broadcast_to(np.arange(1, bands + 1, dtype=np.uint64), rows.shape[:2])
    for row in range(rows.shape[2]):
        keys = _mix(keys * _MULTIPLIER + rows[:, :, row])
    return keys


def _batches(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Ranges of texts that have _PIECE characters together at most, or one text each."""
    start, size = 0, 0
    for number, text in enumerate(texts):
        if size + len(text) > _PIECE and number > start:
            yield start, number
            start, size = number, 0
        size += len(text)
    if start < len(texts):
        yield start, len(texts)


def _signatures_of_batch(texts: Sequence[str], permutations: int) -> tuple[U64, U16]:
    hashes, counts, _ = _shingles(texts, SHINGLE_WORDS)
    pieces = np.split(hashes, np.cumsum(counts)[:-1])
    if not counts.all():
        pieces = [piece if len(piece) else _characters(text) for piece, text in zip(pieces, texts, strict=True)]
        hashes, counts = np.concatenate(pieces), np.maximum(counts, 1)
    digests = b"".join(hashlib.blake2b(piece.data, digest_size=16).digest() for piece in pieces)
    minima = _minima(hashes, np.cumsum(counts) - counts, permutations)
    return np.frombuffer(digests, dtype="<u8").reshape(-1, 2), minima.astype(np.uint16)


def _signature_of_long(text: str, permutations: int) -> tuple[U64, U16]:
    digest, minima = hashlib.blake2b(digest_size=16), np.full((1, permutations), 0xFFFFFFFF, dtype=np.uint32)
    for hashes, _ in _long_shingles(text, SHINGLE_WORDS):
        digest.update(hashes.data)
        np.minimum(minima, _minima(hashes, np.zeros(1, dtype=np.int64), permutations), out=minima)
    return np.frombuffer(digest.digest(), dtype="<u8"), minima[0].astype(np.uint16)


def _long_shingles(text: str, size: int) -> Iterator[tuple[U64, Places]]:
    """Of a text of any length, piece by piece: hashes, never none at all, and where the words begin and the piece ends."""
    start, is_empty = 0, True
    while start < len(text):
        piece = text[start : start + _PIECE]
        hashes, _, words = _shingles([piece], size)
        bounds = start + np.append(words, len(piece))
        next_start = start + _PIECE  # a word longer than a piece is cut
        if next_start < len(text) and len(words) > size:
            # The last word may go on in the next piece: what ends with it is left to that one, which starts where this does.
            next_start, hashes = int(bounds[-size - 1]), hashes[:-1]
        if len(hashes):
            is_empty = False
            yield hashes, bounds
        start = next_start
    if is_empty:
        yield _characters(text), np.empty(0, np.int64)


def _characters(text: str) -> U64:
    """Stands for the 5-grams of a text without words: only the same text has the same."""
    return np.frombuffer(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), dtype="<u8")


def _shingles(texts: Sequence[str], size: int) -> tuple[U64, Places, Places]:
    """Hashes of the sequences of `size` words of all texts, how many each text has, and where in the joined texts words start."""
    joined = "\n".join(texts).encode("utf-32-le", "surrogatepass")
    letters = _letters().take(np.frombuffer(joined, dtype="<u4"), mode="clip")
    places = np.flatnonzero(letters)
    letters = letters[places]
    alone = letters >= _ALONE
    is_first = np.ones(len(places), dtype=bool)
    is_first[1:] = (np.diff(places) != 1) | alone[1:] | alone[:-1]
    first = np.flatnonzero(is_first)
    values = letters.astype(np.uint64)
    values[first] += _FIRST
    powers, inverses = _powers()
    sums = np.zeros(len(places) + 1, dtype=np.uint64)
    np.cumsum(values * powers[: len(places)], out=sums[1:])

    word_starts = places[first]
    last_word = np.searchsorted(word_starts, np.cumsum([len(text) + 1 for text in texts]))  # behind it
    first_word = np.concatenate([[0], last_word[:-1]])
    words = last_word - first_word
    counts = np.where(words < size, np.minimum(words, 1), words - size + 1)
    begin = np.arange(counts.sum()) + np.repeat(first_word - (np.cumsum(counts) - counts), counts)
    end = np.minimum(begin + size, np.repeat(last_word, counts))
    bounds = np.append(first, len(places))
    begin, end = bounds[begin], bounds[end]
    return _mix((sums[end] - sums[begin]) * inverses[begin]), counts, word_starts


def _minima(hashes: U64, starts: npt.NDArray[np.int64], permutations: int) -> U32:
    """The least value [segments, permutations] of each segment of hashes under h -> a h + b (mod 2^32), a odd."""
    values, shuffled = (hashes >> 32).astype(np.uint32), np.empty(len(hashes), dtype=np.uint32)
    minima = np.empty((permutations, len(starts)), dtype=np.uint32)
    for (a, b), row in zip(_permutations(permutations), minima, strict=True):
        np.multiply(values, a, out=shuffled)
        np.add(shuffled, b, out=shuffled)
        np.minimum.reduceat(shuffled, starts, out=row)
    return minima.T


def _mix(x: U64) -> U64:
    """A bijection of 64 bits in whose result every bit depends on every bit (the finaliser of splitmix64, Steele 2014)."""
    for shift, factor in _MIXERS:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> np.uint64(31))


@cache
def _permutations(count: int) -> U32:
    numbers = (
        np.frombuffer(hashlib.shake_256(_ALGORITHM.encode()).digest(8 * count), dtype="<u4").reshape(count, 2).copy()
    )
    numbers[:, 0] |= 1
    return numbers


@cache
def _powers() -> tuple[U64, U64]:
    """The powers of the multiplier, and those of its inverse, mod 2^64."""
    inverse = pow(_MULTIPLIER, -1, 1 << 64)
    tables = np.array([[_MULTIPLIER], [inverse]], dtype=np.uint64).repeat(_PIECE, axis=1)
    tables[:, 0] = 1
    powers, inverses = np.multiply.accumulate(tables, axis=1)
    return powers, inverses


@cache
def _letters() -> U32:
    """By code point: 0 for what separates words, else the letter folded to one case, plus _ALONE where that is a word."""
    table = np.zeros(_TABLE, dtype=np.uint32)
    for point in range(0x20000):
        character = chr(point)
        if character.isalnum() or unicodedata.category(character)[0] == "M":
            folded = character.casefold()
            table[point] = ord(folded) if len(folded) == 1 else point
    for start, stop in ((0xFE00, 0xFE0F), (0x20E3, 0x20E3)):  # they say how the character before them looks
        table[start : stop + 1] = 0
    for start, stop in _SCRIPTS_WITHOUT_SPACES:
        part = table[start : stop + 1]
        if start >= 0x20000:
            part[:] = np.arange(start, stop + 1)
        part[part > 0] += _ALONE
    return table
