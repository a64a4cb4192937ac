"""Shuffles documents, in bounded memory and always in the same way.

The order is that of a hash of each line and the seed, so it depends on the documents and --seed alone: not on their order, the
number of workers, or the memory. Lines are first scattered to files by the range of their hash, so many that each can be sorted
in memory; the sorted files, one after another, are the result. Disk space for one copy of the text is needed meanwhile.

    python -m data_tools shuffle --input all.jsonl.zst --output shuffled.jsonl.zst --seed 1234
    python -m data_tools shuffle --input clean/ --output shuffled/ --shards 16
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from data_tools.counts import Counts, statistics
from data_tools.documents import compress, list_inputs
from data_tools.line_functions import Kept
from data_tools.options import RunOptions, add_input_output, add_run_options, run_options
from data_tools.partial_shard import PartialShard, Shard, finished
from data_tools.shard_plan import check_outputs, ending, names_file
from data_tools.shards import contents_of, describe, run_lines
from megazero.data.cache import key_of
from megazero.data.journal import full_disk_named
from megazero.data.jsonl import check_strict, read_object
from megazero.data.progress import Progress
from megazero.data.workers import ordered_map
from megazero.files import append_suffix, is_compressed, locked

_COPIES = 6  # of a bucket while it is sorted: lines, keys, the sorted text, its compressed form
_COMPRESSION = 4  # of text, when guessing how much a compressed file holds
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


class Scatter:
    """A line function: sends each document to its bucket, behind the hash that puts it in order, in hexadecimal."""

    def __init__(self, key: str, seed: int, layout: Layout) -> None:
        self.key, self.salt, self.layout = key, f"shuffle {seed}".encode(), layout

    def __call__(self, line: bytes) -> Kept:
        """The hash and the line; raises LineError if it holds no document."""
        read_object(line, self.key)
        digest = hashlib.blake2b(line, digest_size=_HEX // 2, key=self.salt).digest()[::-1]
        bucket = self.layout.bucket(self.layout.frame(int.from_bytes(digest, "big")))
        return Kept(b"%b%b\n" % (digest.hex().encode(), line), bucket)


class Gather:
    """Sorts a bucket: bucket number -> the frames of each output, and the number of lines."""

    def __init__(self, buckets: Sequence[Path], outputs: Sequence[Path], layout: Layout, limit: int) -> None:
        self.buckets, self.outputs, self.layout, self.limit = buckets, outputs, layout, limit

    def __call__(self, number: int) -> tuple[list[bytes], int]:
        """Raises ValueError where the bucket is too large for the memory."""
        path = self.buckets[number]
        if path.stat().st_size * _COPIES > self.limit:
            need = path.stat().st_size * _COPIES >> 20
            raise ValueError(
                f"the text is larger than its files let expect: a worker needs {need}M. Give more --memory."
            )
        with open(path, "rb") as file:
            lines = sorted(file)
        parts: list[list[bytes]] = [[] for _ in self.outputs]
        for frame, content in groupby(lines, lambda line: self.layout.frame(int(line[:_HEX], 16))):
            output = frame * self.layout.outputs // self.layout.frames
            parts[output].append(compress(b"".join(line[_HEX:] for line in content), self.outputs[output]))
        return [b"".join(part) for part in parts], len(lines)


def plan_layout(inputs: Sequence[Path], outputs: int, options: RunOptions) -> Layout:
    """How to cut the range of hashes.

    Raises:
        ValueError: --memory is so little that there would be more buckets than files may be open.
    """
    text = sum(path.stat().st_size * (_COMPRESSION if _is_packed(path) else 1) for path in inputs)
    frames = -(-max(1, text // options.block_bytes) // outputs) * outputs
    # Half full on average: hashes do not fall evenly, and documents differ in length.
    buckets = min(frames, max(1, 2 * _COPIES * text // _bucket_memory(options)))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    if buckets > most:
        need = 2 * _COPIES * text * options.workers_in_memory // most >> 20
        raise ValueError(
            f"--memory is too little to shuffle {text >> 20}M of text with {most} files open: give {need}M"
        )
    return Layout(outputs, frames, buckets)


def _is_packed(path: Path) -> bool:
    return is_compressed(path) or path.suffix == ".parquet"


def _bucket_memory(options: RunOptions) -> int:
    return options.memory_bytes // options.workers_in_memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    add_input_output(parser, "a file, or a folder for --shards files")
    group = parser.add_argument_group("order")
    group.add_argument("--seed", type=int, default=_SEED, help=f"another seed, another order (default: {_SEED})")
    group.add_argument("--shards", type=int, default=1, help="files in the folder --output (default: 1)")
    add_run_options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Shuffles, and returns the statistics."""
    start = time.perf_counter()
    options = run_options(args)
    inputs = list_inputs(args.input)
    shard = _plan(inputs, args)
    settings = {"key": args.json_key, "seed": args.seed, "outputs": [path.name for path in shard.outputs]}
    description = describe("shuffle", settings, contents_of(inputs, options), options)
    shard.record.parent.mkdir(parents=True, exist_ok=True)
    with locked(append_suffix(shard.record, ".lock")):
        done = finished(shard, key_of(description))
        if done is not None:
            check_strict(done.errors, options.strict, f"when {shard.record} was made")
            shutil.rmtree(_buckets_folder(shard), ignore_errors=True)  # of a run that was killed when it had finished
            return statistics("shuffle", done, time.perf_counter() - start, skipped=1)
        counts = _shuffle(shard, args, options, description)
    return statistics("shuffle", counts, time.perf_counter() - start)


def _plan(inputs: Sequence[Path], args: argparse.Namespace) -> Shard:
    output = Path(args.output)
    if names_file(output):
        if args.shards != 1:
            raise ValueError(f"--shards {args.shards} files do not fit into the file --output {output}: name a folder")
        shard = Shard(tuple(inputs), (output,), output)
    else:
        if args.shards < 1:
            raise ValueError(f"--shards must be at least 1, got {args.shards}")
        kind = ending(inputs[0], args.format)
        names = [f"shuffled-{number:05}-of-{args.shards:05}.{kind}" for number in range(args.shards)]
        shard = Shard(tuple(inputs), tuple(output / name for name in names), output / "shuffled")
    check_outputs([shard])
    return shard


def _buckets_folder(shard: Shard) -> Path:
    return append_suffix(shard.record, ".buckets")


def _shuffle(shard: Shard, args: argparse.Namespace, options: RunOptions, description: dict[str, Any]) -> Counts:
    layout = plan_layout(shard.inputs, len(shard.outputs), options)
    folder = _buckets_folder(shard)
    buckets = [folder / f"{number:04}.jsonl" for number in range(layout.buckets)]
    scatter = Shard(shard.inputs, tuple(buckets), folder / "scatter")
    settings = {"key": args.json_key, "seed": args.seed, "layout": vars(layout), "hex": _HEX}
    # There are many files to write through to the disk at each commit.
    scatter_options = replace(options, commit_interval_s=max(options.commit_interval_s, 0.1 * layout.buckets))
    run_lines("shuffle", [scatter], Scatter(args.json_key, args.seed, layout), settings, scatter_options)
    scattered = describe("shuffle", settings, contents_of(shard.inputs, options), scatter_options)
    scatter_counts = finished(scatter, key_of(scattered))
    if scatter_counts is None:
        raise RuntimeError(f"{folder} was changed by another process while its files were sorted. Start again.")
    # What was sorted from other buckets must not be continued, so the layout is a part of the key of the partial files only.
    partial = PartialShard(shard, key_of(description), key_of({**description, "layout": vars(layout)}))
    gather = Gather(buckets, shard.outputs, layout, _bucket_memory(options))
    try:
        with full_disk_named(f"to {shard.record.parent}"):
            _gather(partial, gather, scatter_counts, options)
            partial.finish(description)
    finally:
        partial.close()
    shutil.rmtree(folder)
    return partial.counts


def _gather(partial: PartialShard, gather: Gather, counts: Counts, options: RunOptions) -> None:
    if partial.is_new:
        with open(gather.buckets[0].with_name("scatter.dropped.jsonl"), "rb") as dropped:
            while data := dropped.read(_READ_BYTES):
                partial.append([b""] * len(gather.outputs), data)
    partial.counts = replace(counts, text_bytes_out=counts.text_bytes_out - _HEX * counts.kept)
    sizes = [path.stat().st_size for path in gather.buckets]
    first = partial.position.offset  # number of the next bucket
    numbers = range(first, len(gather.buckets))
    with closing(Progress("shuffle: sorting", sum(sizes), options.log_interval_s)) as progress:
        progress.skip(sum(sizes[:first]))
        with closing(ordered_map(gather, numbers, min(options.workers_in_memory, max(1, len(numbers))))) as results:
            for number, (frames, lines) in results:
                partial.append(frames, b"")
                partial.position.offset = number + 1
                partial.commit()
                progress.update(lines, sizes[number], sizes[number])
