"""A function applied to all lines of a corpus: the frame of the steps, over `megazero.lines.resumable`.

At the end the outputs of a shard and RECORD.dropped.jsonl get their names, then RECORD.done.json is written: without it, nothing
counts as made.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from data_tools.documents import check_documents, document_blocks
from data_tools.done_marker import check_made_here, marker_path, read_marker, write_marker
from data_tools.line_functions import DocumentFunction, DocumentLines, LineFunction, apply_to_block
from data_tools.options import RunOptions, run_options
from data_tools.shard_plan import output_format, shards_of
from megazero.files import append_suffix, locked, sync_folder
from megazero.lines.contents import describe_files, key_of
from megazero.lines.outputs import full_disk_named
from megazero.lines.partial_shard import DROPPED_SUFFIX, PartialShard, Place, Shard, give_up
from megazero.lines.progress import Progress
from megazero.lines.results import Counts, check_strict, report_empty
from megazero.lines.resumable import BlockWork, Drops, fill, useful_workers

logger = logging.getLogger(__name__)

FORMAT = 2
DropSearch = Callable[[], AbstractContextManager[Drops]]
"""Makes that earlier pass, when there is a shard to make and not before; at the end of the `with` block its files are removed."""


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
    tables: Sequence[Path] = (),
) -> dict[str, Any]:
    """`run_lines` with a function of a document, on what `add_input_output` and `add_run_options` have read.

    Args:
        tables: other files that the function was made of, which are no more to be overwritten than inputs are.
    """
    _, shards = shards_of(args, tables=tables)
    lines = DocumentLines(function, args.json_key)
    return run_lines(step, shards, lines, {"key": args.json_key, **settings}, options or run_options(args))


def run_lines(
    step: str,
    shards: Sequence[Shard],
    function: LineFunction,
    settings: Mapping[str, Any],
    options: RunOptions,
    search: DropSearch = no_search,
) -> dict[str, Any]:
    """`run_blocks` with a function of a line; warns where it has kept no document."""
    result = run_blocks(step, shards, partial(apply_to_block, function), settings, options, search)
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
    place: Place | None = None,
) -> dict[str, Any]:
    """Makes the shards that are not made yet, and returns the statistics of all of them.

    Args:
        step: its name, for messages and keys.
        settings: JSON values: everything besides the input that determines what comes out (versions of models, too).
        search: finds lines that are unwanted before any is written.

    Raises:
        ValueError: bad input with `options.strict`, a damaged file, one without a document on any of its lines, or an output in
            the way.
        RuntimeError: a worker process died; OSError: the disk is full. In both cases what was committed is kept.
    """
    first = min(shard.record for shard in shards)
    first.parent.mkdir(parents=True, exist_ok=True)
    with locked(append_suffix(first, ".lock")), full_disk_named(f"to {first.parent}"):
        files = list(dict.fromkeys(path for shard in shards for path in shard.inputs))
        contents = dict(zip(files, describe_files(files, options.workers), strict=True))
        total, todo = Counts(), {}
        for shard in shards:
            description = describe(step, settings, [contents[path] for path in shard.inputs], options)
            done = finished(shard, key_of(description), options.strict)
            if done is None:
                todo[shard] = description
            else:
                total.add(done)
        if skipped := len(shards) - len(todo):
            logger.info("%s: %d of %d shards are there already", step, skipped, len(shards))
        if todo:
            paths = [path for shard in todo for path in shard.inputs]
            if "key" in settings:
                check_documents(paths, settings["key"], options.max_line_bytes)
            useful = replace(options, workers=useful_workers(paths, options.block_bytes, options.workers_in_memory))
            partials = (PartialShard(shard, key_of(description)) for shard, description in todo.items())
            with search() as drops:
                progress = Progress(step, sum(path.stat().st_size for path in paths))
                with closing(fill(partials, work, useful, progress, drops, place, document_blocks)) as filled:
                    for made in filled:
                        inputs, description = made.shard.inputs, todo[made.shard]
                        made.check_unchanged(inputs, description["inputs"], options.workers)
                        made.counts.empty_files = report_empty(inputs)
                        finish(made, description)
                        total.add(made.counts)
    return total.statistics(len(shards), skipped)


def finish(made: PartialShard, description: dict[str, Any]) -> None:
    """Gives the outputs of a shard that is filled their names and writes the done-marker, which counts from then on."""
    shard = made.shard
    # An old one would vouch for the files of this run.
    marker_path(shard.record).unlink(missing_ok=True)
    *parts, dropped = made.paths
    for part, output in zip(parts, shard.outputs, strict=True):
        if output_format(output) == "parquet":
            from data_tools.parquet import write_parquet

            write_parquet(part, output)
        else:
            os.replace(part, output)
    os.replace(dropped, append_suffix(shard.record, DROPPED_SUFFIX))
    for folder in {path.parent for path in (*shard.outputs, shard.record)}:
        sync_folder(folder)
    content = {"description": description, "counts": asdict(made.counts)}
    write_marker(shard.record, key_of(description), shard.outputs, content)
    made.remove()


def finished(shard: Shard, key: str, strict: bool) -> Counts | None:
    """What was counted when the shard was made, if it is there, whole, and of the same input and settings; else None.

    In the first case, what another run that was stopped has left of it is removed.

    Raises:
        ValueError: an output exists that no run of a step has made; or `strict` is set, and lines were left out.
    """
    content = read_marker(shard.record, key, shard.outputs)
    if content is not None:
        give_up(shard)  # else the folder would count as one whose step has not finished
        counts = Counts(**content["counts"])
        check_strict(counts.errors, strict, f"when {shard.record} was made")
        return counts
    check_made_here(shard.record, shard.outputs)
    return None


def describe(
    step: str, settings: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]], options: RunOptions
) -> dict[str, Any]:
    """What determines a shard: step, settings and input (see `describe_files`), as JSON values for `key_of`."""
    return {
        "format": FORMAT,
        "step": step,
        "settings": dict(settings),
        "block_bytes": options.block_bytes,
        "max_line_bytes": options.max_line_bytes,
        "inputs": list(inputs),
    }
