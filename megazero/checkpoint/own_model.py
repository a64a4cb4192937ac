"""Which function made the model of a job: a checkpoint says it, as GPT2Model may compute something else with its weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megazero.checkpoint.reader import Reader
from megazero.logging import ALIKE, get_logger
from megazero.model.config import GPT2Config

logger = get_logger(__name__)

OF_GPT2 = "pretrain_gpt2.make_model"


def name_of(function: Callable[..., Any]) -> str:
    """Its module and name, where the script that runs is called by its file: "mup.make_model"."""
    function = function.func if isinstance(function, partial) else function
    owner = function if hasattr(function, "__qualname__") else type(function)
    file = getattr(sys.modules["__main__"], "__file__", None)
    module = Path(file).stem if owner.__module__ == "__main__" and file else owner.__module__
    return f"{module}.{owner.__qualname__}"


def gpt2_of(reader: Reader, client: dict[str, Any]) -> GPT2Config:
    """The configuration of the GPT2Model that takes a checkpoint's weights; warns if a script's function made the model.

    Args:
        client: the checkpoint's client state.

    Raises:
        ValueError: the checkpoint does not say what model it is of, or it has other parameters than a GPT2Model.
    """
    config = GPT2Config.of_saved(client, reader.path)
    config.refuse_other_names(reader.tensors, reader.path)
    if (maker := client.get("make_model", OF_GPT2)) != OF_GPT2:
        logger.warning(
            "%s: %s made the model in training. Here, the plain GPT2Model gets the weights: if that function changed what the "
            "model computes, results are those of another one. See docs/own_scripts.md#evaluate-a-changed-model",
            reader.path,
            maker,
            extra=ALIKE,
        )
    return config
