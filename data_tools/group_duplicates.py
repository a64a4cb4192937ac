"""Groups the copies that `find_duplicates` has listed: copies of copies belong together, and the first of a group stays.

Each line of the output is a group, {"NUMBER": ["FIRST", "COPY", ...]}, as Megatron-LM's group_duplicate_url.py writes it. What
names the copies is held in memory. The step `dedup` finds, groups and removes in one.

    python data_tools/group_duplicates_url.py copies.jsonl groups.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_tools.dedup_index import Groups
from data_tools.documents import in_pieces
from data_tools.done_marker import made_once
from data_tools.options import add_run_options
from data_tools.shard_plan import check_outputs
from megazero.files import file_named
from megazero.lines.compressed import DAMAGE, decompressed, open_bytes
from megazero.lines.contents import check_unchanged, describe_files, key_of
from megazero.lines.partial_shard import Shard
from megazero.lines.progress import Progress

_BYTES_PER_NAME = 256  # beside its letters: a string, and its places in dictionaries and lists
_READ_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    parser.add_argument("--input", required=True, help="the list of copies that find_duplicates has made (.gz, .zst)")
    parser.add_argument("--output", required=True, help="the groups: JSON lines (.gz, .zst)")
    add_run_options(parser, "--memory")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Groups, and returns the statistics."""
    path, output = Path(args.input), Path(args.output)
    check_list([path], output)
    if (need := bytes_of_names(path, "--input")) > args.memory:
        raise ValueError(
            f"--memory {args.memory >> 20}M is too little for the names in {path}: give {(need >> 20) + 1}M, or use the step "
            "dedup, which holds no names"
        )
    described = describe_files([path])
    key = key_of({"step": "group_duplicates", "inputs": described})

    def make(file: BinaryIO) -> dict[str, Any]:
        groups = _groups(path)
        check_unchanged([path], described)
        lines = (json.dumps({str(number): names}).encode() + b"\n" for number, names in enumerate(groups))
        file.writelines(in_pieces(lines, output))
        return {"groups": len(groups), "copies": sum(map(len, groups)) - len(groups)}

    content, skipped = made_once(output, [output], key, make)
    return {**content, "skipped": skipped}


def check_list(inputs: Sequence[Path], output: Path) -> None:
    """Raises a ValueError for an --output that is an input, or of a kind that is not written.

    Lists are plain JSON lines, .gz or .zst.
    """
    if output.suffix in (".bz2", ".parquet", ".xz", ".zip"):
        raise ValueError(
            f"--output {output}: such lists are not written. Name one that ends in .jsonl, .jsonl.gz or .jsonl.zst."
        )
    check_outputs([Shard(tuple(inputs), (output,), output)])


def bytes_of_names(path: Path, flag: str) -> int:
    """What the names in a file of copies or groups take in memory, at most.

    Raises:
        FileNotFoundError: there is no such file; names the flag.
        ValueError: it is damaged or cut off.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{flag} {path}: there is no such file")
    letters = quotes = 0
    try:
        with open_bytes(path) as file:
            while data := file.read(_READ_BYTES):
                letters += len(data)
                quotes += data.count(b'"')
    except DAMAGE as error:
        raise ValueError(f"{flag} {path}: damaged or cut off: {error}. Make it again.") from error
    return letters + quotes // 2 * _BYTES_PER_NAME


def named_groups(path: Path, kind: type) -> Iterator[dict[str, list[Any]]]:
    """The JSON objects of a file of copies, whose lists hold `kind` dict, or of groups, whose lists hold str.

    Raises:
        ValueError: a line is none; names file and line.
    """
    what = "groups, which group_duplicates makes" if kind is str else "copies, which find_duplicates makes"
    before = 0
    progress = Progress(f"reading {path.name}", path.stat().st_size)
    with progress, file_named(path), open(path, "rb") as disk, decompressed(disk, path) as file:
        for number, line in enumerate(file, start=1):
            try:
                content = json.loads(line)
                lists = list(content.values()) if isinstance(content, dict) else [None]
                if not all(isinstance(each, list) and all(isinstance(x, kind) for x in each) for each in lists):
                    raise ValueError("another kind of line")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: {error}; expected a list of {what}.") from error
            yield content
            progress.update(1, len(line), disk.tell() - before)
            before = disk.tell()


def _groups(path: Path) -> list[list[str]]:
    """The names of each group, in the order in which they come in the file."""
    numbers: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    pairs = array("q")
    for content in named_groups(path, dict):
        for name, copies in content.items():
            for copy in (copy for entry in copies for copy in entry):
                pairs.extend((numbers[name], numbers[copy]))
    groups = Groups(len(numbers))
    groups.join(np.array(pairs).reshape(-1, 2))
    names: dict[int, list[str]] = {}
    for name, first in zip(numbers, groups.finish().tolist(), strict=True):
        names.setdefault(first, []).append(name)
    return list(names.values())
