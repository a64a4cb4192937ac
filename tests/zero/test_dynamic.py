"""What users do between two steps: evaluate, fail, unfreeze, compile, call a part; under every stage, against plain torch."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import megazero.activation_checkpointing as ours
from megazero import comm, mpu, utils
from megazero.engine import Engine, EngineStateError
from megazero.optim.loss_scaler import LossScaler
from megazero.zero import GatheredParameters, ZeroConfig, build
from megazero.zero.gradient import Gradient
from megazero.zero.registry import bucket_of
from megazero.zero.waiting import Waiting
from tests.comm.ways import use_one_lane
from tests.ranks import run_ranks
from tests.zero.models import (
    APART,
    OPTIMIZERS,
    SHARING,
    Block,
    EmptyUnitToy,
    HalfUsedBlock,
    Toy,
    Wide,
    call,
    compare,
    fresh,
    full_grad,
    make_engine,
    my_batch,
    one_step,
    token_batches,
    train,
)

STAGES = (0, 1, 2, 3)


def same_weights(engine, want: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(engine.state_dict(), want, rtol=0, atol=0)


def evaluation_case() -> None:
    mpu.initialize_model_parallel(1)
    plain = fresh(0)
    for step in range(3):
        one_step(plain, my_batch(step))
    want = plain.state_dict()
    expected = [float(plain(my_batch(i)).detach()) for i in range(2)]
    for stage in STAGES:
        engine = fresh(stage)
        for step in range(3):
            loss = engine(my_batch(step))
            with torch.no_grad():  # between forward and backward
                engine.eval()(my_batch(0))
                engine.train()
            engine.backward(loss)
            with torch.inference_mode():  # between backward and step
                engine(my_batch(1))
            engine.step()
        same_weights(engine, want)
        with torch.no_grad():
            assert [float(engine(my_batch(i))) for i in range(2)] == expected, "prediction with the sharded parameters"
        if stage == 3:
            assert not any(bucket.weights.is_allocated for bucket in engine.buckets), "no full copy is left behind"


@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluation_in_between_changes_nothing(world_size):
    run_ranks(world_size, evaluation_case)


class Failing(Block):
    fails = False

    def forward(self, x):
        if Failing.fails:
            Failing.input = weakref.ref(x)
            raise ArithmeticError("on purpose")
        return super().forward(x)


def exception_case() -> None:
    mpu.initialize_model_parallel(1)
    plain = fresh(0)
    one_step(plain, my_batch())
    want = copy.deepcopy(plain.state_dict())
    one_step(plain, my_batch(1))
    want_next = plain.state_dict()
    for stage in STAGES:
        engine = fresh(stage, toy={"block": Failing})
        for context in (torch.enable_grad(), torch.no_grad()):
            Failing.fails = True
            with pytest.raises(ArithmeticError), context:
                engine(my_batch())
            Failing.fails = False
            gc.collect()
            assert Failing.input() is None, "a smaller batch may need its memory, and that of its graph"
        # Of the loss, or of a parameter: reductions are under way when its gradient comes.
        for late, discard in ((None, engine.zero_grad), (engine.module.blocks[0].up.weight, engine.skip_step)):
            loss = engine(my_batch())
            handle = (loss if late is None else late).register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(loss)
            handle.remove()
            for act in (lambda e: e.backward(e(my_batch())), lambda e: e.grad_norms(), lambda e: e.step()):
                with pytest.raises(EngineStateError, match=r"failed.*engine.zero_grad\(\) on every rank"):
                    act(engine)
            discard()
            engine(my_batch()).backward()  # not the engine's: its gradients are dropped
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(Gradient, "_allocated", lambda _: 1 / 0)  # there is no memory for G
            engine.backward(engine(my_batch()))
        engine.zero_grad()  # of a gradient that has not got into G, too
        engine.channel.reset_traffic()
        one_step(engine, my_batch())
        same_weights(engine, want)
        sent = engine.channel.traffic
        assert sent["all_reduce"].collectives + sent["reduce_scatter"].collectives == len(engine.buckets)  # each once
        engine.backward(engine(my_batch()))  # has reduced everything at stages 2 and 3
        handle = engine.module.blocks[1].up.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.backward(engine(my_batch()))
        with pytest.raises(EngineStateError, match="no gradients to apply"):
            engine.step()
        handle.remove()
        engine.zero_grad()  # also of sums that were set aside when the second loss's gradients came
        one_step(engine, my_batch(1))
        same_weights(engine, want_next)


def test_exceptions_in_forward_and_backward_leave_an_engine_that_trains_on():
    run_ranks(2, exception_case)


def unfreeze_case(stage: int) -> None:
    """Against torch, whose optimizer makes a parameter's state when its first gradient comes."""
    mpu.initialize_model_parallel(1)
    size = mpu.get_data_parallel_world_size()
    torch.manual_seed(0)
    plain, model = Toy(), Toy()
    model.load_state_dict(plain.state_dict())
    phases = [
        lambda m: m.blocks[0].requires_grad_(False) and m.norm.requires_grad_(False),
        lambda m: m.blocks[0].requires_grad_(True),
        lambda m: (m.norm.requires_grad_(True), m.blocks[2].up.requires_grad_(False)),
    ]
    for m in (plain, model):
        m.unused.requires_grad_(False)
        phases[0](m)
    adam = OPTIMIZERS["adamw"]([{"params": list(plain.parameters()), "weight_decay": 0.0}])
    engine = make_engine(model, stage, decay=0.0)
    for phase in phases:
        phase(plain)
        phase(model)
        engine(my_batch()).backward()  # not the engine's: dropped, also of what is trained from now on
        for step in range(2):
            batch = token_batches(3, 1, size)[step, 0]
            adam.zero_grad()
            (sum(plain(x) for x in batch) / size).backward()
            adam.step()
            one_step(engine, batch[mpu.get_data_parallel_rank()])
    torch.testing.assert_close(engine.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_unfreezing_and_freezing_later_trains_as_torch_does(stage):
    run_ranks(2, unfreeze_case, stage)


def add_hooks(model: Toy) -> None:
    """Hooks that change what goes through a block and a parameter's gradient, and read weights of the block meanwhile."""
    for block in model.blocks:
        block.up.weight.register_hook(lambda grad: 2 * grad)
        block.register_forward_pre_hook(
            lambda block, args: (args[0] + args[0] @ block.up.weight.t() @ block.up.weight,)
        )
        block.register_forward_hook(lambda block, _, y: y + y @ block.up.weight.t() @ block.up.weight)
        block.register_full_backward_hook(
            lambda block, grads, _: (grads[0] @ block.up.weight.detach().t() @ block.up.weight.detach(),)
        )


def hooks_case(before: bool) -> None:
    mpu.initialize_model_parallel(1)
    size = mpu.get_data_parallel_world_size()
    for stage in STAGES:
        torch.manual_seed(0)
        plain = Toy()
        model = copy.deepcopy(plain)
        add_hooks(plain)
        if before:
            add_hooks(model)
        engine = make_engine(model, stage, optimizer="sgd", decay=0.0)
        if not before:
            add_hooks(model)
        sgd = OPTIMIZERS["sgd"](plain.parameters())
        for batch in token_batches(3, 1, size)[:, 0]:
            sgd.zero_grad()
            (sum(plain(x) for x in batch) / size).backward()
            sgd.step()
            one_step(engine, batch[mpu.get_data_parallel_rank()])
        torch.testing.assert_close(engine.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_the_script_work_as_in_torch_whether_they_came_before_the_engine_or_after(before):
    run_ranks(2, hooks_case, before)


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)  # rather than run without a graph, unnoticed
def compile_case(ways: dict[str, tuple[int, ...]]) -> None:
    mpu.initialize_model_parallel(1)
    plain = fresh(0)
    batches = token_batches(3, 1, mpu.get_data_parallel_world_size())
    want = dict(train(plain, batches))
    for how, stages in ways.items():
        torch._dynamo.reset()
        for stage in stages:
            torch.manual_seed(0)
            model = Toy()
            if how == "model":
                model.compile(backend="aot_eager")
            for block in model.blocks if how != "model" else ():
                if how == "module":
                    block.compile(backend="aot_eager")
                else:
                    block.forward = torch.compile(block.forward, backend="aot_eager")
            got = dict(train(make_engine(model, stage), batches))
            for key, value in want.items():
                what = f"{how}, stage {stage}: {key}: "
                torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, what=what: what + m)
        assert torch._dynamo.utils.counters["frames"].pop("ok", 0), f"nothing was compiled: {how}"


@pytest.mark.parametrize(
    "ways",
    [
        {"module": STAGES, "forward": (3,), "model": (2, 3)},
        pytest.param({"forward": STAGES, "model": STAGES}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_blocks_and_models_train_as_plain_ones(ways):
    """By the module, by its forward, and as a whole."""
    run_ranks(2, compile_case, ways)


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def compiled_engine_case(stages: tuple[int, ...]) -> None:
    mpu.initialize_model_parallel(1)
    plain = fresh(0)
    expected = [float(one_step(plain, my_batch(i))) for i in range(3)]
    for stage, whole in product(stages, (False, True)):
        torch._dynamo.reset()
        engine = fresh(stage)
        forward = engine if whole else torch.compile(engine, backend="aot_eager")

        def step(batch, engine=engine, forward=forward):
            loss = engine.backward(forward(batch))
            engine.step()
            return loss

        step = torch.compile(step, backend="aot_eager") if whole else step
        assert [float(step(my_batch(i))) for i in range(3)] == pytest.approx(expected, rel=1e-5), f"{stage=} {whole=}"
        torch.testing.assert_close(engine.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"], f"nothing was compiled: {stage=} {whole=}"


@pytest.mark.parametrize("stages", [(1, 3), pytest.param((0, 2), marks=pytest.mark.slow)], ids=str)
def test_a_compiled_engine_and_a_compiled_step_train_as_plain_ones(stages):
    run_ranks(2, compiled_engine_case, stages)


def part_case() -> None:
    """Calling a part of the model, and a second forward before the backward."""
    mpu.initialize_model_parallel(1)
    results = []
    for stage in STAGES:
        engine = fresh(stage)
        model = engine.module
        x = model.embedding(my_batch())  # a module of the root, alone
        y = model.norm(model.blocks[1](x))
        engine.backward(y.square().mean())
        engine.step()
        first, second = engine(my_batch(1)), engine(my_batch(2))
        engine.backward(first + second)
        grad = full_grad(engine, "blocks.0.up.weight")
        engine.step()
        results.append((grad, engine.state_dict()))
    for grad, state in results[1:]:
        assert torch.equal(grad, results[0][0])
        assert all(torch.equal(value, results[0][1][name]) for name, value in state.items())


def test_parts_of_a_model_and_two_forwards_before_a_backward():
    run_ranks(2, part_case)


class Prompt(nn.Module):
    """Parameters that a list holds, which has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((4,), 2.0) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales[0] * self.scales[1]


def test_a_part_of_the_root_that_holds_its_parameters_in_a_list_runs_alone(one_rank):
    model = nn.ModuleDict({"prompt": Prompt(), "blocks": nn.ModuleList([Block(4), Block(4)])})
    engine, x = make_engine(model, 3), torch.ones(2, 4, requires_grad=True)
    y = engine.module["prompt"](x)
    engine.backward(y.sum())
    assert torch.equal(y, torch.full((2, 4), 4.0)) and torch.equal(x.grad, y)
    assert torch.equal(full_grad(engine, "prompt.scales.0"), torch.full((4,), 4.0))


class PartlyRecomputed(Block):
    """The first half is recomputed in a backward of its own, whose gradients come once for each run of the block."""

    def forward(self, x):
        return x + self.down(checkpoint(self.first, x, use_reentrant=True))

    def first(self, x):
        return F.gelu(self.up(self.norm(x)))


class PartlyUsed(PartlyRecomputed):
    """The rank that uses all of it has reduced it before the second gradients come, and the other rank has not."""

    def __init__(self, h: int) -> None:
        super().__init__(h)
        self.scale = nn.Parameter(torch.ones(h))

    def forward(self, x):
        return super().forward(x) * (self.scale if mpu.get_data_parallel_rank() == 0 else 1)


class Alternating(Block):
    """Each of its layers gets a gradient from every other run alone, and on one rank one of them from none."""

    def __init__(self, h: int) -> None:
        super().__init__(h)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        h = x.shape[-1]
        if self.runs % 2 == 0:
            return x + self.down(F.pad(x, (0, self.down.in_features - h)))
        return x + (self.up(x)[..., :h] if mpu.get_data_parallel_rank() == 0 else x)


def partly_recomputed_case(block: type[nn.Module], stages: tuple[int, ...], shared: bool) -> None:
    mpu.initialize_model_parallel(1)
    results = []
    for stage in stages:
        engine = fresh(stage, toy={"block": block, "shared": shared})
        for step in range(2):
            loss = engine(my_batch(step))
            engine.backward(loss if shared else loss + engine(my_batch(step + 1)))
            grad = full_grad(engine, "blocks.1.up.weight")
            engine.step()
        results.append((grad, engine.state_dict()))
    for grad, state in results[1:]:
        torch.testing.assert_close(grad, results[0][0])
        torch.testing.assert_close(state, results[0][1])


@pytest.mark.parametrize(("block", "stages"), [(PartlyRecomputed, STAGES), (PartlyUsed, (0, 1, 2))])
@pytest.mark.parametrize("shared", [False, True])
def test_a_part_of_a_block_is_recomputed_for_each_of_two_runs(block, stages, shared):
    run_ranks(2, partly_recomputed_case, block, stages, shared)


@pytest.mark.parametrize("shared", [False, True])
def test_a_block_that_uses_another_layer_in_each_of_two_runs_has_all_gradients(shared):
    run_ranks(2, partly_recomputed_case, Alternating, STAGES, shared)


def part_frozen_case(dtype: torch.dtype) -> None:
    """The engine itself is not called after requires_grad has changed."""
    mpu.initialize_model_parallel(1)
    results = []
    for stage in STAGES:
        engine = fresh(stage, dtype=dtype)
        one_step(engine, my_batch())
        model, states = engine.module, [engine.state_dict()]
        for requires_grad in (False, True):
            model.blocks[0].requires_grad_(requires_grad)
            engine.backward(model.blocks[1](model.blocks[0](model.embedding(my_batch()))).square().mean())
            engine.step()
            states.append(engine.state_dict())
        up = [[state[f"blocks.{i}.up.weight"] for state in states] for i in range(2)]
        assert torch.equal(up[0][0], up[0][1]), "no weight decay of what is frozen"
        assert not torch.equal(up[0][1], up[0][2]) and not torch.equal(up[1][0], up[1][1])
        results.append(states[-1])
    for state in results[1:]:
        assert all(torch.equal(value, results[0][name]) for name, value in state.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_freezing_is_followed_where_only_a_part_of_the_model_is_called_afterwards(dtype):
    run_ranks(2, part_frozen_case, dtype)


def late_boundary_case() -> None:
    """Two micro-batches make a step, and nothing has said at their backwards that the second is the last."""
    mpu.initialize_model_parallel(1)
    counted = fresh(0, gradient_accumulation_steps=2)
    for index in range(2):
        one_step(counted, my_batch(index))
    for stage in STAGES:
        engine = fresh(stage, gradient_accumulation_steps=2)
        engine.set_gradient_accumulation_boundary(False)
        for index in range(2):
            engine.backward(engine(my_batch(index)))
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        same_sum(engine, counted)
    for stage in (0, 1):
        engine = fresh(stage)
        with engine.no_sync():
            for index in range(2):
                engine.backward(engine(my_batch(index)) / 2)
        engine.step()
        same_sum(engine, counted)


def same_sum(engine, counted) -> None:
    """The weights of two engines, of which one has added micro-batches up before it added ranks up."""
    torch.testing.assert_close(engine.state_dict(), counted.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_step_that_the_script_calls_for_after_the_last_backward_has_all_ranks_gradients():
    run_ranks(2, late_boundary_case)


class DownOnly(Block):
    """The weights that are frozen come first, so that they are needed after the last gradient of a trained one has come."""

    def __init__(self, h: int = 5) -> None:
        super().__init__(h)
        self.norm.requires_grad_(False)
        self.up.requires_grad_(False)


def frozen_case() -> None:
    mpu.initialize_model_parallel(1)
    results = []
    for stage in STAGES:
        engine = fresh(stage, toy={"block": DownOnly})
        loss = engine(my_batch())
        engine.backward(loss, retain_graph=True)
        engine.backward(2 * loss)
        engine.step()
        first, second = engine(my_batch(1)), engine(my_batch(2))
        engine.backward(first)
        engine.backward(second)
        engine.step()
        ways = (("create_graph", False), ("retain_graph", False), ("create_graph", True))
        for (way, empties), end in product(ways, (engine.step, engine.skip_step)):
            inputs: list[torch.Tensor] = []
            with engine.module.blocks[0].register_forward_pre_hook(lambda _, args, seen=inputs: seen.append(args[0])):
                loss = engine(my_batch())
            (slope,) = torch.autograd.grad(loss, inputs, **{way: True})
            engine.backward(loss + slope.square().sum())
            if empties:  # also of what a graph made by the backward reads
                engine.empty_partition_cache()
                assert stage < 3 or not any(bucket.weights.is_allocated for bucket in engine.buckets)
            end()
            assert stage < 3 or not any(bucket.weights.is_allocated for bucket in engine.buckets), "frozen ones too"
        late = fresh(stage)
        one_step(late, my_batch())
        for block in late.module.blocks:
            block.norm.requires_grad_(False)
            block.up.requires_grad_(False)
        one_step(late, my_batch(1))
        hooked = fresh(stage, toy={"block": DownOnly, "run": "ours, by hooks"})
        loss = hooked(my_batch())
        hooked.backward(loss, retain_graph=True)
        hooked.backward(2 * loss)  # recomputes what its forward, before the last backward, has run
        hooked.step()
        results.append((engine.state_dict(), late.state_dict(), hooked.state_dict()))
    for states in results[1:]:
        for state, want in zip(states, results[0], strict=True):
            assert all(torch.equal(value, want[name]) for name, value in state.items())


def test_frozen_weights_are_whole_until_nothing_needs_them():
    """Where they are frozen later, one graph has two backwards, torch.autograd.grad goes first, or two forwards come first."""
    run_ranks(2, frozen_case)


def test_neighbors_without_padding_between_them_keep_their_own_count_of_steps(one_rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    adamw = OPTIMIZERS["adamw"]([{"params": list(plain.parameters()), "weight_decay": 0.1}])
    engine = make_engine(model, 1, zero_units=[])
    assert len(engine.buckets) == 1
    for is_trained in (True, False, True, True):
        for one in (model, plain):
            one[0].requires_grad_(is_trained)
        engine.backward(engine(x).square().mean())
        engine.step()
        adamw.zero_grad()
        plain(x).square().mean().backward()
        adamw.step()
    torch.testing.assert_close(engine.state_dict(), dict(plain.state_dict()), rtol=1e-6, atol=1e-7)


def access_case(dtype: torch.dtype) -> None:
    mpu.initialize_model_parallel(1)
    traces = []
    for stage in STAGES:
        torch.manual_seed(0)
        engine = make_engine(Toy(), stage, dtype=dtype, loss_scaler=LossScaler(64.0))
        model = engine.module
        weight, frozen = model.blocks[1].up.weight, nn.Linear(2, 2).weight
        assert utils.safe_get_full_grad(weight) is None
        assert utils.safe_get_full_optimizer_state(weight, "exp_avg") is None
        assert utils.safe_get_full_fp32_param(frozen) is None and utils.safe_get_full_grad(frozen) is None
        assert utils.safe_get_local_fp32_param(frozen) is None and utils.safe_get_local_grad(frozen) is None
        for put in (utils.safe_set_full_fp32_param, utils.safe_set_local_fp32_param):
            with pytest.raises(ValueError, match="not trained by an engine"):
                put(frozen, torch.ones(2, 2))
        with pytest.raises(KeyError, match="no state 'exp_avg'"):
            utils.safe_set_local_optimizer_state(frozen, torch.ones(4), "exp_avg")
        engine.backward(engine(my_batch()))
        grad = utils.safe_get_full_grad(weight)
        utils.safe_set_full_grad(weight, 2 * grad)
        torch.testing.assert_close(utils.safe_get_full_grad(weight), 2 * grad)
        local = utils.safe_get_local_grad(weight)
        utils.safe_set_local_grad(weight, 2 * local)
        torch.testing.assert_close(utils.safe_get_full_grad(weight), 4 * grad)
        engine.zero_grad()
        assert utils.safe_get_full_grad(weight) is None
        for put in (utils.safe_set_full_grad, utils.safe_set_local_grad):
            with pytest.raises(RuntimeError, match="there is no gradient"):
                put(weight, torch.ones(15, 5))
        one_step(engine, my_batch())
        moment = utils.safe_get_full_optimizer_state(weight, "exp_avg")
        assert moment.shape == (15, 5) and moment.abs().sum() > 0
        parts = utils.safe_get_local_optimizer_state(weight, "exp_avg")
        assert parts.numel() <= 75 and utils.safe_get_local_fp32_param(weight).numel() == parts.numel()
        utils.safe_set_full_optimizer_state(weight, torch.full((15, 5), 0.25, requires_grad=True), "exp_avg")
        assert not bucket_of(weight).states["exp_avg"].resident.requires_grad
        assert (utils.safe_get_full_optimizer_state(weight, "exp_avg") == 0.25).all()
        utils.safe_set_local_optimizer_state(weight, torch.full_like(parts, 0.5), "exp_avg")
        assert (utils.safe_get_full_optimizer_state(weight, "exp_avg") == 0.5).all()
        utils.safe_set_full_fp32_param(weight, torch.full((15, 5), 0.1))
        assert (utils.safe_get_full_fp32_param(weight) == torch.full((), 0.1)).all()
        assert (engine.state_dict()["blocks.1.up.weight"] == torch.tensor(0.1).to(dtype)).all()
        utils.safe_set_local_fp32_param(weight, torch.full_like(parts, 0.2))
        assert (engine.state_dict()["blocks.1.up.weight"] == torch.tensor(0.2).to(dtype)).all()
        utils.safe_set_local_optimizer_state(weight, torch.full_like(parts, 0.3), "master")
        assert (engine.state_dict()["blocks.1.up.weight"] == torch.tensor(0.3).to(dtype)).all()
        one_step(engine, my_batch(1))
        with pytest.raises(ValueError, match="shape"):
            utils.safe_set_full_fp32_param(weight, torch.ones(2))
        with pytest.raises(KeyError, match="no state 'speed'"):
            utils.safe_set_full_optimizer_state(weight, torch.ones(15, 5), "speed")
        traces.append((grad, moment, engine.state_dict()["blocks.1.up.weight"]))
    for trace in traces[1:]:
        assert all(torch.equal(a, b) for a, b in zip(trace, traces[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_and_local_values_of_weights_gradients_and_moments(dtype):
    run_ranks(2, access_case, dtype)


def cut_case(stage: int) -> None:
    mpu.initialize_model_parallel(1)
    engine = fresh(stage, model=Wide())
    one_step(engine, my_batch())
    weight, values = engine.module.blocks[1][2].weight, torch.arange(67.0 * 149).view(67, 149)
    for key in ("exp_avg", "master"):
        utils.safe_set_full_optimizer_state(weight, values, key)
        part = utils.safe_get_local_optimizer_state(weight, key)
        assert 0 < part.numel() < values.numel()
        with pytest.raises(ValueError, match="this rank's part of the parameter has shape"):
            utils.safe_set_local_optimizer_state(weight, values.view(-1), key)
        utils.safe_set_local_optimizer_state(weight, 2 * part, key)
        assert torch.equal(utils.safe_get_full_optimizer_state(weight, key), 2 * values)


@pytest.mark.parametrize("stage", [1, 3])
def test_each_rank_sets_its_part_of_a_state_that_lies_on_both(stage):
    run_ranks(2, cut_case, stage)


def stateless_case() -> None:
    mpu.initialize_model_parallel(1)
    for stage in STAGES:
        engine = make_engine(EmptyUnitToy(), stage, zero=SHARING)
        weight, nothing = engine.module.blocks[0].up.weight, engine.module.blocks[1].nothing
        weight.requires_grad_(False)  # in a bucket whose other parameters are trained
        one_step(engine, my_batch())
        assert utils.safe_get_full_optimizer_state(weight, "exp_avg") is None
        assert utils.safe_get_local_optimizer_state(weight, "exp_avg") is None
        weight.requires_grad_(True)
        engine(my_batch())
        with pytest.raises(KeyError, match=r"no state 'exp_avg' of blocks\.0\.up\.weight: it has \[\], after a step"):
            utils.safe_set_full_optimizer_state(weight, torch.ones(15, 5), "exp_avg")
        part = utils.safe_get_local_fp32_param(weight)
        with pytest.raises(KeyError, match="no state 'exp_avg' of"):
            utils.safe_set_local_optimizer_state(weight, torch.ones_like(part), "exp_avg")
        if stage < 3:  # its bucket has other parameters
            utils.safe_set_full_optimizer_state(nothing, torch.ones_like(nothing), "exp_avg")
            assert utils.safe_get_full_optimizer_state(nothing, "exp_avg").numel() == 0


def test_a_state_that_does_not_exist_yet_is_none_and_cannot_be_set():
    run_ranks(2, stateless_case)


def test_a_gradient_that_is_set_in_fp16_does_not_overflow_by_the_loss_scale(one_rank):
    engine = make_engine(Toy(), 2, loss_scaler=LossScaler(65536.0))
    engine.backward(engine(my_batch()))
    weight = engine.module.norm.weight
    for set_grad in (utils.safe_set_full_grad, utils.safe_set_local_grad):
        set_grad(weight, torch.full((5,), 2.0, dtype=torch.float16))
        assert (utils.safe_get_full_grad(weight) == 2.0).all()
        utils.safe_set_full_grad(weight, torch.zeros(5))


def test_a_states_keys_are_exchanged_for_the_parameters_own_bucket_alone(one_rank, monkeypatch):
    engine = fresh(1)
    one_step(engine, my_batch())
    sent = []
    gathered = comm.all_gathered_objects
    monkeypatch.setattr(comm, "all_gathered_objects", lambda value, *rest: sent.append(value) or gathered(value, *rest))
    weight = engine.module.blocks[1].up.weight
    moment = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    utils.safe_set_full_optimizer_state(weight, moment, "exp_avg")
    utils.safe_get_local_optimizer_state(weight, "exp_avg")
    assert sent == 3 * [[["exp_avg", "exp_avg_sq"]]] and len(engine.buckets) > 1


def straggler_case(folder: str) -> None:
    mpu.initialize_model_parallel(1, timeout_s=5.0)
    engine = fresh(3)
    one_step(engine, my_batch())
    engine.save_checkpoint(folder)
    engine = fresh(3)
    engine.load_checkpoint(folder)
    if mpu.get_data_parallel_rank() == 0:
        with pytest.raises(
            RuntimeError, match=r"rank 0, step 2, unit '(root|blocks.\d)': waiting for its parameters failed"
        ):
            engine(my_batch())
    torch.distributed.barrier()


def own_error_case() -> None:
    mpu.initialize_model_parallel(1)
    engine = fresh(1)
    engine.backward(engine(my_batch()))

    def fail(*_: object) -> None:
        raise NotImplementedError("no kernel for this dtype")

    engine.optimizer.torch_optimizer.register_step_pre_hook(fail)
    with pytest.raises(NotImplementedError, match="^no kernel for this dtype$"):
        engine.step()


def test_an_error_of_the_optimizers_own_keeps_its_class_and_text():
    run_ranks(2, own_error_case)


@pytest.mark.parametrize(
    ("ranks", "kind", "is_explained"),
    [
        (2, RuntimeError, True),
        (2, torch.distributed.DistBackendError, True),
        (1, RuntimeError, False),
        (2, torch.OutOfMemoryError, False),
        (2, comm.OtherRankError, False),
    ],
)
def test_errors_of_collectives_and_no_others_are_explained_where_there_are_other_ranks(
    one_rank, monkeypatch, ranks, kind, is_explained
):
    def fail() -> None:
        raise kind("as it is")

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: ranks)
    said = r"rank 0, step 1, a gather failed\..*\(as it is\)" if is_explained else "as it is"
    with pytest.raises(kind if not is_explained else RuntimeError, match=f"^{said}$"):
        Waiting().until(fail, "a gather")


def test_what_a_graph_has_kept_is_gathered_anew_once_its_values_are_set(one_rank):
    engine = make_engine(nn.Sequential(Block(4), Block(4)), 3)
    image = torch.ones(2, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(engine(image).sum(), image, create_graph=True)
    bias = engine.module[1].down.bias
    utils.safe_set_full_fp32_param(bias, torch.full((4,), 100.0))
    assert engine(image).min() > 50, slope


def test_a_forward_on_one_rank_only_names_rank_step_and_unit(tmp_path):
    run_ranks(2, straggler_case, str(tmp_path))


class Choosing(nn.Module):
    """Runs one of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](x)


class Experts(nn.Module):
    """Experts that lie in no block, so that each is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.choosing, self.head = Choosing(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.head(self.choosing(x, expert)).square().mean()


def expert_case() -> None:
    """Each rank runs another expert, which gets the mean over ranks of what they bring."""
    mpu.initialize_model_parallel(1, timeout_s=5.0)
    grads = []
    for stage in STAGES:
        torch.manual_seed(0)
        engine = make_engine(Experts(), stage, zero_units=[Choosing])
        engine.backward(engine(torch.ones(2, 4), mpu.get_data_parallel_rank()))
        grads.append([full_grad(engine, f"choosing.experts.{index}.weight") for index in range(2)])
        engine.destroy()
    for stage in (0, 1):  # they need not be one unit where each rank accumulates alone first
        torch.manual_seed(0)
        engine = make_engine(Experts(), stage)
        with engine.no_sync():
            engine.backward(engine(torch.ones(2, 4), mpu.get_data_parallel_rank()))
        engine.allreduce_gradients()
        grads.append([full_grad(engine, f"choosing.experts.{index}.weight") for index in range(2)])
        engine.destroy()
    assert all(grad.any() for grad in grads[0])
    assert all(torch.equal(*pair) for other in grads for pair in zip(other, grads[0], strict=True))
    engine = make_engine(Experts(), 3)
    with pytest.raises(RuntimeError, match=r"unit 'choosing.experts.\d'.*mixture of experts.*zero_units=\[...\]"):
        engine.backward(engine(torch.ones(2, 4), mpu.get_data_parallel_rank()))


def test_experts_that_ranks_choose_apart_train_as_one_unit_and_are_named_as_several():
    run_ranks(2, expert_case)


class Mixture(nn.Module):
    """A unit whose second expert gets no tokens on the second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, y = self.router(x).softmax(-1), x + self.experts[0](x) * 0.5
        return y if torch.distributed.get_rank() == 1 else y + self.experts[1](x) * gate[:, 1:]


class AroundMixture(nn.Module):
    """Runs its units in this order, some under a checkpoint of this kind."""

    def __init__(self, order: str, run: str) -> None:
        super().__init__()
        self.order, self.run, self.first = order, run, nn.Linear(4, 4)
        self.units = nn.ModuleList([Block(4), Mixture(), Block(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for name in self.order:
            unit = self.units["amb".index(name.lower())]
            x = call(self.run if name.isupper() else "plain", unit, x)
        return x.square().mean()


class RawBehind(nn.Module):
    """Blocks under a checkpoint of this kind, then units that get raw data."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self.run, self.first = run, nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))
        self.units = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for block in self.blocks:
            y = call(self.run, block, y)
        for unit in self.units:
            y = y + unit(x)
        return y.square().mean()


def mixture_case(make: Callable[[], nn.Module], **zero: bool) -> None:
    use_one_lane()
    mpu.initialize_model_parallel(1, timeout_s=10.0)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(mpu.get_data_parallel_rank()))
    torch.manual_seed(0)
    plain = make()
    plain(x).backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}
    want = {name: comm.all_reduced(grad, comm.world()) / 2 for name, grad in grads.items()}
    for stage in STAGES:
        torch.manual_seed(0)
        engine = make_engine(make(), stage, zero=zero)
        for _ in range(2):
            engine.backward(engine(x))
            for name, grad in want.items():
                torch.testing.assert_close(full_grad(engine, name), grad, msg=f"stage {stage}: {name}")
            engine.zero_grad()
            engine(x).backward()  # not the engine's
        engine.destroy()


@pytest.mark.parametrize("run", ["reentrant", "ours", "nonreentrant"])
@pytest.mark.parametrize("order", ["amb", "bma", "mab", "amA", "aMa", "amMA", "MaM", "bmaAB"])
def test_an_expert_that_one_rank_does_not_use_changes_nothing_of_what_the_ranks_exchange(order, run):
    run_ranks(2, mixture_case, partial(AroundMixture, order, run))


@pytest.mark.parametrize("run", ["reentrant", "ours", "nonreentrant", "ours, by hooks"])
def test_nor_does_it_in_a_unit_without_inputs_behind_a_checkpoint(run):
    """Where a rank waits for each sum, the others have to be there before they gather anything more."""
    run_ranks(2, partial(mixture_case, overlap_comm=False), partial(RawBehind, run))


def test_an_engine_that_trains_nothing_keeps_nothing_of_its_forwards(one_rank):
    """As one whose gradients with respect to an image are asked for."""
    model = nn.Sequential(Block(4), Block(4)).requires_grad_(False)
    engine = Engine(model, mpu.get_groups(), None, {}, [], zero=ZeroConfig(stage=3))
    image = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        engine(image).sum().backward()
    runs = engine.schedule._runs
    assert not runs._order and not runs._untold and not runs._leaf_handles
    assert not image._backward_hooks


def test_a_backward_of_others_releases_what_it_has_gathered_also_after_one_that_failed(one_rank):
    engine = make_engine(nn.Sequential(Block(4), Block(4)), 3)
    image = torch.ones(2, 4, requires_grad=True)
    for fails in (True, False, False):
        loss = engine(image).sum()
        if fails:
            handle = image.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            handle.remove()
        else:
            loss.backward()
            assert not any(bucket.weights.is_allocated for bucket in engine.buckets)


def test_an_input_that_stays_keeps_nothing_of_the_runs_that_got_it(one_rank):
    """As an image that is trained, or one that is looked at after an interrupted step."""
    engine = make_engine(nn.Sequential(Block(4), Block(4)), 3)
    image = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        engine.backward(engine(image).sum())
        engine.step()
        assert not image._backward_hooks and not engine.schedule._runs._leaf_handles
    engine(image)
    assert image._backward_hooks
    engine.destroy()
    assert not image._backward_hooks


class ConditionedMixture(Mixture):
    """Has frozen weights beside those that one rank does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.router.requires_grad_(False)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        return super().forward(x + condition)


class Conditioned(nn.Module):
    """Mixtures that all get one tensor, which a layer has made or which is a parameter; or raw data, without a gradient.

    Each gets the output of the one before as well, unless it is a branch of its own beside the others.
    """

    def __init__(self, run: str, kind: str) -> None:
        super().__init__()
        self.run, self.kind = run, kind
        self.first, self.bias = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.units = nn.ModuleList(ConditionedMixture() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run = {"plain": lambda unit, *args: unit(*args), "ours": ours.checkpoint}.get(self.run, checkpoint)
        more = {"use_reentrant": False} if run is checkpoint else {}
        is_branch = self.kind in ("raw", "made, branches")
        condition = {"parameter": self.bias, "raw": x}.get(self.kind, self.first(x))
        y = self.first(x)
        for unit in self.units:
            out = run(unit, x if is_branch else y, condition, **more)
            y = y + out if is_branch else out
        return y.square().mean()


def conditioned_case(run: str, kind: str) -> None:
    use_one_lane()
    mpu.initialize_model_parallel(1, timeout_s=10.0)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(mpu.get_data_parallel_rank()))
    weights = []
    for stage in (0, 2, 3):
        torch.manual_seed(0)
        engine = make_engine(Conditioned(run, kind), stage)
        units = [bucket for bucket in engine.buckets if bucket.unit >= 0]
        most = 0

        def look(_: torch.Tensor, units: list = units) -> None:
            nonlocal most
            most = max(most, len({bucket.unit for bucket in units if bucket.weights.is_allocated}))

        for step in range(2):
            if kind == "made":
                engine(x)  # no backward follows, as where a script evaluates without no_grad
            loss = engine(x + step)
            handles = [p.register_hook(look) for p in engine.module.parameters() if p.requires_grad]
            engine.backward(loss)
            for handle in handles:
                handle.remove()
            engine.step()
        assert stage < 3 or most <= 2, "the unit whose backward runs, and the next one"
        assert len(engine.module.bias._backward_hooks or ()) <= 1, "runs that are over have left none"
        weights.append(engine.state_dict())
        kept, module = [weakref.ref(bucket) for bucket in engine.buckets], engine.module
        engine.destroy()
        del engine, units, look, handles, loss
        gc.collect()
        assert not any(bucket() for bucket in kept), f"{type(module).__name__}'s hooks keep an engine that is gone"
    for state in weights[1:]:
        assert all(torch.equal(value, weights[0][name]) for name, value in state.items())


@pytest.mark.parametrize(
    ("run", "kind"),
    [*product(["plain", "nonreentrant"], ["made", "made, branches", "parameter", "raw"]), ("ours", "raw")],
)
def test_units_that_all_get_one_input_are_done_one_by_one(run, kind):
    """Also where one rank does not use all of them, or they are partly frozen; nothing of it is left when the engine is gone."""
    run_ranks(2, conditioned_case, run, kind)


class ReadsLast(nn.Module):
    """Reads a part of the last unit, which is still whole then, without owning it."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self.run, self.first = run, nn.Linear(4, 4)
        self.units = nn.ModuleList([Block(4), Block(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for unit in self.units:
            x = call(self.run, unit, x)
        return (x + self.units[1].down(self.units[1].up(x))).square().mean()


def reads_last_case(run: str) -> None:
    mpu.initialize_model_parallel(1)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(mpu.get_data_parallel_rank()))
    grads = []
    for stage in (0, 3):
        torch.manual_seed(0)
        engine = make_engine(ReadsLast(run), stage)
        loss = engine(x)
        with torch.no_grad():
            engine(x + 1)  # a moving target, or a number for the log
        engine.backward(loss)
        grads.append({name: full_grad(engine, name) for name, _ in engine.module.named_parameters()})
        engine.destroy()
    compare(grads[1], grads[0], run, bitwise=True)


@pytest.mark.parametrize("run", ["plain", "reentrant", "ours", "nonreentrant"])
def test_a_part_of_the_last_unit_that_the_model_reads_itself_is_there_until_its_backward(run):
    run_ranks(2, reads_last_case, run)


def twice_case() -> None:
    mpu.initialize_model_parallel(1)
    engine = make_engine(ReadsLast("plain"), 3)
    loss = engine(torch.ones(6, 4))
    engine.backward(loss, retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"call megazero.zero.register_external_parameter\(module, .*at version 2147483649"
    ):
        engine.backward(loss)


def test_a_read_that_nobody_has_noticed_is_explained_where_it_is_missed():
    run_ranks(2, twice_case)


class ReadsBy(nn.Module):
    """Reads its unit's weight, which is still whole then, by a function."""

    def __init__(self, unit: nn.Module, read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.unit, self.read, self.scale = unit, read, nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.unit(x * self.scale), self.unit.weight).square().mean()


@pytest.mark.parametrize(
    ("unit", "read"),
    [
        (nn.Linear(8, 8), lambda x, weight: x @ weight),
        (nn.Linear(8, 8), lambda x, weight: weight @ x),
        (nn.Linear(8, 8), lambda x, weight: weight @ x[0]),
        (nn.LayerNorm(8), lambda x, weight: x @ weight),
        (nn.LayerNorm(8), lambda x, weight: torch.addr(x, x[0], weight)),
        (nn.Conv1d(8, 8, 1), F.conv1d),
        (nn.LayerNorm(8), lambda x, weight: F.layer_norm(x, (8,), weight)),
        (nn.GroupNorm(2, 8), lambda x, weight: F.group_norm(x, 2, weight)),
        (nn.GroupNorm(2, 8), torch.mul),
    ],
)
def test_an_unnoticed_read_is_explained_whatever_torch_says_of_it(one_rank, unit, read):
    missed(unit, read, saved_tensors_hooks(lambda x: x, lambda x: x))  # which hide the version


@pytest.mark.parametrize(
    ("unit", "read"),
    [
        (nn.LayerNorm(8), lambda x, weight: x * weight[:8]),
        (nn.LayerNorm(8), lambda x, weight: torch.outer(weight, x[0])),
        (nn.LayerNorm(8), F.prelu),
        (nn.LayerNorm(8), lambda x, weight: F.batch_norm(x, None, None, weight, training=True)),
        (nn.Linear(8, 8), torch.cdist),
    ],
    ids=["view", "outer", "prelu", "batch_norm", "cdist"],
)
def test_an_unnoticed_read_of_what_a_kernel_would_read_unchecked_is_refused(one_rank, unit, read):
    missed(unit, read, nullcontext())


def missed(unit: nn.Module, read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], around: Any) -> None:
    engine = make_engine(ReadsBy(unit, read), 3, zero_units=[unit])
    with around:
        loss = engine(torch.randn(8, 8))
    engine.backward(loss, retain_graph=True)
    with pytest.raises(RuntimeError, match="call megazero.zero.register_external_parameter"):
        engine.backward(loss)


@pytest.mark.parametrize(
    ("stage", "kind", "said"),
    [
        (3, RuntimeError, "the user's own"),
        (2, RuntimeError, "a matrix of size [0]"),
        (3, RuntimeError, "mat1 and mat2 shapes cannot be multiplied (0x8 and 5x1)"),
        (3, RuntimeError, "Function OwnBackward returned an invalid gradient at index 0 - got [0] but expected shape"),
        (3, NotImplementedError, "setStorage"),
    ],
)
def test_other_errors_of_a_backward_are_not_put_down_to_a_read(one_rank, stage, kind, said):
    def fail(_: torch.Tensor) -> None:
        raise kind(said)

    engine = make_engine(Toy(), stage)
    loss = engine(my_batch())
    loss.register_hook(fail)
    with pytest.raises(kind, match=f"^{re.escape(said)}$"):
        engine.backward(loss)


class LeavesAside(Block):
    """Leaves a term of the loss in an attribute; its backward comes before that of what the block returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.aside = self.down(self.up(x)).square().mean()
        return y


def aside_case() -> None:
    mpu.initialize_model_parallel(1)
    engine = make_engine(nn.Sequential(*[LeavesAside(4) for _ in range(3)]), 3)
    loss = engine(torch.ones(6, 4)).mean() + sum(block.aside for block in engine.module)
    with pytest.raises(RuntimeError, match=r"other than through what it returns \(an attribute"):
        engine.backward(loss)
    engine.zero_grad()
    with torch.no_grad():
        engine(torch.ones(6, 4))
    for block in engine.module:
        block.aside = 0
    engine.backward(engine(torch.ones(6, 4)).mean())
    engine.step()


def test_a_backward_of_a_unit_whose_parameters_are_on_their_way_is_refused():
    run_ranks(2, aside_case)


def penalty_case() -> None:
    """A term of the script's own, with its backward inside of GatheredParameters, and outside."""
    mpu.initialize_model_parallel(1)
    grads = []
    for stage in (0, 3):
        torch.manual_seed(0)
        engine = make_engine(ReadsLast("plain"), stage)
        parameters = list(engine.module.parameters())
        loss = engine(torch.ones(6, 4))
        with GatheredParameters(parameters):
            engine.backward(loss + 0.1 * sum(p.pow(2).sum() for p in parameters))
        grads.append({name: full_grad(engine, name) for name, _ in engine.module.named_parameters()})
        if stage == 3:
            loss = engine(torch.ones(6, 4))
            with GatheredParameters(parameters):
                loss = loss + sum(p.pow(2).sum() for p in parameters)
            with pytest.raises(RuntimeError, match="inside of GatheredParameters: call backward inside of it, too"):
                engine.backward(loss)
        engine.destroy()
    compare(grads[1], grads[0], "penalty", bitwise=False)


def test_a_penalty_on_gathered_parameters_counts_and_a_late_backward_is_explained():
    run_ranks(2, penalty_case)


def early_penalty_case() -> None:
    """The backward of a term from before the forward comes last: a unit counts as unused what that term alone reaches."""
    mpu.initialize_model_parallel(1)
    for stage in (0, 1, 2):
        engine = fresh(stage, toy={"block": HalfUsedBlock})
        penalty = engine.module.blocks[1].extra.weight.square().sum()
        engine.backward(penalty + engine(my_batch()))
        want = 2 * engine.module.blocks[1].extra.weight.detach()
        torch.testing.assert_close(full_grad(engine, "blocks.1.extra.weight"), want)


def test_the_gradient_of_a_penalty_that_comes_after_its_unit_was_reduced_counts():
    run_ranks(2, early_penalty_case)


class Backwards(nn.Module):
    """Runs its layers from the last one to the first, without some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, left_out: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        for index in reversed(range(3)):
            x = x if index in left_out else self.layers[index](x)
        return x.square().mean()


def backwards_case() -> None:
    """The unit whose backward is the first says nothing of those that share its bucket, which other ranks do not run."""
    mpu.initialize_model_parallel(1, timeout_s=5.0)
    left_out = ((), (1, 2))[mpu.get_data_parallel_rank()]
    for stage in (0, 1, 2):
        grads = []
        for zero, count in ((APART, 4), (SHARING, 2)):
            torch.manual_seed(0)
            engine = make_engine(Backwards(), stage, zero=zero)
            engine.channel.reset_traffic()
            engine.backward(engine(torch.ones(2, 4), left_out))
            assert sum(traffic.collectives for traffic in engine.channel.traffic.values()) == count
            grads.append({name: full_grad(engine, name) for name in dict(engine.module.named_parameters())})
            engine.destroy()
        assert all(torch.equal(grad, grads[0][name]) and grad.any() for name, grad in grads[1].items())


def test_units_that_share_a_bucket_and_run_in_another_order_are_reduced_once_also_where_ranks_leave_some_out():
    run_ranks(2, backwards_case)


def save_alone_case(folder: str) -> None:
    mpu.initialize_model_parallel(1, timeout_s=5.0)
    engine = fresh(1)
    if mpu.get_data_parallel_rank() == 0:
        with pytest.raises(RuntimeError, match="save_checkpoint"):
            engine.save_checkpoint(folder)
    torch.distributed.barrier()


def test_a_checkpoint_saved_on_one_rank_only_is_reported(tmp_path):
    run_ranks(2, save_alone_case, str(tmp_path))


def test_a_model_has_one_engine_at_a_time(one_rank):
    model = Toy()
    engine = make_engine(model, 2)
    with pytest.raises(ValueError, match=r"belong to another engine already.*destroy\(\).*build the model anew"):
        make_engine(model, 2)
    engine.destroy()
    again = make_engine(model, 3)
    one_step(again, my_batch())
    again.destroy()
    assert all(p.numel() for p in model.parameters())


def test_an_engine_that_is_destroyed_again_leaves_the_models_next_one_and_its_own_optimizer_alone(one_rank):
    model = Toy()
    first = make_engine(model, 2)
    groups = first.optimizer.param_groups
    first.destroy()
    second = make_engine(model, 2)
    first.destroy()
    one_step(second, my_batch())
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize("stage", STAGES[:3])
def test_a_model_of_whole_parameters_keeps_no_engine_that_is_dropped(stage, one_rank):
    model = Toy()
    engine = make_engine(model, stage)
    one_step(engine, my_batch())
    kept = [weakref.ref(bucket) for bucket in engine.buckets]
    del engine
    gc.collect()
    assert not any(bucket() for bucket in kept)
    model(my_batch()).backward()
    assert model.embedding.weight.grad is not None, "nobody takes it"


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_gets_another_engine_where_the_first_could_not_be_made(stage, is_left, one_rank):
    plain = fresh(0)
    one_step(plain, my_batch())
    torch.manual_seed(0)
    model = Toy()
    with pytest.raises(ZeroDivisionError) as error:
        make_engine(model, stage, lr_scheduler=lambda _: 1 / 0)
    if not is_left:
        del error  # else its traceback holds on to the engine, as in a notebook
    gc.collect()
    engine = make_engine(model, stage)
    one_step(engine, my_batch())
    same_weights(engine, plain.state_dict())


def test_what_is_cast_and_written_between_engines_that_are_not_completed_is_kept(one_rank, monkeypatch):
    model = Toy()
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ZeroDivisionError):
        make_engine(model, 0, zero=SHARING, dtype=torch.bfloat16, lr_scheduler=lambda _: 1 / 0)
    with torch.no_grad():
        want["norm.weight"] = model.norm.weight.fill_(0.5).float()
    model.norm.bias.data = want["norm.bias"] = torch.full((5,), 0.3)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):  # when some parameters have moved to other buckets
        patch.setattr(build, "_sum_of_bits", Mock(side_effect=[torch.zeros(()), MemoryError]))
        make_engine(model, 3, dtype=torch.bfloat16)
    make_engine(model, 3, dtype=torch.bfloat16)
    assert all(torch.equal(utils.safe_get_full_fp32_param(p), want[name]) for name, p in model.named_parameters())


def test_units_can_be_given_and_wrong_ones_are_named(one_rank):
    engine = make_engine(Toy(), 3, zero_units=[nn.Linear])
    assert sorted({b.name for b in engine.buckets}) == sorted(
        [f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")] + ["root"]
    )
    one_step(engine, my_batch())
    with pytest.raises(ValueError, match="'blocks.0.up' lies inside of 'blocks.0'"):
        make_engine(Toy(), 3, zero_units=[Block, nn.Linear])
    for absent, named in ((nn.Conv1d, "Conv1d"), (nn.Linear(1, 1), "Linear")):
        with pytest.raises(ValueError, match=f"names {named}, which the model does not contain"):
            make_engine(Toy(), 3, zero_units=[nn.Linear, absent])
    with pytest.raises(TypeError, match=r"zero_units is .*Linear.*such as zero_units=\[Block\]"):
        make_engine(Toy(), 3, zero_units=nn.Linear)
