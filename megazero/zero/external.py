"""Parameters that a module reads although another module owns them (DeepSpeed's external parameters)."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

if TYPE_CHECKING:
    from megazero.zero.schedule import Schedule

_external: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
_schedules: WeakSet[Schedule] = WeakSet()  # those that gather parameters


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Has `parameter` whole around the forward and backward of `module`, which reads it without owning it.

    May be called before or after the engine is made: in the module's constructor, for instance.

    Raises:
        RuntimeError: one of the arguments is something else.
    """
    _check(module, parameter)
    known = _external.setdefault(module, [])
    if not any(p is parameter for p in known):
        known.append(parameter)
        for schedule in list(_schedules):
            schedule.add_external(module, parameter)


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


def register_schedule(schedule: Schedule) -> None:
    """Tells `schedule` of external parameters that are registered later."""
    _schedules.add(schedule)


def _check(module: object, parameter: object) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise RuntimeError(
            f"register_external_parameter takes a module and a parameter, got {type(module).__name__} and "
            f"{type(parameter).__name__}."
        )
