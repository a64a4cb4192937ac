"""When buckets are gathered, filled, reduced and released: the hooks between a model and its buckets.

    when                                      what                                             by
    a unit is about to run forward            gather it, and start to gather the next ones     _gather_around
    it has run                                release it                                       _gather_around
    the gradient of its output comes          gather it, and start to gather those before it   _gather_around
    the gradient of a parameter has come      add it to the bucket's G, and reduce that if     _take_gradient
                                              it was the last one
    ... of the unit                           release the unit                                 _release_if_done
    the unit's backward is over               count unused parameters as done, and release it  _end_unit, by `Runs`
    the whole backward is over                reduce and release what is left                  finish_backward
    ... that is not this engine's             release what it has gathered                     _end_other_backward

Units that are used twice in a row stay gathered: the last unit for its backward; the root and the first unit for the next
micro-batch. If parameters are whole on every rank (stages 0 to 2), nothing is gathered and released, and a forward waits only for
new values that the last update has left on their way. `Reductions` keeps count of the gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from megazero.logging import ALIKE, get_logger
from megazero.zero.bucket import Bucket
from megazero.zero.config import ZeroConfig
from megazero.zero.external import external_parameters, register_external_parameter
from megazero.zero.forwards import Forwards, in_backward
from megazero.zero.hooks import Hook, weak_hook
from megazero.zero.layout import Segment
from megazero.zero.outputs import first_nodes, makers, without_views
from megazero.zero.parameter import refuse_loading
from megazero.zero.reductions import Reductions
from megazero.zero.registry import bucket_of
from megazero.zero.residency import Residency
from megazero.zero.runs import Run, Runs
from megazero.zero.units import ROOT, units_of_parameters
from megazero.zero.waiting import Waiting

logger = get_logger(__name__)

# What torch says when autograd has saved a parameter or a view of it, whose memory is gone or whose values are on their way: of a
# version of `ON_THE_WAY` or more. Of what hooks have saved it knows no version, and speaks of the storage, or of an operand of
# size 0, or of a gradient that a node of torch's makes.
_MISSES_MEMORY = re.compile(
    r"setStorage|tensor [ab] \(0\)|vec \(0\)|(mat2|self) must be a matrix|weight of shape \[0\]|gamma\.numel\(\) == C|"
    r"weight should have at least three dimensions|vector \+ matrix @ vector expected|"
    r"Backward\d returned an invalid gradient at index \d - got \[(\d+, )*0\]|at version \d{10}\b"
)
_READ_UNNOTICED = (
    "The backward needs a parameter of a unit after the unit was released, or before it was gathered. If a module that does not "
    "own it has read it, while the unit happened to be whole: call megazero.zero.register_external_parameter(module, parameter) "
    "before the first forward. If the loss reaches the unit other than through what it returns (an attribute, a hook, an "
    "argument that it writes to): return that. If its input comes from a graph whose backward is over: detach() it. If the loss "
    "was computed from parameters inside of GatheredParameters: call backward inside of it, too."
)

FETCHES_BEFORE_GATHER = 2  # units whose shards are on their way from NVMe, in addition to units gathered ahead


class Schedule:
    """Drives the buckets of one model.

    Args:
        units: in execution order.
        buckets: in backward order.
        zero: sets which collectives travel while the model computes, and how much is gathered ahead and kept.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], buckets: list[Bucket], zero: ZeroConfig) -> None:
        self.buckets = buckets
        self._overlaps_comm = zero.overlap_comm
        self.waiting = Waiting()
        self.reductions = Reductions(buckets, zero.overlap_comm, self.waiting)
        # By the bucket's first unit; of units that share a bucket, the others have none here. Only whole parameters share one.
        self._of_unit: dict[int, list[Bucket]] = {index: [] for index in (ROOT, *range(len(units)))}
        for bucket in buckets:
            self._of_unit[bucket.unit].append(bucket)
        self._sharded = [bucket for bucket in buckets if bucket.sharding.parameters]
        sizes = [sum(b.layout.numel for b in self._of_unit[i] if b.sharding.parameters) for i in range(len(units))]
        self.residency = Residency(sizes, zero.gather_limits)
        self._linear_tiles = {bucket.unit for bucket in buckets if bucket.plan.is_linear_tile}  # units
        self._handles: list[Any] = []
        self._graph_ends: list[Node] = []  # of sharded parameters
        self._watched: set[str] = set()
        # `_end_other_backward`, as long as a backward is there that will call it: torch drops it with one that fails.
        self._other_ends: WeakSet[Callable[[], None]] = WeakSet()
        self.forwards = Forwards()
        self._runs = Runs(self.forwards, self.reductions, self._end_unit)
        self._external: set[Bucket] = set()  # buckets with a parameter that other modules read
        for bucket in buckets:
            bucket.schedule = self
            self.watch_gradients(bucket)
        if self._sharded:
            self._watch_forwards(model, units)
        self._names_in = _names_by_unit(units, buckets)
        if zero.overlap_param_gather:  # touched parameters wait by themselves, but compiled kernels do not ask them
            for module in (model, *self._root_modules(model)):
                self._before_forward(module, partial(self._await, self._of_unit[ROOT]))
            for unit, (names, following) in zip(units, pairwise([*self._names_in, {}]), strict=True):
                self._before_forward(unit, partial(self._await, list(names), following))
        if zero.sharding.gradients:
            alive = ref(self)  # a model of whole parameters does not need its engine, and must not keep it

            def watch(index: int, _: nn.Module, *inputs: Any) -> None:
                if (schedule := alive()) is not None:
                    schedule._runs.watch_inputs(index, inputs)

            for index, unit in enumerate(units):
                hook = Hook(partial(watch, index))
                self._handles.append(unit.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        self.restart()

    def _watch_forwards(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        """Gathers sharded parameters for the modules that read them: the model, its units, and modules that do not own them.

        Until they are gathered, nothing can be loaded into them.
        """
        self._handles += [*refuse_loading(model.modules()), *self.forwards.watch(model)]
        self._before_forward(model, partial(self._gather, self._of_unit[ROOT], ROOT))
        self._handles.append(model.register_forward_hook(Hook(self._after_model)))
        root = self._root_modules(model)
        for module in root:
            self._before_forward(module, partial(self._gather, self._of_unit[ROOT]))
        for module in (model, *root):
            self._handles.append(module.register_forward_hook(Hook(self._gather_root_for_backward)))
        for index, unit in enumerate(units):
            self._handles += self.forwards.watch(unit)
            self._gather_around(unit, self._of_unit[index], index)
        for module in model.modules():
            for parameter in external_parameters(module):
                self.add_external(module, parameter)

    def _root_modules(self, model: nn.Module) -> list[nn.Module]:
        """The modules inside the model that own parameters of the root, because a part of the model may be called alone."""
        root = {parameter for bucket in self._of_unit[ROOT] for parameter in bucket.parameters.values()}
        inside = (module for module in model.modules() if module is not model)
        return [module for module in inside if root.intersection(_own_parameters(module))]

    def _before_forward(self, module: nn.Module, act: Callable[[], None]) -> None:
        self._handles.append(module.register_forward_pre_hook(Hook(lambda *_: act()), prepend=True))

    def watch_gradients(self, bucket: Bucket) -> None:
        """Takes over the gradients of the bucket's parameters as they come."""
        for segment in bucket.trained_segments:
            if segment.name in self._watched:
                continue
            self._watched.add(segment.name)
            parameter, take = bucket.parameters[segment.name], partial(Schedule._take_gradient, segment=segment)
            self._handles.append(parameter.register_post_accumulate_grad_hook(weak_hook(bucket, take)))
            if bucket.sharding.parameters:
                self._handles.append(parameter.register_hook(weak_hook(bucket, Schedule._gather_for_gradient)))
                self._graph_ends.append(bucket.weights.graph_end(segment))

    def close(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._graph_ends.clear()
        self._runs.close()
        for bucket in self.buckets:
            bucket.schedule = None

    # ---- the two halves of a micro-batch around loss.backward()

    @contextmanager
    def backward(self, is_last_micro_batch: bool) -> Iterator[None]:
        """Around `loss.backward()`: takes the gradients that come, and has the root whole. `finish_backward` comes after it."""
        self.restart()  # even after a backward that an exception cut short
        self.reductions.is_last_micro_batch, self.reductions.is_open = is_last_micro_batch, True
        for bucket in self._sharded:
            bucket.weights.begin_backward()
        try:
            self._gather(self._of_unit[ROOT])
            # Weights on their way that no forward has read; and updates, as gradients go to the home that they work in.
            self._await(self.buckets)
            yield
        except RuntimeError as error:
            if self._sharded and type(error) is RuntimeError and _MISSES_MEMORY.search(str(error)):
                raise RuntimeError(f"{_READ_UNNOTICED} ({error})") from error
            raise
        finally:
            self.reductions.is_open = False
            for bucket in self._sharded:
                bucket.weights.end_backward()
            self.forwards.clear()  # torch runs no hook of modules that Ctrl-C leaves, in a recomputation too

    def restart(self) -> None:
        """Forgets the unfinished state of an earlier backward."""
        self.reductions.restart()
        partly = [b for b in self.buckets if len(self.reductions.missing(b)) < len(b.layout.segments)]
        self._has_frozen = {bucket.unit for bucket in partly}  # units
        self.forwards.clear()
        self._staying: set[int] = set()  # units that have stayed gathered since their forward, for their backward
        self._begun: set[int] = set()  # units whose backward has begun

    def finish_backward(self) -> None:
        """After `loss.backward()`: reduces what the hooks have left (unused parameters, late gradients), waits and releases."""
        self.reductions.finish()
        self.restart()
        self.residency.finish()
        for bucket in self.buckets:
            self._release(bucket)
        self._runs.close()
        self._runs = Runs(self.forwards, self.reductions, self._end_unit)

    def reduce_rest(self) -> None:
        """Before an update: reduces what micro-batches have only accumulated, none of which was known to be the last."""
        if not self.reductions.is_done:  # else a plan of placement would see a second end of the backward
            self.reductions.is_last_micro_batch = True
            self.finish_backward()

    # ---- gradients

    def _take_gradient(self, bucket: Bucket, segment: Segment) -> None:
        """A `.grad` has come: it goes through `Reductions.take`, `Bucket.accumulate` and `Gradient.accumulate` into G."""
        self.reductions.take(bucket, segment)
        if not self.reductions.missing(bucket):
            self.reductions.reduce_ready()
            self._release_if_done(bucket.unit)

    def _gather_for_gradient(self, bucket: Bucket) -> None:
        """Makes parameters whole again, one of which is about to get a gradient after their release."""
        if not bucket.weights.is_gathered:
            self._gather([bucket])

    # ---- parameters

    def add_external(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Makes the parameter whole around the forward and backward of `module`, which reads it without owning it."""
        bucket = bucket_of(parameter)
        if self._sharded and bucket is not None and bucket.schedule is self:
            self._external.add(bucket)
            self._gather_around(module, [bucket])

    @property
    def is_under_way(self) -> bool:
        """Whether a forward or a backward runs now."""
        return self.forwards.innermost is not None or in_backward()

    def gather_external(self, bucket: Bucket, parameter: nn.Parameter) -> bool:
        """Makes a released parameter of `bucket` whole for the forward under way, now and whenever it runs again.

        In a backward, until that is over: a unit that ran twice and recomputes only a part of itself gets the gradients of that
        part once for each run, and so may be released before the second.

        Returns:
            Whether it did; False outside of a forward and a backward.
        """
        if not self.is_under_way:
            return False
        if (module := self.forwards.innermost) is not None:
            if parameter not in external_parameters(module):
                logger.info(
                    "%s reads %s of unit %s, which from now on is whole from there to the end of a step's backward",
                    type(module).__name__,
                    bucket.segment_of(parameter).name,
                    bucket.name,
                    extra=ALIKE,
                )
            register_external_parameter(module, parameter)
        self._gather([bucket])
        return True

    def _gather_around(self, module: nn.Module, buckets: list[Bucket], index: int | None = None) -> None:
        """Makes buckets whole around the module's forward and backward.

        Args:
            index: the unit that the module is, if the buckets are its own; None if it reads parameters that others own.
        """

        # Before the module ran: its run, whether some of the buckets were whole or on their way, and the `makers` of its inputs.
        before: tuple[Run | None, bool, list[tuple[Tensor, Node | None]]] = (None, False, [])

        def before_forward(_: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal before
            run = None if index is None else self._runs.begin(index)
            before = run, any(bucket.weights.is_allocated for bucket in buckets), makers((args, kwargs))
            self._gather(buckets, index)

        def after_forward(_: nn.Module, __: Any, output: Any) -> Any:
            run, was_allocated, inputs = before
            output = without_views(output, buckets)
            if index is not None and not in_backward() and self._stays(index):
                self._staying.add(index)
            if self._may_be_released(index, was_allocated):
                for bucket in buckets:
                    if bucket.unit != ROOT and not self.forwards.read(bucket):
                        bucket.weights.release()
            # Prehooks of nodes run after hooks of tensors, as those of `Runs.watch_inputs`. So a later unit has ended, on every
            # rank, before this one is gathered.
            for node in first_nodes(output, inputs):
                node.register_prehook(self._runs.end_later(run))
                node.register_prehook(partial(self._gather_for_backward, buckets, index))
            return output

        def forget_inputs(*_: Any) -> None:  # and their graphs, which would otherwise outlive a failed forward
            nonlocal before
            before = (None, False, [])

        self._handles.append(module.register_forward_pre_hook(Hook(before_forward), with_kwargs=True, prepend=True))
        self._handles.append(module.register_forward_hook(Hook(after_forward)))
        self._handles.append(module.register_forward_hook(Hook(forget_inputs), always_call=True))

    def _gather_for_backward(self, buckets: list[Bucket], index: int | None, _: Any) -> None:
        if index is not None:
            self._begun.add(index)
            self._runs.begin_backward(index)
        self._gather(buckets, index, in_forward=False)
        if not (self.reductions.is_open or self._other_ends):
            end = self._end_other_backward
            self._other_ends.add(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        # With create_graph a backward of this backward (a gradient penalty) reads them too, and no hook is in its graph.
        if torch.is_grad_enabled():
            for bucket in buckets:
                bucket.weights.keep()

    def _end_other_backward(self) -> None:
        """After a backward that is not this engine's: releases what it has gathered, alike on all ranks.

        Its gradients release a unit only on those ranks where every parameter of it has got one.
        """
        self._other_ends.clear()
        if self.forwards.innermost is None and not self.reductions.is_open:  # else what is under way needs its units
            self.restart()
            for bucket in self._sharded:
                self._release(bucket)

    def _gather_root_for_backward(self, _: nn.Module, __: Any, output: Any) -> None:
        """Makes the root whole for a backward that is not this engine's: autograd.grad, or another engine's."""
        if torch.is_grad_enabled():
            for node in first_nodes(output, ()):
                node.register_prehook(partial(self._gather_for_backward, self._of_unit[ROOT], None))

    def _may_be_released(self, index: int | None, was_allocated: bool) -> bool:
        """Whether a module that has run forward does not need its buckets until its backward asks for them.

        Args:
            was_allocated: some of the buckets were whole, or on their way, before the module ran.
        """
        if in_backward():
            # Activation checkpointing runs the module again, and its backward follows at once. A tile's backward follows only
            # after those of all later tiles, unless the backward of this very tile has asked for the recomputation.
            return index in self._linear_tiles and not was_allocated
        return index not in self._staying  # what stays for a backward does so through a forward without gradients

    def _gather(self, buckets: list[Bucket], index: int | None = None, in_forward: bool = True) -> None:
        """Makes buckets whole. If `index` is given, the units after it are requested before these buckets are waited for."""
        _refuse_transforms()
        for bucket in buckets:
            bucket.await_update()
            bucket.weights.gather()
            if in_backward():
                self.reductions.expect_again(bucket)
        if index is not None:
            self._prefetch(index, in_forward)
        self._await(buckets)

    def _await(self, buckets: list[Bucket], ahead: Iterable[Bucket] = ()) -> None:
        """Returns when buckets have their values. Those of the buckets `ahead` are on their way then."""
        for bucket in (*buckets, *ahead):
            bucket.await_update()
        for bucket in buckets:
            self.waiting.until(bucket.weights.wait_gathered, f"unit {bucket.name!r}: waiting for its parameters")

    def _prefetch(self, index: int, in_forward: bool) -> None:
        """Starts to gather the next units, and to fetch the shards of the units after them from their homes.

        In a backward, units that have had their turn are left out: some ranks may have released them already, and others not.
        While units are recomputed, so are tiles, because a tile's turn comes after the backward of the others.
        """
        if not self._overlaps_comm:
            return
        step, left_out = 1, set[int]()
        if in_backward():
            step, left_out = -1, self._begun | self._linear_tiles if in_forward else self._begun
        ahead = self.residency.ahead(index, step, self._live, trains=step < 0 or self.forwards.expects_backward)
        further = self.residency.after(ahead[-1] if ahead else index, step)[:FETCHES_BEFORE_GATHER]
        for unit in (unit for unit in ahead if unit not in left_out):
            buckets = self._of_unit[unit]
            if unit != ahead[0] and any(bucket.is_updating for bucket in buckets):
                break  # what comes later may wait for its update later
            for bucket in buckets:
                bucket.await_update()
                bucket.weights.gather()
                if step < 0:
                    bucket.weights.refuse_reads()
        for bucket in (bucket for unit in further if unit not in left_out for bucket in self._of_unit[unit]):
            if not bucket.is_updating:
                bucket.weights.prefetch()

    @property
    def _live(self) -> int:
        """Elements of sharded parameters that are gathered or on their way; 0, to save time, if no limit needs the number."""
        if self.residency.limits.live is None:
            return 0
        return sum(bucket.layout.numel for bucket in self._sharded if bucket.weights.is_allocated)

    def _stays(self, index: int) -> bool:
        # A recomputed tile is gathered for its recomputation and again for its backward, which comes only after the recomputation
        # of all tiles of its layer.
        trains = torch.is_grad_enabled() if index in self._linear_tiles else self.forwards.expects_backward
        return trains and self.residency.stays(index, self._live)

    def _after_model(self, _: nn.Module, __: Any, output: Any) -> Any:
        output = without_views(output, self.buckets)
        if not torch.is_grad_enabled() and not in_backward():  # no backward will come to release the root
            for bucket in self.buckets:
                if bucket.unit not in self._staying:
                    bucket.weights.release()
        return output

    # ---- when a unit's backward is over; if nothing tells, it counts as over at the end of the whole backward

    def _release_if_done(self, index: int) -> None:
        """Releases a unit whose gradients have all come: a parameter's gradient comes when every use of the parameter is done."""
        buckets = self._of_unit[index]
        if index == ROOT or any(self.reductions.missing(b) or b.has_untrained_gradients for b in buckets):
            return
        # If other modules read a parameter, its gradient may come early (from a nested backward) or late.
        if self._external.intersection(buckets):
            return
        # A frozen weight is also needed for the gradients of the unit's inputs. Inputs in a graph from before the last backward
        # (retain_graph, or two forwards and then two backwards) are not counted.
        waits_for_inputs = index in self._has_frozen or self._runs.may_outlast_gradients(index)
        if waits_for_inputs and not self._runs.have_told(index):
            return
        for bucket in buckets:
            self._release(bucket)

    def _release(self, bucket: Bucket) -> None:
        """Releases a unit whose backward is over, unless the next micro-batch begins with it: no update comes in between."""
        if self.reductions.is_last_micro_batch or bucket.unit not in (ROOT, self._runs.first):
            bucket.weights.release()

    def _end_unit(self, index: int) -> None:
        """Counts a unit's unused parameters as done, and releases it.

        They never tell anything about other units in the same bucket, which may run in another order than they have in the
        model.
        """
        if not self.reductions.is_open:  # the backward has failed
            return
        for bucket, names in self._names_in[index].items():
            if bucket not in self._external:
                self.reductions.skip(bucket, names)
        self.reductions.reduce_ready()
        self._release_if_done(index)


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The module's own parameters, with those of its lists and dicts of parameters, which have no forward."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            yield from child.parameters()


def _names_by_unit(units: Sequence[nn.Module], buckets: Sequence[Bucket]) -> list[dict[Bucket, set[str]]]:
    """For each unit, the names of its own parameters by bucket, which may hold other units' too."""
    unit_of = units_of_parameters(units)
    found: list[dict[Bucket, set[str]]] = [{} for _ in units]
    for bucket in buckets:
        for name, parameter in bucket.parameters.items():
            if parameter in unit_of:
                found[unit_of[parameter]].setdefault(bucket, set()).add(name)
    return found


def _refuse_transforms() -> None:
    """Raises inside a torch.func transform, because its tensors have no memory and it does not let a gather write."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "A transform of torch.func (grad, vjp, jvp, vmap, ...) goes through a model that an engine drives, whose sharded "
            "parameters cannot be gathered in it. Use torch.autograd; or transform a copy of the model, made inside of "
            "`with megazero.zero.GatheredParameters(list(engine.module.parameters())):`; or use a stage below 3."
        )
