"""Stages 1, 2 and 3 against stage 0: losses, gradients, norms and weights, bit for bit where the arithmetic is the same."""

from __future__ import annotations

import pytest
import torch

from megazero import mpu
from tests.ranks import run_ranks
from tests.zero.models import APART, MODELS, SHARING, STEPS, compare, run


def stages_case(names: list[str], options: dict, bitwise: bool) -> None:
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    for name in names:
        want = run(MODELS[name], 0, steps=STEPS, **options)
        for stage in (1, 2, 3):
            compare(run(MODELS[name], stage, steps=STEPS, **options), want, f"{name}, stage {stage}", bitwise)


# Their gradients may be reduced in two parts, which add up in another order.
TWICE = [name for name in MODELS if "twice" in name]
ONCE = [name for name in MODELS if name not in TWICE]


@pytest.mark.parametrize("world_size, every", [(1, 1), (3, 1), (4, 4), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_all_stages_equal_stage_0_bit_for_bit(world_size, every):
    run_ranks(world_size, stages_case, ONCE[::every], {"clip_grad": 0.5}, True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_stages_equal_stage_0_where_a_block_is_used_twice(world_size):
    run_ranks(world_size, stages_case, TWICE, {"clip_grad": 0.5}, False)


SOME = {"reduce_bucket_size": 150}


def sharing_case(names: list[str], ways: list[dict], options: dict, bitwise: bool) -> None:
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    for name in names:
        want = run(MODELS[name], 0, steps=STEPS, zero=APART, **options)  # as every other stage is, in the tests above
        for zero in ways:
            for stage in (0, 1, 2):
                what = f"{name}, stage {stage}, {zero}"
                compare(run(MODELS[name], stage, steps=STEPS, zero=zero, **options), want, what, bitwise)


@pytest.mark.parametrize("world_size, every", [(1, 1), (3, 3), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_units_that_share_buckets_all_or_some_train_as_units_apart_bit_for_bit(world_size, every):  # on two ranks below
    run_ranks(world_size, sharing_case, ONCE[::every], [SHARING, SOME], {"clip_grad": 0.5}, True)


WITH = [{"micro": 3}, {"optimizer": "muon"}, {"dtype": torch.bfloat16}]


@pytest.mark.parametrize("options", WITH, ids=str)
def test_units_that_share_buckets_train_as_units_apart(options):
    """Each model with one of the options."""
    names = list(MODELS)[WITH.index(options) :: len(WITH)]
    run_ranks(2, sharing_case, names, [SOME], {"clip_grad": 0.5, **options}, False)


@pytest.mark.slow
@pytest.mark.parametrize("options", WITH, ids=str)
def test_units_that_share_buckets_train_as_units_apart_in_every_model(options):
    run_ranks(2, sharing_case, list(MODELS), [SOME], {"clip_grad": 0.5, **options}, False)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw, not fused"])
def test_all_stages_equal_stage_0_bit_for_bit_with_other_optimizers(optimizer):
    run_ranks(2, stages_case, ["tied head, unused parameter"], {"clip_grad": 0.5, "optimizer": optimizer}, True)


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_all_stages_equal_stage_0_with_accumulation(every):
    run_ranks(2, stages_case, list(MODELS)[::every], {"clip_grad": 0.5, "micro": 3}, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", [{}, {"grad_dtype": "compute"}, {"reduce_dtype": "compute"}], ids=str)
def test_all_stages_equal_stage_0_bit_for_bit_in_16_bits(dtype, zero):
    run_ranks(2, stages_case, ["tied head, unused parameter", "frozen layers"], {"dtype": dtype, "zero": zero}, True)
