"""The documents that a vocabulary is trained on: spread over the whole corpus, always the same ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from data_tools.documents import document_blocks, document_id
from data_tools.line_functions import BAD_LINE
from megazero.data.jsonl import (
    Block,
    LineError,
    block_lines,
    complain,
    expected_text_bytes,
    is_blank,
    left_out,
    read_object,
)
from megazero.data.progress import Progress
from megazero.data.tokenizer import valid_unicode

MAX_LINE_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20
_MOST_SAMPLED = 1.5  # times --sample-mb; more comes only of files that hold more than was guessed


@dataclass
class Sample:
    """What was read to train on.

    Attributes:
        texts: documents spread over the whole corpus.
        lines: of the whole corpus.
        replaced: texts with unpaired surrogates, in the place of which U+FFFD was put.
        num_bytes: of the lines of these texts.
        left_out: a line for the sidecar of each line that was looked at and gave no text.
        bad_lines: how many of these hold no document; the others hold an empty text.
        errors: the first bad lines: file, line, reason.
    """

    texts: list[str] = field(default_factory=list)
    lines: int = 0
    replaced: int = 0
    num_bytes: int = 0
    left_out: list[bytes] = field(default_factory=list)
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
    limit = min(1.0, sample_mb * 1e6 / max(expected_text_bytes(paths), 1)) * 0xFFFFFFFF
    sample = Sample()
    with closing(Progress("reading", sum(path.stat().st_size for path in paths))) as progress:
        for file, path in enumerate(paths):
            number = 0
            for block in document_blocks(path, _BLOCK_BYTES, 0, file, max_line_bytes):
                before = sample.lines
                for _, line in block_lines(block):
                    number, sample.lines = number + 1, sample.lines + 1
                    is_chosen = zlib.crc32(str(sample.lines).encode()) <= limit or block.fault is not None
                    if is_chosen and not is_blank(line, block):
                        _take(sample, line, key, block, number, strict)
                if sample.num_bytes > _MOST_SAMPLED * sample_mb * 1e6 + max_line_bytes:
                    raise ValueError(
                        f"{path}: the text is larger than its files let expect: more than --sample-mb {sample_mb:g} after "
                        f"{sample.lines} lines. Give a smaller --sample-mb."
                    )
                progress.update(sample.lines - before, block.stop - block.start, block.disk_bytes)
    return sample


def _take(sample: Sample, line: bytes, key: str, block: Block, number: int, strict: bool) -> None:
    try:
        document = read_object(line, key, block.fault)
    except LineError as error:
        complain(f"{block.path}:{number}: {error}", sample.errors, strict)
        sample.left_out.append(left_out(block.path, number, None, BAD_LINE, str(error)))
        sample.bad_lines += 1
        return
    text: str = document[key]
    if not text:
        sample.left_out.append(left_out(block.path, number, document_id(document, key), "no text"))
        return
    whole = valid_unicode(text)  # as a tokenizer reads it
    sample.num_bytes += len(line)
    sample.replaced += whole != text
    sample.texts.append(whole)
