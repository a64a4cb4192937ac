"""Every step with a command line and what it is given: what holds for all of them is tested for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megazero.data.indexed_dataset import IndexedDatasetWriter
from tests.vocabularies import make_gpt2_vocabulary, make_texts


@dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        flags: besides the input; relative to the folder of `prepare`.
        outputs: what it makes.
        record: RECORD.dropped.jsonl lists what it leaves out.
        source: its input.
        prepare: writes what it needs besides.
    """

    flags: list[str]
    outputs: list[str]
    record: str | None
    source: str = "in.jsonl"
    prepare: Callable[[Path], object] | None = None

    def argv(self, *more: object) -> list[str]:
        """Its command line, without its name."""
        return [*self.flags, *map(str, more)]


def _evaluation(folder: Path) -> None:
    (folder / "evaluation.jsonl").write_text(json.dumps({"text": "a text that is nowhere else " * 4}) + "\n")


def _groups(folder: Path) -> None:
    (folder / "groups.jsonl").write_text('{"0": ["u3", "u7"]}\n')


def _vocabulary(folder: Path) -> None:
    make_gpt2_vocabulary(folder / "v")


def _own(folder: Path) -> None:
    (folder / "own.py").write_text("def own(document):\n    return document\n")


_IN = ["--input", "in.jsonl"]
TEXT_STEPS = {
    "filter_urls": Case(["--input", "in.txt", "--output", "out.txt"], ["out.txt"], "out.txt", "in.txt"),
    "clean": Case(
        [*_IN, "--output", "out.jsonl", "--min-tokens", "0", "--language", "any", "--no-fix"],
        ["out.jsonl"],
        "out.jsonl",
    ),
    "quality": Case([*_IN, "--output", "out.jsonl", "--rules", "fineweb"], ["out.jsonl"], "out.jsonl"),
    "dedup": Case([*_IN, "--output", "out.jsonl"], ["out.jsonl"], "out.jsonl"),
    "decontaminate": Case(
        [*_IN, "--output", "out.jsonl", "--evaluation", "evaluation.jsonl"],
        ["out.jsonl"],
        "out.jsonl",
        prepare=_evaluation,
    ),
    "apply": Case(
        [*_IN, "--output", "out.jsonl", "--function", "own.py:own"], ["out.jsonl"], "out.jsonl", prepare=_own
    ),
    "merge": Case([*_IN, "--output", "out.jsonl"], ["out.jsonl"], "out.jsonl"),
    "shuffle": Case([*_IN, "--output", "out.jsonl"], ["out.jsonl"], "out.jsonl"),
    "split": Case(
        [*_IN, "--output", "out", "--parts", "a=0.5", "b=0.5"], ["out/a.jsonl", "out/b.jsonl"], "out/split.jsonl"
    ),
    "tokenize": Case(
        [*_IN, "--output-prefix", "out", "--tokenizer-path", "v"],
        ["out_text_document.bin", "out_text_document.idx"],
        "out_text_document",
        prepare=_vocabulary,
    ),
    "train_tokenizer": Case([*_IN, "--model-prefix", "m", "--vocab-size", "400"], ["m.model"], "m"),
    "find_duplicates": Case([*_IN, "--output", "copies.json"], ["copies.json"], None),
    "remove_group_duplicates": Case(
        [*_IN, "--output", "out.jsonl", "--groups", "groups.jsonl"], ["out.jsonl"], "out.jsonl", prepare=_groups
    ),
}
"""The steps that read lines."""


def _corpora(folder: Path) -> None:
    for name in ("a", "b"):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for document in range(400):
                writer.add_document([document] * 20)


def _copies(folder: Path) -> None:
    (folder / "copies.jsonl").write_text(
        "".join(f'{{"{"u" * 60}{i % 100}": [{{"v{i}": 0.9}}]}}\n' for i in range(1000))
    )


def _tokens(folder: Path) -> None:
    _vocabulary(folder)
    np.tile(np.arange(270, dtype="<u2"), 30).tofile(folder / "train.bin")


OTHER_STEPS = {
    "import_tokens": Case(
        ["--input", "train.bin", "--dtype", "uint16", "--output-prefix", "out", "--tokenizer-path", "v"],
        ["out_text_document.bin", "out_text_document.idx"],
        None,
        "train.bin",
        _tokens,
    ),
    "merge_datasets": Case(
        ["--input", "a", "b", "--output-prefix", "out"], ["out.bin", "out.idx"], None, "a.bin", _corpora
    ),
    "group_duplicates": Case(
        ["--input", "copies.jsonl", "--output", "groups.jsonl"], ["groups.jsonl"], None, "copies.jsonl", _copies
    ),
}
STEPS = TEXT_STEPS | OTHER_STEPS


def lines_of(step: str, count: int, seed: int = 0, longest: int = 60) -> list[bytes]:
    """Good lines for a step: documents, or URLs."""
    if step == "filter_urls":
        return [b"http://example%d.org/a-page" % number for number in range(count)]
    texts = make_texts(count, seed=seed, longest=longest)
    return [json.dumps({"text": f"{text} end", "url": f"u{i}"}).encode() for i, text in enumerate(texts)]


def prepare(step: str, folder: Path, lines: list[bytes] | None = None) -> Case:
    """The case of a step, after its input was written."""
    case = STEPS[step]
    if step in TEXT_STEPS:
        lines = lines_of(step, 300) if lines is None else lines
        (folder / case.source).write_bytes(b"".join(line + b"\n" for line in lines))
    if case.prepare:
        case.prepare(folder)
    return case
