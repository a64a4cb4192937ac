"""Joins tokenized corpora (.bin/.idx) into one: every sequence and every document boundary of the inputs is kept, in their order.

    python -m data_tools merge_datasets --input data/part0 data/part1 --output-prefix data/whole

A folder stands for all pairs in it but the output, sorted by name. The inputs must be of one dtype and, where they record it,
of one tokenizer. Tokens are copied as bytes, and the index is written in pieces: the time is that of the disk, and the memory the
same for any size, so there is no --memory. What is there already, from the same inputs, is not made again; a killed run goes on
copying where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a checkout that is not installed

from data_tools.done_marker import check_made_here, marker_path, read_marker, write_marker
from data_tools.inputs import check_named_once
from megazero.data.corpora import find_corpora, refuse_unfinished
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.preprocess import publish_corpus
from megazero.data.sidecar import Sidecar, check_free, check_tokens, lack_of_record, read_sidecar
from megazero.files import append_suffix, locked
from megazero.lines.contents import describe_files, key_of
from megazero.lines.outputs import full_disk_named
from megazero.lines.partial_shard import PartialShard, Shard, give_up
from megazero.lines.results import BlockResult, Counts
from megazero.lines.resumable import Item, WorkOptions, fill_one, read_pieces

logger = logging.getLogger(__name__)

_COPY_BYTES = 1 << 24


def find_prefixes(inputs: Sequence[str | Path], output: Path | None = None) -> list[Path]:
    """The prefixes that the values of --input stand for: pairs by any of their names, and folders of pairs.

    `output` is the prefix of what is made of them, which may lie in one of the folders: there it is no input.

    Raises:
        FileNotFoundError: there is no such pair or folder, or a folder holds none.
        ValueError: a value names a file of another kind, a pair is named twice, or one in a folder is not finished.
    """
    prefixes: list[Path] = []
    for value in map(str, inputs):  # as it was written: a path drops the ./ by which ./7 is no weight
        entry = Path(value)
        if entry.is_dir():
            refuse_unfinished(entry, own=output)
            found = sorted(path.with_name(path.name.removesuffix(".idx")) for path in entry.glob("*.idx"))
            found = [prefix for prefix in found if output is None or prefix.resolve() != output.resolve()]
            if not found:
                raise FileNotFoundError(
                    f"--input {entry}: the folder holds no .idx. Name the prefix of a .bin/.idx pair."
                )
            prefixes += found
            continue
        for corpus in find_corpora([value], "--input"):
            if not corpus.is_indexed:
                raise ValueError(
                    f"--input {entry} is text, not tokens. Tokenize it first: python -m data_tools tokenize"
                )
            prefixes.append(corpus.path)
    check_named_once(prefixes)
    return prefixes


def merge_datasets(inputs: Sequence[str | Path], output_prefix: str | Path) -> dict[str, Any]:
    """Writes OUTPUT_PREFIX.bin and .idx, and .json where all inputs have one, and returns what they hold.

    Raises:
        FileNotFoundError: an input is missing.
        ValueError: an input is damaged, or the inputs differ in dtype or tokenizer; or the output is one of them, or is there
            and was not made here.
    """
    output = Path(output_prefix)
    sources = [IndexedDataset(prefix) for prefix in find_prefixes(inputs, output)]
    _check_output(sources, output)
    _check_dtype(sources)
    contents = describe_files(_files(sources))
    documents, tokens = sum(len(source.doc_idx) - 1 for source in sources), sum(source.num_tokens for source in sources)
    record = _known_record(sources)
    if record is not None:
        record = replace(record, documents=documents, tokens=tokens, source={"merged": contents}, statistics={})
    key = key_of({"step": "merge_datasets", "inputs": contents, "tokenizer": record and record.tokenizer_sha256})
    result = {
        "prefix": str(output),
        "inputs": len(sources),
        "documents": documents,
        "sequences": sum(len(source) for source in sources),
        "tokens": tokens,
        "dtype": str(sources[0].dtype),
    }
    outputs = (append_suffix(output, ".bin"), append_suffix(output, ".idx"))
    output.parent.mkdir(parents=True, exist_ok=True)
    with locked(append_suffix(output, ".lock")), full_disk_named(f"{output}.*"):
        shard = Shard(tuple(source.bin_path for source in sources), outputs, output)
        is_done = read_marker(output, key, outputs) is not None and read_sidecar(output) == record
        if is_done:
            give_up(shard)
            logger.info("%s is there already, from the same inputs", output)
        else:
            check_free(output)
            check_made_here(output, outputs, "--output-prefix")
            with closing(PartialShard(shard, key)) as partial:
                _copy(partial, documents)
                partial.check_unchanged(_files(sources), contents)
                parts = [(source.sizes, source.doc_idx) for source in sources]
                publish_corpus(partial, sources[0].dtype, parts, record, [marker_path(output)])
                write_marker(output, key, outputs, {"result": result})
                partial.remove()
    return {**result, "skipped": is_done}


def _check_output(sources: Sequence[IndexedDataset], output: Path) -> None:
    for source in sources:
        if source.prefix.resolve() == output.resolve():
            raise ValueError(
                f"--output-prefix {output} is one of the inputs, which would be overwritten while it is read. Choose another "
                "prefix."
            )


def _check_dtype(sources: Sequence[IndexedDataset]) -> None:
    first = sources[0]
    for source in sources[1:]:
        if source.dtype != first.dtype:
            raise ValueError(
                f"{source.prefix} stores {source.dtype}, {first.prefix} {first.dtype}: they were made with vocabularies of "
                "different sizes and cannot be joined. Tokenize one of them again with the other's vocabulary."
            )


def _known_record(sources: Sequence[IndexedDataset]) -> Sidecar | None:
    """The record of the first input; None where one has none, since the merged corpus then cannot be vouched for."""
    records = [(source, read_sidecar(source.prefix)) for source in sources]
    known = [(source, record) for source, record in records if record is not None]
    for source, record in known:
        first, of_first = known[0]
        if record.tokenizer_sha256 != of_first.tokenizer_sha256:
            raise ValueError(
                f"{source.prefix} was tokenized with {record.tokenizer}, {first.prefix} with {of_first.tokenizer}: the same "
                "id would mean two different things. Tokenize one of them again with the other's vocabulary."
            )
        check_tokens(source.prefix, record, source.num_tokens)
    if unknown := [source.prefix for source, record in records if record is None]:
        why = lack_of_record(unknown[0])
        logger.warning("%s does not record its tokenizer (%s): neither will the merged corpus", unknown[0], why)
        return None
    return known[0][1]


def _files(sources: Sequence[IndexedDataset]) -> list[Path]:
    return [path for source in sources for path in (source.bin_path, source.index_path)]


def copy_block(documents_per_byte: float, item: Item) -> BlockResult:
    """A piece of a .bin as it is, with about how many documents are in it."""
    data = item[1].read()
    counts = Counts(documents=round(documents_per_byte * len(data)), text_bytes_in=len(data))
    return BlockResult([data, b""], counts)


def _copy(partial: PartialShard, documents: int) -> None:
    """Puts the tokens of all sources together, without the first ones, which an earlier run has copied."""
    total = sum(path.stat().st_size for path in partial.shard.inputs)
    work, options = functools.partial(copy_block, documents / max(total, 1)), WorkOptions(1, block_bytes=_COPY_BYTES)
    fill_one(partial, work, options, "merging", read_pieces)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    parser.add_argument(
        "--input", nargs="+", required=True, help="prefixes of .bin/.idx pairs, or folders of pairs; in this order"
    )
    parser.add_argument("--output-prefix", required=True, help="files are OUTPUT_PREFIX.bin, .idx and .json")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Merges, and returns the statistics."""
    return merge_datasets(args.input, args.output_prefix)


if __name__ == "__main__":
    from data_tools.megatron_names import run_script

    run_script("merge_datasets")
