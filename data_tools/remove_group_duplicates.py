"""Removes the documents that `group_duplicates` has found to be copies: of each group the first name stays.

The reason in the dropped list is `copy`, its detail which document it is a copy of. The step `dedup` finds, groups and removes
in one.

    python data_tools/remove_group_duplicates.py groups.jsonl cleaned.jsonl unique.jsonl
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a checkout that is not installed

from data_tools.documents import Document, document_id
from data_tools.group_duplicates import bytes_of_names, named_groups
from data_tools.line_functions import Dropped
from data_tools.options import add_input_output, add_run_options, run_options
from data_tools.shards import run_documents
from megazero.lines.contents import check_unchanged, describe_files
from megazero.lines.jsonl import ID_KEYS

logger = logging.getLogger(__name__)


def check_is_first(key: str, id_keys: Sequence[str], first: Mapping[str, str], document: Document) -> Document:
    """The document as it is; raises Dropped for a copy. `first`: name of a copy -> name of the document that stays."""
    name = document_id(document, key, id_keys)
    if name in first:
        raise Dropped("copy", name, f"of {first[name]}")
    return document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    parser.add_argument(
        "--groups", type=Path, required=True, help="the groups that group_duplicates has made (.gz, .zst)"
    )
    add_input_output(parser)
    parser.add_argument("--id-keys", nargs="+", default=list(ID_KEYS), help="as for find_duplicates")
    add_run_options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Removes copies, and returns the statistics."""
    options = replace(run_options(args), held_bytes=bytes_of_names(args.groups, "--groups"))
    contents = describe_files([args.groups], options.workers)
    first: dict[str, str] = {}
    for content in named_groups(args.groups, str):
        for names in content.values():
            for name in names[1:]:
                first[name] = names[0]
    check_unchanged([args.groups], contents, options.workers)
    function = partial(check_is_first, args.json_key, args.id_keys, first)
    settings = {"id_keys": args.id_keys, "groups": contents}
    result = run_documents("remove_group_duplicates", function, settings, args, options, [args.groups])
    if first and not result["dropped"]:
        logger.warning(
            "none of the %d copies in %s is among the documents: what names them was looked for under the keys %s. Give the "
            "--id-keys of find_duplicates.",
            len(first),
            args.groups,
            " or ".join(args.id_keys),
        )
    return result


if __name__ == "__main__":
    from data_tools.megatron_names import run_script

    run_script("remove_group_duplicates", ("groups", "input", "output"))
