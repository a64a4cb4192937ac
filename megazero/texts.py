"""Texts that a trained model is given: read from files, with WikiText restored to what a writer would have typed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from megazero.files import file_named
from megazero.lines.compressed import DAMAGE, open_bytes
from megazero.lines.jsonl import LineError, read_object
from megazero.logging import counted

_Read = TypeVar("_Read")


def read_text(path: str | Path, flag: str, newline: str | None = None) -> str:
    """The text of the file that `flag` names; `newline` as in `open`.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        with file_named(Path(path)), open(path, encoding="utf-8", newline=newline) as file:
            return file.read()
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
    return [row[text_key] for row in load_rows(path, text_key)]


def load_rows(path: str | Path, *keys: str) -> list[dict[str, str]]:
    """Of each object of a file of JSON lines, the texts under these keys.

    Raises:
        ValueError: as `load_texts`.
    """
    form = ", ".join(f'"{key}": "..."' for key in keys)
    return _read_lines(path, f"{{{form}}}", lambda line: {key: read_object(line, key)[key] for key in keys})


class Question(NamedTuple):
    """A context (empty: the beginning of a text), ways to go on, and which of them is the right one."""

    context: str
    endings: list[str]
    right: int


def load_questions(path: str | Path) -> list[Question]:
    """The questions of a file of JSON lines in HellaSwag's form.

    Raises:
        ValueError: as `load_texts`, for lines of another form.
    """
    return _read_lines(path, '{"ctx": "...", "endings": ["...", "..."], "label": 0}', _question)


def _question(line: bytes) -> Question:
    found = read_object(line, "ctx")
    endings, label = found.get("endings"), str(found.get("label"))
    if found["ctx"].isspace():
        raise LineError("'ctx' is blank")
    if not isinstance(endings, list) or not all(isinstance(each, str) for each in endings):
        raise LineError("'endings' is not a list of strings")
    if not label.isdecimal() or int(label) >= len(endings):
        raise LineError(f"'label' is {found.get('label')!r}, not the place of one of {counted(len(endings), 'ending')}")
    return Question(found["ctx"], endings, int(label))


def _read_lines(path: str | Path, form: str, read: Callable[[bytes], _Read]) -> list[_Read]:
    try:
        with open_bytes(Path(path)) as file:
            lines = file.readlines()
    except DAMAGE as error:
        raise ValueError(f"{path}: damaged or cut off: {error}. Get the file again.") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(read(line))
        except LineError as error:
            raise ValueError(f"{path}:{number}: {error}. Expected lines like {form}.") from error
    if not found:
        raise ValueError(f"{path} is empty: expected lines like {form}.")
    return found


def _stripped(match: re.Match[str]) -> str:
    """What stands between two marks, without spaces at its ends; as it was, if the second mark is missing."""
    left, inside, right = match.groups()
    return f"{left}{inside.strip()}{right}" if right else match[0]


# WikiText separates punctuation by spaces. The order of the repairs matters: it is that of Megatron-LM's evaluation, so that
# results are comparable.
_WIKITEXT_REPAIRS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"s '", "s'"),
    *((rf" @{re.escape(separator)}@ ", separator) for separator in "-,."),  # 1 @,@ 000 -> 1,000
    *((rf" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
    # A mark without its partner is matched too, to the end of the text: else each mark and each space would be tried anew.
    *((rf"(\{left})([^\{right}]*)(\{right}?)", _stripped) for left, right in ("()", "[]", "{}", '""', "''")),
    *((" ".join("=" * depth), "=" * depth) for depth in (4, 3, 2)),  # headings
    (r" ° ", "°"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)


def wikitext_detokenize(text: str) -> str:
    """WikiText's spaced-out text as a writer would have typed it, the form that GPT-2's tokenizer is made for."""
    for pattern, replacement in _WIKITEXT_REPAIRS:
        text = re.sub(pattern, replacement, text)
    return text


def word_count(text: str, is_wikitext: bool = False) -> int:
    """The number of words in a text; in WikiText's original text those between single spaces, so also its line ends."""
    return len(text.strip().split(" ") if is_wikitext else text.split())
