"""Splits documents into parts (train, valid, test) at random, yet always in the same way.

A document's part depends on its id (its entry "id", else "url", else its text) and on --seed alone: not on its place, the other
documents, or the number of files. So documents that are added later leave the others where they are. The order of the input
is kept in each part. A part that gets no document is an error, as nothing can be made of it.

    python -m data_tools split --input all.jsonl.zst --output webtext/ --parts train=0.98 valid=0.01 test=0.01
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import re
from fractions import Fraction
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from data_tools.documents import document_blocks, document_id
from data_tools.inputs import list_inputs
from data_tools.line_functions import Kept
from data_tools.options import add_input_output, add_run_options, run_options
from data_tools.shard_plan import names_file, plan_parts
from data_tools.shards import run_lines
from megazero.lines.jsonl import read_object


def to_part(key: str, seed: int, bounds: list[int], line: bytes) -> Kept:
    """The line as it is, for the first part i whose bounds[i] of 2**64 is above its hash; LineError if it holds no document."""
    identity = document_id(read_object(line, key), key).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(f"split {seed} ".encode() + identity, digest_size=8).digest()
    return Kept(line + b"\n", bisect.bisect_right(bounds, int.from_bytes(digest, "little")))


def parse_parts(values: list[str]) -> dict[str, Fraction]:
    """Name -> share of each NAME=SHARE.

    Raises:
        ValueError: a name is none for a file or comes twice, or the shares do not add up to 1.
    """
    parts: dict[str, Fraction] = {}
    for value in values:
        name, _, share = value.partition("=")
        try:
            fraction = Fraction(share)
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"--parts {value}: expected NAME=SHARE, such as valid=0.01") from None
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in parts or fraction <= 0:
            raise ValueError(f"--parts {value}: names are letters and digits, differ, and have shares above 0")
        parts[name] = fraction
    if sum(parts.values()) != 1:
        raise ValueError(f"--parts {' '.join(values)}: the shares add up to {float(sum(parts.values()))}, not to 1")
    return parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    add_input_output(parser, "a folder, in which each part becomes a file of its name")
    group = parser.add_argument_group("parts")
    group.add_argument(
        "--parts",
        nargs="+",
        default=["train=0.98", "valid=0.01", "test=0.01"],
        metavar="NAME=SHARE",
        help="shares add up to 1",
    )
    group.add_argument("--seed", type=int, default=1234, help="seed of the split")
    add_run_options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Splits, and returns the statistics."""
    parts = parse_parts(args.parts)
    inputs = list_inputs(args.input, output=args.output)
    if names_file(args.output):
        raise ValueError(
            f"--output {args.output}: each part is a file of its own. Name a folder, and their kind by --format."
        )
    folder = Path(args.output)
    shard = plan_parts(inputs, folder, parts, args.format, "split")
    bounds = [int(total * (1 << 64)) for total in accumulate(parts.values())]
    settings = {"key": args.json_key, "seed": args.seed, "parts": {name: str(share) for name, share in parts.items()}}
    function = partial(to_part, args.json_key, args.seed, bounds)
    result = run_lines("split", [shard], function, settings, run_options(args))
    empty = [path.name for path in shard.outputs if next(document_blocks(path, 1), None) is None]
    if result["kept"] and empty:
        raise ValueError(
            f"--parts: {', '.join(empty)} of {folder} got none of the {result['kept']} documents: its share is too small for so "
            "few. Raise it (in openwebtext.yaml: --set train=0.8 valid=0.1 test=0.1)."
        )
    return {**result, "parts": {path.name: path.stat().st_size for path in shard.outputs}}
