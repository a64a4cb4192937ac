"""Optimizers by the names that DeepSpeed's JSON gives them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from megazero.optim.adam import OptimizerFactory

# Names of DeepSpeed's, and of torch's, that cannot be what they say here; lower case.
_WHOLE_PARAMETERS = "it needs whole parameters, while the engine steps flat ranges that cut across them"
_COMPRESSED = "its compressed all-reduce is not built; the gradients of every optimizer travel as reduce_dtype says"
_MUP = "it belongs to the mup package: make it there and pass it to initialize(optimizer=...)"
REFUSED = {
    "lamb": _WHOLE_PARAMETERS + " (a norm per parameter)",
    "onebitlamb": _WHOLE_PARAMETERS + " (a norm per parameter)",
    "muon": _WHOLE_PARAMETERS,
    "adafactor": _WHOLE_PARAMETERS,
    "lbfgs": _WHOLE_PARAMETERS,
    "sparseadam": "gradients are dense here",
    "lion": "torch has none, and none is built",
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
}


class NamedPart(Protocol):
    """A section of the JSON that names a class and its parameters."""

    @property
    def type(self) -> str:
        """The name."""
        ...

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters by name."""
        ...


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the nearest known one, else all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."


def optimizer_factory(section: NamedPart) -> OptimizerFactory:
    """A callable that makes the optimizer named by `section.type`, in any case, from parameter groups.

    Adam is AdamW unless `adam_w_mode` is false, as in DeepSpeed, with its default of no weight decay, and runs torch's fused
    kernel; `torch_adam` true takes torch's class with torch's defaults. Any other name is a class of torch.optim.

    Raises:
        ValueError: the name is unknown or cannot work here, or a parameter is unknown or has a bad value.
    """
    optimizer_class, settings = _class_and_settings(section.type, dict(section.params))
    known = set(inspect.signature(optimizer_class).parameters) - {"params"}
    for name in settings:
        if name not in known:
            raise ValueError(f"{section.type} has no parameter {name!r}. {did_you_mean(name, known)}")
    try:  # on one number, so that bad values show before anything is built
        optimizer_class([torch.zeros(1, device="cpu", requires_grad=True)], **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{section.type} does not take {dict(section.params)}: {error}.") from error
    return lambda groups: optimizer_class(groups, **settings)


def _class_and_settings(name: str, params: dict[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    lower = name.lower()
    if lower in REFUSED:
        raise ValueError(f"{name} cannot be used here: {REFUSED[lower]}. Adam, AdamW, Adagrad and SGD can.")
    if lower not in classes:
        offered = [value.__name__ for key, value in classes.items() if key not in REFUSED]
        raise ValueError(f"there is no optimizer {name!r}. {did_you_mean(name, offered)}")
    if "betas" in params:
        betas = params["betas"]
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise ValueError(f"{name}: betas must be two numbers, got {betas!r}.")
        params["betas"] = tuple(betas)
    if lower in ("adam", "adamw"):
        return _adam(name, params)
    return classes[lower], params


def _adam(name: str, params: dict[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    flags = {"adam_w_mode": True, "torch_adam": False, "bias_correction": True, "fp32_optimizer_states": True}
    for key in flags:
        flags[key] = params.pop(key, flags[key])
        if not isinstance(flags[key], bool):
            raise ValueError(f"{name}: {key} must be true or false, got {flags[key]!r}.")
    if not flags["bias_correction"]:
        raise ValueError(f"{name}: bias_correction false is not built; torch's Adam always corrects. Drop it.")
    if not flags["fp32_optimizer_states"]:
        raise ValueError(f"{name}: fp32_optimizer_states false is not built; the moments are always fp32. Drop it.")
    if name.lower() == "adamw" and not flags["adam_w_mode"]:
        raise ValueError(f"{name} contradicts adam_w_mode false. Use Adam, or drop adam_w_mode.")
    if not flags["torch_adam"]:
        params.setdefault("weight_decay", 0.0)  # DeepSpeed's default; that of torch's AdamW is 0.01
        if not params.get("foreach"):  # of which torch allows one
            params.setdefault("fused", True)
    return (torch.optim.AdamW if flags["adam_w_mode"] else torch.optim.Adam), params
