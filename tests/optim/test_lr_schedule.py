"""AnnealingLR against Megatron-LM v0's formulas, written out."""

from __future__ import annotations

import math

import pytest
import torch

from megazero.arguments import load_config
from megazero.optim.lr_schedule import AnnealingLR, LRScheduleConfig

FIELDS = LRScheduleConfig.__dataclass_fields__


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


def test_lr_mult_is_a_factor_on_a_groups_rate_at_all_times():
    groups = [{"params": [torch.zeros(1, requires_grad=True)], **more} for more in ({}, {"lr_mult": 0.5})]
    lr = AnnealingLR(torch.optim.SGD(groups, lr=0.0), LRScheduleConfig(lr=1.0, warmup=0.1, min_lr=0.5), 20)
    for n in range(25):
        rate = n / 2 if n <= 2 else max(1 - (n - 2) / 20, 0.5)
        assert lr.get_lr() == [pytest.approx(rate), pytest.approx(rate / 2)] == lr.get_last_lr(), n
        lr.step()


def test_warmup_is_a_fraction_of_the_decay_as_in_megatron_lm():
    assert rates(schedule(warmup=0.25, lr_decay_iters=16), 5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert rates(schedule(warmup=0.25, lr_decay_iters=400), 101) == [n / 100 for n in range(101)]


def test_warmup_in_iterations_takes_the_place_of_the_fraction():
    got = rates(schedule(lr_warmup_iters=4), 6)
    assert got[:5] == [0.0, 0.25, 0.5, 0.75, 1.0] and got == rates(schedule(warmup=0.04), 6)
    assert schedule(lr_warmup_iters=0).get_lr() == [1.0]
    assert rates(schedule(lr_warmup_iters=4, warmup=0.5), 6) == got  # as behind a script's own --warmup
    with pytest.raises(ValueError, match="--lr-warmup-iters must be 0 or more, got -1"):
        LRScheduleConfig(lr_warmup_iters=-1)


def test_wsd_that_decays_from_the_warmup_on_is_the_cosine_of_gpt_3():
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "cosine", "lr_wsd_decay_iters": 90}
    got = rates(schedule(lr_warmup_iters=10, min_lr=0.1, **wsd), 101)
    want = [0.1 + 0.9 * (1 + math.cos(math.pi * (n - 10) / 90)) / 2 for n in range(10, 101)]
    assert got == pytest.approx([n / 10 for n in range(10)] + want)


def test_linear_and_cosine_decay_divide_by_the_whole_decay_length():
    assert rates(schedule(warmup=0.1, lr_decay_style="linear"), 61)[60] == pytest.approx((100 - 50) / 100)
    assert rates(schedule(warmup=0.1, lr_decay_style="cosine"), 61)[60] == pytest.approx(
        (math.cos(math.pi * 50 / 100) + 1) / 2
    )


@pytest.mark.parametrize(
    "style", sorted(set(FIELDS["lr_decay_style"].metadata["choices"]) - {"constant", "inverse-square-root", "WSD"})
)
def test_decay_ends_at_the_minimum_and_stays(style):
    got = rates(schedule(warmup=0.0, lr_decay_style=style, lr_decay_iters=10, min_lr=0.125), 40)
    assert min(got) == 0.125 and got[-1] == 0.125


@pytest.mark.parametrize("warmup", [0, 4])
def test_inverse_square_root_begins_at_the_peak_behind_the_warmup_as_in_megatron_lm(warmup):
    got = rates(schedule(lr_warmup_iters=warmup, lr_decay_style="inverse-square-root", min_lr=0.125), 401)
    assert got[:warmup] == [n / 4 for n in range(warmup)]
    want = [max(max(warmup, 1) ** 0.5 * max(n, 1) ** -0.5, 0.125) for n in range(warmup, 401)]
    assert got[warmup:] == pytest.approx(want) and got[warmup] == 1.0 and got[400] == 0.125


def test_constant_style_stays_after_warmup():
    assert set(rates(schedule(warmup=0.1, lr_decay_style="constant"), 90)[10:]) == {1.0}


@pytest.mark.parametrize(
    "style, halfway",
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_is_stable_until_its_decay_which_ends_with_the_run(style, halfway):
    wsd = {"warmup": 0.1, "lr_decay_style": "WSD", "lr_wsd_decay_style": style, "lr_wsd_decay_iters": 20, "min_lr": 0.2}
    got = rates(schedule(**wsd), 111)
    assert got[:10] == [n / 10 for n in range(10)] and set(got[10:81]) == {1.0}
    assert got[90] == pytest.approx(0.2 + 0.8 * halfway) and got[80:101] == sorted(got[80:101], reverse=True)
    assert got[100:] == pytest.approx([0.2] * 11)
    longer = schedule(train_iters=200, **{**wsd, "warmup": 0.05})
    longer.load_state_dict({"num_steps": 80})  # of the run above, before it has decayed
    assert set(rates(longer, 101)) == {1.0} and longer.lr_at(200) == pytest.approx(0.2)


def test_wsd_needs_the_length_of_its_decay_which_must_fit():
    for flags in ({"lr_decay_style": "WSD"}, {"lr_wsd_decay_iters": 5}):
        with pytest.raises(ValueError, match="Give both or neither"):
            LRScheduleConfig(**flags)
    with pytest.raises(ValueError, match="--lr-wsd-decay-style linear is for --lr-decay-style WSD, got cosine"):
        LRScheduleConfig(lr_decay_style="cosine", lr_wsd_decay_style="linear")
    with pytest.raises(ValueError, match="--lr-wsd-decay-iters must be at least 1"):
        LRScheduleConfig(lr_decay_style="WSD", lr_wsd_decay_iters=0)
    flags = "--lr-decay-style wsd --lr-wsd-decay-iters 90 --warmup 0.1".split()
    assert load_config([*flags, "--train-iters", "100"]).schedule.lr_decay_style == "WSD"
    with pytest.raises(ValueError, match=r"90 and a warm-up of 9 iterations .* do not fit into 90"):
        load_config([*flags, "--train-iters", "90"])


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
