"""Corpora opened for training: text is tokenized at its first use, and tokens are checked against the tokenizer."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megazero.data.cache import ArrayCache, Arrays, UnwritableCacheError
from megazero.data.corpora import Corpus
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.preprocess import tokenize_json
from megazero.data.sidecar import check_tokenizer, lack_of_record
from megazero.data.tokenizer import Tokenizer
from megazero.files import fingerprint
from megazero.lines.contents import describe_files, key_of, shows_changes

logger = logging.getLogger(__name__)


class Sources:
    """The corpora of one job; each is opened and checked once.

    Args:
        tokenizer: the one that the job uses.
        text_key: which entry of JSON lines is the text.
        cache_path: folder for tokenized JSON and index arrays; None takes cache/ beside the data.
        rank: of this process; 0 is the first to open them, and the one that warns.
        local_rank: of this process on its machine, whose cache may be its own: 0 checks it, and says so if it is.
    """

    def __init__(self, tokenizer: Tokenizer, text_key: str, cache_path: str | None, rank: int, local_rank: int) -> None:
        self.tokenizer, self.text_key, self.cache_path = tokenizer, text_key, cache_path
        self.rank, self.local_rank = rank, local_rank
        self._caches: dict[Path, ArrayCache] = {}
        self._opened: dict[Path, IndexedDataset] = {}

    def cache(self, data_folder: Path) -> ArrayCache:
        """Where index arrays of the data in a folder are stored."""
        folder = self._cache_folder(data_folder)
        is_first_here = self.local_rank == 0
        cache = ArrayCache(folder, is_expected=self.rank != 0 and is_first_here, is_checked=not is_first_here)
        return self._caches.setdefault(folder, cache)

    def open(self, corpus: Corpus) -> IndexedDataset:
        """The tokens of a corpus.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, was made with another tokenizer, holds ids beyond its vocabulary, or has no text.
        """
        if corpus.path not in self._opened:
            source = IndexedDataset(corpus.path if corpus.is_indexed else self._tokenized(corpus.path))
            if not check_tokenizer(source.prefix, source.num_tokens, self.tokenizer) and self.rank == 0:
                logger.warning(
                    "%s does not record its tokenizer (%s): cannot check that it was made with this %s of %d entries",
                    source.prefix,
                    lack_of_record(source.prefix),
                    self.tokenizer.name,
                    self.tokenizer.vocab_size,
                )
            self._check_ids(source)
            self._opened[corpus.path] = source
        return self._opened[corpus.path]

    def _cache_folder(self, data_folder: Path) -> Path:
        return Path(self.cache_path or data_folder / "cache")

    def _tokenized(self, path: Path) -> Path:
        """The prefix of the tokens of a JSON file, made at its first use and kept for others."""
        folder = self._cache_folder(path.parent)
        contents = ArrayCache(folder)

        def describe(paths: Sequence[Path]) -> list[dict[str, Any]]:
            return [_described(path, contents) for path in paths]

        content = {"inputs": describe([path]), "key": self.text_key, "tokenizer": self.tokenizer.sha256}
        prefix = folder / f"{path.name.split('.')[0]}-{key_of(content)[:16]}_{self.text_key}_document"
        try:
            tokenize_json([path], prefix, self.tokenizer, key=self.text_key, log_interval=100_000, describe=describe)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise ValueError(
                f"cannot store the tokens of {path} in {folder}: {error}. Choose a folder that this job can write with "
                "--data-cache-path."
            ) from error
        return prefix

    def _check_ids(self, source: IndexedDataset) -> None:
        """Every token has an entry in the vocabulary; the range of ids is found once and then remembered."""
        vocab_size = self.tokenizer.vocab_size
        if np.iinfo(source.dtype).min >= 0 and np.iinfo(source.dtype).max < vocab_size:
            return
        description: dict[str, Any] = {
            "kind": "ids",
            "name": source.prefix.name,
            "corpus": str(source.prefix.resolve()),
            "corpus_index": source.fingerprint,
            "bin": fingerprint(source.bin_path),
        }

        def build() -> dict[str, np.ndarray]:
            return {"range": np.array(source.token_range(), dtype=np.int64)}

        low, high = _remembered(self.cache(source.prefix.parent), description, build)["range"].tolist()
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{source.bin_path} holds token ids from {low} to {high}, but {self.tokenizer.name} has {vocab_size} entries "
                f"(0 to {vocab_size - 1}). Give the vocabulary that made the data, or tokenize it again."
            )


def _remembered(cache: ArrayCache, description: dict[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """What `build` finds in a file, which is read again by each process where the cache cannot be written.

    That ends no job: in a read-only copy of the data, all else that the job needs may be there.
    """
    try:
        return cache.load_or_build(description, build)
    except UnwritableCacheError as error:
        logger.warning("reading all of %s, since what is known of it cannot be stored: %s", description["name"], error)
        return build()


def _described(path: Path, cache: ArrayCache) -> dict[str, Any]:
    """As `describe_files` of one file, but whoever shares the cache reads it once, unless somebody touches it."""
    stat = path.stat()
    if not shows_changes(stat.st_ctime_ns):
        return describe_files([path])[0]
    # Without the device, which machines that share a folder number differently.
    identity = {"inode": stat.st_ino, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}

    def build() -> dict[str, np.ndarray]:
        return {"sha256": np.frombuffer(bytes.fromhex(describe_files([path])[0]["pieces_sha256"]), np.uint8)}

    description = {"kind": "content", "name": path.name, "bytes": stat.st_size, **identity}
    digest = _remembered(cache, description, build)["sha256"]
    return {"name": path.name, "bytes": stat.st_size, "pieces_sha256": digest.tobytes().hex()}
