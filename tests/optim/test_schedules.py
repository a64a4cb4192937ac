"""DeepSpeed's schedules against their closed forms, number by number."""

from __future__ import annotations

import inspect
import json
import logging
import math
import re
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.plain import decode, encode
from megazero.optim.schedules import SCHEDULES, scheduler_by_name


def make(name: str, *, groups: int = 1, lr: float = 1.0, kind=torch.optim.Adam, **params):
    weights = [{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(groups)]
    return scheduler_by_name(name, params)(kind(weights, lr=lr))


def rates(schedule, steps: int) -> list[float]:
    """The optimizer's learning rate for each of its steps, in the order in which an engine would use them."""
    out = []
    for _ in range(steps):
        out.append(schedule.optimizer.param_groups[0]["lr"])
        assert schedule.get_lr()[0] == schedule.get_last_lr()[0] == out[-1]
        schedule.step()
    return out


def momenta(schedule, steps: int) -> list[float]:
    out = []
    for _ in range(steps):
        first, second = schedule.optimizer.param_groups[0]["betas"]
        assert second == 0.99 and schedule.get_mom()[0] == (first, 0.99)
        out.append(first)
        schedule.step()
    return out


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_defaults_are_those_of_the_documentation(name):
    text = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    (row,) = re.findall(rf"^\| `{name}` \| (.*) \|$", text, re.MULTILINE)
    told = {key: json.loads(value) for key, value in re.findall(r"`(\w+)` ([\d.]+|true|false)", row)}
    defaults = {key: each.default for key, each in inspect.signature(SCHEDULES[name]).parameters.items()}
    del defaults["last_batch_iteration"]
    assert told == {key: default for key, default in defaults.items() if isinstance(default, (bool, int, float))}


def test_range_test_rises_by_the_rate_every_step_size_steps():
    got = rates(make("LRRangeTest", lr_range_test_min_lr=0.5, lr_range_test_step_size=4, lr_range_test_step_rate=2), 5)
    assert got == [0.5, 0.75, 1.0, 1.25, 1.5]


def test_range_test_staircase():
    params = {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 2, "lr_range_test_staircase": True}
    assert rates(make("LRRangeTest", **params), 5) == [0.5, 0.5, 1.0, 1.0, 1.5]


def test_one_cycle_goes_up_and_down_then_decays():
    params = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 4, "cycle_second_step_size": 2}
    schedule = make("OneCycle", **params, decay_step_size=2, decay_lr_rate=1.0)
    # up in 4, down in 2; the iteration that ends the cycle is its start again, and decay counts from the next one
    want = [1.0, 1.5, 2.0, 2.5, 3.0, 2.0, 1.0, *(1 / (1 + k / 2) for k in (1, 2, 3))]
    assert rates(schedule, 10) == pytest.approx(want, rel=1e-15)


def test_one_cycle_momentum_mirrors_the_rate_after_the_first_step():
    params = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2, "cycle_second_step_size": 2}
    schedule = make("OneCycle", **params, cycle_min_mom=0.5, cycle_max_mom=0.75, decay_step_size=1, decay_mom_rate=0.1)
    want = [0.5, 0.625, 0.5, 0.625, 0.75, 0.75 * 1.1, 0.75 * 1.2]
    assert momenta(schedule, 7) == pytest.approx(want, rel=1e-15)


def test_one_cycle_stairs():
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "cycle_first_stair_count": 2}
    assert rates(make("OneCycle", **params), 10) == [0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0, 0]


def test_one_cycle_without_decay_stays_at_the_minimum():
    schedule = make("OneCycle", cycle_min_lr=0.5, cycle_max_lr=1.0, cycle_first_step_size=1)
    assert rates(schedule, 6) == [0.5, 1.0, 0.5, 0.5, 0.5, 0.5]


def test_one_cycle_leaves_an_optimizer_without_betas_alone(caplog):
    with caplog.at_level(logging.WARNING, "megazero"):
        schedule = make("OneCycle", kind=torch.optim.SGD, cycle_min_lr=0.5, cycle_max_lr=1.0)
    schedule.step()
    assert schedule.get_mom() is None and "betas" not in schedule.optimizer.param_groups[0]
    assert "SGD has no betas" in caplog.text


def test_linear_warmup_starts_twice_at_the_minimum_and_stays_at_the_maximum():
    params = {"warmup_min_lr": 1.0, "warmup_max_lr": 3.0, "warmup_num_steps": 4, "warmup_type": "linear"}
    assert rates(make("WarmupLR", **params), 8) == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0]


def test_log_warmup_is_the_default():
    want = [0.0, *(2.0 * math.log(i + 1) / math.log(5) for i in range(5)), 2.0, 2.0]
    assert rates(make("WarmupLR", warmup_max_lr=2.0, warmup_num_steps=5), 8) == pytest.approx(want, rel=1e-15)


def test_warmup_rises_to_the_optimizers_own_rate():
    assert rates(make("WarmupLR", lr=0.25, warmup_num_steps=2, warmup_type="linear"), 4) == [0.0, 0.0, 0.125, 0.25]


@pytest.mark.parametrize("name, more", [("WarmupLR", {}), ("WarmupCosineLR", {"total_num_steps": 5})])
def test_the_optimizers_own_rate_may_be_a_tensor(name, more):
    number, tensor = (make(name, lr=lr, warmup_num_steps=2, **more) for lr in (0.25, torch.tensor(0.25)))
    assert rates(tensor, 6) == rates(number, 6)
    assert all(type(rate) is float for rate in tensor.get_lr())


def test_warmup_of_one_step_counts_as_two():
    assert rates(make("WarmupLR", warmup_num_steps=1, warmup_type="linear"), 4) == [0.0, 0.0, 0.5, 1.0]


def test_warmup_then_linear_decay_to_the_minimum():
    params = {"total_num_steps": 6, "warmup_min_lr": 1.0, "warmup_max_lr": 3.0, "warmup_num_steps": 2}
    schedule = make("WarmupDecayLR", **params, warmup_type="linear")
    assert rates(schedule, 9) == [1.0, 1.0, 2.0, 3.0, 2.5, 2.0, 1.5, 1.0, 1.0]


def test_decay_rises_to_deepspeeds_default():
    assert max(rates(make("WarmupDecayLR", total_num_steps=9, warmup_num_steps=2), 9)) == 0.001


def test_warmup_then_cosine_of_the_optimizers_own_rate():
    params = {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_min_ratio": 0.5, "cos_min_ratio": 0.1}
    schedule = make("WarmupCosineLR", lr=2.0, warmup_type="linear", **params)
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    want = [0.0, *(2 * ratio for ratio in (0.5, 0.75, *cosine, 0.1, 0.1))]
    assert rates(schedule, 9) == pytest.approx(want, rel=1e-15)


@pytest.mark.parametrize("name, end", [("WarmupDecayLR", 0.0), ("WarmupCosineLR", 0.0001)])
def test_a_warmup_as_long_as_the_schedule_ends_at_the_minimum(name, end):
    assert rates(make(name, total_num_steps=3, warmup_num_steps=3), 6)[-1] == pytest.approx(end)


def test_every_group_has_its_own_rates():
    schedule = make("WarmupLR", groups=2, warmup_max_lr=[1.0, 2.0], warmup_num_steps=2, warmup_type="linear")
    for _ in range(3):
        schedule.step()
    assert schedule.get_lr() == [1.0, 2.0]


PARAMS = {
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 5, "decay_step_size": 2},
    "WarmupLR": {"warmup_num_steps": 7},
    "WarmupDecayLR": {"warmup_num_steps": 7, "total_num_steps": 15},
    "WarmupCosineLR": {"warmup_num_steps": 7, "total_num_steps": 15},
}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_loaded_state_continues_the_sequence(name):
    whole = rates(make(name, **PARAMS[name]), 20)
    first, second, third = (make(name, **PARAMS[name]) for _ in range(3))
    rates(first, 6)
    second.load_state_dict(first.state_dict())
    third.step(5)
    assert rates(second, 14) == rates(third, 14) == whole[6:]


TORCHS = [
    ("StepLR", {"step_size": 2, "gamma": 0.5}, {"step_size": 1, "gamma": 0.1}),
    ("MultiStepLR", {"milestones": [2, 5]}, {"milestones": [1, 2, 6]}),
    ("LinearLR", {"total_iters": 4}, {"total_iters": 20}),
    ("CosineAnnealingLR", {"T_max": 4}, {"T_max": 20}),
    ("CosineAnnealingWarmRestarts", {"T_0": 2}, {"T_0": 4}),
    ("OneCycleLR", {"max_lr": 1.0, "total_steps": 20}, {"max_lr": 2.0, "total_steps": 20}),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 2}, {"base_lr": 0.1, "max_lr": 0.2}),
]


def stepped(schedule, steps: int) -> list[float]:
    out = []
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step()
        out += schedule.get_last_lr()
    return out


@pytest.mark.parametrize("name, then, now", TORCHS)
def test_torchs_schedules_continue_as_if_they_had_always_had_their_own_parameters(name, then, now):
    for own in (then, now):
        first, second = make(name, **then), make(name, **own)
        stepped(first, 3)
        (saved,), (group,) = first.optimizer.param_groups, second.optimizer.param_groups
        group.update({key: saved[key] for key in ("lr", "initial_lr")})  # as a checkpoint's are loaded before
        second.load_state_dict(decode(*encode(first.state_dict())))
        rel, least = (0, 0) if own is then else (1e-9, 1e-15)  # torch's closed forms round otherwise
        assert stepped(second, 9) == pytest.approx(stepped(make(name, **own), 12)[3:], rel=rel, abs=least)


def test_a_plateau_is_continued_under_the_own_parameters():
    first, second = make("ReduceLROnPlateau", patience=3), make("ReduceLROnPlateau", patience=1)
    for schedule in (first, second):
        schedule.step(1.0)
    first.step(1.0)
    second.load_state_dict(first.state_dict())
    second.step(1.0)
    assert second.get_last_lr() == [pytest.approx(0.1)]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_last_batch_iteration_starts_where_a_run_has_stopped(name):
    whole = rates(make(name, **PARAMS[name]), 20)
    assert rates(make(name, **PARAMS[name], last_batch_iteration=4), 15) == whole[5:]


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("steps", [0, None, -3, True, 2.5, "10", math.inf])
def test_warmup_num_steps_must_be_a_positive_integer(name, steps):
    with pytest.raises(ValueError, match="warmup_num_steps must be an integer of at least 1"):
        scheduler_by_name(name, {**PARAMS[name], "warmup_num_steps": steps})


@pytest.mark.parametrize(
    "name, params, message",
    [
        ("WarmupLr", {}, "no learning-rate schedule 'WarmupLr'. Did you mean 'WarmupLR'"),
        ("WarmupLR", {"warmup_steps": 3}, "no parameter 'warmup_steps'. Did you mean 'warmup_num_steps'"),
        ("WarmupDecayLR", {}, "needs the parameter 'total_num_steps'"),
        ("WarmupLR", {"warmup_type": "square"}, "one of log, linear, got 'square'"),
        ("WarmupLR", {"warmup_max_lr": "1e-3"}, "warmup_max_lr must be a finite number"),
        ("OneCycle", {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": [1.0]}, "cycle_max_lr has 1 values"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "cycle_first_step_size"),
        ("LRRangeTest", {"lr_range_test_staircase": 1}, "true or false"),
        ("StepLR", {}, "needs the parameter 'step_size'"),
        ("CosineAnnealingLR", {"T_max": "4"}, "T_max must be a number, got '4', a string"),
        (
            "CyclicLR",
            {"base_lr": 0.1, "max_lr": 1, "cycle_momentum": "no"},
            "cycle_momentum must be true or false, got 'no'",
        ),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1, "step_size_up": None}, "CyclicLR does not take .*step_size_up"),
        ("StepLR", {"step_size": 0}, "StepLR does not take {'step_size': 0}: .*zero"),
        ("CosineAnnealingLR", {"T_max": 0}, "CosineAnnealingLR does not take {'T_max': 0}: .*zero"),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1, "step_size_up": 0}, "CyclicLR does not take .*zero"),
        ("StepLR", {"step_size": 2, "last_epoch": 5}, "StepLR does not take .*initial_lr"),
        ("LambdaLR", {"lr_lambda": "x"}, "no learning-rate schedule 'LambdaLR'"),
    ],
)
def test_bad_parameters_are_refused_before_there_is_an_optimizer(name, params, message):
    with pytest.raises(ValueError, match=message):
        scheduler_by_name(name, params)


def test_integral_floats_count():
    assert make("WarmupLR", warmup_num_steps=1e3).warmup_num_steps == 1000


def test_a_warmup_longer_than_the_run_is_warned_of_once(caplog):
    make("WarmupDecayLR", total_num_steps=5, warmup_num_steps=11)
    assert [record.getMessage() for record in caplog.records] == ["total_num_steps 5 is less than warmup_num_steps 11"]
