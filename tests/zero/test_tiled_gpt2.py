"""--memory-centric-tiled-linear: a GPT-2 with tiled MLPs starts and trains as the one without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from megazero import mpu
from megazero.arguments import load_config
from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from megazero.model.state_dict import merge_full
from megazero.zero import Init
from tests.model.plain_gpt2 import random_tokens
from tests.model.test_gpt2 import LLAMA
from tests.ranks import run_ranks
from tests.zero.models import make_engine
from tests.zero.test_memory import sampled
from tests.zero.test_tiling import parts_of, whole_tiles

CONFIG = GPT2Config(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=10,
    vocab_size=131,
    make_vocab_size_divisible_by=8,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
Trace = dict[str, Tensor]


def train(config: GPT2Config, stage: int) -> tuple[Trace, int, int]:
    """Initial weights, losses, norms and final weights of some steps; the most bytes of tiles at a time, and of the largest."""
    groups = mpu.get_groups()
    torch.manual_seed(0)
    with Init(data_parallel_group=groups.data, enabled=stage == 3):
        model = GPT2Model(config)
    trace = {"generator": torch.rand(1)}
    mpu.model_parallel_cuda_manual_seed(1)
    cuts = mpu.partitions(model)
    engine = make_engine(model, stage)

    def keep_weights(when: str) -> None:
        for name, value in merge_full(engine.state_dict(), cuts, groups.model).items():
            trace[f"{when} {name}"] = value

    keep_weights("first")
    tokens = random_tokens(2 * 2 * groups.data_parallel_size, 11, 131).view(2, groups.data_parallel_size, 2, 11)
    most = 0
    for index, text in enumerate(tokens[:, groups.data_parallel_rank]):
        engine.module.blocks = engine.module.transformer.layers  # where `sampled` looks

        def step(text: Tensor = text, index: int = index) -> None:
            loss = engine(text[:, :-1], targets=text[:, 1:]).mean()
            trace[f"loss {index}"] = loss.detach().clone()
            engine.backward(loss)
            engine.step()

        if stage == 3:
            most = max(most, sampled(engine, step, whole_tiles))
        else:
            step()
        del engine.module.blocks
        trace[f"norm {index}"] = torch.tensor(engine.get_global_grad_norm())
    keep_weights("last")
    largest = max((b.weights.flat.numel() * 4 for b in engine.buckets if ".linears." in b.name), default=0)
    engine.destroy()
    return trace, most, largest


def equal_case(model_parallel_size: int, config: GPT2Config) -> None:
    mpu.initialize_model_parallel(model_parallel_size)
    want, _, _ = train(config, 0)
    for factor, stage, recomputed, sequence_parallel in (
        (1, 0, False, False),
        (3, 3, False, False),
        (2, 3, True, False),
        (3, 0, False, True),
        (2, 3, True, True),
    ):
        tiled = replace(config, memory_centric_tiled_linear=True, tile_factor=factor, checkpoint_activations=recomputed)
        tiled = replace(tiled, sequence_parallel=sequence_parallel)
        mpu.partition_activations_in_checkpoint(recomputed)
        got, most, largest = train(tiled, stage)
        what = f"tile factor {factor}, stage {stage}, recomputed {recomputed}, sequence parallel {sequence_parallel}"
        for key, value in want.items():
            found = parts_of(got, key)
            if key.startswith(("first", "generator")):
                assert torch.equal(found, value), f"{key}, {what}"
            else:  # sums in another order
                assert_close(
                    found, value, rtol=1e-4, atol=1e-5, msg=lambda m, key=key, what=what: f"{key}, {what}: {m}"
                )
        assert stage != 3 or largest < most <= 2 * largest, f"{what}: {most} bytes of tiles, the largest has {largest}"
    mpu.partition_activations_in_checkpoint(False)


@pytest.mark.parametrize("architecture", [{}, LLAMA], ids=["", "llama"])
@pytest.mark.parametrize("world_size, model_parallel_size", [pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)])
def test_a_tiled_model_starts_and_trains_as_the_whole_one(world_size, model_parallel_size, architecture):
    run_ranks(world_size, equal_case, model_parallel_size, replace(CONFIG, **architecture))


def test_flags_and_what_does_not_fit():
    tiled = load_config(["--memory-centric-tiled-linear", "--tile-factor", "2"]).model
    assert tiled.memory_centric_tiled_linear and tiled.tile_factor == 2
    assert not load_config([]).model.memory_centric_tiled_linear
    with pytest.raises(ValueError, match="--memory-centric-tiled-linear, which is not given"):
        load_config(["--tile-factor", "2"])
    with pytest.raises(ValueError, match="--tile-factor 25 asks for more tiles than --hidden-size 24"):
        replace(CONFIG, memory_centric_tiled_linear=True, tile_factor=25)
    with pytest.raises(ValueError, match="must be a multiple of 40"):
        replace(CONFIG, memory_centric_tiled_linear=True, tile_factor=5).check_parallel(2)
    fits = replace(CONFIG, memory_centric_tiled_linear=True, tile_factor=5)
    fits.check_parallel(1)
    assert fits.num_parameters() == CONFIG.num_parameters()
    assert fits.full_shapes() == CONFIG.full_shapes()
