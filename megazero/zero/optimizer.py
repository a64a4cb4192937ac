"""The optimizer over buckets: steps of an elementwise torch optimizer on flat fp32 ranges, the global norm, and overflow.

A step goes from `Engine.step` to `BucketOptimizer.update`, which decides by the norm whether there is an update, and by which
factor; then `Update.run` goes through the buckets, tile by tile. A tile is stepped by `SlicedOptimizer.step_slices`, which calls
the torch optimizer, or on the host by a kernel of `optim.adam_kernels`. Each finished bucket is published.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from megazero import comm
from megazero.mpu.groups import ParallelGroups
from megazero.mpu.partition import Partition
from megazero.optim.adam_kernels import TORCH_ADAMS, AdamSettings
from megazero.optim.cpu_adam import CPUAdam, HybridAdam
from megazero.optim.fused_adam import FusedAdam
from megazero.optim.loss_scaler import LossScaler
from megazero.optim.muon import Muon
from megazero.optim.optimizers import TORCH_ELEMENTWISE, OptimizerFactory
from megazero.zero.background import BackgroundUpdate, DelayedUpdate, OverlappedUpdate
from megazero.zero.bucket import Bucket
from megazero.zero.config import ZeroConfig
from megazero.zero.orthogonal import Orthogonal
from megazero.zero.sliced import SlicedOptimizer
from megazero.zero.update import Update

ELEMENTWISE = (*TORCH_ELEMENTWISE, CPUAdam, HybridAdam, FusedAdam)

# Attributes that only torch's and DeepSpeed's optimizers have, and what to use here instead.
_ELSEWHERE = {
    "_global_grad_norm": "call engine.get_global_grad_norm()",
    "add_param_group": "what is trained later is in a group from the start, with requires_grad false until then",
    "backward": "call engine.backward(loss)",
    "check_overflow": "after engine.step() optimizer.overflow says whether the step was skipped",
    "load_state_dict": "a rank holds a part of the state; call engine.load_checkpoint(directory)",
    "optimizer": "the torch optimizer is optimizer.torch_optimizer",
    "state_dict": "a rank holds a part of the state; call engine.save_checkpoint(directory)",
}


def refuse_untested(optimizer: torch.optim.Optimizer) -> None:
    """Returns only if the optimizer is known to work on flat ranges of parameters.

    The elementwise optimizers of torch (or apex) do, and so does megazero's Muon, with the engine's help. Other classes of the
    same name are refused.

    Raises:
        ValueError: the optimizer is not known to; the message lists those that are.
    """
    kind = type(optimizer)
    is_apexs = kind.__name__ == "FusedAdam" and kind.__module__.partition(".")[0] == "apex"
    if kind in (*ELEMENTWISE, Muon) or is_apexs:
        return
    known = sorted({"DeepSpeedCPUAdam", *(cls.__name__ for cls in ELEMENTWISE)})
    raise ValueError(
        f"{kind.__module__}.{kind.__name__} is not known to be elementwise: it may need whole parameters, while the engine steps "
        f"flat ranges that cut across them. Use one of {', '.join(known)} of torch.optim or apex; for Muon it is "
        "megazero.optim.muon.Muon. If every element's update depends on that element alone, say so by "
        "zero_allow_untested_optimizer: true in the configuration, or allow_untested_optimizer=True of Engine or pretrain."
    )


def idle_optimizer(_: Iterable[Any]) -> torch.optim.Optimizer:
    """A torch optimizer without parameter groups, for use when no bucket is trained."""
    idle = torch.optim.SGD([{"params": []}], lr=0.0)  # torch wants at least one group
    idle.param_groups.clear()
    return idle


class BucketOptimizer(SlicedOptimizer):
    """Steps every bucket's fp32 master weights from its reduced gradients.

    Each parameter group is handed to the torch optimizer as a few flat slices of the buckets' storages, not as named
    parameters, so the number of kernels does not grow with the number of parameters.

    Args:
        factory: makes the torch optimizer from a list of parameter-group dicts.
        group_settings: for each parameter group, its options other than "params" (weight_decay, ...).
        groups, cuts: the parallel groups, and how parameters are cut over the tensor-parallel ranks, by name.
        clip_grad: gradients are scaled so that their global norm is at most this; 0 turns clipping off.
        zero: says whether new weights may come late (`overlap_param_gather`), and updates on the host go on during the next
            forward (`overlaps_update`) or step (`delays_update`).
        allow_untested: the caller vouches for an optimizer that is not in ELEMENTWISE.

    Attributes:
        has_gradients: there are gradients for an update, of a whole backward by the engine.
        has_partial_gradients: a backward of the engine has failed, and of its gradients a part may be there.
        scales_itself: torch's fused kernel scales gradients in the pass that it makes anyway.

    Raises:
        ValueError: as in `Orthogonal`; or the optimizer is not known to be elementwise, or not fit for updates as `zero` asks.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        factory: OptimizerFactory,
        group_settings: list[dict[str, Any]],
        groups: ParallelGroups,
        cuts: Mapping[str, Partition],
        loss_scaler: LossScaler,
        clip_grad: float,
        zero: ZeroConfig,
        allow_untested: bool = False,
    ) -> None:
        self._counts_replicated = groups.model_parallel_rank == 0  # in the norm: what all tensor-parallel ranks hold
        self.loss_scaler = loss_scaler
        self.clip_grad = clip_grad
        self._overlaps_param_gather, self._overlaps_update = zero.overlap_param_gather, zero.overlaps_update
        self.overflow = self.has_gradients = self.has_partial_gradients = False
        self._pending: BackgroundUpdate | None = None
        device = buckets[0].device
        # For the new weights of an update that overlaps a forward.
        self._stream = torch.cuda.Stream(device) if zero.overlaps_update and comm.has_streams(device) else None
        self.is_torn = False  # an update or a load has failed in the middle
        self._is_first = True  # no update has been made
        super().__init__(buckets, factory, group_settings)
        if not allow_untested:
            refuse_untested(self.torch_optimizer)
        if isinstance(self.torch_optimizer, CPUAdam):
            self.attributes["on_any_device"] = True  # a part of O may stay on the device, or come to it
        if isinstance(self.torch_optimizer, Muon):
            self.attributes["orthogonalize"] = Orthogonal(self, cuts, groups.model)
        is_fused = all(group.get("fused") for group in self.param_groups)
        self.scales_itself = type(self.torch_optimizer) in TORCH_ADAMS and is_fused
        self.refuse_unfit_updates(delayed=zero.delays_update)

    if not TYPE_CHECKING:  # a type checker would accept every misspelled name

        def __getattr__(self, name: str) -> NoReturn:
            """Raises, with advice on what to use instead if other optimizers have this attribute."""
            advice = f": {_ELSEWHERE[name]}." if name in _ELSEWHERE else ""
            raise AttributeError(f"the engine's optimizer has no attribute {name!r}{advice}")

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scaler.scale

    loss_scale = cur_scale

    @property
    def loss_scale_config(self) -> LossScaler:
        """The loss scaler: `cur_scale`, `dynamic_loss_scale`, ..."""
        return self.loss_scaler

    def step(self, *_: Any, **__: Any) -> NoReturn:
        """Always refused: only `engine.step` counts micro-batches and steps, and advances the learning-rate schedule.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "optimizer.step(): the engine makes the steps, as it counts micro-batches and moves the learning-rate schedule. Call "
            "engine.step() after every engine.backward(loss)."
        )

    def update(self, delayed: bool = False) -> float:
        """Makes one update from the reduced gradients. Returns the global gradient norm, unscaled and before clipping.

        If the norm is not finite (`overflow`), weights and optimizer state are left untouched. Call `finish` and `refuse_torn`
        before.

        Args:
            delayed: the update runs in the background; the model gets its weights at the next `finish`.

        Raises:
            ValueError: as in `refuse_unfit_updates`, if hooks or settings have changed since.
        """
        self.refuse_unfit_updates(delayed)
        norm = self.grad_norm()
        self.overflow = not math.isfinite(norm)
        if not self.overflow:
            overlapped = [] if self._is_first else self._overlapped
            if self._is_first:
                # Moments are made, and stay: torch would cut up the blocks that activations come back for.
                torch.cuda.empty_cache()
                self._is_first = False
            clip = min(1.0, self.clip_grad / (norm + 1e-6)) if self.clip_grad > 0 else 1.0
            factor = clip / self.cur_scale
            self.is_torn = True
            if delayed:
                self._pending = DelayedUpdate(self, self._trained, factor)
            else:
                self._run(factor, [bucket for bucket in self._trained if bucket not in overlapped])
                self._pending = OverlappedUpdate(self, overlapped, factor, self._stream) if overlapped else None
            self.is_torn = False
        where = self._first_not_finite() if self.overflow else ""
        self.zero_grad()
        self.loss_scaler.update(self.overflow, where)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated since the last update. `set_to_none` exists for torch's sake and has no effect here."""
        self.has_gradients = self.has_partial_gradients = False
        for bucket in self._trained:
            bucket.drop_gradients()

    def refuse_torn(self) -> None:
        """Raises if an update or a load has failed in the middle, so that some weights or moments are new and some are old."""
        if self.is_torn:
            raise RuntimeError(
                "The last update, or load of a checkpoint, was cut short by an error: some weights and moments are new, and some "
                "are old. Load a checkpoint before training goes on, or anything is saved."
            )

    def refuse_unfit_updates(self, delayed: bool) -> None:
        """Raises if the torch optimizer cannot update states that rest in a file, or (`delayed`) run in the background."""
        kind = type(self.torch_optimizer).__name__
        if not self.steps_apart and any(bucket.is_swapped for bucket in self._trained):
            raise ValueError(
                f"{kind} with states on NVMe would need all of them in memory at a time: its step() cannot be called for a "
                "part of them, or has hooks. Use torch.optim.AdamW or CPUAdam, without hooks."
            )
        if delayed and self.adam_apart is None:
            raise ValueError(
                f"--delayed-param-update needs Adam or AdamW (fused), without hooks, on the host, got {kind}: the update runs in "
                "the background, beside a schedule that changes learning rates."
            )

    def finish(self) -> None:
        """Completes a background update by bringing its weights into the model, and waits for weights on their way. Collective.

        Does nothing if there are neither.
        """
        self.await_update()
        for bucket in self._trained:
            if not bucket.weights.is_sharded:
                bucket.weights.wait_gathered()

    def await_update(self, until: Bucket | None = None) -> None:
        """Waits for a background update, and starts to bring its weights to the model. Collective.

        Args:
            until: a bucket; those that are updated after it may still be under way afterwards.
        """
        if self._pending is None:
            return
        try:
            is_over = self._pending.finish(until)
        except BaseException as error:
            self.is_torn |= self._pending.has_failed or isinstance(error, Exception)
            if self._pending.has_failed:  # else it was interrupted, and goes on
                self._pending = None
            raise
        if is_over:
            self._pending = None

    @property
    def _trained(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.is_trainable]

    def _run(self, factor: float, buckets: list[Bucket]) -> None:
        if not buckets:
            return
        order = buckets[::-1] if self._overlaps_param_gather else buckets
        gradients = {bucket: bucket.gradient.owned for bucket in order}
        Update(self, gradients, factor).run()
        for bucket in order:
            if self._overlaps_param_gather:
                bucket.weights.wait_when_touched()
            else:
                bucket.weights.wait_gathered()

    @property
    def adam_apart(self) -> list[AdamSettings] | None:
        """Each group's settings now, if updates are Adam's and can run in a thread, beside a schedule that changes them."""
        found = [AdamSettings.of(self.torch_optimizer, group) for group in self.param_groups]
        settings = [each for each in found if each is not None]
        return settings if self.steps_apart and len(settings) == len(found) else None

    @property
    def _overlapped(self) -> list[Bucket]:
        """The buckets whose update goes on during the next forward, in the order in which that needs them.

        Empty if the host would compute both from its own memory: they would only compete. Whole parameters have to be allowed to
        arrive late, because other ranks wait for a rank that reads one.
        """
        is_away = all(bucket.optimizer_home.link is not None or bucket.is_swapped for bucket in self._trained)
        if not (self._overlaps_update and is_away and self.adam_apart is not None):
            return []
        return [b for b in self._trained[::-1] if b.weights.is_sharded or self._overlaps_param_gather]

    @property
    def steps_apart(self) -> bool:
        """Whether the torch optimizer may be called tile by tile; else it is called once, with everything at hand.

        Several calls of its step() then equal one: it does not count calls, and no hook of its own observes them (torch's global
        ones, of all optimizers, see every call).
        """
        torchs, own = self.torch_optimizer, {refusal.id for refusal in self._refusals}
        is_watched = bool({*torchs._optimizer_step_pre_hooks, *torchs._optimizer_step_post_hooks} - own)
        return type(self.torch_optimizer) in ELEMENTWISE and not is_watched

    def grad_norm(self) -> float:
        """The 2-norm of the mean gradient of the whole model, equal on every rank. Takes one collective and one device sync.

        Each rank takes its shard of every bucket, even if gradients are whole, and the float64 sum is rounded to float32. So the
        norm is the same in every stage, whichever parameters share a bucket. Parameters that all tensor-parallel ranks hold count
        once.
        """
        device, gradients = self.buckets[0].device, [bucket.gradient for bucket in self._trained]
        portions = [portion for gradient in gradients for portion in gradient.norms()]
        norms = [norm for span, norm in portions if self._counts_replicated or not span.is_replicated]
        total = torch.zeros((), dtype=torch.float64, device=device)
        if norms:  # all buckets' means are over the same group
            total = torch.stack(_brought(norms, device)).double().square().sum() * gradients[0].to_mean ** 2
        total = comm.all_reduced(total, comm.world())
        return float((total.sqrt() / self.cur_scale).float())

    def grad_norms(self) -> dict[str, float]:
        """`grad_norm` of each trained parameter alone, by name. Takes one collective and one device sync for all of them."""
        device, gradients = self.buckets[0].device, [bucket.gradient for bucket in self._trained]
        found = {name: norm for gradient in gradients for name, norm in gradient.norms_by_name().items()}
        # Sorted, as tensor-parallel ranks may share buckets differently.
        segments = sorted((s for g in gradients for s in g.layout.segments), key=attrgetter("name"))
        none = torch.zeros((), device=device)
        counts = [self._counts_replicated or not segment.is_replicated for segment in segments]
        norms = [found.get(s.name, none) if is_mine else none for s, is_mine in zip(segments, counts, strict=True)]
        squares = torch.stack(_brought(norms, device)).double().square() * gradients[0].to_mean ** 2
        means = (comm.all_reduced(squares, comm.world()).sqrt() / self.cur_scale).float().cpu().tolist()
        return {segment.name: norm for segment, norm in zip(segments, means, strict=True) if self.is_trained(segment)}

    def _first_not_finite(self) -> str:
        """The first parameter, in backward order, whose gradient is inf or NaN, and which rank's part of the sum. Collective.

        It is not known which ranks' own gradients were: the reduction has added them.
        """
        mine: tuple[int, str] | None = None  # the place of its bucket, and what to call it
        for place, bucket in enumerate(self._trained):
            with bucket.gradient.at_hand() as owned:
                segments = bucket.layout.segments
                finite = [torch.isfinite(bucket.owned_part(owned, segment)[0]).all() for segment in segments]
                is_finite = torch.stack(finite).tolist()  # one wait for the device
            name = next((s.name for s, finite in zip(segments, is_finite, strict=True) if not finite), None)
            if name is not None:
                mine = (place, f"{name} (rank {torch.distributed.get_rank()}'s part)")
                break
        found = filter(None, comm.all_gathered_objects(mine))
        return min(found, key=itemgetter(0), default=(0, "no single parameter"))[1]


def _brought(numbers: list[Tensor], device: torch.device) -> list[Tensor]:
    """0-d tensors moved to a device, in the same order, by one copy that the host does not wait for."""
    away = [number for number in numbers if number.device != device]
    coming = iter(torch.stack(away).to(device, non_blocking=True) if away else ())
    return [number if number.device == device else next(coming) for number in numbers]
