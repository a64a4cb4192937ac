"""The batch equation: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazero.json_schema import AUTO
from megazero.json_source import DeepSpeedConfigError

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def without_auto(document: Mapping[str, Any], auto: Mapping[str, Any]) -> dict[str, Any]:
    """`document` without the batch numbers that are "auto", where what is left of them decides the batch.

    Args:
        auto: what the caller says that "auto" means, by key; such a number stays.
    """
    left = {name: value for name, value in document.items() if name not in BATCH or value != AUTO or name in auto}
    return left if left.keys() & {*BATCH[:2]} else dict(document)


def resolve_batch(
    total: int | None, micro: int | None, steps: int | None, world_size: int, model_parallel_size: int
) -> tuple[int, int, int]:
    """The three batch numbers, those that were not given from those that were.

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
