"""A torch optimizer that is handed flat slices of buckets instead of parameters, and its state by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.zero.bucket import Bucket
from megazero.zero.layout import NO_GROUP, Segment, Span

Counters = dict[str, float]  # the optimizer's scalar state: Adam's "step"


@dataclass(frozen=True, eq=False)
class Slice:
    """A stretch of a bucket's owned range that is one flat parameter to the torch optimizer."""

    bucket: Bucket
    span: Span
    master: nn.Parameter  # 1-D, fp32; the bucket's own memory
    is_trained: bool  # else it is frozen now, and keeps the state that it had


class SlicedOptimizer:
    """Cuts what this rank owns of the buckets into flat slices, and gives each parameter group's to the torch optimizer.

    Args:
        factory: makes the torch optimizer from a list of parameter-group dicts.
        group_settings: for each parameter group the options beyond "params" (weight_decay, ...).

    Attributes:
        torch_optimizer: what `factory` has made.
        slices: its parameters, and those of frozen parameters that have state.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        factory: Callable[[Iterable[Any]], torch.optim.Optimizer],
        group_settings: list[dict[str, Any]],
    ) -> None:
        self.buckets = buckets
        self._frozen = self._frozen_now()
        self.slices = self._cut({})
        self.torch_optimizer = factory(
            [{**settings, "params": self._masters(index)} for index, settings in enumerate(group_settings)]
        )
        self._counts_in_group = type(self.torch_optimizer).__module__.startswith("apex")
        states = list(self.state.values())  # Adagrad makes its state when it is built, and not for what comes later
        self._at_birth = {key: float(value.flatten()[0]) for key, value in states[0].items()} if states else {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's parameter groups (learning rates, weight decay)."""
        return self.torch_optimizer.param_groups

    @property
    def state(self) -> dict[Any, Any]:
        """The torch optimizer's state, by flat slice."""
        return self.torch_optimizer.state

    def _cut(self, counters: dict[str, Counters]) -> list[Slice]:
        """The slices of what this rank owns and trains now, and of what is frozen and has state.

        Args:
            counters: of the parameters that have state. Those that have made different numbers of steps stay apart.
        """
        slices: list[Slice] = []
        for bucket in self.buckets:
            for is_trained in (True, False) if bucket.master is not None else ():

                def key(segment: Segment, bucket: Bucket = bucket, is_trained: bool = is_trained) -> tuple | None:
                    mine = counters.get(segment.name)
                    if segment.group == NO_GROUP or (segment.name in self._frozen) == is_trained:
                        return None
                    if mine is None and not is_trained:
                        return None
                    return segment.group, segment.is_replicated, mine and tuple(sorted(mine.items())), mine is None

                slices += _slices_by(key, bucket, is_trained)
        self._by_bucket = {bucket: [piece for piece in slices if piece.bucket is bucket] for bucket in self.buckets}
        return slices

    def _frozen_now(self) -> set[str]:
        """Asked at the engine's refresh only: a load in between must not cut by what the engine has not followed yet."""
        return {name for bucket in self.buckets for name, p in bucket.parameters.items() if not p.requires_grad}

    def slices_of(self, bucket: Bucket) -> list[Slice]:
        """Those that lie in one bucket."""
        return self._by_bucket.get(bucket, [])

    def _masters(self, group: int) -> list[nn.Parameter]:
        return [piece.master for piece in self.slices if piece.is_trained and piece.span.group == group]

    def refresh(self) -> None:
        """Cuts the slices anew after requires_grad of a parameter has changed. Every parameter keeps its state, as in torch."""
        old, states = self.slices, self.state
        self._frozen = self._frozen_now()
        self.slices = self._cut(self.counters())
        for piece in self.slices:
            for before in old:
                if before.bucket is piece.bucket and before.master in states:
                    _carry_over(states[before.master], before.span, states, piece)
        for before in old:
            states.pop(before.master, None)
        self._hand_over()

    def _hand_over(self) -> None:
        """Gives the torch optimizer the new slices, with the state that it makes at its construction only."""
        for index, group in enumerate(self.param_groups):
            group["params"] = self._masters(index)
        for piece in self.slices:
            if self._at_birth and piece.master not in self.state:
                self._fill_state(piece, self._at_birth)

    def _fill_state(self, piece: Slice, values: Counters, keys: Iterable[str] = ()) -> None:
        """Makes zeros of `keys` for every element, and scalars of the other values."""
        state, device = self.state[piece.master], piece.master.device
        flat = {"sum"} & values.keys()  # Adagrad's
        for key in {*keys, *flat}:
            state[key] = torch.full_like(piece.master, values.get(key, 0.0), requires_grad=False)
        for key in values.keys() - flat:
            state[key] = torch.tensor(values[key], dtype=torch.float32, device=device)

    # ---- states by parameter

    def state_of(self, bucket: Bucket, keys: Iterable[str]) -> dict[str, Tensor]:
        """The optimizer's tensors of the bucket's owned range, 1-D copies; zero where nothing was trained yet."""
        low, numel = bucket.owned_range.start, bucket.owned_range.stop - bucket.owned_range.start
        found = {key: torch.zeros(numel, device=bucket.flat.device) for key in keys}
        for piece in self.slices_of(bucket):
            for key, value in self.state.get(piece.master, {}).items():
                if key in found:
                    found[key][piece.span.start - low : piece.span.stop - low].copy_(value)
        return found

    def parts_of_state(self, bucket: Bucket, key: str, segment: Segment) -> Iterator[tuple[Tensor, slice]]:
        """What this rank has of one parameter's state: 1-D views, and where they lie in the flattened parameter."""
        for piece in self.slices_of(bucket):
            if key in self.state.get(piece.master, {}):
                low, high = max(piece.span.start, segment.start), min(piece.span.stop, segment.stop)
                if low < high:
                    view = self.state[piece.master][key][low - piece.span.start : high - piece.span.start]
                    yield view, slice(low - segment.start, high - segment.start)

    def state_keys(self) -> list[str]:
        """Names of the optimizer's tensors per element, on this rank: ["exp_avg", "exp_avg_sq"] for Adam after a step."""
        return sorted({key for state in self.state.values() for key, value in state.items() if _is_flat(value)})

    def state_keys_everywhere(self) -> list[str]:
        """The same of all ranks together: one that owns nothing has no state. Collective over the data-parallel group."""
        group = self.buckets[0].channel.group
        return sorted({key for keys in comm.all_gather_object(self.state_keys(), group) for key in keys})

    def counters(self) -> dict[str, Counters]:
        """The optimizer's scalar state by name, {} where it has none, of the parameters on this rank that have any state."""
        found: dict[str, Counters] = {}
        for piece in self.slices:
            state = self.state.get(piece.master)
            if state:
                values = {key: value for key, value in state.items() if not _is_flat(value) and value is not None}
                group = self.param_groups[piece.span.group]
                if self._counts_in_group and "step" in group:
                    values["step"] = group["step"]
                mine = {key: float(value) for key, value in values.items()}
                found.update(dict.fromkeys(_names_in(piece), mine))
        return found

    def allocate_state(self, keys: Iterable[str], counters: dict[str, Counters]) -> None:
        """Makes the state anew, zero but for the counters, so that a checkpoint can be read into it.

        Args:
            keys: the optimizer's tensors per element.
            counters: by parameter, as `counters()` gives them; one that is not named starts without state.
        """
        keys = list(keys)
        self.state.clear()
        self.slices = self._cut(counters)
        for piece in self.slices:
            mine = next((counters[name] for name in _names_in(piece) if name in counters), None)
            if mine is not None:
                self._fill_state(piece, {} if self._counts_in_group else mine, keys)
        self._hand_over()
        for group in self.param_groups if self._counts_in_group and counters else ():
            group.update({key: int(value) for key, value in next(iter(counters.values())).items()})


def _slices_by(key: Callable[[Segment], tuple | None], bucket: Bucket, is_trained: bool) -> Iterator[Slice]:
    """Runs of neighbours with an equal key in the bucket's owned range."""
    assert bucket.master is not None
    low, high = bucket.owned_range.start, bucket.owned_range.stop
    for span in bucket.layout.spans_by(key):
        part = span.clip(low, high)
        if part.start < part.stop:
            yield Slice(bucket, part, nn.Parameter(bucket.master[part.start - low : part.stop - low]), is_trained)


def _names_in(piece: Slice) -> list[str]:
    """The parameters that a slice holds elements of."""
    span = piece.span
    return [s.name for s in piece.bucket.layout.segments if s.start < span.stop and span.start < s.stop]


def _carry_over(old: dict[str, Any], old_span: Span, states: dict, piece: Slice) -> None:
    """Copies what the state of an old slice holds of a new one."""
    low, high = max(old_span.start, piece.span.start), min(old_span.stop, piece.span.stop)
    if low >= high:
        return
    new = states[piece.master]
    for key, value in old.items():
        if _is_flat(value):
            target = new.setdefault(key, torch.zeros_like(piece.master, requires_grad=False))
            target[low - piece.span.start : high - piece.span.start].copy_(
                value[low - old_span.start : high - old_span.start]
            )
        else:
            new[key] = value.clone() if isinstance(value, Tensor) else value


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1
