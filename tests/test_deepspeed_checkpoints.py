"""save_checkpoint, load_checkpoint and save_16bit_model as DeepSpeed's users know them."""

from __future__ import annotations

import argparse
import copy
import logging
import random
from functools import partial
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import megazero as deepspeed
from megazero import comm, mpu
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.tags import list_tags
from megazero.engine import Engine
from megazero.zero import access
from tests.checkpoint.test_any_to_any import Net
from tests.ranks import run_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
}


def make_engine(
    stage: int = 2, model: nn.Module | None = None, seed: int = 0, **config: object
) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(seed)
    model = model or nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    config = {**CONFIG, "zero_optimization": {"stage": stage}, **config}
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine: deepspeed.DeepSpeedEngine, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.arange(14.0).view(2, 7) * (engine.global_steps + 1) / 50
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def round_trip_case(folder: str, stage: int) -> None:
    engine = make_engine(stage)
    train(engine, 3)
    client = {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "best": float("inf"),
        3: ("three", [1, None]),
    }
    engine.global_samples = np.int64(engine.global_samples)  # a script may set it
    assert engine.save_checkpoint(folder, tag=12, client_state=client) is True
    assert Path(folder, "latest").read_text() == "12"
    want, lr = train(engine, 2), engine.get_lr()
    other = make_engine(stage, seed=1)
    path, found = other.load_checkpoint(folder, tag=12)  # the tutorial passes a number
    assert path == str(Path(folder, "12"))
    assert other.global_steps == 3
    assert other.global_samples == 3 * other.train_batch_size()
    random.setstate(found["random"])
    np.random.set_state(found["numpy"])
    assert torch.equal(found["torch"], client["torch"])
    assert found["best"] == float("inf")
    assert found[3] == ("three", [1, None])
    assert train(other, 2) == want and other.get_lr() == lr, "bit for bit"
    assert other.save_checkpoint(folder) is True and Path(folder, "latest").read_text() == "global_step5"
    engine.save_checkpoint(folder, tag="aside", save_latest=False)
    assert Path(folder, "latest").read_text() == "global_step5"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_continues_bit_for_bit_and_the_client_state_comes_back(stage, tmp_path):
    run_ranks(2, round_trip_case, str(tmp_path), stage)


def test_options_of_loading(one_rank, tmp_path, caplog):
    engine = make_engine()
    train(engine, 3)
    engine.save_checkpoint(str(tmp_path))
    weights = engine.state_dict()

    def fresh() -> deepspeed.DeepSpeedEngine:
        return make_engine(seed=9)

    only = fresh()
    only.load_checkpoint(str(tmp_path), load_module_only=True)
    assert only.global_steps == 0 and only.get_lr() == fresh().get_lr() and not only.optimizer.counters()
    assert all(torch.equal(value, weights[name]) for name, value in only.state_dict().items())
    without = fresh()
    without.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert without.global_steps == 3 and not without.optimizer.counters()
    schedule = fresh()
    schedule.load_checkpoint(str(tmp_path), load_lr_scheduler_states=False)
    assert schedule.lr_scheduler.state_dict() != engine.lr_scheduler.state_dict() and schedule.optimizer.counters()
    assert schedule.get_lr() == fresh().get_lr() != engine.get_lr()
    Engine.save_checkpoint(fresh(), tmp_path / "plain")  # which counts no samples
    engine.load_checkpoint(str(tmp_path / "plain"))
    assert (engine.global_steps, engine.global_samples) == (0, 0)
    larger = make_engine(model=nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3), nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="has no 3.weight, 3.bias"):
        larger.load_checkpoint(str(tmp_path))
    larger.load_checkpoint(str(tmp_path), load_module_strict=False)
    assert torch.equal(larger.state_dict()["0.weight"], weights["0.weight"])
    with pytest.raises(NotImplementedError, match="load_module_state_dict"):
        larger.load_checkpoint(str(tmp_path), custom_load_fn=lambda src, dst: None)
    with caplog.at_level(logging.WARNING):
        assert fresh().load_checkpoint(str(tmp_path / "nowhere")) == (None, None)
    assert "nowhere is no directory" in caplog.text
    (tmp_path / "latest").unlink()
    assert fresh().load_checkpoint(str(tmp_path)) == (None, None)
    assert "has no file `latest`; name a checkpoint by tag" in caplog.text
    (tmp_path / "latest_universal").write_text("universal")
    assert fresh().load_checkpoint(str(tmp_path)) == (None, None)
    assert "holds a universal checkpoint of DeepSpeed's. Make one of it that can be loaded" in caplog.text
    path, _ = fresh().load_checkpoint(str(tmp_path), fallback=True)
    assert path is not None and "Taking the newest checkpoint that is there" in caplog.text


def test_a_load_waits_for_the_save_that_is_under_way(one_rank, tmp_path):
    engine = make_engine()
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path), in_background=True)
    train(engine, 1)
    path, _ = engine.load_checkpoint(str(tmp_path))
    assert path is not None and engine.global_steps == 1 and engine.global_samples == engine.train_batch_size()


def test_bad_arguments_are_refused(one_rank, tmp_path):
    engine = make_engine()
    for empty in ("", None):
        with pytest.raises(ValueError, match="needs a directory"):
            engine.save_checkpoint(empty)
        with pytest.raises(ValueError, match="load_checkpoint needs a directory"):
            engine.load_checkpoint(empty)
    with pytest.raises(TypeError, match="the tag is a dict.*client_state="):
        engine.save_checkpoint(str(tmp_path), {"epoch": 3})
    client = {"args": argparse.Namespace(lr=1)}
    with pytest.raises(TypeError, match=r"client_state\['args'\].*argparse.Namespace.*vars"):
        engine.save_checkpoint(str(tmp_path), client_state=client)
    assert not list(tmp_path.iterdir())


def nested(original):
    """As Megatron-LM's `save_ds_checkpoint` does, with `state_dict_for_save_checkpoint`."""
    return lambda destination=None, prefix="", keep_vars=False: {
        "language_model": {"transformer": original(prefix=prefix, keep_vars=keep_vars)}
    }


def copied_in_part(original):
    """As scripts that train a LoRA do, for its own file."""
    return lambda *_, **__: {f"lora.{name}": value.clone() for name, value in original().items() if "2." in name}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("way", [nested, copied_in_part])
def test_a_state_dict_that_a_script_puts_in_place_of_a_models_changes_nothing(one_rank, tmp_path, way, stage):
    model = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    other = make_engine(stage, copy.deepcopy(model))
    engine = make_engine(stage, model)
    train(engine, 2)
    original = engine.module.state_dict
    engine.module.state_dict = way(original)
    engine.save_checkpoint(str(tmp_path))
    engine.module.state_dict = original
    other.load_checkpoint(str(tmp_path))
    assert train(other, 2) == train(engine, 2)


def test_a_checkpoint_of_deepspeeds_names_the_command_that_imports_it(one_rank, tmp_path):
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "latest").write_text("global_step5")
    with pytest.raises(FileNotFoundError, match=f"import --from deepspeed {tmp_path} OUT"):
        make_engine().load_checkpoint(str(tmp_path))


def tag_case(folder: str, validation: str) -> None:
    engine = make_engine(checkpoint={"tag_validation": validation})
    tag = f"rank{torch.distributed.get_rank()}"
    if validation == "FAIL":
        with pytest.raises(AssertionError, match="different checkpoint tags: rank0, rank1"):
            engine.save_checkpoint(folder, tag=tag)
        assert not Path(folder, "latest").exists()
        return
    engine.save_checkpoint(folder, tag=tag)
    assert Path(folder, "latest").read_text() == "rank0"
    for own in (tag, tag if tag == "rank0" else None):
        assert engine.load_checkpoint(folder, tag=own)[0] == f"{folder}/rank0"


@pytest.mark.parametrize("validation", ["FAIL", "WARN", "IGNORE"])
def test_ranks_must_give_one_tag(validation, tmp_path):
    run_ranks(2, tag_case, str(tmp_path), validation)


def test_of_many_tags_a_few_are_named(one_rank, monkeypatch, tmp_path):
    engine = make_engine(checkpoint={"tag_validation": "FAIL"})
    monkeypatch.setattr(comm, "all_gathered_objects", lambda tag: [tag] * 100 + [f"rank{rank}" for rank in range(100)])
    with pytest.raises(AssertionError, match=r"different checkpoint tags: here, rank0, rank1 and 98 more\. Give"):
        engine.save_checkpoint(str(tmp_path), tag="here")


def frozen_case(folder: str) -> None:
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3))
    model[0].requires_grad_(False)
    engine = make_engine(3, model)
    train(engine, 2)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    other = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3))
    own = other[0].weight.detach().clone()
    other[0].requires_grad_(False)
    again = make_engine(1, other, seed=5)
    again.load_checkpoint(folder, load_module_strict=False)
    assert torch.equal(again.state_dict()["0.weight"], own)
    assert torch.equal(again.state_dict()["1.weight"], engine.state_dict()["1.weight"])


def test_frozen_parameters_can_be_left_out(tmp_path):
    run_ranks(2, frozen_case, str(tmp_path))


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_frozen_or_unfrozen_since_initialize_are_left_out_or_not(one_rank, stage, tmp_path):
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3))
    model[0].requires_grad_(False)
    engine = make_engine(stage, model)
    model[0].bias.requires_grad_(True)  # whose bucket gets states, also for the frozen weight
    model[1].bias.requires_grad_(False)
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path), tag="trained", exclude_frozen_parameters=True)
    assert set(Reader(tmp_path, "trained").tensors) == {"0.bias", "1.weight"}
    engine.save_checkpoint(str(tmp_path), tag="all")
    assert set(Reader(tmp_path, "all").tensors) == set(engine.module_state_dict())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_dictionary_can_leave_frozen_parameters_out_whatever_their_names(one_rank, stage, tmp_path):
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(7, 9)), nn.Linear(9, 3), nn.BatchNorm1d(3, affine=False))
    model[:1].requires_grad_(False)  # its names are with the wrapper, those of its state dictionary without
    model[1].bias.requires_grad_(False)
    engine = make_engine(
        model=model, zero_optimization={"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    )
    train(engine, 1)
    trained = engine.module_state_dict(exclude_frozen_parameters=True)
    assert list(trained) == ["1.weight", "2.running_mean", "2.running_var", "2.num_batches_tracked"]
    assert torch.equal(trained["1.weight"], engine.module_state_dict()["1.weight"])
    assert engine.save_16bit_model(str(tmp_path), exclude_frozen_parameters=True) is True
    assert list(torch.load(tmp_path / "pytorch_model.bin", weights_only=True)) == list(trained)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_destroyed_engine_neither_trains_nor_saves_nor_loads(one_rank, stage, tmp_path):
    engine = make_engine(stage)
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path), tag="kept")
    engine.destroy()
    save, load = partial(engine.save_checkpoint, str(tmp_path)), partial(engine.load_checkpoint, str(tmp_path))
    backward = partial(engine.backward, engine.module[0].weight.sum())
    for call in (save, load, engine.module_state_dict, backward, engine.step):
        with pytest.raises(RuntimeError, match="this engine was destroyed"):
            call()
    assert list_tags(tmp_path) == ["kept"]


def half_case(folder: str, size: int, stage: int) -> dict[str, list]:
    groups = mpu.initialize_model_parallel(size)
    mpu.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }
    engine = deepspeed.initialize(model=Net(), config=config, mpu=mpu)[0]
    kept, state_dict = [], access.state_dict
    access.state_dict = lambda *arguments: kept.append(state_dict(*arguments)) or kept[0]
    assert engine.save_16bit_model(folder, "model.bin") is True
    is_first = torch.distributed.get_rank() == 0
    assert [value is not None for value in kept[0].values()] == [is_first] * len(kept[0]), "no other rank has the room"
    access.state_dict = state_dict
    assert engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True) is True
    assert groups.model_parallel_size == size
    return [name for name, p in engine.module.named_parameters(remove_duplicate=False) if not p.requires_grad]


@pytest.mark.parametrize("size,stage", [(1, 3), (2, 1), (2, 3)])
def test_save_16bit_model_writes_the_whole_model(size, stage, tmp_path):
    frozen = run_ranks(2 * size, half_case, str(tmp_path), size, stage)[0]
    state = torch.load(tmp_path / "model.bin", weights_only=True)
    assert state["embedding.weight"].shape == (13, 12) or size == 1
    assert state["blocks.0.up.weight"].shape == (36, 12) and state["blocks.0.down.weight"].shape == (12, 36)
    assert all(v.dtype == torch.bfloat16 for name, v in state.items() if name != "seen")
    assert state["tied.weight"].data_ptr() == state["out.weight"].data_ptr()
    trained = torch.load(tmp_path / "trained.bin", weights_only=True)
    assert set(state) - set(trained) == set(frozen) == {"frozen.weight", "frozen.bias"}


def no_room_case(folder: str) -> None:
    config = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    engine = make_engine(zero_optimization=config)
    train(engine, 1)
    is_first, copied = torch.distributed.get_rank() == 0, access.copied
    access.copied = Mock(wraps=copied, side_effect=[DEFAULT, MemoryError("no room")])
    with pytest.raises(MemoryError if is_first else comm.OtherRankError, match="no room"):
        engine.save_16bit_model(folder)
    access.copied = copied
    train(engine, 1)
    assert engine.save_16bit_model(folder) is True


def test_every_rank_hears_that_the_first_one_has_no_memory_for_the_whole_model(tmp_path):
    run_ranks(3, no_room_case, str(tmp_path))
    assert torch.load(tmp_path / "pytorch_model.bin", weights_only=True)["0.weight"].shape == (9, 7)


def test_save_16bit_model_makes_its_folder_and_says_when_it_writes_nothing(one_rank, tmp_path, caplog):
    engine = make_engine(3)
    assert engine.save_16bit_model(str(tmp_path / "none")) is False and not (tmp_path / "none").exists()
    assert "save_16bit_model wrote nothing: set stage3_gather_16bit_weights_on_model_save" in caplog.text
    engine.destroy()
    engine = make_engine(1)
    train(engine, 1)
    assert engine.save_16bit_model(str(tmp_path / "a" / "b")) is True
    assert torch.equal(torch.load(tmp_path / "a/b/pytorch_model.bin")["0.weight"], engine.module[0].weight)
    engine.module[0].weight = torch.nn.Parameter(torch.zeros(9, 7))
    with pytest.raises(RuntimeError, match=r"save_16bit_model\(\)"):
        engine.save_16bit_model(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"load_module_state_dict\(\)"):
        engine.load_module_state_dict({})


def long_write_case(folder: str) -> None:
    engine, together, limits = make_engine(1), comm.together, []
    comm.together = lambda action, group=None: (
        limits.append(comm.timeout_of(group or comm.world())),
        together(action, group),
    )[1]
    assert engine.save_16bit_model(folder) is True
    assert limits[-1] == 3600 > comm.timeout_of(comm.world())


def test_the_whole_model_may_take_longer_to_write_than_a_collective_may_take(tmp_path):
    run_ranks(2, long_write_case, str(tmp_path))
