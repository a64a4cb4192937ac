"""One checkpointed call: what it needs to be repeated, from the arguments in any nesting to the random streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megazero import comm
from megazero.activation_checkpointing.storage import Kept, Storage
from megazero.comm import Channel
from megazero.mpu.random import RngState
from megazero.nested import tensors_in

_LOOK_BACK = 64  # nodes of the graph between two checkpointed calls; behind more of them nothing is fetched ahead


class Call:
    """A function and its arguments. Its tensors are put away at once, and handed out for the first run.

    Attributes:
        kept: the tensors of which a copy is kept, None if there are none.
        before: what the checkpointed call kept whose output this one takes: the next one that the backward will need. It follows
            from the graph, which is equal on all ranks, so they start their collectives in one order.
        needs_grad: of each tensor among the arguments.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        storage: Storage,
        channel: Channel | None,
    ) -> None:
        """`channel` connects the ranks that what is kept is cut over; None keeps it whole."""
        self.function = function
        self._arguments, tensors = _Frame.of((args, kwargs))
        self.needs_grad = [x.requires_grad for x in tensors]
        self._tensors: list[Tensor] = tensors
        self._output: _Frame | None = None
        self._shapes: list[torch.Size] = []  # of the tensors that the first run returned
        self._rng = RngState.capture()
        kinds = sorted({"cpu", comm.local_device().type} - {"meta"})  # which has no autocast
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._is_copied = _copied(tensors, args, storage.device) if storage.copies(channel) else [False] * len(tensors)
        copied = list(compress(tensors, self._is_copied))
        self.kept = Kept(storage, copied, channel) if copied else None
        self.before = _kept_before(copied)

    def refuse_hidden(self) -> None:
        """Refuses arguments that are no container and hold tensors with a graph, which would lose their gradients.

        Raises:
            ValueError: there is one.
        """
        for x in self._arguments.others():
            if any(tensor.grad_fn is not None for tensor in tensors_in(x)):
                raise ValueError(
                    f"checkpoint: an argument is a {type(x).__name__} that holds a tensor which needs a gradient. Pass that "
                    "tensor by itself, in a list, tuple or dict, or use non_reentrant_checkpoint."
                )

    def take_tensors(self) -> list[Tensor]:
        """The tensors among the arguments, with their graphs; the call does not hold on to them any longer."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def held(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of the call's tensors that are kept as they are, by whoever runs it."""
        return [x for x, is_copied in zip(tensors, self._is_copied, strict=True) if not is_copied]

    def tensors_again(self, held: Iterable[Tensor]) -> list[Tensor]:
        """All tensors, outside of the graph of the first run, in which they need gradients as before."""
        copies, held = iter(self.kept.fetch() if self.kept else ()), iter(held)
        tensors = [next(copies if is_copied else held) for is_copied in self._is_copied]
        return [x.detach().requires_grad_(needs) for x, needs in zip(tensors, self.needs_grad, strict=True)]

    def run(self, tensors: Iterable[Tensor]) -> Any:
        """What the function returns, under the autocast of the first run, without autocast's cache of weights.

        A cast that the first run made has no graph, so no later use of the weight may find it: torch 2.8 would hand it out and
        the weight would lose that gradient (later versions keep a cache for each grad mode).
        """
        args, kwargs = self._arguments.filled(tensors)
        del tensors
        with ExitStack() as stack:
            # Tensors have graphs all the same, because autograd records the call as a whole.
            if not torch.is_grad_enabled():
                stack.callback(_is_first_run.reset, _is_first_run.set(True))
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            return self.function(*args, **kwargs)

    def run_again(self, tensors: Iterable[Tensor]) -> Any:
        """`run` with the random streams of the first run; they go back to where they are now."""
        now = RngState.capture()
        self._rng.restore()
        try:
            return self.run(tensors)
        finally:
            now.restore()

    def take_outputs(self, output: Any) -> tuple[Tensor, ...] | None:
        """The tensors in what the function returned, None if there are none; the rest waits for `with_outputs`.

        Raises:
            ValueError: a returned object that is no container holds tensors.
        """
        self._output, tensors = _Frame.of(output)
        for x in self._output.others():
            if any(True for _ in tensors_in(x)):
                raise ValueError(
                    f"checkpoint: the function returned a {type(x).__name__} that holds tensors, which would lose their "
                    "gradients. Let it return tensors in lists, tuples and dicts, or use non_reentrant_checkpoint."
                )
        self._shapes = [x.shape for x in tensors]
        return tuple(tensors) or None

    def refuse_other_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Refuses what the function returned when it ran again, if it is not of the shapes of the first time.

        Raises:
            RuntimeError: there are more or fewer tensors, or one has another shape.
        """
        shapes = [x.shape for x in outputs]
        if len(shapes) != len(self._shapes):
            raise RuntimeError(
                f"checkpoint: the function returned {len(self._shapes)} tensors in the forward, and {len(shapes)} when it ran "
                "again (--checkpoint-activations, --recompute). It must do the same each time."
            )
        for index, (before, now) in enumerate(zip(self._shapes, shapes, strict=True)):
            if before != now:
                raise RuntimeError(
                    f"checkpoint: tensor {index} of {len(shapes)} that the function returned was of shape {list(before)} in the "
                    f"forward, and of shape {list(now)} when --checkpoint-activations (--recompute) ran it again. It must do the "
                    "same each time: it may not depend on anything that changes in between (a counter, a random number of "
                    "Python's)."
                )

    def with_outputs(self, tensors: tuple[Tensor, ...] | None) -> Any:
        """What the function returned, with these in place of its tensors."""
        assert self._output is not None
        frame, self._output = self._output, None
        return frame.filled(tensors or ())

    def drop(self) -> None:
        """Gives up what is kept."""
        if self.kept is not None:
            self.kept.release()


_HOLE = object()


class _Frame:
    """Nested lists, tuples and dicts whose tensors are taken out."""

    def __init__(self, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self._leaves, self._spec = leaves, spec  # _HOLE in place of a tensor

    @classmethod
    def of(cls, tree: Any) -> tuple[_Frame, list[Tensor]]:
        """The frame of `tree`, and the tensors."""
        leaves, spec = pytree.tree_flatten(tree)
        frame = cls([_HOLE if isinstance(x, Tensor) else x for x in leaves], spec)
        return frame, [x for x in leaves if isinstance(x, Tensor)]

    def others(self) -> list[Any]:
        """What is no container and no tensor."""
        return [x for x in self._leaves if x is not _HOLE]

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """The tree with these in place of its tensors."""
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if x is _HOLE else x for x in self._leaves], self._spec)


_is_first_run: ContextVar[bool] = ContextVar("in the first run of a checkpointed function", default=False)


def refuse_graph(args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuses arguments with a graph where grad mode is off, unless a checkpointed function around this one sees to them.

    Raises:
        RuntimeError: there is one.
    """
    if _is_first_run.get():
        return
    for x in pytree.tree_leaves((args, kwargs)):
        if isinstance(x, Tensor) and x.grad_fn is not None:
            raise RuntimeError(
                f"checkpoint is called inside of no_grad() with a tensor of shape {list(x.shape)} that has a graph "
                f"({x.grad_fn.name()}): its gradient would end here. Leave no_grad(), detach() the tensor, or call the function "
                "without checkpoint (a model: without --checkpoint-activations). An evaluation in which all of the model runs "
                "inside of no_grad() needs none of this."
            )


def _copied(tensors: Sequence[Tensor], args: tuple, device: torch.device) -> list[bool]:
    """Which tensors are copied; the others are kept as they are.

    Not masks, which all layers share, so that a copy per layer would cost memory: the last of several arguments, and those by
    keyword, where they need no gradient. Nor what is not floating-point, or empty, or elsewhere.
    """
    positional = sum(isinstance(x, Tensor) for x in pytree.tree_leaves(args))
    last = positional - 1 if len(args) > 1 and isinstance(args[-1], Tensor) else -1
    return [
        (x.requires_grad or (i < positional and i != last))
        and x.is_floating_point()
        and x.numel() > 0
        and x.device.type == device.type
        and type(x) in (Tensor, nn.Parameter)
        for i, x in enumerate(tensors)
    ]


def _kept_before(tensors: Iterable[Tensor]) -> Kept | None:
    """What the nearest checkpointed call kept that these tensors come from."""
    nodes = deque(x.grad_fn for x in tensors)
    seen = set()
    for _ in range(_LOOK_BACK):
        if not nodes:
            return None
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        call = getattr(node, "call", None)
        if isinstance(call, Call):
            return call.kept
        nodes.extend(next_node for next_node, _ in node.next_functions)
    return None
