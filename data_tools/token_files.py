"""Files of tokens as other trainers store them: which there are, where the tokens lie in them, and their pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from data_tools.inputs import check_named_once
from data_tools.parquet import row_count, token_rows
from megazero.data.arrays import DAMAGED_HEADER
from megazero.data.corpora import is_json
from megazero.files import file_named
from megazero.lines.jsonl import Block
from megazero.lines.resumable import read_pieces

_SUFFIXES = (".bin", ".npy", ".parquet")  # of the files that a folder stands for
_ARROW = ".arrow"  # of those that are refused
_HELD_OUT = re.compile(r"(?<![a-z])(val|valid|validation|test)(?![a-z])")
DTYPES = ("uint16", "uint32", "int32", "int64", "uint64", "uint8")
_HEADER_BYTES = 1024  # 256 int32: magic number, version, number of tokens (karpathy/llm.c, dev/data/data_common.py)
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic number: version, dtype of the tokens


@dataclass(frozen=True)
class Layout:
    """Where the tokens lie in a file: in its bytes [start, stop); of a .parquet, in these rows."""

    start: int
    stop: int
    dtype: np.dtype


def find_inputs(values: Sequence[str | Path], output: Path) -> list[Path]:
    """The files that the values of --input stand for, a folder's sorted by name.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: a file is text, one of a .bin/.idx pair, or named twice; a folder holds the output, or data of several parts.
    """
    paths: list[Path] = []
    for value in map(Path, values):
        if not value.is_dir():
            if not value.is_file():
                raise FileNotFoundError(f"--input {value}: there is no such file or folder")
            paths.append(value)
            continue
        found = sorted(path for path in value.iterdir() if path.suffix in (*_SUFFIXES, _ARROW) and path.name[0] != ".")
        held_out = [path for path in found if _HELD_OUT.search(path.stem)]
        if not found:
            raise FileNotFoundError(f"--input {value}: the folder holds no {', '.join(_SUFFIXES)}")
        if output.resolve().parent == value.resolve():
            raise ValueError(
                f"--output-prefix {output} lies in --input {value}, whose files are read. Choose another folder."
            )
        if 0 < len(held_out) < len(found):
            raise ValueError(
                f"--input {value}: the folder holds {held_out[0].name} beside others, which look like training data. Name the "
                f"files of one part, such as {value}/*train*."
            )
        paths += found
    check_named_once(paths)
    for path in paths:
        if is_json(path):
            raise ValueError(f"--input {path} is text, not tokens. Tokenize it instead: python -m data_tools tokenize")
        if path.suffix == _ARROW:
            raise ValueError(
                f"--input {path} is of a data set as Hugging Face's save_to_disk writes it. Write it as .parquet: "
                f"datasets.load_from_disk({str(path.parent)!r}).to_parquet(FILE)"
            )
        if path.suffix == ".bin" and path.with_suffix(".idx").exists():
            raise ValueError(
                f"--input {path} has an .idx: it is what this step makes. Such pairs are joined by merge_datasets."
            )
    if 0 < sum(path.suffix == ".parquet" for path in paths) < len(paths):
        raise ValueError("--input names .parquet and other files. Import each kind by itself, and use merge_datasets.")
    return paths


def layout_of(path: Path, dtype: str | None) -> Layout:
    """Where the tokens lie.

    Args:
        dtype: of tokens without a header, --dtype.

    Raises:
        ValueError: the file is cut off or damaged, or has neither a header nor a dtype; or its own dtype is another.
    """
    size = path.stat().st_size
    if path.suffix == ".parquet":
        return Layout(0, row_count(path), np.dtype("<i8"))
    with file_named(path), open(path, "rb") as file:
        head = file.read(_HEADER_BYTES)
        magic, version, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
        if head.startswith(np.lib.format.MAGIC_PREFIX):
            file.seek(0)
            count, stored = _read_npy_header(path, file)
            start = file.tell()
        elif magic in _LLM_C:
            known, name = _LLM_C[magic]
            if version != known:
                raise ValueError(f"--input {path} is of llm.c's version {version}, only {known} is known")
            start, stored = _HEADER_BYTES, np.dtype(name)
        elif dtype is None:
            raise ValueError(
                f"--input {path} has no header (of llm.c or numpy) that tells how its tokens are stored: give --dtype, which is "
                "uint16 for nanoGPT's files and most of OLMo's."
            )
        else:
            start, stored = 0, np.dtype(dtype).newbyteorder("<")
            count = size // stored.itemsize
    if dtype is not None and stored != np.dtype(dtype):
        raise ValueError(f"--dtype {dtype}: {path} says itself that it stores {stored}. Leave the flag out.")
    stop = start + count * stored.itemsize
    if stop != size:
        raise ValueError(
            f"--input {path} has {size} bytes, {count} tokens of {stored} take {stop}: it is damaged, or of another kind"
        )
    return Layout(start, stop, stored)


def _read_npy_header(path: Path, file: BinaryIO) -> tuple[int, np.dtype]:
    try:
        is_first = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        shape, _, stored = read(file)
    except DAMAGED_HEADER as error:
        raise ValueError(f"--input {path} is damaged: {error}") from error
    if len(shape) != 1 or stored.kind not in "iu":
        raise ValueError(f"--input {path} is an array of {stored} with the shape {shape}, not a row of integers")
    return shape[0], stored


class Reader:
    """A `BlockReader` of pieces of tokens; each row of a .parquet ends with an end of text, unless they are packed.

    Args:
        ends: ids that end a document; the first of them is added where there is none.
    """

    def __init__(self, layouts: Sequence[Layout], column: str, is_packed: bool, ends: Sequence[int]) -> None:
        self.layouts, self.column, self.is_packed, self.ends = layouts, column, is_packed, ends

    def __call__(self, path: Path, block_bytes: int, start: int, file_number: int, _: int) -> Iterator[Block]:
        """The pieces from `start` on."""
        first = max(start, self.layouts[file_number].start)
        if path.suffix != ".parquet":
            yield from read_pieces(path, block_bytes, first, file_number)
            return
        size, rows = path.stat().st_size, self.layouts[file_number].stop
        for ids, lengths in token_rows(path, self.column, first):
            stop = first + len(lengths)
            if not self.is_packed:
                ids = self._ended(path, first, ids, lengths)
            yield Block(
                path, file_number, first, stop, ids.astype("<i8").tobytes(), size * stop // rows - size * first // rows
            )
            first = stop

    def _ended(
        self, path: Path, first: int, ids: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        stops = np.cumsum(lengths)
        is_end = np.isin(ids, self.ends)
        filled = lengths > 0
        is_ended = np.zeros(len(lengths), bool)
        is_ended[filled] = is_end[stops[filled] - 1]
        is_end[stops[filled] - 1] = is_end[(stops - lengths)[filled]] = False
        if is_end.any():
            row = first + int(np.searchsorted(stops, is_end.argmax(), "right"))
            raise ValueError(
                f"{path}: row {row} (from 0) has the end of text inside, so rows are no documents. If they are pieces of text "
                "laid end to end, add --packed."
            )
        return np.insert(ids, stops[~is_ended], self.ends[0])
