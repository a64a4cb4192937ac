"""Puts files of documents together, one after another, each document a line of its own; a repeated id is reported and left out.

Lines stay byte for byte as they are. Documents whose entry --id-key is missing or empty are not compared. With --strict a
repeated id is an error; else the later document is left out, with the reason `duplicate id` in the dropped list.

    python -m data_tools merge --input clean/ --output all.jsonl.zst
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from data_tools.line_functions import DocumentLines, Kept, unchanged
from data_tools.options import add_input_output, add_run_options, run_options
from data_tools.repeats import corpus_key, repeated_lines
from data_tools.shard_plan import shards_of
from data_tools.shards import run_lines
from megazero.lines.jsonl import name_of, read_object
from megazero.lines.results import DUPLICATE_ID


def id_digest(key: str, id_key: str, line: bytes) -> bytes | None:
    """The id of a document, with its type: the number 1 is not the string "1". None where it has none; may raise LineError."""
    document = read_object(line, key)
    if name_of(document, (id_key,)) is None:
        return None
    return f"{type(document[id_key]).__name__} {document[id_key]}".encode("utf-8", "surrogatepass")


class SeenLines(DocumentLines):
    """Keeps every line as it is: the search for repeats has parsed it, and only what it lists is parsed again, by `identify`."""

    def __call__(self, line: bytes) -> Kept:
        """The line."""
        return Kept(line + b"\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    add_input_output(parser, "a file; or a folder, to check and convert one file per input")
    parser.add_argument(
        "--id-key", default="id", help="key of the id, which must differ between documents; '' compares none"
    )
    add_run_options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Merges, and returns the statistics."""
    options = run_options(args)
    inputs, shards = shards_of(args)
    settings = {
        "key": args.json_key,
        "id_key": args.id_key,
        "corpus": corpus_key(inputs, options) if args.id_key else None,
    }
    if not args.id_key:
        return run_lines("merge", shards, DocumentLines(unchanged, args.json_key), settings, options)
    digest = partial(id_digest, args.json_key, args.id_key)
    search = partial(repeated_lines, "merge", shards, digest, DUPLICATE_ID, options)
    return run_lines("merge", shards, SeenLines(unchanged, args.json_key), settings, options, search)
