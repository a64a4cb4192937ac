"""How a source becomes a `JsonConfig`: old forms rewritten, every level checked, the batch numbers resolved."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from megazero.json_config.config import JsonConfig
from megazero.json_config.old_forms import modernised, without_disabled
from megazero.json_config.reader import Reader, check_types
from megazero.json_config.schema import AUTO
from megazero.json_source import DeepSpeedConfigError, read_source
from megazero.logging import ALIKE, get_logger

logger = get_logger(__name__)

# The first is the product of the others and the data-parallel size.
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def load_json_config(
    source: Mapping[str, Any] | str | os.PathLike,
    *,
    world_size: int = 1,
    model_parallel_size: int = 1,
    auto: Mapping[str, Any] | None = None,
    adapt: Callable[[dict[str, Any]], None] | None = None,
) -> JsonConfig:
    """The configuration in `source`, checked at every level. Accepted old forms and misspellings are logged.

    Args:
        source: a dict, the path of a JSON file, or URL-safe base64 of JSON.
        auto: what "auto" means, by the path of the key: {"train_micro_batch_size_per_gpu": 4}. For keys not listed: inside
            sections "auto" means the default; a batch number follows from the others; elsewhere at top level, and in
            `params`, it is an error.
        adapt: changes the document, in the current forms, before it is checked; the types of what it overrides are checked
            first.

    Raises:
        DeepSpeedConfigError: something is wrong or unknown; the error is both a ValueError and an AssertionError.
    """
    reader = Reader(auto or {})
    document = modernised(without_disabled(read_source(source)), reader.warnings)
    if adapt is not None:
        check_types(JsonConfig, document)
        adapt(document)
    values = reader.values(JsonConfig, _without_auto_batch(document, reader.auto), "")
    reader.refuse_undecided()
    total, micro, steps = (values.get(name) for name in BATCH)
    resolved = _resolve_batch(total, micro, steps, world_size, model_parallel_size)
    values.update(zip(BATCH, resolved, strict=True))
    config = JsonConfig(
        **values, world_size=world_size, model_parallel_size=model_parallel_size, given=frozenset(reader.given)
    )
    if config.zero_optimization.has_idle_offload_param:
        reader.warnings.append(
            f"zero_optimization.offload_param is without effect at stage {config.zero_optimization.stage}, as in DeepSpeed: "
            "every rank keeps whole parameters on its device. Use stage 3 to offload them, or drop it."
        )
    for warning in reader.warnings:
        logger.warning("configuration: %s", warning, extra=ALIKE)
    return config


def _without_auto_batch(document: Mapping[str, Any], auto: Mapping[str, Any]) -> dict[str, Any]:
    """`document` without the batch numbers that are "auto", if the remaining ones determine the batch.

    Args:
        auto: the caller's meaning of "auto", by key; a batch number in it stays.
    """
    left = {name: value for name, value in document.items() if name not in BATCH or value != AUTO or name in auto}
    return left if left.keys() & {*BATCH[:2]} else dict(document)


def _resolve_batch(
    total: int | None, micro: int | None, steps: int | None, world_size: int, model_parallel_size: int
) -> tuple[int, int, int]:
    """The three batch numbers; those that were not given are computed from those that were.

    Raises:
        DeepSpeedConfigError: too few are given, one is below 1, or they do not agree; the message shows the arithmetic.
    """
    if model_parallel_size < 1 or world_size % model_parallel_size:
        raise DeepSpeedConfigError(
            f"The world size {world_size} is not a multiple of the model-parallel size {model_parallel_size}: no data-parallel "
            "size follows. Start another number of ranks."
        )
    ranks = world_size // model_parallel_size
    given = dict(zip(BATCH, (total, micro, steps), strict=True))
    if total is None and micro is None:
        raise DeepSpeedConfigError("Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided.")
    if steps is None:
        steps = total // (micro * ranks) if total is not None and micro else 1
    if total is None:
        assert micro is not None
        total = micro * steps * ranks
    if micro is None:
        micro = total // (steps * ranks) if steps else 0
    if min(total, micro, steps) < 1 or total != micro * steps * ranks:
        total_text, micro_text, steps_text = (
            f"{name} {value}" + ("" if given[name] is not None else " (follows)")
            for name, value in zip(given, (total, micro, steps), strict=True)
        )
        raise DeepSpeedConfigError(
            f"The batch sizes do not fit: {total_text} must be {micro_text} x {steps_text} x data-parallel size {ranks} "
            f"(world size {world_size} / model-parallel size {model_parallel_size}) = {micro * steps * ranks}, and each at "
            "least 1. Change one, or leave one out: it follows from the others where the division has no remainder."
        )
    return total, micro, steps
