"""A raw dump with planted faults: English that every Python has, and everything that a pipeline must find in it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest

zstandard = pytest.importorskip("zstandard")

GERMAN = (
    "Der Ausschuss traf sich am Dienstag, um über die neue Bücherei zu sprechen, "
    "die sich die Stadt seit Jahren wünscht. "
)


def english(count: int) -> list[tuple[str, str]]:
    """(name, text) of articles of 1,000 to 3,000 characters that differ from each other."""
    straight = str.maketrans("’‘“”", "''\"\"")  # as ftfy makes them
    found = sorted(
        (name, text.strip()[:3000].strip().translate(straight)) for name, text in topics.items() if len(text) > 1000
    )
    found = [(name, text) for name, text in found if sum(c.isalpha() or c == " " for c in text) > 0.85 * len(text)]
    unlike = {text[200:400]: (name, text) for name, text in reversed(found)}  # some are there under two names
    return sorted(unlike.values())[:count]


def write_dump(folder: Path, count: int = 40) -> dict[str, int]:
    """Writes the dump, and returns what must be found in it: good documents, and how many are left out by which step and why.

    Args:
        count: good documents.
    """
    folder.mkdir(parents=True)
    articles = english(count)
    assert len(articles) == count
    documents = [{"text": text, "url": f"http://example.com/{name}", "id": name} for name, text in articles]
    name, text = articles[0]
    documents += [
        {"text": text, "url": "http://example.com/the/same", "id": "exact copy"},
        {"text": "  " + articles[1][1].upper().replace(" ", "  "), "id": "copy in other case and spacing"},
        {"text": articles[2][1][:-40] + " (read more)", "id": "copy with another end"},
        {"text": GERMAN * 8, "id": "german"},
        {"text": "Too short.", "id": "short"},
        {"text": " \n ", "id": "empty"},
        {"text": "Another document has this id, which nobody may miss. " + articles[3][1][:700], "id": articles[3][0]},
    ]
    documents[5] = {**documents[5], "text": documents[5]["text"] + " It\u00e2\u20ac\u2122s mended."}
    lines = [json.dumps(document, ensure_ascii=index % 2 == 0).encode() for index, document in enumerate(documents)]
    lines[10:10] = [b'{"text": "cut off', b"", b'{"text": "\xff\xfe"}', b'{"body": "no text"}', b"[]"]
    thirds = [b"".join(line + b"\n" for line in lines[i::3]) for i in range(3)]
    (folder / "a.jsonl").write_bytes(
        thirds[0] + b'{"text": "' + b"x" * (1 << 20) + b'"}'
    )  # an overlong line, without an end
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(thirds[1]))
    (folder / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(thirds[2]))
    (folder / "d.jsonl").write_bytes(b"")
    return {"good": count, "bad_lines": 5, "language": 1, "short": 1, "empty": 1, "copies": 3, "duplicate id": 1}
