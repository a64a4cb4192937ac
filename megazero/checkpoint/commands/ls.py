"""What a person asks of checkpoints: which there are, and what is in one of them. Only indices are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from megazero.checkpoint.format import CheckpointError, dtype_code
from megazero.checkpoint.plain import MARK
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.tags import checkpoint_path, latest_tag, list_tags, named
from megazero.logging import table
from megazero.zero.memory import size


def locate(path: str | Path, tag: str | None = None) -> tuple[Path, str]:
    """The directory and the tag of a checkpoint, for `Reader`.

    Args:
        path: a checkpoint's own directory, or the one that a job saves in.
        tag: which checkpoint of the latter; by default the one that its file `latest` names.

    Raises:
        FileNotFoundError: there is no such checkpoint; the message names those that there are.
        ValueError: `tag` is given, and `path` is a checkpoint itself.
    """
    path, wanted = named(Path(path).resolve(), tag)
    if tag is None and wanted is not None:
        return path, wanted
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no directory: name one that a job saves in, or a checkpoint in it.")
    wanted, there = latest_tag(path) if tag is None else tag, list_tags(path)
    if wanted is not None and wanted in there:
        return path, wanted
    if not there:
        raise FileNotFoundError(f"There are no checkpoints in {path}: no directory in it has an index.json.")
    missing = "no file `latest` that names one" if wanted is None else f"no checkpoint {wanted}"
    raise FileNotFoundError(f"There is {missing} in {path}; choose with --tag among {', '.join(there)}.")


def open_checkpoint(path: str | Path, tag: str | None = None) -> Reader:
    """The checkpoint that `path` and `tag` mean. Arguments and errors as of `locate`; CheckpointError if it is damaged."""
    return Reader(*locate(path, tag))


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines with a heading, all columns aligned: to the left, or to the `right` where their number is listed."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def cell(i: int, text: str) -> str:
        return text.rjust(widths[i]) if i in right else text.ljust(widths[i])

    return ["  ".join(cell(i, text) for i, text in enumerate(line)).rstrip() for line in lines]


def describe_directory(directory: str | Path) -> list[str]:
    """A table of the checkpoints in a directory, oldest first, and what else of saves lies there.

    Raises:
        FileNotFoundError: there are none.
    """
    directory = Path(directory).resolve()
    tags, partial = list_tags(directory), sorted(directory.glob(".*.partial"))
    if not tags and not partial:
        raise FileNotFoundError(f"There are no checkpoints in {directory}: no directory in it has an index.json.")
    latest, rows, errors = None, [], []
    try:
        latest = latest_tag(directory)
    except CheckpointError as error:
        errors.append(str(error))
    for tag in tags:
        with suppress(FileNotFoundError):  # a job that saves here has just deleted it
            try:
                summary = _summary(Reader(directory, tag))
            except CheckpointError as error:
                summary = ("", _saved(checkpoint_path(directory, tag)), "", "", "", "cannot be read")
                errors.append(f"{tag}: {error}")
            rows.append(("*" if tag == latest else "", tag, *summary))
    lines = columns(("", "TAG", "STEPS", "SAVED", "MP x DP", "ZERO", "SIZE", ""), rows, right=(2, 5, 6)) if tags else []
    lines += ["", *errors] if errors else []
    if latest is not None:
        lines += ["", "* latest" if latest in tags else f"`latest` names {latest}, which is not there"]
    return lines + [f"{path.name} is being written, or its save has died" for path in partial]


def describe(reader: Reader) -> list[str]:
    """Everything that the index of one checkpoint says: its parameters, counters and settings.

    Raises:
        CheckpointError: they are not what was written.
    """
    rows, kinds, numels, nbytes = [], Counter[str](), Counter[str](), Counter[str]()
    for name, entry in reader.tensors.items():
        codes = dict.fromkeys(map(dtype_code, entry.states.values()))
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        rows.append((name, entry.kind, shape, ", ".join(codes), ", ".join(entry.states)))
        kinds[entry.kind] += 1
        numels[entry.kind] += entry.numel
        nbytes.update({state: entry.numel * dtype.itemsize for state, dtype in entry.states.items()})
    lines = columns(("NAME", "KIND", "SHAPE", "DTYPE", "STATES"), rows)
    totals = [(kind, f"{count} tensors, {numels[kind]:,} elements") for kind, count in kinds.items()]
    totals += [(state, size(count)) for state, count in nbytes.items()]
    totals += [(alias, f"is tied to {name}") for alias, name in reader.aliases.items()]
    with reader.well_formed("its settings"):
        settings = {
            "checkpoint": _facts(reader),
            "optimizer": _optimizer(reader.index.get("optimizer")),
            "loss scale": _entries(reader.index.get("loss_scaler")),
            "learning rate schedule": _entries(reader.index.get("lr_scheduler")),
            "client state": _entries(reader.index.get("client_state")),
        }
    for title, entries in {"totals": totals, **settings}.items():
        lines += ["", *table(title, entries or [("none", "")]).splitlines()]
    return [line.rstrip() for line in lines]


def brief(encoded: Any) -> str:
    """A JSON value, or one of `plain.encode`, in a few words."""
    kind = encoded.get(MARK) if isinstance(encoded, dict) else None
    if kind in ("tensor", "numpy"):
        text = f"{'array' if kind == 'numpy' else 'tensor'} {encoded['dtype']} {encoded['shape']}"
    elif kind == "tuple" and not is_nested(encoded["items"]):
        text = json.dumps(encoded["items"], ensure_ascii=False)
    elif kind is not None:
        text = str(encoded["value"]) if "value" in encoded else f"{kind} of {len(encoded.get('items', encoded))}"
    elif isinstance(encoded, dict) or (isinstance(encoded, list) and is_nested(encoded)):
        text = f"{type(encoded).__name__} of {len(encoded)}"
    else:
        text = json.dumps(encoded, ensure_ascii=False)
    return shortened(text, 200)


def is_nested(items: list[Any]) -> bool:
    """Whether containers are among the items."""
    return any(isinstance(item, (dict, list)) for item in items)


def shortened(text: str, width: int) -> str:
    """At most `width` characters of the text."""
    return text if len(text) <= width else text[: width - 3] + "..."


def _summary(reader: Reader) -> tuple[str, ...]:
    """Of the table's row what follows the tag."""
    steps, stage = (str(reader.index.get(key)) for key in ("global_steps", "zero_stage"))
    return steps, _saved(reader.path), _ranks(reader), stage, size(reader.nbytes), ""


def _ranks(reader: Reader) -> str:
    return f"{reader.index.get('model_parallel_size')} x {reader.index.get('data_parallel_size')}"


def _facts(reader: Reader) -> list[tuple[str, str]]:
    said = reader.index.get
    versions = f"megazero {said('megazero_version')}, torch {said('torch_version')}"
    return [
        ("path", str(reader.path)),
        ("saved", f"{_saved(reader.path)} by {versions}"),
        ("ranks", f"{_ranks(reader)} (model x data parallel), ZeRO stage {said('zero_stage')}, {said('device')}"),
        ("files", f"{len(reader.files)}, {size(reader.nbytes)}"),
        ("steps", f"{said('global_steps')} ({said('skipped_steps')} skipped)"),
        *((name, brief(value)) for name, value in said("counters", {}).items()),
    ]


def _optimizer(saved: dict[str, Any] | None) -> list[tuple[str, str]]:
    if saved is None:
        return []
    lines = [("type", str(saved.get("type"))), ("counters", _in_a_line(saved.get("counters") or {}))]
    for i, group in enumerate(saved.get("groups") or ()):
        lines.append((f"group {i}", _in_a_line({k: v for k, v in group.items() if v is not None and v is not False})))
    return lines


def _in_a_line(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {brief(value)}" for key, value in settings.items()) or "none"


def _entries(encoded: Any, path: str = "") -> list[tuple[str, str]]:
    """A row for each value, by its path through dictionaries: "config.schedule.lr"."""
    if isinstance(encoded, dict) and MARK not in encoded:
        start = f"{path}." if path else ""
        return [row for key, value in encoded.items() for row in _entries(value, f"{start}{key}")]
    return [] if encoded is None and not path else [(path or "value", brief(encoded))]


def _saved(path: Path) -> str:
    return f"{datetime.fromtimestamp((path / 'index.json').stat().st_mtime):%Y-%m-%d %H:%M:%S}"
