"""Detects a user's changes to a model that an engine trains: parameters added or removed, and changes of requires_grad."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megazero.logging import ALIKE, get_logger, some
from megazero.zero.bucket import Bucket
from megazero.zero.layout import NO_GROUP
from megazero.zero.parameter import asked_directly

logger = get_logger(__name__)


class ModelWatch:
    """Compares a model with its state when its engine was made.

    Args:
        buckets: the buckets of all parameters that it had then.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._held = {id(p) for bucket in buckets for p in bucket.parameters.values()}
        self._trained = self._requires_grad()

    def came_and_left(self, model: nn.Module, may_have_frozen: bool = False) -> str:
        """Parameters that came into the model or left it, for a message; "" if it has exactly those that the buckets hold.

        Args:
            may_have_frozen: parameters that are not trained may have come into the model.
        """
        with asked_directly():
            now = {id(parameter): name for name, parameter in model.named_parameters()}  # listed as for the buckets
        if now.keys() == self._held:
            return ""
        frozen = {id(p) for p in model.parameters() if not p.requires_grad} if may_have_frozen else set()
        new = [name for key, name in now.items() if key not in self._held | frozen]
        gone = [n for bucket in self._buckets for n, p in bucket.parameters.items() if id(p) not in now]
        changes = ((new, "came into the model"), (gone, "left it"))
        return " and ".join(f"{some(names)} {verb}" for names, verb in changes if names)

    def has_other_trained(self) -> bool:
        """Whether some parameter's requires_grad has changed since the last call. Warns of parameters that cannot be trained."""
        now = self._requires_grad()
        if now == self._trained:
            return False
        self._warn_of_untrained(now)
        self._trained = now
        return True

    def _requires_grad(self) -> tuple[bool, ...]:
        with asked_directly():
            return tuple(p.requires_grad for bucket in self._buckets for p in bucket.parameters.values())

    def _warn_of_untrained(self, now: tuple[bool, ...]) -> None:
        """Warns of parameters that have been unfrozen but were never passed to an optimizer."""
        places = [(bucket, parameter) for bucket in self._buckets for parameter in bucket.parameters.values()]
        unfrozen = [place for place, new, old in zip(places, now, self._trained, strict=True) if new and not old]
        segments = [bucket.segment_of(parameter) for bucket, parameter in unfrozen]
        untrained = [segment.name for segment in segments if segment.group == NO_GROUP]
        if untrained:
            logger.warning(
                "%s: requires a gradient now, but was in no parameter group when the engine was made, and is not trained. Give "
                "the optimizer what is to be unfrozen later from the start.",
                ", ".join(untrained),
                extra=ALIKE,
            )
