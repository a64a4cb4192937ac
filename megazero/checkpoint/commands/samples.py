"""Shows what a run read: the samples of its iterations, as text and with the documents that they are cut from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megazero.checkpoint.plain import client_state
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.vocabulary import saved_tokenizer
from megazero.data.build import DataConfig, build_datasets, build_tokenizer_from
from megazero.data.corpora import weights_of
from megazero.data.sampler import ramped_batch_size, samples_after
from megazero.data.tokenizer import refuse_other_vocabulary
from megazero.logging import some


def show_samples(
    reader: Reader,
    iterations: Iterable[int],
    max_tokens: int,
    train_data: Sequence[str] | None = None,
    tokenizer_path: str | None = None,
    data_cache_path: str | None = None,
) -> Iterator[str]:
    """A heading and the text of each sample that a checkpoint's run reads in these iterations, which may come after it.

    Args:
        max_tokens: to show of each sample.
        train_data, tokenizer_path, data_cache_path: instead of the run's, where they lie elsewhere now.

    Raises:
        FileNotFoundError: the data or the vocabulary is not where the run had it.
        ValueError: the checkpoint does not say what its run read, or these are other data, or the run has no such iteration.
    """
    client = client_state(reader)
    if not {"train_samples", "corpora"} <= client.keys():
        raise ValueError(
            f"{reader.path} was not saved by the training job, so it does not say which data its run read."
        )
    if client["corpora"] is None:
        raise ValueError(f"The run of {reader.path} read its script's own samples (make_datasets), not --train-data.")
    samples = {iteration: samples_of(client, iteration, reader) for iteration in iterations}
    with reader.well_formed("the run's settings"):
        data, seed = DataConfig(**client["config"]["data"]), client["config"]["training"]["seed"]
    weights = weights_of(data.train_data or ())
    if train_data:  # of separate validation and test data, it matters only that they take no share of these
        moved = list(train_data)
        valid, test = (moved if own else None for own in (data.valid_data, data.test_data))
        data = replace(data, train_data=moved, valid_data=valid, test_data=test)
    if tokenizer_path:
        data = replace(data, tokenizer_path=tokenizer_path, vocab_file=None, merge_file=None)
    if data_cache_path:
        data = replace(data, data_cache_path=data_cache_path)
    try:
        tokenizer = build_tokenizer_from(data) if tokenizer_path else saved_tokenizer(client, reader.path)
        refuse_other_vocabulary(tokenizer, client["tokenizer_sha256"], reader.path)
        train, _, _ = build_datasets(data, tokenizer, (client["train_samples"], 0, 0), seed)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{str(error).rstrip('.')}. The paths are those of the run's job: start this where the job was started, or give "
            "--train-data and --tokenizer-path."
        ) from error
    assert train is not None, "it has trained on them"
    if train.corpora != client["corpora"] or weights_of(data.train_data or ()) != weights:
        raise ValueError(
            f"The documents or weights of {' '.join(data.train_data or ())} are not those of the run of {reader.path}. Give "
            "the --train-data that it read."
        )
    for iteration, batch in samples.items():
        for i in batch:
            tokens, (prefix, documents) = train[i]["text"], train.source_of(i)
            numbers = f"document{'s' * (len(documents) > 1)} {some([*map(str, documents)], 8)}"
            cut = f", the first {max_tokens}" if max_tokens < len(tokens) else ""
            yield f"--- iteration {iteration}, sample {i}: {numbers} of {prefix}, {len(tokens)} tokens{cut}"
            yield tokenizer.decode(tokens[:max_tokens])


def samples_of(client: dict[str, Any], iteration: int, reader: Reader) -> range:
    """Which samples of the shuffled training data the global batch of an iteration has, by the checkpoint's client state.

    The run's --phase-transition-iterations, if any, divide it into phases, each with data or an order of its own.
    """
    with reader.well_formed("the run's batches"):
        done, consumed, full = client["iteration"], client["consumed_samples"], client["global_batch_size"]
        rampup = client["config"]["training"]["rampup_batch_size"]
        begun, before = client.get("phase", (0, 0))
        is_alike = samples_after(full, rampup, done - begun, before) == consumed
    if iteration <= begun:
        raise ValueError(
            f"--iterations: {reader.path} is of the phase of its run that began after iteration {begun}. Name a checkpoint of "
            "an earlier one by --tag."
        )
    if iteration <= done:
        if not is_alike:
            raise ValueError(
                f"The run of {reader.path} had another global batch before. Name the checkpoint from which it went on to "
                f"iteration {iteration} by --tag."
            )
        done, consumed = begun, before
    start = samples_after(full, rampup, iteration - 1 - done, consumed)
    batch = range(start - before, start - before + ramped_batch_size(full, rampup, start))
    if batch.stop > client["train_samples"]:
        raise ValueError(
            f"--iterations: the run of {reader.path}, or its phase, ends before iteration {iteration}, with "
            f"{client['train_samples']} samples."
        )
    return batch
