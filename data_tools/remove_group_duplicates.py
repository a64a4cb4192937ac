"""Removes the documents that `group_duplicates` has found to be copies: of each group the first name stays.

The reason in the sidecar is `copy`, its detail which document it is a copy of. The step `dedup` finds, groups and removes in one.

    python data_tools/remove_group_duplicates.py groups.jsonl cleaned.jsonl unique.jsonl
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a checkout that is not installed

from data_tools.documents import ID_KEYS, Document, document_id, list_inputs  # noqa: E402
from data_tools.group_duplicates import bytes_of_names, named_groups  # noqa: E402
from data_tools.line_functions import DocumentLines, Dropped  # noqa: E402
from data_tools.options import add_input_output, add_run_options, run_options  # noqa: E402
from data_tools.shard_plan import plan_shards  # noqa: E402
from data_tools.shards import contents_of, run_lines  # noqa: E402
from megazero.data.contents import check_unchanged  # noqa: E402


class CopyFilter:
    """A document function: drops what is a copy.

    Args:
        first: name of a copy -> name of the document that stays.
    """

    def __init__(self, key: str, id_keys: tuple[str, ...], first: dict[str, str]) -> None:
        self.key, self.id_keys, self.first = key, id_keys, first

    def __call__(self, document: Document) -> Document:
        """The document as it is; raises Dropped."""
        name = document_id(document, self.key, self.id_keys)
        if name in self.first:
            raise Dropped("copy", name, f"of {self.first[name]}")
        return document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    parser.add_argument(
        "--groups", type=Path, required=True, help="the groups that group_duplicates has made (.gz, .zst)"
    )
    add_input_output(parser)
    parser.add_argument("--id-keys", nargs="+", default=list(ID_KEYS), help="as for find_duplicates (default: id url)")
    add_run_options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Removes copies, and returns the statistics."""
    options, inputs = run_options(args), list_inputs(args.input)
    options = replace(options, held_bytes=bytes_of_names(args.groups, "--groups"))
    contents = contents_of([args.groups], options)
    first: dict[str, str] = {}
    for content in named_groups(args.groups, str):
        for names in content.values():
            first |= dict.fromkeys(names[1:], names[0])
    check_unchanged([args.groups], contents, options.workers)
    settings = {"key": args.json_key, "id_keys": args.id_keys, "groups": contents}
    function = DocumentLines(CopyFilter(args.json_key, tuple(args.id_keys), first), args.json_key)
    shards = plan_shards(inputs, args.output, args.format)
    return run_lines("remove_group_duplicates", shards, function, settings, options)


if __name__ == "__main__":
    from data_tools.megatron_names import run_script

    run_script("remove_group_duplicates", ("groups", "input", "output"))
