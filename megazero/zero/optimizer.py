"""The optimizer over buckets: an elementwise torch optimizer on flat fp32 ranges, the global norm, and overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.optim.loss_scaler import LossScaler
from megazero.zero.bucket import Bucket
from megazero.zero.layout import NO_GROUP, Segment, Span

# Elementwise: the update of an element depends on nothing but that element's gradient and state, so any range can step alone.
_TORCH_ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
ELEMENTWISE = {"FusedAdam", *(cls.__name__ for cls in _TORCH_ELEMENTWISE)}

NORM_ROW = 256  # elements that one fp32 sum of the gradient norm runs over


Counters = dict[str, float]  # the optimizer's scalar state: Adam's "step"


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch's (or apex's) that are known to be elementwise; a class of that name is not."""
    kind = type(optimizer)
    is_fused_adam = kind.__name__ == "FusedAdam" and kind.__module__.partition(".")[0] in ("apex", "megazero")
    return kind in _TORCH_ELEMENTWISE or is_fused_adam


@dataclass(frozen=True, eq=False)
class Slice:
    """A stretch of a bucket's owned range that is one flat parameter to the torch optimizer."""

    bucket: Bucket
    span: Span
    master: nn.Parameter  # 1-D, fp32; the bucket's own memory
    is_trained: bool  # else it is frozen now, and keeps the state that it had


class BucketOptimizer:
    """Steps every bucket's fp32 master weights from its reduced gradients.

    Each parameter group is handed to the torch optimizer as a few flat slices of the buckets' storages, not as named
    parameters, so the number of kernels does not grow with the number of parameters.

    Args:
        factory: makes the torch optimizer from a list of parameter-group dicts.
        group_settings: for each parameter group the options beyond "params" (weight_decay, ...).
        norm_group: all ranks that hold a part of the model: the tensor-parallel and the data-parallel ones.
        counts_replicated: whether this rank counts, in the norm, the parameters that tensor-parallel ranks hold in common.
        clip_grad: the gradients are scaled so that their global norm is at most this; 0 turns clipping off.
        allow_untested: the caller vouches for an optimizer that is not in ELEMENTWISE.

    Raises:
        ValueError: the optimizer is not known to be elementwise.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        factory: Callable[[Iterable[Any]], torch.optim.Optimizer],
        group_settings: list[dict[str, Any]],
        norm_group: comm.ProcessGroup,
        counts_replicated: bool,
        loss_scaler: LossScaler,
        clip_grad: float,
        allow_untested: bool = False,
    ) -> None:
        self.buckets = buckets
        self.norm_group = norm_group
        self.counts_replicated = counts_replicated
        self.loss_scaler = loss_scaler
        self.clip_grad = clip_grad
        self.overflow = False
        self._frozen = self._frozen_now()
        self.slices = self._cut({})
        self.torch_optimizer = factory(
            [{**settings, "params": self._masters(index)} for index, settings in enumerate(group_settings)]
        )
        kind = type(self.torch_optimizer)
        if not is_elementwise(self.torch_optimizer) and not allow_untested:
            raise ValueError(
                f"{kind.__module__}.{kind.__name__} is not known to be elementwise: it may need whole parameters, while the "
                f"engine steps flat ranges that cut across them. Use one of {', '.join(sorted(ELEMENTWISE))} of torch.optim or "
                "apex."
            )
        fused = all(group.get("fused") for group in self.param_groups)
        self._scales_itself = kind in (torch.optim.Adam, torch.optim.AdamW) and fused
        self._counts_in_group = kind.__module__.startswith("apex")
        states = list(self.state.values())  # Adagrad makes its state when it is built, and not for what comes later
        self._at_birth = {key: float(value.flatten()[0]) for key, value in states[0].items()} if states else {}

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

    def _slices_of(self, bucket: Bucket) -> list[Slice]:
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

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's parameter groups (learning rates, weight decay)."""
        return self.torch_optimizer.param_groups

    @property
    def state(self) -> dict[Any, Any]:
        """The torch optimizer's state, by flat slice."""
        return self.torch_optimizer.state

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scaler.scale

    @property
    def loss_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scaler.scale

    @property
    def loss_scale_config(self) -> LossScaler:
        """The loss scaler: `cur_scale`, `dynamic_loss_scale`, ..."""
        return self.loss_scaler

    def step(self) -> float:
        """One update from the reduced gradients. Returns the global gradient norm, unscaled and before clipping.

        A norm that is not finite (`overflow`) leaves weights and optimizer state untouched.
        """
        norm = self.grad_norm()
        self.overflow = not norm < float("inf")  # also true for NaN
        if not self.overflow:
            clip = min(1.0, self.clip_grad / (norm + 1e-6)) if self.clip_grad > 0 else 1.0
            self._update(clip / self.cur_scale)
        where = self._first_not_finite() if self.overflow else ""
        for bucket in self.buckets:
            if bucket.gradient is not None:
                bucket.gradient.zero()
        self.loss_scaler.update(self.overflow, where)
        return norm

    def _update(self, factor: float) -> None:
        """Steps bucket by bucket, so that the new parameters of one are on their way while the next is updated.

        Args:
            factor: by which mean gradients are multiplied.
        """
        trained = [bucket for bucket in self.buckets if bucket.is_trainable]
        if self._scales_itself and trained:
            self._set_scale(trained[0], factor)
        for batch in [[bucket] for bucket in trained] if self._steps_apart else [trained]:
            for bucket in batch:
                self._set_gradients(bucket, factor)
            self.torch_optimizer.step()  # skips what has no gradient
            for bucket in batch:
                for piece in self._slices_of(bucket):
                    piece.master.grad = None
                bucket.publish()
        for bucket in trained:
            bucket.wait_gathered()

    @property
    def _steps_apart(self) -> bool:
        """Whether several calls of the torch optimizer's step() are as good as one: none that it counts, and nobody watches."""
        hooks = (self.torch_optimizer._optimizer_step_pre_hooks, self.torch_optimizer._optimizer_step_post_hooks)
        return type(self.torch_optimizer) in _TORCH_ELEMENTWISE and not any(hooks)

    def _set_scale(self, bucket: Bucket, factor: float) -> None:
        """Has torch's fused kernels divide gradients in the pass that they make anyway. All buckets have one group's mean."""
        assert bucket.gradient is not None
        factor, device = factor * bucket.gradient.to_mean, bucket.gradient.device
        scale = None if factor == 1.0 else torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
        found_inf = None if scale is None else torch.zeros_like(scale)
        vars(self.torch_optimizer).update(grad_scale=scale, found_inf=found_inf)

    def _set_gradients(self, bucket: Bucket, factor: float) -> None:
        """Gives the bucket's slices their gradients, for an update with the mean gradient times `factor`."""
        assert bucket.gradient is not None
        low, factor = bucket.owned_range.start, factor * bucket.gradient.to_mean
        for piece in self._slices_of(bucket):
            if piece.is_trained:
                owned = bucket.gradient.owned[piece.span.start - low : piece.span.stop - low]
                piece.master.grad = owned.float()  # the same memory where G is fp32; else cast before 16 bits underflow
                if factor != 1.0 and not self._scales_itself:
                    piece.master.grad.mul_(factor)

    def grad_norm(self) -> float:
        """The 2-norm of the mean gradient of the whole model, equal on every rank; one collective, one device sync.

        Each rank takes its shard of every bucket, also where gradients are whole, so that the sum is the same bit for bit in
        every stage. Parameters that tensor-parallel ranks hold in common count once.
        """
        squares: list[Tensor] = []
        for bucket in self.buckets:
            if bucket.is_trainable:
                squares += self._squares(bucket)
        zero = torch.zeros((), dtype=torch.float64, device=self.buckets[0].flat.device)
        total = torch.stack(squares).sum() if squares else zero
        total = comm.all_reduce(total, self.norm_group)
        return float(total.sqrt()) / self.cur_scale

    def _first_not_finite(self) -> str:
        """The first parameter, in backward order, whose gradient is inf or NaN, and the rank that saw it. Collective."""
        mine = None
        for bucket in self.buckets:
            if bucket.gradient is not None and mine is None:
                owned = bucket.gradient.owned
                parts = {segment.name: bucket.owned_part(owned, segment)[0] for segment in bucket.layout.segments}
                name = next((name for name, part in parts.items() if not bool(torch.isfinite(part).all())), None)
                mine = name and f"{name} (rank {torch.distributed.get_rank()})"
        return next(filter(None, comm.all_gather_object(mine, self.norm_group)), "no single parameter")

    def _squares(self, bucket: Bucket) -> list[Tensor]:
        """Squared norms of the mean gradient in this rank's shard, float64."""
        assert bucket.gradient is not None
        low, squares = bucket.owned_range.start, []
        for span in bucket.layout.spans:
            part = span.clip(bucket.shard_range.start, bucket.shard_range.stop)
            if part.start < part.stop and (not span.is_replicated or self.counts_replicated):
                owned = bucket.gradient.owned[part.start - low : part.stop - low]
                squares.append(_square_sum(owned) * bucket.gradient.to_mean**2)
        return squares

    # ---- states by parameter

    def state_of(self, bucket: Bucket, keys: Iterable[str]) -> dict[str, Tensor]:
        """The optimizer's tensors of the bucket's owned range, 1-D copies; zero where nothing was trained yet."""
        low, numel = bucket.owned_range.start, bucket.owned_range.stop - bucket.owned_range.start
        found = {key: torch.zeros(numel, device=bucket.flat.device) for key in keys}
        for piece in self._slices_of(bucket):
            for key, value in self.state.get(piece.master, {}).items():
                if key in found:
                    found[key][piece.span.start - low : piece.span.stop - low].copy_(value)
        return found

    def parts_of_state(self, bucket: Bucket, key: str, segment: Segment) -> Iterator[tuple[Tensor, slice]]:
        """What this rank has of one parameter's state: 1-D views, and where they lie in the flattened parameter."""
        for piece in self._slices_of(bucket):
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


def _square_sum(flat: Tensor) -> Tensor:
    """The sum of squares, float64. Row by row, because one fp32 sum over 10^7 elements is wrong in the third digit on a CPU."""
    rows = flat.numel() // NORM_ROW
    norms = torch.linalg.vector_norm(flat[: rows * NORM_ROW].view(rows, NORM_ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[rows * NORM_ROW :], dtype=torch.float32)
    return norms.double().square().sum() + rest.double().square()


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
