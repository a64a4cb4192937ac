"""Classes of parameters whose values are not on this rank: an empty tensor that says so, or a whole one that waits for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megazero.nested import mapped, tensors_in
from megazero.zero.registry import bucket_of
from megazero.zero.storage import is_same_view, storage_id

if TYPE_CHECKING:
    from megazero.zero.bucket import Bucket
    from megazero.zero.layout import Segment


class ZeroParamStatus(Enum):
    """Whether a sharded parameter's values are whole on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


# Inside it, questions about a tensor bypass `ReleasedParameter.__torch_function__`, which takes microseconds each. It is for
# questions that every step asks all parameters, and that a released parameter answers like any other.
asked_directly = torch._C.DisableTorchFunctionSubclass

# While models are being built, in-place functions on released parameters are allowed, and run as `writers[-1](parameter, call)`:
# `zero.Init` is among the writers for as long as it is active.
writers: list[Callable[[nn.Parameter, Callable[[], Any]], Any]] = []


class ReleasedParameter(nn.Parameter):
    """The class of a parameter between release and gather, much as torch's UninitializedParameter is a class for a while.

    It is an empty tensor of shape (0,). Asking for its dtype or device is allowed, and `ndim` is that of the full shape, because
    scripts choose by it which parameters have weight decay. If a forward reads its values and another module owns it, it is
    gathered. Every other operation that would read or write values raises, because there is nothing to read and a write would be
    lost.

    While there is a writer (`zero.Init` is active), these work as if it were whole: in-place functions on it, `data`, deep
    copies, questions about its shape, and all operations that make no graph. A view of it is then a `ReleasedView`.
    """

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answers questions about the tensor; for operations that touch values, does what the class docstring says."""
        tensors = [*args, *(kwargs or {}).values()]
        flat = [x for item in tensors for x in (item if isinstance(item, (list, tuple)) else [item])]
        target = next((x for x in flat if isinstance(x, cls)), None)
        if func in _GEOMETRY and target is not None and _is_told(func, target):
            return func(torch.empty(target.ds_shape, device="meta"), *args[1:], **(kwargs or {}))
        if _asks(func, args, kwargs):
            try:
                with asked_directly():
                    return func(*args, **(kwargs or {}))
            except IndexError:  # p.size(1), as torch's initializations ask
                raise RuntimeError(_message(func, target)) from None
        if writers and target is not None and _record(target):
            may_have_graph = torch.is_grad_enabled() and func not in _WITHOUT_GRAPH  # graphs keep what is released
            if _is_in_place(func, flat[0], target) or not may_have_graph:
                return _written(target, func, args, kwargs or {})
        if func in _MOVES and target is not None and _stays(func, args, kwargs or {}, target):
            return target
        if target is not None and not _writes(func, flat[0], target) and _gather_for_reading(target):
            return func(*args, **(kwargs or {}))
        raise RuntimeError(_message(func, target))

    def __deepcopy__(self, memo: dict) -> Any:
        """A whole copy while there is a writer, such as `nn.TransformerEncoder` makes of its layer."""
        if writers and _record(self):
            # while gathered, it is an nn.Parameter, which copies itself
            return writers[-1](self, lambda: copy.deepcopy(self, memo))
        return super().__deepcopy__(memo)

    def __repr__(self) -> str:  # type: ignore[override]
        """The parameter's name and shape instead of values."""
        record = _record(self)
        return f"ReleasedParameter({record[1].name}, shape={record[1].shape})" if record else "ReleasedParameter()"

    @property
    def ds_shape(self) -> torch.Size:
        """The full shape."""
        return torch.Size(_place(self)[1].shape)

    @property
    def ds_numel(self) -> int:
        """Elements of the full parameter."""
        return _place(self)[1].numel

    @property
    def ds_id(self) -> int:
        """A number that is unique among the parameters of this process."""
        return id(self)

    @property
    def ds_status(self) -> ZeroParamStatus:
        """NOT_AVAILABLE, or INFLIGHT while its bucket is being gathered."""
        is_coming = _place(self)[0].weights.is_coming
        return ZeroParamStatus.INFLIGHT if is_coming else ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_persist(self) -> bool:
        """False: parameters that stay whole are never released."""
        return False

    @property
    def ds_tensor(self) -> Tensor:
        """A copy of the parameter's part in this rank's shard of the bucket; 1-D, possibly empty."""
        bucket, segment = _place(self)
        start = bucket.owned_range.start
        low, high = segment.clip(start, bucket.owned_range.stop)
        bucket.await_update()
        with bucket.weights.owned(low - start, high - start) as part:
            return part.to(bucket.weights.flat.dtype, copy=True)


class ReleasedView(Tensor):
    """A view of a released parameter while a model is being built, such as `p.data` or `p[0]`, to read and to write through.

    It is an empty tensor. Every operation on it gathers the parameter, takes the view again, and runs on that.

    Attributes:
        parameter: the parameter that it is a view of.
        taken: the actual view; call it while the parameter is whole.
    """

    parameter: nn.Parameter
    taken: Callable[[], Tensor]

    @classmethod
    def of(cls, parameter: nn.Parameter, like: Tensor, take: Callable[[], Tensor]) -> ReleasedView:
        """The view that `take` makes while the parameter is whole, with the dtype and device of `like`."""
        view = like.new_empty(0).as_subclass(cls)
        view.parameter, view.taken = parameter, torch.no_grad()(take)
        return view

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs the operation with the parameter gathered."""
        view = next(tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, cls))
        is_late = isinstance(view.parameter, ReleasedParameter) and not (writers and _record(view.parameter))
        is_lost = isinstance(next(iter(args), None), cls) and (func.__name__ == "__set__" or func is _T.requires_grad_)
        if is_late or is_lost:
            raise RuntimeError(_message(func, view.parameter))
        return _written(view.parameter, func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        """The parameter that it is a view of, instead of values."""
        return f"ReleasedView({self.parameter!r})"


class ArrivingParameter(nn.Parameter):
    """The class of a whole parameter while its new values arrive from other ranks after an update.

    Questions about the tensor are answered at once. Any other access, inside a forward or not, first waits for the values.
    """

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answers questions at once, and makes everything else wait."""
        if func in _QUESTIONS and func not in _OF_MEMORY:
            with asked_directly():
                return func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, cls):
                tensor._arrive()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Any:
        """A copy with the new values, of the class that the parameter otherwise has."""
        self._arrive()
        return copy.deepcopy(self, memo)

    def _arrive(self) -> None:
        bucket = bucket_of(self)
        if bucket is None:
            raise RuntimeError(
                "An engine is gone before the last weights of its parameters have come: call destroy() of it first."
            )
        if bucket.is_updating:  # the other ranks' parts come from there too
            bucket.channel.meet("the first look at a parameter after engine.step()")
        bucket.await_update()
        bucket.weights.wait_gathered()
        if isinstance(self, ArrivingParameter):
            raise RuntimeError(
                f"Unit {bucket.name!r} has no values: the update that was to bring them was cut short by an error. Load a "
                "checkpoint before anything reads it."
            )


def refuse_loading(modules: Iterable[nn.Module]) -> list[Any]:
    """Makes `load_state_dict` of each module raise helpfully if its parameters are sharded; returns the hooks' handles."""
    return [module.register_load_state_dict_pre_hook(_refuse_load) for module in modules]


def _refuse_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    given = {name: p for name, p in module._parameters.items() if prefix + name in state}
    released = [name for name, p in given.items() if isinstance(p, ReleasedParameter)]
    if released and not writers:  # torch would speak of a size mismatch
        raise RuntimeError(
            f"load_state_dict: parameter {prefix + released[0]!r} is sharded over the data-parallel ranks and not gathered now. "
            "Call engine.load_module_state_dict(state) on every rank; or, before there is an engine, load inside of "
            "`with megazero.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):`."
        )


def _record(parameter: nn.Parameter) -> tuple[Bucket, Segment] | None:
    bucket = bucket_of(parameter)
    return None if bucket is None else (bucket, bucket.segment_of(parameter))


def _place(parameter: nn.Parameter) -> tuple[Bucket, Segment]:
    record = _record(parameter)
    assert record is not None, "only a bucket makes a parameter a ReleasedParameter"
    return record


def _asks(func: Callable, args: tuple, kwargs: dict | None) -> bool:
    """Whether it is a question about the tensor, as `p.type()` is, which a printed ParameterDict asks; `p.type(dtype)` moves."""
    return func in _QUESTIONS or (func is _T.type and len(args) == 1 and not kwargs)


def _is_in_place(func: Callable, first: Any, target: Tensor) -> bool:
    name = getattr(func, "__name__", "")
    return first is target and name.endswith("_") and not name.endswith("__")


def _writes(func: Callable, first: Any, target: nn.Parameter) -> bool:
    is_written_through = func == _T.data.__get__  # type: ignore[attr-defined]
    return is_written_through or _is_in_place(func, first, target) or func.__name__ in ("__set__", "__setitem__")


def _is_told(func: Callable, parameter: nn.Parameter) -> bool:
    """Whether this question about the shape is answered with the full one."""
    bucket = bucket_of(parameter)
    if bucket is None:
        return False
    is_in_forward = bucket.schedule is not None and bucket.schedule.forwards.innermost is not None
    return is_in_forward or bool(writers) or func in _DIMENSIONS


def _gather_for_reading(parameter: nn.Parameter) -> bool:
    """Gathers the parameter if a forward that may read it is under way; returns whether one is."""
    bucket = bucket_of(parameter)
    return bucket is not None and bucket.schedule is not None and bucket.schedule.gather_external(bucket, parameter)


def _stays(func: Callable, args: tuple, kwargs: dict, target: nn.Parameter) -> bool:
    """Whether a move has nothing to do, such as `model.to(device)` of a model that is on the device already."""
    with asked_directly():
        return (args[1] if func == _T.data.__set__ else func(*args, **kwargs)) is target  # type: ignore[attr-defined]


def _written(parameter: nn.Parameter, func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of `func`, run with `parameter` gathered and its views taken; views in the result become `ReleasedView`s again.

    Raises:
        RuntimeError: `func` hands out memory, which is about to be released, or gives a view another shape in place.
    """
    message = _message(func, parameter)
    value = args[1] if func == _T.data.__set__ else None  # type: ignore[attr-defined]
    is_view_of_another = isinstance(value, ReleasedView) and value.parameter is not parameter  # torch sees it empty
    if func in _HANDING_OUT or is_view_of_another:
        raise RuntimeError(message)

    views = [x for x in tensors_in((args, kwargs)) if isinstance(x, ReleasedView) and x.parameter is parameter]

    def taken(tensor: Tensor) -> Tensor:
        return next((view.taken() for view in views if view is tensor), tensor)

    def run() -> Any:
        return func(*mapped(args, taken), **mapped(kwargs, taken))

    def kept(item: Any, position: int | None) -> Any:
        if not isinstance(item, Tensor) or item is parameter or storage_id(item) != storage_id(parameter):
            return item
        same = next((view for view in views if is_same_view(view.taken(), item)), None)
        if same is not None:
            return same
        if views and _is_in_place(func, views[0], views[0]):
            raise RuntimeError(message)
        return ReleasedView.of(parameter, item, lambda: run() if position is None else run()[position])

    def call() -> Any:
        result = run()
        if isinstance(result, (list, tuple)):
            items = [kept(item, position) for position, item in enumerate(result)]
            return type(result)(items) if any(x is not y for x, y in zip(items, result, strict=True)) else result
        return kept(result, None)

    return writers[-1](parameter, call) if isinstance(parameter, ReleasedParameter) else call()


def _message(func: Callable, parameter: nn.Parameter | None) -> str:
    record = None if parameter is None else _record(parameter)
    which = f"Parameter {record[1].name!r}" if record else "A parameter"
    name = getattr(func, "__name__", "this operation")
    if name in ("__get__", "__set__"):
        name = f"attribute {getattr(getattr(func, '__self__', None), '__name__', '')!r}"
    return (
        f"{which} is sharded over the data-parallel ranks and not gathered now, so {name} would read nothing, or write what is "
        "lost. Use it inside the forward of its own module; or `with megazero.zero.GatheredParameters(params):` to read it (call "
        "backward inside of it, too) and `GatheredParameters(params, modifier_rank=0)` to change it (in a constructor under "
        "zero.Init p.normal_(), p.data[i] and, without autograd, p[i] = 0 work as well, but nothing that keeps their memory); "
        "a whole state dictionary is engine.module_state_dict(), and engine.load_module_state_dict(state) loads one."
    )


_T = torch.Tensor
_SETTABLE = ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_FACTS = (
    *("shape", "dtype", "device", "layout", "ndim", "grad_fn", "retains_grad", "_version", "itemsize"),
    *(name for name in dir(_T) if name.startswith("is_") and not callable(getattr(_T, name))),  # is_leaf, is_cuda, ...
)
_OF_MEMORY = {_T.untyped_storage, _T.data_ptr, _T.__repr__, _T.__format__}  # their answers give access to values
_QUESTIONS = {
    *_OF_MEMORY,
    *(getattr(_T, name).__get__ for name in (*_FACTS, *_SETTABLE)),
    *(getattr(_T, name).__set__ for name in _SETTABLE),
    *(_T.size, _T.dim, _T.numel, _T.nelement, _T.element_size, _T.is_floating_point, _T.is_complex, _T.is_contiguous),
    *(torch.is_floating_point, torch.is_complex, _T.get_device),
    *(_T.requires_grad_, _T.__hash__, _T.register_post_accumulate_grad_hook, _T.register_hook),
    torch._has_compatible_shallow_copy_type,  # nn.Module.to asks it of every parameter
    *(_T.stride, _T.storage_offset, _T.__len__, _T.__dir__),
}
_WITHOUT_GRAPH = {  # functions that make no graph, even with autograd on
    *(_T.data.__get__, _T.data.__set__, _T.detach),  # type: ignore[attr-defined]
    *(_T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full, _T.new_tensor),
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
}
_HANDING_OUT = {_T.numpy, _T.__array__, _T.__dlpack__, _T.__reduce_ex__, _T.untyped_storage, _T.storage, _T.data_ptr}
_MOVES = {_T.to, _T.type, _T.cuda, _T.cpu, _T.float, _T.half, _T.bfloat16, _T.data.__set__}  # type: ignore[attr-defined]
_DIMENSIONS = {_T.ndim.__get__, _T.dim, _T.ndimension}  # type: ignore[attr-defined]
_GEOMETRY = {*_DIMENSIONS, _T.shape.__get__, _T.size, _T.numel, _T.nelement}  # type: ignore[attr-defined]
