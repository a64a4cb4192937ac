"""Texts that a trained model is given: read from files, with WikiText restored to what a writer would have typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megazero.files import file_named
from megazero.lines.jsonl import LineError, read_object


def read_text(path: str | Path, flag: str) -> str:
    """The text of the file that `flag` names.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        with file_named(Path(path)):
            return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path} is not UTF-8 text, at byte {error.start}: unpack or convert it.") from error


def has_lines_of_json(path: str | Path) -> bool:
    """Whether the first line of a file that is not blank is a JSON object."""
    with open(path, "rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def load_texts(path: str | Path, text_key: str = "text") -> list[str]:
    """The texts of a file of JSON lines, such as LAMBADA's.

    Raises:
        ValueError: a line is not a JSON object with a string under `text_key`, in which case the message names file and line; or
            there is no text.
    """
    texts = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                texts.append(read_object(line, text_key)[text_key])
            except LineError as error:
                raise ValueError(f'{path}:{number}: {error}. Expected lines like {{"{text_key}": "..."}}.') from error
    if not texts:
        raise ValueError(f'{path} is empty: expected lines like {{"{text_key}": "..."}}.')
    return texts


# WikiText separates punctuation by spaces. The order of the repairs matters: it is that of Megatron-LM's evaluation, so that
# results are comparable.
_WIKITEXT_REPAIRS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"s '", "s'"),
        *((rf" @{re.escape(separator)}@ ", separator) for separator in "-,."),  # 1 @,@ 000 -> 1,000
        *((rf" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
        (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
        (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
        (r"\{\s*([^}]*?)\s*\}", r"{\1}"),
        (r'"\s*([^"]*?)\s*"', r'"\1"'),
        (r"'\s*([^']*?)\s*'", r"'\1'"),
        *((" ".join("=" * depth), "=" * depth) for depth in (4, 3, 2)),  # headings
        (r" ° ", "°"),
        (r" \n", "\n"),
        (r"\n ", "\n"),
        (r" N ", " 1 "),
        (r" 's", "'s"),
    )
)


def wikitext_detokenize(text: str) -> str:
    """WikiText's spaced-out text as a writer would have typed it, the form that GPT-2's tokenizer is made for."""
    for pattern, replacement in _WIKITEXT_REPAIRS:
        text = pattern.sub(replacement, text)
    return text


def word_count(text: str, is_wikitext: bool = False) -> int:
    """The number of words in a text; in WikiText's original text those between single spaces, so also its line ends."""
    return len(text.strip().split(" ") if is_wikitext else text.split())
