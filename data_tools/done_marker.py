"""The done-marker: RECORD.done.json says of which input and settings what lies beside it was made. Without it, nothing counts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megazero.files import append_suffix, locked, read_whole, remove_asides, write_json, written_aside
from megazero.lines.outputs import check_ours, full_disk_named
from megazero.lines.partial_shard import JOURNAL

logger = logging.getLogger(__name__)

MARKER = ".done.json"


def marker_path(record: Path) -> Path:
    """Where the done-marker lies."""
    return append_suffix(record, MARKER)


def write_marker(record: Path, key: str, outputs: Sequence[Path], content: dict[str, Any]) -> None:
    """Vouches for the outputs, which are whole.

    Args:
        key: hash of input and settings.
        content: JSON values that `read_marker` gives back.
    """
    sizes = {path.name: path.stat().st_size for path in outputs}
    write_json(marker_path(record), {"key": key, **content, "outputs": sizes})


def read_marker(record: Path, key: str, outputs: Sequence[Path]) -> dict[str, Any] | None:
    """What was written with the marker, if the outputs are there, whole, and of the same input and settings; else None."""
    try:
        content = json.loads(read_whole(marker_path(record)))
        sizes = {path.name: path.stat().st_size for path in outputs}
        is_same = content["key"] == key and content["outputs"] == sizes
        del content["key"], content["outputs"]
        return content if is_same else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged (%s): making what it stands for again", marker_path(record), error)
        return None


def marked_outputs(record: Path) -> list[Path]:
    """The outputs for which the done-marker vouches; none where it is missing or damaged."""
    try:
        return [record.with_name(name) for name in json.loads(read_whole(marker_path(record)))["outputs"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return []


def check_made_here(record: Path, outputs: Sequence[Path], flag: str = "--output") -> None:
    """Raises as `check_ours` does where an output exists that neither a done-marker nor a journal of `record` vouches for."""
    check_ours(outputs, flag, marker_path(record), append_suffix(record, JOURNAL))


def made_once(
    record: Path, outputs: Sequence[Path], key: str, make: Callable[..., dict[str, Any]], flag: str = "--output"
) -> tuple[dict[str, Any], bool]:
    """What is recorded of the outputs, and whether an earlier run has made them. Of two runs at a time one makes them.

    Args:
        record: beside which the done-marker lies.
        key: hash of input and settings.
        make: is given a file to write for each of the outputs, and returns what to record, as JSON values.
        flag: that names the outputs, for messages.

    Raises:
        ValueError: a file is there that no run of a step has made. FullDiskError: the disk is full.
    """
    claim = append_suffix(record, JOURNAL)  # vouches for the outputs until the marker does
    for path in (record, *outputs):
        path.parent.mkdir(parents=True, exist_ok=True)
    with locked(append_suffix(record, ".lock")), full_disk_named(str(record), "which makes it anew"):
        if claim.exists():  # of a run that was killed
            for path in (marker_path(record), *outputs):
                remove_asides(path)
        if (content := read_marker(record, key, outputs)) is not None:
            claim.unlink(missing_ok=True)
            logger.info("%s is there already, from the same input and settings", record)
            return content, True
        check_made_here(record, outputs, flag)
        claim.touch()
        try:
            with ExitStack() as files:
                content = make(*(files.enter_context(written_aside(path)) for path in outputs))
                marker_path(record).unlink(missing_ok=True)  # an old one would vouch for the new files
        except BaseException:
            # Else the claim alone vouches for what is there.
            if marker_path(record).exists() or not any(path.exists() for path in outputs):
                claim.unlink(missing_ok=True)
            raise
        write_marker(record, key, outputs, content)
        claim.unlink(missing_ok=True)
    return content, False
