"""From flags to datasets: corpora are found, tokenized where they are text, checked, split, sampled and blended."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from megazero.data.blend import BlendedDataset, BlendOrder
from megazero.data.corpora import Corpus, find_corpora, find_sets, has_split_off
from megazero.data.gpt2_dataset import GPT2Dataset
from megazero.data.gpt2_index import num_epochs, parse_split, samples_of, split_ranges
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import check_tokenizer
from megazero.data.sources import Sources
from megazero.data.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer
from megazero.logging import ALIKE, counted, get_logger, some
from megazero.option import check_options, option

logger = get_logger(__name__)

Dataset = GPT2Dataset | BlendedDataset
_Sets = dict[str, list[Corpus]]  # by name
_PARTS = ("train", "valid", "test")
NO_TRAINING_DATA = "The training split is empty: give --train-data, and a first share above 0 in --split."


TOKENIZER_FLAGS = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_path")  # what makes a vocabulary


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from, how it is divided, and which tokenizer reads it."""

    train_data: list[str] | None = option(
        None,
        "prefixes of .bin/.idx files, JSON lines (.json, .jsonl, also .gz, .xz, .zst), or the names webtext and wikipedia "
        "(in data/); several are mixed in proportion to their sizes, or to weights before them: 0.3 data/a 0.7 data/b",
        aliases=("--data-path",),
        per_host=True,
    )
    valid_data: list[str] | None = option(
        None,
        "separate validation data, instead of a part of --train-data; sets with names have losses of their own: code=data/a "
        "web=data/b data/c",
        per_host=True,
    )
    test_data: list[str] | None = option(
        None, "separate test data, instead of a part of --train-data; as --valid-data", per_host=True
    )
    split: str = option("1000,1,1", "shares of --train-data for training, validation and test, in documents")
    seq_length: int = option(512, "tokens per sample", at_least=1)
    data_cache_path: str | None = option(
        None,
        "folder for index arrays and tokenized JSON (default: cache/ next to the data)",
        aliases=("--cache-dir",),
        per_host=True,
    )
    tokenizer_type: str = option("GPT2BPETokenizer", "kind of vocabulary", choices=TOKENIZER_TYPES)
    vocab_file: str | None = option(None, "GPT-2's encoder.json, also known as vocab.json", per_host=True)
    merge_file: str | None = option(None, "GPT-2's vocab.bpe, also known as merges.txt", per_host=True)
    tokenizer_path: str | None = option(
        None, "vocabulary file (*.model, tokenizer.json), or the folder that holds it", per_host=True
    )
    text_key: str = option("text", "key of the text in each JSON line")
    num_workers: int = option(
        2,
        "processes per rank that read samples ahead; 0: the training process reads them",
        at_least=0,
        at_most=256,
        per_host=True,
    )

    def __post_init__(self) -> None:
        check_options(self)
        parse_split(self.split)


def build_tokenizer_from(flags: DataConfig | Namespace) -> Tokenizer:
    """The tokenizer that the flags name; raises as `build_tokenizer` does."""
    return build_tokenizer(**{flag: getattr(flags, flag) for flag in TOKENIZER_FLAGS})


def check_data(config: DataConfig, tokenizer: Tokenizer, trains: bool, evaluates: bool) -> None:
    """Finds what the flags name and checks its headers, its vocabulary and --split; reads no text and communicates nothing.

    What loose JSON holds is known when it is tokenized, and checked then.

    Args:
        trains: whether there must be training data.
        evaluates: whether validation and test data are needed.

    Raises:
        FileNotFoundError: a corpus is missing.
        ValueError: a file is truncated or foreign, or was made with another tokenizer, or a split is empty.
    """
    if trains and not (config.train_data and parse_split(config.split)[0]):
        raise ValueError(NO_TRAINING_DATA)
    sources: dict[Path, IndexedDataset] = {}  # the same one serves all parts that --split cuts off it
    for part, (sets, shares) in enumerate(_parts(config)):
        for corpus in chain(*sets.values()):
            if not corpus.is_indexed:
                continue
            if corpus.path not in sources:
                source = sources[corpus.path] = IndexedDataset(corpus.path)
                check_tokenizer(source.prefix, source.num_tokens, tokenizer)
            if shares[part] and (evaluates or part == 0):
                _documents(config, sources[corpus.path], shares, part)


def build_datasets(
    config: DataConfig,
    tokenizer: Tokenizer,
    num_samples: tuple[int, int, int],
    seed: int,
    rank: int = 0,
    meet: Callable[[str], object] = lambda what: None,
    local_rank: int = 0,
) -> tuple[Dataset | None, dict[str, Dataset], dict[str, Dataset]]:
    """The training, validation and test data; every rank calls this.

    Rank 0 builds first and stores everything; then the others find it, or build the same themselves where the cache is not
    shared between machines, which takes them as long: so all meet once more. A rank that fails tells the others.

    Args:
        num_samples: needed of each dataset at least; the data is repeated for as many epochs as that takes.
        seed: of all orders; the same on every rank.
        rank: of this process among all.
        meet: returns when all ranks have called it with the same words; a RuntimeError where they differ.
        local_rank: of this process on its machine.

    Returns:
        A map-style dataset to train on, and those of validation and of tests by the names of their sets, "" for one without a
        name; None, or none, where no samples are asked for, no data is given, or the weight in --split is 0.

    Raises:
        FileNotFoundError: a corpus is missing.
        ValueError: files are damaged or made with another tokenizer, a split is empty, or the cache cannot be written.
        RuntimeError: another rank has failed.
    """
    sources = Sources(tokenizer, config.text_key, config.data_cache_path, rank, local_rank)

    def build() -> tuple[Dataset | None, dict[str, Dataset], dict[str, Dataset]]:
        parts = list(_parts(config))
        _warn_of_training_data(parts, num_samples)
        train, valid, test = (
            {
                name: _dataset(config, sources, seed, corpora, shares, part, num_samples[part])
                for name, corpora in sets.items()
                if num_samples[part] > 0 and shares[part]
            }
            for part, (sets, shares) in enumerate(parts)
        )
        return train.get(""), valid, test

    if rank != 0:
        meet("the first rank has built its data")
    try:
        built = build()
    except BaseException as error:
        with suppress(RuntimeError):  # which tells the others
            meet(f"building the data failed ({error})")
        raise
    if rank == 0:
        meet("the first rank has built its data")
    meet("all ranks have built their data")
    return built


def _warn_of_training_data(parts: list[tuple[_Sets, list[float]]], num_samples: Sequence[int]) -> None:
    """Warns if --valid-data or --test-data name what a run trains on: such a loss says nothing of other text."""
    paths = [
        {c.path.resolve(): str(c.path) for c in chain(*sets.values()) if shares[part] and num_samples[part]}
        for part, (sets, shares) in enumerate(parts)
    ]
    for part in (1, 2):
        both = [path for place, path in paths[part].items() if place in paths[0]]
        if both and parts[part][1][part] == 1:  # else it is what --split cuts off
            logger.warning(
                "--%s-data names what --train-data names too: %s; its loss is one of text that the model has seen",
                *(_PARTS[part], ", ".join(both)),
                extra=ALIKE,
            )


def _dataset(
    config: DataConfig, sources: Sources, seed: int, corpora: list[Corpus], shares: list[float], part: int, samples: int
) -> Dataset:
    name = _PARTS[part]
    opened = [sources.open(corpus) for corpus in corpora]
    ranges = [_documents(config, source, shares, part) for source in opened]
    tokens = [int(source.sizes[slice(*own)].sum(dtype=np.int64)) for source, own in zip(opened, ranges, strict=True)]
    order, counts = None, [samples]
    if len(opened) > 1:
        weights = [corpus.weight or float(count) for corpus, count in zip(corpora, tokens, strict=True)]
        order = BlendOrder(weights, samples, name, sources.cache(opened[0].prefix.parent))
        counts = order.counts
    epochs = [num_epochs(own, config.seq_length, count) for own, count in zip(tokens, counts, strict=True)]
    most_first = sorted(zip(epochs, opened, strict=True), key=lambda each: -each[0])
    logger.log(
        logging.WARNING if min(tokens) <= config.seq_length else logging.INFO,
        "%s: %s, %d tokens, %s of %d tokens, %d asked for: %s",
        name,
        counted(sum(stop - start for start, stop in ranges), "document"),
        sum(tokens),
        counted(sum(samples_of(1, own, config.seq_length) for own in tokens), "sample"),
        config.seq_length,
        samples,
        some([f"{counted(count, 'epoch')} of {source.prefix}" for count, source in most_first], 8),
        extra=ALIKE,
    )
    datasets = [
        GPT2Dataset(source, documents, name, count, config.seq_length, seed, sources.cache(source.prefix.parent))
        for source, documents, count in zip(opened, ranges, counts, strict=True)
    ]
    return datasets[0] if order is None else BlendedDataset(datasets, order)


def _parts(config: DataConfig) -> Iterator[tuple[_Sets, list[float]]]:
    """Of training, validation and test data in turn: the sets, and the share of their documents that each part has."""
    train, split = config.train_data or [], parse_split(config.split)
    separate = [None, config.valid_data, config.test_data]
    for part in (1, 2):  # what a pipeline has split off serves instead of a share of the rest, if one is wanted
        if not separate[part] and split[part] and has_split_off(train, _PARTS[part]):
            separate[part] = train
    weights = [0.0 if own else w for own, w in zip(separate, split, strict=True)]
    total = sum(weights)
    for part, own in enumerate(separate):
        if own:
            yield find_sets(own, f"--{_PARTS[part]}-data"), [float(p == part) for p in range(3)]
        else:
            yield {"": find_corpora(train)} if train else {}, [w / total if total else 0.0 for w in weights]


def _documents(config: DataConfig, source: IndexedDataset, shares: Sequence[float], part: int) -> tuple[int, int]:
    """The documents [start, stop) of a corpus that a part has."""
    documents = split_ranges(shares, len(source))[part]
    if not source.sizes[slice(*documents)].any():
        whole = (
            " One long text is one document, and can be cut into several (docs/data.md)." if len(source) == 1 else ""
        )
        raise ValueError(
            f"--split {config.split} leaves no {_PARTS[part]} data of {source.prefix}: it has "
            f"{counted(len(source), 'document')}, and a share of {shares[part]:.4f} of them is none that holds text. "
            "Add documents, give the part a larger weight or one of 0 (--split 100,0,0 trains on all), or data of its "
            f"own (--valid-data, --test-data).{whole}"
        )
    return documents
