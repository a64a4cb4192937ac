"""Makes a corpus of English prose from what every machine has: the documentation inside Python, numpy and torch.

Docstrings, comments, long documentation strings, Python's help topics and text files become loose JSON lines {"text", "url"},
one document per source file. No network is used and no module but pydoc_data.topics is imported: sources are parsed. For one
environment the output is always the same; it changes with versions, so OUTPUT.manifest.json records them and the file's SHA-256.

    python data_tools/make_sample_corpus.py --output data/sample/corpus.jsonl
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

PACKAGES = ("numpy", "torch")
HAS_PRIVATE_CODE = {"torch"}  # whose folders with a leading underscore hold code with few words
SKIPPED_FOLDERS = {"test", "tests", "testing", "idle_test", "site-packages", "__pycache__", "lib2to3", "_vendor"}
TEXT_NAMES = re.compile(r".*\.(txt|rst|md)$|^(LICENSE|NOTICE|COPYING)[^/]*$")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MIN_PASSAGE = 40  # characters; shorter ones are labels, not sentences
MIN_DOCUMENT = 200
# Comments to tools and to readers of code, not prose.
TOOL_COMMENT = re.compile(
    r"^(!|-\*-|noqa|type:|pragma|pylint|mypy|pyre|ruff|fmt:|isort|flake8|coding[:=]|vim:|@lint)", re.IGNORECASE
)
NOT_LETTERS = re.compile(r"[^A-Za-z\u00c0-\uffff ]+")
NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, unpaired surrogates
MIN_LETTERS = 0.65  # share of letters and spaces below which a passage is a table, code or art


@dataclass(frozen=True)
class Source:
    """One file to read, and the name by which the corpus calls it (free of paths of this machine)."""

    path: Path
    url: str


def find_sources() -> tuple[list[Source], dict[str, str]]:
    """All files to read, in a fixed order, and the versions of what they belong to."""
    versions = {"python": platform.python_version()}
    roots = [("python", Path(sysconfig.get_paths()["stdlib"]))]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)  # finds a top-level package without importing it
        if spec is not None and spec.origin is not None:
            versions[package] = importlib.metadata.version(package)
            roots.append((package, Path(spec.origin).parent))
    sources = []
    for name, root in roots:
        for folder, subfolders, files in os.walk(root):
            skipped = ("config-", "_") if name in HAS_PRIVATE_CODE else ("config-",)
            subfolders[:] = sorted(s for s in subfolders if s not in SKIPPED_FOLDERS and not s.startswith(skipped))
            for file in sorted(files):
                if file.endswith(".py") or TEXT_NAMES.match(file):
                    path = Path(folder, file)
                    sources.append(Source(path, f"{name}-{versions[name]}/{path.relative_to(root).as_posix()}"))
    return sources, versions


def read_passages(source: Source) -> list[str]:
    """The prose of a file in the order of its lines; nothing from a file that cannot be read as text or parsed."""
    try:
        text = source.path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return []
    if source.path.suffix != ".py":
        return [] if NOT_TEXT.search(text) else [text.strip()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the parser, about old escapes in other people's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    strings = list(_strings(tree))
    passages = [(line, inspect.cleandoc(value)) for line, _, value, is_text in strings if is_text]
    passages += _comments(text, [(first, last) for first, last, _, _ in strings if last > first])
    return [p.strip() for _, p in sorted(passages) if is_prose(p)]


def is_prose(passage: str) -> bool:
    """Whether a passage is long enough and mostly letters."""
    if len(passage) < MIN_PASSAGE or passage.count(" ") < len(passage) // 20 or NOT_TEXT.search(passage):
        return False
    return len(NOT_LETTERS.sub("", passage)) >= MIN_LETTERS * len(passage)


def _strings(tree: ast.Module) -> Iterator[tuple[int, int, str, bool]]:
    """(first line, last line, value, whether it is documentation) of each string: docstrings, and others of several lines."""
    docstrings = set()
    for node in ast.walk(tree):  # breadth first: a docstring comes after what it documents
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                last = node.end_lineno or node.lineno
                yield node.lineno, last, node.value, id(node) in docstrings or node.value.count("\n") >= 3
        elif isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr):
            docstrings.add(id(node.body[0].value))


def _comments(text: str, string_lines: Sequence[tuple[int, int]]) -> Iterator[tuple[int, str]]:
    """(first line, text) of each block of comment lines, outside of strings that span lines."""
    inside = {line for first, last in string_lines for line in range(first, last + 1)}
    block: list[str] = []
    lines = text.split("\n")
    for number, line in enumerate([*lines, ""], start=1):
        stripped = line.strip()
        if stripped.startswith("#") and number not in inside:
            content = stripped.lstrip("#:").removeprefix(" ").rstrip()
            if not TOOL_COMMENT.match(content.lstrip()):
                block.append(content)
        elif block:
            yield number - len(block), "\n".join(block)
            block = []


def build_documents(workers: int, progress: bool) -> tuple[list[dict[str, str]], dict[str, str], dict[str, int]]:
    """The documents of this environment in a fixed order, the versions behind them, and what was counted."""
    sources, versions = find_sources()
    counts = {"files": len(sources), "duplicate_passages": 0, "short_documents": 0}
    seen: set[bytes] = set()
    documents: list[dict[str, str]] = []

    def add(url: str, passages: Sequence[str]) -> None:
        fresh = []
        for passage in passages:
            digest = hashlib.sha256(passage.encode()).digest()
            counts["duplicate_passages"] += digest in seen
            if digest not in seen:
                fresh.append(passage)
            seen.add(digest)
        text = "\n\n".join(fresh)
        if len(text) >= MIN_DOCUMENT:
            documents.append({"text": text, "url": url})
        else:
            counts["short_documents"] += bool(passages)

    for topic, text in sorted(_help_topics().items()):
        add(f"python-{versions['python']}/help/{topic}", [text.strip()])
    with ProcessPoolExecutor(workers, get_context("spawn")) as executor:
        results = executor.map(read_passages, sources, chunksize=32)
        for source, passages in zip(
            tqdm(sources, desc="reading", unit=" files", disable=not progress), results, strict=True
        ):
            add(source.url, passages)
    return documents, versions, counts


def _help_topics() -> dict[str, str]:
    from pydoc_data.topics import topics  # 700 kB of text; only the parent needs it

    return topics


def select(documents: list[dict[str, str]], max_bytes: int) -> list[dict[str, str]]:
    """Documents spread evenly over the whole list, about `max_bytes` of text in all, still in order."""
    total = sum(len(d["text"].encode()) for d in documents)
    share = min(1.0, max_bytes / max(total, 1))
    # Keeps document i where the running sum of shares passes a whole number.
    return [d for i, d in enumerate(documents) if int((i + 1) * share) > int(i * share)]


def write_aside(path: Path, content: bytes) -> None:
    """Writes a file under another name and renames it, so that `path` is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument("--max-mb", type=float, default=9.0, help="megabytes of text at most (default: 9)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    flags = parser.parse_args(argv)
    start = time.perf_counter()
    documents, versions, counts = build_documents(flags.workers, sys.stderr.isatty())
    available = len(documents)
    documents = select(documents, int(flags.max_mb * 1e6))
    corpus = b"".join(json.dumps(document, ensure_ascii=False).encode() + b"\n" for document in documents)
    manifest = {
        "bytes": len(corpus),
        "sha256": hashlib.sha256(corpus).hexdigest(),
        "documents": len(documents),
        "versions": versions,
        "max_mb": flags.max_mb,
    }
    write_aside(
        flags.output.with_name(f"{flags.output.name}.manifest.json"), json.dumps(manifest, indent=1).encode() + b"\n"
    )
    write_aside(flags.output, corpus)
    seconds = round(time.perf_counter() - start, 2)
    print(
        json.dumps(
            {"output": str(flags.output), **manifest, "documents_available": available, **counts, "seconds": seconds}
        )
    )


if __name__ == "__main__":
    main()
