"""DeepSpeed's `utils`: full values of sharded parameters, gradients and optimizer states, `zero_to_fp32`, and the logger."""

from importlib import import_module
from logging import getLogger
from typing import Any

from megazero.missing_names import missing
from megazero.zero.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)

logger = getLogger("megazero")

_UNITS = "initialize(zero_units=[...]) chooses what is gathered together"
_ABSENT = {  # what DeepSpeed has and this has not: what to do instead
    "OnDevice": "build the model under zero.Init, which never holds all of it",
    "RepeatingLoader": "call iter(loader) again where it ends",
    "get_z3_leaf_modules": _UNITS,
    "groups": "the groups are in megazero.mpu, under Megatron-LM's names",
    "log_dist": 'use logging.getLogger("megazero")',
    "logging": "the logger is megazero.utils.logger",
    "safe_update_full_grad_vectorized": "call safe_get_full_grad and safe_set_full_grad for each parameter, on every rank",
    "set_z3_leaf_module": _UNITS,
    "set_z3_leaf_modules": _UNITS,
    "set_z3_leaf_modules_by_name": _UNITS,
    "set_z3_leaf_modules_by_suffix": _UNITS,
    "unset_z3_leaf_modules": _UNITS,
    "z3_leaf_module": _UNITS,
}

__all__ = [
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "zero_to_fp32",
]


def __getattr__(name: str) -> Any:
    if name == "zero_to_fp32":  # not before: Python warns of a module that runs (-m) and is imported already
        return import_module("megazero.utils.zero_to_fp32")
    raise missing(__name__, name, _ABSENT.get(name))
