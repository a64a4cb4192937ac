"""`megazero.ops.adam`: DeepSpeed's and Colossal-AI's optimizers by name and signature."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import megazero
from megazero.ops.adam import CPUAdam, DeepSpeedCPUAdam, FusedAdam, HybridAdam


def stepped(make):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(70))
    optimizer = make([parameter])
    for _ in range(10):
        parameter.grad = torch.randn(70)
        optimizer.step()
    return parameter.detach()


def test_names_are_found_from_the_package():
    assert megazero.ops.adam.DeepSpeedCPUAdam is DeepSpeedCPUAdam
    assert issubclass(HybridAdam, CPUAdam) and FusedAdam.__module__.startswith("megazero")


@pytest.mark.parametrize(
    "cls, names",
    [
        (
            DeepSpeedCPUAdam,
            "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode fp32_optimizer_states",
        ),
        (FusedAdam, "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none"),
    ],
)
def test_signatures_are_deepspeeds(cls, names):
    assert list(inspect.signature(cls).parameters) == names.split()


@pytest.mark.parametrize("adam_w_mode, reference", [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_fused_adam_is_torchs_fused_kernel(adam_w_mode, reference):
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
    got = stepped(lambda parameters: FusedAdam(parameters, adam_w_mode=adam_w_mode, **options))
    assert torch.equal(got, stepped(lambda parameters: reference(parameters, fused=True, **options)))


@pytest.mark.parametrize("cls", [DeepSpeedCPUAdam, HybridAdam, FusedAdam])
def test_defaults_are_adamw_without_decay(cls):
    assert torch.equal(stepped(cls), stepped(lambda p: torch.optim.AdamW(p, weight_decay=0.0, fused=True)))


def test_fused_adam_without_bias_correction_is_refused():
    with pytest.raises(ValueError, match="always corrects the bias, got bias_correction=False. Use HybridAdam"):
        FusedAdam([nn.Parameter(torch.ones(2))], bias_correction=False)


def test_fused_adam_that_keeps_gradients_is_refused():
    with pytest.raises(ValueError, match=r"set_grad_none=False.*zero_grad\(set_to_none=False\)"):
        FusedAdam([nn.Parameter(torch.ones(2))], set_grad_none=False)
