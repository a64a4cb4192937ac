"""How a training run continues from a checkpoint and saves one: what it takes from a directory, refuses, and warns about."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megazero import comm
from megazero.checkpoint.config import CheckpointConfig
from megazero.checkpoint.format import CheckpointError
from megazero.checkpoint.loader import newest_tag, none_whole
from megazero.checkpoint.plain import client_state
from megazero.checkpoint.reader import Reader, read_index
from megazero.checkpoint.tags import checkpoint_path, latest_tag, list_tags, listed, named, tags_to_go_back_to
from megazero.checkpoint.vocabulary import saved_files, saved_tokenizer, vocabulary_state
from megazero.config import Config
from megazero.data.build import TOKENIZER_FLAGS, DataConfig, build_tokenizer_from
from megazero.data.tokenizer import Tokenizer, refuse_other_vocabulary
from megazero.files import nearest_there
from megazero.job import Job, seed_dropout
from megazero.logging import ALIKE, counted, get_logger
from megazero.model.config import GPT2Config
from megazero.option import as_given, flag_of, own_flag

logger = get_logger(__name__)

# Flags that determine which samples come, and in which order; and those that determine a sample's loss, or its weight.
SAMPLES = ("seed", "train_data", "split", "seq_length")
LOSS = ("eod_mask_loss", "calculate_per_token_loss", "reset_position_ids", "reset_attention_mask")
_DROPOUT = ("attention_dropout", "hidden_dropout")  # the same model, but another training of it
_CHANGED = "not as in the run that saved the checkpoint: %s"

# What says where in the data a run was. `save` says more; a checkpoint that was imported has no more.
_PLACE = {"iteration", "consumed_samples"}


def refuse_unwritable(flags: CheckpointConfig) -> None:
    """Raises an OSError if --save cannot be a folder that is written in, as far as can be told without making it."""
    if not flags.save:
        return
    there = nearest_there(flags.save)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "you may not write in it" if there.is_dir() else "it is no folder"
        if os.statvfs(there).f_flag & os.ST_RDONLY:
            why = "its file system is read-only"
        raise OSError(
            f"--save {flags.save} cannot be written: {there}: {why}. Name another folder, or change its rights."
        )


def refuse_to_replace(flags: CheckpointConfig) -> None:
    """Raises if --save holds checkpoints that this run does not continue.

    Raises:
        ValueError: this run would replace another run's checkpoints, or newer ones of its own, once it reaches their iterations;
            or it would save inside of a checkpoint.
    """
    if flags.save and named(flags.save)[1] is not None:
        raise ValueError(f"--save {flags.save} is one checkpoint: name the directory above it, or another one.")
    tags = list_tags(flags.save) if flags.save else []
    if tags and (flags.finetune or not flags.is_saved_where_loaded):
        how = f"--load {flags.save}{' without --finetune' if flags.finetune else ''}"
        raise ValueError(
            f"--save {flags.save} holds the checkpoints of another run (the newest is {tags[-1]}), and this one, which does not "
            f"continue it, would replace them. To continue it, give {how}; else another --save."
        )
    one = flags.loaded[1] if tags else None
    if one is not None and one != (newest := latest_tag(flags.loaded[0]) or tags[-1]):
        raise ValueError(
            f"--save {flags.save} holds checkpoints that a run from {one} would replace (the newest is {newest}). To continue "
            f"it, give --load {flags.save}; else another --save. To go back to {one} for good, first run `python -m "
            f"megazero.checkpoint rewind {flags.save} --tag {one}`."
        )


def sees_something_to_load(flags: CheckpointConfig) -> bool:
    """Whether this process sees checkpoints in --load."""
    return bool(flags.load and list_tags(flags.loaded[0]))


def has_something_to_load(flags: CheckpointConfig) -> bool:
    """Whether any rank sees checkpoints in --load. Collective over the world."""
    return bool(comm.largest(comm.together(lambda: sees_something_to_load(flags))))


def job_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer whose files the flags name; if they name none, that of the checkpoint in --load, if it has its own files.

    Raises:
        CheckpointError: the checkpoint is damaged, and `load` will not go back to another.
        ValueError: there is no checkpoint, and `load` will not start from scratch.
        Exception: as of `build_tokenizer`.
    """
    data, flags = config.data, config.checkpoint
    if flags.load and not (data.vocab_file or data.merge_file or data.tokenizer_path):
        (directory, tag), fallback = flags.loaded, _falls_back(flags)
        # Those that `load` may go back to are of one run, and have the same.
        tags = tags_to_go_back_to(directory) if fallback else [tag or latest_tag(directory)]
        if not any(tags):
            _refuse_to_start_from_scratch(flags, directory)
        problems: list[Exception] = []
        for each in filter(None, tags):
            try:
                tokenizer = _tokenizer_in(directory, each)
            except (CheckpointError, FileNotFoundError) as error:
                if not fallback:
                    raise
                problems.append(error)
                continue
            if tokenizer and data.tokenizer_type in (DataConfig.tokenizer_type, tokenizer.name):
                return tokenizer
        if problems and len(problems) == len(tags):
            raise none_whole(directory, str(problems[0])) from problems[0]
    return build_tokenizer_from(data)


def _tokenizer_in(directory: Path, tag: str) -> Tokenizer | None:
    """The tokenizer whose files a checkpoint has; None if it has none."""
    # The ranks that load it ask for its other files.
    reader = Reader(directory, tag, read_index(checkpoint_path(directory, tag)))
    client = client_state(reader)
    reader.close()
    return saved_tokenizer(client, reader.path) if saved_files(client) else None


def load(job: Job, is_expected: bool = False) -> None:
    """Continues from the checkpoint in --load, if there is one.

    Args:
        is_expected: there must be one, because the model has no initial values.

    Raises:
        ValueError: it is damaged, belongs to another model, or was trained with another vocabulary.
        FileNotFoundError: it is expected, and has disappeared.
    """
    flags = job.config.checkpoint
    if not flags.load:
        return
    directory, tag = flags.loaded
    tag = newest_tag(directory, _falls_back(flags), tag)
    if tag is None:
        _refuse_to_start_from_scratch(flags, directory)
        level = logging.INFO if flags.is_saved_where_loaded else logging.WARNING
        logger.log(level, "no checkpoint in --load %s yet: starting from scratch", flags.load, extra=ALIKE)
        if is_expected:
            raise FileNotFoundError(f"--load {flags.load}: the checkpoints have disappeared since this job started.")
        return
    path, client = job.engine.load_checkpoint(
        str(directory),
        tag,
        load_optimizer_states=not flags.no_load_optim,
        load_rng=not flags.no_load_rng,
        load_module_only=flags.finetune,
        fallback=flags.load_fallback,
        prepare=lambda reader: _prepare_to_continue(job, reader),
    )
    if not flags.finetune:
        job.corpora, job.shuffled_epochs = client.get("corpora"), client.get("shuffled_epochs")
        _enter_phase(job, tuple(client.get("phase", job.phase)))
        _say_what_changed(job, client)
    samples = counted(job.consumed_samples, "sample")
    logger.info("loaded %s: continuing after iteration %d, %s", path, job.iteration, samples)


def _enter_phase(job: Job, saved: tuple[int, int]) -> None:
    """Begins a phase of the data if one begins after the job's iteration, or goes on in the one that was saved.

    Raises:
        ValueError: a phase should have begun in between.
    """
    job.phase, begin = saved, job.config.training.phase_begun(job.iteration)
    if begin <= saved[0]:
        return
    if begin < job.iteration:
        raise ValueError(
            f"--phase-transition-iterations {begin}: the run is at iteration {job.iteration}, in a phase that began after "
            f"{saved[0]}. Name {job.iteration}, or go back to global_step{begin} (docs/checkpoints.md)."
        )
    job.phase, job.corpora, job.shuffled_epochs = (begin, job.consumed_samples), None, None
    logger.info("a phase of the data begins, which is read from its first sample on", extra=ALIKE)


def _say_what_changed(job: Job, client: dict[str, Any]) -> None:
    """Warns if the data do not continue where the checkpoint's run left off, or if their loss is computed differently.

    Then logs what else is set otherwise than in the checkpoint's run.
    """
    if "train_samples" not in client:  # a script's own may have a "config", too
        if job.consumed_in_phase:
            logger.warning(
                "the checkpoint was imported: the samples after its %d are those that come next if the run read one corpus, and "
                "this one has its --split, --seq-length, --seed, --global-batch-size and --train-iters",
                job.consumed_samples,
                extra=ALIKE,
            )
        return
    batch = job.config.global_batch_size(job.groups.data_parallel_size)
    if client.get("global_batch_size", batch) != batch:
        logger.warning(
            "a step now takes %s, not %d as in the checkpoint's run: --global-batch-size sets this for any number of ranks",
            counted(batch, "sequence"),
            client["global_batch_size"],
            extra=ALIKE,
        )
    changed = _changes(client["config"], job.config)
    samples = SAMPLES if job.consumed_in_phase else ()  # a phase that begins may have any
    others = [flag_of(name) for name in samples if name in changed]
    order = ". Where that means other data or another order, some samples come again and others never"
    phase = f". --phase-transition-iterations {job.iteration} reads data from their first sample on"
    _warn_of_flags(others, f"{order}, and validation data that --split cuts off change as well{phase}")
    if job.corpora and "split" in changed:  # so these are other documents, if of the same corpora
        job.corpora = _fingerprints(job.corpora)
    if "split" in changed or "seq_length" in changed:  # so an epoch has another number of samples, as has been said
        job.shuffled_epochs = None
    others = [flag_of(name) for name in LOSS if name in changed]
    _warn_of_flags(others, "; losses from here on do not compare with those before")
    rest = [text for name, text in changed.items() if name not in (*samples, *LOSS)]
    if (maker := client.get("make_model", job.made_by)) != job.made_by:
        rest.append(f"make_model {maker} -> {job.made_by}")
    if rest:
        logger.info(_CHANGED, ", ".join(rest), extra=ALIKE)


def _changes(saved: dict[str, dict[str, Any]], config: Config) -> dict[str, str]:
    """By field, what is set otherwise than in the saved configuration: "--lr 0.003 -> 0.001".

    Paths and the like, and what is `unsaid`, are left out. A field that an older version did not have counts as its default.
    """
    changed = {}
    for part in (part for part in fields(config) if part.name != "checkpoint"):
        component = getattr(config, part.name)
        before, now = {**asdict(type(component)()), **saved.get(part.name, {})}, asdict(component)
        for each in fields(component):
            is_left_out = each.metadata.get("unsaid") or (each.metadata.get("per_host") and each.name not in SAMPLES)
            if before[each.name] != now[each.name] and not is_left_out:
                name = own_flag(each) if each.metadata else each.name  # the latter is set in a JSON file
                changed[each.name] = f"{name} {before[each.name]} -> {now[each.name]}"
    return changed


def _warn_of_flags(flags: list[str], so: str) -> None:
    """Warns of flags, if any, that have other values than in the checkpoint's run; `so` tells what follows."""
    if flags:
        logger.warning("%s: not as in the run that saved the checkpoint%s", ", ".join(flags), so, extra=ALIKE)


def warn_of_other_data(job: Job, corpora: list[str], shuffled_epochs: list[list[int]]) -> None:
    """Warns if the training data are not those of the checkpoint's run, whatever their names, or have another order.

    Then records them as the job's.

    Args:
        corpora, shuffled_epochs: what the dataset says.
    """
    if job.corpora not in (None, corpora, _fingerprints(corpora)):  # as checkpoints once had them, the last
        logger.warning(
            "the documents of --train-data are not those of the run that saved the checkpoint: some may come again, and others "
            "never",
            extra=ALIKE,
        )
    elif job.shuffled_epochs not in (None, shuffled_epochs):
        logger.warning(
            "the run, or this phase of it, is now %d samples long, which takes another number of epochs of the data, or crosses "
            "80 %% of the last one: their order changes, and some samples come again",
            job.phase_samples,
            extra=ALIKE,
        )
    job.corpora, job.shuffled_epochs = corpora, shuffled_epochs


def _fingerprints(corpora: list[str]) -> list[str]:
    """What a dataset says of its corpora, without which of their documents it has."""
    return [each.rpartition(" of ")[2] for each in corpora]


def _falls_back(flags: CheckpointConfig) -> bool:
    """Whether another checkpoint will do than `latest` names; also where a job has died between its first one and `latest`."""
    directory, _ = flags.loaded
    return flags.load_fallback or (not (directory / "latest").exists() and len(list_tags(directory)) == 1)


def _refuse_to_start_from_scratch(flags: CheckpointConfig, path: Path) -> None:
    """Raises a ValueError where it looks like a mistake that --load leads to no checkpoint, which would cost hours."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"--load {flags.load} is a file: name the directory that a job saves in.")
    if list_tags(path):
        raise ValueError(
            f"--load {flags.load} has no file `latest`. In it there {listed(path)}. Choose one by "
            f"`python -m megazero.checkpoint rewind {flags.load} --tag TAG`, or take the newest by --load-fallback."
        )
    # The directory that the job saves in may already hold its log.
    if not flags.is_saved_where_loaded and path.is_dir() and any(path.iterdir()):
        raise ValueError(
            f"--load {flags.load} holds other files, but no checkpoint of this job. Name the directory that a job saves in; "
            "`python -m megazero.checkpoint import` makes one of another system's checkpoint."
        )
    if flags.exit_on_missing_checkpoint:
        raise ValueError(
            f"--exit-on-missing-checkpoint: there is no checkpoint in --load {flags.load} to continue from."
        )
    if flags.finetune:
        raise ValueError(f"--finetune: there is no checkpoint in --load {flags.load} to take the weights from.")


def _prepare_to_continue(job: Job, reader: Reader) -> None:
    """Refuses a checkpoint that this job cannot continue; otherwise takes the job's own state from it."""
    client, finetune = client_state(reader), job.config.checkpoint.finetune
    if "tokenizer_sha256" in client:
        refuse_other_vocabulary(job.tokenizer, client["tokenizer_sha256"], reader.path)
    elif saved_files(client) != job.tokenizer.contents:  # from another framework
        logger.warning(
            "%s does not say which vocabulary it was trained with: make sure that it is yours",
            reader.path,
            extra=ALIKE,
        )
    _refuse_other_model(job, reader.path, client)
    if finetune:
        return
    if not client.keys() >= _PLACE:
        raise ValueError(
            f"{reader.path} was not saved by this job, so it does not say where in the data to continue. Start from its "
            "weights by --finetune, with another --save."
        )
    schedule: Any = job.engine.lr_scheduler
    if (reader.index["lr_scheduler"] or {}).keys() != schedule.state_dict().keys():
        raise ValueError(
            f"The checkpoint {reader.path} was trained under another kind of learning-rate schedule: that of the "
            "flags, or one of a --deepspeed_config file. Use the same kind, or take the weights alone by --finetune, "
            "with another --save."
        )
    job.iteration, job.consumed_samples = client["iteration"], client["consumed_samples"]
    job.first_loss = client.get("first_loss")
    seed_dropout(job)  # the checkpoint's own states, if it has them for these ranks, replace these


def _refuse_other_model(job: Job, path: Path, client: dict[str, Any]) -> None:
    """Names the flags that would make another model of the checkpoint's weights; their shapes tell only of some, and no flag.

    Logs another dropout, if `_say_what_changed` will not: an imported Llama has none, and the job's default is GPT-2's.
    """
    saved = client.get("model")
    # A user's own script may store something else by this name.
    if not isinstance(saved, dict) or "num_layers" not in saved:
        return
    model, now = GPT2Config.of_saved(client, path), job.config.model
    pairs = {name: (getattr(model, name), getattr(now, name)) for name in _DROPOUT}
    dropout = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if others := model.differences(now):
        described = {each.name: each for each in fields(GPT2Config)}
        not_given = {name: pair for name, pair in dropout.items() if pair[1] == described[name].default}
        given = " ".join(as_given(described[name], was) for name, (was, _) in {**others, **not_given}.items())
        differ = ", ".join(f"{flag_of(name)} {was}, now {is_now}" for name, (was, is_now) in others.items())
        raise ValueError(
            f"The checkpoint {path} was trained with {differ}: that is another model. Give {given}. To change a trained model, "
            "see docs/checkpoints.md."
        )
    if dropout and (job.config.checkpoint.finetune or "train_samples" not in client):
        changed = ", ".join(f"{flag_of(name)} {was} -> {is_now}" for name, (was, is_now) in dropout.items())
        logger.info(_CHANGED, changed, extra=ALIKE)


def has_failed_to_save(job: Job) -> bool:
    """Whether the save in the background, which is waited for, has failed; the log has told why, which may be over by now.

    Raises:
        RuntimeError: a rank was lost in it.
    """
    try:
        job.engine.wait_for_checkpoint()
    except OSError:
        logger.warning("the save before has failed: training waits for this one", extra=ALIKE)
        return True
    return False


def save(job: Job, is_last: bool = False) -> None:
    """Saves a checkpoint from which the job can continue exactly.

    Args:
        is_last: nothing is computed meanwhile, so it is not made in the background; nor is one after a save that failed there.
    """
    flags = job.config.checkpoint
    assert flags.save is not None
    start = time.perf_counter()
    in_background = not has_failed_to_save(job) and flags.async_save and not is_last
    client = {
        "iteration": job.iteration,
        "consumed_samples": job.consumed_samples,
        "phase": job.phase,
        "train_samples": job.phase_samples,
        "global_batch_size": job.config.global_batch_size(job.groups.data_parallel_size),
        "first_loss": job.first_loss,
        "corpora": job.corpora,
        "shuffled_epochs": job.shuffled_epochs,
        "tokenizer_sha256": job.tokenizer.sha256,
        **vocabulary_state(job.tokenizer, {name: getattr(job.config.data, name) for name in TOKENIZER_FLAGS}),
        "config": asdict(job.config),
        "model": asdict(job.config.model),
        "make_model": job.made_by,
        "seq_length": job.config.data.seq_length,
    }
    path = job.engine.save_checkpoint(
        flags.save,
        client_state=client,
        save_optimizer=not flags.no_save_optim,
        save_rng=not flags.no_save_rng,
        keep_last=flags.keep_last,
        keep_every=flags.keep_every,
        in_background=in_background,
    )
    done = "is being written; training waited" if in_background else "saved in"
    logger.info("%s %s %.1f s", path, done, time.perf_counter() - start)
