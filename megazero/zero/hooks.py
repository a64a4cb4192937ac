"""The hooks that the engine puts on a user's model: neither a copy nor a cycle may keep them, and no graph may contain them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

if TYPE_CHECKING:
    from megazero.zero.bucket import Bucket
    from megazero.zero.schedule import Schedule

Function = TypeVar("Function", bound=Callable)


def uncompiled(function: Function) -> Function:
    """`function`, which torch.compile runs as it is, with all that it calls: no graph can hold parameters that are not whole.

    What torch.compiler.disable does, which imports torch._dynamo: that takes each rank longer than torch. A graph of the calls
    for each hook would be one too many.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


class Hook:
    """A module's hook that torch.compile leaves alone, and that a copy of the module loses, because a copy is not sharded."""

    def __init__(self, hook: Callable) -> None:
        self._call = hook

    @uncompiled
    def __call__(self, *args: Any) -> Any:
        """What the hook returns."""
        return self._call(*args)

    def __reduce__(self) -> tuple:
        """What `copy.deepcopy` and pickle make of it: a function that does nothing and does not refer to the engine."""
        return partial, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    pass


def weak_hook(bucket: Bucket, act: Callable[[Schedule, Bucket], None]) -> Callable[[Tensor], None]:
    """A hook for one of the bucket's parameters, which calls `act` while a schedule drives the bucket.

    A parameter's hooks must not hold its engine, in a cycle that the garbage collector does not see. A bucket holds its schedule,
    so the hook refers to the bucket weakly.
    """
    reference = ref(bucket)

    def hook(_: Tensor) -> None:
        bucket = reference()
        if bucket is not None and bucket.schedule is not None:
            act(bucket.schedule, bucket)

    return hook
