"""Loose JSON to indexed tokens: parallel, in the order of the input, resumable, identical for any number of workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megazero.data.arrays import mapped_array
from megazero.data.encoding import BlockEncoder, Surrogates
from megazero.data.indexed_dataset import IndexedDataset, published
from megazero.data.mmidx import Part, token_dtype
from megazero.data.sidecar import (
    Sidecar,
    check_free,
    check_tokens,
    read_sidecar,
    remove_sidecar,
    sidecar_path,
    write_sidecar,
)
from megazero.data.tokenizer import Tokenizer
from megazero.files import append_suffix, locked
from megazero.lines.contents import describe_files, key_of
from megazero.lines.jsonl import read_blocks
from megazero.lines.outputs import check_ours, full_disk_named
from megazero.lines.partial_shard import DROPPED_SUFFIX, JOURNAL, PartialShard, Shard, give_up
from megazero.lines.results import NO_TEXT, check_strict, no_text, report_empty
from megazero.lines.resumable import BlockReader, WorkOptions, fill_one, useful_workers
from megazero.logging import some

logger = logging.getLogger(__name__)


def tokenize_json(
    inputs: Sequence[str | Path],
    prefix: str | Path,
    tokenizer: Tokenizer,
    *,
    key: str = "text",
    append_eod: bool = True,
    surrogates: Surrogates = "replace",
    options: WorkOptions | None = None,
    log_interval: int = 0,
    blocks: BlockReader = read_blocks,
    describe: Callable[[Sequence[Path]], list[dict[str, Any]]] = describe_files,
) -> Sidecar:
    """Writes PREFIX.bin, PREFIX.idx and PREFIX.json from files of JSON lines, and returns what is recorded of them.

    Lines that gave no tokens, if any, are listed in PREFIX.dropped.jsonl: file, line, id, reason. A finished run with the same
    input and settings is found and nothing is done; an unfinished one is continued; of several processes with the same prefix
    one works and the others wait for it.

    Args:
        inputs: plain, .gz, .xz or .zst files (or what `blocks` reads); one JSON object a line, one document an object.
        key: which entry is the text.
        append_eod: whether every document ends with the end-of-text token.
        surrogates: "replace" puts U+FFFD in the place of unpaired ones and counts the documents; "reject" leaves such lines out.
        options: how the run goes about it; only `max_line_bytes` and `strict` change what comes out.
        log_interval: documents between log lines, where no bar is drawn; 0 logs none.
        describe: tells one version of the inputs from another, as JSON values.

    Raises:
        FileNotFoundError: an input is missing.
        ValueError: no line holds a document; or one does not and `options.strict` is set; names file and line. In the second
            case, what was committed is kept: without `strict`, the next run goes on from there.
        RuntimeError: a worker process died; what was committed is kept.
    """
    options = options or WorkOptions()
    paths, prefix = [Path(path) for path in inputs], Path(prefix)
    source = {
        "inputs": describe(paths),
        "key": key,
        "append_eod": append_eod,
        "surrogates": surrogates,
        "max_line_bytes": options.max_line_bytes,
        "tokenizer_sha256": tokenizer.sha256,
    }

    def make(partial: PartialShard) -> dict[str, Any]:
        useful = replace(options, workers=useful_workers(paths, options.block_bytes, options.workers))
        encoder = BlockEncoder(tokenizer, key, append_eod, surrogates)
        fill_one(partial, encoder, useful, "tokenizing", blocks, log_documents=log_interval)
        _check_documents(partial, key)
        counts = partial.counts
        return {
            "lines": counts.lines,
            "text_bytes": counts.text_bytes_in,
            "bad_lines": counts.bad_lines,
            "empty_documents": counts.dropped.get(NO_TEXT, 0),
            "surrogates_replaced": counts.changed,
            "first_errors": counts.errors,
        }

    sidecar, is_done = make_corpus(paths, prefix, tokenizer, source, make, describe)
    if is_done:
        check_strict(sidecar.statistics["first_errors"], options.strict, f"when {prefix} was made")
    return sidecar


def make_corpus(
    paths: Sequence[Path],
    prefix: Path,
    tokenizer: Tokenizer,
    source: dict[str, Any],
    make: Callable[[PartialShard], dict[str, Any]],
    describe: Callable[[Sequence[Path]], list[dict[str, Any]]] = describe_files,
) -> tuple[Sidecar, bool]:
    """Writes PREFIX.bin, PREFIX.idx and PREFIX.json once; what is recorded of them, and whether an earlier run has made them.

    Args:
        source: description of the run, of which `inputs` is what `describe` says of the paths; equal ones give equal tokens.
        make: puts the tokens, in the dtype of the vocabulary, and the length of each document, int32, into a shard of two
            outputs, commits it, and returns what was counted.
    """
    journal = append_suffix(prefix, JOURNAL)
    if not journal.exists() and (done := _finished(prefix, source)) is not None:
        return done, True
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with locked(append_suffix(prefix, ".lock")), full_disk_named(f"{prefix}.*"):
        shard = Shard(tuple(paths), tuple(append_suffix(prefix, suffix) for suffix in (".bin", ".idx")), prefix)
        if (done := _finished(prefix, source)) is not None:
            give_up(shard)
            return done, True
        check_free(prefix)
        check_ours(shard.outputs, "--output-prefix", sidecar_path(prefix), journal)
        with closing(PartialShard(shard, key_of(source))) as partial:
            statistics = make(partial)
            if describe(paths) != source["inputs"]:
                partial.remove()  # nobody knows of which version it was made
                raise ValueError(f"{some([*map(str, paths)])}: changed while it was read. Start again.")
            dtype = token_dtype(tokenizer.vocab_size)
            sidecar = Sidecar(
                tokenizer_type=tokenizer.name,
                tokenizer_sha256=tokenizer.sha256,
                vocab_size=tokenizer.vocab_size,
                eod=tokenizer.eod,
                documents=partial.sizes[1] // np.dtype("<i4").itemsize,
                tokens=partial.sizes[0] // dtype.itemsize,
                source=source,
                statistics=statistics,
            )
            publish_corpus(partial, dtype, [(lengths_of(partial), None)], sidecar)
            partial.remove()  # where nothing maps it any more, as SMB shares require
            return sidecar, False


def _finished(prefix: Path, source: dict[str, Any]) -> Sidecar | None:
    try:
        sidecar = read_sidecar(prefix)
        if sidecar is None or sidecar.source != source:
            return None
        check_tokens(prefix, sidecar, IndexedDataset(prefix).num_tokens)
    except FileNotFoundError:
        return None
    except ValueError as error:  # whose advice is to come here
        logger.warning("tokenizing again what is damaged: %s", error)
        return None
    logger.info("%s is there already, from the same input and settings", prefix)
    return sidecar


def _check_documents(partial: PartialShard, key: str) -> None:
    """Warns of empty files and lines that are left out; a ValueError, and nothing left, where there is no document at all."""
    counts = partial.counts
    report_empty(partial.shard.inputs)
    if counts.bad_lines:
        logger.warning("left out %d of %d lines that hold no document", counts.bad_lines, counts.lines)
    if counts.kept == 0:
        partial.remove()
        raise no_text(partial.shard.inputs, key, counts, "--json-keys (--text-key when training)")


def lengths_of(partial: PartialShard) -> np.ndarray:
    """[documents] int32, in tokens, of those that are committed, mapped into memory."""
    return mapped_array(partial.paths[1], "<i4")


def publish_corpus(
    partial: PartialShard,
    dtype: np.dtype,
    parts: Sequence[Part],
    sidecar: Sidecar | None,
    vouchers: Sequence[Path] = (),
) -> None:
    """Makes PREFIX.json, .bin, .idx and, if lines were left out, .dropped.jsonl of the partial files; the .idx last.

    Args:
        partial: a shard with the outputs .bin and .idx, of which the first one is whole.
        parts: of the index.
        sidecar: None removes an old one.
        vouchers: records of an older corpus, which are removed.
    """
    prefix, tokens, dropped = partial.shard.record, partial.paths[0], partial.paths[-1]
    with published(prefix, tokens, dtype, parts):
        for path in vouchers:
            path.unlink(missing_ok=True)
        if sidecar is None:
            remove_sidecar(prefix)
        else:
            write_sidecar(prefix, sidecar)
        if partial.sizes[-1]:
            os.replace(dropped, append_suffix(prefix, DROPPED_SUFFIX))
        else:
            append_suffix(prefix, DROPPED_SUFFIX).unlink(missing_ok=True)
