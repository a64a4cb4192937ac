"""Makes a corpus of English prose from what every machine has: the documentation inside Python, numpy and torch.

Docstrings, comments, long documentation strings, Python's help topics and text files become loose JSON lines {"text", "url"},
one document per source file. No network is used and no module but pydoc_data.topics is imported: sources are parsed. For one
environment the output is always the same; it changes with versions, so OUTPUT.done.json records them and the file's SHA-256.
The prose of the whole environment is held, whatever --max-mb, so there is no --memory: some 130 MB, and 20 MB a worker.

    python -m data_tools sample_corpus --output data/sample/sample.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sysconfig
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

from data_tools.documents import dump
from data_tools.done_marker import made_once
from data_tools.options import number
from data_tools.sample_corpus_faults import plant_faults
from data_tools.sample_corpus_passages import Source, read_passages
from megazero.cgroups import available_cores
from megazero.lines.contents import key_of
from megazero.lines.progress import Progress
from megazero.lines.workers import ordered_map

PACKAGES = ("numpy", "torch")
HAS_PRIVATE_CODE = {"torch"}  # whose folders with a leading underscore hold code with few words
SKIPPED_FOLDERS = {"test", "tests", "testing", "idle_test", "site-packages", "__pycache__", "lib2to3", "_vendor"}
TEXT_NAMES = re.compile(r".*\.(txt|rst|md)$|^(LICENSE|NOTICE|COPYING)[^/]*$")
MIN_DOCUMENT = 200


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


def build_documents(
    sources: Sequence[Source], versions: dict[str, str], workers: int
) -> tuple[list[dict[str, str]], dict[str, int]]:
    """The documents of what `find_sources` has found, in a fixed order, and what was counted."""
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

    from pydoc_data.topics import topics  # 700 kB of text; only the parent needs it

    for topic, text in sorted(topics.items()):
        add(f"python-{versions['python']}/help/{topic}", [text.strip()])
    total = sum(source.path.stat().st_size for source in sources)
    with Progress("reading", total) as progress, closing(ordered_map(read_passages, sources, workers)) as found:
        for source, passages in found:
            add(source.url, passages)
            size = source.path.stat().st_size
            progress.update(1, size, size)
    return documents, counts


def select(documents: list[dict[str, str]], max_bytes: int) -> list[dict[str, str]]:
    """Documents spread evenly over the whole list, about `max_bytes` of text in all, still in order."""
    total = sum(len(d["text"].encode()) for d in documents)
    share = min(1.0, max_bytes / max(total, 1))
    # Keeps document i where the running sum of shares passes a whole number.
    return [d for i, d in enumerate(documents) if int((i + 1) * share) > int(i * share)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument(
        "--max-mb", type=number, default=9.0, help="about how many megabytes of text, if there are as many"
    )
    parser.add_argument(
        "--faults",
        action="store_true",
        help="plant what a dump of the web has: duplicates, broken lines, other languages",
    )
    parser.add_argument("--workers", type=int, default=available_cores(), help="processes")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Writes the corpus, and returns what it holds. Where the same packages have made it, nothing is done."""
    if args.workers < 1 or args.max_mb <= 0:
        raise ValueError(f"--workers {args.workers} and --max-mb {args.max_mb} must be positive")
    sources, versions = find_sources()
    settings = {"versions": versions, "max_mb": args.max_mb, "faults": args.faults}
    key = key_of({"step": "sample_corpus", **settings})

    def make(file: BinaryIO) -> dict[str, Any]:
        documents, counts = build_documents(sources, versions, args.workers)
        chosen = select(documents, int(args.max_mb * 1e6))
        if not chosen:
            raise ValueError(f"--max-mb {args.max_mb} is less than any of the {len(documents)} documents. Give more.")
        corpus, planted = plant_faults(chosen) if args.faults else (b"".join(map(dump, chosen)), {})
        file.write(corpus)
        found = {"bytes": len(corpus), "sha256": hashlib.sha256(corpus).hexdigest(), "documents": len(chosen)}
        return {**settings, **found, "planted": planted, "documents_available": len(documents), **counts}

    content, skipped = made_once(args.output, [args.output], key, make)
    return {"output": str(args.output), **content, "skipped": skipped}
