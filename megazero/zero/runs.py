"""The runs of a step's units, and what tells that the backward of each is over. Skip it at first.

Where every parameter of a unit is trained and used, the unit's gradients tell as much. This file is for other units, at stages 2
and 3: with unused or frozen parameters, or under a reentrant checkpoint.

    the inputs of a run                    its backward is over
    made by nodes                          when the first of them has its gradient; those that several units get (a conditioning,
                                           an encoder's output) have theirs after the backward of the first of these units
    leaves                                 when one has its gradient, which comes out of turn, and the graph's backward is over
    detached, by a reentrant checkpoint    likewise; the graph is the recomputed one
    none that gets a gradient              when it has begun, and the graph's backward is over

Whatever its inputs are, it is over when the backward of a unit begins that has run before it.

For example, what `Runs` knows of block 0 and, behind it, block 1 under a reentrant checkpoint:

    block 0 runs                      `_untold` has a run of 0, and `_order` is [0]
    block 1 runs, without a graph     `_again` has 1, and `_order` is [0, 1]; `_kept` holds this run, as no hook does
    block 1 runs again, in backward   `_untold` has a run of 1, and `_ends_with_graph` has 1, whose input is detached
    that input has its gradient       `_untold` has no run of 1 any more: 1 ends with the backward of the recomputed graph
    block 0's backward begins         1 ends, if it has not; `_order` is [0]
    its input has its gradient        `_untold` has no run of 0 any more: 0 ends
"""

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
from megazero.zero.reductions import Reductions


class Run:
    """A run of a unit. Only hooks in its graph keep it, so it is gone with a graph that no backward will go through."""


class Runs:
    """Follows the runs of the units since the last backward, to end each unit as soon as its backward is over.

    Autograd runs later-recorded nodes first, so the whole run of a unit is over before any node that made an input of it. Hooks
    in a graph hold the `Runs` of their forward, which is closed after the backward: what tells something later tells nobody.

    Args:
        end: called with a unit's index when its backward is over, also for a unit that has ended before.

    Attributes:
        first: the unit that ran first, so that its own backward will be the last.
    """

    def __init__(self, forwards: Forwards, reductions: Reductions, end: Callable[[int], None]) -> None:
        self._forwards, self._reductions, self._end = forwards, reductions, end
        self.first: int | None = None
        self._order: list[tuple[int, ref[Run]]] = []  # units around which `begin` is called, in the order of their runs
        self._untold: dict[int, WeakSet[Run]] = {}  # of each, those with inputs of which no gradient has come yet
        self._ends_with_graph: set[int] = set()  # whose backward counts as over when that of the graph is
        self._again: set[int] = set()  # that run again in the backward, for a reentrant checkpoint
        self._kept: list[Run] = []  # that count until the backward is over, also without a hook in a graph
        self._leaf_handles: list[RemovableHandle] = []  # of hooks on leaf inputs, which no graph takes with it

    def close(self) -> None:
        """Ends no unit any more, and lets go of `end`, whose owner holds this: in a cycle, buckets would outlive their engine."""
        self._end = lambda index: None
        for handle in self._leaf_handles:
            handle.remove()

    # ---- what the inputs of a unit tell

    def watch_inputs(self, index: int, inputs: Any) -> None:
        """A unit is about to run: ends it once each of its runs has given the gradient of an input.

        Leaves tell only if no node has made an input.
        """
        if not self._reductions.trains or not self._forwards.expects_backward:
            return
        if not torch.is_grad_enabled():
            self._again.add(index)
            return
        if in_backward() and self._untold.get(index):
            return  # for a checkpoint that is not reentrant, whose first run counts; or beside a run that tells later
        tensors = {id(t): t for t in tensors_in(inputs) if t.requires_grad}.values()
        made = [tensor for tensor in tensors if not tensor.is_leaf]
        is_detached = in_backward() and any(t.is_leaf and not isinstance(t, nn.Parameter) for t in tensors)
        if is_detached or not made:
            self._ends_with_graph.add(index)
        run, untold = Run(), self._untold.setdefault(index, WeakSet())
        if tensors:
            untold.add(run)
        if is_detached and index not in self._again:
            self._kept.append(run)  # perhaps for our hooks, which drop its graph at once: it is not over then
        handles = [tensor.register_hook(partial(self._tell, index, run)) for tensor in made or tensors]
        if not made:
            self._leaf_handles += handles

    def _tell(self, index: int, run: Run, _: Tensor) -> None:
        """An input of a run has its gradient."""
        if not self._reductions.is_open or run not in self._untold[index]:
            return  # a backward that is not this engine's, or a further gradient
        self._untold[index].discard(run)
        if not self._untold[index]:
            end = self._end_with_graph if index in self._ends_with_graph else self._end
            end(index)

    def have_told(self, index: int) -> bool:
        """Whether a unit has run, and each of its runs that has inputs has given the gradient of one."""
        return index in self._untold and not self._untold[index]

    def may_outlast_gradients(self, index: int) -> bool:
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
                self._end_after(places[-1] + 1, is_recomputed=True)
            return None
        if not self._reductions.trains or not self._forwards.expects_backward:
            return None
        if self.first is None:
            self.first = index
        while self._order and self._order[-1][1]() is None:
            self._order.pop()  # any number of forwards may be dropped before a backward
        run = Run()
        if not torch.is_grad_enabled():
            self._kept.append(run)  # the graph of a reentrant checkpoint has no place for a hook yet
        self._order.append((index, ref(run)))
        return run

    def end_later(self, run: Run | None) -> Callable[[Any], None]:
        """A hook for a node that is made now: ends the units whose runs all begin after now.

        Args:
            run: the one that has made the node, if a unit has.
        """
        return partial(self._end_after, len(self._order), run)

    def begin_backward(self, index: int) -> None:
        """The backward of a unit begins; one without inputs ends with its graph, which may be that of a checkpoint's own."""
        if self._reductions.is_open and self.have_told(index):
            self._end_with_graph(index)

    def _end_with_graph(self, index: int) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, index))

    def _end_after(self, place: int, *_: Any, is_recomputed: bool = False) -> None:
        """Ends the units of which all runs began after this place in the order, unless their inputs have done so.

        Ranks that use all of such a unit's parameters have reduced it by now, and may wait for the others to do so before they
        gather anything more.

        Args:
            is_recomputed: the unit before this place is recomputed, and with it perhaps some after it, whose inputs will tell.
        """
        if not self._reductions.is_open:
            return
        after = {index for index, _ in self._order[place:]}
        over = after & self._ends_with_graph
        if not is_recomputed:
            over |= {index for index in after if not self.have_told(index)}
        if over:
            over -= {index for index, run in self._order[:place] if run() is not None}
        for index in sorted(over, reverse=True):
            self._untold[index] = WeakSet()  # its inputs need not tell any more
            self._end(index)
        del self._order[place:]
