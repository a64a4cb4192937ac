"""Bytes held per rank: the engine against its design's table and the ZeRO paper's, counted from storages; and the planner."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import megazero.activation_checkpointing as checkpointing
from megazero import mpu, zero
from megazero.engine import Engine
from megazero.zero.config import ZeroConfig
from megazero.zero.memory import memory_rows, plan_memory
from tests.ranks import run_ranks
from tests.zero.models import APART, FrozenToy, HalfUsedBlock, Toy, make_engine, step, token_batches

STAGES = (0, 1, 2, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Deep(Toy):
    """Enough equal blocks for all that may be whole at the same time, and a root that is larger than one."""

    def __init__(
        self, run: str = "plain", blocks: int = 5, block: type[nn.Module] | None = None, vocabulary: int = 100
    ) -> None:
        super().__init__(run, vocabulary=vocabulary, **({"block": block} if block else {}))
        self.blocks.extend(type(self.blocks[0])(5) for _ in range(blocks - len(self.blocks)))


class SmallRoot(Deep):
    """Blocks that are larger than the root, all of whose parameters get a gradient."""

    def __init__(self) -> None:
        super().__init__(vocabulary=34)
        self.unused = None


class Untied(Deep):
    """A head of its own, whose large gradient is the first to come."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def padded(entries: Iterable[int], ranks: int) -> int:
    """Elements of a bucket of parameters of these sizes: each begins on a multiple of 64, and shards are multiples of 64."""
    total = sum(-(-numel // 64) * 64 for numel in entries)
    return -(-total // (64 * ranks)) * 64 * ranks


def padded_numel(model: Toy, ranks: int) -> int:
    """psi with padding, of a model that trains all of its parameters: one bucket per block, and the root."""
    blocks = [[p.numel() for p in block.parameters()] for block in model.blocks]
    root = [p.numel() for name, p in model.named_parameters() if not name.startswith("blocks.")]
    return sum(padded(entries, ranks) for entries in [*blocks, root])


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    return bytes_of(tensor.untyped_storage() for tensor in tensors)


def bytes_of(storages: Iterable[torch.UntypedStorage]) -> int:
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def live_bytes() -> int:
    """Bytes of all floating-point tensors alive in the process, save scalars and what `gc.freeze` has set aside."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    storages = [floats_of(tensor) for tensor in tensors]
    return bytes_of(storage for storage in storages if storage is not None)


def floats_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a floating-point tensor with dimensions; None if it is another, or gone.

    The collector lists tensors, too, of which only a thread of gloo holds the values. When that drops them, torch 2.8 leaves
    the listed tensor undefined: it has no dtype any more.
    """
    try:
        return tensor.untyped_storage() if tensor.dtype.is_floating_point and tensor.ndim > 0 else None
    except RuntimeError:
        with pytest.raises(RuntimeError, match="unsupported scalarType"):
            _ = tensor.dtype
        return None


def in_buckets(engine: Engine) -> list[Tensor]:
    """Every tensor that a bucket refers to, gradients that are being reduced and vectors in memory included."""
    holders = [*engine.buckets, *(bucket.weights for bucket in engine.buckets)]
    gradients = [bucket.gradient for bucket in engine.buckets if bucket.is_trainable]
    values = [value for holder in (*holders, *gradients) for value in vars(holder).values()]
    values += [tensor for gradient in gradients for tensor in (*gradient.held, *gradient.buffers)]
    values += [vector for bucket in engine.buckets for vector in bucket.states.values()]
    found = [value if isinstance(value, Tensor) else getattr(value, "resident", None) for value in values]
    return [tensor for tensor in found if tensor is not None]


def held_now(engine: Engine) -> int:
    """Bytes of everything that buckets and optimizer refer to at this moment."""
    tensors = in_buckets(engine)
    tensors += [value for state in engine.optimizer.state.values() for value in state.values()]
    tensors += [piece.master.grad for piece in engine.optimizer.slices if piece.master.grad is not None]
    return storage_bytes(tensors)


def counter_bytes(engine: Engine) -> int:
    """Of the optimizer's state, what is not per element: Adam's step counter, one number for each flat slice."""
    return sum(v.nbytes for state in engine.optimizer.state.values() for v in state.values() if v.ndim == 0)


def backward(engine: Engine, batch: Tensor) -> None:
    engine.backward(engine(batch[mpu.get_data_parallel_rank()]))


def table_of_the_design(stage: int, n: int, psi: int, dtype: str, grad_dtype: str) -> tuple[int, int, int]:
    """Bytes of P, G and O that stay on each of `n` ranks. fp32 parameters are the master weights; shards are cast of them."""
    p, o = {"fp32": (4, 8), "bf16": (2 if stage < 3 else 0, 12)}[dtype]
    g = 2 if grad_dtype == "compute" else 4
    return tuple(psi * each // (n if stage >= first else 1) for each, first in ((p, 3), (g, 2), (o, 1)))


def resting_case() -> None:
    n = mpu.initialize_model_parallel(1).data_parallel_size
    for stage in STAGES:
        for dtype, grad_dtype in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "compute")):
            what = f"stage {stage}, {dtype}, gradients in {grad_dtype}, {n} ranks"
            settings = {"dtype": DTYPES[dtype], "zero": {"grad_dtype": grad_dtype}}
            gc.collect()
            gc.freeze()
            model = Toy()
            psi = padded_numel(model, n)
            plan = plan_memory(model, ZeroConfig(stage, grad_dtype, **APART), data_parallel_size=n, dtype=DTYPES[dtype])
            assert plan.numel == sum(p.numel() for p in model.parameters()), what
            engine = make_engine(model, stage, **settings)
            start = engine.memory()
            assert (start["P"], start["G"], start["O"]) == (plan.parameters, 0, plan.master), what
            step(engine, 1)
            counters = counter_bytes(engine)
            assert counters == 4 * len(engine.optimizer.slices)
            backward(engine, token_batches(1, 1, n)[0, 0])
            memory = engine.memory()
            held = (memory["P"], memory["G"], memory["O"] - counters)
            assert held == table_of_the_design(stage, n, psi, dtype, grad_dtype), what
            assert held == (plan.parameters, plan.gradients, plan.optimizer) and memory["buffers"] == 0, what
            if dtype == "bf16" and grad_dtype == "compute":
                paper = (16 * psi, 4 * psi + 12 * psi // n, 2 * psi + 14 * psi // n, 16 * psi // n)
                # The paper keeps shards in 16 bits beside their master weights.
                twice = 2 * psi // n if stage == 3 else 0
                assert sum(held) == plan.resident == paper[stage] - twice, what
            assert all(bucket.weights.is_gathered == (stage < 3) for bucket in engine.buckets), what
            assert held_now(engine) == sum(memory.values()), what
            assert live_bytes() == sum(held), f"{what}: something else is held"
            engine.step()
            assert engine.memory()["G"] == 0, what
            assert live_bytes() == plan.at_rest, f"{what}: something else is held between steps"
            engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bytes_held_equal_the_table_and_the_plan_and_nothing_else_is_alive(world_size):
    run_ranks(world_size, resting_case)


def frozen_case() -> None:
    n = mpu.initialize_model_parallel(1).data_parallel_size
    for stage in STAGES:
        model = FrozenToy()
        plan = plan_memory(model, ZeroConfig(stage, **APART), data_parallel_size=n, dtype=torch.bfloat16)
        engine = make_engine(model, stage, dtype=torch.bfloat16)
        frozen = sum(bucket.layout.numel for bucket in engine.buckets if not bucket.is_trainable)
        trained = sum(bucket.layout.numel for bucket in engine.buckets if bucket.is_trainable)
        step(engine)
        backward(engine, token_batches(1, 1, n)[0, 0])
        held = engine.memory()
        shards = [n if stage >= first else 1 for first in (1, 2, 3)]
        in_16_bits = frozen if stage == 3 else frozen + trained  # the others are cast of the master weights
        assert held["P"] == plan.parameters == 2 * in_16_bits // shards[2]
        assert held["G"] == plan.gradients == 4 * trained // shards[1]
        assert held["O"] - counter_bytes(engine) == plan.optimizer == 12 * trained // shards[0]


def test_frozen_parameters_have_no_gradients_and_no_optimizer_state():
    run_ranks(2, frozen_case)


# ---- during a step


def sampled(engine: Engine, run: Callable[[], None], measure: Callable[[Engine], int] = held_now) -> int:
    """The most that is held while `run` does its work, seen at every module's and every gradient's hook and at every update."""
    samples: list[int] = []

    def sample(*_: object) -> None:
        samples.append(measure(engine))

    # Hooks of every optimizer: one with hooks of its own is not stepped bucket by bucket.
    handles = [register_optimizer_step_pre_hook(sample), register_optimizer_step_post_hook(sample)]
    for module in engine.module.modules():
        handles += [module.register_forward_pre_hook(sample), module.register_forward_hook(sample)]
    for module in engine.module.blocks.modules():
        handles.append(module.register_full_backward_hook(sample))
    for parameter in engine.module.parameters():
        handles += [parameter.register_hook(sample), parameter.register_post_accumulate_grad_hook(sample)]
    run()
    for handle in handles:
        handle.remove()
    return max(samples)


SETTINGS = [
    {},
    {"overlap_comm": False},
    {"grad_dtype": "compute"},
    {"reduce_dtype": "compute"},
    {"grad_dtype": "compute", "reduce_dtype": "fp32"},
]


def check_peak(model: Deep, stage: int, settings: dict) -> None:
    n = mpu.get_data_parallel_world_size()
    plan = plan_memory(model, ZeroConfig(stage, **{**APART, **settings}), data_parallel_size=n, dtype=torch.bfloat16)
    engine = make_engine(model, stage, zero=settings, dtype=torch.bfloat16, gradient_accumulation_steps=3)
    step(engine, 3)  # the optimizer's state is there from now on
    counters = counter_bytes(engine)
    at_rest = plan.at_rest + counters
    buffers = 0

    def held_too(engine: Engine) -> int:
        nonlocal buffers
        buffers = max(buffers, engine.memory()["buffers"])
        return held_now(engine)

    peak = sampled(engine, lambda: step(engine, 3), held_too) - counters
    what = f"{model.run}, stage {stage}, {settings}, {n} ranks"
    assert buffers <= plan.transient, f"{what}: buffers of {buffers}, planned {plan}"
    if "reduce_dtype" in settings:
        # The largest buffer apart is that of the root, which no hook sees; and one rank's are gone at once.
        assert plan.resident + (n > 1) <= peak <= plan.peak, f"{what}: held {peak}, planned {plan}"
    else:
        assert peak == plan.peak, f"{what}: held {peak}, planned {plan}"
    assert held_now(engine) == at_rest, f"{what}: something stays after the step"
    if stage == 3:
        with torch.no_grad():
            seen = sampled(engine, lambda: engine(token_batches(1, 1, 1)[0, 0, 0])) - at_rest
        assert seen == plan.gathered, f"{what}: an evaluation held {seen} on top, planned {plan}"
        assert held_now(engine) == at_rest and not any(bucket.weights.is_gathered for bucket in engine.buckets), what
    engine.destroy()


def peak_case() -> None:
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    for stage in STAGES:
        for settings in SETTINGS:
            check_peak(Deep(), stage, settings)
    for stage in (2, 3):
        for model in (SmallRoot, Untied):
            check_peak(model(), stage, {})
    for run in ("reentrant", "nonreentrant", "ours", "ours, by hooks"):
        for stage in (2, 3):
            check_peak(Deep(run), stage, {})


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_most_that_a_step_holds_is_what_was_planned_and_nothing_stays(world_size):
    run_ranks(world_size, peak_case)


class Chunked(Deep):
    """Recomputes `together` blocks in one piece."""

    together = 1

    def forward(self, tokens: Tensor) -> Tensor:
        blocks = [list(self.blocks)[i : i + self.together] for i in range(0, len(self.blocks), self.together)]
        x = self.embedding(tokens)
        for chunk in blocks:
            x = checkpointing.checkpoint(nn.Sequential(*chunk), x)
        return (self.norm(x) @ self.embedding.weight.t()).float().logsumexp(-1).mean()


def test_blocks_that_are_recomputed_together_are_whole_together(one_rank):
    mpu.model_parallel_cuda_manual_seed(1)
    for together in (1, 2, 4):
        model = Chunked(blocks=8)
        model.together = together
        plan = plan_memory(
            model, ZeroConfig(3), data_parallel_size=1, dtype=torch.bfloat16, recomputed_together=together
        )
        engine = make_engine(model, 3, dtype=torch.bfloat16)
        step(engine)
        units = [bucket for bucket in engine.buckets if bucket.name != "root"]
        count = sampled(
            engine, lambda engine=engine: step(engine), lambda _, units=units: sum(b.weights.is_gathered for b in units)
        )
        assert count in (together, together + 1)  # the next one may still be on its way
        peak = sampled(engine, lambda engine=engine: step(engine)) - counter_bytes(engine)
        assert peak <= plan.peak
        assert together > 1 or plan.peak - plan.gradients <= peak, "one micro-batch: shards are made as it goes"
        engine.destroy()


def test_an_unused_parameter_in_every_block_costs_no_more_memory(one_rank):
    check_peak(Deep(block=HalfUsedBlock), 3, {})


def test_buckets_count_gradients_on_their_way(one_rank):
    engine = make_engine(Deep(), 2, dtype=torch.bfloat16)

    def not_counted(engine: Engine) -> int:  # of what buckets refer to
        return storage_bytes(in_buckets(engine)) - sum(sum(bucket.nbytes.values()) for bucket in engine.buckets)

    assert sampled(engine, lambda: step(engine), not_counted) == 0


def init_case() -> None:
    n = mpu.initialize_model_parallel(1).data_parallel_size
    gc.freeze()
    context = zero.Init(dtype=torch.bfloat16)
    with context:
        model = Deep()
    shards = sum(padded([p.ds_numel for p in module.parameters(recurse=False)], n) for module in model.modules()) // n
    assert live_bytes() == 2 * shards, "zero.Init keeps more than its shards"
    with zero.GatheredParameters(model.parameters(), modifier_rank=0):
        assert live_bytes() == 2 * shards * (1 + n)
    until = time.monotonic() + 60
    while live_bytes() != 2 * shards and time.monotonic() < until:  # gloo's threads drop late what they have broadcast
        time.sleep(0.01)
    assert live_bytes() == 2 * shards, "GatheredParameters keeps more than the shards"
    plan = plan_memory(model, ZeroConfig(3), data_parallel_size=n, dtype=None)
    engine = make_engine(model, 3)
    step(engine)
    assert live_bytes() == plan.at_rest, "what zero.Init has built stays beside the engine's"
    with zero.GatheredParameters(model.parameters()):
        pass
    assert live_bytes() == plan.at_rest
    engine.destroy()


@pytest.mark.parametrize("world_size", [1, 3])
def test_init_and_gathered_parameters_release_what_they_gathered(world_size):
    run_ranks(world_size, init_case)


def test_a_destroyed_engine_leaves_the_plain_model_and_nothing_else(one_rank):
    gc.freeze()
    model = Deep()
    whole = sum(p.nbytes for p in model.parameters())
    engine = make_engine(model, 2)
    step(engine)
    engine.destroy()
    del engine
    try:
        assert live_bytes() == whole
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_states_of_a_destroyed_engine_go_with_it_before_the_collector_comes(one_rank, stage):
    gc.disable()
    try:
        for _ in range(2):  # what torch imports for the first one's optimizer may keep that one
            engine = make_engine(Deep(), stage)
            step(engine)
            states = [ref(vector.resident) for bucket in engine.buckets for vector in bucket.states.values()]
            assert len(states) == 3 * 6 and all(state() is not None for state in states)
            engine.destroy()
            del engine
        assert not any(state() is not None for state in states)
    finally:
        gc.enable()


def test_a_sharded_model_that_nobody_has_any_more_is_freed(one_rank):
    gc.freeze()
    with zero.Init():
        model = Deep()
    del model
    try:
        assert live_bytes() == 0
    finally:
        gc.unfreeze()


# ---- the table that a job prints


class Psi(nn.Module):
    """`numel` parameters on the meta device."""

    def __init__(self, numel: float, blocks: int = 50) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in range(blocks))
        for block in self.blocks:
            block.weight = nn.Parameter(torch.empty(int(numel) // blocks, device="meta"))


def test_rows_have_planned_beside_measured_and_say_what_comes_later():
    plan = plan_memory(Psi(1e9), ZeroConfig(1), data_parallel_size=4, dtype=torch.bfloat16)
    assert [" ".join(row).split() for row in memory_rows(plan, {})[:3]] == [
        "bytes per rank planned measured".split(),
        "parameters (P) 2.00 GB -".split(),
        "gradients (G) 4.00 GB -".split(),
    ]
    before = {"P": plan.parameters, "G": plan.gradients, "O": plan.master}
    rows = dict(memory_rows(plan, before))
    assert rows["optimizer (O)"].split("  (")[1] == "2.00 GB of it from the first step on)"
    assert rows["optimizer (O)"].split()[2:4] == ["1.00", "GB"] and rows["peak"].split()[-1] == "-"
    after = {**before, "O": plan.optimizer, "buffers": 10**6, "peak": 9 * 10**9}
    rows = dict(memory_rows(plan, after))
    assert rows["optimizer (O)"].split() == "3.00 GB 3.00 GB".split()
    assert rows["buffers, at most"].split() == "0 B 1.00 MB".split()
    assert rows["peak"].split() == "9.00 GB 9.00 GB".split()


@pytest.mark.parametrize("wrong", ["data_parallel_size", "states_per_element", "recomputed_together"])
def test_what_cannot_be_planned_is_refused(wrong):
    with pytest.raises(ValueError, match=wrong):
        plan_memory(nn.Linear(2, 2), ZeroConfig(1), **{"data_parallel_size": 2, "dtype": None, wrong: -1})
