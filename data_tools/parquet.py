"""Parquet files as JSON lines and back, and as rows of tokens (needs pyarrow)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_tools.documents import dump
from data_tools.optional import require
from megazero.files import written_aside

_BATCH_ROWS, _BATCH_BYTES = 1000, 8 << 20  # that are read at a time, at most
_GROUP_BYTES = 16 << 20


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, int]]:
    """The pyarrow.parquet.ParquetFile, and how many of its rows to read at a time; raises as `parquet_lines`."""
    pyarrow = require("pyarrow", f"reading {path}")
    parquet = require("pyarrow.parquet", f"reading {path}", "pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
            row_bytes = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
            yield file, max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(row_bytes, 1)))
    except (pyarrow.ArrowException, OSError) as error:  # some of which are ValueErrors as well
        raise ValueError(f"{path}: damaged or not a parquet file: {error}") from error


def parquet_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Each row as a JSON line, dates, times and decimals as strings, and about how many bytes of the file are read up to it.

    Raises:
        ValueError: pyarrow is missing, the file is damaged, or a column has values that JSON has not (bytes, NaN).
    """
    size, done = path.stat().st_size, 0
    with _opened(path) as (file, batch_rows):
        rows = max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(batch_size=batch_rows):
            try:
                for row in batch.to_pylist():
                    done += 1
                    yield dump(row, allow_nan=False, default=_as_string), size * done // rows
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}: row {done}: {error}. Write such columns as strings, or leave them out."
                ) from error


def _as_string(value: date | time | Decimal) -> str:
    """ISO 8601 (a datetime is a date), or all digits; a TypeError for what json asks for besides."""
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"JSON has no {type(value).__name__}")


def row_count(path: Path) -> int:
    """How many rows there are; raises as `parquet_lines`."""
    with _opened(path) as (file, _):
        return int(file.metadata.num_rows)


def token_rows(
    path: Path, column: str, start: int = 0
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """The tokens of a batch of rows, end to end, and how many each row has, from row `start` on, with which a batch begins.

    Raises:
        ValueError: as `parquet_lines`; or the column is missing, no list of integers, or has nulls.
    """
    first = 0
    with _opened(path) as (file, batch_rows):
        names = file.schema_arrow.names
        if column not in names:
            raise ValueError(
                f"{path} has no column {column!r}, but {', '.join(names)}: name that of the tokens, --column"
            )
        for group in range(file.metadata.num_row_groups):
            if first + file.metadata.row_group(group).num_rows <= start:
                first += file.metadata.row_group(group).num_rows
                continue
            for batch in file.iter_batches(batch_size=batch_rows, row_groups=[group], columns=[column]):
                if first >= start:
                    yield _tokens(path, column, batch.column(0))
                first += len(batch)


def _tokens(path: Path, column: str, array: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    try:
        ids, lengths = array.flatten(), array.value_lengths()
    except AttributeError:
        ids = None
    if ids is None or ids.null_count or lengths.null_count or not str(ids.type).startswith(("int", "uint")):
        raise ValueError(
            f"{path}: the column {column!r} has {array.type}, perhaps with nulls; tokens are lists of integers (--column)"
        )
    return ids.to_numpy().astype(np.int64), lengths.to_numpy().astype(np.int64)


def write_parquet(source: Path, path: Path) -> None:
    """Writes the JSON lines of the plain file `source` as a table; entries that a document lacks are null.

    Raises:
        ValueError: pyarrow is missing, or a table cannot hold an entry: it is of different kinds in different documents, say.
    """
    pyarrow = require("pyarrow", f"writing {path}")
    parquet = require("pyarrow.parquet", f"writing {path}", "pyarrow")
    try:
        schema = pyarrow.schema([])
        for table in _tables(source, pyarrow):
            schema = pyarrow.unify_schemas([schema, table.schema], promote_options="permissive")
        with written_aside(path) as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            for table in _tables(source, pyarrow, schema):
                writer.write_table(table)
    except (pyarrow.ArrowException, UnicodeEncodeError, OverflowError) as error:
        raise ValueError(f"{path}: the documents do not fit into a table: {error}. Use --format jsonl.") from error


def _tables(source: Path, pyarrow: Any, schema: Any = None) -> Iterator[Any]:
    with open(source, "rb") as file:
        while rows := [json.loads(line) for line in file.readlines(_GROUP_BYTES)]:
            names = schema.names if schema is not None else dict.fromkeys(name for row in rows for name in row)
            columns = {name: [row.get(name) for row in rows] for name in names}
            yield pyarrow.table(columns, schema=schema)
