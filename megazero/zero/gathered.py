"""`GatheredParameters`: makes sharded parameters whole for a while, to be read or changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.logging import some
from megazero.zero.bucket import Bucket
from megazero.zero.external import register_external_parameter
from megazero.zero.registry import bucket_of
from megazero.zero.storage import is_same_view

MOST_NAMED = 8  # parameters or units, in one error


class GatheredParameters:
    """Context manager in which sharded parameters are whole on every rank. Collective over their data-parallel group.

    With `modifier_rank`, the values that the modifier rank holds at the end become the parameters' values everywhere, in the
    master weights too. This includes tensors assigned to `p.data`, if they have the parameter's shape. Without `modifier_rank`
    the values are for reading: a change raises at the end, on every rank, instead of being lost. What was read, such as a state
    dictionary or `p.detach()`, stays valid afterwards, with the memory that it takes. Leaving by an exception undoes all
    changes. Parameters that neither an engine nor `zero.Init` holds are left alone.

    Args:
        params: a parameter, or any iterable of them. None, for a bias that a layer does not have, is left alone.
        modifier_rank: rank, in the data-parallel group, whose changes are kept.
        fwd_module: a module that will read these parameters in its forward; they are registered as external to it.
        enabled: False makes the context do nothing.

    Raises:
        TypeError: something else than parameters is given, such as the names that a dict iterates over.
        RuntimeError: some ranks did not enter, or did with other parameters; an enclosing context has gathered a sharded
            parameter already; a parameter was changed without `modifier_rank`, or was given data of another shape.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor | None] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.modifier_rank = modifier_rank
        given = list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor) else [params]
        for other in given:
            if other is not None and not isinstance(other, Tensor):
                raise TypeError(
                    f"GatheredParameters: found a {type(other).__name__} among the parameters. Give parameters, such as "
                    "module.parameters() or the values() of a dict."
                )
        parameters = [parameter for parameter in given if isinstance(parameter, nn.Parameter)] if enabled else []
        held = {parameter: bucket for parameter in parameters if (bucket := bucket_of(parameter)) is not None}
        self._names: dict[Bucket, list[str]] = {}  # of the parameters in each bucket
        # In one order on every rank: that of a set differs from process to process.
        for parameter in sorted(held, key=lambda p: (held[p].channel.name, held[p].name, held[p].segment_of(p).name)):
            bucket = held[parameter]
            self._names.setdefault(bucket, []).append(bucket.segment_of(parameter).name)
            if (reader := fwd_module or _reader_of(bucket)) is not None:
                register_external_parameter(reader, parameter)
        self.buckets = list(self._names)
        if modifier_rank is None:  # whole parameters can be read at any time
            self.buckets = [bucket for bucket in self.buckets if bucket.sharding.parameters]
        elif self.buckets and not 0 <= modifier_rank < self.buckets[0].channel.num_ranks:
            raise ValueError(
                f"GatheredParameters(modifier_rank={modifier_rank}): the data-parallel group has ranks 0 to "
                f"{self.buckets[0].channel.num_ranks - 1}."
            )

    def __enter__(self) -> None:
        """Gathers the parameters."""
        for bucket in self.buckets:
            if bucket.weights.is_held:
                raise RuntimeError(
                    f"GatheredParameters: the parameters of unit {bucket.name!r} are gathered by an enclosing context already, "
                    "and the inner one would release them under it. Use one context for all."
                )
            if bucket.is_delayed and self.modifier_rank is not None:
                raise RuntimeError(
                    f"GatheredParameters(modifier_rank={self.modifier_rank}): a delayed update of unit {bucket.name!r} goes on, "
                    "which would overwrite the change. Call engine.optimizer.finish() on every rank before."
                )
        if self.buckets:
            named = [[b.name] if b.sharding.parameters else self._names[b] for b in self.buckets]
            self.buckets[0].channel.meet(f"GatheredParameters of {_told([name for names in named for name in names])}")
        for bucket in self.buckets:
            bucket.await_update()
        # The others are gathered already, such as in their unit's own forward, and stay so.
        self._to_release = {bucket for bucket in self.buckets if not bucket.weights.is_gathered}
        try:
            for bucket in self.buckets:
                bucket.weights.gather()
            for bucket in self.buckets:
                bucket.weights.wait_gathered()
            # To undo changes after an exception, which other ranks may not have: what is whole anyway has no shard to return to,
            # and may be the master weights themselves.
            whole = [bucket for bucket in self.buckets if not bucket.sharding.parameters]
            self._before = [(values, values.clone()) for bucket in whole for values in self._to_send(bucket)]
        except BaseException:  # not enough memory for all: those gathered so far would be in the way of another try
            for bucket in self._to_release:
                bucket.weights.release()
            raise
        for bucket in self.buckets:
            bucket.weights.is_held = bucket.sharding.parameters

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Keeps the modifier rank's changes, and releases."""
        changed: set[str] = set()
        reshaped = self._take_assigned()
        for values, before in self._before if kind is not None else []:
            values.copy_(before)
        self._before = []
        for bucket in self.buckets:
            bucket.weights.is_held = False
            if kind is None and self.modifier_rank is not None:
                for values in self._to_send(bucket):
                    comm.broadcast_(values, bucket.channel.group, self.modifier_rank)
                bucket.adopt_gathered()
            elif kind is None:
                changed.update(_changed(bucket))
            if kind is None or bucket.sharding.parameters:
                bucket.weights.mark_unwritten()  # else the step has still to look for what was written before
        if self.buckets and kind is None and self.modifier_rank is None:
            changed.update(*comm.all_gathered_objects(changed, self.buckets[0].channel.group))
        for bucket in self.buckets:
            # What is read while a forward goes on is autograd's, which reads it again once it is gathered for backward. What an
            # earlier context has lent stays so.
            bucket.weights.is_lent |= not _is_in_use(bucket)
            # If anything was written, all ranks undo it, or they would gather different buckets next.
            if changed or (kind is not None and not _is_in_use(bucket)):
                bucket.weights.let_go()  # even if a graph made by a backward reads the old values
            elif bucket in self._to_release:
                bucket.weights.release()
        if changed:
            raise RuntimeError(
                f"GatheredParameters: {', '.join(sorted(changed))} changed inside the context, which was opened for reading "
                "only; the change has been undone. To keep it, give modifier_rank=0 (the rank whose values count)."
            )
        if reshaped and kind is None:
            raise RuntimeError(
                f"GatheredParameters: {', '.join(reshaped)} got data of another shape inside the context; it was not taken. "
                "Resize (as resize_token_embeddings does) before zero.Init or initialize shards the model, or after "
                "engine.destroy(); or assign a new nn.Parameter to the module, before initialize."
            )

    def _take_assigned(self) -> list[str]:
        """Writes what was assigned to parameters' `data` into P, of which they are views again.

        Returns:
            Names of parameters that were given data of another shape, which is left out.
        """
        assigned: list[tuple[str, Tensor, Tensor]] = []  # copies, all before any write: one may be a view of another
        for bucket in self.buckets:
            for name, parameter in bucket.parameters.items():
                view = bucket.weights.views[name]
                if not is_same_view(parameter, view):
                    assigned.append((name, view, parameter.detach().clone()))
                    parameter.data = view
        for _, view, value in assigned:
            if value.shape == view.shape:
                view.copy_(value)
        return [name for name, view, value in assigned if value.shape != view.shape]

    def _to_send(self, bucket: Bucket) -> list[Tensor]:
        """The parts of P that the modifier rank sends. If P is not sharded, other contexts may be open on the rest of it."""
        if bucket.sharding.parameters:
            return [bucket.weights.flat]
        return [bucket.weights.views[name] for name in self._names[bucket]]


def _told(names: list[str]) -> str:
    """The first names; and if there are more, a digest, by which ranks notice that these differ."""
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=4).hexdigest()
    return some(names, MOST_NAMED) + (f" (digest {digest})" if len(names) > MOST_NAMED else "")


def _is_in_use(bucket: Bucket) -> bool:
    """Whether a forward or a backward is under way; an exception in one may be a checkpoint's that has recomputed enough."""
    return bucket.schedule is not None and bucket.schedule.is_under_way


def _reader_of(bucket: Bucket) -> nn.Module | None:
    """The module whose forward is under way: it reads parameters that it does not own, and its backward will need them again."""
    return None if bucket.schedule is None or bucket.weights.is_gathered else bucket.schedule.forwards.innermost


def _changed(bucket: Bucket) -> list[str]:
    """Parameters whose gathered values differ from this rank's shard, bit for bit; each rank looks at its own part."""
    now = bucket.weights.owned_view
    with bucket.weights.owned() as shard:
        before = shard.to(now)
        if torch.equal(now.view(torch.uint8), before.view(torch.uint8)):
            return []
        names = []
        for segment in bucket.layout.segments:
            new, old = (bucket.owned_part(values, segment)[0].view(torch.uint8) for values in (now, before))
            if not torch.equal(new, old):
                names.append(segment.name)
    return names
