"""The documents that a vocabulary is trained on: spread over the whole corpus, always the same ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_tools.documents import document_blocks, document_id
from data_tools.line_functions import BAD_LINE, numbered_lines
from megazero.data.jsonl import LineError, complain, read_object
from megazero.data.progress import Progress
from megazero.files import is_compressed

MAX_LINE_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20
_COMPRESSION = 4  # of text, when guessing how much a compressed file holds
_MOST_SAMPLED = 1.5  # times --sample-mb; more comes only of files that hold more than was guessed


@dataclass
class Sample:
    """What was read to train on.

    Attributes:
        texts: documents spread over the whole corpus.
        lines: of the whole corpus.
        replaced: texts with unpaired surrogates, in the place of which U+FFFD was put.
        num_bytes: of the lines of these texts.
        left_out: file, line, id and reason of each line that was looked at and gave no text.
        bad_lines: how many of these hold no document; the others hold an empty text.
        errors: the first bad lines: file, line, reason.
    """

    texts: list[str] = field(default_factory=list)
    lines: int = 0
    replaced: int = 0
    num_bytes: int = 0
    left_out: list[dict[str, Any]] = field(default_factory=list)
    bad_lines: int = 0
    errors: list[str] = field(default_factory=list)


def sample_documents(
    paths: Sequence[Path],
    key: str,
    sample_mb: float,
    strict: bool = False,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Sample:
    """About `sample_mb` megabytes of documents, spread over the whole corpus; always the same ones. Other lines are not parsed.

    Raises:
        ValueError: with `strict`, a line of the sample that holds no document; names file and line. Or the files hold far more
            text than their sizes let expect.
    """
    total = sum(path.stat().st_size * (_COMPRESSION if is_compressed(path) else 1) for path in paths)
    limit = min(1.0, sample_mb * 1e6 / max(total, 1)) * 0xFFFFFFFF
    sample = Sample()
    with closing(Progress("reading", sum(path.stat().st_size for path in paths))) as progress:
        for file, path in enumerate(paths):
            number = disk = 0
            for block in document_blocks(path, _BLOCK_BYTES, max_line_bytes, 0, file):
                before = sample.lines
                for _, line in numbered_lines(block):
                    number, sample.lines = number + 1, sample.lines + 1
                    if block.fault is not None:
                        _leave_out(sample, path, number, None, block.fault, strict)
                    elif line.strip() and zlib.crc32(str(sample.lines).encode()) <= limit:
                        _take(sample, line, key, path, number, strict)
                if sample.num_bytes > _MOST_SAMPLED * sample_mb * 1e6 + max_line_bytes:
                    raise ValueError(
                        f"{path}: the text is larger than its files let expect: more than --sample-mb {sample_mb:g} after "
                        f"{sample.lines} lines. Give a smaller --sample-mb."
                    )
                progress.update(sample.lines - before, block.stop - block.start, block.disk_stop - disk)
                disk = block.disk_stop
    return sample


def _take(sample: Sample, line: bytes, key: str, path: Path, number: int, strict: bool) -> None:
    try:
        document = read_object(line, key)
    except LineError as error:
        _leave_out(sample, path, number, None, str(error), strict)
        return
    text: str = document[key]
    if not text:
        _leave_out(sample, path, number, document_id(document, key), None, strict)
        return
    # An unpaired surrogate cannot be written; a tokenizer reads U+FFFD in its place, too.
    sample.num_bytes += len(line)
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    sample.replaced += whole != text
    sample.texts.append(whole)


def _leave_out(sample: Sample, path: Path, number: int, identity: str | None, fault: str | None, strict: bool) -> None:
    record = {"file": str(path), "line": number, "id": identity, "reason": "no text"}
    if fault is None:
        sample.left_out.append(record)
        return
    complain(f"{path}:{number}: {fault}", sample.errors, strict)
    sample.left_out.append({**record, "reason": BAD_LINE, "detail": fault})
    sample.bad_lines += 1
