"""Loose JSON to indexed tokens: parallel, in the order of the input, resumable, identical for any number of workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from megazero.data.cache import key_of
from megazero.data.contents import describe_files
from megazero.data.encoding import SURROGATES, BlockEncoder, EncodedBlock, Surrogates
from megazero.data.journal import check_ours, full_disk_named
from megazero.data.jsonl import (
    MAX_LINE_BYTES,
    Block,
    check_strict,
    complain,
    expected_text_bytes,
    left_out,
    read_blocks,
)
from megazero.data.partial_output import JOURNAL_SUFFIX, CountedPosition, PartialOutput
from megazero.data.progress import Progress
from megazero.data.sidecar import Sidecar, check_free, read_sidecar, sidecar_path
from megazero.data.tokenizer import Tokenizer
from megazero.data.workers import available_cores, ordered_map
from megazero.files import append_suffix, locked

logger = logging.getLogger(__name__)

BlockReader = Callable[..., Iterator[Block]]
"""Called as (path, block_bytes, start, file_number, max_line_bytes); `read_blocks` is one."""
FileDescriber = Callable[[Sequence[Path]], list[dict[str, Any]]]
"""What tells one version of the input files from another, as JSON values; `describe_files` is one."""


@dataclass(frozen=True)
class TokenizeOptions:
    """How a run goes about it. Nothing here but `max_line_bytes` and `strict` changes what comes out.

    Attributes:
        workers: processes at most; None takes one per core that this process may use.
        strict: whether the first line that holds no document is an error; else such lines are counted and left out.
        log_interval: documents between log lines; 0 logs none.
        progress: whether a bar is drawn where standard error is a terminal.
        block_bytes: text that a worker takes at a time.
        max_line_bytes: longer lines are not read: they count as lines that hold no document.
        commit_interval_s: seconds of work that a kill can cost at most.
    """

    workers: int | None = None
    strict: bool = False
    log_interval: int = 0
    progress: bool = True
    block_bytes: int = 1 << 21
    max_line_bytes: int = MAX_LINE_BYTES
    commit_interval_s: float = 2.0

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {self.workers}")


def tokenize_json(
    inputs: Sequence[str | Path],
    prefix: str | Path,
    tokenizer: Tokenizer,
    *,
    key: str = "text",
    append_eod: bool = True,
    surrogates: Surrogates = "replace",
    options: TokenizeOptions | None = None,
    blocks: BlockReader = read_blocks,
    describe: FileDescriber = describe_files,
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
        describe: decides what counts as the same input.

    Raises:
        FileNotFoundError: an input is missing.
        ValueError: no line holds a document; or one does not and `options.strict` is set; names file and line.
        RuntimeError: a worker process died.
    """
    options = options or TokenizeOptions()
    paths, prefix = [Path(path) for path in inputs], Path(prefix)
    if surrogates not in SURROGATES:
        raise ValueError(f"--surrogates {surrogates!r} is not one of {', '.join(SURROGATES)}")
    source = {
        "inputs": describe(paths),
        "key": key,
        "append_eod": append_eod,
        "surrogates": surrogates,
        "max_line_bytes": options.max_line_bytes,
        "tokenizer_sha256": tokenizer.sha256,
    }
    if (done := _finished(prefix, source, options.strict)) is not None:
        return done
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with locked(append_suffix(prefix, ".lock")), full_disk_named(f"{prefix}.*"):
        encoder = BlockEncoder(tokenizer, key, append_eod, surrogates)
        return _finished(prefix, source, options.strict) or _make(
            paths, prefix, encoder, source, options, blocks, describe
        )


def _make(
    paths: list[Path],
    prefix: Path,
    encoder: BlockEncoder,
    source: dict[str, Any],
    options: TokenizeOptions,
    blocks: BlockReader,
    describe: FileDescriber,
) -> Sidecar:
    check_free(prefix)
    outputs = [append_suffix(prefix, suffix) for suffix in (".bin", ".idx")]
    check_ours(outputs, "--output-prefix", sidecar_path(prefix), append_suffix(prefix, JOURNAL_SUFFIX))
    output = PartialOutput(prefix, encoder.dtype, key_of(source))
    try:
        _run(paths, encoder, output, options, blocks)
        _check_result(output.position, paths, encoder.key)
        if describe(paths) != source["inputs"]:
            raise ValueError(f"{', '.join(map(str, paths))}: changed while it was read. Start again.")
        return _finish(output, encoder.tokenizer, source)
    except ValueError:  # the input is at fault, so there is nothing to continue
        output.remove()
        raise
    finally:
        output.close()


def _finished(prefix: Path, source: dict[str, Any], strict: bool) -> Sidecar | None:
    has_files = all(append_suffix(prefix, suffix).is_file() for suffix in (".bin", ".idx"))
    sidecar = read_sidecar(prefix) if has_files else None
    if sidecar is None or sidecar.source != source:
        return None
    check_strict(sidecar.statistics["first_errors"], strict, f"when {prefix} was made")
    logger.info("%s is there already, from the same input and settings", prefix)
    return sidecar


def _run(
    paths: list[Path], encoder: BlockEncoder, output: PartialOutput, options: TokenizeOptions, reader: BlockReader
) -> None:
    position = output.position
    check_strict(position.errors, options.strict, "before the run was stopped")
    blocks = _blocks(position.remaining(paths), options, reader)  # the position moves on while blocks are handed out
    total = sum(path.stat().st_size for path in paths)
    shown = Progress("tokenizing", total, log_documents=options.log_interval, is_shown=options.progress)
    with closing(shown) as progress:
        progress.skip(position.disk_bytes_of(paths))
        with closing(ordered_map(encoder, blocks, _worker_count(paths, options))) as results:
            for block, encoded in results:
                output.append(encoded.tokens, encoded.sizes, _count(position, block, encoded, options.strict))
                text_bytes = block.stop - block.start
                progress.update(len(encoded.sizes), text_bytes, block.disk_bytes, len(encoded.tokens))
                output.commit(options.commit_interval_s)


def _worker_count(paths: list[Path], options: TokenizeOptions) -> int:
    if current_process().daemon:
        return 1  # such a process may not have children
    blocks = -(-expected_text_bytes(paths) // options.block_bytes)  # a small file is done before a worker has started
    return min(options.workers or available_cores(), blocks or 1)


def _blocks(files: list[tuple[int, Path, int]], options: TokenizeOptions, reader: BlockReader) -> Iterator[Block]:
    for number, path, start in files:
        yield from reader(path, options.block_bytes, start, number, options.max_line_bytes)


def _count(position: CountedPosition, block: Block, encoded: EncodedBlock, strict: bool) -> bytes:
    """Moves `position` behind the block; the record of the lines left out."""
    before = position.advance(block, encoded.lines)
    records = []
    for line in encoded.left_out:
        number = before + line.line + 1
        if line.fault is None:
            position.empty += 1
        else:
            position.bad += 1
            complain(f"{block.path}:{number}: {line.fault}", position.errors, strict)
        reason = "no text" if line.fault is None else "bad line"
        records.append(left_out(block.path, number, line.identity, reason, line.fault))
    position.lines += encoded.lines
    position.documents += len(encoded.sizes)
    position.tokens += len(encoded.tokens)
    position.text_bytes += block.stop - block.start
    position.replaced += encoded.replaced
    return b"".join(records)


def _check_result(position: CountedPosition, paths: list[Path], key: str) -> None:
    if position.bad:
        logger.warning("left out %d of %d lines that hold no document", position.bad, position.lines)
    if position.documents == 0:
        why = f"; the first: {position.errors[0]}" if position.errors else ""
        raise ValueError(
            f"no line of {', '.join(map(str, paths))} holds a text under the key {key!r}: {position.lines} lines, {position.bad} "
            f"bad, {position.empty} without text{why}. Name the key with --json-keys (--text-key when training)."
        )


def _finish(output: PartialOutput, tokenizer: Tokenizer, source: dict[str, Any]) -> Sidecar:
    position = output.position
    sidecar = Sidecar(
        tokenizer_type=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        documents=position.documents,
        tokens=position.tokens,
        source=source,
        statistics={
            "lines": position.lines,
            "text_bytes": position.text_bytes,
            "bad_lines": position.bad,
            "empty_documents": position.empty,
            "surrogates_replaced": position.replaced,
            "first_errors": position.errors,
        },
    )
    output.finish(sidecar)
    return sidecar
