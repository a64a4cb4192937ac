"""AnnealingLR against Megatron-LM v0's formulas, written out."""

from __future__ import annotations

import math

import pytest
import torch

from megazero.optim.lr_schedule import AnnealingLR, LRScheduleConfig


def schedule(train_iters: int = 100, **settings) -> AnnealingLR:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    return AnnealingLR(optimizer, LRScheduleConfig(lr=1.0, **settings), train_iters)


def rates(lr: AnnealingLR, steps: int) -> list[float]:
    out = []
    for _ in range(steps):
        out.append(lr.get_lr()[0])
        lr.step()
    return out


def test_warmup_is_linear_from_zero():
    assert rates(schedule(warmup=0.04), 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_linear_and_cosine_decay_divide_by_the_whole_decay_length():
    assert rates(schedule(warmup=0.1, lr_decay_style="linear"), 61)[60] == pytest.approx((100 - 50) / 100)
    assert rates(schedule(warmup=0.1, lr_decay_style="cosine"), 61)[60] == pytest.approx(
        (math.cos(math.pi * 50 / 100) + 1) / 2
    )


def test_decay_ends_at_the_minimum_and_stays():
    got = rates(schedule(warmup=0.0, lr_decay_style="cosine", lr_decay_iters=10, min_lr=0.125), 40)
    assert min(got) == 0.125 and got[-1] == 0.125


def test_constant_style_stays_after_warmup():
    assert set(rates(schedule(warmup=0.1, lr_decay_style="constant"), 90)[10:]) == {1.0}


def test_loaded_state_continues_the_sequence():
    whole = rates(schedule(warmup=0.2), 80)
    first = schedule(warmup=0.2)
    rates(first, 33)
    second = schedule(warmup=0.2)
    second.load_state_dict(first.state_dict())
    assert rates(second, 47) == whole[33:]


@pytest.mark.parametrize("flags", [{"lr": -1.0}, {"warmup": 2.0}, {"lr": 0.1, "min_lr": 0.2}, {"lr_decay_iters": 0}])
def test_impossible_schedules_are_refused(flags):
    with pytest.raises(ValueError, match="--"):
        LRScheduleConfig(**flags)
