"""`placement="auto"` applies Gemini's plan to an engine: what stays gathered, and which units' states rest on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from megazero import comm
from megazero.logging import ALIKE, get_logger
from megazero.zero.bucket import Bucket
from megazero.zero.config import ZeroConfig
from megazero.zero.gemini import CudaMeter, Gemini
from megazero.zero.gemini_plan import Plan, plan_placement
from megazero.zero.gemini_trace import Meter
from megazero.zero.home import Home
from megazero.zero.optimizer import BucketOptimizer
from megazero.zero.residency import LIMIT_KEYS, GatherLimits, Residency
from megazero.zero.schedule import Schedule
from megazero.zero.units import ROOT

logger = get_logger(__name__)

STATE_BYTES = 12  # per element of an optimizer shard: master weight and two moments, fp32


def placed(config: ZeroConfig, meter: Meter | None) -> tuple[ZeroConfig, Meter | None]:
    """The configuration with the homes for `placement="auto"`, and the meter to plan by; None means static placement."""
    if config.placement != "auto":
        return config, None
    device = comm.local_device()
    meter = meter or (CudaMeter(device) if device.type == "cuda" else None)
    if meter is None:
        logger.warning(
            "placement auto: there is no accelerator. All memory is the host's, and there is nothing to place.",
            extra=ALIKE,
        )
        return config, None
    limits, default = config.gather_limits, GatherLimits()
    if given := [key for name, key in LIMIT_KEYS.items() if getattr(limits, name) != getattr(default, name)]:
        logger.warning(
            "placement auto: from the second step on, the plan decides what is gathered ahead and what stays, within the memory "
            "that is free, and these limits have no effect: %s. Drop them, or use placement static.",
            ", ".join(given),
            extra=ALIKE,
        )
    return replace(config, offload_optimizer="cpu", offload_param="cpu"), meter


class Placement:
    """Makes a schedule follow Gemini, and moves states to where a new plan places them.

    Args:
        host: where states rest if they have no room on the device.
        micro_batches: of a step.
    """

    def __init__(
        self,
        schedule: Schedule,
        optimizer: BucketOptimizer,
        config: ZeroConfig,
        meter: Meter,
        host: Home,
        micro_batches: int,
    ) -> None:
        self._schedule, self._optimizer, self._host, self._micro_batches = schedule, optimizer, host, micro_batches
        self._trained = [bucket for bucket in schedule.buckets if bucket.is_trainable]
        sharded = [bucket for bucket in schedule.buckets if bucket.weights.shard is not None]
        self._frozen = [bucket for bucket in sharded if not bucket.is_trainable]  # the other shards go with O
        self._of_units = [bucket for bucket in sharded if bucket.unit != ROOT]
        sizes = schedule.residency.sizes
        units = (*range(len(sizes)), ROOT)  # in the order in which their states get room

        def by_unit(buckets: Iterable[Bucket], nbytes: Callable[[Bucket], int]) -> dict[int, int]:
            total = dict.fromkeys(units, 0)
            for bucket in buckets:
                total[bucket.unit] += nbytes(bucket)
            return total

        self.gemini = schedule.residency = Gemini(
            sizes,
            config.gather_limits,
            nbytes=by_unit(sharded, lambda bucket: bucket.weights.flat.nbytes),
            meter=meter,
            model_bytes=self.model_bytes,
            group=schedule.buckets[0].channel.group,
            make_plan=partial(
                plan_placement,
                optimizer_bytes=by_unit(self._trained, lambda bucket: STATE_BYTES * bucket.owned_numel),
                gradient_bytes=by_unit(self._trained, lambda b: b.gradient.dtype.itemsize * b.owned_numel),
                shard_bytes=by_unit(self._frozen, _shard_bytes),
                gpu_margin_mem_ratio=config.gpu_margin_mem_ratio,
            ),
            accumulates=self._accumulates,
        )
        self._done: Plan | None = None

    def model_bytes(self) -> int:
        """Bytes on the device that a plan decides on: gathered units, and states that rest there."""
        placed = [bucket for bucket in self._trained if not bucket.is_offloaded]
        states = sum(v.numel * v.dtype.itemsize for bucket in placed for v in bucket.states.values())
        gradients = sum(tensor.nbytes for bucket in placed for tensor in bucket.gradient.held)
        shards = (bucket for bucket in self._frozen if not bucket.weights.is_offloaded)
        gathered = sum(bucket.weights.flat.nbytes for bucket in self._of_units if bucket.weights.is_allocated)
        return gathered + states + gradients + sum(map(_shard_bytes, shards))

    def _accumulates(self) -> bool:
        """Whether the gradients of several micro-batches are added up before an update."""
        return self._micro_batches > 1 or not self._schedule.reductions.is_last_micro_batch

    def expect(self, micro_batches: int) -> None:
        """Between two steps: makes room for the gradients of as many micro-batches as a step has from now on."""
        self._micro_batches = micro_batches
        self.gemini.make_room_for_sums()
        self.follow()

    def follow(self) -> None:
        """Between two steps: if there is a new plan, moves states to and from the device."""
        plan = self.gemini.plan
        if plan is self._done or plan is None:
            return
        self._done = plan
        was_torn, self._optimizer.is_torn = self._optimizer.is_torn, True  # until its slices refer to O's new memory
        torch.cuda.empty_cache()  # else what comes would cut up the blocks that activations come back for
        for is_coming in (False, True):  # states that leave make room for those that come
            home = None if is_coming else self._host
            for bucket in self._trained:
                if bucket.is_offloaded == is_coming and (bucket.unit in plan.optimizer_units) == is_coming:
                    bucket.move_states(home)
            for bucket in self._frozen:
                if bucket.weights.is_offloaded == is_coming and (bucket.unit in plan.shard_units) == is_coming:
                    bucket.weights.move(home)
        self._optimizer.refresh()
        self._optimizer.is_torn = was_torn

    def close(self) -> None:
        """Drops Gemini, which refers to this object, so that the buckets are freed together with the engine."""
        self._schedule.residency = Residency(self.gemini.sizes, self.gemini.limits)
        del self.gemini


def _shard_bytes(bucket: Bucket) -> int:
    """Bytes of this rank's shard of P."""
    return bucket.layout.shard_numel * bucket.weights.flat.element_size()
