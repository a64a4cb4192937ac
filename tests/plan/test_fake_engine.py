"""Plans against what the real job holds, at sizes that no machine here has: fake tensors, one of 1 to 1024 ranks."""

from __future__ import annotations

import pytest

from megazero.arguments import load_config
from megazero.job import Job
from megazero.plan import JobPlan, Setup, plan_job
from tests.plan.fake_world import ACCELERATOR, Held, fake_job, fake_step

COMMON = (
    "--seq-length 1024 --max-position-embeddings 1024 --vocab-size 50257 --bf16 --peak-tflops 1 --no-use-pin-memory"
)
WIDTHS = {  # billions of parameters: layers, and the rest
    0.02: (5, "--hidden-size 288 --num-attention-heads 4"),
    1.5: (48, "--hidden-size 1600 --num-attention-heads 16"),
    10: (50, "--hidden-size 4096 --num-attention-heads 32"),
    100: (80, "--hidden-size 10240 --num-attention-heads 80"),
}
LLAMA = (
    "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear --group-query-attention "
    "--num-query-groups 8"
)
UNTIED = f"{LLAMA} --untie-embeddings-and-output-weights"


def check(billions: float, ranks: int, flags: str, layers: int | None = None, rank: int = 0, steps: int = 2) -> None:
    """Builds the job, trains some steps, and compares everything that is held with the plan."""
    depth, width = WIDTHS[billions]
    argv = f"{COMMON} {width} --num-layers {layers or depth} {flags}".split()
    config = load_config(argv, world_size=ranks)
    plan = plan_job(Setup.of(config, ranks, 8, "cuda"))
    what = f"{flags}, rank {rank} of {ranks}"
    states = plan.states
    in_background = config.zero.delays_update or config.zero.overlaps_update
    steps += 1 if steps and in_background else 0  # the second one's update is the first to go on during the next step
    with fake_job(config, ranks, rank) as (job, held):
        held.restart()
        memory = job.engine.memory()
        for state, home, planned in (
            ("P", states.param_home, states.parameters),
            ("O", states.optimizer_home, states.master),
        ):
            assert memory[state] == (0 if home == "nvme" else planned), f"{state} of {what}"
        if states.host == 0:
            assert held.now[ACCELERATOR.type] == states.at_rest - states.moments, what
        for _ in range(steps):  # moments come with the first
            held.restart()
            job.engine.channel.reset_traffic()
            fake_step(job)
        if steps:
            compare(job, held, plan, what)


def compare(job: Job, held: Held, plan: JobPlan, what: str) -> None:
    device, host = held.peak[ACCELERATOR.type], held.peak["cpu"]
    planned, swap = plan.device - plan.runtime, job.engine.homes.swap
    assert device == pytest.approx(planned, rel=0.03), f"{what}: {device / planned:.4f} of {plan.moments}"
    assert host == pytest.approx(plan.host, rel=0.03, abs=1000), f"{what}: {host} bytes of host memory, not {plan.host}"
    sent = sum(kind.elements for kind in job.engine.channel.traffic.values())
    assert sent == plan.traffic.data_parallel_elements, f"{what}: elements sent, and planned"
    disk = 0 if swap is None else swap.nbytes
    assert disk == pytest.approx(plan.disk, rel=0.03), f"{what}: {disk} bytes of disk, not {plan.disk}"


# By what they are for: billions of parameters, ranks, flags. Each has its peak where another term decides.
CASES = {
    "no sharding": (1.5, 1, "--zero-stage 0 --batch-size 2"),
    "O over 2": (1.5, 2, "--zero-stage 1 --batch-size 1"),
    "O over 8 of 64, MP 8": (10, 64, "--zero-stage 1 --model-parallel-size 8 --batch-size 2"),
    "O and G over 8": (1.5, 8, "--zero-stage 2 --batch-size 1"),
    "two micro-batches, MP 2": (1.5, 8, "--zero-stage 2 --model-parallel-size 2 --batch-size 1 --global-batch-size 8"),
    "all on one": (1.5, 1, "--zero-stage 3 --batch-size 1 --checkpoint-activations"),
    "all over 64": (1.5, 64, "--zero-stage 3 --batch-size 4 --recompute selective"),
    "all over 128 of 1024, MP 8": (
        100,
        1024,
        "--zero-stage 3 --model-parallel-size 8 --batch-size 4 --checkpoint-activations",
    ),
    "sequence-parallel": (10, 8, "--zero-stage 3 --model-parallel-size 8 --sequence-parallel --batch-size 1"),
    "16-bit G": (1.5, 8, "--zero-stage 2 --batch-size 1 --grad-dtype compute"),
    "O on the host": (1.5, 2, "--zero-stage 2 --batch-size 1 --offload-optimizer cpu --checkpoint-activations"),
    "whole G, O on the host": (1.5, 2, "--zero-stage 1 --batch-size 1 --offload-optimizer cpu"),
    "all on the host": (10, 8, "--zero-stage 3 --batch-size 1 --offload-optimizer cpu --offload-param cpu"),
    "a part of O on the host": (
        1.5,
        2,
        "--zero-stage 2 --batch-size 1 --offload-optimizer cpu --offload-optimizer-ratio 0.5",
    ),
    "sums on the host": (1.5, 2, "--zero-stage 2 --batch-size 1 --global-batch-size 6 --offload-optimizer cpu"),
    "16-bit sums on the host": (
        1.5,
        1,
        "--zero-stage 3 --batch-size 1 --global-batch-size 2 --offload-optimizer cpu --grad-dtype compute",
    ),
    "O on nvme": (1.5, 2, "--zero-stage 2 --batch-size 1 --offload-optimizer nvme --nvme-path /drive"),
    "whole G, O on nvme": (1.5, 2, "--zero-stage 1 --batch-size 1 --offload-optimizer nvme --nvme-path /drive"),
    "sums on nvme": (
        10,
        2,
        "--zero-stage 2 --batch-size 1 --global-batch-size 4 --offload-optimizer nvme --nvme-path /drive",
    ),
    "small sums on nvme": (
        0.02,
        6,
        "--zero-stage 3 --model-parallel-size 2 --batch-size 1 --global-batch-size 9 --offload-optimizer nvme "
        "--nvme-path /drive --checkpoint-activations --vocab-chunk-size 4096",
    ),
    "P on nvme": (
        10,
        8,
        "--zero-stage 3 --batch-size 1 --offload-optimizer cpu --offload-param nvme --nvme-path /drive",
    ),
    "all on nvme": (
        10,
        8,
        "--zero-stage 3 --batch-size 1 --offload-optimizer nvme --offload-param nvme --nvme-path /drive",
    ),
    "Muon, alone": (1.5, 1, "--zero-stage 0 --batch-size 1 --optimizer muon"),
    "Muon, O and G over 4, MP 2": (1.5, 8, "--zero-stage 2 --batch-size 1 --model-parallel-size 2 --optimizer muon"),
    "Muon, whole G, MP 4": (1.5, 8, "--zero-stage 1 --batch-size 1 --model-parallel-size 4 --optimizer muon"),
    "Muon, all over 64": (1.5, 64, "--zero-stage 3 --batch-size 1 --checkpoint-activations --optimizer muon"),
    "Muon, whole G, O on the host": (1.5, 4, "--zero-stage 1 --batch-size 1 --offload-optimizer cpu --optimizer muon"),
    "Muon, O on the host": (1.5, 2, "--zero-stage 2 --batch-size 1 --offload-optimizer cpu --optimizer muon"),
    "Muon, all on the host": (
        10,
        8,
        "--zero-stage 3 --batch-size 1 --offload-optimizer cpu --offload-param cpu --optimizer muon",
    ),
    "tiles": (10, 8, "--zero-stage 3 --batch-size 1 --memory-centric-tiled-linear --tile-factor 2"),
    "tiles, recomputed": (
        10,
        4,
        "--zero-stage 3 --batch-size 1 --global-batch-size 8 --memory-centric-tiled-linear --tile-factor 2 "
        "--checkpoint-activations",
    ),
    "Llama": (10, 8, f"{UNTIED} --zero-stage 2 --batch-size 8"),
    "Llama, two micro-batches, O on the host": (
        10,
        8,
        f"{UNTIED} --zero-stage 2 --batch-size 1 --global-batch-size 16 --offload-optimizer cpu",
    ),
    "Llama, tied, all over 8": (10, 8, f"{LLAMA} --zero-stage 3 --batch-size 4 --recompute selective"),
    "Llama, tiles, Muon": (
        10,
        8,
        f"{UNTIED} --zero-stage 3 --batch-size 1 --memory-centric-tiled-linear --tile-factor 2 --optimizer muon",
    ),
    "Llama, sequence-parallel": (
        10,
        8,
        f"{UNTIED} --zero-stage 3 --model-parallel-size 8 --sequence-parallel --batch-size 1",
    ),
    "chunks of the sequence": (1.5, 2, "--zero-stage 2 --batch-size 8 --sequence-chunk-size 300"),
    "chunks of the sequence, fp32": (
        0.02,
        2,
        "--no-bf16 --zero-stage 2 --batch-size 8 --sequence-chunk-size 300 --checkpoint-activations",
    ),
    "delayed, of whole G": (1.5, 2, "--zero-stage 1 --batch-size 1 --offload-optimizer cpu --delayed-param-update 1"),
    "delayed": (
        10,
        8,
        "--zero-stage 3 --batch-size 1 --offload-optimizer cpu --offload-param cpu --delayed-param-update 1",
    ),
    "delayed, on nvme": (
        1.5,
        2,
        "--zero-stage 2 --batch-size 1 --offload-optimizer nvme --delayed-param-update 1 --nvme-path /drive",
    ),
}


SLOW = {"tiles, recomputed"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
)
def test_a_rank_of_a_few_wide_layers_holds_what_was_planned(case):
    check(*CASES[case], layers=2 if "tiles" in case else 3)  # tiles are many modules


def test_a_gradient_on_its_way_to_the_host_is_planned_beside_that_of_a_block_whose_states_stay():
    flags = "--zero-stage 2 --batch-size 1 --offload-optimizer cpu --offload-optimizer-ratio 0.4"
    check(10, 2, flags, layers=4)


def test_the_shard_of_a_unit_that_is_being_gathered_is_planned_beside_those_that_come_after_it():
    flags = "--zero-stage 3 --batch-size 1 --offload-optimizer cpu --offload-param cpu --checkpoint-activations"
    check(10, 2, flags, layers=4)


@pytest.mark.parametrize("recompute", ["", "--checkpoint-activations"])
def test_a_placement_by_plan_holds_what_was_planned_and_no_more_than_the_device_has(recompute):
    width = "--hidden-size 4096 --num-attention-heads 32 --num-layers 3"
    config = load_config(
        f"{COMMON} {width} {recompute} --zero-stage 3 --placement auto --batch-size 1".split(), world_size=8
    )
    plan = plan_job(Setup.of(config, 8, 8, "cuda"))
    planned = plan.device - plan.runtime
    for total in (11 * planned // 10, 2 * planned):
        with fake_job(config, 8, device_bytes=total) as (job, held):
            assert job.engine.placement is not None
            job.engine.homes.link.close()  # what building has sent is on the device until something else is sent
            held.restart()
            fake_step(job)  # traced: all rests on the host
            assert held.peak[ACCELERATOR.type] == pytest.approx(planned, rel=0.03)
            assert held.peak["cpu"] == pytest.approx(plan.host, rel=0.05), "the first step's moments are made apart"
            held.restart()
            for _ in range(2):
                fake_step(job)
            most = held.peak[ACCELERATOR.type]
            assert most <= total and held.peak["cpu"] <= 1.03 * plan.host, f"{most / total:.4f} of the budget"
            assert (held.now[ACCELERATOR.type] > 10**6) == (total == 2 * planned), "states have moved to the device"


def test_the_last_of_1024_ranks_holds_as_much():
    check(10, 1024, "--zero-stage 2 --model-parallel-size 2", layers=1, rank=1023)


def test_100_billion_parameters_are_built_as_planned_on_1024_ranks():
    check(100, 1024, "--zero-stage 3 --model-parallel-size 8", steps=0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 8])
@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 1024])
def test_every_stage_on_every_number_of_ranks(ranks, tensor_parallel, stage):
    if ranks % tensor_parallel:
        pytest.skip("not so many ranks")
    for batch, mode in ((1, ""), (2, "--checkpoint-activations")):
        flags = f"--zero-stage {stage} --model-parallel-size {tensor_parallel} --batch-size {batch} {mode}"
        # The last one has a part of the vocabulary less.
        check(1.5, ranks, flags, layers=4, rank=ranks - tensor_parallel)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        (1.5, 8, "--zero-stage 1 --batch-size 4"),
        (1.5, 8, "--zero-stage 2 --model-parallel-size 2 --batch-size 4"),
        (10, 1, "--zero-stage 2 --offload-optimizer cpu --batch-size 10 --checkpoint-activations"),
        (10, 64, "--zero-stage 3 --batch-size 4 --checkpoint-activations"),
        (100, 1024, "--zero-stage 3 --model-parallel-size 8 --batch-size 8 --checkpoint-activations"),
    ],
    ids=str,
)
def test_models_of_their_full_depth(case):
    check(*case)
