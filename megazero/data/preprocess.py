"""Loose JSON to indexed tokens: parallel, in the order of the input, resumable, identical for any number of workers."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megazero.data.cache import key_of
from megazero.data.encoding import BlockEncoder, EncodedBlock
from megazero.data.jsonl import Block, read_blocks
from megazero.data.partial_output import PartialOutput, Position
from megazero.data.sidecar import Sidecar, check_free, read_sidecar
from megazero.data.tokenizer import Tokenizer
from megazero.data.workers import ordered_map
from megazero.files import append_suffix, fingerprint, is_compressed, locked

logger = logging.getLogger(__name__)

_ERRORS_KEPT = 20


@dataclass(frozen=True)
class TokenizeOptions:
    """How a run goes about it. Nothing here but `strict` changes what comes out.

    Attributes:
        workers: processes at most; None takes one per core that this process may use.
        strict: whether the first line that holds no document is an error; else such lines are counted and left out.
        log_interval: documents between log lines; 0 logs none.
        progress: whether a bar is drawn where standard error is a terminal.
        block_bytes: text that a worker takes at a time.
        commit_interval_s: seconds of work that a kill can cost at most.
    """

    workers: int | None = None
    strict: bool = False
    log_interval: int = 0
    progress: bool = True
    block_bytes: int = 1 << 21
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
    options: TokenizeOptions | None = None,
) -> Sidecar:
    """Writes PREFIX.bin, PREFIX.idx and PREFIX.json from files of JSON lines, and returns what is recorded of them.

    A finished run with the same input and settings is found and nothing is done; an unfinished one is continued; of several
    processes with the same prefix one works and the others wait for it.

    Args:
        inputs: plain, .gz, .xz or .zst files; one JSON object a line, one document an object.
        key: which entry is the text.
        append_eod: whether every document ends with the end-of-text token.

    Raises:
        FileNotFoundError: an input is missing.
        ValueError: no line holds a document; or one does not and `options.strict` is set; names file and line.
        RuntimeError: a worker process died.
    """
    options = options or TokenizeOptions()
    paths, prefix = [Path(path) for path in inputs], Path(prefix)
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"--input {path}: there is no such file")
    source = {
        "inputs": [{"name": path.name, **fingerprint(path)} for path in paths],
        "key": key,
        "append_eod": append_eod,
        "tokenizer_sha256": tokenizer.sha256,
    }
    if (done := _finished(prefix, source)) is not None:
        return done
    prefix.parent.mkdir(parents=True, exist_ok=True)
    check_free(prefix)
    with locked(append_suffix(prefix, ".lock")):
        if (done := _finished(prefix, source)) is not None:
            return done
        encoder = BlockEncoder(tokenizer, key, append_eod)
        output = PartialOutput(prefix, encoder.dtype, key_of(source))
        try:
            _run(paths, encoder, output, options)
            _check_result(output.position, paths, key)
            return _finish(output, tokenizer, source)
        except ValueError:  # the input is at fault, so there is nothing to continue
            output.remove()
            raise
        finally:
            output.close()


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finished(prefix: Path, source: dict[str, Any]) -> Sidecar | None:
    has_files = all(append_suffix(prefix, suffix).is_file() for suffix in (".bin", ".idx"))
    sidecar = read_sidecar(prefix) if has_files else None
    if sidecar is None or sidecar.source != source:
        return None
    logger.info("%s is there already, from the same input and settings", prefix)
    return sidecar


def _run(paths: list[Path], encoder: BlockEncoder, output: PartialOutput, options: TokenizeOptions) -> None:
    position = output.position
    blocks = _blocks(paths, position, options.block_bytes)
    report = _Report(paths, position, options)
    committed = time.monotonic()
    try:
        with closing(ordered_map(encoder, blocks, _worker_count(paths, options))) as results:
            for block, encoded in results:
                _count(position, block, encoded, options.strict)
                output.append(encoded.tokens, encoded.sizes)
                report.update(block.stop - block.start)
                if time.monotonic() - committed >= options.commit_interval_s:
                    output.commit()
                    committed = time.monotonic()
    finally:
        report.close()


def _worker_count(paths: list[Path], options: TokenizeOptions) -> int:
    if current_process().daemon:
        return 1  # such a process may not have children
    compression = 4  # at most, for text; a small file is done before a worker has started
    size = sum(path.stat().st_size * (compression if is_compressed(path) else 1) for path in paths)
    return min(options.workers or available_cores(), -(-size // options.block_bytes) or 1)


def _blocks(paths: list[Path], position: Position, block_bytes: int) -> Iterator[Block]:
    # The start is read now: the position moves on while blocks are still being handed out.
    first, offset = position.input, position.offset
    for number, path in enumerate(paths[first:], start=first):
        yield from read_blocks(path, block_bytes, offset if number == first else 0, number)


def _count(position: Position, block: Block, encoded: EncodedBlock, strict: bool) -> None:
    if block.file != position.input:
        position.input, position.line = block.file, 0
    for line, reason in encoded.errors:
        message = f"{block.path}:{position.line + line + 1}: {reason}"
        if strict:
            raise ValueError(f"{message}. Mend or remove the line, or drop --strict to leave such lines out.")
        if len(position.errors) < _ERRORS_KEPT:
            logger.warning("left out: %s", message)
            position.errors.append(message)
    position.offset = block.stop
    position.line += encoded.lines
    position.lines += encoded.lines
    position.documents += len(encoded.sizes)
    position.tokens += len(encoded.tokens)
    position.text_bytes += block.stop - block.start
    position.empty += encoded.empty
    position.bad += len(encoded.errors)


def _check_result(position: Position, paths: list[Path], key: str) -> None:
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
            "first_errors": position.errors,
        },
    )
    output.finish(sidecar)
    return sidecar


class _Report:
    """A bar on a terminal, log lines elsewhere: MB/s and tokens/s of this run (not of one that it continues)."""

    def __init__(self, paths: list[Path], position: Position, options: TokenizeOptions) -> None:
        self._position, self._interval = position, options.log_interval
        self._start, self._tokens, self._bytes = time.monotonic(), position.tokens, position.text_bytes
        self._next_log = position.documents + self._interval
        total = None if any(map(is_compressed, paths)) else sum(path.stat().st_size for path in paths)
        self._bar = tqdm(
            total=total,
            initial=position.text_bytes,
            unit="B",
            unit_scale=True,
            desc="tokenizing",
            disable=not (options.progress and sys.stderr.isatty()),
        )

    def update(self, text_bytes: int) -> None:
        """Counts a block."""
        self._bar.update(text_bytes)
        seconds = max(time.monotonic() - self._start, 1e-9)
        tokens_per_s = (self._position.tokens - self._tokens) / seconds
        self._bar.set_postfix_str(f"{tokens_per_s / 1e6:.2f}M tokens/s", refresh=False)
        if self._interval and self._bar.disable and self._position.documents >= self._next_log:
            self._next_log = self._position.documents + self._interval
            mb_per_s = (self._position.text_bytes - self._bytes) / seconds / 1e6
            logger.info(
                "%d documents, %d tokens: %.1f MB/s, %.0f tokens/s",
                self._position.documents,
                self._position.tokens,
                mb_per_s,
                tokens_per_s,
            )

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()
