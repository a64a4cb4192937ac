"""The documents that a vocabulary is trained on: spread over the whole corpus, always the same ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_tools.documents import document_blocks, document_id
from megazero.data.tokenizer import valid_unicode
from megazero.lines.jsonl import MAX_LINE_BYTES, LineError, expected_text_bytes, read_object
from megazero.lines.progress import Progress
from megazero.lines.results import NO_TEXT, BlockResult, Counts, filled_lines, report

_BLOCK_BYTES = 1 << 20
_MOST_SAMPLED = 1.5  # times --sample-mb; more comes only of files that hold more than was guessed


@dataclass
class Sample:
    """What was read to train on.

    Attributes:
        texts: documents spread over the whole corpus.
        left_out: for the dropped list, of each block: the lines that were looked at and gave no text.
        counts: of the lines of the whole corpus, and of those left out. `changed` are texts in which U+FFFD was put in place
            of unpaired surrogates, `text_bytes_out` the bytes of the lines of all texts.
    """

    texts: list[str] = field(default_factory=list)
    left_out: list[bytes] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


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
    with Progress("reading", sum(path.stat().st_size for path in paths)) as progress:
        for file, path in enumerate(paths):
            before = sample.counts.lines  # in other files
            for block in document_blocks(path, _BLOCK_BYTES, 0, file, max_line_bytes):
                done, result = sample.counts.lines, BlockResult()
                for number, _, line in filled_lines(block, result):
                    if zlib.crc32(str(done + number + 1).encode()) <= limit:
                        _take(sample.texts, line, key, number, result)
                sample.left_out.append(report(block, done - before, result, sample.counts.errors, strict))
                sample.counts.add(result.counts)
                if sample.counts.text_bytes_out > _MOST_SAMPLED * sample_mb * 1e6 + max_line_bytes:
                    raise ValueError(
                        f"{path}: the text is larger than its files let expect: more than --sample-mb {sample_mb:g} after "
                        f"{sample.counts.lines} lines. Give a smaller --sample-mb."
                    )
                progress.update(result.counts.lines, block.stop - block.start, block.disk_bytes)
    return sample


def _take(texts: list[str], line: bytes, key: str, number: int, result: BlockResult) -> None:
    try:
        document = read_object(line, key)
    except LineError as error:
        result.bad_line(number, str(error))
        return
    text: str = document[key]
    if not text:
        result.drop(number, NO_TEXT, document_id(document, key))
        return
    whole = valid_unicode(text)  # as a tokenizer reads it
    result.counts.text_bytes_out += len(line)
    result.counts.changed += whole != text
    texts.append(whole)
