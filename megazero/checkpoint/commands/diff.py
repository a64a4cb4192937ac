"""How two checkpoints differ: parameters, values, counters and settings, whatever ranks have written them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megazero.checkpoint.commands.ls import columns, is_nested, shortened
from megazero.checkpoint.format import CLIENT, SCHEDULE, bytes_of, crc32, dtype_code
from megazero.checkpoint.plain import MARK
from megazero.checkpoint.reader import Reader

WEIGHTS = "weights"  # trained or not: a parameter may be frozen in one of the two
_SETTINGS = "global_steps skipped_steps counters optimizer loss_scaler lr_scheduler client_state aliases".split()
_CHUNK_NUMEL = 1 << 22
_WIDE = torch.complex128  # holds the difference of any two values, and the values but for large integers


@dataclass(frozen=True)
class ValueDifference:
    """How the values of one tensor differ.

    Attributes:
        count: elements that differ, of `numel`.
        max_abs: the largest difference; nan where only one of the two has a number.
        relative: that, divided by the largest absolute value in A.
    """

    what: str
    count: int
    numel: int
    max_abs: float
    relative: float


@dataclass
class Comparison:
    """What differs between A and B.

    Attributes:
        only: (what, "A" or "B") of parameters and states that only one has.
        forms: (what, in A, in B) of tensors of other shapes or dtypes.
        settings: (what, in A, in B) of counters and settings; "" where there is none.
        num_tensors: how many tensors' values were compared.
    """

    only: list[tuple[str, str]] = field(default_factory=list)
    forms: list[tuple[str, str, str]] = field(default_factory=list)
    values: list[ValueDifference] = field(default_factory=list)
    settings: list[tuple[str, str, str]] = field(default_factory=list)
    num_tensors: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.only or self.forms or self.values or self.settings)


def compare(a: Reader, b: Reader, *, weights_only: bool = False) -> Comparison:
    """The differences between two checkpoints; how they are cut over ranks, and the states of random generators, are none.

    Args:
        weights_only: leave out the optimizer's states, counters and settings.

    Raises:
        CheckpointError: one of them is damaged.
    """
    found = Comparison()
    found.only += [(name, "A") for name in a.tensors if name not in b.tensors]
    found.only += [(name, "B") for name in b.tensors if name not in a.tensors]
    pairs = list(_pairs(found, a, b, weights_only))
    found.num_tensors = len(pairs)
    for name, state, *states in tqdm(pairs, desc="comparing", unit=" tensors", disable=None):
        difference = _compare_values(f"{state} of {name}", a, b, name, states)
        found.values += [difference] if difference is not None else []
    if not weights_only:
        in_a, in_b = dict(_settings(a)), dict(_settings(b))
        both = [(key, in_a.get(key, ""), in_b.get(key, "")) for key in {**in_a, **in_b}]
        found.settings = [each for each in both if each[1] != each[2]]
    return found


def _pairs(found: Comparison, a: Reader, b: Reader, weights_only: bool) -> Iterator[tuple[str, str, str, str]]:
    """(name, state, its name in A, its name in B) of what has values in both; notes the rest."""
    missing: Counter[tuple[str, str]] = Counter()
    for name in (name for name in a.tensors if name in b.tensors):
        states_a, states_b = _states(a, name), _states(b, name)
        for state in dict.fromkeys([*states_a, *states_b]):
            if weights_only and state != WEIGHTS:
                continue
            if state not in states_a or state not in states_b:
                missing[state, "A" if state in states_a else "B"] += 1
                continue
            form_a, form_b = _form(a, name, states_a[state]), _form(b, name, states_b[state])
            if form_a != form_b:
                found.forms.append((f"{state} of {name}", form_a, form_b))
            if a.tensors[name].shape == b.tensors[name].shape:
                yield name, state, states_a[state], states_b[state]
    found.only += [(f"{state} of {count} parameters", side) for (state, side), count in missing.items()]


def _states(reader: Reader, name: str) -> dict[str, str]:
    entry = reader.tensors[name]
    return {WEIGHTS if state == entry.weight_state else state: state for state in entry.states}


def _form(reader: Reader, name: str, state: str) -> str:
    entry = reader.tensors[name]
    return f"{dtype_code(entry.states[state])} {list(entry.shape)}"


def _compare_values(what: str, a: Reader, b: Reader, name: str, states: Sequence[str]) -> ValueDifference | None:
    count, max_abs = 0, 0.0
    for x, y in zip(_chunks(a, name, states[0]), _chunks(b, name, states[1]), strict=True):
        if x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            continue
        is_integer = not any(each.is_floating_point() or each.is_complex() for each in (x, y))
        x, y = (each.to(torch.int64 if is_integer else _WIDE) for each in (x, y))
        differs = (x != y) & ~((x != x) & (y != y))  # nan is like nan
        if differs.any():
            most = float((x[differs].to(_WIDE) - y[differs].to(_WIDE)).abs().max())
            count, max_abs = count + int(differs.sum()), most if math.isnan(most) else max(max_abs, most)
    if not count:
        return None
    largest = 0.0
    for x in _chunks(a, name, states[0]):
        size = x.to(_WIDE).abs()
        largest = max(largest, float(size.where(size.isfinite(), 0).max()))
    return ValueDifference(what, count, a.tensors[name].numel, max_abs, max_abs / largest if largest else math.inf)


def _chunks(reader: Reader, name: str, state: str) -> Iterator[Tensor]:
    """The flattened tensor, in parts that leave memory to others."""
    numel, dtype = reader.tensors[name].numel, reader.tensors[name].states[state]
    for start in range(0, numel, _CHUNK_NUMEL):
        out = torch.empty(min(_CHUNK_NUMEL, numel - start), dtype=dtype, device="cpu")
        reader.read_part(name, state, out, start=start)
        yield out


def _settings(reader: Reader) -> Iterator[tuple[str, str]]:
    """Every counter and setting by its path, as text."""
    with reader.well_formed("its settings"):
        tensors = reader.blobs(CLIENT, SCHEDULE)
        for key in _SETTINGS:
            if reader.index.get(key) is not None:
                yield from _flat(tensors, key, reader.index[key])


def _flat(tensors: dict[str, Tensor], path: str, value: Any) -> Iterator[tuple[str, str]]:
    kind = value.get(MARK) if isinstance(value, dict) else None
    items = value.get("items") if kind else value  # what it holds, if it is a container
    if kind in ("tensor", "numpy"):
        content = crc32(bytes_of(tensors[value["name"]]).data)
        yield path, f"{kind} {value['dtype']} {value['shape']} with CRC-32 {content:08x}"
    elif isinstance(items, dict):
        for key, item in items.items():
            yield from _flat(tensors, f"{path}.{key}", item)
    elif isinstance(items, list) and is_nested(items):
        for number, item in enumerate(items):
            yield from _flat(tensors, f"{path}[{number}]", item)
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def report(found: Comparison, most: int) -> list[str]:
    """Lines for a person.

    Args:
        most: tensors whose values differ, of which the relatively largest differences are listed.
    """
    lines = [f"only in {side}: {what}" for what, side in found.only]
    if found.forms:
        lines += ["", *columns(("SHAPE AND DTYPE", "A", "B"), found.forms)]
    if found.values:
        worst = sorted(found.values, key=lambda v: -math.inf if math.isnan(v.max_abs) else -v.relative)
        rows = [(v.what, f"{v.count:,}", f"{v.numel:,}", f"{v.max_abs:.3g}", f"{v.relative:.3g}") for v in worst[:most]]
        lines += ["", *columns(("VALUES", "DIFFERENT", "OF", "MAX ABS", "RELATIVE"), rows, right=(1, 2, 3, 4))]
        if len(worst) > most:
            lines.append(f"... and {len(worst) - most} more, which differ less (--all lists them)")
    if found.settings:
        settings = [(path, shortened(a, 50), shortened(b, 50)) for path, a, b in found.settings]
        lines += ["", *columns(("SETTING", "A", "B"), settings)]
    counts = f"values of {len(found.values)} of {found.num_tensors} tensors"
    differ = {
        "not all is in both": found.only,
        f"{len(found.forms)} have other shapes or dtypes": found.forms,
        f"{counts} differ": found.values,
        f"{len(found.settings)} settings differ": found.settings,
    }
    equal = f"equal: {found.num_tensors} tensors, value for value"
    lines += ["", equal if found.is_equal else f"different: {'; '.join(text for text in differ if differ[text])}"]
    return lines[1:] if not lines[0] else lines
