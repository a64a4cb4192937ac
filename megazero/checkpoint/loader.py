"""Loads a checkpoint on all ranks: they take the same one, or go back to the same older one, and each restores its part."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megazero import comm
from megazero.checkpoint.format import NAME_ONE, REMEDY, CheckpointError
from megazero.checkpoint.plain import client_state
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.restore import continue_run, read_states
from megazero.checkpoint.tags import latest_tag, list_tags, step_of, tags_to_go_back_to
from megazero.checkpoint.training_state import TrainingState
from megazero.logging import ALIKE, get_logger
from megazero.nvme import SwapFileError

logger = get_logger(__name__)


def load(
    state: TrainingState,
    directory: str | Path,
    tag: str | None,
    *,
    load_optimizer_states: bool,
    load_lr_scheduler_states: bool,
    load_rng: bool,
    load_module_only: bool,
    strict: bool,
    fallback: bool,
    prepare: Callable[[Reader], None] | None,
) -> tuple[Path, dict[str, Any]]:
    """Reads a checkpoint into the parts, and returns its directory and client state. Arguments, errors: `Engine.load_checkpoint`.

    Learning rates are the checkpoint's, as they come with the optimizer's state, unless the present scheduler starts anew.
    All other settings of parameter groups (weight decay, betas, ...) are those of this run. Where an error comes after something
    has been overwritten, the optimizer is torn, on every rank.
    """

    def read(reader: Reader) -> dict[str, Any]:
        if prepare is not None:
            prepare(reader)
        client = client_state(reader)
        with_optimizer = load_optimizer_states and not load_module_only and reader.index.get("optimizer") is not None
        read_states(state, reader, with_optimizer, strict)
        if not load_module_only:
            continue_run(state, reader, with_optimizer, load_lr_scheduler_states, load_rng)
        reader.close()
        for bucket in state.buckets:
            bucket.write_back_all()
        return client

    tags = _of_first_rank(lambda: _candidates(directory, tag, fallback))
    path, client = _first_intact(state, directory, tags, read, fallback)
    for bucket in state.buckets:
        bucket.publish()
        bucket.weights.wait_gathered()
    return path, client


def _of_first_rank(action: Callable[[], Any]) -> Any:
    """What `action` returns on the first rank, on every rank, and what it raises there. Collective."""
    told, error = None, None
    if torch.distributed.get_rank() == 0:
        try:
            told = action()
        except Exception as caught:  # not every exception can be sent
            error = caught
    kind = type(error) if type(error) in (FileNotFoundError, CheckpointError, ValueError) else comm.OtherRankError
    told, *failure = comm.broadcast_object((told,) if error is None else (None, kind, str(error)))
    if failure:
        kind, text = failure
        raise error or kind(text)
    return told


def newest_tag(directory: str | Path, fallback: bool, tag: str | None = None) -> str | None:
    """`tag`, else what `latest` names; with `fallback`, if it names nothing, the newest checkpoint that is there. Collective.

    That is what the first rank sees: other nodes of a network file system may see a new `latest` later.

    Raises:
        CheckpointError: it holds something else, and there is no fallback.
    """
    return _of_first_rank(lambda: _newest_tag(directory, fallback) if tag is None else tag)


def _newest_tag(directory: str | Path, fallback: bool) -> str | None:
    try:
        tag, problem = latest_tag(directory), f"{directory} has no file `latest`."
    except CheckpointError as error:
        if not fallback or not list_tags(directory):
            raise
        tag, problem = None, str(error)
    if tag is None and fallback and (older := tags_to_go_back_to(directory)):
        logger.warning("%s Taking the newest checkpoint that is there, %s.", problem, older[0], extra=ALIKE)
        return older[0]
    return tag


def _candidates(directory: str | Path, tag: str | None, fallback: bool) -> list[str | None]:
    """The tag to load, and those to go back to, newest first."""
    newest = _newest_tag(directory, fallback) if tag is None else tag
    if not fallback:
        return [newest]
    others, latest = tags_to_go_back_to(directory, newest), None
    with suppress(CheckpointError):
        latest = latest_tag(directory)
    if newest != latest:  # beyond that one lies what a run that went back has left; beyond another one, what is newer
        others = [each for each in others if not 0 <= step_of(newest or "") < step_of(each)]
    return [newest, *others]


def _first_intact(
    state: TrainingState,
    directory: str | Path,
    tags: Sequence[str | None],
    read: Callable[[Reader], dict[str, Any]],
    fallback: bool,
) -> tuple[Path, dict[str, Any]]:
    """The first checkpoint that `read` can read on every rank, and what it gave. Collective."""
    remaining = list(tags)
    while True:
        error = None
        try:
            reader = _open(directory, remaining.pop(0))
            client = read(reader)
        except Exception as caught:  # told to the others first, who would wait for this rank
            error = caught
            if fallback and isinstance(caught, OSError) and not _is_damage(caught):
                error = OSError(
                    f"{str(caught).rstrip('.')}. This need not be damage, so no older checkpoint is loaded instead, which would "
                    "lose what was trained since: remove the cause and load again."
                )
                error.__cause__ = caught
        mine = None if error is None else (_is_damage(error), str(error))
        told = comm.all_gathered_objects((mine, state.optimizer.is_torn))
        found = [(rank, *each) for rank, (each, _) in enumerate(told) if each is not None]
        if not found:
            return reader.path, client
        state.optimizer.is_torn = any(is_torn for _, is_torn in told)  # no rank may go on without the others
        rank, is_damaged, message = found[0]
        if is_damaged and fallback:
            message = _without_advice(message)
            if not remaining and not isinstance(error, OSError):  # which says that nothing is there, or cannot be read
                raise none_whole(directory, message) from error
        if not is_damaged or not remaining:
            kind = CheckpointError if is_damaged else comm.OtherRankError
            raise error or kind(f"rank {rank} cannot load: {message}")
        logger.warning("%s Going back to the checkpoint before it.", message, extra=ALIKE)


def none_whole(directory: str | Path, message: str) -> CheckpointError:
    """What to raise where there is no checkpoint to go back to from the one that `message` is about."""
    found = _without_advice(message)
    return CheckpointError(
        f"{found} No other checkpoint in {directory} to go back to is whole either: copy one of them again."
    )


def _without_advice(message: str) -> str:
    """A message about damage without its end, which advises just what `fallback` does."""
    return message.removesuffix(REMEDY).removesuffix(NAME_ONE).rstrip()


def _is_damage(error: Exception) -> bool:
    """Whether a checkpoint is not what was written. One that cannot be read for lack of rights or descriptors may be whole.

    So may one that is read into a swap file whose disk fails.
    """
    is_gone = isinstance(error, OSError) and (isinstance(error, FileNotFoundError) or error.errno == errno.EIO)
    return (is_gone and not isinstance(error, SwapFileError)) or isinstance(error, CheckpointError)


def _open(directory: str | Path, tag: str | None) -> Reader:
    """A reader on every rank. The first rank reads the index and asks for the size of every file, for all. Collective."""
    opened: list[Reader] = []

    def read_index() -> bytes:
        opened.append(Reader(directory, tag))
        return opened[0].content

    content = _of_first_rank(read_index)
    reader = opened[0] if opened else Reader(directory, tag, content)
    if not reader.path.is_dir():
        raise OSError(
            f"rank {torch.distributed.get_rank()} does not see {reader.path}, where the first rank has found a checkpoint. Every "
            "node must see the same directory."
        )
    return reader
