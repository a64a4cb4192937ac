"""The bucket: flat storage of one unit's parameters (P), gradients (G) and fp32 master weights (O).

Parameters stay registered in their modules and become views into P. A bucket owns each storage for life: autograd saves
views of weights, so a parameter that pointed elsewhere between forward and backward would give wrong input gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.zero.layout import BucketLayout, Segment


class Bucket:
    """One unit's P in the compute dtype, G and O in fp32, replicated over the data-parallel `group`.

    With fp32 parameters O is P: the optimizer writes the weights that the model reads.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], layout: BucketLayout, group: comm.ProcessGroup) -> None:
        first = next(iter(parameters.values()))
        self.parameters = parameters
        self.layout = layout
        self.group = group
        self.flat = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)  # P
        for segment in layout.segments:
            parameter = parameters[segment.name]
            view = self.view(self.flat, segment)
            view.copy_(parameter.detach())
            parameter.data = view
        self.master = self.flat if first.dtype == torch.float32 else self.flat.float()  # O
        self.grad = torch.zeros(layout.numel, dtype=torch.float32, device=first.device)  # G
        self._filled: set[str] = set()  # segments that hold a gradient of this step
        self._work: comm.Work | None = None
        self._is_waiting = False  # between reduce and wait
        self.is_reduced = False  # G is, or is about to be, the mean over the group
        self._reduced_before: Tensor | None = None  # mean of what was reduced before a late gradient arrived

    @staticmethod
    def view(flat: Tensor, segment: Segment) -> Tensor:
        """The parameter-shaped view of `segment` in a flat tensor of this bucket's layout."""
        return flat[segment.start : segment.stop].view(segment.shape)

    def accumulate(self, segment: Segment) -> None:
        """Adds the parameter's `.grad` into G with a cast, and drops it: `.grad` never outlives the hook."""
        if self.is_reduced:
            self._set_reduced_aside()
        parameter = self.parameters[segment.name]
        assert parameter.grad is not None
        target = self.view(self.grad, segment)
        if segment.name in self._filled:
            target.add_(parameter.grad)
        else:  # the first of the step overwrites, which saves clearing G and reading it back
            target.copy_(parameter.grad)
            self._filled.add(segment.name)
        parameter.grad = None

    def reduce(self) -> None:
        """Starts to replace G by its sum over the group; `wait` finishes. A parameter without gradient counts as zero."""
        for segment in self.layout.segments:
            if segment.name not in self._filled:
                self.view(self.grad, segment).zero_()
        self._work = comm.all_reduce_(self.grad, self.group, async_op=True)
        self.is_reduced = self._is_waiting = True

    def wait(self) -> None:
        """Finishes `reduce`: G is the mean over the group on every rank. Does nothing a second time."""
        if not self._is_waiting:
            return
        self._is_waiting = False
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self.group.size() > 1:
            self.grad.div_(self.group.size())
        if self._reduced_before is not None:
            self.grad.add_(self._reduced_before)
            self._reduced_before = None

    def publish(self) -> None:
        """Copies the updated master weights into the parameters that the model reads."""
        if self.master is not self.flat:
            self.flat.copy_(self.master)

    def zero_grad(self) -> None:
        """Forgets this step's gradients. G's memory stays; the next step overwrites it."""
        self.wait()  # else the reduction that is under way would write into the next step's gradients
        self._reduced_before = None
        self._filled.clear()
        self.is_reduced = False

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes held on this rank: parameters P, gradients G, and master weights O beyond P."""
        master = 0 if self.master is self.flat else self.master.nbytes
        return {"P": self.flat.nbytes, "G": self.grad.nbytes, "O": master}

    def _set_reduced_aside(self) -> None:
        """A gradient came after the reduction (a module that ran twice): it is reduced apart and added by `wait`."""
        self.wait()
        mean = self.grad.clone()
        self.zero_grad()
        self._reduced_before = mean
