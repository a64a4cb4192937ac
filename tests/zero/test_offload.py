"""Homes: states in host memory and on NVMe train exactly as those on the accelerator; what is where is counted."""

from __future__ import annotations

import errno
import importlib.util
import itertools
import shutil
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megazero import comm, mpu, zero
from megazero.nvme import PAGE, SwapFile
from megazero.reporting import MemoryWatch
from megazero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from megazero.zero.bucket import MASTER
from megazero.zero.config import ZeroConfig
from megazero.zero.homes import TILE_MULTIPLE, kept_on_device, tile_numel
from megazero.zero.memory import plan_memory
from megazero.zero.units import ROOT, find_units, plan_buckets
from megazero.zero.update import Update
from tests.ranks import run_ranks
from tests.zero.models import MODELS, STEPS, Wide, compare, full_grad, make_engine, my_batch, run, token_batches, train
from tests.zero.streams import slow_link


def homes(stage: int, path: str) -> list[dict]:
    """Every combination that a stage has, but for both on the accelerator."""
    params = ("none", "cpu", "nvme") if stage == 3 else ("none",)
    pairs = itertools.product(("none", "cpu", "nvme"), params)
    return [
        {"offload_optimizer": o, "offload_param": p, "nvme_path": path} for o, p in pairs if (o, p) != ("none", "none")
    ]


def homes_case(path: str, make, options: dict, stages: tuple[int, ...] = (1, 2, 3)) -> None:
    mpu.initialize_model_parallel(1)
    settings = {**options, "sub_group_size": TILE_MULTIPLE}
    engine_options = {k: settings.pop(k) for k in ("dtype", "micro", "optimizer") if k in settings} | {"steps": STEPS}
    for stage in stages:
        want = run(make, stage, clip_grad=0.5, zero=settings, **engine_options)
        for home in homes(stage, path):
            got = run(make, stage, clip_grad=0.5, zero={**settings, **home}, **engine_options)
            compare(got, want, f"stage {stage}, {home}", bitwise=True)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_home_trains_as_the_accelerator_bit_for_bit(world_size, tmp_path):
    run_ranks(world_size, homes_case, str(tmp_path), Wide, {})


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "grad_dtype": "compute"},
        {"micro": 3},
        {"optimizer": "sgd"},
        {"optimizer": "adamw, not fused"},
        {"pipeline_read": False, "pipeline_write": False},
        {"optimizer_buffer_count": 1, "param_buffer_count": 1},
    ],
    ids=str,
)
def test_every_home_trains_as_the_accelerator_bit_for_bit_with(options, tmp_path):
    run_ranks(2, homes_case, str(tmp_path), Wide, options, (2, 3))


def test_adam_on_the_host_is_the_same_bit_for_bit_whichever_pass_takes_the_clipped_factor(tmp_path):
    """Of 3 ranks and clipping: a factor that is no power of two, by which one pass would divide and another multiply."""
    run_ranks(3, homes_case, str(tmp_path), Wide, {"dtype": torch.bfloat16, "optimizer": "CPUAdam"}, (1, 3))


def test_nvme_trains_ties_unused_and_frozen_parameters(tmp_path):
    run_ranks(2, models_case, str(tmp_path))


def models_case(path: str) -> None:
    for name in ("tied head, unused parameter", "frozen layers"):
        homes_case(path, MODELS[name], {}, (3,))
        mpu.destroy_model_parallel()


def memory_case(path: str) -> dict[str, list[int]]:
    mpu.initialize_model_parallel(1)
    held = {}
    for home in ("none", "nvme"):
        options = {"nvme_path": path, "offload_optimizer": home, "offload_param": home}
        engine = make_engine(Wide(), 3, zero=options, dtype=torch.bfloat16)
        dict(train(engine, token_batches(1, 1, 2)))
        memory = engine.memory()
        held[home] = [memory["P"], memory["O"], engine.homes.swap.nbytes if home == "nvme" else 0]
        owned = sum(bucket.owned_numel for bucket in engine.buckets)
        engine.destroy()
    return {**held, "owned": [owned]}


def test_nothing_of_the_states_stays_in_memory_under_nvme(tmp_path):
    for held in run_ranks(2, memory_case, str(tmp_path)):
        (owned,) = held["owned"]
        assert held["none"][0] == 0 and held["none"][1] >= 12 * owned  # shards on the device are their master weights
        p, o, on_disk = held["nvme"]
        assert p == 0 and o < 1000  # the step counters
        pages = 6 * 4 * PAGE  # each of 6 buckets' 4 vectors begins at a page, and gradients had a place too
        assert (2 + 12) * owned <= on_disk <= (2 + 12 + 4) * owned + pages


@pytest.mark.parametrize(
    ("stage", "o", "p", "away"),
    [
        (1, "cpu", "none", "O"),
        (2, "cpu", "none", "GO"),
        (3, "cpu", "cpu", "PGO"),
        (3, "none", "cpu", "P"),
        (3, "none", "none", ""),
    ],
)
def test_the_peak_that_a_job_measures_is_the_devices_without_what_is_offloaded(one_rank, stage, o, p, away):
    engine = make_engine(Wide(), stage, zero={"offload_optimizer": o, "offload_param": p}, dtype=torch.bfloat16)
    plan = plan_memory(engine.module, engine.zero, data_parallel_size=1, dtype=torch.bfloat16)
    for ((batch,),) in token_batches(2, 1, 1):
        with MemoryWatch(engine) as watch:
            engine.backward(engine(batch))
            held = engine.memory()
            counters = sum(held[key] for key in away) - held["offloaded"]
            assert 0 <= counters < 1000
            engine.step()
        assert 0 < watch.most["peak"] <= plan.peak + 1000, "of counters"


@pytest.mark.parametrize("offload_param", ["none", "nvme"])
def test_who_goes_on_after_a_failed_write_gets_its_error_at_every_use_of_the_drive(one_rank, tmp_path, offload_param):
    options = {"offload_optimizer": "nvme", "offload_param": offload_param, "nvme_path": str(tmp_path)}
    engine = make_engine(Wide(), 3, zero=options)
    batches = token_batches(1, 1, 1)
    dict(train(engine, batches))
    drive = engine.homes.swap._requests._transport

    whole, places = drive.write, []
    drive.write = lambda view, offset: places.append(offset) or whole(view, offset)
    dict(train(engine, batches))

    def write(view, offset):  # whose end nothing else of the step asks for
        if offset == places[-1]:
            raise OSError(errno.EIO, "injected")
        return whole(view, offset)

    drive.write = write
    with pytest.raises(OSError, match="rank 0: write of .* failed after 0 bytes: injected") as first:
        dict(train(engine, batches))
    del drive.write  # it works again, and the file holds old bytes
    uses = [
        lambda: dict(train(engine, batches)),
        lambda: safe_get_full_optimizer_state(engine.module.embedding.weight, "exp_avg"),
    ]
    for use in (*uses, engine.state_dict) if offload_param == "nvme" else uses:
        with pytest.raises(OSError) as again:
            use()
        assert str(again.value) == str(first.value)


def access_case(path: str, home: str) -> None:
    mpu.initialize_model_parallel(1)
    options = {"offload_optimizer": home, "offload_param": home, "nvme_path": path, "sub_group_size": TILE_MULTIPLE}
    engine = make_engine(Wide(), 3, zero=options, dtype=torch.bfloat16)
    dict(train(engine, token_batches(1, 1, 2)))
    weight = engine.module.blocks[1][0].weight
    master, moment = safe_get_full_fp32_param(weight), safe_get_full_optimizer_state(weight, "exp_avg")
    assert master.shape == moment.shape == (149, 67) and moment.abs().max() > 0
    with zero.GatheredParameters(weight):
        assert torch.equal(weight.detach(), master.bfloat16())
    safe_set_full_fp32_param(weight, master + 1)
    assert torch.equal(safe_get_full_fp32_param(weight), master + 1)
    with zero.GatheredParameters(weight, modifier_rank=0):
        assert torch.equal(weight.detach(), (master + 1).bfloat16())
        with torch.no_grad():
            weight.fill_(0.5)
    assert torch.equal(safe_get_full_fp32_param(weight), torch.full((149, 67), 0.5))
    assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), moment)
    with pytest.raises(RuntimeError, match="^GatheredParameters: blocks.1.0.weight changed .*opened for reading only"):
        with zero.GatheredParameters(weight), torch.no_grad():
            weight.fill_(0.0)
    engine.backward(engine(my_batch()))
    safe_set_full_grad(weight, torch.full((149, 67), 3.0))
    norms = [full_grad(engine, name).double().norm() for name, _ in engine.module.named_parameters()]
    assert engine.optimizer.grad_norm() == pytest.approx(float(torch.stack(norms).norm()), rel=1e-4), "of what was set"
    engine.destroy()
    assert torch.equal(engine.module.blocks[1][0].weight.detach(), torch.full((149, 67), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_states_at_home_are_read_and_written_through_the_public_functions(home, tmp_path):
    run_ranks(2, access_case, str(tmp_path), home)


def resume_case(
    path: str, saved: dict, loaded: dict, unbroken: dict | None = None, in_background: bool = False
) -> None:
    """Saves with states in some homes and goes on in others, as a run without a break (on the accelerator) does."""
    mpu.initialize_model_parallel(1)
    batches = token_batches(4, 1, mpu.get_data_parallel_world_size())

    def engine(home: dict):
        torch.manual_seed(0)
        options = {"nvme_path": path, "sub_group_size": TILE_MULTIPLE, **home}
        return make_engine(Wide().to(comm.local_device()), 3, zero=options, dtype=torch.bfloat16)

    whole = engine(unbroken or {})
    dict(train(whole, batches[:2]))
    want = dict(train(whole, batches[2:]))
    first = engine(saved)
    dict(train(first, batches[:2]))
    first.save_checkpoint(f"{path}/saved", in_background=in_background)
    first.destroy()
    second = engine(loaded)
    second.load_checkpoint(f"{path}/saved")
    compare(dict(train(second, batches[2:])), want, f"{saved} -> {loaded}", bitwise=True)


ON_NVME = {"offload_optimizer": "nvme", "offload_param": "nvme"}


@pytest.mark.parametrize(
    ("saved", "loaded", "in_background"),
    [(ON_NVME, ON_NVME, False), (ON_NVME, {}, True), ({}, ON_NVME, False)],
    ids=["same", "out", "in"],
)
def test_a_checkpoint_goes_from_any_home_to_any_other_bit_for_bit(saved, loaded, in_background, tmp_path):
    run_ranks(2, resume_case, str(tmp_path), saved, loaded, None, in_background)


def init_case(path: str) -> None:
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    want = run(Wide, 3)

    def built_on_nvme():
        config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": path}}}
        with zero.Init(remote_device="nvme", config=config):
            return Wide()

    got = run(built_on_nvme, 3, zero={**ON_NVME, "nvme_path": path})
    compare(got, want, "zero.Init on nvme", bitwise=True)


def test_a_model_is_built_on_nvme_with_the_same_values(tmp_path):
    run_ranks(2, init_case, str(tmp_path))


def unfreeze_case(path: str, stage: int, home: dict, dtype: torch.dtype, frozen: str) -> None:
    mpu.initialize_model_parallel(1)

    def trained(home: dict) -> dict:
        torch.manual_seed(0)
        engine = make_engine(Wide(), stage, zero=home, dtype=dtype)
        batches = token_batches(3, 1, 2)
        dict(train(engine, batches[:1]))
        engine.module.get_submodule(frozen).requires_grad_(False)
        dict(train(engine, batches[1:2]))
        if home:
            moments = [value for state in engine.optimizer.state.values() for value in state.values() if value.ndim]
            assert moments and not any(value.numel() for value in moments), "no buffer is kept for what is frozen"
        engine.module.get_submodule(frozen).requires_grad_(True)
        return dict(train(engine, batches[2:]))

    compare(trained({**home, "nvme_path": path}), trained({}), "frozen for a while", bitwise=True)


@pytest.mark.parametrize(
    ("stage", "home", "dtype", "frozen"),
    [(2, {"offload_optimizer": "nvme"}, torch.float32, "blocks.0"), (3, ON_NVME, torch.bfloat16, "blocks.0.0")],
    ids=["a block", "a part, with its shard"],
)
def test_what_is_frozen_for_a_while_keeps_its_moments_and_its_values_on_nvme(stage, home, dtype, frozen, tmp_path):
    run_ranks(2, unfreeze_case, str(tmp_path), stage, home, dtype, frozen)


def unfrozen_case(path: str) -> None:
    """A block whose shard rests in a file is trained, from some step on, by an optimizer whose states are in memory."""
    mpu.initialize_model_parallel(1)

    def trained(home: dict) -> dict:
        torch.manual_seed(0)
        model = Wide()
        model.blocks[0].requires_grad_(False)
        engine = make_engine(model, 3, zero=home, dtype=torch.bfloat16)
        (frozen,) = (bucket for bucket in engine.buckets if not bucket.is_trainable)
        batches = token_batches(3, 1, 2)
        dict(train(engine, batches[:1]))
        in_file = engine.homes.swap.nbytes if home else 0
        model.blocks[0].requires_grad_(True)
        found = dict(train(engine, batches[1:]))
        assert frozen.is_trainable and all(b.weights.shard is b.states[MASTER] for b in engine.buckets)
        assert not any(bucket.weights.is_offloaded for bucket in engine.buckets) and (in_file > 0) == bool(home)
        return found

    in_files = {"offload_param": "nvme", "nvme_path": path}
    compare(trained(in_files), trained({}), "unfrozen later", bitwise=True)


def test_a_shard_in_a_file_gives_way_to_master_weights_in_memory_when_it_is_trained(tmp_path):
    run_ranks(2, unfrozen_case, str(tmp_path))


def refused_case(path: str) -> None:
    mpu.initialize_model_parallel(1)
    with pytest.raises(ValueError, match="Adagrad.*--offload-optimizer cpu"):
        zero = ZeroConfig(stage=2, offload_optimizer="nvme", nvme_path=path)
        from megazero.engine import Engine, weight_decay_groups

        model = Wide()
        Engine(model, mpu.get_groups(), torch.optim.Adagrad, *weight_decay_groups(model, 0.1), zero=zero)
    with pytest.raises(OSError, match="nvme_path must be an existing directory"):
        make_engine(Wide(), 3, zero={**ON_NVME, "nvme_path": path + "/absent"})


def absent_on_one_rank_case(path: str) -> None:
    groups = mpu.initialize_model_parallel(1)
    is_whole = torch.distributed.get_rank() == 0
    own = path if is_whole else path + "/absent"
    error, told = comm.OtherRankError if is_whole else OSError, "rank 1.*must be an existing directory"
    with pytest.raises(error, match=told):
        make_engine(Wide(), 3, zero={**ON_NVME, "nvme_path": own})
    offload = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": own}}}
    with pytest.raises(error, match=told):
        zero.Init(data_parallel_group=groups.data, config_dict_or_path=offload)


def test_a_folder_that_one_rank_does_not_see_is_an_error_on_all_of_them_at_once(tmp_path):
    run_ranks(2, absent_on_one_rank_case, str(tmp_path), timeout_s=30)


def test_what_nvme_cannot_do_is_refused_with_the_reason(tmp_path):
    run_ranks(1, refused_case, str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 0, "offload_optimizer": "cpu"}, "--offload-optimizer cpu needs --zero-stage 1 or more, got 0"),
        ({"stage": 2, "offload_param": "cpu"}, "--offload-param cpu needs --zero-stage 3, got 2"),
        ({"stage": 3, "offload_param": "nvme"}, "--offload-param nvme needs --nvme-path"),
        ({"stage": 3, "offload_optimizer_ratio": 0.5}, "--offload-optimizer-ratio 0.5 is the share that"),
        ({"stage": 3, "offload_optimizer": "cpu", "offload_optimizer_ratio": 2.0}, r"ratio must lie in \[0, 1\]"),
        ({"stage": 3, "offload_param": "disk"}, "--offload-param must be one of none, cpu, nvme"),
    ],
)
def test_homes_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ZeroConfig(**options)


def test_a_model_whose_states_a_disk_held_in_part_keeps_its_weights_for_another_engine(one_rank, tmp_path, monkeypatch):
    # Places: of three units, and a part of the fourth.
    model, allocate, left = Wide(), SwapFile.allocate, iter(range(7))
    want = {name: value.clone() for name, value in model.state_dict().items()}

    def allocate_while_there_is_room(swap, nbytes):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "injected")
        return allocate(swap, nbytes)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="injected"):
        patch.setattr(SwapFile, "allocate", allocate_while_there_is_room)
        make_engine(model, 3, zero={**ON_NVME, "nvme_path": str(tmp_path)})
    got = make_engine(model, 3, zero={**ON_NVME, "nvme_path": str(tmp_path)}).module_state_dict()
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_waiting_for_every_tile_of_o_leaves_the_shards_of_p_coming_ahead(one_rank, tmp_path):
    options = {**ON_NVME, "nvme_path": str(tmp_path), "pipeline_read": False, "pipeline_write": False}
    homes = make_engine(Wide(), 3, zero=options).homes
    assert (homes.optimizer.reads_ahead, homes.optimizer.writes_behind) == (False, False)
    assert (homes.param.reads_ahead, homes.param.writes_behind) == (True, True)


def full_case(path: str) -> None:
    """The disk fills up as soon as an engine is built; or has too little for one rank from the start."""
    mpu.initialize_model_parallel(1)
    disk_usage, batches = shutil.disk_usage, token_batches(2, 1, mpu.get_data_parallel_world_size())
    for stage, dtype, more in (
        (1, torch.bfloat16, {}),
        (2, None, {"delayed_param_update": 1}),
        (3, None, {}),
        (3, torch.bfloat16, {"offload_param": "nvme"}),
    ):
        options = {"zero": {"offload_optimizer": "nvme", "nvme_path": path, **more}, "dtype": dtype}
        try:
            engine = make_engine(Wide(), stage, **options)
            shutil.disk_usage = lambda _: SimpleNamespace(free=0)
            for _ in train(engine, batches):
                pass
            engine.optimizer.finish()
            needed = engine.homes.swap.nbytes
            engine.destroy()
            is_last = torch.distributed.get_rank() == 1
            free = needed - 1 if is_last else 1 << 40
            shutil.disk_usage = lambda _, free=free: SimpleNamespace(free=free)
            told = r"rank 1: \d+ bytes more than the 0 it has: No space left on device; \d+ are free. Free space there"
            with pytest.raises(OSError if is_last else comm.OtherRankError, match=told):
                make_engine(Wide(), stage, **options)
        finally:
            shutil.disk_usage = disk_usage


def test_all_that_a_drive_will_hold_is_reserved_before_training(tmp_path):
    run_ranks(2, full_case, str(tmp_path))


def test_an_update_has_at_least_eight_tiles_where_there_is_enough():
    assert tile_numel(4 * 10**6) == -(-500_000 // TILE_MULTIPLE) * TILE_MULTIPLE
    assert tile_numel(4 * 10**6, sub_group_size=2 * TILE_MULTIPLE) == 2 * TILE_MULTIPLE
    assert tile_numel(4 * 10**6, sub_group_size=10**9) == tile_numel(4 * 10**6)
    assert tile_numel(0) == tile_numel(5) == TILE_MULTIPLE


def tiles_case(dtype: torch.dtype | None, stage: int) -> list[int]:
    """Tiles that updates of O in host memory go through; the numbers are those of one pass over everything."""
    mpu.initialize_model_parallel(1)
    want = run(Wide, stage, clip_grad=0.5, dtype=dtype)
    torch.manual_seed(0)
    # Only files need whole pages, which on some systems are larger than these blocks.
    zero.homes.TILE_MULTIPLE = numel = 4096
    options = {"offload_optimizer": "cpu", "sub_group_size": numel}
    engine = make_engine(Wide(), stage, zero=options, dtype=dtype, clip_grad=0.5)
    stepped: list[int] = []
    step = Update._step_tiles
    Update._step_tiles = lambda self, tiles: (
        stepped.extend(stop - start for _, start, stop in tiles),
        step(self, tiles),
    )
    batches = token_batches(3, 1, mpu.get_data_parallel_world_size())
    compare(dict(train(engine, batches)), want, f"stage {stage}, tiles in host memory", bitwise=True)
    assert len(stepped) == 3 * sum(len(bucket.tiles) for bucket in engine.buckets)
    return stepped


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_states_in_host_memory_are_updated_tile_by_tile_bit_for_bit(dtype, stage):
    for tiles in run_ranks(2, tiles_case, dtype, stage):
        assert max(tiles) == 4096 and len(tiles) >= 3 * 4 * 3  # of 3 steps, 4 blocks in 3 tiles each


def compiled_case(dtype: torch.dtype, **zero: Any) -> bool:
    """Whether two steps of 90,000 weights have loaded the compiled kernel."""
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    engine = make_engine(nn.Sequential(nn.Linear(300, 300)), 1, dtype=dtype, zero=zero)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 300, dtype=dtype)).float().square().mean())
        engine.step()
    engine.optimizer.finish()
    return "megazero.optim.adam_numba" in sys.modules


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="there is no numba")
@pytest.mark.parametrize(
    "dtype, home, delayed, is_loaded",
    [
        (torch.bfloat16, "none", 0, False),
        (torch.bfloat16, "cpu", 0, True),
        (torch.float32, "cpu", 0, False),
        (torch.float32, "cpu", 1, False),
    ],
)
def test_a_hundred_megabytes_of_compiler_are_loaded_only_for_16_bits_that_are_offloaded(
    dtype, home, delayed, is_loaded
):
    found = run_ranks(1, partial(compiled_case, dtype, offload_optimizer=home, delayed_param_update=delayed))
    assert found == [is_loaded]


def ratio_case(path: str, stage: int, dtype: torch.dtype | None) -> list[tuple[float, bool]]:
    """What share of the states stays in memory, by ratio."""
    mpu.initialize_model_parallel(1)
    want, shares = run(Wide, stage, clip_grad=0.5, dtype=dtype), []
    for ratio in (1.0, 0.5, 0.25, 0.0):
        torch.manual_seed(0)
        nvme = {"offload_optimizer": "nvme", "nvme_path": path, "sub_group_size": TILE_MULTIPLE}
        zero = {**nvme, "offload_optimizer_ratio": ratio}
        engine = make_engine(Wide(), stage, zero=zero, dtype=dtype, clip_grad=0.5)
        batches = token_batches(3, 1, mpu.get_data_parallel_world_size())
        compare(dict(train(engine, batches)), want, f"stage {stage}, ratio {ratio}", bitwise=True)
        here = [bucket.states[MASTER].resident is not None for bucket in engine.buckets]
        assert here == sorted(here[:-1]) + here[-1:], "of the units in backward order the last ones, which run first"
        owned = [bucket.owned_numel for bucket in engine.buckets]
        shares.append((sum(n for n, stays in zip(owned, here, strict=True) if stays) / sum(owned), here[-1]))
        ranks = mpu.get_data_parallel_world_size()
        plan = plan_memory(engine.module, engine.zero, data_parallel_size=ranks, dtype=dtype)
        held, there = engine.memory(), plan.states_at("accelerator") - plan.gradients
        assert there <= held["P"] + held["O"] < there + 1000, "and step counters"
        assert plan.disk - plan.reduced <= engine.homes.swap.nbytes <= plan.disk + 6 * 4 * PAGE
        engine.destroy()
    return shares


@pytest.mark.parametrize(("stage", "dtype"), [(1, None), (3, torch.bfloat16)], ids=str)
def test_a_ratio_leaves_the_first_units_states_on_the_device_bit_for_bit(stage, dtype, tmp_path):
    for shares in run_ranks(2, ratio_case, str(tmp_path), stage, dtype):
        (none, _), (half, _), (most, has_root), everything = shares
        assert none == 0 and 0.4 < half <= 0.5 and half < most <= 0.75 and not has_root and everything == (1.0, True)


def test_a_ratio_that_leaves_whole_units_leaves_all_of_them():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
    plans = plan_buckets(model, find_units(model), 1, {name: 0 for name, _ in model.named_parameters()}, ZeroConfig())
    shares = [ZeroConfig(1, offload_optimizer="cpu", offload_optimizer_ratio=tenths / 10) for tenths in range(11)]
    assert [len(kept_on_device(share, plans)) for share in shares] == [*range(10, -1, -1)]


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "said"),
    [
        (16, "4", 1, "this machine has 4 cores for each: set OMP_NUM_THREADS=4."),
        (16, "4", 2, None),  # somebody has chosen
        (16, None, 1, None),  # nobody has said how many ranks share the cores
        (16, "0", 1, None),
        (3, "2", 1, None),
        (1, "8", 1, None),
    ],
)
def test_an_update_by_one_thread_that_could_have_more_is_told(
    one_rank, monkeypatch, caplog, cores, ranks, threads, said
):
    monkeypatch.setattr("megazero.zero.homes.available_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    with slow_link():
        make_engine(Wide(), 2, zero={"offload_optimizer": "cpu"}).destroy()
    told = [line for line in caplog.messages if "OMP_NUM_THREADS" in line]
    assert [said in line for line in told] == ([True] if said else [])


def moments_case() -> None:
    mpu.initialize_model_parallel(1)
    engine = make_engine(Wide(), 2, zero={"offload_optimizer": "cpu"}, dtype=torch.bfloat16)
    engine.backward(engine(token_batches(1, 1, 1)[0, 0, 0]))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("zeros_like", "empty_like"):
            patch.setattr(torch, name, lambda *_, name=name, **__: pytest.fail(f"torch.{name} for what O could hold"))
        engine.step()
    for bucket in engine.buckets:
        assert all(bucket.states[key].resident.any() for key in ("exp_avg", "exp_avg_sq")), bucket.name
    engine.optimizer.state.clear()
    engine.backward(engine(token_batches(2, 1, 1)[1, 0, 0]))
    engine.step()
    for bucket in engine.buckets:  # of a first step: 0.1 g and 0.001 g^2
        mean, square = (bucket.states[key].resident for key in ("exp_avg", "exp_avg_sq"))
        torch.testing.assert_close(mean.square(), 10 * square, rtol=1e-4, atol=1e-12)


def test_moments_of_an_update_in_16_bits_on_the_host_are_made_where_they_rest():
    """Made by torch and copied they took several times as long: at a first update most of the time goes to new pages."""
    run_ranks(1, moments_case)


def order_case(path: str) -> list[str]:
    """What the swap file is asked for during one update."""
    mpu.initialize_model_parallel(1)
    options = {"offload_optimizer": "nvme", "nvme_path": path, "sub_group_size": TILE_MULTIPLE}
    engine = make_engine(Wide(), 2, zero=options)
    dict(train(engine, token_batches(2, 1, 1)))
    events: list[str] = []
    swap, step = engine.homes.swap, engine.optimizer.torch_optimizer.step
    read, write = swap.read, swap.write
    swap.read = lambda *a, **k: (events.append("read"), read(*a, **k))[1]
    swap.write = lambda *a, **k: (events.append("write"), write(*a, **k))[1]
    engine.optimizer.torch_optimizer.step = lambda: (events.append("update"), step())[1]
    ids = token_batches(1, 1, 1)[0, 0, 0]
    engine.backward(engine(ids))
    events.clear()
    engine.step()
    assert MASTER in engine.buckets[0].states and comm.world().size() == 1
    return events


def test_the_next_tile_is_read_before_one_is_updated_and_written_after(tmp_path):
    (events,) = run_ranks(1, order_case, str(tmp_path))
    runs = [(kind, len(list(group))) for kind, group in itertools.groupby(events)]
    # Each tile has 4 vectors to read (master, two moments, gradient), and 3 to write. The first two are read ahead of update 1.
    assert runs[:5] == [("read", 8), ("update", 1), ("write", 3), ("read", 4), ("update", 1)]
    assert runs[-2:] == [("update", 1), ("write", 3)]


def read_ahead_case(path: str) -> list[str]:
    """When shards of units are read from the drive, among the beginnings of forwards and the ends of backwards."""
    mpu.initialize_model_parallel(1)
    model, log = Wide(), []
    model.blocks.extend(Wide().blocks)
    engine = make_engine(model, 3, zero={**ON_NVME, "nvme_path": path}, dtype=torch.bfloat16)
    units = {bucket.weights.shard._region: bucket.unit for bucket in engine.buckets if bucket.unit != ROOT}
    read = engine.homes.swap.read

    def logged_read(region, *args, **kwargs):
        if region in units:
            log.append(f"read {units[region]}")
        return read(region, *args, **kwargs)

    engine.homes.swap.read = logged_read
    for index, block in enumerate(model.blocks):

        def before(_, inputs, index=index):
            log.append(f"forward {index}")
            inputs[0].register_hook(lambda _: log.append(f"backward {index}"))

        block.register_forward_pre_hook(before)
    engine.backward(engine(my_batch()))
    return log


def test_shards_are_read_from_the_drive_three_units_ahead_in_forward_and_in_backward(tmp_path):
    first, then = ["read 0, read 1, read 2, read 3, forward 0"], [f"read {i + 3}, forward {i}" for i in range(1, 5)]
    forward = [*first, *then, "forward 5, forward 6, forward 7"]
    first, then = ["read 6, read 5, read 4, backward 7"], [f"read {i - 3}, backward {i}" for i in range(6, 2, -1)]
    backward = [*first, *then, "backward 2, backward 1, backward 0"]  # unit 7 has stayed
    for log in run_ranks(2, read_ahead_case, str(tmp_path)):
        assert ", ".join(log) == ", ".join([*forward, *backward])
