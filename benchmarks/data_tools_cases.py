"""The steps of data_tools as benchmarks/data_tools.py measures them: their input, their flags, and other ways to do the same."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import data_tools_ways as ways
import numpy as np
from harness import is_installed

from data_tools.registry import step_parser
from megazero.data.indexed_dataset import IndexedDatasetWriter
from tests.data_tools.planted import Planted, planted_documents, score

Way = Callable[[Path, Path], object]
"""(source, folder): does the work and writes the result into the empty folder."""
HOW = "pip install -e '.[bench]'"
QUALITY = ("gopher_quality", "gopher_repetition", "fineweb")
SIZES_MB = {
    "filter_urls": 2,
    "clean": 4,
    "quality": 3,
    "dedup": 5,
    "decontaminate": 6,
    "merge": 24,
    "shuffle": 24,
    "split": 24,
    "train_tokenizer": 3,
    "tokenize": 6,
    "merge_datasets": 64,
}
"""Megabytes of input on one core."""
_PLANTED_BYTES = 2850  # of a line with a planted document, on average
_TOKENS = 1000  # of a document, on average
_HOSTS = ("en.wikipedia.org", "www.youtube.com", "i.imgur.com", "twitter.com")  # left out
_ENDINGS = ("", "", "", "", ".html", ".html", ".php?page=2", ".jpg", ".pdf?download=1")
_OUTPUT = ("--output", f"{{folder}}/{ways.OUTPUT}")


@dataclass(frozen=True)
class Case:
    """A step and its input.

    Attributes:
        source: a file, or a folder of token files.
        flags: of the command, in which {folder} stands for the folder of the output.
        others: other ways by name.
        made: the file of the output that is compared between the ways.
        is_same: whether all ways must make the same bytes.
        planted: the documents, where copies are planted among them, without their texts.
    """

    step: str
    source: Path
    documents: int
    flags: tuple[object, ...]
    others: Mapping[str, Way]
    made: str = ways.OUTPUT
    is_same: bool = True
    planted: tuple[Planted, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of the source: JSON lines, URLs, or .bin files."""
        files = self.source.glob("*.bin") if self.source.is_dir() else [self.source]
        return sum(path.stat().st_size for path in files)

    def command(self, folder: Path, workers: int, memory: str) -> list[str]:
        """The step and its flags."""
        argv = [self.step, "--input", str(self.source), *(str(flag).format(folder=folder) for flag in self.flags)]
        if self.step in ("train_tokenizer", "merge_datasets"):
            return argv  # one process; memory is bounded by --sample-mb, and by the indices
        return [*argv, "--workers", str(workers), "--memory", memory]

    def run(self, source: Path, folder: Path) -> None:
        """The step on another source with one worker, in this process."""
        step, *flags = replace(self, source=source).command(folder, 1, "1G")
        args = step_parser(step).parse_args(flags)
        args.run(args)

    def facts(self, folder: Path) -> dict[str, Any]:
        """What a way has made."""
        content = (folder / self.made).read_bytes()
        facts: dict[str, Any] = {"sha256": hashlib.sha256(content).hexdigest()[:16]}
        if self.made.startswith(("kept", "train")):
            facts["kept"] = content.count(b"\n")
        if self.planted:
            kept = {json.loads(line)["id"] for line in content.splitlines()}
            found = score(list(self.planted), {document.id for document in self.planted} - kept)
            facts |= dict(zip(("recall", "precision"), (round(value, 4) for value in found), strict=True))
        return facts


def fresh(folder: Path) -> Path:
    """The folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def make_case(step: str, mb: float, texts: list[str], vocabulary: tuple[Path, Path], folder: Path) -> Case:
    """The case of a step with about `mb` megabytes of input, which is written into `folder`."""
    folder.mkdir(parents=True)
    urls, pairs, documents = folder / "urls.txt", folder / "pairs", folder / "documents.jsonl"
    if step == "filter_urls":
        flags = ("--output", "{folder}/kept.txt")
        return Case(step, urls, write_urls(urls, mb), flags, {"tldextract in a loop": ways.filter_urls}, "kept.txt")
    if step == "merge_datasets":
        flags, numpy = ("--output-prefix", "{folder}/o"), {"numpy in memory": ways.merge_datasets}
        return Case(step, pairs, write_tokens(pairs, mb), flags, numpy, "o.bin")
    if step == "dedup":
        return dedup_case(documents, int(mb * 1e6 / _PLANTED_BYTES))
    evaluation = folder / "evaluation.jsonl"
    evaluation.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[::100]))
    case = partial(Case, step, documents, write_texts(documents, texts, mb))
    words = ("--vocab-file", vocabulary[0], "--merge-file", vocabulary[1])
    if step == "clean":
        others: dict[str, Way] = {"ftfy, langdetect, tiktoken": partial(ways.clean, *vocabulary)}
        return case((*_OUTPUT, *words), others, is_same=False)
    if step == "quality":
        return case((*_OUTPUT, "--rules", *QUALITY), {"plain Python": partial(ways.quality, QUALITY)})
    if step == "decontaminate":
        others = {"plain Python": partial(ways.decontaminate, evaluation)}
        return case((*_OUTPUT, "--evaluation", evaluation), others)
    if step == "split":
        return case(("--output", "{folder}"), {"plain Python": ways.split}, "train.jsonl", is_same=False)
    if step == "train_tokenizer":
        size = ("--vocab-size", ways.VOCAB_SIZE, "--sample-mb", 1e3)
        flags = ("--model-type", "byte_level_bpe", *size, "--memory", "64G", "--model-prefix", "{folder}/bpe")
        return case(flags, {"HF tokenizers": ways.train_tokenizer}, "bpe/merges.txt")
    if step == "tokenize":
        kinds = {"HF tokenizers": ways.hugging_face_encoder, "plain Python": ways.plain_encoder}
        if not is_installed("regex", HOW):
            kinds.pop("plain Python")
        others = {name: partial(ways.tokenize, encoder, *vocabulary) for name, encoder in kinds.items()}
        return case(("--append-eod", "--output-prefix", "{folder}/o", *words), others, ways.TOKENS)
    return case(_OUTPUT, {"plain Python": getattr(ways, step)}, is_same=step == "merge")


def dedup_case(source: Path, count: int) -> Case:
    """The case of dedup with `count` documents, or 200, with planted copies."""
    count, planted = max(200, count), []
    with open(source, "w") as file:
        for document in planted_documents(count):
            file.write(json.dumps(document.line) + "\n")
            planted.append(replace(document, text=""))
    others = {"datasketch's LSH": ways.dedup} if is_installed("datasketch", HOW) else {}
    return Case("dedup", source, count, _OUTPUT, others, is_same=False, planted=tuple(planted))


def read_texts(path: Path) -> list[str]:
    """The texts of a file of JSON lines; every second one with the quotation marks of typeset pages, which ftfy changes."""
    with open(path, "rb") as file:
        texts = [json.loads(line)["text"] for line in file]
    typeset = str.maketrans({"'": "\u2019"})
    return [text.translate(typeset) if number % 2 else text for number, text in enumerate(texts)]


def write_texts(path: Path, texts: list[str], mb: float) -> int:
    """About `mb` megabytes of documents, as many times the same ones as need be, each with an id of its own; how many."""
    size = count = 0
    with open(path, "wb") as file:
        for count, text in enumerate(itertools.cycle(texts), start=1):
            document = {"text": text, "url": f"https://example.org/{count}", "id": f"doc-{count}"}
            size += file.write(json.dumps(document, ensure_ascii=False).encode() + b"\n")
            if size >= mb * 1e6:
                break
    return count


def write_urls(path: Path, mb: float) -> int:
    """About `mb` megabytes of URLs; three in ten of them unwanted, one in twenty a repeat. How many."""
    generator = random.Random(0)
    size, lines = 0, ["http://example.org/"]
    while size < mb * 1e6:
        site = f"www.site-{int(50_000 ** generator.random())}.co.uk"  # a few have most of the pages
        host = generator.choice(_HOSTS) if generator.random() < 0.1 else site
        slug = "-".join(f"{generator.getrandbits(20):x}" for _ in range(6))
        url = f"https://{host}/{slug}{generator.choice(_ENDINGS)}"
        lines.append(generator.choice(lines[-1000:]) if generator.random() < 0.05 else url)
        size += len(lines[-1]) + 1
    path.write_text("".join(f"{line}\n" for line in lines))
    return len(lines)


def write_tokens(folder: Path, mb: float, parts: int = 4) -> int:
    """Pairs of .bin and .idx with about `mb` megabytes of tokens together; how many documents."""
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 2 * _TOKENS, max(parts, int(mb * 1e6 / 2 / _TOKENS)))
    for part in range(parts):
        with IndexedDatasetWriter(folder / f"part{part}", np.uint16) as writer:
            for size in sizes[part::parts]:
                writer.add_document(generator.integers(0, 50257, size, dtype=np.uint16))
    return len(sizes)
