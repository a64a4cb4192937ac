"""The dynamic loss scale's sequence, and the checks of the precision flags."""

from __future__ import annotations

import logging

import pytest

from megazero.optim.loss_scaler import LossScaler, PrecisionConfig


def scales(outcomes: str, **settings) -> list[float]:
    """The scale after each step; "." is a clean step, "x" an overflow."""
    scaler = LossScaler(256.0, dynamic=True, **settings)
    out = []
    for outcome in outcomes:
        scaler.update(outcome == "x")
        out.append(scaler.scale)
    return out


def test_window_of_clean_steps_doubles():
    assert scales("....", window=2) == [256, 512, 512, 1024]


def test_overflow_halves_and_restarts_the_window():
    assert scales(".x..", window=2, hysteresis=1) == [256, 128, 128, 256]


def test_hysteresis_forgives_before_halving_and_refills_on_doubling():
    assert scales("xx", hysteresis=2) == [256, 128]
    assert scales("xx..x", window=2, hysteresis=2) == [256, 128, 128, 256, 256]


def test_every_skipped_step_is_said(caplog):
    caplog.set_level(logging.INFO)
    scaler = LossScaler(256.0, dynamic=True, hysteresis=3)
    for where in ("a (rank 0)", "b (rank 1)", "c (rank 1)"):
        scaler.update(True, where)
    assert [record.getMessage() for record in caplog.records] == [
        "gradient overflow in a (rank 0): step skipped; 2 more overflows until the loss scale 256 halves",
        "gradient overflow in b (rank 1): step skipped; 1 more overflow until the loss scale 256 halves",
        "gradient overflow in c (rank 1): loss scale 256 -> 128, step skipped",
    ]


def test_consecutive_hysteresis_refills_at_every_clean_step():
    assert scales("x.x.xx", hysteresis=2) == [256, 256, 128, 128, 64, 32]
    assert scales("x.x.xx", hysteresis=2, consecutive_hysteresis=True) == [256, 256, 256, 256, 256, 128]


def test_overflow_at_the_smallest_scale_raises_with_advice():
    scaler = LossScaler(2.0, dynamic=True, min_scale=1.0, hysteresis=1)
    scaler.update(True)
    with pytest.raises(FloatingPointError, match="already at minimum"):
        scaler.update(True)


def test_overflow_at_the_smallest_scale_can_be_one_more_skipped_step():
    scaler, found = LossScaler(8.0, dynamic=True, hysteresis=1, raise_error_at_min_scale=False), []
    for _ in range(6):
        found.append(scaler.scale)
        scaler.update(True)
    assert found == [8, 4, 2, 1, 1, 1] and scaler.cur_iter == 6


def test_the_last_halving_stops_at_the_smallest_scale():
    scaler = LossScaler(3.0, dynamic=True, min_scale=2.0, hysteresis=1)
    scaler.update(True)
    assert scaler.scale == 2.0


def test_static_scale_never_moves_and_a_broken_run_ends():
    scaler = LossScaler(8.0)
    for overflow in [True, False] * 30 + [True] * 19:
        scaler.update(overflow)
    assert scaler.scale == 8.0
    with pytest.raises(FloatingPointError, match=r"20 steps in a row.* fixed at 8\.0; 0 \(--loss-scale"):
        scaler.update(True)


def test_without_a_loss_scale_none_is_blamed():
    scaler = LossScaler.from_config(PrecisionConfig(bf16=True))
    with pytest.raises(FloatingPointError, match=r"20 steps in a row(?!.*scale)"):
        for _ in range(20):
            scaler.update(True)


def test_a_broken_run_ends_although_it_restarts():
    before, after = LossScaler(8.0), LossScaler(8.0)
    for _ in range(12):
        before.update(True)
    after.load_state_dict(before.state_dict())
    with pytest.raises(FloatingPointError, match="20 steps in a row"):
        for _ in range(8):
            after.update(True)
    after.load_state_dict({"dynamic": False})  # older, or imported
    assert after.overflows_in_a_row == 0


@pytest.mark.parametrize("before, after, scale", [("..x", "x...", 256.0), ("..", ".", 512.0), ("...", ".", 512.0)])
def test_state_continues_exactly(before, after, scale):
    a, b = (LossScaler(256.0, dynamic=True, window=3) for _ in range(2))
    for outcome in before:
        a.update(outcome == "x")
    b.load_state_dict(a.state_dict())
    for outcome in after:
        a.update(outcome == "x")
        b.update(outcome == "x")
    assert a.scale == b.scale == scale


@pytest.mark.parametrize("was_dynamic, is_dynamic", [(False, True), (True, False)])
def test_a_scale_of_another_kind_is_not_continued(was_dynamic, is_dynamic):
    scaler = LossScaler(256.0, dynamic=is_dynamic)
    scaler.load_state_dict(LossScaler(1.0, dynamic=was_dynamic).state_dict())
    assert scaler.scale == 256.0


@pytest.mark.parametrize(
    "flags",
    [
        {"fp16": True, "bf16": True},
        {"loss_scale": 2.0},
        {"fp16": True, "loss_scale": float("inf")},
        {"fp16": True, "loss_scale": -1.0},
        {"min_scale": 0.0},
        {"hysteresis": 0},
        {"fp16": True, "min_scale": 4.0, "initial_loss_scale": 2.0},
    ],
)
def test_contradictory_precision_flags_are_refused(flags):
    with pytest.raises(ValueError, match="--"):
        PrecisionConfig(**flags)


def test_every_flag_of_the_dynamic_scale_reaches_it():
    flags = {"loss_scale_window": 2, "min_scale": 64.0, "hysteresis": 3, "consecutive_hysteresis": True}
    scaler = LossScaler.from_config(PrecisionConfig(fp16=True, initial_loss_scale=256.0, **flags))
    found = (scaler.scale, scaler.window, scaler.min_scale, scaler.hysteresis, scaler.consecutive_hysteresis)
    assert scaler.dynamic and found == (256.0, *flags.values())


def test_a_loss_scale_of_0_is_dynamic():
    assert LossScaler.from_config(PrecisionConfig(fp16=True, loss_scale=0.0)).dynamic


def test_a_fixed_loss_scale_is_kept_whatever_a_dynamic_one_is_told():
    flags = {"loss_scale": 8.0, "min_scale": 4.0, "initial_loss_scale": 2.0}
    scaler = LossScaler.from_config(PrecisionConfig(fp16=True, **flags))
    assert scaler.scale == 8.0 and not scaler.dynamic
