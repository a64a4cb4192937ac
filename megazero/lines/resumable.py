"""Work on the lines of files: in parallel, in order, the same for any number of workers, and resumed after a kill.

A worker takes a block of lines and returns its part of each output; the parts are appended in the order of the input. So what is
written depends on the input and the work alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from megazero.cgroups import available_cores
from megazero.files import allow_many_files
from megazero.lines.jsonl import MAX_LINE_BYTES, Block, expected_text_bytes, read_blocks
from megazero.lines.partial_shard import PartialShard, Place
from megazero.lines.progress import Progress
from megazero.lines.results import BlockResult, check_strict
from megazero.lines.workers import ordered_map

Reason = tuple[str, str | None, str | None]
"""Why a line is dropped: reason, what names the document, detail."""
Drops = Callable[[Block], Mapping[int, Reason]]
"""block -> {byte at which a line begins in the text of the file: reason to drop it}, from an earlier pass."""
Item = tuple[tuple[Path, ...], Block, Mapping[int, Reason]]
"""What a worker is given: the outputs of a shard, a block of one of its inputs, and what is to be dropped of the block. It is
pickled for every block, so it holds no more than that: a shard can have thousands of inputs."""
BlockWork = Callable[[Item], BlockResult]
"""Picklable: what a worker makes of a block."""
BlockReader = Callable[..., Iterator[Block]]
"""Called as (path, block_bytes, start, file_number, max_line_bytes); `read_blocks` is one."""


@dataclass(frozen=True)
class WorkOptions:
    """How work on blocks goes about it.

    Attributes:
        workers: processes at most.
        strict: whether the first line that holds no document is an error; else such lines are counted and left out.
        block_bytes: text that a worker takes at a time.
        max_line_bytes: longer lines are not read: they count as lines that hold no document.
        commit_interval_s: seconds of work that a kill can cost at most.
    """

    workers: int = field(default_factory=available_cores)
    strict: bool = False
    block_bytes: int = 1 << 21
    max_line_bytes: int = MAX_LINE_BYTES
    commit_interval_s: float = 2.0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {self.workers}")


def read_pieces(
    path: Path, block_bytes: int, start: int, file_number: int, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Block]:
    """As `jsonl.read_blocks`, of a plain file that is no text: pieces of `block_bytes`, wherever they end."""
    size = path.stat().st_size
    for begin in range(start, size, block_bytes):
        stop = min(begin + block_bytes, size)
        yield Block(path, file_number, begin, stop, disk_bytes=stop - begin)


def useful_workers(paths: Sequence[Path], block_bytes: int, most: int) -> int:
    """As many as there are blocks, but `most` at most: a small file is done before a worker has started."""
    return max(1, min(most, -(-expected_text_bytes(paths) // block_bytes)))


def fill(
    shards: Iterable[PartialShard],
    work: BlockWork,
    options: WorkOptions,
    progress: Progress,
    drops: Drops = lambda block: {},
    place: Place | None = None,
    reader: BlockReader = read_blocks,
) -> Generator[PartialShard, None, None]:
    """Each shard when all that `work` makes of its inputs is in its files, committed; it is closed after that.

    To leave it early, close the generator (contextlib.closing), as that of `ordered_map`.

    Args:
        shards: opened as late as possible, and closed if anything fails.
        progress: closed at the end.
        drops: what an earlier pass drops.
        place: of the results; None appends them as they are.
        reader: of the inputs' blocks.

    Raises:
        ValueError: bad input with `options.strict`, or a damaged file.
        RuntimeError: a worker process died; OSError: the disk is full. In both cases what was committed is kept.
    """
    allow_many_files()  # each worker has several shards open, where these are small, and empty ones wait for the next block
    opened: list[PartialShard] = []
    owners: deque[PartialShard] = deque()  # of the blocks in work, in whose order the results come

    def items() -> Iterator[Item]:
        for made in shards:
            opened.append(made)
            check_strict(made.counts.errors, options.strict, "before the run was stopped")
            progress.skip(made.position.disk_bytes_of(made.shard.inputs))
            for number, path, start in made.position.remaining(made.shard.inputs):
                for block in reader(path, options.block_bytes, start, number, options.max_line_bytes):
                    owners.append(made)
                    yield made.shard.outputs, block, drops(block)

    def done() -> Iterator[PartialShard]:
        opened[0].commit()
        yield opened[0]
        opened.pop(0).close()

    try:
        with progress, closing(ordered_map(work, items(), options.workers)) as results:
            for (_, block, _), result in results:
                owner = owners.popleft()
                while opened[0] is not owner:
                    yield from done()
                owner.take(block, result, options.strict, place)
                counts = result.counts
                progress.update(counts.documents, counts.text_bytes_in, block.disk_bytes, result.tokens)
                owner.commit(options.commit_interval_s)
        while opened:
            yield from done()
    finally:
        for made in opened:
            made.close()


def fill_one(
    shard: PartialShard,
    work: BlockWork,
    options: WorkOptions,
    name: str,
    reader: BlockReader,
    place: Place | None = None,
    log_documents: int | None = None,
) -> None:
    """`fill` for a single shard, to its end.

    Args:
        name, log_documents: as for `Progress`.
    """
    progress = Progress(name, sum(path.stat().st_size for path in shard.shard.inputs), log_documents)
    for _ in fill([shard], work, options, progress, place=place, reader=reader):
        pass
