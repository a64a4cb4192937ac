"""Optimizers by DeepSpeed's names: the class, its settings, and the update that follows."""

from __future__ import annotations

import math

import pytest
import torch

from megazero.optim.lr_schedule import LRScheduleConfig
from megazero.optim.optimizers import TORCH_ELEMENTWISE, OptimizerConfig, muon_groups, optimizer_by_name


def make(type: str, **params) -> torch.optim.Optimizer:
    weight = torch.full((3,), 2.0, requires_grad=True)
    weight.grad = torch.tensor([1.0, -2.0, 0.5])
    return optimizer_by_name(type, params)([{"params": [weight]}])


def stepped(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.step()
    return optimizer.param_groups[0]["params"][0].detach()


@pytest.mark.parametrize("name", ["Adam", "adam", "ADAM", "AdamW", "adamw"])
def test_adam_is_adamw_without_decay_and_fused(name):
    optimizer = make(name, lr=1.5e-4, betas=[0.8, 0.95], eps=1e-6, bias_correction=True)
    group = optimizer.param_groups[0]
    assert type(optimizer) is torch.optim.AdamW and group["fused"]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1.5e-4, (0.8, 0.95), 1e-6, 0.0)


@pytest.mark.parametrize("name", ["Adam", "Muon", "RAdam"])
def test_a_beta_of_zero_may_be_written_as_an_integer(name):
    assert make(name, lr=0.1, betas=[0, 0.99]).param_groups[0]["betas"] == (0.0, 0.99)


def test_adam_w_mode_false_is_adam_with_its_own_arithmetic():
    settings = {"lr": 0.1, "weight_decay": 0.5}
    plain = make("Adam", adam_w_mode=False, **settings)
    assert type(plain) is torch.optim.Adam
    assert not torch.allclose(stepped(plain), stepped(make("Adam", **settings)))


@pytest.mark.parametrize("adam_w_mode, expected", [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_torch_adam_has_torchs_defaults(adam_w_mode, expected):
    optimizer = make("Adam", torch_adam=True, adam_w_mode=adam_w_mode)
    assert type(optimizer) is expected and not optimizer.param_groups[0]["fused"]
    assert optimizer.param_groups[0]["weight_decay"] == (0.01 if adam_w_mode else 0)


@pytest.mark.parametrize("kind", [kind for kind in TORCH_ELEMENTWISE if kind is not torch.optim.Adam])
def test_other_names_are_of_the_classes_of_that_name_in_any_case(kind):
    assert type(make(kind.__name__.swapcase(), lr=0.1)) is kind


def test_every_choice_of_the_flag_makes_an_optimizer_of_its_own():
    choices = set(OptimizerConfig.__dataclass_fields__["optimizer"].metadata["choices"]) - {"apex-adamw"}  # a package
    group = {"params": [torch.zeros(1, requires_grad=True)]}
    kinds = {name: type(OptimizerConfig(optimizer=name).factory()([group])) for name in choices}
    assert len(set(kinds.values())) == len(choices), f"OptimizerConfig.factory makes one for several names: {kinds}"


def test_an_optimizers_own_options_are_taken():
    (group,) = make("Adam", amsgrad=True, foreach=True).param_groups
    assert group["amsgrad"] and group["foreach"]
    assert make("Muon", adjust_lr_fn="match_rms_adamw").param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"


@pytest.mark.parametrize(
    ("params", "rates"),
    [({}, [0.02, 3e-4]), ({"lr": 0.1}, [0.1, 0.1]), ({"lr": 0.1, "muon_lr": 0.5}, [0.5, 0.1])],
    ids=["DeepSpeed's", "one", "another one"],
)
def test_muons_matrices_and_the_rest_have_two_rates(params, rates):
    matrix, bias = (torch.zeros(shape, requires_grad=True) for shape in ((2, 2), (2,)))
    halves = muon_groups([{"params": [bias, matrix]}], {matrix}, params)
    assert [half["lr"] for half in halves] == rates and [half["use_muon"] for half in halves] == [True, False]
    assert halves[0]["params"] == [matrix] and halves[1]["params"] == [bias]


def test_the_groups_own_settings_win():
    factory = optimizer_by_name("Adam", {"weight_decay": 0.1})
    groups = [{"params": [torch.zeros(1, requires_grad=True)], **extra} for extra in ({}, {"weight_decay": 0.0})]
    assert [group["weight_decay"] for group in factory(groups).param_groups] == [0.1, 0.0]


@pytest.mark.parametrize(
    "name, params, message",
    [
        ("Lamb", {}, "Lamb cannot be used here: it needs whole parameters"),
        ("Lion", {}, "Lion cannot be used here"),
        ("OneBitAdam", {}, "compressed all-reduce"),
        ("LBFGS", {}, "whole parameters"),
        ("Muon", {"ns_method": "gram"}, "no parameter 'ns_method'. Known: adam_lr, .*, muon_lr"),
        ("Muon", {"momentum": 1.5}, "Muon does not take .*momentum must lie in"),
        ("Muon", {"muon_lr": -0.1}, "Muon does not take .*Invalid learning rate: -0.1"),
        ("Muon", {"adam_lr": "0.1"}, "Muon: adam_lr must be a number, got '0.1', a string"),
        ("Adm", {}, "no optimizer 'Adm'. Did you mean 'Adam'"),
        ("Adam", {"weigth_decay": 0.1}, "no parameter 'weigth_decay'. Did you mean 'weight_decay'"),
        ("AdamW", {"muon_lr": 0.1}, "no parameter 'muon_lr'"),
        ("Adam", {"bias_correction": False}, "bias_correction false is not built"),
        ("Adam", {"fp32_optimizer_states": False}, "fp32_optimizer_states false is not built"),
        ("AdamW", {"adam_w_mode": False}, "contradicts"),
        ("Adam", {"torch_adam": "yes"}, "torch_adam must be true or false"),
        ("Adam", {"betas": [0.9]}, "betas must be two numbers"),
        ("Adam", {"betas": 0.9}, "betas must be two numbers"),
        ("Adam", {"betas": [0.9, "x"]}, r"Adam: betas\[1\] must be a number, got 'x', a string"),
        ("Adam", {"lr": "1e-3"}, "Adam: lr must be a number, got '1e-3', a string"),
        ("Muon", {"betas": [0.9]}, "Muon: betas must be two numbers"),
        ("SGD", {"nesterov": "true"}, "SGD: nesterov must be true or false, got 'true', a string"),
        ("Adam", {"foreach": "true"}, "Adam: foreach must be true or false"),
        ("Adam", {"lr": True}, "Adam: lr must be a number, got True, a truth value"),
        ("Adam", {"lr": math.inf}, "Adam: lr must be a finite number, got inf"),
        ("SGD", {"momentum": -math.inf}, "SGD: momentum must be a finite number"),
        ("Adam", {"lr": -1.0}, "Adam does not take .*Invalid learning rate"),
        ("SGD", {"momentum": -1}, "Invalid momentum"),
        ("SGD", {"lr": [0.1]}, "SGD does not take"),
        ("Rprop", {"etas": 0.5}, "Rprop does not take"),
    ],
)
def test_bad_optimizers_are_refused_before_there_are_parameters(name, params, message):
    with pytest.raises(ValueError, match=message):
        make(name, **params)


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (OptimizerConfig, "optimizer", "--optimizer must be one of adamw, muon, apex-adamw, got 'none'"),
        (
            LRScheduleConfig,
            "lr_decay_style",
            "--lr-decay-style must be one of constant, linear, cosine, inverse-square-root, WSD, got 'none'",
        ),
        (LRScheduleConfig, "lr_wsd_decay_style", "--lr-wsd-decay-style must be one of .*, minus_sqrt, got 'none'"),
    ],
)
def test_configurations_refuse_what_is_none_of_their_choices(config, field, message):
    """Also in a script of one's own: it would train with another optimizer, or at a constant rate."""
    with pytest.raises(ValueError, match=message):
        config(**{field: "none"})
