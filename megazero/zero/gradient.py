"""G: the gradients of one bucket, from autograd's output to their sum over the data-parallel group."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from megazero.comm import Channel, Work
from megazero.zero.home import Home, MemoryVector, Vector
from megazero.zero.layout import ALIGNMENT, Segment, Span
from megazero.zero.storage import is_same_memory, view_of
from megazero.zero.units import BucketPlan


class Gradient:
    """G of one bucket.

                         whole (stages 0 and 1)                  sharded (stages 2 and 3)
        first gradient   `whole`; `owned` is a part of it        `whole`
        `reduce`         in place, at the last micro-batch       at each micro-batch; `whole` goes on the wire and is forgotten
        `wait`           `owned` is the sum over the group       the same: this rank's part is added to `owned`, in its home
        `zero`           both are freed                          `owned` is freed

    While the first micro-batch's forward piles up activations, G takes no memory.

    The first few gradients wait as they are, without memory for `whole`. A final norm's gradients come at the beginning of
    backward, and those of the embedding that shares its bucket at the end; memory for all of them would stand empty in between.

    Args:
        device: where `whole` lies.
        home: where the owned part of sharded gradients rests.
        predivide: gradients are divided by this before they are summed over the group, to avoid overflow in 16 bits.

    Attributes:
        owned_range: the range that this rank's optimizer updates: its shard, or the whole bucket if O is whole.
        is_sharded: only the owned range is kept between reductions.
        dtype: the dtype in which gradients accumulate.
    """

    def __init__(self, plan: BucketPlan, channel: Channel, device: torch.device, home: Home, predivide: float) -> None:
        self.plan, self.layout, self.owned_range = plan, plan.layout, plan.owned_range(channel.rank)
        self.is_sharded, self.dtype = plan.sharding.gradients, plan.grad_dtype
        self.channel, self.device, self.home, self.predivide = channel, device, home, predivide
        self.whole: Tensor | None = None  # this rank's sum, [layout.numel]
        self._owned: Vector | None = None
        self._norms: list[tuple[Span, Tensor]] | None = None  # taken before the owned part left memory
        self.is_reduced = False
        self._filled: set[str] = set()  # segments that have received a gradient since the last reduction
        self._early: list[tuple[Segment, Tensor]] = []  # gradients that wait for `whole`, at most `plan.early_bytes`
        self._work: Work | None = None
        self._wire: Tensor | None = None  # the tensor that is being reduced
        self._reduced_before: Tensor | None = None  # the sum reduced before a late gradient arrived

    @property
    def owned(self) -> Vector:
        """The sum over the group, in the owned range, once `is_reduced`."""
        assert self._owned is not None, "G is there from its first gradient, sharded from its reduction, to zero()"
        return self._owned

    def at_hand(self, writes: bool = False) -> AbstractContextManager[Tensor]:
        """`owned` as a tensor for a `with` block, where the optimizer computes; changes are kept if `writes`."""
        if writes:
            self._norms = None
        return self.owned.at_hand(writes=writes)

    def norms(self) -> list[tuple[Span, Tensor]]:
        """(span, 2-norm) of `owned`, clipped to this rank's portion; the squares of all portions add up to the group's.

        Each rank takes only its portion even if G is whole, so that the result is the same bit for bit in every stage.
        """
        if self._norms is not None:
            return self._norms
        with self.at_hand() as owned:
            return self._norms_of(owned, self.layout.spans)

    def norms_by_name(self) -> dict[str, Tensor]:
        """The 2-norm of each parameter's part in this rank's portion of `owned`, if it has one there."""
        spans = self.layout.spans_by(lambda segment: segment.name)
        with self.at_hand() as owned:
            return {name: norm for name, span in spans for _, norm in self._norms_of(owned, [span])}

    @property
    def held(self) -> list[Tensor]:
        """The memory of G itself. If G is not sharded, this includes the early gradients that wait for `whole`."""
        waiting = [] if self.is_sharded else [grad for _, grad in self._early]
        return waiting if self._owned is None or self._owned.resident is None else [self._owned.resident, *waiting]

    @property
    def buffers(self) -> list[Tensor]:
        """Memory held temporarily in addition to G."""
        early = [grad for _, grad in self._early] if self.is_sharded else []
        return [tensor for tensor in (self.whole, self._wire, self._reduced_before, *early) if tensor is not None]

    @property
    def to_mean(self) -> float:
        """The factor that turns `owned`, a sum over the group, into the mean."""
        return self.predivide / self.channel.num_ranks

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients have come since the last reduction."""
        return bool(self._filled)

    @property
    def has_wire(self) -> bool:
        """Whether a reduction under way holds memory in addition to G, which its `wait` frees."""
        return self._wire is not None and self._wire is not self.whole

    def accumulate(self, segment: Segment, grad: Tensor) -> None:
        """Adds one parameter's gradient, cast to G's dtype."""
        self._reopen()
        if segment.name in self._filled:
            view_of(self._allocated(), segment).add_(grad)
            return
        self._filled.add(segment.name)
        if self.whole is None and self._is_early(grad):
            self._early.append((segment, grad))
        else:  # the first gradient since the last reduction overwrites, which saves clearing G and reading it back
            view_of(self._allocated(), segment).copy_(grad)

    def _is_early(self, grad: Tensor) -> bool:
        """Whether this gradient may wait as well."""
        nbytes = sum(waiting.untyped_storage().nbytes() for waiting in (grad, *(other for _, other in self._early)))
        return nbytes <= self.plan.early_bytes

    def reduce(self) -> None:
        """Starts to sum the accumulated gradients over the group; `wait` finishes. Parameters without gradient count as zero."""
        self._reopen()
        if self.is_sharded and self._owned is not None:  # another micro-batch is added to it
            self._owned.prefetch()
            if self._owned.resident is None and self._owned.link is not None:
                self._owned.link.to_host.make_room()  # gradients that the last micro-batch sent to the file have left by now
        whole = self._allocated()
        for segment in self.layout.segments:
            if segment.name not in self._filled:
                view_of(whole, segment).zero_()
        self._filled.clear()
        if self.predivide != 1.0:
            whole.div_(self.predivide)
        self._wire = whole.to(self.plan.reduce_dtype)  # G itself if the dtypes are equal
        if self.is_sharded:
            self.whole = None  # a later gradient of this step starts a new one
        reduce = self.channel.reduce_scatter_ if self.plan.sharding.optimizer else self.channel.all_reduce_
        self._work = reduce(self._wire, self.plan.name)

    def wait(self) -> None:
        """Finishes `reduce`: `owned` is then the sum over the group. A second call does nothing."""
        if self._work is None:
            return
        work, self._work = self._work, None
        work.wait()
        assert self._wire is not None
        part, self._wire = self._wire[self.owned_range], None
        if self.is_sharded:
            self._add_to_owned(part)
        else:
            with self.owned.at_hand(writes=True) as owned:
                if not is_same_memory(part, owned):
                    owned.copy_(part)
                if self._reduced_before is not None:
                    owned.add_(self._reduced_before)
                    self._reduced_before = None
        self.is_reduced = True

    def _add_to_owned(self, part: Tensor) -> None:
        """Adds the sum of one micro-batch to sharded gradients, which rest in their home."""
        is_a_part = part.numel() < self.layout.numel
        if self._owned is None:  # a part of a larger tensor is copied, or it would keep all of that alive
            cast = part.to(self.dtype)
            self._owned = self.home.hold(cast, copy=cast is part and is_a_part)
            if self._owned.resident is None or self._owned.link is not None:
                self._norms = self._norms_of(cast, self.layout.spans)
        elif isinstance(self._owned, MemoryVector) and self._owned.link is not None:
            self._norms = None
            self._owned.link.to_host.make_room()
            self._owned.add(part.clone() if is_a_part else part)
        else:
            with self._owned.at_hand(writes=True) as owned:
                owned.add_(part.to(owned.device))
                if self._owned.resident is None:
                    self._norms = self._norms_of(owned, self.layout.spans)

    def take(self) -> Vector:
        """Hands `owned` over to the caller, who must free it; this step's gradients end with that."""
        if self.is_sharded:
            vector, self._owned = self.owned, None
            return vector
        with self.at_hand() as owned:  # a part is copied, or it would keep the whole alive
            return self.home.hold(owned, copy=self.home.link is None and owned.numel() < self.layout.numel)

    def zero(self) -> None:
        """Forgets this step's gradients."""
        self.wait()  # else a reduction under way would write into the next step's gradients
        self._reduced_before = None
        self._filled.clear()
        self._early.clear()
        self.is_reduced = False
        if self._owned is not None:
            self._owned.free()
        self.whole = self._owned = self._norms = None

    def _norms_of(self, owned: Tensor, spans: Iterable[Span]) -> list[tuple[Span, Tensor]]:
        start, stop = self.channel.portion(self.layout.numel, ALIGNMENT)
        parts = [span.clip(start, stop) for span in spans]
        low = self.owned_range.start
        return [(part, _norm(owned[part.start - low : part.stop - low])) for part in parts if part.start < part.stop]

    def _allocated(self) -> Tensor:
        """`whole`, allocated if it does not exist yet, with the early gradients in it."""
        if self.whole is None:
            self.whole = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
            for start, stop in self.layout.gaps:
                self.whole[start:stop].zero_()
            if not self.is_sharded:
                self._owned = MemoryVector(self.whole[self.owned_range])
        while self._early:
            segment, grad = self._early.pop()
            view_of(self.whole, segment).copy_(grad)
        return self.whole

    def _reopen(self) -> None:
        """Before `whole` is used again: finishes a reduction under way, and keeps its sum apart if that lies in `whole`.

        A module may have run twice, or a second loss have come before the step, on some ranks only. What is late is reduced
        separately, and the kept sum is added to it when that is done.
        """
        self.wait()
        if self.is_reduced and not self.is_sharded:
            with self.at_hand() as owned:
                total = owned.clone()
            self.zero()
            self._reduced_before = total


def _norm(flat: Tensor) -> Tensor:
    """The 2-norm. On a CPU squares are added up row by row in float64: an fp32 sum of 10^7 elements is wrong in the third digit.

    A row lies in one parameter and in one rank's part, so its sum is the same whichever bucket holds it.
    """
    if flat.device.type != "cpu":  # it sums in a tree, and an operation takes the host longer than the device
        return torch.linalg.vector_norm(flat, dtype=torch.float32)
    return torch.linalg.vector_norm(flat.view(-1, ALIGNMENT), dim=1, dtype=torch.float32).double().square().sum().sqrt()
