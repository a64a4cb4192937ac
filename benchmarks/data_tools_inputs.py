"""What the steps of data_tools are measured on: text, lists of URLs and tokens, of any size and always the same."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from megazero.data.mmidx import write_index
from megazero.data.sidecar import Sidecar, write_sidecar
from tests.data_tools.planted import Planted, planted_documents

_HOSTS = ("en.wikipedia.org", "www.youtube.com", "i.imgur.com", "twitter.com")  # left out
_SITES = 50_000
_ENDINGS = ("", "", "", "", ".html", ".html", ".php?page=2", ".jpg", ".pdf?download=1")
PLANTED_BYTES = 2850
"""Of a line with a planted document, on average."""
_TOKENS = 1000  # of a document, on average


def read_texts(path: Path) -> list[str]:
    """The texts of a file of JSON lines; every second one with the quotation marks of typeset pages, which ftfy changes.

    Raises:
        ValueError: there are none.
    """
    with open(path, "rb") as file:
        texts = [json.loads(line)["text"] for line in file]
    if not texts:
        raise ValueError(f"--input {path} is empty")
    typeset = str.maketrans({"'": "\u2019"})
    return [text.translate(typeset) if number % 2 else text for number, text in enumerate(texts)]


def write_texts(path: Path, texts: list[str], mb: float) -> int:
    """About `mb` megabytes of documents, as many times the same ones as need be, each with an id of its own; how many."""
    size = count = 0
    with open(path, "wb") as file:
        for text in itertools.cycle(texts):
            document = {"text": text, "url": f"https://example.org/{count}", "id": f"doc-{count}"}
            size += file.write(json.dumps(document, ensure_ascii=False).encode() + b"\n")
            count += 1
            if size >= mb * 1e6:
                return count
    raise AssertionError("the cycle does not end")


def write_evaluation(path: Path, texts: list[str]) -> None:
    """Every hundredth text, as an evaluation set."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[::100]))


def write_urls(path: Path, mb: float) -> int:
    """About `mb` megabytes of URLs; three in ten of them unwanted, one in twenty a repeat. How many."""
    generator = random.Random(0)
    size, lines = 0, ["http://example.org/"]
    while size < mb * 1e6:
        site = f"www.site-{int(_SITES ** generator.random())}.co.uk"  # a few have most of the pages
        host = generator.choice(_HOSTS) if generator.random() < 0.1 else site
        ending = generator.choice(_ENDINGS)
        slug = "-".join(f"{generator.getrandbits(20):x}" for _ in range(6))
        is_repeat = generator.random() < 0.05
        lines.append(generator.choice(lines[-1000:]) if is_repeat else f"https://{host}/{slug}{ending}")
        size += len(lines[-1]) + 1
    path.write_text("".join(f"{line}\n" for line in lines))
    return len(lines)


def write_planted(path: Path, count: int) -> list[Planted]:
    """Documents with planted copies; returned without their texts."""
    documents = []
    with open(path, "w") as file:
        for document in planted_documents(count):
            file.write(json.dumps(document.line) + "\n")
            documents.append(replace(document, text=""))
    return documents


def write_tokens(folder: Path, mb: float, parts: int = 4) -> int:
    """Pairs of .bin and .idx with about `mb` megabytes of tokens together; how many documents."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    documents = max(1, int(mb * 1e6 / 2 / _TOKENS / parts))
    for part in range(parts):
        sizes = generator.integers(1, 2 * _TOKENS, documents, dtype=np.int32)
        prefix = folder / f"part{part}"
        generator.integers(0, 50257, sizes.sum(), dtype=np.uint16).tofile(prefix.with_suffix(".bin"))
        write_index(prefix.with_suffix(".idx"), np.dtype("<u2"), [(sizes, None)])
        write_sidecar(prefix, Sidecar("GPT2BPETokenizer", "0" * 64, 50257, 50256, documents, int(sizes.sum())))
    return documents * parts
