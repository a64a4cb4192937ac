"""The flags that all steps over documents share."""

from __future__ import annotations

import argparse
import logging
import math
import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_tools.inputs import OUTPUT_FORMATS
from megazero.cgroups import available_cores
from megazero.files import allow_many_files
from megazero.lines.resumable import WorkOptions

logger = logging.getLogger(__name__)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_WORKER_BYTES = 96 << 20  # an interpreter with its packages
_COPIES = 8  # of a block or line that are alive at once: bytes, text, objects, result, compressed result


@dataclass(frozen=True)
class RunOptions(WorkOptions):
    """How a step goes about it. Only `block_bytes` and `max_line_bytes` can change the bytes that come out.

    Attributes:
        block_bytes: also what a compressed file has in each member or frame.
        memory_bytes: what the step may use, all its processes together.
        held_bytes: of a table that each process has a copy of, beside what it works on.
    """

    workers: int = 1
    block_bytes: int = 1 << 20
    max_line_bytes: int = 16 << 20
    memory_bytes: int = 2 << 30
    held_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_bytes < 1 or self.max_line_bytes < 1:
            raise ValueError("--block-kb and --max-line-mb must be positive")
        if self.memory_bytes < self.worker_bytes:
            held = (
                f", and {self.held_bytes >> 20}M of what the step looks for in every document"
                if self.held_bytes
                else ""
            )
            raise ValueError(
                f"--memory {self.memory_bytes >> 20}M is too little for one process, which needs {self.worker_bytes >> 20}M: "
                f"{_COPIES} copies of a block (--block-kb) and of the longest line (--max-line-mb){held}. Lower them or "
                "give more."
            )

    @property
    def worker_bytes(self) -> int:
        """What one process uses at most."""
        return _WORKER_BYTES + self.held_bytes + _COPIES * (self.block_bytes + self.max_line_bytes)

    @property
    def workers_in_memory(self) -> int:
        """Processes that --workers and --memory allow; beside several of them there is the one that reads and writes."""
        return max(1, min(self.workers, self.memory_bytes // self.worker_bytes - 1))


def open_files(most: int) -> int:
    """`most` files, or half of those that the process may have open (`ulimit -Hn`), if that is less."""
    allow_many_files()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if limit == resource.RLIM_INFINITY else min(most, limit // 2)


def size(text: str) -> int:
    """Bytes of "512M", "2G", "1.5G" or "1000000"; raises what argparse wants of a type.

    Units are powers of 1024, with "iB", "B" or nothing behind the letter, as in `sort -S 2G` and `docker -m 2g`, and as
    --block-kb and --max-line-mb count. `megazero.plan` plans for devices, whose makers count in powers of 1000: there 2G is 2e9.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def number(text: str) -> float:
    """A number that is finite; raises what argparse wants of a type."""
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def add_input_output(
    parser: argparse.ArgumentParser,
    output: str = "a file, or a folder for one file per input",
    input: str = "files or folders: .jsonl (.gz, .xz, .zst), .parquet, .wet",
    formats: Sequence[str] = OUTPUT_FORMATS,
) -> None:
    """Adds --input, --output, --format and, for documents, --json-key."""
    group = parser.add_argument_group("data")
    group.add_argument("--input", nargs="+", required=True, help=input)
    group.add_argument("--output", required=True, help=output)
    group.add_argument(
        "--format", choices=formats, help="kind of the files, if --output is a folder (default: as the input)"
    )
    if formats == OUTPUT_FORMATS:
        group.add_argument("--json-key", default="text", help="key of the text in each document")


def add_run_options(parser: argparse.ArgumentParser, *names: str) -> argparse._ArgumentGroup:
    """Adds those of --workers, --memory, --strict, --block-kb and --max-line-mb that are named, or all."""
    flags: dict[str, dict[str, Any]] = {
        "--workers": {"type": int, "default": available_cores(), "help": "maximum number of processes"},
        "--memory": {
            "type": size,
            "default": "2G",
            "help": "memory limit for all processes together, such as 2G (2 GiB)",
        },
        "--strict": {
            "action": "store_true",
            "help": "stop at the first line that holds no document, instead of leaving it out",
        },
        "--block-kb": {"type": number, "default": 1024, "help": "KiB of text that a worker takes at a time"},
        "--max-line-mb": {"type": number, "default": 16, "help": "MiB; longer lines are reported and left out"},
    }
    group = parser.add_argument_group("work")
    for name in names or flags:
        group.add_argument(name, **flags[name])
    return group


def run_options(args: argparse.Namespace) -> RunOptions:
    """What `add_run_options` has read.

    Raises:
        ValueError: they do not go together; names the flag.
    """
    options = RunOptions(
        workers=args.workers,
        memory_bytes=args.memory,
        strict=args.strict,
        block_bytes=int(args.block_kb * 1024),
        max_line_bytes=int(args.max_line_mb * (1 << 20)),
    )
    if options.workers_in_memory < args.workers:
        allowed = options.workers_in_memory
        logger.info("--memory allows %d of %d --workers; give more to use all", allowed, args.workers)
    return options
