"""The real job on a pretended CUDA, whose streams, threads and memory are checked: no two accesses race, in any configuration.

`tests/pretended_cuda.py` says what is pretended. `MUTANTS` are the same job with one wait left out, which have to be found.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megazero import comm, training
from megazero.activation_checkpointing import storage
from megazero.arguments import load_config
from megazero.checkpoint import saver
from megazero.checkpoint.tensor_file import LazyTensor
from megazero.comm.lane import Finished
from megazero.comm.meeting import Meeting
from megazero.job import Job
from megazero.plan.activations import Shape, plan_activations
from megazero.timers import Timers
from megazero.training import train_step
from megazero.zero import GatheredParameters, access, arrival, background, bucket, home, link, nvme_home
from megazero.zero.homes import TILE_MULTIPLE
from tests.plan.fake_world import ACCELERATOR, fake_job, fake_step, fake_world
from tests.pretended_cuda import CheckedThread, PretendedCuda, Stream, Work

LAYERS = 3
COMMON = (
    f"--num-layers {LAYERS} --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 100 --batch-size 1 --peak-tflops 1"
)
SMALL_TILES = f"--sub-group-size {TILE_MULTIPLE}"  # several of each unit


def ids() -> torch.Tensor:
    return torch.zeros(1, 32, dtype=torch.int64, device=ACCELERATOR)


def evaluate(job: Job) -> None:
    job.engine.eval()
    with torch.no_grad():
        float(job.engine(ids(), targets=ids()).mean())
    job.engine.train()


def fail(*_: object) -> None:
    raise ZeroDivisionError


def fail_in_forward(job: Job) -> None:
    handle = job.engine.module.transformer.layers[-1].register_forward_hook(fail)
    for trains in (True, False):
        with pytest.raises(ZeroDivisionError), torch.set_grad_enabled(trains):
            job.engine(ids(), targets=ids())
    handle.remove()


def fail_in_backward(job: Job) -> None:
    def watch(_: object, __: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    handle = job.engine.module.transformer.layers[1].register_forward_hook(watch)
    loss = job.engine(ids(), targets=ids()).mean()
    with pytest.raises(ZeroDivisionError):
        job.engine.backward(loss)
    handle.remove()
    job.engine.zero_grad()


def look_at_values(job: Job) -> None:
    """What a user may ask for, and write, between two steps."""
    parameter = job.engine.module.transformer.layers[0].mlp.dense_h_to_4h.weight
    access.safe_get_full_optimizer_state(parameter, "exp_avg")
    access.safe_set_full_fp32_param(parameter, access.safe_get_full_fp32_param(parameter))
    with GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
        parameter.zero_()
    state = job.engine.module_state_dict()
    with torch.no_grad():
        job.engine(ids(), targets=ids())  # which nobody waits for
    access.load_state_dict(job.engine.module, job.engine.buckets, state)


def save(job: Job, in_background: bool) -> None:
    job.engine.save_checkpoint("unused", in_background=in_background, save_rng=False)


def step(job: Job) -> None:
    fake_step(job)


def everything(job: Job) -> None:
    """Steps, and between them whatever a run may meet."""
    step(job)
    evaluate(job)
    save(job, in_background=True)
    step(job)
    fail_in_forward(job)
    fail_in_backward(job)
    step(job)
    look_at_values(job)
    save(job, in_background=False)
    step(job)
    job.engine.wait_for_checkpoint()
    job.engine.destroy()


def three_steps(job: Job) -> None:
    """The last one's forward goes on beside the update of the second, if that is offloaded."""
    step(job)
    evaluate(job)
    step(job)
    step(job)
    job.engine.destroy()


def run(
    flags: str,
    ranks: int = 2,
    *,
    rank: int = 0,
    does: Callable[[Job], None] = three_steps,
    over_gloo: bool = False,
    device_bytes: int | None = None,
    without: Callable[[pytest.MonkeyPatch], None] = lambda patch: None,
) -> PretendedCuda:
    """A job on one of the ranks, from its first tensor to its last."""
    cuda = PretendedCuda(over_gloo)

    def write(_: Any, folder: Any, tag: Any, index: Any, save_latest: Any, keep_last: Any, snapshot: Any) -> None:
        for tensor in snapshot.tensors().values():
            cuda.step("write", [tensor.read() if isinstance(tensor, LazyTensor) else tensor], [], blocks=True)

    folder = SimpleNamespace(path=Path("unused"), wait=lambda: None, release=lambda: None)
    with pytest.MonkeyPatch.context() as patch, cuda.installed():
        patch.setattr(Meeting, "hold", lambda self, what: None)
        patch.setattr(saver, "threading", SimpleNamespace(Thread=cuda.thread))
        patch.setattr(saver.Saver, "claim", lambda self, directory: folder)
        patch.setattr(saver.Saver, "_line", SimpleNamespace(group=None), raising=False)
        patch.setattr(saver.Saver, "_write", write)
        without(patch)
        config = load_config(f"{COMMON} {flags}".split(), world_size=ranks)
        with fake_job(config, ranks, rank, device_bytes, cuda) as (job, held):
            does(job)
            held.watch([])
            del job
        for _ in range(2):  # finalizers of vectors hold their home on NVMe, which goes after them
            gc.collect()
    return cuda


OFFLOADED = "--zero-stage 3 --bf16 --offload-optimizer cpu --offload-param cpu"
ON_NVME = "--zero-stage 3 --bf16 --offload-optimizer nvme --offload-param nvme --nvme-path /drive"
IN_CPU = "--checkpoint-activations --checkpoint-in-cpu"
CASES: dict[str, tuple[str, int]] = {  # flags and ranks
    "fp16, O sharded": ("--zero-stage 1 --fp16 --clip-grad 1", 2),
    "all sharded": ("--zero-stage 3 --bf16 --global-batch-size 4", 2),
    "sets of ranks": ("--zero-stage 2 --bf16 --zero-shard-size 2", 4),
    "sequence-parallel": ("--zero-stage 2 --bf16 --model-parallel-size 2 --sequence-parallel", 4),
    "offloaded": (f"{OFFLOADED} --global-batch-size 4 {SMALL_TILES}", 2),
    "offloaded, fp32": ("--zero-stage 2 --offload-optimizer cpu --offload-optimizer-ratio 0.5", 2),
    "on nvme": (f"{ON_NVME} {SMALL_TILES}", 2),
    "muon": ("--zero-stage 2 --bf16 --model-parallel-size 2 --optimizer muon", 4),
    "O on the host": (f"--zero-stage 2 --bf16 --offload-optimizer cpu {SMALL_TILES}", 2),
    "delayed": ("--zero-stage 1 --bf16 --offload-optimizer cpu --delayed-param-update 1", 2),
    "activations in host memory": (f"--zero-stage 1 --model-parallel-size 2 {IN_CPU} --partition-activations", 2),
}
MORE: dict[str, tuple[str, int]] = {
    "nothing sharded": ("--zero-stage 0 --bf16", 2),
    "alone": ("--zero-stage 1 --bf16", 1),
    "weights come in the step": ("--zero-stage 1 --bf16 --no-overlap-param-gather", 2),
    "fp32, no overlap": ("--zero-stage 3 --global-batch-size 4", 2),
    "sets of ranks, all sharded": ("--zero-stage 3 --bf16 --zero-shard-size 2 --global-batch-size 8", 4),
    "sets of ranks, offloaded": (f"{OFFLOADED} --zero-shard-size 2", 4),
    "split layers": ("--zero-stage 3 --bf16 --model-parallel-size 2", 4),
    "chunks": ("--zero-stage 2 --bf16 --model-parallel-size 2 --vocab-chunk-size 16 --sequence-chunk-size 8", 2),
    "recomputed": ("--zero-stage 3 --bf16 --recompute selective", 2),
    "16-bit sums": ("--zero-stage 2 --bf16 --grad-dtype compute --offload-optimizer cpu --global-batch-size 4", 2),
    "not pinned": (f"{OFFLOADED} --no-use-pin-memory", 2),
    "offloaded, alone": (f"{OFFLOADED} --global-batch-size 2", 1),
    "O on the host, whole G": (f"--zero-stage 1 --fp16 --offload-optimizer cpu {SMALL_TILES}", 2),
    "O on nvme": (f"--zero-stage 2 --bf16 --offload-optimizer nvme --nvme-path /drive {SMALL_TILES}", 2),
    "O on the host, weights come in the step": (
        f"--zero-stage 2 --bf16 --offload-optimizer cpu --no-overlap-param-gather {SMALL_TILES}",
        2,
    ),
    "O on the host, P sharded": (f"--zero-stage 3 --bf16 --offload-optimizer cpu {SMALL_TILES}", 2),
    "O on nvme, whole G": (f"--zero-stage 1 --bf16 --offload-optimizer nvme --nvme-path /drive {SMALL_TILES}", 2),
    "O on nvme, P on the host": (
        "--zero-stage 3 --fp16 --offload-optimizer nvme --offload-param cpu --nvme-path /drive --global-batch-size 4",
        2,
    ),
    "P on nvme": ("--zero-stage 3 --bf16 --offload-optimizer cpu --offload-param nvme --nvme-path /drive", 2),
    "on nvme, alone": (ON_NVME, 1),
    "muon, offloaded": (f"{OFFLOADED} --optimizer muon --global-batch-size 4", 2),
    "muon, whole": ("--zero-stage 0 --fp16 --optimizer muon", 2),
    "delayed, offloaded": (f"{OFFLOADED} --delayed-param-update 1", 2),
    "delayed, on nvme": (
        f"--zero-stage 2 --bf16 --offload-optimizer nvme --delayed-param-update 1 --nvme-path /drive {SMALL_TILES}",
        2,
    ),
    "activations in parts": (
        "--zero-stage 3 --model-parallel-size 2 --checkpoint-activations --partition-activations",
        4,
    ),
    "activations in one host memory": (
        f"--zero-stage 2 --model-parallel-size 2 {IN_CPU} --partition-activations --contiguous-checkpointing "
        f"--num-checkpoints {LAYERS + 1}",
        2,
    ),
    "activations in host memory, alone": (f"{OFFLOADED} {IN_CPU}", 1),
    "activations on nvme": (
        "--zero-stage 2 --model-parallel-size 2 --checkpoint-activations --partition-activations "
        "--checkpoint-nvme-path /drive",
        2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_races_in_a_job(case):
    cuda = run(*CASES[case])
    assert not cuda.races, "\n".join(cuda.races)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_nothing_races_whatever_a_run_meets(case):
    flags, ranks = {**CASES, **MORE}[case]
    cuda = run(flags, ranks, does=everything)
    assert not cuda.races, "\n".join(cuda.races)


# ---- what is found where something is missing


def without_waiting_for_streams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stream, "wait_stream", lambda self, other: None)


def without_holding_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(link.CudaCopyStream, "hold_back", lambda self, event: None)


def without_keeping_memory(patch: pytest.MonkeyPatch) -> None:
    init = link.Crossing.__init__

    def forgetful(crossing: Any, stream: Any, event: Any, _: Any, __: Any, then: Any, earlier: Any) -> None:
        init(crossing, stream, event, (), (), then, earlier)

    patch.setattr(link.Crossing, "__init__", forgetful)


def without_waiting_for_what_comes(patch: pytest.MonkeyPatch) -> None:
    def at_hand(vector: Any, start: int = 0, stop: int | None = None, **_: bool) -> Any:
        return nullcontext(vector.resident[start:stop])

    patch.setattr(home.MemoryVector, "at_hand", at_hand)


def without_waiting_for_collectives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Work, "wait", lambda self: None)


def without_waiting_for_the_outbox(patch: pytest.MonkeyPatch) -> None:
    take = link.Outbox._take

    def take_at_once(box: Any, nbytes: int) -> torch.Tensor:
        buffer = box._sent.popleft()[0] if len(box._sent) == link.OUTBOX_BUFFERS else None
        return buffer if buffer is not None and buffer.nbytes >= nbytes else take(box, nbytes)

    patch.setattr(link.Outbox, "_take", take_at_once)


def without_settling(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(arrival.Arrival, "settle", lambda self: setattr(self, "ahead", None))


def without_waiting_until_a_buffer_is_full(patch: pytest.MonkeyPatch) -> None:
    write = nvme_home.SwappedVector._write
    patch.setattr(
        nvme_home.SwappedVector, "_write", lambda self, place, buffer, filled=None: write(self, place, buffer)
    )


def without_awaiting_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nvme_home.SwappedVector, "_await_writes", lambda self, place: None)


def without_joining(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckedThread, "join", lambda self: None)


def without_synchronizing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stream, "synchronize", lambda self: None)


def without_awaiting_updates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bucket.Bucket, "await_update", lambda self: None)


def without_waiting_for_new_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(background.OverlappedUpdate, "_tell", lambda self, done: self._done.put((done, None)))


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, int]] = {
    "copies do not wait for what is computed": (without_waiting_for_streams, *CASES["offloaded"]),
    "what is computed does not wait for copies": (without_holding_back, *CASES["delayed"]),
    "crossings keep nothing": (without_keeping_memory, *CASES["offloaded"]),
    "gradients are not waited for": (without_waiting_for_what_comes, *CASES["offloaded"]),
    "sums between sets do not wait for gradients": (without_waiting_for_streams, *CASES["sets of ranks"]),
    "activations are not kept while they are sent": (without_keeping_memory, *CASES["activations in host memory"]),
    "buffers are written before they are full": (without_waiting_until_a_buffer_is_full, *CASES["on nvme"]),
    "a forward does not wait for updates": (without_awaiting_updates, *CASES["offloaded"]),
    "weights are used while they are sent": (without_waiting_for_new_weights, *CASES["O on the host"]),
    "a snapshot is not waited for": (without_synchronizing, *CASES["fp16, O sharded"]),
}
MORE_MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, int]] = {
    "activations do not wait": (without_waiting_for_streams, *CASES["activations in host memory"]),
    "activations are not waited for": (without_holding_back, *MORE["activations in host memory, alone"]),
    "activations are fetched before they have come": (
        without_waiting_for_what_comes,
        *CASES["activations in host memory"],
    ),
    "collectives are not waited for": (without_waiting_for_collectives, *CASES["all sharded"]),
    "the outbox is not waited for": (without_waiting_for_the_outbox, *MORE["O on the host, whole G"]),
    "a shard is written to while it is read": (without_settling, *CASES["offloaded"]),
    "a file is read before it is written": (without_awaiting_writes, *CASES["on nvme"]),
    "an update is not joined": (without_joining, *CASES["delayed"]),
}


def steps_and_more(job: Job) -> None:
    step(job)
    save(job, in_background=True)
    step(job)
    step(job)
    look_at_values(job)


@pytest.mark.parametrize("mutant", [*MUTANTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_MUTANTS)])
def test_what_is_left_out_is_found(mutant):
    without, flags, ranks = {**MUTANTS, **MORE_MUTANTS}[mutant]
    assert run(flags, ranks, does=steps_and_more, without=without).races


@pytest.mark.parametrize(
    "contiguous", ["", f" --partition-activations --contiguous-checkpointing --num-checkpoints {LAYERS}"]
)
def test_activations_take_as_much_host_memory_as_is_planned_and_the_same_in_every_step(contiguous):
    taken: list[int] = []

    def note(patch: pytest.MonkeyPatch) -> None:
        pool = storage.PagePool()

        def empty(nbytes: int) -> torch.Tensor:
            taken.append(nbytes)
            return pool.empty(nbytes)

        patch.setattr(storage, "PagePool", lambda **_: SimpleNamespace(empty=empty))

    flags = f"--bf16 {IN_CPU}{contiguous}"
    run(flags, 1, does=three_steps, without=note)
    config = load_config(f"{COMMON} {flags}".split(), world_size=1)
    plan = plan_activations(config.model, Shape(1, 32, 1, torch.bfloat16), config.checkpoint_settings())
    assert sum(taken) == 3 * plan.kept_on_host > 0


# ---- other worlds


@pytest.mark.parametrize("case", ["offloaded", "activations in host memory"])
def test_nothing_races_where_gloo_carries_what_is_on_the_device(case):
    cuda = run(*CASES[case], over_gloo=True)
    assert not cuda.races, "\n".join(cuda.races)


@pytest.mark.parametrize("recompute", ["", " --checkpoint-activations"])
@pytest.mark.parametrize("device_bytes", [2_000_000, 100_000_000])
def test_nothing_races_where_a_plan_moves_states(device_bytes, recompute):
    moved: list[int] = []

    def steps(job: Job) -> None:
        for _ in range(3):
            step(job)
        moved.append(sum(not bucket.is_offloaded for bucket in job.engine.buckets))

    cuda = run(f"--zero-stage 3 --bf16 --placement auto{recompute}", does=steps, device_bytes=device_bytes)
    assert not cuda.races, "\n".join(cuda.races)
    assert moved[0] == (2 if device_bytes == 2_000_000 else LAYERS + 1), "units whose states are on the device"


def order_of(cuda: PretendedCuda) -> list[tuple[tuple[int, ...], str, int]]:
    """The collectives of a rank, by the distance of the others from the first of them."""
    return [(tuple(r - ranks[0] for r in ranks), name, numel) for ranks, name, numel in cuda.issued]


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_all_ranks_issue_the_same_collectives_in_one_order(stage):
    """NCCL's kernels of two communicators could else wait for each other."""
    flags = f"--zero-stage {stage} --bf16 --zero-shard-size 2 --model-parallel-size 2 --global-batch-size 8"
    issued = [order_of(run(flags, 8, rank=rank)) for rank in (0, 3, 6)]
    assert issued[0] == issued[1] == issued[2]
    assert len({ranks for ranks, _, _ in issued[0]}) >= 4, (
        "within a set, across the sets, of split layers, and the world"
    )


def waited_for(issued: list[list[tuple[tuple[int, ...], str, int]]]) -> list[tuple[tuple[int, ...], str, int]]:
    """What the ranks wait for in the end, each collective for those before it on every rank of it; [] if all of them run."""
    left = [deque(each) for each in issued]
    while heads := [queue[0] for queue in left if queue]:
        ready = next((one for one in heads if all(left[rank] and left[rank][0] == one for rank in one[0])), None)
        if ready is None:
            return heads
        for rank in ready[0]:
            left[rank].popleft()
    return []


def test_what_ranks_would_wait_for_is_found():
    first, second, third = (((0, 1), "all_reduce", 1), ((1, 2), "all_reduce", 1), ((0, 2), "all_reduce", 1))
    assert waited_for([[first, third], [first, second], [third, second]]) == []
    assert waited_for([[first, third], [second, first], [third, second]]) == [first, second, third], "a circle"
    assert waited_for([[first, first], [first], []]) == [first], "one too many"


def steps_and_saves(job: Job) -> None:
    step(job)
    evaluate(job)
    save(job, in_background=True)
    step(job)
    job.engine.module_state_dict()
    save(job, in_background=False)
    step(job)
    job.engine.destroy()


TOGETHER = ["muon", "sequence-parallel", "sets of ranks, all sharded", "activations in parts"]


@pytest.mark.parametrize("case", [TOGETHER[0], *(pytest.param(case, marks=pytest.mark.slow) for case in TOGETHER[1:])])
def test_no_rank_waits_for_ever_whatever_communicators_it_is_in(case):
    flags, ranks = {**CASES, **MORE}[case]
    issued = [run(flags, ranks, rank=rank, does=steps_and_saves).issued for rank in range(ranks)]
    assert len({of for each in issued for of, _, _ in each}) >= 3 and waited_for(issued) == []


def weighed_steps(job: Job) -> None:
    """The numbers of tokens of all ranks come while the first forward runs."""
    texts = repeat({"text": torch.zeros(1, 33, dtype=torch.int64)})
    for _ in range(2):
        train_step(job, texts if job.groups.model_parallel_rank == 0 else None)


WEIGHED = "--zero-stage 3 --bf16 --global-batch-size 8 --model-parallel-size 2 --calculate-per-token-loss"


def test_nothing_races_where_tokens_are_weighed_and_ranks_issue_the_same(monkeypatch):
    monkeypatch.setattr(training, "_raise_not_finite", lambda *_: None)  # every number is 1 here, that of bad ranks too
    monkeypatch.setattr(training, "_why_stop", lambda *_: None)
    runs = [run(WEIGHED, 8, rank=rank, does=weighed_steps) for rank in (0, 3)]  # they differ in both groups
    assert not any(cuda.races for cuda in runs), [cuda.races for cuda in runs]
    assert order_of(runs[0]) == order_of(runs[1])


def test_a_number_of_tokens_that_is_not_waited_for_is_found(monkeypatch):
    monkeypatch.setattr(training, "_raise_not_finite", lambda *_: None)
    monkeypatch.setattr(training, "_why_stop", lambda *_: None)
    start = comm.start_all_reduce

    def forget(buffer: torch.Tensor, group: comm.ProcessGroup) -> comm.Work:
        work = start(buffer, group)
        return Finished() if group is comm.world() else work

    monkeypatch.setattr(comm, "start_all_reduce", forget)
    races = run(WEIGHED, 8, does=weighed_steps).races
    assert races and all(" weights\n" in race for race in races), races


def test_the_host_reads_a_readout_when_it_has_come():
    cuda = PretendedCuda()
    with cuda.installed(), fake_world(2, held=cuda):
        comm.Readout(torch.ones(8, device=ACCELERATOR)).read().sum()
    assert not cuda.races, "\n".join(cuda.races)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_waits_for_other_ranks_are_timed_where_the_device_waits(stage):
    waited_for: dict[str, set[str]] = {"allreduce": set()} if stage == 0 else {"allreduce": set(), "allgather": set()}

    def timed_steps(job: Job) -> None:
        job.engine.channel.timers = timers = Timers(torch.device("cuda"))
        step(job)
        step(job)  # waits for what the first one has updated
        for phase, start, stop in timers._events:
            waited_for[phase] |= {agent.name for agent, time in stop.clock.items() if time > start.clock.get(agent, 0)}

    run(f"--zero-stage {stage} --bf16", does=timed_steps)
    assert all(any("NCCL" in name for name in names) for names in waited_for.values()), waited_for


# ---- ends that are no end of a step


@pytest.mark.parametrize(
    ("how", "flags"),
    [
        ("after a step", "--zero-stage 2 --bf16 --offload-optimizer cpu"),
        ("after a forward", OFFLOADED),
        ("after a backward", OFFLOADED),
        ("after a step", ON_NVME),
        ("after a forward", ON_NVME),
        ("after a backward", ON_NVME),
    ],
)
def test_memory_of_an_engine_that_is_dropped_goes_back_when_copies_are_over(how, flags):
    links = []

    def stop(job: Job) -> None:
        step(job)
        links.append(ref(job.engine.homes.link))  # which every home holds
        if how != "after a step":
            loss = job.engine(ids(), targets=ids()).mean()
            if how == "after a backward":
                job.engine.backward(loss)

    cuda = run(flags, does=stop)
    assert links[0]() is None, "nobody has the engine any more"
    assert not cuda.races, "\n".join(cuda.races)


def test_memory_of_a_crossing_that_failed_goes_back_when_its_copies_are_over():
    cuda = PretendedCuda()

    def fail_halfway() -> None:
        way = link.Link.to(ACCELERATOR, pin=True).to_host
        pages, x = cuda.aligned_empty(32, pin=True), torch.ones(8, device=ACCELERATOR)

        def work() -> None:
            pages.view(torch.float32).copy_(x, non_blocking=True)
            raise torch.OutOfMemoryError("no memory for the next piece")

        way.start(work, on_device=[x], on_host=[pages])

    with cuda.installed(), FakeTensorMode(), cuda:
        with suppress(torch.OutOfMemoryError):
            fail_halfway()
        gc.collect()
    assert not cuda.races, "\n".join(cuda.races)
