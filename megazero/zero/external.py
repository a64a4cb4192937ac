"""Parameters that a module reads although another module owns them (DeepSpeed's external parameters)."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

from megazero.zero.registry import bucket_of

_external: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Has `parameter` whole around the forward and backward of `module`, which reads it without owning it.

    May be called before or after the engine is made: in the module's constructor, for instance. The first read does the same by
    itself; so this spares a wait, and a graph break where the module is compiled.

    Raises:
        RuntimeError: one of the arguments is something else.
    """
    _check(module, parameter)
    known = _external.setdefault(module, [])
    if not any(p is parameter for p in known):
        known.append(parameter)
        bucket = bucket_of(parameter)
        if bucket is not None and bucket.driver is not None:
            bucket.driver.add_external(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undoes `register_external_parameter` for engines made from now on; a present one goes on gathering it.

    Raises:
        RuntimeError: the parameter was not registered for the module.
    """
    _check(module, parameter)
    known = _external.get(module, [])
    if not any(p is parameter for p in known):
        raise RuntimeError("the parameter is not registered as an external parameter of this module.")
    _external[module] = [p for p in known if p is not parameter]


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """What was registered for `module`."""
    return _external.get(module, [])


def _check(module: object, parameter: object) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise RuntimeError(
            f"register_external_parameter takes a module and a parameter, got {type(module).__name__} and "
            f"{type(parameter).__name__}."
        )
