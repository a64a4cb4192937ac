"""The planner against the real engine on one of 1 to 1024 ranks, whose other ranks are a fake process group; and by home."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megazero import comm, mpu
from megazero.nvme import PAGE
from megazero.zero.config import HOMES, ZeroConfig
from megazero.zero.memory import memory_rows, plan_memory
from megazero.zero.param_groups import hidden_matrices
from megazero.zero.residency import GatherLimits
from tests.ranks import run_ranks
from tests.zero.models import APART, SHARING, Wide, make_engine, one_step, step, token_batches
from tests.zero.test_memory import Deep, Psi, counter_bytes, held_now, sampled

STAGES = (0, 1, 2, 3)


@pytest.fixture(params=[1, 8, 64, 1024])
def fake_world(own_world, request, monkeypatch):
    """This process is rank 0 of many. Collectives of the fake backend leave buffers alone, and gather copies of this rank's."""
    monkeypatch.setattr(comm.Channel, "meet", lambda channel, what: None)  # the fake backend has no store
    monkeypatch.setattr(comm.Channel, "compare_first", lambda _: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    return request.param


@pytest.mark.parametrize(
    "settings", [{}, {"grad_dtype": "compute"}, SHARING], ids=["fp32 G", "16-bit G", "units share buckets"]
)
def test_the_engine_holds_what_was_planned_on_any_number_of_ranks(fake_world, settings):
    for stage in STAGES:
        model = Deep()
        plan = plan_memory(
            model, ZeroConfig(stage, **{**APART, **settings}), data_parallel_size=fake_world, dtype=torch.bfloat16
        )
        engine = make_engine(model, stage, zero=settings, dtype=torch.bfloat16, gradient_accumulation_steps=3)
        step(engine, 3)
        counters = counter_bytes(engine)
        what = f"stage {stage} on {fake_world} ranks"
        memory = engine.memory()
        assert (memory["P"], memory["O"] - counters) == (plan.parameters, plan.optimizer), what
        assert held_now(engine) == plan.at_rest + counters, what
        assert sampled(engine, lambda engine=engine: step(engine, 3)) - counters == plan.peak, what
        engine.destroy()


@pytest.mark.parametrize(
    "limits",
    [
        GatherLimits(prefetch=0),
        GatherLimits(prefetch=900),
        GatherLimits(live=2000),
        GatherLimits(reuse=100_000),
        GatherLimits(prefetch=900, live=2500, reuse=1500),
    ],
    ids=str,
)
def test_limits_on_what_is_gathered_change_the_peak_as_planned(one_rank, limits):
    mpu.model_parallel_cuda_manual_seed(1)
    plan = plan_memory(Deep(), ZeroConfig(3, gather_limits=limits), data_parallel_size=1, dtype=torch.bfloat16)
    engine = make_engine(Deep(), 3, zero={"gather_limits": limits}, dtype=torch.bfloat16, gradient_accumulation_steps=2)
    step(engine, 2)
    at_rest = held_now(engine)
    with torch.no_grad():
        evaluated = sampled(engine, lambda: engine(token_batches(1, 1, 1)[0, 0, 0])) - at_rest
    assert evaluated <= plan.gathered
    peak = sampled(engine, lambda: step(engine, 2)) - counter_bytes(engine)
    assert 0.97 * plan.peak <= peak <= plan.peak
    engine.destroy()


# ---- states away from the accelerator


def homes(stage: int) -> list[tuple[str, str]]:
    """(home of O, home of P) that a stage has."""
    of_p = HOMES if stage == 3 else ["none"]
    return [(o, p) for o in (HOMES if stage else ["none"]) for p in of_p]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("stage", STAGES)
def test_states_rest_where_they_are_told(stage, dtype):
    psi, n = 50 * 64 * 8 * 1000, 8
    model = Psi(psi)
    for offload_optimizer, offload_param in homes(stage):
        zero = ZeroConfig(stage, offload_optimizer=offload_optimizer, offload_param=offload_param, nvme_path=".")
        plan = plan_memory(model, zero, data_parallel_size=n, dtype=dtype, device_type="cuda")
        cut = [psi // n if stage >= first else psi for first in (1, 2, 3)]
        if offload_optimizer == "none":
            offload_param = "none"  # the master weights on the device are the shards
        is_cast = dtype != torch.float32 and stage == 3 and offload_optimizer == "none"
        p = 0 if is_cast else dtype.itemsize * cut[2]
        own_master = dtype != torch.float32 or offload_optimizer != offload_param or offload_optimizer == "nvme"
        o = (12 if own_master else 8) * cut[0]
        g = 4 * cut[1]
        at = {"none": 0, "cpu": 0, "nvme": 0}
        at[offload_param] += p
        at[offload_optimizer] += o
        at[offload_optimizer if stage >= 2 else "none"] += g
        assert (plan.resident, plan.states_at("cpu"), plan.disk) == (at["none"], at["cpu"], at["nvme"])
        assert plan.host == plan.states_at("cpu") + plan.staging
        assert (plan.staging > 0) == (
            "nvme" in (offload_optimizer, offload_param)
            or (offload_optimizer == "cpu" and (dtype != torch.float32 or stage == 1 or offload_param == "none"))
        )
        assert plan.staging < 0.25 * 16 * psi, "no full-size copy"


def test_an_update_on_a_gpu_casts_a_bucket_of_16_bit_gradients_and_adam_on_a_cpu_reads_them():
    model = Psi(50 * 64 * 1000)
    zero, settings = ZeroConfig(0, "compute", **APART), {"data_parallel_size": 1, "dtype": torch.bfloat16}
    assert plan_memory(model, zero, device_type="cuda", **settings).updating == 4 * 64 * 1000
    assert plan_memory(model, zero, device_type="cpu", states_per_element=1, **settings).updating == 4 * 64 * 1000
    assert plan_memory(model, zero, device_type="cpu", **settings).updating == 0


def test_an_update_by_muon_has_directions_of_three_units_and_none_of_frozen_ones():
    model = Wide(blocks=5)
    of_unit, settings = 2 * 67 * 149, {"data_parallel_size": 1, "dtype": torch.bfloat16}
    for trained in range(6):
        for index, block in enumerate(model.blocks):
            block.requires_grad_(index < trained)
        plan = plan_memory(model, ZeroConfig(2, **APART), matrices=hidden_matrices(model), **settings)
        assert plan.updating == pytest.approx(2 * min(trained, 3) * of_unit, rel=0.01)


def test_small_parameters_that_stay_whole_are_on_the_accelerator_wherever_the_others_rest(one_rank):
    zero = ZeroConfig(3, offload_param="cpu", param_persistence_threshold=100)
    plan = plan_memory(Wide(blocks=5), zero, device_type="cuda", dtype=torch.bfloat16, data_parallel_size=1)
    assert plan.kept_parameters == plan.resident - plan.gradients - plan.optimizer > 0
    engine = make_engine(Wide(blocks=5), 3, zero={"param_persistence_threshold": 100}, dtype=torch.bfloat16)
    assert engine.memory()["P"] == plan.kept_parameters
    assert sum(bucket.weights.is_gathered for bucket in engine.buckets) == 5, "the biases of each block"
    engine.destroy()


def test_the_host_is_the_accelerator_where_there_is_no_other():
    settings = {"data_parallel_size": 2, "dtype": torch.float32, "device_type": "cpu"}
    plain = plan_memory(Psi(1e6), ZeroConfig(3), **settings)
    assert plan_memory(Psi(1e6), ZeroConfig(3, offload_optimizer="cpu", offload_param="cpu"), **settings) == plain
    swapped = plan_memory(Psi(1e6), ZeroConfig(3, offload_optimizer="nvme", nvme_path="."), **settings)
    assert swapped.optimizer == 12 / 8 * plain.optimizer and swapped.disk == swapped.optimizer + plain.gradients


def offloaded_case(path: str) -> None:
    """On a CPU: what is in memory, and what is in the file, by home."""
    n = mpu.initialize_model_parallel(1).data_parallel_size
    for stage in (1, 2, 3):
        pairs = (
            [("nvme", "none")] if stage < 3 else [("cpu", "cpu"), ("nvme", "cpu"), ("none", "nvme"), ("nvme", "nvme")]
        )
        for offload_optimizer, offload_param in pairs:
            zero = {"offload_optimizer": offload_optimizer, "offload_param": offload_param, "nvme_path": path}
            model = Wide(blocks=5)
            plan = plan_memory(
                model, ZeroConfig(stage, **{**APART, **zero}), data_parallel_size=n, dtype=torch.bfloat16
            )
            engine = make_engine(model, stage, zero=zero, dtype=torch.bfloat16)
            for _ in range(2):
                one_step(engine, token_batches(1, 1, n)[0, 0, 0])
            what = f"stage {stage}, {zero}"
            memory, counters = engine.memory(), counter_bytes(engine)
            held = memory["P"] + memory["G"] + memory["O"] - counters
            assert held == plan.at_rest, what
            if plan.disk:
                pages = 6 * 6 * PAGE  # each vector of each of 6 buckets begins at a page
                assert plan.disk - 4 * plan.numel // n <= engine.homes.swap.nbytes <= plan.disk + pages, what
            engine.destroy()


def test_an_engine_with_offloaded_states_holds_what_was_planned(tmp_path):
    run_ranks(2, offloaded_case, str(tmp_path))


def test_rows_name_the_homes_and_what_host_and_disk_take():
    zero = ZeroConfig(3, offload_optimizer="nvme", offload_param="cpu", nvme_path=".")
    plan = plan_memory(Psi(1e9), zero, data_parallel_size=4, dtype=torch.bfloat16, device_type="cuda")
    rows = dict(memory_rows(plan, {}))
    assert rows["parameters (P) on cpu"].split()[:2] == ["500.0", "MB"]
    assert rows["optimizer (O) on nvme"].split()[:2] == ["3.00", "GB"]
    assert rows["gradients (G) on nvme"].split()[:2] == ["1.00", "GB"]
    assert rows["nvme"].split() == ["4.00", "GB"] and "host memory" in rows and plan.host < 10**9
