"""Checkpoints of tiled layers hold the whole layers' parameters: they go on with other tiles, or with none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import megazero as deepspeed
from megazero import mpu
from megazero.checkpoint.commands.reshape import reshape
from megazero.checkpoint.reader import Reader
from megazero.engine import Engine
from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from megazero.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from megazero.zero import TiledLinear
from tests.model.plain_gpt2 import random_tokens
from tests.ranks import run_ranks
from tests.zero.models import make_engine
from tests.zero.test_tiled_gpt2 import CONFIG


def config_with(factor: int) -> GPT2Config:
    """MLPs have `factor` times 4 `factor` tiles; 0: they are whole."""
    tiles = {"memory_centric_tiled_linear": True, "tile_factor": factor} if factor else {}
    return replace(CONFIG, **tiles)


def make(size: int, stage: int, factor: int) -> Engine:
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_cuda_manual_seed(factor)  # values that a load replaces
    return make_engine(GPT2Model(config_with(factor)), stage)


def train(engine: Engine, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        text = random_tokens(2, 11, 131)
        loss = engine(text[:, :-1], targets=text[:, 1:]).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def check_same(folder: str, tag: str, other: str) -> None:
    got, want = Reader(folder, tag), Reader(folder, other)
    assert list(got.tensors) == list(want.tensors) and len(want.tensors) == len(CONFIG.full_shapes())
    for name, entry in want.tensors.items():
        assert list(entry.states) == ["master", "exp_avg", "exp_avg_sq"] and not got.missing(name)
        for state in entry.states:
            assert torch.equal(got.read(name, state), want.read(name, state)), f"{state} of {name} in {tag}"


def any_tiles_case(folder: str) -> None:
    engine = make(1, 1, 0)
    train(engine, 2)
    engine.save_checkpoint(folder, tag="whole")
    want = train(engine, 2)
    engine.destroy()
    before = "whole"
    for size, stage, factor in ((1, 3, 2), (2, 2, 2), (2, 3, 3), (2, 1, 0), (1, 2, 3), (1, 3, 0)):
        engine = make(size, stage, factor)
        engine.load_checkpoint(folder, tag=before)
        tag = before = f"{size}-{stage}-{factor}"
        engine.save_checkpoint(folder, tag=tag)
        check_same(folder, tag, "whole")
        tiles = [entry.cut.tiles for entry in Reader(folder, tag).tensors.values() if entry.cut and entry.cut.tiles]
        assert len(tiles) == (4 * CONFIG.num_layers if factor else 0)
        assert train(engine, 2) == pytest.approx(want, rel=1e-5), tag
        engine.destroy()
    if torch.distributed.get_rank() == 0:
        path = reshape(Reader(folder, "2-3-3"), f"{folder}/reshaped", 2, 1)
        assert not any(entry.cut and entry.cut.tiles for entry in Reader(path.parent, path.name).tensors.values())
        path.rename(f"{folder}/reshaped-2-3-3")
        check_same(folder, "reshaped-2-3-3", "whole")


def test_states_are_equal_and_losses_go_on_whatever_tiles_there_are_and_were(tmp_path):
    run_ranks(2, any_tiles_case, str(tmp_path))


def frozen_tile_case(folder: str) -> None:
    engine = make(1, 2, 2)
    (layer, *_) = (module for module in engine.module.modules() if isinstance(module, TiledLinear))
    layer.linears[0][0].weight.requires_grad_(False)
    train(engine, 2)
    engine.save_checkpoint(folder, tag="frozen")
    want = train(engine, 2)
    name = "transformer.layers.0.mlp.dense_h_to_4h"
    saved = Reader(folder, "frozen").tensors
    assert f"{name}.linears.0.0.weight" in saved and f"{name}.weight" not in saved and f"{name}.bias" in saved
    engine.load_checkpoint(folder, tag="frozen")
    assert train(engine, 2) == want
    engine.destroy()
    engine = make(1, 2, 0)
    with pytest.raises(ValueError, match=f"the checkpoint has no {name}.weight; the model has no {name}.linears"):
        engine.load_checkpoint(folder, tag="frozen")
    engine.destroy()


def test_a_layer_whose_tiles_are_not_trained_alike_is_saved_tile_by_tile(tmp_path):
    run_ranks(2, frozen_tile_case, str(tmp_path))


class OtherTile(nn.Module):
    """Of the same product, with the weight the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Odd(nn.Module):
    """Layers have a tile that is tied to one before or behind them, a tile of another kind, and one is there twice."""

    def __init__(self) -> None:
        super().__init__()
        layers = [TiledLinear(6, 7, in_splits=2, out_splits=2) for _ in range(3)]
        self.first, self.tied, self.other, self.named = nn.Linear(3, 4, bias=False), *layers
        self.last = nn.Linear(3, 4, bias=False)
        self.tied.linears[0][0].weight, self.last.weight = self.first.weight, self.named.linears[0][0].weight
        self.other.linears[0][0] = OtherTile()
        self.again = self.twice = TiledLinear(7, 7, in_splits=2, out_splits=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.again(self.twice(self.tied(x) + self.other(x) + self.named(x)))
        return y + self.first(x[:, :3]).sum() + self.last(x[:, :3]).sum()


def odd_tiles_case(folder: str) -> None:
    mpu.initialize_model_parallel(1)
    torch.manual_seed(1)
    engine, x = make_engine(Odd(), 1), torch.randn(3, 6)
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    want, reader = engine(x).detach(), Reader(folder)
    assert not any(reader.missing(name) for name in reader.tensors)
    assert {"tied.linears.0.1.weight", "tied.bias", "other.bias", "named.linears.0.0.weight"} <= reader.tensors.keys()
    engine.destroy()
    assert_close(load_state_dict_from_zero_checkpoint(Odd(), folder)(x), want)
    engine = make_engine(Odd(), 1)
    engine.load_checkpoint(folder)
    assert torch.equal(engine(x), want)
    engine.destroy()
    engine = deepspeed.initialize(model=Odd(), config={"train_batch_size": 2})[0]
    engine.save_16bit_model(folder, "odd.bin")
    want, plain, state = engine(x).detach(), Odd(), torch.load(f"{folder}/odd.bin", weights_only=True)
    assert {"tied.linears.0.1.weight", "tied.bias", "other.bias", "named.linears.0.0.weight"} <= state.keys()
    plain.load_state_dict(state)
    assert_close(plain(x), want)
    engine.destroy()


def test_a_layer_some_of_whose_tiles_are_tied_or_of_another_kind_is_saved_tile_by_tile(tmp_path):
    run_ranks(2, odd_tiles_case, str(tmp_path))


def fp32_case(folder: str) -> None:
    mpu.initialize_model_parallel(1)
    models = [nn.Sequential(TiledLinear(6, 7, in_splits=2, out_splits=splits), nn.Linear(7, 1)) for splits in (2, 3)]
    models.append(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 1)))
    engine, x = make_engine(models[0], 3), torch.randn(3, 6)
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    want = engine(x).detach()
    for model in models[1:]:
        assert_close(load_state_dict_from_zero_checkpoint(model, folder)(x), want)
    engine.destroy()


def test_the_fp32_weights_of_tiles_are_loaded_into_models_with_other_tiles_and_none(tmp_path):
    run_ranks(1, fp32_case, str(tmp_path))


class Plain(nn.Module):
    """Tiled layers of one rank and cut over the model-parallel ones; or the whole layers; and a layer with a frozen tile.

    What the last one cuts are stacked matrices, so it is saved tile by tile.
    """

    def __init__(self, splits: int) -> None:
        super().__init__()
        tiles = {"in_splits": splits, "out_splits": splits}
        self.into = TiledLinear(6, 8, **tiles) if splits else nn.Linear(6, 8)
        column = mpu.ColumnParallelLinear
        self.column = TiledLinear(8, 12, linear_cls=column, **tiles) if splits else column(8, 12)
        self.partly = TiledLinear(12, 3, in_splits=2, out_splits=1)
        self.partly.linears[0][0].requires_grad_(False)
        stacked = {"bias": False, "stride": 2}
        self.last = TiledLinear(3, 8, out_splits=2, linear_cls=column, **stacked) if splits else column(3, 8, **stacked)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.partly(self.column(self.into(x))))


def whole_16bit_case(folder: str, size: int, stage: int) -> None:
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_cuda_manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }
    engine = deepspeed.initialize(model=Plain(2), config=config, mpu=mpu)[0]
    engine.save_16bit_model(folder, "all.bin")
    engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True)
    x, state = torch.randn(3, 6), torch.load(f"{folder}/all.bin", weights_only=True)
    want = engine(x).detach()
    names = [f"{name}.{key}" for name in ("into", "column", "partly") for key in ("weight", "bias")]
    assert list(state) == [*names, "last.weight"]
    engine.save_checkpoint(folder)
    for name in ("into.weight", "into.bias", "column.weight", "column.bias"):
        assert torch.equal(state[name], Reader(folder).read(name, "master"))
    tiles = [Reader(folder).read(f"last.linears.{number}.0.weight", "master") for number in range(2)]
    assert torch.equal(state["last.weight"], torch.cat(tiles))
    trained = torch.load(f"{folder}/trained.bin", weights_only=True)
    assert [name for name in trained if name not in state] == ["partly.linears.0.1.weight"]
    if size == 1:
        plain = Plain(0)
        plain.load_state_dict(state)
        assert_close(plain(x), want)
        again = deepspeed.initialize(model=Plain(3), config=config, mpu=mpu)[0]
        again.load_module_state_dict(state)
        assert_close(again(x), want)
        rows = 8 + torch.distributed.get_rank()  # wrong on one rank: an error on all
        with pytest.raises(RuntimeError, match=r"size mismatch for into.weight: .* the whole layer's has \(8, 6\)"):
            again.load_module_state_dict({"into.weight": torch.zeros(rows, 6)}, strict=False)


@pytest.mark.parametrize("size, stage", [(1, 0), (1, 3), (2, 1)])
def test_save_16bit_model_writes_whole_layers_which_load_with_other_tiles_or_none(size, stage, tmp_path):
    run_ranks(2, whole_16bit_case, str(tmp_path), size, stage)
