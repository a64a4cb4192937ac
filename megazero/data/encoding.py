"""Blocks of JSON lines turned into tokens by any number of worker processes, in the order of the input."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megazero.data.jsonl import Block, LineError, block_lines, read_document
from megazero.data.mmidx import token_dtype
from megazero.data.tokenizer import Tokenizer

K = TypeVar("K")
_BLOCKS_PER_WORKER = 3  # one in work, one waiting, one done: nobody idles, and memory stays bounded


@dataclass
class EncodedBlock:
    """The documents of one block.

    Attributes:
        tokens: all of them end to end, in the dtype that they are stored in.
        sizes: [documents] int32, tokens per document.
        lines: lines in the block, blank ones included.
        empty: documents without text, left out.
        errors: (number of the line within the block, from 0; reason) for each line that holds no document.
    """

    tokens: np.ndarray
    sizes: npt.NDArray[np.int32]
    lines: int
    empty: int = 0
    errors: list[tuple[int, str]] = field(default_factory=list)


class BlockEncoder:
    """Turns a block into tokens.

    Args:
        key: which entry of each JSON object is the text.
        append_eod: whether every document ends with the end-of-text token.
    """

    def __init__(self, tokenizer: Tokenizer, key: str, append_eod: bool) -> None:
        self.tokenizer, self.key = tokenizer, key
        self.dtype = token_dtype(tokenizer.vocab_size)
        self._end = np.full(int(append_eod), tokenizer.eod, dtype=self.dtype)

    def __call__(self, block: Block) -> EncodedBlock:
        """The documents of `block`; lines that hold none are reported in `errors`."""
        lines = block_lines(block)
        pieces: list[np.ndarray] = []
        sizes: list[int] = []
        encoded = EncodedBlock(np.empty(0, self.dtype), np.empty(0, np.int32), len(lines))
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                ids = self._encode(read_document(line, self.key))
            except LineError as error:
                encoded.errors.append((number, str(error)))
                continue
            if len(ids) == 0:
                encoded.empty += 1
                continue
            pieces += (ids, self._end)
            sizes.append(len(ids) + len(self._end))
        if pieces:
            encoded.tokens = np.concatenate(pieces, dtype=self.dtype, casting="unsafe")
            encoded.sizes = np.asarray(sizes, dtype=np.int32)
        return encoded

    def _encode(self, text: str) -> npt.NDArray[np.integer]:
        try:
            return self.tokenizer.encode_array(text)
        except ValueError as error:  # the pattern of a BPE can give up on megabytes of white space
            raise LineError(f"the text cannot be tokenized: {error}") from error


def encode_blocks(
    encoder: BlockEncoder, blocks: Iterable[tuple[K, Block]], workers: int
) -> Generator[tuple[K, Block, EncodedBlock], None, None]:
    """Each block with its label and its documents, in the order of `blocks`; with one worker in this process itself.

    Raises:
        RuntimeError: a worker process died.
    """
    if workers == 1:
        for label, block in blocks:
            yield label, block, encoder(block)
        return
    waiting: deque[tuple[K, Block, Future[EncodedBlock]]] = deque()
    with _executor(encoder, workers) as executor:
        for label, block in blocks:
            waiting.append((label, block, executor.submit(_encode_in_worker, block)))
            if len(waiting) >= _BLOCKS_PER_WORKER * workers:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)


def _first(waiting: deque[tuple[K, Block, Future[EncodedBlock]]]) -> tuple[K, Block, EncodedBlock]:
    label, block, future = waiting.popleft()
    try:
        return label, block, future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker process died, perhaps for want of memory. Start again (what is done is kept), with fewer --workers."
        ) from error


@contextmanager
def _executor(encoder: BlockEncoder, workers: int) -> Iterator[ProcessPoolExecutor]:
    # forkserver: a plain fork would copy the locks of this process's threads (torch, tqdm) in whatever state they are.
    executor = ProcessPoolExecutor(workers, get_context("forkserver"), initializer=_start_worker, initargs=(encoder,))
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


_encoder: BlockEncoder | None = None  # of this worker process


def _start_worker(encoder: BlockEncoder) -> None:
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: BaseProcess) -> None:
    # A killed parent tells nobody, and its workers would wait for work forever.
    parent.join()
    os._exit(1)


def _encode_in_worker(block: Block) -> EncodedBlock:
    assert _encoder is not None
    return _encoder(block)
