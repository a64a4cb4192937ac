"""The engine against plain single-process torch: losses, gradients and updated weights, on 1 to 4 ranks."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from megazero import comm, mpu, utils, zero
from megazero.engine import Engine, weight_decay_groups
from megazero.optim.loss_scaler import LossScaler
from megazero.zero import build
from megazero.zero.bucket import Bucket
from megazero.zero.config import ZeroConfig
from megazero.zero.units import ROOT
from tests.model.plain_gpt2 import decay_groups
from tests.ranks import run_ranks
from tests.zero.models import OPTIMIZERS, Toy, full_grad, token_batches

STEPS, MICRO, CLIP = 3, 2, 0.5


def data(world_size: int) -> torch.Tensor:
    """[steps, micro-batches, ranks, b, s] token ids, where this rank computes."""
    return token_batches(STEPS, MICRO, world_size).to(comm.local_device())


def reference(world_size: int, optimizer: str, model: nn.Module):
    """Losses of every rank, clipped-away norms, gradients of the last step and final weights: torch alone, one process."""
    opt = OPTIMIZERS[optimizer](decay_groups(model, 0.1))
    losses, norms = [], []
    for step in data(world_size):
        opt.zero_grad()
        for batch in step:
            per_rank = [model(tokens) for tokens in batch]
            losses.append([float(loss.detach()) for loss in per_rank])
            (sum(per_rank) / world_size / MICRO).backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.grad = grads[name].clone()  # of unused ones too: the engine's are zero, so they decay like the others
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        opt.step()
    return losses, norms, grads, {n: p.detach() for n, p in model.named_parameters()}


def toy(run: str, shared: bool) -> nn.Module:
    torch.manual_seed(0)
    # Its embedding is so large that the norm's gradients, which come first, wait for that of its weight.
    return Toy(run, shared, vocabulary=100).to(comm.local_device())


def engine_case(optimizer: str, shared: bool = False, run: str = "plain", **zero) -> None:
    """Trains where this process computes; `zero` is the `ZeroConfig`, of stage 0 by default."""
    groups = mpu.initialize_model_parallel(1)
    world_size, rank = groups.data_parallel_size, groups.data_parallel_rank
    want_losses, want_norms, want_grads, want_weights = reference(world_size, optimizer, toy("plain", shared))
    model = toy(run, shared)
    engine = Engine(
        model,
        groups,
        OPTIMIZERS[optimizer],
        *weight_decay_groups(model, 0.1),
        clip_grad=CLIP,
        gradient_accumulation_steps=MICRO,
        zero=ZeroConfig(**{"stage": 0, **zero}),
    )
    losses, norms, grads = [], [], {}
    for step in data(world_size):
        for batch in step:
            loss = engine(batch[rank])
            losses.append(float(loss.detach()))
            engine.backward(loss)
            assert all(p.grad is None for p in model.parameters())
            if engine.is_gradient_accumulation_boundary():
                grads = {name: full_grad(engine, name) for name in want_grads}
            engine.step()
        norms.append(engine.get_global_grad_norm())
    assert engine.global_steps == STEPS and engine.micro_steps == STEPS * MICRO
    torch.testing.assert_close(torch.tensor(losses), torch.tensor([row[rank] for row in want_losses]))
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(want_norms))
    weights = engine.state_dict()  # on the CPU
    for name in want_weights:
        torch.testing.assert_close(grads[name].cpu(), want_grads[name].cpu(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights[name], want_weights[name].cpu(), rtol=1e-5, atol=2e-6)
    engine.destroy()
    mpu.destroy_model_parallel()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("shared", [False, True], ids=["", "one block used twice"])
def test_engine_equals_single_process_torch(world_size, optimizer, shared):
    run_ranks(world_size, engine_case, optimizer, shared)


def make_engine(model: nn.Module, **settings) -> Engine:
    factory = settings.pop("factory", OPTIMIZERS["sgd"])
    return Engine(model, mpu.get_groups(), factory, *weight_decay_groups(model, 0.0), **settings)


def late_gradient_case() -> None:
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    engine = make_engine(model)
    x = torch.randn(4, 3)
    (bucket,) = engine.buckets
    with engine.schedule.backward(is_last_micro_batch=True):
        model(x).sum().backward()  # completes the bucket, which is reduced
        assert not bucket.gradient.has_unreduced
        model(x).sum().backward()
    engine.schedule.finish_backward()
    torch.testing.assert_close(full_grad(engine, "weight"), 2 * x.sum(0).expand(2, 3))
    engine.backward(model(x).sum())  # a second loss before the step
    torch.testing.assert_close(full_grad(engine, "weight"), 3 * x.sum(0).expand(2, 3))


@pytest.mark.parametrize("world_size", [1, 2])
def test_late_gradient_of_a_reduced_bucket_is_added(world_size):
    """Reentrant recomputation, or a second loss, can fire a parameter's hook after its bucket was reduced."""
    run_ranks(world_size, late_gradient_case)


def two_losses_case() -> None:
    """Each loss reaches one of two buckets only; the other must keep its mean."""
    mpu.initialize_model_parallel(1)
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    torch.manual_seed(0)
    outer = nn.Module()
    outer.blocks = model
    for layer in model:
        nn.init.ones_(layer.weight)
    engine = make_engine(outer)
    for layer, value in zip(model, (2.0, 3.0), strict=True):
        engine.backward(layer(torch.full((1, 1), value)).sum())
    assert [full_grad(engine, f"blocks.{i}.weight").item() for i in range(2)] == [2.0, 3.0]


def test_two_losses_before_a_step_add_up_on_two_ranks():
    run_ranks(2, two_losses_case)


@pytest.mark.parametrize("owner", [lambda engine: engine, lambda engine: engine.optimizer])
def test_zero_grad_forgets_and_a_step_needs_a_backward(one_rank, owner):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    engine = make_engine(model)
    before = model.weight.detach().clone()
    engine.backward(engine(torch.full((1, 2), 100.0)).sum())
    owner(engine).zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match="call engine.backward"):
        engine.step()
    assert torch.equal(model.weight, before)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    with pytest.raises(RuntimeError, match="call engine.backward"):
        engine.step()


def different_weights_case() -> None:
    mpu.initialize_model_parallel(1)
    torch.manual_seed(torch.distributed.get_rank())
    with pytest.raises(ValueError, match="different weights"):
        make_engine(nn.Linear(2, 2))


def test_replicas_that_start_differently_are_refused_on_every_rank():
    run_ranks(2, different_weights_case)


def test_arguments_that_would_leave_a_model_untrained_or_unclipped_are_refused(one_rank):
    model, groups = nn.Linear(2, 2), mpu.get_groups()
    for grouped, said in (
        ({"weight": 0, "biass": 0}, "biass"),
        ({"weight": 0, "bias": 1}, "bias"),
        ({"weight": -1, "bias": 0}, "weight"),
    ):
        with pytest.raises(
            ValueError, match=rf"group_of has {said}: each name must be .* one of the 1 in group_settings"
        ):
            Engine(model, groups, OPTIMIZERS["sgd"], grouped, [{}])
    for clip_grad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="clip_grad must be a norm, or 0 for none, got"):
            make_engine(model, clip_grad=clip_grad)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"zero": 2}, r"zero must be megazero.zero.config.ZeroConfig \| None, got 2"),
        ({"dtype": "bf16"}, r"dtype must be torch.dtype \| None, got 'bf16'"),
        ({"clip_grad": "1"}, "clip_grad must be Real, got '1'"),
        ({"loss_scaler": 128}, "loss_scaler must be .*LossScaler"),
        ({"groups": mpu}, "groups must be ParallelGroups, got <module"),
        ({"optimizer_factory": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "optimizer_factory must be .*Callable"),
        ({"model": [nn.Linear(2, 2)]}, "model must be Module, got"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(one_rank, given, said):
    good = {
        "model": nn.Linear(2, 2),
        "groups": mpu.get_groups(),
        "optimizer_factory": OPTIMIZERS["sgd"],
        "group_of": {},
        "group_settings": [],
    }
    with pytest.raises(TypeError, match=f"Engine's {said}"):
        Engine(**{**good, **given})


class Named(nn.Module):
    """Linear layers of one shape, by name, and a root parameter."""

    def __init__(self, names: str, size: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(size, 2) for name in names})
        self.scale = nn.Parameter(torch.ones(2, dtype=dtype))


def different_models_case() -> None:
    mpu.initialize_model_parallel(1)
    is_second = torch.distributed.get_rank() == 1
    for first, second, named in (
        (Named("ab"), Named("ba"), r"layers.a.weight, layers.b.weight are not"),  # all have the same values
        (Named("ab"), Named("abc"), r"layers.c.bias, layers.c.weight are not"),
        (Named("a"), Named("a", size=3), r"layers.a.weight are not"),
        (Named("a"), Named("a", dtype=torch.bfloat16), r"scale are not"),
        (Named("a"), Named("a").requires_grad_(False), r"layers.a.bias, layers.a.weight, scale are not"),
    ):
        with pytest.raises(ValueError, match=f"different models: {named}"):
            make_engine(second if is_second else first)
    model, grouped = Named("a"), {"layers.a.weight": 0, "layers.a.bias": int(is_second), "scale": 1}
    with pytest.raises(ValueError, match=r"different models: layers.a.bias are not"):
        Engine(model, mpu.get_groups(), OPTIMIZERS["sgd"], grouped, [{}, {}])
    model = Named("ab")
    with pytest.raises(ValueError, match=r"different models: layers.b.bias, layers.b.weight are not"):
        make_engine(model, zero_units=[model.layers[name] for name in ("ab", "a")[is_second]])


def test_replicas_that_are_other_models_are_refused_on_every_rank():
    run_ranks(2, different_models_case)


def different_optimizers_case() -> None:
    mpu.initialize_model_parallel(1)
    is_second = torch.distributed.get_rank() == 1
    torch.manual_seed(0)
    sgd, adamw, lr = torch.optim.SGD, torch.optim.AdamW, r"param_groups\[0\]\['lr'\]"
    for first, second, said in (
        (adamw, sgd, rf"class \(here '{'SGD' if is_second else 'AdamW'}'\), param_groups"),
        (partial(sgd, lr=0.1), partial(sgd, lr=0.2), rf"{lr} \(here {0.2 if is_second else 0.1}\), param_groups"),
        (partial(sgd, lr=torch.tensor(0.5)), sgd, rf"{lr} \(here {0.001 if is_second else 0.5}\), param_groups"),
        (adamw, partial(adamw, betas=(0.9, 0.95)), r"param_groups\[0\]\['betas'\] \(here \(0.9, 0.9"),
    ):
        with pytest.raises(ValueError, match=f"different optimizers .*: {said}"):
            make_engine(nn.Linear(2, 2), factory=second if is_second else first)
    with pytest.raises(ValueError, match=rf"different optimizers .*{lr} \(here {0.6 if is_second else 0.3}\)"):
        make_engine(nn.Linear(2, 2), lr_scheduler=lambda o: LambdaLR(o.torch_optimizer, lambda _: 1.0 + is_second))
    more = [{}, {}, {"weight_decay": 0.1}] if is_second else [{}, {}]
    with pytest.raises(ValueError, match=r"different optimizers .*: param_groups\[2\]"):
        Engine(nn.Linear(2, 2), mpu.get_groups(), OPTIMIZERS["sgd"], {"weight": 0, "bias": 1}, more)


def test_ranks_with_other_optimizers_or_settings_are_refused():
    run_ranks(2, different_optimizers_case)


def lone_mistake_case() -> None:
    mpu.initialize_model_parallel(1)
    is_second = torch.distributed.get_rank() == 1

    def fails(_: object) -> None:
        if is_second:
            raise ValueError("own mistake")

    error, told = (ValueError, "") if is_second else (comm.OtherRankError, "rank 1 failed: ValueError: ")
    for mistake, said in (
        ({"factory": fails if is_second else OPTIMIZERS["sgd"]}, "own mistake"),
        ({"lr_scheduler": fails}, "own mistake"),
        ({"zero_units": [nn.Conv2d if is_second else nn.Linear]}, "zero_units names Conv2d"),
        ({"clip_grad": -1.0 if is_second else 0.0}, "clip_grad must be"),
        ({"gradient_accumulation_steps": 0 if is_second else 1}, "gradient_accumulation_steps must be"),
    ):
        with pytest.raises(error, match=told + said):
            make_engine(Named("a"), **mistake)
    grouped = {"biass" if is_second else "bias": 0}
    with pytest.raises(error, match=told + "group_of has biass"):
        Engine(nn.Linear(2, 2), mpu.get_groups(), OPTIMIZERS["sgd"], grouped, [{}])


def test_a_mistake_of_one_rank_is_an_error_on_all_of_them_at_once():
    run_ranks(2, lone_mistake_case, timeout_s=30)


def test_a_model_that_no_engine_could_be_made_for_is_not_kept(one_rank):
    """Its memory may be wanted for the next attempt, before Python looks for objects that refer to each other."""
    gc.collect()
    gc.disable()
    try:
        model = nn.Linear(2, 2)
        kept = weakref.ref(model)
        try:
            make_engine(model, factory=lambda _: 1 / 0)
        except ZeroDivisionError:
            del model
        assert kept() is None
    finally:
        gc.enable()


class CountedOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def compared_weights_case(other: int) -> int:
    channel, lowest = comm.Channel(torch.distributed.group.WORLD), -(1 << 63)
    sums = [torch.tensor(number) for number in (0, lowest, ~lowest)]
    with CountedOperations() as operations:
        build._check_replicas(sums, channel)
    sums[1] += other * (torch.distributed.get_rank() == 1)
    with pytest.raises(ValueError, match="different weights"):
        build._check_replicas(sums, channel)
    return operations.count


@pytest.mark.parametrize("other", [1, -1])
def test_the_weights_of_any_number_of_replicas_are_compared_in_equally_many_operations(other):
    assert len({count for size in (2, 4) for count in run_ranks(size, compared_weights_case, other)}) == 1


def no_memory_case(model_parallel_size: int) -> None:
    mpu.initialize_model_parallel(model_parallel_size)
    is_short, make_trainable, made = torch.distributed.get_rank() == 1, Bucket.make_trainable, []

    def pin(bucket: Bucket, whole: torch.Tensor) -> None:
        made.append(bucket.name)
        if is_short and len(made) == 2:
            raise MemoryError("no memory to pin")
        make_trainable(bucket, whole)

    with zero.Init():
        model = Toy()
    Bucket.make_trainable = pin
    error, told = (MemoryError, "") if is_short else (comm.OtherRankError, "rank 1 failed: MemoryError: ")
    with pytest.raises(error, match=told + "no memory to pin"):
        make_engine(model, zero=ZeroConfig(stage=3))


@pytest.mark.parametrize("model_parallel_size", [1, 2])
def test_a_rank_without_memory_for_its_states_is_an_error_on_all_of_them_at_once(model_parallel_size):
    run_ranks(2, no_memory_case, model_parallel_size, timeout_s=30)


def other_threads_case() -> None:
    """A rank on a host with other cores adds floats up in another order."""
    groups = mpu.initialize_model_parallel(1)
    torch.set_num_threads(1 + 2 * groups.data_parallel_rank)
    for seed in range(50):
        torch.manual_seed(seed)
        model = nn.Module()
        model.weight = nn.Parameter(torch.randn(5_000_003))
        sums = comm.all_gathered_objects(float(model.weight.detach().sum(dtype=torch.float64)))
        if sums[0] != sums[1]:
            return make_engine(model).destroy()
    raise AssertionError("there is nothing to try this with")


def test_replicas_that_start_alike_are_taken_whatever_computes_on_them():
    run_ranks(2, other_threads_case)


def max_norm_case() -> None:
    mpu.initialize_model_parallel(1)
    for module in (nn.Embedding(5, 3, max_norm=1.0), nn.EmbeddingBag(5, 3, max_norm=1.0)):
        with pytest.raises(ValueError, match=f"^1 is an {type(module).__name__} with max_norm=1.0, .* Drop max_norm"):
            make_engine(nn.Sequential(nn.Linear(1, 1), module))


def test_embeddings_that_each_rank_would_scale_by_what_it_looks_up_are_refused():
    run_ranks(2, max_norm_case)


def test_one_rank_may_scale_an_embedding_by_what_it_looks_up_and_trains_on_that(one_rank):
    model = nn.Embedding(5, 3, max_norm=1.0)
    engine = make_engine(model, factory=lambda groups: torch.optim.SGD(groups, lr=0.0))
    engine.backward(engine(torch.tensor([2])).sum())
    engine.step()
    assert engine.state_dict()["weight"][2].norm() <= 1.0 + 1e-6


def test_two_parameters_in_one_memory_are_refused(one_rank):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' are two parameters in one memory.*\.clone\(\)"):
        make_engine(model)


def test_a_model_under_torchs_data_parallelism_is_refused(one_rank):
    with pytest.raises(ValueError, match=r"^0 is under torch's DistributedDataParallel, which averages gradients"):
        make_engine(nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))))


def test_a_buffer_that_no_checkpoint_could_hold_is_refused(one_rank):
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match=r"The buffer 'graph' is a tensor of form sparse_coo, .*to_dense\(\)"):
        make_engine(model)


def test_a_model_that_was_made_in_inference_mode_is_refused(one_rank):
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    for use in (make_engine, zero.Init):
        with pytest.raises(ValueError, match=r"Parameter 'weight' was made under torch.inference_mode\(\)"):
            use(model)


def test_model_without_anything_to_train_is_refused(one_rank):
    with pytest.raises(ValueError, match="no trainable parameter"):
        make_engine(nn.Linear(2, 2).requires_grad_(False))


def test_bf16_weights_follow_fp32_master_weights(one_rank):
    """A bf16 weight moves by less than its own rounding at every step, and yet moves in the end."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    engine = make_engine(model, factory=lambda groups: torch.optim.SGD(groups, lr=2.0**-10))
    for _ in range(64):
        engine.backward(-model(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        engine.step()
    assert model.weight.item() == 1.0625


@pytest.mark.parametrize(("clip", "want"), [(0.0, 1.0), (0.25, 0.25), (4.0, 1.0)])
def test_gradients_are_scaled_to_the_largest_norm_only_where_they_exceed_it(one_rank, clip, want):
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    engine = make_engine(model, factory=lambda groups: torch.optim.SGD(groups, lr=1.0), clip_grad=clip)
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.step()
    assert engine.get_global_grad_norm() == 1.0
    assert before - model.weight.item() == pytest.approx(want, rel=1e-5)


def test_a_gradient_of_zero_moves_nothing(one_rank):
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    engine = make_engine(model, factory=lambda groups: torch.optim.SGD(groups, lr=1.0), clip_grad=1.0)
    engine.backward(engine(torch.zeros(1, 1)).sum())
    engine.step()
    assert engine.get_global_grad_norm() == 0.0 and model.weight.item() == before


def test_overflow_skips_step_and_halves_scale_and_a_clean_step_is_applied(one_rank, caplog):
    caplog.set_level("INFO")
    torch.manual_seed(0)
    model = nn.Linear(2, 1).half()
    scaler = LossScaler(2.0**16, dynamic=True, hysteresis=1)
    engine = make_engine(model, loss_scaler=scaler, lr_scheduler=lambda optimizer: CountingScheduler())
    before = model.weight.detach().clone()
    engine.backward(engine(torch.full((1, 2), 4.0).half()).float().sum())  # 2^16 is beyond fp16
    engine.step()
    assert engine.skipped_steps == 1 and not engine.was_step_applied() and engine.lr_scheduler.steps == 0
    assert engine.loss_scale() == 2.0**15 and torch.equal(model.weight, before)
    assert "gradient overflow in weight (rank 0's part): loss scale 65536 -> 32768, step skipped" in caplog.text
    engine.backward(engine(torch.full((1, 2), 0.25).half()).float().sum())
    engine.step()
    assert engine.was_step_applied() and engine.lr_scheduler.steps == 1
    torch.testing.assert_close(engine.get_global_grad_norm(), (2 * 0.25**2 + 1) ** 0.5)
    torch.testing.assert_close(model.weight.detach(), (before.float() - 0.3 * 0.25).half(), rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_is_left_out_counts_and_drops_its_gradients(one_rank, stage):
    weights = []
    for leaves_out in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        engine = make_engine(
            model,
            zero=ZeroConfig(stage=stage),
            gradient_accumulation_steps=2,
            lr_scheduler=lambda _: CountingScheduler(),
        )
        if leaves_out:
            engine.backward(engine(torch.full((1, 2), 9.0)).sum())
            engine.step()
            engine.skip_step()
            assert (engine.global_steps, engine.skipped_steps, engine.lr_scheduler.steps) == (1, 1, 1)
            assert not engine.was_step_applied()
        for _ in range(2):
            assert not engine.was_step_applied()
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
        assert engine.was_step_applied() and engine.skipped_steps == leaves_out
        weights.append(engine.module_state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("wide", [0, 1])
def test_master_weights_keep_what_16_bits_cannot_hold_of_each_fp32_parameter(one_rank, stage, wide):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1 - wide].to(torch.bfloat16)
    before = model[wide].weight.detach().clone()
    engine = make_engine(model, zero=ZeroConfig(stage=stage), zero_units=[], dtype=torch.bfloat16)
    assert len(engine.buckets) == 1 and torch.equal(utils.safe_get_full_fp32_param(engine.module[wide].weight), before)


class CountingScheduler:
    steps = 0

    def step(self):
        self.steps += 1


def test_frozen_parameters_stay_untouched_and_outside_the_buckets(one_rank):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    engine = make_engine(model)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert {s.name for b in engine.buckets if b.is_trainable for s in b.layout.segments} == {"1.weight", "1.bias"}
    assert torch.equal(model[0].weight, before)


def test_non_elementwise_optimizer_is_refused_by_name(one_rank):
    with pytest.raises(ValueError, match="LBFGS"):
        make_engine(nn.Linear(2, 2), factory=lambda groups: torch.optim.LBFGS(groups[0]["params"]))


class Wrapper(torch.optim.Optimizer):
    """Around another optimizer, without torch's constructor."""

    def __init__(self, groups: list) -> None:
        self.inner = torch.optim.SGD(groups)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


@pytest.mark.parametrize("factory", [Wrapper, lambda groups: None])
def test_an_optimizer_without_torchs_constructor_is_refused(one_rank, factory):
    with pytest.raises(TypeError, match=r"optimizer is a (Wrapper|NoneType) without .*super\(\).__init__"):
        make_engine(nn.Linear(2, 2), factory=factory, allow_untested_optimizer=True)


class TiedUnits(nn.Module):
    """Two units with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x).tanh())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_weight_that_units_share_is_the_roots_and_trains_as_in_plain_torch(one_rank, stage):
    torch.manual_seed(0)
    model, x = TiedUnits(), torch.randn(4, 3)
    plain = copy.deepcopy(model)
    sgd = OPTIMIZERS["sgd"](plain.parameters())
    engine = make_engine(model, zero=ZeroConfig(stage=stage))
    homes = {segment.name: bucket.plan.unit for bucket in engine.buckets for segment in bucket.layout.segments}
    assert homes["blocks.0.weight"] == ROOT != homes["blocks.0.bias"]
    for _ in range(3):
        loss, want = engine(x).square().sum(), plain(x).square().sum()
        torch.testing.assert_close(loss, want)
        engine.backward(loss)
        engine.step()
        sgd.zero_grad()
        want.backward()
        sgd.step()
    torch.testing.assert_close(engine.state_dict(), plain.state_dict())


def test_without_a_factory_nothing_is_trained_whatever_the_groups_say(one_rank):
    model = nn.Linear(2, 2)
    engine = Engine(model, mpu.get_groups(), None, *weight_decay_groups(model, 0.1))
    assert engine.optimizer is None and engine.memory()["G"] == engine.memory()["O"] == 0
    with pytest.raises(AssertionError, match="needs an optimizer"):
        engine.backward(engine(torch.ones(1, 2)).sum())


def test_backward_of_a_vector_says_what_it_wants(one_rank):
    model = nn.Linear(2, 2)
    with pytest.raises(AssertionError, match=r"scalar loss .* shape \(1, 2\)"):
        make_engine(model).backward(model(torch.ones(1, 2)))
