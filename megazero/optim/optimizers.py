"""Which optimizer: the AdamW that the GPT-2 job's flags describe, or one by the name that DeepSpeed's JSON gives it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megazero.optim.fused_adam import FusedAdam
from megazero.optim.muon import Muon
from megazero.option import check_known, check_options, did_you_mean, option

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]

# Elementwise: an element's update depends only on that element's gradient and state, so any range can be stepped alone.
TORCH_ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)

# Optimizers of DeepSpeed and torch that cannot work here, in lower case, and why.
_WHOLE_PARAMETERS = "it needs whole parameters, while the engine steps flat ranges that cut across them"
_COMPRESSED = "its compressed all-reduce is not built; the gradients of every optimizer travel as reduce_dtype says"
_MUP = "it belongs to the mup package: make it there and pass it to initialize(optimizer=...)"
REFUSED = {
    "lamb": _WHOLE_PARAMETERS + " (a norm per parameter)",
    "onebitlamb": _WHOLE_PARAMETERS + " (a norm per parameter)",
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

# DeepSpeed's defaults: those that differ from torch's, and the learning rates of matrices and of the rest.
MUON_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
MUON_RATES = {"muon_lr": 0.02, "adam_lr": 3e-4}


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv:1711.05101), or Muon beside it, and gradient clipping."""

    weight_decay: float = option(
        0.01, "decoupled weight decay of matrices and embeddings; biases and norms are not decayed", at_least=0
    )
    clip_grad: float = option(1.0, "clip the global gradient norm to this; 0 turns clipping off", at_least=0)
    adam_beta1: float = option(0.9, "decay of the first moment", at_least=0, below=1)
    adam_beta2: float = option(0.999, "decay of the second moment", at_least=0, below=1)
    adam_eps: float = option(1e-8, "added to the square root of the second moment", above=0)
    optimizer: str = option(
        "adamw",
        "muon: Muon for the blocks' matrices, AdamW for the rest; apex-adamw needs NVIDIA apex built from source (the package "
        "index's apex is unrelated)",
        choices=("adamw", "muon", "apex-adamw"),
    )
    muon_momentum: float = option(0.95, "momentum of the matrices, with --optimizer muon", at_least=0, below=1)

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def uses_muon(self) -> bool:
        """Whether the matrices of hidden layers are Muon's."""
        return self.optimizer == "muon"

    def factory(self) -> OptimizerFactory:
        """A callable that makes the optimizer from parameter groups.

        Raises:
            ValueError: apex was asked for and NVIDIA's apex is not importable.
        """
        settings: dict[str, Any] = {"lr": 0.0, "betas": (self.adam_beta1, self.adam_beta2), "eps": self.adam_eps}
        if self.uses_muon:  # with AdamW's learning rate and weight decay, so that one schedule drives both
            momentum = self.muon_momentum
            return lambda groups: Muon(groups, momentum=momentum, adjust_lr_fn="match_rms_adamw", **settings)
        if self.optimizer == "apex-adamw":
            try:
                from apex.optimizers import FusedAdam as ApexAdam
            except ImportError as error:
                raise ValueError(
                    "--optimizer apex-adamw needs NVIDIA apex, built from its source repository (the package called apex on the "
                    f"package index is something else): {error}. Use --optimizer adamw, which is fused as well."
                ) from error
            return lambda groups: ApexAdam(groups, adam_w_mode=True, **settings)
        return lambda groups: FusedAdam(groups, **settings)  # torch's AdamW; imports less


def optimizer_by_name(type: str, params: Mapping[str, Any]) -> OptimizerFactory:
    """A callable that makes the optimizer named `type`, in any case, from parameter groups.

    Adam is AdamW unless `adam_w_mode` is false, as in DeepSpeed, with its default of no weight decay, and runs torch's fused
    kernel; `torch_adam` true takes torch's class with torch's defaults. Muon is ours, for the groups of `muon_groups`. Any other
    name is one of TORCH_ELEMENTWISE.

    Raises:
        ValueError: the name is unknown or cannot work here, or a parameter is unknown or has a bad value.
    """
    optimizer_class, settings = _class_and_settings(type, dict(params))
    defaults = {
        name: p.default for name, p in inspect.signature(optimizer_class).parameters.items() if name != "params"
    }
    defaults |= MUON_RATES if optimizer_class is Muon else {}
    check_known(f"{type} has no parameter", settings, defaults)
    for name, value in settings.items():
        if name != "adjust_lr_fn":
            _check_number(f"{type}: {name}", value, defaults[name])
    rates = {key: settings.pop(key) for key in MUON_RATES if key in settings}  # for `muon_groups`
    try:  # on one number, so that bad values show before anything is built
        for each in (settings, *({**settings, "lr": rate} for rate in rates.values())):
            optimizer_class([torch.zeros(1, device="cpu", requires_grad=True)], **each)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{type} does not take {dict(params)}: {error}.") from error
    return lambda groups: optimizer_class(groups, **settings)


def _check_number(what: str, value: Any, default: Any) -> None:
    """Raises if `value`, or one of its items, is infinite, or a string or truth value where the default tells of a number."""
    if isinstance(value, (list, tuple)) and isinstance(default, tuple):
        for position, each in enumerate(value):
            _check_number(f"{what}[{position}]", each, default[0])
    elif isinstance(value, str):
        wanted = "true or false" if default is None or isinstance(default, bool) else "a number"
        raise ValueError(f"{what} must be {wanted}, got {value!r}, a string.")
    elif isinstance(value, bool) and isinstance(default, (int, float)) and not isinstance(default, bool):
        raise ValueError(f"{what} must be a number, got {value}, a truth value.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, got {value}.")


def muon_groups(
    groups: Iterable[dict[str, Any]], matrices: Collection[Any], params: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Splits each parameter group into its `matrices`, for Muon, and the rest, for AdamW; empty groups are left out.

    Args:
        params: the optimizer's parameters in DeepSpeed's configuration: `muon_lr` and `adam_lr` are the two learning rates, by
            default `lr`.
    """
    found = []
    for group in groups:
        for use_muon, key in ((True, "muon_lr"), (False, "adam_lr")):
            rate = params.get(key, params.get("lr", MUON_RATES[key]))
            half = [parameter for parameter in group["params"] if (parameter in matrices) == use_muon]
            if half:
                found.append({"lr": rate, **group, "params": half, "use_muon": use_muon})
    return found


def _class_and_settings(name: str, params: dict[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    classes, lower = {cls.__name__.lower(): cls for cls in TORCH_ELEMENTWISE}, name.lower()
    if "betas" in params:
        betas = params["betas"]
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise ValueError(f"{name}: betas must be two numbers, got {betas!r}.")
        params["betas"] = tuple(float(beta) if type(beta) is int else beta for beta in betas)  # torch takes no integers
    if lower == "muon":  # torch's, if there is one, needs whole parameters
        return Muon, {**MUON_DEFAULTS, **params}
    if lower in REFUSED:
        raise ValueError(f"{name} cannot be used here: {REFUSED[lower]}. Adam, AdamW, Adagrad, SGD and Muon can.")
    if lower not in classes:
        offered = [Muon.__name__, *(cls.__name__ for cls in TORCH_ELEMENTWISE)]
        raise ValueError(f"there is no optimizer {name!r}. {did_you_mean(name, offered)}")
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
