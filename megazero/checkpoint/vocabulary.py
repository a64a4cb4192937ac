"""The vocabulary in a checkpoint of the GPT-2 job: its tokenizer's files, in the client state, so that no others are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megazero.checkpoint.format import REMEDY, CheckpointError
from megazero.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_of


def vocabulary_state(tokenizer: Tokenizer, flags: dict[str, Any]) -> dict[str, Any]:
    """Entries of the client state from which `saved_tokenizer` makes the tokenizer again.

    Args:
        flags: by which the job named it.
    """
    files = {name: np.frombuffer(content, np.uint8) for name, content in tokenizer.contents.items()}
    return {"tokenizer": {**flags, "tokenizer_type": tokenizer.name}, "tokenizer_files": files}


def saved_flags(client: dict[str, Any]) -> dict[str, Any]:
    """By which the training job named its tokenizer; none of other checkpoints, where a script's own entry may be anything."""
    saved = client.get("tokenizer")
    return saved if isinstance(saved, dict) else {}


def saved_files(client: dict[str, Any]) -> dict[str, bytes]:
    """What the files hold that a checkpoint has of its tokenizer, by name; none of older checkpoints, or of other systems."""
    saved = client.get("tokenizer_files", {}) if saved_flags(client) else {}
    return {name: content.tobytes() for name, content in saved.items()}


def saved_tokenizer(client: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer of the checkpoint at `path`: from its own files or, where it has none, those that its job was started with.

    Raises:
        FileNotFoundError: the latter are no longer there.
        ValueError: the checkpoint does not say where its vocabulary is, or the files do not make such a tokenizer.
    """
    saved = saved_flags(client)
    if not saved:
        raise ValueError(
            f"{path} was not saved by the training job, so it does not say where its vocabulary is. Give --vocab-file and "
            "--merge-file, or --tokenizer-path."
        )
    try:
        if files := saved_files(client):
            return tokenizer_of(saved["tokenizer_type"], files, path)
        return build_tokenizer(**saved)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has recorded a vocabulary that is none: {error!r}. {REMEDY}") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{str(error).rstrip('.')}. The checkpoint {path} has recorded this, relative to the folder in which its job was "
            "started: name the vocabulary's files as they are called from here."
        ) from error
