"""Shuffles documents, in bounded memory and always in the same way.

The order is that of a hash of each line and the seed, so it depends on the documents and --seed alone: not on their order, the
number of workers, or the memory. Equal lines have one hash, and so come one after another. Lines are first scattered to files by
the range of their hash, so many that each can be sorted in memory; the sorted files, one after another, are the result. Disk
space for one copy of the text is needed meanwhile.

    python -m data_tools shuffle --input all.jsonl.zst --output shuffled.jsonl.zst --seed 1234
    python -m data_tools shuffle --input clean/ --output shuffled/ --shards 16
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from data_tools.documents import compress
from data_tools.inputs import list_inputs
from data_tools.line_functions import Kept
from data_tools.options import RunOptions, add_input_output, add_run_options, open_files, run_options
from data_tools.shard_plan import names_file, plan_parts, plan_shards
from data_tools.shards import describe, finish, finished, run_lines
from megazero.files import append_suffix, locked
from megazero.lines.contents import describe_files, key_of
from megazero.lines.jsonl import expected_text_bytes, read_object
from megazero.lines.outputs import full_disk_named
from megazero.lines.partial_shard import DROPPED_SUFFIX, PartialShard, Shard
from megazero.lines.progress import Progress
from megazero.lines.results import BlockResult, Counts
from megazero.lines.resumable import Item, WorkOptions, fill, read_pieces

_COPIES = 6  # of a bucket while it is sorted: lines, keys, the sorted text, its compressed form
_READ_BYTES = 1 << 20
_HEX = 16  # letters of the hash of 64 bits before each line in a bucket
_SEED = 1234


@dataclass(frozen=True)
class Layout:
    """Which range of hashes goes where. Outputs consist of frames, which do not depend on the memory; so do buckets.

    Attributes:
        frames: pieces of about the size of a block, a multiple of `outputs`.
        buckets: files of as many frames each as fit in memory.
    """

    outputs: int
    frames: int
    buckets: int

    def frame(self, key: int) -> int:
        """The frame of a hash of 64 bits."""
        return key * self.frames >> 64

    def bucket(self, frame: int) -> int:
        """The bucket of a frame."""
        return frame * self.buckets // self.frames


def scatter(key: str, seed: int, layout: Layout, line: bytes) -> Kept:
    """The line for its bucket, behind the hash that puts it in order, in hexadecimal; LineError if it holds no document."""
    read_object(line, key)
    digest = hashlib.blake2b(line, digest_size=_HEX // 2, key=f"shuffle {seed}".encode()).digest()[::-1]
    bucket = layout.bucket(layout.frame(int.from_bytes(digest, "big")))
    return Kept(b"%b%b\n" % (digest.hex().encode(), line), bucket)


def sort_bucket(layout: Layout, limit: int, item: Item) -> BlockResult:
    """The frames of each output that a bucket, a block, holds; a ValueError where `limit` bytes of memory are too few."""
    outputs, bucket, _ = item
    if (need := bucket.stop * _COPIES) > limit:
        raise ValueError(
            f"the text is larger than its files let expect: a worker needs {need >> 20}M. Give more --memory."
        )
    with open(bucket.path, "rb", _READ_BYTES) as file:
        lines = sorted(file)
    parts: list[list[bytes]] = [[] for _ in outputs]
    for frame, content in groupby(lines, lambda line: layout.frame(int(line[:_HEX], 16))):
        output = frame * layout.outputs // layout.frames
        parts[output].append(compress(b"".join(line[_HEX:] for line in content), outputs[output]))
    counts = Counts(len(lines), documents=len(lines), text_bytes_in=bucket.stop)
    return BlockResult([b"".join(part) for part in parts], counts)


def plan_layout(inputs: Sequence[Path], outputs: int, options: RunOptions) -> Layout:
    """How to cut the range of hashes.

    Raises:
        ValueError: --memory is so little that there would be more buckets than files may be open.
    """
    text = expected_text_bytes(inputs)
    frames = -(-max(1, text // options.block_bytes) // outputs) * outputs
    # Half full on average: hashes do not fall evenly, and documents differ in length.
    buckets = min(frames, max(1, 2 * _COPIES * text // _bucket_memory(options)))
    most = open_files(buckets)
    if buckets > most:
        need = 2 * _COPIES * text * options.workers_in_memory // most >> 20
        raise ValueError(
            f"--memory is too little to shuffle {text >> 20}M of text with {most} files open: give {need}M"
        )
    return Layout(outputs, frames, buckets)


def _bucket_memory(options: RunOptions) -> int:
    return options.memory_bytes // options.workers_in_memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    add_input_output(parser, "a file, or a folder for --shards files")
    group = parser.add_argument_group("order")
    group.add_argument("--seed", type=int, default=_SEED, help="another seed, another order")
    group.add_argument("--shards", type=int, default=1, help="files in the folder --output")
    add_run_options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Shuffles, and returns the statistics."""
    options = run_options(args)
    inputs = list_inputs(args.input, output=args.output)
    shard = _plan(inputs, args)
    settings = {"key": args.json_key, "seed": args.seed, "outputs": [path.name for path in shard.outputs]}
    description = describe("shuffle", settings, describe_files(inputs, options.workers), options)
    shard.record.parent.mkdir(parents=True, exist_ok=True)
    with locked(append_suffix(shard.record, ".lock")):
        done = finished(shard, key_of(description), options.strict)
        if done is not None:
            shutil.rmtree(_buckets_folder(shard), ignore_errors=True)  # of a run that was killed when it had finished
            return done.statistics(skipped=1)
        return _shuffle(shard, args, options, description).statistics()


def _plan(inputs: Sequence[Path], args: argparse.Namespace) -> Shard:
    if not names_file(args.output):
        if args.shards < 1:
            raise ValueError(f"--shards must be at least 1, got {args.shards}")
        names = (f"shuffled-{number:05}-of-{args.shards:05}" for number in range(args.shards))
        return plan_parts(inputs, Path(args.output), names, args.format, "shuffled")
    if args.shards != 1:
        raise ValueError(f"--shards {args.shards} files do not fit into the file --output {args.output}: name a folder")
    [shard] = plan_shards(inputs, args.output)
    return shard


def _buckets_folder(shard: Shard) -> Path:
    return append_suffix(shard.record, ".buckets")


def _shuffle(shard: Shard, args: argparse.Namespace, options: RunOptions, description: dict[str, Any]) -> Counts:
    layout = plan_layout(shard.inputs, len(shard.outputs), options)
    folder = _buckets_folder(shard)
    buckets = [folder / f"{number:04}" for number in range(layout.buckets)]
    scattered = Shard(shard.inputs, tuple(buckets), folder / "scatter")
    settings = {"key": args.json_key, "seed": args.seed, "layout": vars(layout), "hex": _HEX}
    # There are many files to write through to the disk at each commit.
    scatter_options = replace(options, commit_interval_s=max(options.commit_interval_s, 0.1 * layout.buckets))
    function = partial(scatter, args.json_key, args.seed, layout)
    counts = Counts.of(run_lines("shuffle", [scattered], function, settings, scatter_options))
    # What was sorted from other buckets must not be continued, so the layout is a part of the key of the partial files only.
    output = PartialShard(
        Shard(tuple(buckets), shard.outputs, shard.record), key_of({**description, "layout": vars(layout)})
    )
    counts = replace(counts, text_bytes_out=counts.text_bytes_out - _HEX * counts.kept)
    with closing(output), full_disk_named(f"to {shard.record.parent}"):
        _gather(output, layout, options, counts, description)
    shutil.rmtree(folder)
    return counts


def _gather(
    output: PartialShard, layout: Layout, options: RunOptions, counts: Counts, description: dict[str, Any]
) -> None:
    """Sorts the buckets into the outputs, one after another, and finishes these; a bucket that is done is not sorted again."""
    buckets = output.shard.inputs
    if not output.sizes[-1]:  # the lines left out, which the pass before has found, are not there yet
        with open(append_suffix(buckets[0].with_name("scatter"), DROPPED_SUFFIX), "rb") as dropped:
            while data := dropped.read(_READ_BYTES):
                output.append(*(b"" for _ in output.shard.outputs), data)
    work = partial(sort_bucket, layout, _bucket_memory(options))
    workers, sizes = min(options.workers_in_memory, len(buckets)), [path.stat().st_size for path in buckets]
    by_bucket = WorkOptions(workers, block_bytes=max(1, *sizes), commit_interval_s=0.0)
    progress = Progress("shuffle: sorting", sum(sizes))
    with closing(fill([output], work, by_bucket, progress, reader=read_pieces)) as filled:
        for _ in filled:
            output.counts = counts
            finish(output, description)
