"""Gemini: traces one iteration on the cpu policy, plans what stays gathered on the device, and replays the plan.

Parameters and optimizer states rest in host memory. A gathered unit is copied to the device; releasing it drops that copy, and
the next gather brings it again (PatrickStar, arXiv:2108.05818; Colossal-AI's Gemini). The first iteration gathers without a plan,
and measures what else is on the device at each moment. From the second iteration on, the plan sets what is gathered when, and
what stays. If an iteration runs units in another order, it falls back to gathering on demand, and the next one is traced anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from megazero import comm
from megazero.throughput import unreserved_memory_bytes
from megazero.zero.gemini_plan import Plan
from megazero.zero.gemini_trace import Meter, Moment, Trace, Tracer
from megazero.zero.residency import GatherLimits, Residency

logger = logging.getLogger(__name__)

# Share of its memory that PyTorch's allocator loses between tensors: it had reserved 6.47 GB for 6.29 (355M parameters, H200).
LOST_BETWEEN_TENSORS = 0.03


class CudaMeter:
    """The memory of a CUDA device, as PyTorch's allocator sees it. Every call of `used_bytes` resets the allocator's peak."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def used_bytes(self) -> int:
        """Most bytes allocated since the last call; blocks made useless by fragmentation count as used."""
        statistics = torch.cuda.memory_stats(self.device)
        most = statistics["allocated_bytes.all.peak"] + statistics["inactive_split_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(most)

    def free_bytes(self) -> int:
        """Bytes that the allocator can still reserve, plus those unused in it, without what it will lose between tensors."""
        reserved, allocated = torch.cuda.memory_reserved(self.device), torch.cuda.memory_allocated(self.device)
        useless = torch.cuda.memory_stats(self.device)["inactive_split_bytes.all.current"]
        mine = unreserved_memory_bytes(self.device) + reserved
        return int(max(0, mine * (1 - LOST_BETWEEN_TENSORS) - allocated - useless))


class Deviation(RuntimeError):
    """The iteration uses another unit than the traced one did; the message says which and when."""


class Replay:
    """Follows a plan use by use, iteration after iteration, until a `Deviation`."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._moment = plan, -1

    def advance(self, unit: int) -> tuple[int, ...]:
        """The units to fetch when `unit` is used; the fetch of `unit` itself is among them, or has been started before."""
        self._expect(unit)
        self._moment += 1
        return self._plan.fetch[self._moment]

    def stays(self, unit: int) -> bool:
        """Whether a unit whose use is over is also on the device at the next moment."""
        return any(unit in there for there in self._plan.on_device[self._moment + 1 : self._moment + 2])

    def finish(self) -> None:
        """Ends the iteration, before parameters change."""
        self._expect(None)
        self._moment = -1

    def _expect(self, found: int | None) -> None:
        """Raises unless the plan's next use is of `found`, or, if that is None, the plan has no further use."""
        moments = self._plan.moments[self._moment + 1 : self._moment + 2]
        expected = moments[0].unit if moments else None
        if found != expected:
            what = "the iteration ends" if found is None else f"unit {found} is used"
            want = "the end of the iteration" if expected is None else f"unit {expected}"
            raise Deviation(f"moment {max(self._moment, 0)}: {what}, and the plan expects {want}.")


class Gemini(Residency):
    """The residency of units, decided by a plan from the second iteration on.

    Args:
        sizes, limits: as for `Residency`, which decides until there is a plan.
        nbytes: bytes of each unit's parameters on the device, when all of them are gathered.
        meter: measures the device's memory.
        model_bytes: returns how many bytes the engine itself holds on the device now: gathered units, and states there.
        group: the ranks that gather together, and so follow one plan.
        make_plan: `plan_placement`, with the bytes of this rank's states and their share of the margin.
        accumulates: returns whether the gradients of several iterations are added up before an update.

    Attributes:
        plan: the plan made from the last traced iteration.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        limits: GatherLimits,
        *,
        nbytes: Mapping[int, int],
        meter: Meter,
        model_bytes: Callable[[], int],
        group: comm.ProcessGroup,
        make_plan: Callable[..., Plan],
        accumulates: Callable[[], bool],
    ) -> None:
        super().__init__(sizes, limits)
        self._nbytes, self._meter, self._model_bytes, self._group = nbytes, meter, model_bytes, group
        self._make_plan, self._accumulates = make_plan, accumulates
        self.plan: Plan | None = None
        self._is_for_sums = False  # the plan has room for the sums of several iterations
        # An iteration is traced, or follows the plan, or has left it; then both are None until its end.
        self._tracer: Tracer | None = Tracer(meter, model_bytes)
        self._replay: Replay | None = None

    def ahead(self, index: int, step: int, live: int, trains: bool = True) -> list[int]:
        """Units to gather now: what the plan, which excludes the root, fetches; without a plan, what the limits allow."""
        trains = trains and index >= 0
        if self._tracer is not None and trains:
            self._tracer.use(index)
        if self._replay is not None:
            try:
                return list(self._replay.advance(index)) if trains else []
            except Deviation as deviation:
                logger.info(
                    "placement: %s Units are gathered on demand until the next iteration, which is traced", deviation
                )
                self._replay = None
        return super().ahead(index, step, live)

    @property
    def follows_plan(self) -> bool:
        """Whether the plan decides what is gathered and what stays."""
        return self._replay is not None

    def stays(self, index: int, live: int) -> bool:
        """Whether the plan keeps the unit on the device at the next moment; without a plan the limits decide."""
        return super().stays(index, live) if self._replay is None else self._replay.stays(index)

    def finish(self) -> None:
        """Ends the iteration after its backward. Collective if the iteration was traced: the ranks agree on a plan.

        Raises:
            ValueError: the device's memory is too small for the units that run together.
        """
        if self._tracer is not None:
            moments, self._tracer = self._tracer.finish(), None
            if moments:  # else nothing was trained
                # The tracer has just measured, so the peak since then is what is in use now.
                self._plan_from(*self._agreed(moments, self._meter.used_bytes() + self._meter.free_bytes()))
        elif self._replay is not None:
            try:
                self._replay.finish()
            except Deviation as deviation:
                logger.info("placement: %s The next iteration is traced", deviation)
                self._replay = None
        if self._replay is None:
            self._tracer = Tracer(self._meter, self._model_bytes)
        else:
            self.make_room_for_sums()

    def make_room_for_sums(self) -> None:
        """Plans anew from the last trace if gradients are added up, and the plan has room for them only after their backward."""
        if self.plan is not None and self._accumulates() and not self._is_for_sums:
            self._plan_from(self.plan.moments, self.plan.budget)

    def _agreed(self, mine: Sequence[Moment], budget: int) -> tuple[tuple[Moment, ...], int]:
        """The least memory and the largest activations of any rank, so that all ranks gather alike. Collective."""
        found = comm.all_gathered_objects((budget, [moment.non_model for moment in mine]), self._group)
        moments = tuple(
            Moment(moment.unit, max(values))
            for moment, values in zip(mine, zip(*(others for _, others in found), strict=True), strict=True)
        )
        return moments, min(other for other, _ in found)

    def _plan_from(self, moments: tuple[Moment, ...], budget: int) -> None:
        self._is_for_sums = self._accumulates()
        self.plan = plan = self._make_plan(Trace(moments, self._nbytes), budget, accumulates=self._is_for_sums)
        self._replay = Replay(plan)
        logger.info(
            "placement: %d fetches of %.1f MB in an iteration of %d moments, at most %.1f of %.1f MB on the device; the "
            "optimizer states of %d units and the shards of %d rest there",
            plan.fetches,
            plan.fetched_bytes / 1e6,
            len(plan.moments),
            plan.peak_bytes / 1e6,
            plan.budget / 1e6,
            len(plan.optimizer_units),
            len(plan.shard_units),
        )
