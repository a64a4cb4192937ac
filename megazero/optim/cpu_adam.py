"""Adam and AdamW for parameters on the host: a torch optimizer. For flat slices the engine calls its kernels itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megazero.optim.adam_kernels import THREAD_NUMEL, AdamSettings, Operands, fused, mixed

MOMENTS = ("exp_avg", "exp_avg_sq")
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class CPUAdam(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101), or Adam, as fast as the host's memory allows; with the signature of `DeepSpeedCPUAdam`.

    Parameters may have any floating dtype. An update of fp32 parameters equals that of torch.optim.AdamW(fused=True) bit for bit.
    An update of 16-bit parameters is computed in fp32 and rounded once, to nearest even.

    Args:
        model_params: parameters, or dicts of parameter groups.
        bias_correction: false leaves out the division by 1 - beta ** step.
        amsgrad: must be false.
        adamw_mode: decoupled weight decay; else it is added to the gradient (Adam).
        fp32_optimizer_states: keep the moments of 16-bit parameters in fp32; else in the parameter's dtype.

    Attributes:
        on_any_device: parameters may lie on any device, each updated where it lies. An engine sets it while it steps: a part
            of the states may stay on the device.

    Raises:
        ValueError: amsgrad is asked for, or a number is out of its range.
    """

    on_any_device = False

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not (
            lr >= 0 and eps >= 0 and weight_decay >= 0 and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        ):
            raise ValueError(
                f"{type(self).__name__} needs lr, eps and weight_decay of 0 or more and two betas in [0, 1), got lr={lr}, "
                f"eps={eps}, weight_decay={weight_decay}, betas={betas}."
            )
        numbers = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        modes = {"bias_correction": bias_correction, "amsgrad": amsgrad, "adamw_mode": adamw_mode}
        super().__init__(model_params, {**numbers, **modes, "fp32_optimizer_states": fp32_optimizer_states})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; the constructor calls this for each of its own.

        Raises:
            ValueError: the group asks for amsgrad, or for states of another dtype than the other groups'.
        """
        if param_group.get("amsgrad", self.defaults["amsgrad"]):
            raise ValueError(
                f"{type(self).__name__} has no AMSGrad, got amsgrad=True. Drop it, or use torch.optim.AdamW(amsgrad=True)."
            )
        own, all_groups = param_group.get("fp32_optimizer_states"), self.defaults["fp32_optimizer_states"]
        if own is not None and own != all_groups:
            raise ValueError(
                f"{type(self).__name__} has fp32_optimizer_states for all groups at once, got {own} in a group and {all_groups} "
                "outside. Give it to the constructor, or make two optimizers."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns what `closure` returns, which is called first.

        Raises:
            AssertionError: a parameter lies on another device than the CPU, without `on_any_device`.
            ValueError: a gradient is sparse, a parameter's dtype is not floating, or a group has amsgrad or maximize.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            settings = AdamSettings.of(self, group)
            if settings is None:  # of a state that another optimizer has saved, for example
                raise ValueError(
                    f"{type(self).__name__} has no AMSGrad and only minimizes, and a parameter group has "
                    f"amsgrad={group['amsgrad']} and maximize={group.get('maximize', False)}. Use torch.optim.AdamW."
                )
            alike: dict[Any, list[nn.Parameter]] = defaultdict(list)  # one call of the fused kernel each
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._check(parameter)
                    if self._is_mixed(parameter):
                        self._step_sixteen_bits(settings, parameter)
                    else:
                        alike[parameter.device, parameter.dtype].append(parameter)
            for parameters in alike.values():
                self._step_fused(settings, parameters)
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Gives groups that another optimizer has saved the defaults of the settings that they lack."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores moments in the dtype that they were saved in; torch's own would cast fp32 moments to a 16-bit parameter's."""
        super().load_state_dict(state_dict)
        parameters = (p for group in self.param_groups for p in group["params"])
        saved = (index for group in state_dict["param_groups"] for index in group["params"])
        for parameter, index in zip(parameters, saved, strict=True):
            for key in MOMENTS:
                value = state_dict["state"].get(index, {}).get(key)
                if value is not None and value.dtype == torch.float32 and parameter.dtype in SIXTEEN_BITS:
                    self.state[parameter][key] = value.to(parameter.device)

    def _check(self, parameter: nn.Parameter) -> None:
        if parameter.device.type != "cpu" and not self.on_any_device:
            raise AssertionError(  # DeepSpeed's class of error
                f"{type(self).__name__} updates what lies on the CPU, got a tensor on {parameter.device}. Use HybridAdam or "
                "FusedAdam, or give it to megazero.initialize."
            )
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ValueError(
                f"{type(self).__name__} takes dense gradients, got a sparse one. Use torch.optim.SparseAdam."
            )
        if not parameter.is_floating_point():
            raise ValueError(f"{type(self).__name__} takes floating parameters, got one of {parameter.dtype}.")

    def _is_mixed(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter has 16 bits and its moments, present or future, are fp32."""
        moments = self.state.get(parameter, {}).get("exp_avg")
        is_fp32 = self.defaults["fp32_optimizer_states"] if moments is None else moments.dtype == torch.float32
        return parameter.dtype in SIXTEEN_BITS and is_fp32

    def _advanced(self, parameter: nn.Parameter, is_mixed: bool) -> dict[str, Any]:
        """The parameter's state, counting one more step; made if there is none. The moments are contiguous."""
        state = self.state[parameter]
        if "step" not in state:
            dtype = torch.float32 if is_mixed else parameter.dtype
            for key in MOMENTS:
                state[key] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        # Where it is read: by torch's fused kernel on the parameter's device, else by the host. A loaded one may lie elsewhere.
        reader = torch.device("cpu") if is_mixed else parameter.device
        step = state.get("step", 0.0)
        is_tensor = isinstance(step, Tensor)
        state["step"] = step.to(reader) if is_tensor else torch.full((), step, dtype=torch.float32, device=reader)
        for key in MOMENTS:
            state[key] = state[key].contiguous()
        state["step"] += 1
        return state

    def _step_fused(self, settings: AdamSettings, parameters: list[nn.Parameter]) -> None:
        weights = [parameter.detach().contiguous() for parameter in parameters]
        grads = [parameter.grad.contiguous() for parameter in parameters if parameter.grad is not None]
        states = [self._advanced(parameter, is_mixed=False) for parameter in parameters]
        exp_avgs, exp_avg_sqs, steps = ([state[key] for state in states] for key in (*MOMENTS, "step"))
        fused(settings, weights, grads, exp_avgs, exp_avg_sqs, steps)
        for parameter, weight in zip(parameters, weights, strict=True):
            if not parameter.is_contiguous():
                parameter.copy_(weight)

    def _step_sixteen_bits(self, settings: AdamSettings, parameter: nn.Parameter) -> None:
        """Tile by tile through an fp32 copy of the weights."""
        assert parameter.grad is not None
        state = self._advanced(parameter, is_mixed=True)
        weights, grads = parameter.detach().contiguous(), parameter.grad.contiguous()
        step = float(state["step"])
        flat = (tensor.view(-1) for tensor in (weights, grads, state["exp_avg"], state["exp_avg_sq"]))
        numel = THREAD_NUMEL * max(4, torch.get_num_threads())  # enough for every thread
        tiles = zip(*(tensor.split(numel) for tensor in flat), strict=True)
        for weight, grad, exp_avg, exp_avg_sq in tiles:
            mixed(settings, Operands(weight.float(), grad, exp_avg, exp_avg_sq, out=weight), step)
        if not parameter.is_contiguous():
            parameter.copy_(weights)


class HybridAdam(CPUAdam):
    """CPUAdam whose parameters may lie on any device, each updated where it lies (Colossal-AI's class of that name)."""

    on_any_device = True
