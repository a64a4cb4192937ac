"""A function applied to all lines of a corpus: in parallel, in order, resumable, the same for any number of workers.

A worker takes a block of lines and returns its part of each output, compressed; the parts are written in the order of the input.
So what is written depends on the input and the settings alone.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from data_tools.counts import Counts
from data_tools.documents import document_blocks, list_inputs
from data_tools.line_functions import (
    BAD_LINE,
    BlockResult,
    DocumentFunction,
    DocumentLines,
    LineFunction,
    Reason,
    apply_to_block,
)
from data_tools.options import RunOptions, run_options
from data_tools.partial_shard import PartialShard, Shard, finished
from data_tools.shard_plan import plan_shards
from megazero.data.cache import key_of
from megazero.data.contents import check_unchanged, describe_files
from megazero.data.journal import full_disk_named
from megazero.data.jsonl import Block, check_strict, complain, left_out
from megazero.data.progress import Progress
from megazero.data.workers import ordered_map
from megazero.files import append_suffix, locked

logger = logging.getLogger(__name__)

FORMAT = 2
Drops = Callable[[Block], Mapping[int, Reason]]
"""block -> {byte at which a line begins in the text of the file: reason to drop it}, from an earlier pass."""
DropSearch = Callable[[], AbstractContextManager[Drops]]
"""Makes that earlier pass, when there is a shard to make and not before; at the end of the `with` block its files are removed."""
BlockWork = Callable[[tuple[Shard, Block, Mapping[int, Reason]]], BlockResult]
"""Picklable: what a worker makes of a block, given what an earlier pass drops of it. `apply_to_block` makes one."""
Place = Callable[[list[int], list[bytes]], list[bytes]]
"""(how long each output of a shard is so far, what a worker has made of the next block) -> what is appended to each."""


@contextmanager
def no_search() -> Iterator[Drops]:
    """The `DropSearch` that finds nothing to drop."""
    yield lambda block: {}


def run_documents(
    step: str,
    function: DocumentFunction,
    settings: Mapping[str, Any],
    args: argparse.Namespace,
    options: RunOptions | None = None,
) -> dict[str, Any]:
    """`run_lines` with a function of a document, on what `add_input_output` and `add_run_options` have read."""
    shards = plan_shards(list_inputs(args.input), args.output, args.format)
    lines = DocumentLines(function, args.json_key)
    return run_lines(step, shards, lines, {"key": args.json_key, **settings}, options or run_options(args))


def run_lines(
    step: str,
    shards: Sequence[Shard],
    function: LineFunction,
    settings: Mapping[str, Any],
    options: RunOptions,
    search: DropSearch = no_search,
    faults: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """`run_blocks` with a function of a line; warns where it has kept no document."""
    result = run_blocks(step, shards, partial(apply_to_block, function), settings, options, search, faults)
    if result["documents"] and not result["kept"]:
        logger.warning("%s: kept none of %d documents; dropped: %s", step, result["documents"], result["dropped"])
    return result


def run_blocks(
    step: str,
    shards: Sequence[Shard],
    work: BlockWork,
    settings: Mapping[str, Any],
    options: RunOptions,
    search: DropSearch = no_search,
    faults: frozenset[str] = frozenset(),
    place: Place | None = None,
) -> dict[str, Any]:
    """Makes the shards that are not made yet, and returns the statistics of all of them.

    Args:
        step: its name, for messages and keys.
        settings: JSON values: everything besides the input that determines what comes out (versions of models, too).
        search: finds lines that are unwanted before any is written.
        faults: reasons for dropping a document that are faults of the input: reported and, with `options.strict`, fatal.

    Raises:
        ValueError: bad input with `options.strict`, a damaged file, or an output in the way.
        RuntimeError: a worker process died; OSError: the disk is full. In both cases what was committed is kept.
    """
    run = _Run(step, work, settings, options, search, faults | {BAD_LINE}, place)
    first = min(shard.record for shard in shards)
    first.parent.mkdir(parents=True, exist_ok=True)
    with locked(append_suffix(first, ".lock")), full_disk_named(f"to {first.parent}"):
        run.make(shards)
    return run.total.statistics(len(shards), run.skipped)


@dataclass
class _Run:
    """One step over many shards: the arguments of `run_blocks`, and what was counted."""

    step: str
    work: BlockWork
    settings: Mapping[str, Any]
    options: RunOptions
    search: DropSearch
    faults: frozenset[str]
    place: Place | None
    total: Counts = field(default_factory=Counts)
    skipped: int = 0
    partials: dict[Shard, PartialShard] = field(default_factory=dict)
    descriptions: dict[Shard, dict[str, Any]] = field(default_factory=dict)

    def make(self, shards: Sequence[Shard]) -> None:
        """Makes what is not there."""
        todo = []
        files = list(dict.fromkeys(path for shard in shards for path in shard.inputs))
        contents = dict(zip(files, contents_of(files, self.options), strict=True))
        for shard in shards:
            inputs = [contents[path] for path in shard.inputs]
            self.descriptions[shard] = description = describe(self.step, self.settings, inputs, self.options)
            done = finished(shard, key_of(description))
            if done is None:
                todo.append(shard)
                continue
            self.skipped += 1
            self.total.add(done)
            check_strict(done.errors, self.options.strict, f"when {shard.record} was made")
        if self.skipped:
            logger.info("%s: %d of %d shards are there already", self.step, self.skipped, len(shards))
        if todo:
            with self.search() as drops:
                self._make(todo, drops)

    def _make(self, shards: Sequence[Shard], drops: Drops) -> None:
        total = sum(path.stat().st_size for shard in shards for path in shard.inputs)
        workers = min(self.options.workers_in_memory, max(1, -(-4 * total // self.options.block_bytes)))
        waiting = list(shards)
        try:
            with closing(Progress(self.step, total, self.options.log_interval_s)) as progress:
                items = self._items(shards, drops, progress)
                with closing(ordered_map(self.work, items, workers)) as results:
                    for (shard, block, _), result in results:
                        while waiting[0] != shard:
                            self._finish(waiting.pop(0))
                        self._take(self.partials[shard], block, result, progress)
                        self.partials[shard].commit(self.options.commit_interval_s)
                for shard in waiting:
                    self._finish(shard)
        finally:
            for partial in self.partials.values():
                partial.close()

    def _items(
        self, shards: Sequence[Shard], drops: Drops, progress: Progress
    ) -> Iterator[tuple[Shard, Block, Mapping[int, Reason]]]:
        for shard in shards:
            self.partials[shard] = partial = PartialShard(shard, key_of(self.descriptions[shard]))
            check_strict(partial.counts.errors, self.options.strict, "before the run was stopped")
            progress.skip(partial.position.disk_bytes_of(shard.inputs))
            for number, path, start in partial.position.remaining(shard.inputs):
                if path.stat().st_size == 0:
                    logger.warning("%s: %s is empty", self.step, path)
                    partial.counts.empty_files += 1
                options = self.options
                for block in document_blocks(path, options.block_bytes, start, number, options.max_line_bytes):
                    yield shard, block, drops(block)

    def _take(self, partial: PartialShard, block: Block, result: BlockResult, progress: Progress) -> None:
        counts = result.counts
        before = partial.position.advance(block, counts.lines)
        records = []
        for line, reason, identity, detail in result.removed:
            number = before + line + 1
            records.append(left_out(block.path, number, identity, reason, detail))
            if reason in self.faults:
                what = detail if reason == BAD_LINE else f"{reason} {identity}" + (f" ({detail})" if detail else "")
                complain(f"{block.path}:{number}: {what}", partial.counts.errors, self.options.strict)
        frames = self.place(partial.output_bytes, result.frames) if self.place else result.frames
        partial.append(frames, b"".join(records))
        progress.update(counts.documents, counts.text_bytes_in, block.disk_bytes)
        partial.counts.add(counts)

    def _finish(self, shard: Shard) -> None:
        # It stays among the open ones, to be closed if this fails.
        partial, description = self.partials[shard], self.descriptions[shard]
        check_unchanged(shard.inputs, description["inputs"], self.options.workers)
        partial.finish(description)
        self.total.add(self.partials.pop(shard).counts)


def contents_of(paths: Sequence[Path], options: RunOptions) -> list[dict[str, Any]]:
    """Name, size and hash of each file, as JSON values."""
    return describe_files(paths, options.workers, options.log_interval_s)


def describe(
    step: str, settings: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]], options: RunOptions
) -> dict[str, Any]:
    """What determines a shard: step, settings and input (see `contents_of`), as JSON values for `key_of`."""
    return {
        "format": FORMAT,
        "step": step,
        "settings": dict(settings),
        "block_bytes": options.block_bytes,
        "max_line_bytes": options.max_line_bytes,
        "inputs": list(inputs),
    }
