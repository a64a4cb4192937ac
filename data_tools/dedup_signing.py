"""The first pass of deduplication: the inputs' signatures, in parallel, in order, resumable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.dedup_minhash import VERSION, signatures
from data_tools.dedup_signatures import SignatureFiles, ids_path, row_type
from data_tools.documents import document_id
from data_tools.options import RunOptions
from data_tools.shards import run_blocks
from megazero.lines.contents import key_of
from megazero.lines.partial_shard import Shard
from megazero.lines.results import BlockResult, read_documents
from megazero.lines.resumable import Item


def sign(
    inputs: Sequence[Path],
    folder: Path,
    key: str,
    permutations: int,
    options: RunOptions,
    id_keys: Sequence[str],
    reports: bool,
) -> tuple[SignatureFiles, dict[str, Any]]:
    """The signatures of all documents, and statistics; those of inputs that are in `folder` already are not made again.

    Args:
        key: which entry of a document is its text.
        id_keys: which entries name it.
        reports: whether lines that hold no document are reported and listed; not where a later pass does so.

    Raises:
        ValueError: an input is damaged, or a line holds no document and `options.strict` is set.
        RuntimeError: a worker process died; OSError: the disk is full. In both cases what was committed is kept.
    """
    shards = []
    for path in inputs:
        # Inputs of several folders can have the same name.
        rows = folder / f"{path.name}.{key_of({'path': str(path)})[:8]}.signatures"
        shards.append(Shard((path,), (rows, ids_path(rows)), rows))
    settings: dict[str, Any] = {
        "key": key,
        "version": VERSION,
        "permutations": permutations,
        "id_keys": list(id_keys),
        "reports": reports,
    }
    signer = BlockSigner(key, permutations, options.strict or reports, id_keys)
    statistics = run_blocks("dedup signatures", shards, signer, settings, options, place=signer.place)
    return SignatureFiles([shard.outputs[0] for shard in shards], permutations), statistics


class BlockSigner:
    """The signatures of the documents of a block, and their ids: a `BlockWork`.

    Args:
        reports: whether lines that hold no document are handed on, to be complained about.
    """

    def __init__(self, key: str, permutations: int, reports: bool, id_keys: Sequence[str]) -> None:
        self._key, self._permutations, self._reports, self._id_keys = key, permutations, reports, tuple(id_keys)

    def __call__(self, item: Item) -> BlockResult:
        """Rows, in which `id_start` counts from the first id of the block, and ids."""
        texts, ids, starts = [], [], []
        result = BlockResult()
        for _, offset, _, document in read_documents(item[1], self._key, result):
            texts.append(document[self._key])
            ids.append(document_id(document, self._key, self._id_keys).encode("utf-8", "surrogatepass"))
            starts.append(offset)
        result.counts.documents = len(texts)
        if not self._reports:
            result.removed.clear()
        rows = np.empty(len(texts), dtype=row_type(self._permutations))
        rows["content"], rows["minima"] = signatures(texts, self._permutations)
        rows["line_start"], rows["id_bytes"] = starts, [len(identity) for identity in ids]
        rows["id_start"] = np.cumsum(rows["id_bytes"], dtype=np.int64) - rows["id_bytes"]
        result.frames = [rows.tobytes(), b"".join(ids)]
        return result

    def place(self, output_bytes: list[int], frames: list[bytes]) -> list[bytes]:
        """Rows whose `id_start` counts from the beginning of the file of ids."""
        rows = np.frombuffer(frames[0], dtype=row_type(self._permutations)).copy()
        rows["id_start"] += output_bytes[1]
        return [rows.tobytes(), frames[1]]
