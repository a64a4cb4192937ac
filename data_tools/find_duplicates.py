"""Lists the copies among documents, exact and near, for `group_duplicates`; the step `dedup` finds, groups and removes in one.

Each line of the output is a document and one that is its copy, by what names them: {"FIRST": [{"COPY": SIMILARITY}]}. That is the
file of Megatron-LM's find_duplicates.py, whose command line is understood as well: files, each with the entry that names its
documents. Lines that hold no document are listed beside their signatures, in --work-folder.

Names must differ, or a document goes for the sake of another one of its name (`merge --id-key url` sees to it). A copy with the
name of the document that it copies cannot be told from it and stays; the statistics count these as `same_name`.

    python data_tools/find_duplicates.py --inputs cc.jsonl cc_id news.jsonl news_id --output copies.jsonl
    python data_tools/group_duplicates_url.py copies.jsonl groups.jsonl
    python data_tools/remove_group_duplicates.py groups.jsonl cc.jsonl unique.jsonl --id-keys cc_id news_id
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a checkout that is not installed

from data_tools.dedup import CopySearch, add_copy_arguments
from data_tools.dedup_index import copies_in
from data_tools.dedup_signatures import Documents, SignatureFiles, similarity
from data_tools.documents import in_pieces
from data_tools.done_marker import made_once
from data_tools.group_duplicates import check_list
from data_tools.inputs import list_inputs
from data_tools.options import add_run_options, run_options
from megazero.lines.jsonl import ID_KEYS
from megazero.lines.results import check_strict

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    data = parser.add_argument_group("data")
    data.add_argument("--input", nargs="+", required=True, help="files or folders: .jsonl (.gz, .xz, .zst), .parquet")
    data.add_argument("--output", required=True, help="the list of copies: JSON lines (.gz, .zst)")
    data.add_argument("--json-key", default="text", help="which entry of a document is its text")
    data.add_argument("--id-keys", nargs="+", default=list(ID_KEYS), help="entries of which the first names it")
    add_copy_arguments(parser)
    add_run_options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Finds the copies, and returns the statistics."""
    options, inputs, output = run_options(args), list_inputs(args.input, output=args.output), Path(args.output)
    check_list(inputs, output)
    search = CopySearch(args, inputs, options, args.id_keys, reports=True)

    def make(file: BinaryIO) -> dict[str, Any]:
        with search.result() as (files, first, signed):
            counts = {"copies": 0, "same_name": 0}
            file.writelines(in_pieces(_listed(files, first, counts), output))
        return {**counts, **{name: signed[name] for name in ("documents", "bad_lines", "first_errors")}}

    content, skipped = made_once(output, [output], search.settings["all_inputs"], make)
    check_strict(content["first_errors"], args.strict, f"when {output} was made")
    if content["same_name"]:
        logger.warning(
            "%d copies have the name of the document that they copy (%s), so that remove_group_duplicates cannot tell them from "
            "it: they will stay. Name others with --id-keys, or use the step dedup.",
            content["same_name"],
            " or ".join(args.id_keys),
        )
    return {**content, **search.summary(), "skipped": skipped}


def _listed(files: SignatureFiles, first: Documents, counts: dict[str, int]) -> Iterator[bytes]:
    """The lines of the list, {first document of a group: [{another one: their similarity}]}; they are counted."""
    for copies in copies_in(first):
        firsts = first[copies]
        mine, theirs = files.read(copies), files.read(firsts)
        shares = similarity(mine, theirs).round(4).tolist()
        for name, copy, share in zip(files.ids(firsts, theirs), files.ids(copies, mine), shares, strict=True):
            counts["copies"] += 1
            counts["same_name"] += name == copy
            yield json.dumps({name: [{copy: share}]}).encode() + b"\n"


def translated(argv: Sequence[str]) -> list[str]:
    """The command line with the step's flags in the place of Megatron-LM's `--inputs FILE KEY FILE KEY ...`."""
    argv = list(argv)
    if "--inputs" not in argv:
        return argv
    start = argv.index("--inputs")
    stop = next((i for i in range(start + 1, len(argv)) if argv[i].startswith("-")), len(argv))
    pairs = argv[start + 1 : stop]
    if not pairs or len(pairs) % 2:
        sys.exit(
            f"error: --inputs takes pairs of a file and the entry that names its documents, got: {' '.join(pairs)}"
        )
    keys = list(dict.fromkeys(pairs[1::2]))
    return [*argv[:start], "--input", *pairs[::2], "--id-keys", *keys, *argv[stop:]]


if __name__ == "__main__":
    from data_tools.megatron_names import run_script

    run_script("find_duplicates", ("input", "output"), argv=translated(sys.argv[1:]))
