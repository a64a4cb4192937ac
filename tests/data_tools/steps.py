"""Runs a step of data_tools in this process, by its command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from data_tools.registry import step_parser
from megazero.lines.compressed import open_bytes


def run_step(step: str, *flags: object) -> dict:
    """Its statistics. One worker unless the flags say otherwise."""
    parser, argv = step_parser(step), list(map(str, flags))
    if "--workers" in parser.takes_value and "--workers" not in argv:
        argv += ["--workers", "1"]
    args = parser.parse_args(argv)
    return args.run(args)


def write_documents(path: Path, documents: list[dict]) -> Path:
    """JSON lines, compressed as the name asks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(json.dumps(document).encode() + b"\n" for document in documents)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def read_documents(path: Path) -> list[dict]:
    """The documents of a file of JSON lines."""
    with open_bytes(path) as file:
        return [json.loads(line) for line in file]


def dropped(output: Path) -> dict[str, str]:
    """Id -> reason (and detail) of what a step has left out."""
    with open(f"{output}.dropped.jsonl", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return {record["id"]: " ".join(filter(None, (record["reason"], record.get("detail")))) for record in records}
