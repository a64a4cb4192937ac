"""Finds documents that are copies of earlier ones, exact or near, and writes the others: find, group and remove in one step.

Texts are compared as sets of word 5-grams, without regard to case, punctuation and white space. Texts of the same words in the
same order are exact copies and are found by a hash. Of the rest, those whose MinHash signatures agree in a whole band are
compared by these signatures (locality-sensitive hashing); they are near copies if the estimated Jaccard similarity is at least
--similarity. With the default 14 bands of 8 rows, 65 % of the pairs of similarity 0.72 come to be compared, 92 % at 0.8, 98.8 %
at 0.85, 99.96 % at 0.9. Copies of copies form one group, of which the first document of the input stays; the dropped list says
which one that is, and how similar.

Signatures (270 bytes a document) stay in --work-folder: a killed run goes on from there, and a run with other bands of the same
total size, another --similarity or more inputs makes only those that are missing. The folder can be deleted afterwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_tools.dedup_index import CHUNK, Search, copies_in, find_copies
from data_tools.dedup_minhash import VERSION
from data_tools.dedup_signatures import Documents, SignatureFiles, same_content, similarity
from data_tools.dedup_signing import sign
from data_tools.done_marker import made_once, read_marker
from data_tools.line_functions import DocumentLines, unchanged
from data_tools.options import RunOptions, add_input_output, add_run_options, run_options
from data_tools.shard_plan import shards_of
from data_tools.shards import describe, run_lines
from megazero.data.arrays import read_array
from megazero.files import append_suffix, locked
from megazero.lines.contents import describe_files, key_of
from megazero.lines.jsonl import ID_KEYS, Block
from megazero.lines.resumable import Reason


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this step."""
    add_input_output(parser)
    add_copy_arguments(parser)
    add_run_options(parser)


def add_copy_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --similarity, --bands, --rows and --work-folder."""
    group = parser.add_argument_group("what counts as a copy")
    group.add_argument("--similarity", type=float, default=0.7, help="least estimated Jaccard similarity of copies")
    group.add_argument(
        "--bands", type=int, default=14, help="bands of the signature; more bands find less similar pairs"
    )
    group.add_argument(
        "--rows", type=int, default=8, help="rows in each band; with more rows, fewer pairs are compared"
    )
    group.add_argument("--work-folder", help="folder for signatures and temporary files (default: OUTPUT.dedup)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Removes copies, and returns the statistics."""
    options, (inputs, shards) = run_options(args), shards_of(args)
    search = CopySearch(args, inputs, options)

    @contextmanager
    def copies() -> Iterator[Copies]:
        with search.result() as (files, first, _):
            yield Copies(files, first, inputs)

    lines = DocumentLines(unchanged, args.json_key)
    statistics = run_lines("dedup", shards, lines, search.settings, options, copies)
    return {**statistics, **search.summary(), "signatures": VERSION}


@dataclass
class CopySearch:
    """The search for copies among all documents of the inputs; its result stays in a folder.

    Attributes:
        args: of `add_copy_arguments`, with `output` and `json_key`.
        id_keys: which entries name a document.
        reports: whether this search reports lines that hold no document, and not a later pass over the documents.
        settings: what the result depends on, the content of all inputs included.

    Raises:
        ValueError: a flag is bad.
    """

    args: argparse.Namespace
    inputs: Sequence[Path]
    options: RunOptions
    id_keys: Sequence[str] = ID_KEYS
    reports: bool = False
    settings: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        args = self.args
        if not 0 < args.similarity <= 1:
            raise ValueError(f"--similarity must lie in (0, 1], got {args.similarity}")
        if args.bands < 1 or args.rows < 1 or args.bands * args.rows > 1024:
            raise ValueError(
                f"--bands and --rows must be positive and their product 1024 at most, got {args.bands} x {args.rows}"
            )
        self._result = Path(args.work_folder or append_suffix(Path(args.output), ".dedup")) / "copies"
        settings = {name: getattr(args, name) for name in ("bands", "rows", "similarity")}
        settings |= {"key": args.json_key, "id_keys": list(self.id_keys), "version": VERSION}
        # All inputs: whether a document is a copy depends on all of them.
        described = describe("dedup", settings, describe_files(self.inputs, self.options.workers), self.options)
        self.settings = {**settings, "all_inputs": key_of(described)}

    @contextmanager
    def result(self) -> Iterator[tuple[SignatureFiles, Documents, dict[str, Any]]]:
        """The signatures, for each document the first one of its group, and statistics of the pass over the documents.

        Searched, or what an earlier run has stored.
        """
        args, options, folder = self.args, self.options, self._result.parent
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            permutations = args.bands * args.rows
            files, signed = sign(self.inputs, folder, args.json_key, permutations, options, self.id_keys, self.reports)
            workers, keys = options.workers_in_memory, folder / "keys"
            search = Search(args.bands, args.similarity, options.memory_bytes, workers, keys)

            def make(file: BinaryIO) -> dict[str, Any]:
                found = find_copies(files, search)
                file.write(found.first.data)
                groups = _count_groups(found.first)
                return {"summary": {"groups": groups, "compared": found.compared, "uncompared": found.uncompared}}

            made_once(self._result, [self._result], self.settings["all_inputs"], make)
            yield files, read_array(self._result, "<i8"), signed

    def summary(self) -> dict[str, int]:
        """What is stored of the result: groups, comparisons; {} where there is none."""
        stored = read_marker(self._result, self.settings["all_inputs"], [self._result])
        return stored["summary"] if stored else {}


def _count_groups(first: Documents) -> int:
    """How many documents have copies."""
    has_copies = np.zeros(len(first), dtype=bool)
    for part in copies_in(first):
        has_copies[first[part]] = True
    return int(has_copies.sum())


class Copies:
    """For a block of an input, the lines to drop and why: what `run_lines` asks for."""

    def __init__(self, files: SignatureFiles, first: Documents, inputs: Sequence[Path]) -> None:
        self._files, self._first = files, first
        self._number = {path: number for number, path in enumerate(inputs)}
        self._current: int | None = None

    def __call__(self, block: Block) -> Mapping[int, Reason]:
        """{byte of the text at which a line begins: (reason, id of its document, what it is a copy of)}."""
        if (number := self._number[block.path]) != self._current:
            self._load(number)
        start, stop = np.searchsorted(self._line_starts, [block.start, block.stop])
        copies = self._documents[start:stop]
        if not len(copies):
            return {}
        firsts = self._first[copies]
        mine, theirs = self._files.read(copies), self._files.read(firsts)
        reasons = ["exact copy" if same else "near copy" for same in same_content(mine, theirs)]
        originals = zip(similarity(mine, theirs), self._files.ids(firsts, theirs), strict=True)
        details = [f"similarity {share:.2f} to {name}" for share, name in originals]
        content = zip(reasons, self._files.ids(copies, mine), details, strict=True)
        return dict(zip(mine["line_start"].tolist(), content, strict=True))

    def _load(self, number: int) -> None:
        """Finds the copies in a file, and where their lines begin."""
        documents, starts = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for first, rows in self._files.chunks_of_file(number, CHUNK):
            own = np.arange(first, first + len(rows))
            is_copy = self._first[own] != own
            documents.append(own[is_copy])
            starts.append(rows["line_start"][is_copy])
        self._current, self._documents, self._line_starts = number, np.concatenate(documents), np.concatenate(starts)
