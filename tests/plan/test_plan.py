"""Plans of whole jobs: published figures, what fits, what to change, traffic, the command line and the job's refusal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megazero import comm, mpu
from megazero.arguments import load_config
from megazero.model import GPT2Config, GPT2Model
from megazero.plan import (
    Limits,
    Setup,
    activation_modes,
    changes,
    check_fits,
    fit,
    gpt2_buckets,
    largest_batch,
    largest_model,
    plan_job,
    refuse,
    refuse_what_cannot_fit,
    what_to_change,
)
from megazero.plan.__main__ import load, main, parse_size
from megazero.plan.change import last_resorts
from megazero.plan.fit import what_takes_less
from megazero.plan.plot import bars, parts
from megazero.zero.bucket_bytes import StateSettings
from megazero.zero.config import ZeroConfig
from megazero.zero.memory import memory_of_buckets, plan_memory
from megazero.zero.residency import GatherLimits, Residency
from tests.plan.setups import setup_of
from tests.tiny import ROOT
from tests.zero.models import APART, SHARING, make_engine

GB = 10**9
TUTORIAL = GPT2Config(  # DeepSpeed's ZeRO tutorial: "GPT-2 with 1.5 billion parameters"
    num_layers=48,
    hidden_size=1600,
    num_attention_heads=16,
    vocab_size=50257,
    max_position_embeddings=1024,
)
TEN_BILLION = GPT2Config(  # its ZeRO-Offload tutorial: on one GPU of 32 GB, batch 10
    num_layers=50,
    hidden_size=4096,
    num_attention_heads=32,
    vocab_size=50257,
    max_position_embeddings=1024,
    checkpoint_activations=True,
)


def setup(model: GPT2Config, stage: int, ranks: int = 1, **options) -> Setup:
    """A setup in fp16 with a micro-batch of `batch` sequences of 1024 tokens; other options are those of the states."""
    others = ("batch", "micro_batches", "model_parallel_size", "device_type")
    own = {name: options.pop(name) for name in others if name in options}
    return setup_of(model, ZeroConfig(stage, nvme_path=".", **options), ranks, **own)


# ---- published figures


def test_adam_states_of_the_tutorials_gpt2_shrink_from_18_to_2_25_gb_on_8_ranks():
    psi = plan_job(setup(TUTORIAL, 0)).states.numel
    optimizer = {ranks: plan_job(setup(TUTORIAL, 1, ranks)).states.optimizer / psi * 1.5 for ranks in (1, 8)}
    assert optimizer == pytest.approx({1: 18.0, 8: 2.25}, rel=1e-4)  # GB, of 1.5e9 parameters


# ZeRO (arXiv:1910.02054), table 1: parameters; GB per device with P_os, P_os+g, P_os+g+p, by data-parallel degree.
TABLE_1 = {
    7.5e9: {
        **{1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5)},
        **{64: (31.4, 16.6, 1.88), 256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)},
    },
    128e9: {
        **{1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128)},
        **{64: (536, 284, 32), 256: (518, 263, 8), 1024: (513, 257, 2)},
    },
    1e12: {
        **{1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000)},
        **{64: (4187, 2218, 250), 256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6)},
    },
}
SHAPES = {7.5e9: (36, 4096), 128e9: (78, 11648), 1e12: (128, 25472)}  # layers x hidden size of about so many parameters


@pytest.mark.parametrize("numel", TABLE_1)
def test_table_1_of_the_zero_paper(numel):
    layers, hidden = SHAPES[numel]
    model = replace(TUTORIAL, num_layers=layers, hidden_size=hidden)
    for ranks, printed in TABLE_1[numel].items():
        for stage, want in zip((1, 2, 3), printed, strict=True):
            plan = plan_job(setup(model, stage, ranks, grad_dtype="compute"))
            # The paper has shards in 16 bits beside their master weights.
            twice = 2 * numel / ranks / GB if stage == 3 else 0
            found = plan.states.resident / GB * numel / plan.states.numel + twice
            assert found == pytest.approx(want, rel=0.005, abs=0.01), f"{numel:g} on {ranks} ranks, stage {stage}"


def test_ten_billion_parameters_train_on_one_gpu_of_32_gb_with_offloaded_optimizer():
    """The ZeRO-Offload tutorial: 10 billion parameters, batch 10, on one GPU of 32 GB, be they 10^9 bytes or 2^30."""
    limits = Limits(device=32 * GB, host=200 * GB)
    offloaded = setup(TEN_BILLION, 2, batch=10, offload_optimizer="cpu")
    plan = plan_job(offloaded)
    assert plan.setup.model.num_parameters() == pytest.approx(10.3e9, rel=0.01)
    assert not check_fits(plan, limits)
    assert largest_batch(offloaded, limits) >= 10
    plain = setup(TEN_BILLION, 2, batch=10)
    (problem,) = check_fits(plan_job(plain), limits)
    assert problem.is_certain and problem.needed > 160 * GB
    for each in (limits, replace(limits, memlock=2**16)):  # no flag that helps the device is left out for locked pages
        assert "--offload-optimizer cpu" in [change.flags for change in what_to_change(plain, each)]


# ---- the same as what is built


@pytest.mark.parametrize(
    "settings", [{}, {"memory_centric_tiled_linear": True, "tile_factor": 2}], ids=["plain", "tiled"]
)
def test_repeated_blocks_are_the_models_own_buckets(one_rank, settings):
    config = replace(TUTORIAL, num_layers=3, hidden_size=64, **settings)
    want = plan_memory(
        GPT2Model(config, device="meta"), ZeroConfig(3), data_parallel_size=4, dtype=torch.bfloat16, device_type="cuda"
    )
    states = torch.get_rng_state()
    buckets = gpt2_buckets(config, 1, 4, torch.bfloat16, ZeroConfig(3))
    assert torch.equal(torch.get_rng_state(), states), "planning must not change what training draws"
    assert memory_of_buckets(buckets, StateSettings(ZeroConfig(3), 4)) == want


LIMITS = [{"gather_limits": limits} for limits in (GatherLimits(reuse=30_000), GatherLimits(live=1))]
ZERO = [{}] * 4 + [{"shard_size": 2}] * 3 + [{"param_persistence_threshold": 200}, *LIMITS, APART, APART]
TILES = {"memory_centric_tiled_linear": True, "tile_factor": 2}


@pytest.mark.parametrize("model", [{}, TILES, {**TILES, "checkpoint_activations": True}], ids=["", "tiles", "again"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stage, zero", list(zip((0, 1, 2, 3, 1, 2, 3, 3, 3, 3, 1, 2), ZERO, strict=True)))
def test_planned_traffic_is_what_the_engine_sends(own_world, stage, zero, optimizer, model, monkeypatch):
    monkeypatch.setattr(comm.Channel, "compare_first", lambda _: None)  # there is nobody to compare with
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    sizes = {"num_layers": 3, "hidden_size": 32, "vocab_size": 100, "max_position_embeddings": 8}
    config = replace(TUTORIAL, **sizes, **model)
    options = {"zero": {**SHARING, **zero}, "gradient_accumulation_steps": 2, "optimizer": optimizer}
    engine = make_engine(GPT2Model(config), stage, **options)
    engine.channel.reset_traffic()
    ids = torch.zeros(2, 8, dtype=torch.int64)
    for _ in range(2):
        engine.backward(engine(ids, targets=ids).mean())
        engine.step()
    sent = sum(kind.elements for kind in engine.channel.traffic.values())
    uses_muon = optimizer == "muon"
    plan = plan_job(
        setup(config, stage, 4, micro_batches=2).changed(**zero, optimizer="muon" if uses_muon else "adamw")
    )
    # Which tiles are there already when they are recomputed is planned for the engine's own limits only.
    is_exact = "checkpoint_activations" not in model or set(zero) <= {"shard_size"}
    assert sent == pytest.approx(plan.traffic.data_parallel_elements, rel=0 if is_exact else 0.05)
    reduced = engine.channel.traffic["reduce_scatter"].elements if "shard_size" in zero else 0
    between = plan.traffic.between_sets
    assert between == 4 * reduced // 2 or uses_muon, "with 2 sets of 2 half of a reduction in fp32"


def test_traffic_of_offloaded_states():
    psi = plan_job(setup(TUTORIAL, 3)).states.numel
    pad = pytest.approx
    moved = plan_job(setup(TUTORIAL, 2, 4, offload_optimizer="cpu")).traffic
    assert (moved.to_host, moved.from_host) == (pad(4 * psi / 4, rel=1e-3), pad(2 * psi / 4, rel=1e-3))
    assert (moved.disk_read, moved.disk_written) == (0, 0)
    summed = plan_job(setup(TUTORIAL, 2, 4, offload_optimizer="cpu", micro_batches=3)).traffic
    assert summed.to_host == 3 * moved.to_host  # each micro-batch's gradient, or the sum with it
    assert summed.from_host == moved.from_host + 2 * moved.to_host  # the sum comes to the device for all but the first
    moved = plan_job(setup(TUTORIAL, 3, 4, offload_optimizer="nvme", offload_param="nvme")).traffic
    assert moved.disk_read == pad((12 + 4) * psi / 4 + 2 * 2 * psi / 4, rel=0.03)  # the root is gathered once
    assert moved.disk_written == pad((12 + 4) * psi / 4 + 2 * psi / 4, rel=1e-3)
    assert moved.to_host == pad(4 * psi / 4, rel=1e-3)


# ---- what fits


def test_the_largest_batch_and_model_are_the_last_ones_that_fit():
    job, limits = setup(TUTORIAL, 2, 8), Limits(device=32 * GB)
    batch, layers = largest_batch(job, limits), largest_model(job, limits)

    def fits(batch: int = 1, layers: int = 48) -> bool:
        return not check_fits(plan_job(job.changed(batch_size=batch, num_layers=layers)), limits)

    assert fits(batch) and not fits(batch + 1) and fits(layers=layers) and not fits(layers=layers + 1)
    assert largest_batch(job, Limits(device=GB)) == 0


def test_no_larger_batch_or_model_is_looked_for_than_the_most(monkeypatch):
    monkeypatch.setattr(fit, "MOST_BATCH", 6)
    monkeypatch.setattr(fit, "MOST_LAYERS", 5)
    job, limits = setup(TUTORIAL, 2, 8), Limits(device=10**6 * GB)
    assert (largest_batch(job, limits), largest_model(job, limits)) == (6, 5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gathers_are_not_simulated_where_parameters_are_whole(stage, monkeypatch):
    """It would take as long as the cube of the layers, of which `largest_model` tries thousands."""
    monkeypatch.setattr(Residency, "ahead", None)
    assert plan_job(setup(TUTORIAL, stage, 8, gather_limits=GatherLimits(prefetch=10))).states.gathered == 0


def test_every_change_that_is_proposed_makes_the_job_fit_and_each_alone_lowers_what_a_device_holds():
    job = setup(TUTORIAL, 0, 8, batch=8)
    need = plan_job(job).device
    for change in changes(job):
        assert plan_job(change.setup).device < need, change.flags
    limits = Limits(device=24 * GB, host=500 * GB)
    ways = what_to_change(job, limits)
    assert ways and all(not check_fits(plan_job(change.setup), limits) for change in ways)
    assert what_to_change(job, Limits(device=1000 * GB)) == []
    assert what_to_change(job, Limits(device=GB // 1000)) == []


def test_sets_hold_what_a_job_of_their_ranks_holds_and_more_ranks_to_share_are_proposed():
    sets, alone = setup(TUTORIAL, 3, 64).changed(shard_size=8), setup(TUTORIAL, 3, 8)
    assert plan_job(sets).states.resident == plan_job(alone).states.resident
    (wider,) = [change for change in changes(sets) if change.flags == "--zero-shard-size 0"]
    assert plan_job(wider.setup).device < plan_job(sets).device
    one_set = setup(TUTORIAL, 3, 8).changed(shard_size=8)
    assert [change.flags for change in changes(one_set)] == [change.flags for change in changes(alone)]


SMALL = """--num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 5000 --seq-length 128
--max-position-embeddings 128 --bf16""".split()
ALL_THREE = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    ("flags", "never", "proposed"),
    [
        ("--optimizer muon --zero-stage 3 --offload-optimizer cpu", "--offload-optimizer", "--offload-param nvme"),
        ("--zero-stage 3 --placement auto", "", "--placement static --offload-optimizer cpu --offload-param nvme"),
        ("--recompute auto --recompute-budget-gb 0.5", "--recompute full", "--recompute-budget-gb 0.25"),
        ("--zero-stage 3 --batch-size 15 --global-batch-size 60", "--batch-size 7", "--batch-size 5"),
        ("--deepspeed_config FILE", "", "--batch-size 2 --global-batch-size 16"),
        ("--zero-stage 2", "", "--zero-stage 3"),
    ],
)
def test_the_job_accepts_each_change_as_flags_and_then_has_its_plan(flags, never, proposed, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ALL_THREE))
    argv = [*SMALL, "--gpus", "4", *flags.replace("FILE", str(file)).split()]

    def job(argv: list[str]) -> Setup:
        return Setup.of(load(argv)[0], 4, 8, "cuda")

    ways = [*changes(job(argv)), *last_resorts(job(argv))]
    for change in ways:
        plan, planned = plan_job(job([*argv, *change.flags.split()])), plan_job(change.setup)
        assert (plan.moments, plan.host, plan.disk) == (planned.moments, planned.host, planned.disk), change.flags
    found = [change.flags for change in ways]
    assert any(flags.startswith(proposed) for flags in found), found
    assert not never or not any(never in flags for flags in found), found


def test_what_is_advised_for_the_device_needs_less_of_it():
    """The shards of parameters are the master weights, so their home saves nothing where those are on the device."""
    for flags in ("--zero-stage 1", "--zero-stage 2", "--zero-stage 3", "--zero-stage 3 --offload-optimizer cpu"):
        job = Setup.of(load_config([*SMALL, *flags.split()], world_size=4), 4, 8, "cuda")
        for of_states, name in ((False, "device"), (True, "device_states")):
            found = what_takes_less(job, of_states)
            held = [getattr(plan_job(each.setup), name) for each in found]
            assert found and max(held) < getattr(plan_job(job), name), (flags, [change.flags for change in found])
    alone = load_config([*SMALL, "--zero-stage", "3"], world_size=4)
    assert "--offload-param" not in str([change.flags for change in what_takes_less(Setup.of(alone, 4, 8, "cuda"))])


def test_what_needs_less_of_the_host_is_accepted_by_the_job():
    for flags, advised in (
        ("--optimizer muon --zero-stage 2 --offload-optimizer cpu", "Use fewer ranks per node"),
        ("--zero-stage 3 --placement auto", "--placement static --offload-param cpu --offload-optimizer nvme"),
        ("--zero-stage 2 --offload-optimizer cpu", "Use --offload-optimizer nvme --nvme-path DIR, fewer"),
    ):
        plan = plan_job(Setup.of(load_config([*SMALL, *flags.split()], world_size=4), 4, 8, "cuda"))
        (problem,) = check_fits(plan, Limits(host=1))
        assert advised in problem.setting, problem.setting


def test_the_largest_batch_divides_the_global_batch_that_is_set():
    config = load_config([*SMALL, "--batch-size", "2", "--global-batch-size", "48"], world_size=4)
    job, ramp = Setup.of(config, 4, 8, "cuda"), config.with_values(rampup_batch_size=(16, 8, 100))
    limits = Limits(device=plan_job(job.changed(batch_size=6)).device)
    assert largest_batch(job, limits) == 6 and largest_batch(job, Limits(device=100 * GB)) == 12
    assert largest_batch(Setup.of(ramp, 4, 8, "cuda"), Limits(device=100 * GB)) == 2
    assert largest_batch(job, Limits(device=GB)) == 0


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_where_not_all_blocks_need_be_recomputed_the_largest_budget_is_proposed_beside_full(mode):
    job = setup(TEN_BILLION, 2, 8, batch=16).changed(checkpoint_activations=False, recompute=mode)
    recomputed = plan_job(job.changed(recompute="full"))
    extra = 20 * GB
    limits = Limits(device=recomputed.device + extra)
    found = {change.flags: change for change in what_to_change(job, limits)}
    auto, full = [flags for flags in found if "--recompute" in flags]
    budget = found[auto].values["recompute_budget_gb"]
    assert (auto, full) == (f"--recompute auto --recompute-budget-gb {budget}", "--recompute full")
    assert not check_fits(plan_job(found[auto].setup), limits) and budget * GB > extra
    assert check_fits(plan_job(job.changed(recompute="auto", recompute_budget_gb=budget + 1)), limits)
    least = Limits(device=recomputed.device)
    assert not any("auto" in change.flags for change in what_to_change(job, least))


@pytest.mark.parametrize(("gpu", "stage"), [(24, "--zero-stage 3"), (70, "--zero-stage 2")])
def test_where_no_single_change_is_enough_several_are_combined_at_the_lowest_stage_that_fits(gpu, stage):
    job = setup(replace(TEN_BILLION, checkpoint_activations=False), 0, 8, batch=8)
    limits = Limits(device=gpu * GB, host=1000 * GB)
    (change,) = what_to_change(job, limits)
    assert stage in change.flags and "--checkpoint-activations" in change.flags
    assert not check_fits(plan_job(change.setup), limits)


@pytest.mark.parametrize(("stage", "device", "host"), [(0, 16, 1500), (0, 16, 16), (2, 4, 16)])
def test_one_rank_for_which_no_stage_by_itself_saves_anything_is_led_to_offload(stage, device, host):
    limits = Limits(device=device * GB, host=host * GB, disk=1000 * GB)
    (change,) = what_to_change(setup(TUTORIAL, stage, batch=32).changed(nvme_path=None), limits)
    names = [part for part in change.flags.split() if part.startswith("--")]
    assert "--zero-stage" in names and "--offload-optimizer" in names and len(names) == len(set(names))
    assert ("--nvme-path DIR" in change.flags) == (" nvme" in change.flags)
    assert not check_fits(plan_job(change.setup), limits)


def test_a_host_that_is_too_small_for_the_buffers_of_nvme_gets_smaller_ones():
    job = setup(TEN_BILLION, 3, offload_optimizer="nvme", offload_param="nvme")
    assert plan_job(job).host < 12 * GB  # by itself
    job = setup(TEN_BILLION, 3, offload_optimizer="nvme", offload_param="nvme", sub_group_size=10**9)
    limits = Limits(device=32 * GB, host=10 * GB, disk=1000 * GB)
    (problem,) = check_fits(plan_job(job), limits)
    assert "--sub-group-size" in problem.setting
    (change,) = what_to_change(job, limits)
    assert change.flags.startswith("--sub-group-size") and plan_job(change.setup).host < 12 * GB


def test_a_checkpoint_that_is_written_in_the_background_is_planned_on_the_host():
    flags = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "1000"]
    plain, saving = (
        plan_job(Setup.of(load_config([*flags, "--zero-stage", "1", *more]), 4, 4, "cuda"))
        for more in ([], ["--async-save"])
    )
    assert plain.host == plain.being_saved == 0
    assert saving.host == saving.being_saved == 12 * saving.states.numel // 4
    (problem,) = check_fits(saving, Limits(host=4 * saving.being_saved - 1))
    assert "no --async-save" in str(problem) and not problem.is_certain
    assert check_fits(saving, Limits(host=4 * saving.being_saved)) == []


def test_every_resource_is_checked_for_all_ranks_of_a_node_and_names_what_to_change():
    job = setup(TEN_BILLION, 3, 8, offload_optimizer="cpu", offload_param="nvme")
    plan = plan_job(job)
    exact = Limits(plan.device, plan.per_node(plan.host), plan.host, plan.per_node(plan.states.disk))
    assert check_fits(plan, exact) == []
    for field, resource, setting in (
        ("device", "device memory", "--batch-size|more ranks"),
        ("host", "host memory", "--offload-optimizer nvme"),
        ("memlock", "locked memory", "ulimit -l"),
        ("disk", "disk", "--nvme-path"),
    ):
        (problem,) = check_fits(plan, replace(exact, **{field: getattr(exact, field) - 1}))
        assert problem.resource.startswith(resource)
        assert any(part in str(problem) for part in setting.split("|"))
    pinned = plan.states.states_at("cpu")
    assert check_fits(plan, replace(exact, device=plan.device_states))[0].is_certain is False
    assert check_fits(plan, replace(exact, device=plan.device_states - 1))[0].is_certain is True
    assert check_fits(plan, replace(exact, memlock=pinned))[0].is_certain is False
    assert check_fits(plan, replace(exact, memlock=pinned - 1))[0].is_certain is True
    assert check_fits(replace(plan, setup=job.changed(pin_memory=False)), replace(exact, memlock=0)) == []
    assert check_fits(plan, Limits()) == []


def test_ranks_without_gpus_share_the_hosts_memory():
    plan = plan_job(setup(TUTORIAL, 1, 4, device_type="cpu").changed(fp16=False))
    assert plan.runtime == 0 and check_fits(plan, Limits(device=1, host=4 * plan.device)) == []
    (problem,) = check_fits(plan, Limits(host=4 * plan.device - 1))
    assert problem.resource == "host memory for 4 ranks"


def test_activations_shrink_with_accumulated_micro_batches_gradients_do_not():
    one, two = (plan_job(setup(TUTORIAL, 2, 8, batch=8, micro_batches=m)) for m in (1, 2))
    assert two.moments["loss"] - one.moments["loss"] == one.states.gradients
    assert two.moments["update"] == one.moments["update"]


# ---- the command line

JOB = """--num-layers 48 --hidden-size 1600 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --vocab-size 50257 --batch-size 4 --fp16""".split()
FLAGS = [*JOB, "--gpus", "8"]


def printed(capsys: pytest.CaptureFixture, *flags: str) -> list[str]:
    """The lines that the command prints of this job, without their padding."""
    main([*FLAGS, *flags])
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_reader_that_goes_away_is_no_error():
    command = [sys.executable, "-m", "megazero.plan", *FLAGS]
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$@" | true', "bash", *command], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_status_is_right_where_nobody_reads_what_is_said():
    command = ["bash", "-c", 'exec "$@" >&-', "bash", sys.executable, "-m", "megazero.plan", *FLAGS]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_prints_tables(capsys):
    lines = printed(capsys, "--zero-stage", "1", "--gpu-memory", "32GB", "--host-memory", "256GiB")
    for line in (
        "ranks 8 = 1 tensor-parallel x 8 data-parallel, 8 on a node",
        "parameters (P) 3.12 GB device",
        "moments (O) 1.56 GB device",
        "device memory 32.00 GB",
        "fits yes",
    ):
        assert line in lines, lines


def test_the_script_of_the_tutorials_10_billion_fits_32_gb(capsys):
    flags = """--num-layers 50 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --max-position-embeddings 1024
        --vocab-size 50257 --batch-size 10 --checkpoint-activations --bf16 --gpu-memory 32GB --host-memory 200GB"""
    script = (ROOT / "scripts/ds_zero-offload_10B_pretrain_gpt2_model_parallel.sh").read_text()
    config = re.search(r"DS_CONFIG:-\$SCRIPTS/(\S+)}", script)[1]
    main([*flags.split(), "--deepspeed_config", str(ROOT / "scripts" / config)])
    assert "fits           yes" in capsys.readouterr().out


def test_a_job_that_does_not_fit_is_told_what_to_change(capsys):
    main([*FLAGS, "--zero-stage", "0", "--gpu-memory", "16GB"])
    text = capsys.readouterr().out
    assert "does not fit" in text and "fits with" in text and "largest batch" in text


def test_a_verdict_says_what_it_is_not_about(capsys):
    flags = "--zero-stage 2 --offload-optimizer cpu --gpu-memory 32GB".split()
    for given, said in (
        ([], "not checked host memory per node, of which the job needs 25.25 GB: give --host-memory"),
        (["--host-memory", "64GB"], None),
    ):
        lines = printed(capsys, *flags, *given)
        assert "fits yes" in lines
        assert [line for line in lines if line.startswith("not checked")] == ([said] if said else []), lines


def test_offloaded_states_show_where_they_rest(capsys):
    flags = "--zero-stage 3 --offload-optimizer nvme --offload-param cpu --nvme-path /local --nvme 4TB".split()
    lines = printed(capsys, *flags)
    assert "parameters (P) 389.4 MB host" in lines and "moments (O) 1.56 GB nvme" in lines


def test_json_holds_the_same_numbers(capsys):
    main([*FLAGS, "--zero-stage", "2", "--gpu-memory", "32GB", "--json"])
    found = json.loads(capsys.readouterr().out)
    config, machine = load([*FLAGS, "--zero-stage", "2"])
    plan = plan_job(Setup.of(config, machine.gpus, 8, "cuda"))
    assert found["device"] == plan.device and found["states"]["optimizer_home"] == "accelerator"
    assert found["parameters"] == TUTORIAL.num_parameters() and found["largest_batch_size"] > 0
    assert found["problems"] == [] and found["limits"]["device"] == 32 * GB


def test_the_bars_of_the_plot_end_where_the_plan_does():
    for options in ({}, {"offload_optimizer": "cpu"}, {"offload_param": "cpu"}):
        plan = plan_job(setup(TUTORIAL, 3, 8, **options))
        shown = bars(plan)
        assert len(shown) == 5 and sum(parts(plan).values()) == plan.device
        assert all(min(parts(each).values()) >= 0 for each in shown.values())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_placement_by_plan_has_bars_and_ways_out_as_well(device):
    config, _ = load([*FLAGS, "--zero-stage", "3", "--placement", "auto"])
    plan = plan_job(Setup.of(config, 1, 1, device))
    assert plan.states.optimizer_home == ("cpu" if device == "cuda" else "accelerator")
    assert len(bars(plan)) >= 4
    flags = [change.flags for change in what_to_change(plan.setup, Limits(host=20 * GB, disk=4000 * GB))]
    assert any("nvme --nvme-path DIR" in flag for flag in flags)


def test_a_plot_is_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for homes in (
        [],
        ["--offload-optimizer", "cpu"],
        ["--offload-optimizer", "cpu", "--offload-optimizer-ratio", "0.5"],
        ["--overlap-param-gather"],
        ["--zero-shard-size", "2"],
    ):
        path = tmp_path / f"plan{len(homes)}.png"
        main([*FLAGS, "--zero-stage", "2", "--gpu-memory", "32GB", "--plot", str(path), *homes])
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"--plot .*plan\.xyz: .*xyz"):
        main([*FLAGS, "--plot", str(tmp_path / "plan.xyz")])


def test_a_deepspeed_file_is_read_as_the_job_reads_it(tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    config, _ = load([*(f for f in FLAGS if f not in ("--fp16", "--batch-size", "4")), "--deepspeed_config", str(file)])
    assert config.zero.stage == 2 and config.precision.bf16


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0"], "--gpus must be at least 1"),
        (["--gpu-memory", "lots"], "--gpu-memory must be a size such as 32GB"),
        (["--gpu-memory", "32"], "--gpu-memory 32 is 32 bytes. Give the unit, as in 32GB"),
        (["--gpu-memory", "0.5"], "--gpu-memory 0.5 is 0 bytes. Give the unit, as in 0.5GB"),
        (["--gpu-memory", "32GB", "--device", "cpu"], "--gpu-memory 32GB .* with --device cpu .* Give --host-memory"),
        (["--gpu-memry", "32GB"], "Did you mean --gpu-memory"),
        (["--model-parallel-size", "3"], "--model-parallel-size 3"),
        (
            ["--gpus", "24", "--num-attention-heads", "12", "--hidden-size", "96", "--model-parallel-size", "5"],
            "1, 2, 3, 4, 6, 12, or",
        ),
        (
            ["--gpus", "24", "--num-attention-heads", "12", "--hidden-size", "96", "--model-parallel-size", "8"],
            "of 1, 2, 3, 4, 6, 12.",
        ),
        (["--zero-stage", "2", "--offload-param", "cpu"], "--offload-param cpu needs --zero-stage 3"),
    ],
)
def test_wrong_flags_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        main([*FLAGS, *flags])


def test_a_vocabulary_is_needed():
    with pytest.raises(ValueError, match="--vocab-size"):
        main(["--num-layers", "2"])


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("32GB", 32 * GB), ("32GiB", 32 * 2**30), ("1.5TB", 1500 * GB), ("32000000000", 32 * GB), ("80 g", 80 * GB)],
)
def test_sizes(text, nbytes):
    assert parse_size(text, "--gpu-memory") == nbytes


# ---- the job


def test_the_job_refuses_states_that_cannot_fit_and_warns_of_activations(caplog):
    argv = [*JOB, "--zero-stage", "1"]
    config, cuda = load_config(argv, world_size=8), torch.device("cuda")
    plan = plan_job(Setup.of(config, 8, 8, "cuda"))
    refuse_what_cannot_fit(config, 8, cuda, Limits(device=plan.device))
    assert not caplog.records
    refuse_what_cannot_fit(config, 8, cuda, Limits(device=plan.device_states))
    assert "device memory" in caplog.text
    with pytest.raises(ValueError, match="the job needs .* of device memory per rank, and .* are there.*--zero-stage"):
        refuse_what_cannot_fit(config, 8, cuda, Limits(device=plan.device_states - 1))
    refuse_what_cannot_fit(config, 8, cuda, Limits(device=plan.device_states - 1), states_per_element=0)
    with pytest.raises(ValueError, match="the job needs"):  # without moments, too
        refuse_what_cannot_fit(config, 8, cuda, Limits(device=plan.device_states // 2), states_per_element=0)


def test_the_job_refuses_activations_that_are_far_too_large():
    argv = [*JOB, "--zero-stage", "1", "--batch-size", "1000000000"]
    config, cuda = load_config(argv, world_size=8), torch.device("cuda")
    enough = plan_job(Setup.of(config, 8, 8, "cuda")).device_states
    with pytest.raises(
        ValueError, match=r"needs .* TB of device memory .* It fits with .*--batch-size [0-9]{2,3}( |\.)"
    ):
        refuse_what_cannot_fit(config, 8, cuda, Limits(device=2 * enough))


def test_the_disk_that_is_measured_is_the_one_that_the_job_swaps_to(monkeypatch):
    argv = [*JOB, "--checkpoint-activations"]
    argv += ["--nvme-path", "/idle", "--checkpoint-nvme-path", "/used"]  # no state rests on nvme
    measured = []
    monkeypatch.setattr(refuse, "measure_limits", lambda _, path: measured.append(path) or Limits())
    refuse_what_cannot_fit(load_config(argv, world_size=8), 8, torch.device("cuda"))
    assert measured == ["/used"]


def test_two_disks_are_each_asked_for_what_goes_there():
    flags = [*JOB, *OFFLOADED, "--recompute", "full", "--checkpoint-nvme-path", "/b"]
    config = load_config(flags, world_size=8)
    plan = plan_job(Setup.of(config, 8, 8, "cuda"))
    states, activations = plan.per_node(plan.states.disk), plan.per_node(plan.activations.kept_on_disk)
    assert states and activations
    assert check_fits(plan, Limits(disk=states, checkpoint_disk=activations)) == []
    for lacks, flag in (
        ({"disk": states - 1}, "--nvme-path"),
        ({"checkpoint_disk": activations - 1}, "--checkpoint-nvme-path"),
    ):
        (problem,) = check_fits(plan, replace(Limits(disk=states, checkpoint_disk=activations), **lacks))
        assert f"Name a larger disk by {flag}," in str(problem)
    assert check_fits(plan, Limits(disk=states + activations)) == []
    assert len(check_fits(plan, Limits(disk=states + activations - 1))) == 1, "one disk for both"


OFFLOADED = ["--zero-stage", "3", "--offload-optimizer", "cpu", "--offload-param", "nvme", "--nvme-path", "/local"]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(device=GB), "device memory per rank, and 1.00 GB are there. Its states alone need that much. "),
        (Limits(host=GB), "host memory per node, and 1.00 GB are there. Use --offload-optimizer nvme"),
        (Limits(host=GB, disk=GB), r"host memory per node, .*\. Also, the job needs .* of disk per node"),
        (Limits(disk=GB), "disk per node, and 1.00 GB are there. Name a larger disk by --nvme-path"),
        (
            Limits(memlock=2**16),
            "locked memory per rank, and 65.54 kB are there. Raise the limit .ulimit -l., or give --no-",
        ),
    ],
    ids=["device", "host", "host and disk", "disk", "memlock"],
)
def test_the_job_refuses_whatever_is_too_small_and_says_what_to_change(limits, message):
    flags = OFFLOADED if limits.device is None else ["--zero-stage", "1"]
    config = load_config([*JOB, *flags], world_size=8)
    with pytest.raises(ValueError, match=message):
        refuse_what_cannot_fit(config, 8, torch.device("cuda"), limits)


def test_activations_are_shown_for_every_mode(capsys):
    job = setup(TUTORIAL, 2, 8, batch=8, model_parallel_size=2)
    modes = activation_modes(job)
    saved = [work.saved for work in modes.values()]
    assert saved == sorted(saved, reverse=True) and len(set(saved)) == 5
    assert modes["none"] == plan_job(job).activations
    for more in ([], ["--recompute", "auto", "--recompute-budget-gb", "1"]):
        main([*FLAGS, "--zero-stage", "2", *more])
        text = capsys.readouterr().out
        assert all(
            name in text for name in ("--recompute selective", "--checkpoint-activations", "... --checkpoint-in-cpu")
        )


def test_a_plan_without_gpus_is_told_of_the_flag_for_it():
    with pytest.raises(ValueError, match="^--gpus must be at least 1, got 0: .* --device cpu.$"):
        load(["--gpus", "0"])
