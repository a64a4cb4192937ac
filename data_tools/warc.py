"""Common Crawl's .wet files (WARC records of extracted text) as JSON lines {"text", "url", "id"} (needs fastwarc)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from data_tools.optional import require
from megazero.lines.compressed import DAMAGE, decompressed


def warc_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Each text record as a JSON line, and how many bytes of the file are read up to it; a text keeps its invalid UTF-8.

    Raises:
        ValueError: fastwarc is missing, the file is damaged or cut off, or it has no text records but pages of HTML.
    """
    warc = require("fastwarc.warc", f"reading {path}", "fastwarc")
    texts = records = 0
    try:
        with open(path, "rb") as disk, decompressed(disk, path) as file:
            for record in warc.ArchiveIterator(file, record_types=warc.WarcRecordType.any_type, parse_http=False):
                records += 1
                if not record.headers.get("Content-Length"):  # it would pass for an empty one
                    raise EOFError(f"record {record.record_id} ends in its header")
                if record.record_type != warc.WarcRecordType.conversion:
                    continue
                texts += 1
                content = record.reader.read()
                if len(content) != record.content_length:
                    raise EOFError(f"record {record.record_id} ends early")
                document = {
                    "text": content.decode("utf-8", "surrogateescape"),
                    "url": record.headers.get("WARC-Target-URI", ""),
                    "id": record.record_id,
                }
                # Bytes that are not UTF-8 come back out as they were, and the line is then reported as a bad one.
                yield json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n", disk.tell()
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk; fastwarc's own, of a bad header, have no number
        raise ValueError(f"{path}: damaged or cut off: {error}. Get the file again.") from error
    if records and not texts:
        raise ValueError(
            f"{path}: none of its {records} records is text (WARC-Type: conversion). Use Common Crawl's .wet files, or extract "
            'the text from the HTML first (with trafilatura, say) into JSON lines {"text", "url"}.'
        )
    if not records and path.stat().st_size:
        raise ValueError(f"{path}: no WARC record in it")
