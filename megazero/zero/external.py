"""Parameters that a module reads although another module owns them (DeepSpeed's external parameters)."""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from megazero.zero.registry import bucket_of

# Of each module, in the order of registration, which is alike on all ranks.
_external: WeakKeyDictionary[nn.Module, dict[nn.Parameter, None]] = WeakKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Makes `parameter` whole around the forward and backward of `module`, which reads it without owning it.

    Call it before or after the engine is made: in the module's constructor, for instance. The first read registers the parameter
    automatically. Calling this beforehand saves a wait and, if the module is compiled, a graph break.

    Raises:
        RuntimeError: `module` is not a module, or `parameter` is not a parameter.
    """
    parameter = _checked(module, parameter)
    known = _external.setdefault(module, {})
    if parameter not in known:
        known[parameter] = None
        bucket = bucket_of(parameter)
        if bucket is not None and bucket.schedule is not None:
            bucket.schedule.add_external(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Undoes `register_external_parameter` for engines made from now on; existing engines continue to gather the parameter.

    Raises:
        RuntimeError: the parameter was not registered for the module.
    """
    parameter = _checked(module, parameter)
    if parameter not in external_parameters(module):
        raise RuntimeError("the parameter is not registered as an external parameter of this module.")
    del _external[module][parameter]


def external_parameters(module: nn.Module) -> Collection[nn.Parameter]:
    """The parameters that were registered for `module`."""
    return _external.get(module, {})


def _checked(module: object, parameter: object) -> nn.Parameter:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise RuntimeError(
            f"register_external_parameter takes a module and a parameter, got {type(module).__name__} and "
            f"{type(parameter).__name__}."
        )
    return parameter
