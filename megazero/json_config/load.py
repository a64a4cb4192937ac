"""How a source becomes a `JsonConfig`: old forms rewritten, every level checked, the batch numbers resolved."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from megazero.json_config.batch import BATCH, resolve_batch, without_auto
from megazero.json_config.config import JsonConfig
from megazero.json_config.old_forms import modernised, without_disabled
from megazero.json_schema import Reader, check_types
from megazero.json_source import read_source

logger = logging.getLogger(__name__)


def load_json_config(
    source: Mapping[str, Any] | str | os.PathLike,
    *,
    world_size: int = 1,
    model_parallel_size: int = 1,
    auto: Mapping[str, Any] | None = None,
    adapt: Callable[[dict[str, Any]], None] | None = None,
) -> JsonConfig:
    """The configuration in `source`, checked at every level. Old forms and misspellings that are accepted are logged.

    Args:
        source: a dict, the path of a JSON file, or URL-safe base64 of JSON.
        auto: what "auto" means, by the path of the key: {"train_micro_batch_size_per_gpu": 4}. Inside of sections, "auto"
            that is not in it means the default; a batch number follows from the others; elsewhere at top level and in `params`
            it is an error.
        adapt: changes the document, in today's forms, before it is checked; the types of what it overrides are checked before.

    Raises:
        DeepSpeedConfigError: anything is wrong or unknown; it is a ValueError and an AssertionError.
    """
    reader = Reader(auto or {})
    document = modernised(without_disabled(read_source(source)), reader.warnings)
    if adapt is not None:
        check_types(JsonConfig, document)
        adapt(document)
    values = reader.values(JsonConfig, without_auto(document, reader.auto), "")
    total, micro, steps = (values.get(name) for name in BATCH)
    resolved = resolve_batch(total, micro, steps, world_size, model_parallel_size)
    values.update(zip(BATCH, resolved, strict=True))
    config = JsonConfig(
        **values, world_size=world_size, model_parallel_size=model_parallel_size, given=frozenset(reader.given)
    )
    if os.environ.get("RANK", "0") == "0":  # all ranks read the same
        for warning in reader.warnings:
            logger.warning("configuration: %s", warning)
    return config
