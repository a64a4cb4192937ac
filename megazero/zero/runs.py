"""The runs of a step's units, and what tells that the backward of each is over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megazero.nested import tensors_in
from megazero.zero.forwards import Forwards, in_backward
from megazero.zero.hooks import Hook
from megazero.zero.reductions import Reductions


class Run:
    """A run of a unit. Only hooks in its graph keep it, so it is gone with a graph that no backward will go through."""


_Order = list[tuple[int, Callable[[], Run | None]]]


class Runs:
    """Follows the runs of the units since the last backward, to end each unit as soon as its backward is over.

    Autograd runs later-recorded nodes first, so the whole run of a unit is over before any node that made an input of it.

    Args:
        end: called with a unit's index when its backward is over, also for a unit that has ended before.
    """

    def __init__(self, forwards: Forwards, reductions: Reductions, end: Callable[[int], None]) -> None:
        self._forwards, self._reductions, self._end = forwards, reductions, end
        self._leaf_handles: list[RemovableHandle] = []  # of hooks on leaf inputs, which no graph takes with it
        self.forget()

    def forget(self) -> None:
        """Forgets which units have run: their backward is over, and a graph from before it tells nothing any more."""
        # Units around which `begin` is called, in the order in which their runs began, and what tells if the run is gone.
        self._order: _Order = []
        self._left: dict[int, WeakSet[Run]] = {}  # of each, those with inputs of which no gradient has come yet
        self._ends_with_graph: set[int] = set()  # whose backward counts as over when that of the graph is
        self._again: set[int] = set()  # that run again in the backward, for a reentrant checkpoint
        self._recomputed: list[Run] = []  # those of a graph from before the last backward
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()

    def close(self) -> None:
        """Ends no unit any more, and lets go of `end`, whose owner holds this: in a cycle, buckets would outlive their engine."""
        self.forget()
        self._end = lambda index: None

    # ---- what the inputs of a unit tell

    def watch(self, index: int, unit: nn.Module) -> RemovableHandle:
        """Ends the unit once each of its runs has given the gradient of an input; returns the hook's handle.

        Not all inputs tell: one that several units get (a conditioning, an encoder's output) has its gradient only after the
        first of them. A leaf input, which no node made, gets its gradient out of turn. It tells only if there is no other, or
        if it is that of a reentrant checkpoint, which detaches its inputs; then the unit is done at the end of its graph's
        backward, which for such a checkpoint is that of the recomputed graph. A unit of which no input has told by then ends
        when the backward of an earlier unit begins (`end_later`), or with its graph.
        """

        def on_input_grad(left: dict[int, WeakSet[Run]], run: Run, _: Tensor) -> None:
            # Skips a graph from before the last backward, a backward that is not this engine's, and a run's further gradients.
            if left is not self._left or not self._reductions.is_open or run not in left[index]:
                return
            left[index].discard(run)
            if not left[index]:
                if index in self._ends_with_graph:
                    self._end_with_graph(index)
                else:
                    self._end(index)

        def before_forward(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._reductions.trains or not self._forwards.expects_backward:
                return
            if not torch.is_grad_enabled():
                self._again.add(index)
                return
            if in_backward() and self._left.get(index):
                return  # for a checkpoint that is not reentrant, whose first run counts; or beside a run that tells later
            inputs = {id(t): t for t in tensors_in((args, kwargs)) if t.requires_grad}.values()
            made = [tensor for tensor in inputs if not tensor.is_leaf]
            is_detached = in_backward() and any(t.is_leaf and not isinstance(t, nn.Parameter) for t in inputs)
            if is_detached or not made:
                self._ends_with_graph.add(index)
            run, left = Run(), self._left.setdefault(index, WeakSet())
            if inputs:
                left.add(run)
            if is_detached and index not in self._again:
                self._recomputed.append(run)  # perhaps for our hooks, which drop its graph at once: it is not over then
            handles = [t.register_hook(partial(on_input_grad, self._left, run)) for t in made or inputs]
            if not made:
                self._leaf_handles += handles

        return unit.register_forward_pre_hook(Hook(before_forward), with_kwargs=True, prepend=True)

    def have_told(self, index: int) -> bool:
        """Whether a unit has run, and each of its runs that has inputs has given the gradient of one."""
        return index in self._left and not self._left[index]

    def end_late(self, index: int) -> bool:
        """Whether all gradients of a unit's parameters may come before its backward is over.

        A reentrant checkpoint's own backward gives gradients of parameters that another use may have got before. A run without
        inputs has nothing to wait for.
        """
        return index in self._ends_with_graph or index in self._again

    # ---- what the order of the units tells

    def begin(self, index: int) -> Run | None:
        """A unit is about to run. The hooks that `end_later` makes for its output keep what is returned."""
        if in_backward():
            places = [place for place, (unit, _) in enumerate(self._order) if unit == index]
            if places:  # its last run is recomputed: those after it are over
                self._end_after(self._order, places[-1] + 1, is_recomputed=True)
        elif self._reductions.trains and self._forwards.expects_backward:
            while self._order and self._order[-1][1]() is None:
                self._order.pop()  # any number of forwards may be dropped before a backward
            run = Run()
            # The graph of a reentrant checkpoint has no place for a hook yet, so such a run counts until the backward is over.
            self._order.append((index, ref(run) if torch.is_grad_enabled() else lambda: run))
            return run
        return None

    def end_later(self, run: Run | None) -> Callable[[Any], None]:
        """A hook for a node that is made now: ends the units whose runs all begin after now.

        Args:
            run: the one that has made the node, if a unit has.
        """
        return partial(self._end_after, self._order, len(self._order), run)

    def begin_backward(self, index: int) -> None:
        """The backward of a unit begins; one without inputs ends with its graph, which may be that of a checkpoint's own."""
        if self._reductions.is_open and self.have_told(index):
            self._end_with_graph(index)

    def _end_with_graph(self, index: int) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, index))

    def _end_after(self, order: _Order, place: int, *_: Any, is_recomputed: bool = False) -> None:
        """Ends the units of which all runs began after this place in the order, unless their inputs have done so.

        Ranks that use all of such a unit's parameters have reduced it by now, and may wait for the others to do so before they
        gather anything more.

        Args:
            is_recomputed: the unit before this place is recomputed, and with it perhaps some after it, whose inputs will tell.
        """
        if order is self._order and self._reductions.is_open:  # not a graph from before the last backward
            untold = {index for index, _ in order[place:] if not is_recomputed and not self.have_told(index)}
            later = untold | self._ends_with_graph.intersection(index for index, _ in order[place:])
            if later:
                later -= {index for index, run in order[:place] if run() is not None}
            for index in sorted(later, reverse=True):
                self._left[index] = WeakSet()  # its inputs need not tell any more
                self._end(index)
            del order[place:]
