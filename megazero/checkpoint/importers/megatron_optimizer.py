"""Adam's state in a checkpoint of Megatron-LM; in its format "torch", given the names that it is saved without.

There the optimizer numbers its parameters: first the weights, which decay, then norms and biases, which do not, each in the
order in which modules are registered. With 16-bit parameters it keeps fp32 copies in the same order: FP16_Optimizer, and the
optimizers of the releases after v1.1.5, which save the same under other names. The file's own weights are in that order, too
(megatron-core registers a layer's output projection before its Q, K and V). That a number is given the right name is seen from
shapes, and from the copies: rounded to 16 bits they are the model's weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.importers.foreign import loss_scaler_state
from megazero.zero.bucket import MASTER

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SAMPLE = 256  # leading elements that are compared


@dataclass(frozen=True)
class MegatronOptimizer:
    """What is saved of Adam beside its tensors.

    Attributes:
        step: how many steps were taken; one number for all parameters.
        groups: the parameter groups, with lr, betas, weight_decay, ...
        loss_scaler: the state of our `LossScaler`; None without --fp16 or with a static scale.
    """

    step: float
    groups: list[dict[str, Any]]
    loss_scaler: dict[str, Any] | None


def read_optimizer(
    saved: Sequence[Any], weights: Sequence[Mapping[str, Tensor]]
) -> tuple[list[dict[str, dict[str, Tensor]]], MegatronOptimizer]:
    """The optimizer of all ranks: for each, by parameter, "master", "exp_avg" and "exp_avg_sq"; and the rest.

    Args:
        saved: what each rank saved as "optimizer".
        weights: what each rank holds of the model, in the file's order.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, IndexError: it is not what these optimizers save for this model.
    """
    read = [_read_rank(optimizer, shard) for optimizer, shard in zip(saved, weights, strict=True)]
    return [states for states, _ in read], _optimizer(saved[0], {step for _, steps in read for step in steps})


def read_common(saved: Any) -> MegatronOptimizer:
    """Of the format torch_dist what is saved beside the optimizer's tensors, where its groups name no parameters.

    Raises:
        ValueError, KeyError, TypeError: it is not what these optimizers save.
    """
    adam = _adam(saved)
    if "common_step" in adam.get("state", {}):
        return _optimizer(saved, {float(adam["state"]["common_step"])})
    return _optimizer(saved, {float(group["step"]) for group in adam["param_groups"]})  # of the distributed optimizer


def _optimizer(saved: Any, steps: set[float]) -> MegatronOptimizer:
    if len(steps) != 1:
        raise ValueError(f"parameters have taken different numbers of steps: {sorted(steps)[:5]}")
    return MegatronOptimizer(steps.pop(), _adam(saved)["param_groups"], _loss_scaler(saved))


def _loss_scaler(optimizer: Mapping[str, Any]) -> dict[str, Any] | None:
    if later := optimizer.get("grad_scaler"):  # {} of a static scale
        return loss_scaler_state(later["scale"], later["hysteresis_tracker"], later["growth_tracker"])
    if not optimizer.get("dynamic_loss_scale") or "loss_scaler" not in optimizer:
        return None
    scaler = vars(optimizer["loss_scaler"])
    clean_steps = scaler["cur_iter"] - scaler["last_overflow_iter"] - 1
    return loss_scaler_state(scaler["cur_scale"], scaler.get("cur_hysteresis", 1), clean_steps)


def _adam(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """What Adam itself saved."""
    return next((optimizer[key] for key in ("optimizer_state_dict", "optimizer") if key in optimizer), optimizer)


def _read_rank(
    optimizer: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], list[float]]:
    """The states of one rank by parameter, and the number of steps of each."""
    adam = _adam(optimizer)
    copies = optimizer.get("fp32_from_fp16", optimizer.get("fp32_from_fp16_params"))
    is_undecayed = {name: "layernorm" in name or name.endswith(".bias") for name in weights}
    states, steps = {}, []
    for i, group in enumerate(adam["param_groups"]):
        in_group = [name for name in weights if is_undecayed[name] == bool(i)]
        copies_of_group = iter(copies[i] if copies else ())
        for name, number in zip(in_group, group["params"], strict=True):
            state, weight = adam["state"][number], weights[name]
            master = next(copies_of_group) if copies and weight.dtype != torch.float32 else weight
            found = {MASTER: master.detach(), **{key: state[key].detach() for key in _MOMENTS}}
            _check(name, found, weight)
            states[name] = found
            steps.append(float(state["step"] if "step" in state else group["step"]))
    if states.keys() != weights.keys():
        raise ValueError(f"it has {len(states)} of {len(weights)} parameters")
    return states, steps


def _check(name: str, found: Mapping[str, Tensor], weight: Tensor) -> None:
    wrong = [f"{key} {list(tensor.shape)}" for key, tensor in found.items() if tensor.shape != weight.shape]
    if wrong:
        raise ValueError(f"{name} has shape {list(weight.shape)}, but {', '.join(wrong)}")
    master, model = (x.reshape(-1)[:_SAMPLE] for x in (found[MASTER], weight))
    if not torch.equal(master.to(model.dtype), model):
        raise ValueError(f"the fp32 copy of {name} is not the weight of the model")
