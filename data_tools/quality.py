"""Drops documents that break quality rules of Gopher or FineWeb; --rules chooses the rules, and none is on by default.

- gopher_quality: Rae et al. 2021, "Scaling Language Models" (arXiv:2112.11446), section A.1.1, "Quality Filtering".
- gopher_repetition: the same, "Repetition Removal" and table A1.
- fineweb: Penedo et al. 2024, "The FineWeb Datasets" (arXiv:2406.17557), section 3.6, the three custom filters.

The reason in the dropped list is the rule's name, its detail the value that was found. `--threshold NAME=VALUE` changes a number.

    python -m data_tools quality --input clean/ --output good/ --rules gopher_quality fineweb
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

from data_tools.documents import Document
from data_tools.line_functions import Dropped
from data_tools.options import add_input_output, add_run_options
from data_tools.quality_rules import RULES, Thresholds
from data_tools.shards import run_documents


def check_quality(key: str, rules: Sequence[str], thresholds: Thresholds, document: Document) -> Document:
    """The document as it is; raises Dropped for the first of `rules`, names in `quality_rules.RULES`, that it breaks."""
    for rule in rules:
        broken = RULES[rule](document[key], thresholds)
        if broken is not None:
            raise Dropped(broken[0], detail=f"{broken[1]:.3g}")
    return document


def parse_thresholds(changes: list[str]) -> Thresholds:
    """The papers' numbers with these changes, each NAME=VALUE.

    Raises:
        ValueError: there is no such name, or no such number.
    """
    names = [field.name for field in fields(Thresholds)]
    values: dict[str, float] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in names:
            raise ValueError(f"--threshold {change}: there is no {name!r}. There are: {', '.join(names)}")
        try:
            values[name] = float(value)
        except ValueError:
            raise ValueError(f"--threshold {change}: {value!r} is not a number") from None
    return replace(Thresholds(), **values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    add_input_output(parser)
    group = parser.add_argument_group("rules")
    group.add_argument("--rules", nargs="+", choices=tuple(RULES), required=True, help="rules to apply, in this order")
    group.add_argument(
        "--threshold", nargs="+", default=[], metavar="NAME=VALUE", help="replace numbers from the papers"
    )
    add_run_options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Filters, and returns the statistics."""
    thresholds = parse_thresholds(args.threshold)
    function = partial(check_quality, args.json_key, args.rules, thresholds)
    return run_documents("quality", function, {"rules": args.rules, "thresholds": asdict(thresholds)}, args)
