"""The done-marker: RECORD.done.json says of which input and settings what lies beside it was made. Without it, nothing counts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megazero.files import append_suffix, locked, write_json, written_aside
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
        content = json.loads(marker_path(record).read_bytes())
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
        return [record.with_name(name) for name in json.loads(marker_path(record).read_bytes())["outputs"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return []


def check_made_here(record: Path, outputs: Sequence[Path], flag: str = "--output") -> None:
    """Raises as `check_ours` does where an output exists that neither a done-marker nor a journal of `record` vouches for."""
    check_ours(outputs, flag, marker_path(record), append_suffix(record, JOURNAL))


def made_once(output: Path, key: str, make: Callable[[BinaryIO], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """What is recorded of the file `output`, and whether an earlier run has made it. Of two runs at a time one makes it.

    Args:
        key: hash of input and settings.
        make: writes it, and returns what to record, as JSON values.

    Raises:
        ValueError: a file is there that no run of a step has made. FullDiskError: the disk is full.
    """
    claim = append_suffix(output, JOURNAL)  # vouches for the output until the marker does
    output.parent.mkdir(parents=True, exist_ok=True)
    with locked(append_suffix(output, ".lock")), full_disk_named(str(output)):
        if (content := read_marker(output, key, [output])) is not None:
            claim.unlink(missing_ok=True)  # of a run with other settings that was killed
            return content, True
        check_made_here(output, [output])
        claim.touch()
        try:
            with written_aside(output) as file:
                content = make(file)
                marker_path(output).unlink(missing_ok=True)  # an old one would vouch for the new file
        except BaseException:
            if marker_path(output).exists() or not output.exists():  # else the claim alone vouches for the old file
                claim.unlink(missing_ok=True)
            raise
        write_marker(output, key, [output], content)
        claim.unlink(missing_ok=True)
    return content, False
