"""Records on disk, divided by the highest bits of their keys: equal keys lie in one file, and each file fits in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from megazero.lines.partial_shard import BUFFER_BYTES


@contextmanager
def divided(folder: Path, records: Iterable[np.ndarray], key: str, count: int) -> Iterator[list[Path]]:
    """`count` files of records, of which those that are not empty; in the order of their keys. Removed after the block.

    Args:
        folder: for the files; made anew.
        records: [n] each, structured; their order among equal keys is kept.
        key: the entry of a record that is its key, 64 bits that are spread evenly.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(parents=True)
    try:
        paths = [folder / f"{number:03}" for number in range(count)]
        limits = np.array([(number << 64) // count for number in range(count)], np.uint64)
        with ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb", BUFFER_BYTES)) for path in paths]
            for part in records:
                part = part[np.argsort(part[key], kind="stable")]
                data, bounds = part.tobytes(), np.searchsorted(part[key], limits) * part.itemsize
                for file, (start, stop) in zip(files, pairwise([*bounds.tolist(), len(data)]), strict=True):
                    file.write(data[start:stop])
        yield [path for path in paths if path.stat().st_size]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
