"""What users do to parameters behind the engine's back is kept or refused by name, never lost."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from megazero import mpu, utils, zero
from megazero.engine import Engine, EngineStateError, weight_decay_groups
from megazero.optim.loss_scaler import LossScaler
from megazero.zero.access import load_state_dict
from megazero.zero.config import ZeroConfig
from megazero.zero.weights import Weights
from tests.ranks import run_ranks
from tests.zero.models import (
    OPTIMIZERS,
    Block,
    Toy,
    compare,
    fresh,
    full_grad,
    make_engine,
    my_batch,
    one_step,
    run,
    token_batches,
)

STAGES = (0, 1, 2, 3)


def write_case(dtype: torch.dtype) -> None:
    mpu.initialize_model_parallel(1)
    for stage in STAGES[:3]:
        engine = fresh(stage, dtype=dtype, optimizer="sgd", decay=0.0)
        weight = engine.module.norm.weight
        with torch.no_grad():
            weight.fill_(7.0)  # on every rank, as weight clipping or load_state_dict does
        engine.backward(0.0 * engine(my_batch()))
        engine.step()
        assert (engine.state_dict()["norm.weight"] == 7.0).all()
        assert (utils.safe_get_full_fp32_param(weight) == 7.0).all()
        with torch.no_grad():
            weight.fill_(8.0)
        assert (utils.safe_get_local_fp32_param(weight) == 8.0).all(), "before a step has taken the values over"
        with torch.no_grad():
            weight.fill_(9.0)
        assert (utils.safe_get_full_fp32_param(weight) == 9.0).all()
        for repoint in (lambda w, _: setattr(w, "data", w.data.clone()), lambda _, model: model.double()):
            engine = fresh(stage, dtype=dtype, optimizer="sgd", decay=0.0)
            repoint(engine.module.norm.weight, engine.module)
            with pytest.raises(RuntimeError, match="has been given other memory since the engine was made"):
                one_step(engine, my_batch())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_in_place_are_kept_and_other_memory_is_refused(dtype):
    run_ranks(2, write_case, dtype)


def write_beside_case() -> None:
    mpu.initialize_model_parallel(1)
    for stage in STAGES[:3]:
        engine = fresh(stage, dtype=torch.bfloat16)
        written, other = engine.module.blocks[0].up.bias, engine.module.blocks[0].down.bias
        for way in ("full", "local", "load"):
            with torch.no_grad():
                written.add_(1.0)
            want = written.detach().clone()
            if way == "full":
                utils.safe_set_full_fp32_param(other, torch.zeros(5))
            elif way == "local":
                utils.safe_set_local_fp32_param(other, utils.safe_get_local_fp32_param(other))
            else:
                values = {"blocks.0.down.bias": torch.zeros(5)}
                load_state_dict(engine.module, engine.buckets, values, strict=False)
            assert torch.equal(written, want), (stage, way)
            assert torch.equal(utils.safe_get_full_fp32_param(written).bfloat16(), want), (stage, way)
        engine.destroy()


def test_writes_in_place_are_kept_where_another_parameter_of_the_unit_is_replaced():
    run_ranks(2, write_beside_case)


def rounding_case() -> None:
    mpu.initialize_model_parallel(1)
    for stage in (0, 1, 3):
        engine = fresh(stage, dtype=torch.bfloat16)
        before = utils.safe_get_full_fp32_param(engine.module.embedding.weight)
        with zero.GatheredParameters(engine.module.norm.weight, modifier_rank=0), torch.no_grad():
            engine.module.norm.weight[1] = 3.0
        assert torch.equal(utils.safe_get_full_fp32_param(engine.module.embedding.weight), before)
        assert utils.safe_get_full_fp32_param(engine.module.norm.weight).tolist() == [1, 3, 1, 1, 1]


def test_gathered_parameters_leave_the_fp32_weights_of_what_did_not_change():
    run_ranks(2, rounding_case)


def keeps_case() -> None:
    """Whatever a script takes out of a context to read: a state dictionary, detached parameters, NumPy's arrays."""
    mpu.initialize_model_parallel(1)
    grads = []
    for stage in (0, 3):
        torch.manual_seed(0)
        engine = make_engine(Toy(), stage)
        named = dict(engine.module.named_parameters())
        batch = token_batches(1, 1, 1)[0][0, 0]
        loss = engine(batch)  # its graph has views of weights, too
        with torch.inference_mode(), zero.GatheredParameters(list(named.values())):
            arrays = {name: p.detach().numpy() for name, p in named.items()}
        with zero.GatheredParameters(list(named.values())):
            taken = [engine.module.state_dict(), {name: p.data for name, p in named.items()}]
            inside = engine(batch)
        engine.backward(loss)
        for each in taken:
            for name in named:
                assert torch.equal(each[name].detach(), torch.from_numpy(arrays[name])), (stage, name)
        engine.backward(inside)
        grads.append({name: full_grad(engine, name) for name in named})
        engine.step()
        for name in named:
            assert torch.equal(taken[0][name], taken[1][name])
        if stage == 3:
            with zero.GatheredParameters(list(named.values())):
                assert not torch.equal(named["norm.weight"], taken[1]["norm.weight"]), "the parameter itself goes on"
        engine.destroy()
    compare(grads[1], grads[0], "read in a context", bitwise=False)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_taken_out_of_gathered_parameters_stays_valid(world_size):
    run_ranks(world_size, keeps_case)


def keeps_after_another_case() -> None:
    """Between two micro-batches, where the root is whole and stays so: another context fails, or is one of a forward."""
    mpu.initialize_model_parallel(1)
    for in_forward in (False, True):
        engine = fresh(3, gradient_accumulation_steps=2)
        weight = engine.module.norm.weight
        one_step(engine, my_batch())
        with zero.GatheredParameters(weight):
            taken = weight.detach()
        want = taken.clone()

        def another(*_, weight: nn.Parameter = weight, fails: bool = not in_forward) -> None:
            with zero.GatheredParameters(weight):
                if fails:
                    raise ArithmeticError

        if in_forward:
            engine.module.blocks[1].register_forward_pre_hook(another)
        else:
            with pytest.raises(ArithmeticError):
                another()
        one_step(engine, my_batch())
        assert taken.untyped_storage().nbytes() > 0 and torch.equal(taken, want)
        engine.destroy()


def test_what_is_taken_out_of_gathered_parameters_stays_valid_after_another_context():
    run_ranks(2, keeps_after_another_case)


@pytest.mark.parametrize("run", ["plain", "reentrant", "not reentrant"])
def test_what_a_forward_gives_to_numpy_stays_valid(one_rank, run):
    plain, engine = fresh(3, toy={"run": run}), fresh(3, toy={"run": run})
    arrays, before = [], plain.state_dict()["blocks.0.up.weight"].numpy()
    engine.module.blocks[0].up.register_forward_hook(lambda layer, *_: arrays.append(layer.weight.detach().numpy()))
    for k in range(3):
        assert torch.equal(one_step(engine, my_batch(k)), one_step(plain, my_batch(k)))
    assert (arrays[0] == before).all() and (arrays[-1] != before).any()


class Interrupted(Block):
    is_on = False

    def forward(self, x):
        if Interrupted.is_on:
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.parametrize("run", ["plain", "ours", "reentrant", "not reentrant"])
def test_after_ctrl_c_in_a_forward_or_a_recomputation_what_a_script_saves_stays_valid(one_rank, run):
    engine = fresh(3, toy={"block": Interrupted, "run": run})
    one_step(engine, my_batch())
    loss = None if run == "plain" else engine(my_batch())
    Interrupted.is_on = True
    with pytest.raises(KeyboardInterrupt):
        engine(my_batch()) if loss is None else engine.backward(loss)
    Interrupted.is_on = False
    weight = engine.module.blocks[2 if loss is None else 0].up.weight
    with pytest.raises(RuntimeError, match="not gathered now"):
        weight.norm()
    with zero.GatheredParameters(weight):
        taken = weight.detach()
    assert taken.untyped_storage().nbytes() > 0 and weight.numel() == 0, "it is released, and what was taken is not"
    engine.zero_grad()  # of a backward that was cut short
    one_step(engine, my_batch())


def test_after_ctrl_c_while_parameters_are_made_whole_the_engine_trains_on(one_rank, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    engine = fresh(3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Weights, "show_parameters", interrupt)
        engine(my_batch())
    gather = Weights.gather
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Weights, "gather", lambda w: (interrupt if w is engine.buckets[0].weights else gather)(w))
        with zero.GatheredParameters(engine.module.parameters()):
            pass
    assert not any(bucket.weights.is_allocated for bucket in engine.buckets), "in the way of another try"
    one_step(engine, my_batch())
    assert engine.global_steps == 1


def held_case() -> None:
    mpu.initialize_model_parallel(1)
    engine = fresh(3)
    weight, values = engine.module.blocks[0].up.weight, engine.module_state_dict()
    engine.backward(engine(my_batch()))
    for action in (
        engine.step,
        lambda: utils.safe_set_full_fp32_param(weight, torch.zeros(15, 5)),
        lambda: utils.safe_set_local_fp32_param(weight, utils.safe_get_local_fp32_param(weight)),
        lambda: load_state_dict(engine.module, engine.buckets, values),
    ):
        with pytest.raises(RuntimeError, match="inside of GatheredParameters"), zero.GatheredParameters(weight):
            action()
    engine.step()
    assert engine.global_steps == 1 and engine.micro_steps == 1


def test_steps_and_writes_inside_of_gathered_parameters_are_refused():
    run_ranks(2, held_case)


def undone_case() -> None:
    """Between two micro-batches, where the root is whole already."""
    mpu.initialize_model_parallel(1)
    rank = mpu.get_data_parallel_rank()
    first, second = token_batches(1, 2, 2)[0][:, rank]
    engine = fresh(3, gradient_accumulation_steps=2)
    weight = engine.module.embedding.weight
    one_step(engine, first)
    want = engine(second).item()
    for makes_graph in (False, True):
        if makes_graph:  # which keeps whole what it reads
            inputs: list[torch.Tensor] = []
            with engine.module.blocks[0].register_forward_pre_hook(lambda _, args, seen=inputs: seen.append(args[0])):
                loss = engine(first)
            torch.autograd.grad(loss, inputs, create_graph=True)
        with pytest.raises(RuntimeError, match="undone"), zero.GatheredParameters(weight), torch.no_grad():
            weight.view(-1)[0] = 7.0  # of the first rank's shard: the other one does not find it in its own
        assert engine(second).item() == want
        with pytest.raises(KeyError), zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.zero_()
            raise KeyError
    loss = engine(second)
    assert loss.item() == want
    engine.backward(loss)
    engine.step()


def test_what_gathered_parameters_do_not_keep_is_undone_on_all_ranks_between_micro_batches():
    run_ranks(2, undone_case)


def undone_below_stage_3_case(dtype: torch.dtype) -> None:
    """What one rank writes before an exception on every rank; nothing is left of it, not even after a step."""
    mpu.initialize_model_parallel(1)
    for stage in STAGES[:3]:
        torch.manual_seed(0)
        model = Toy()
        model.blocks[0].requires_grad_(False)
        engine = make_engine(model, stage, dtype=dtype, optimizer="sgd", decay=0.0)
        frozen, trained, other = model.blocks[0].up.weight, model.blocks[1].up.weight, model.blocks[1].down.bias
        with torch.no_grad():
            other.fill_(7.0)  # on every rank, and kept
        want = engine.state_dict()
        with pytest.raises(KeyError), zero.GatheredParameters([frozen, trained], modifier_rank=0), torch.no_grad():
            if mpu.get_data_parallel_rank() == 0:
                frozen.zero_()
                trained.data = torch.zeros_like(trained)
            raise KeyError
        engine.backward(0.0 * engine(my_batch()))
        engine.step()
        state = {name: values.tolist() for name, values in engine.state_dict().items()}
        assert state == {name: values.tolist() for name, values in want.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_before_an_exception_in_gathered_parameters_is_undone_below_stage_3(dtype):
    run_ranks(2, undone_below_stage_3_case, dtype)


def copy_case() -> None:
    """A copy is another plain module, whose use between an engine's forward and backward is nothing to it."""
    mpu.initialize_model_parallel(1)
    for stage in STAGES:
        engines = [fresh(stage, optimizer="sgd", decay=0.0) for _ in range(2)]
        for whole in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="An engine cannot be copied or pickled.* Copy engine.module"):
                whole(engines[0])
        if stage == 3:
            with pytest.raises(RuntimeError, match=r"sharded over .* not gathered now.*GatheredParameters"):
                copy.deepcopy(engines[0].module)
        with zero.GatheredParameters(list(engines[0].module.parameters())):
            copies = copy.deepcopy(engines[0].module), pickle.loads(pickle.dumps(engines[0].module))
        losses = [engine(my_batch()) for engine in engines]
        for other in copies:
            loss = other(my_batch())
            assert torch.equal(loss.detach(), losses[0].detach())
            loss.backward()
            assert all(p.grad is not None for name, p in other.named_parameters() if name != "unused")
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
            engine.step()
        states = [engine.state_dict() for engine in engines]
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_copy_of_the_model_is_a_plain_module():
    run_ranks(2, copy_case)


def changed_model_case() -> None:
    mpu.initialize_model_parallel(1)

    def replace(model: nn.Module) -> None:
        model.norm = nn.LayerNorm(5)

    def tie(model: nn.Module) -> None:
        model.blocks[1].up.weight = model.blocks[0].up.weight

    def add(model: nn.Module) -> None:
        model.adapters = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    came, left = r"norm\.weight, norm\.bias came into the model", r"norm\.weight, norm\.bias left it since"
    for change, message in (
        (replace, f"{came} and {left}"),
        (tie, r"blocks\.1\.up\.weight left it since the engine was made"),
        (add, r"adapters\.0\.weight, adapters\.0\.bias, adapters\.1\.weight and 3 more came into the model since"),
    ):
        for stage in (1, 3):
            engine = fresh(stage)
            change(engine.module)
            with pytest.raises(EngineStateError, match=message):
                one_step(engine, my_batch())
            for collective in (engine.state_dict, lambda e=engine: e.save_checkpoint("nowhere")):
                with pytest.raises(EngineStateError, match=message):
                    collective()
            engine.destroy()
    engine = fresh(1)
    engine.module.teacher = nn.Linear(5, 5).requires_grad_(False)
    one_step(engine, my_batch())
    with pytest.raises(EngineStateError, match=r"state_dict.*teacher\.weight, teacher\.bias came into the model"):
        engine.state_dict()


def test_parameters_that_came_or_left_since_the_engine_was_made_are_named():
    run_ranks(2, changed_model_case)


def other_groups_case(path: str) -> None:
    """Of a parameter that no group had, and of one that was frozen, which a forward after it is unfrozen would follow."""
    mpu.initialize_model_parallel(1)
    nvme = {"offload_optimizer": "nvme", "nvme_path": path}
    for stage, home, is_frozen in itertools.product(STAGES, ({}, nvme), (False, True)):
        if stage == 0 and home:
            continue
        model = Toy()
        model.norm.requires_grad_(not is_frozen)
        group_of = {name: 0 for name, _ in model.named_parameters() if "norm." not in name or "blocks" in name}
        zero_config = ZeroConfig(stage=stage, **home)
        engine = Engine(model, mpu.get_groups(), OPTIMIZERS["adamw"], group_of, [{}], zero=zero_config)
        one_step(engine, my_batch())
        before, torchs = engine.state_dict(), engine.optimizer.torch_optimizer
        model.norm.requires_grad_(True)
        torchs.add_param_group({"params": list(model.norm.parameters())})
        with pytest.raises(RuntimeError, match=r"come into the optimizer's groups.*add_param_group"):
            one_step(engine, my_batch())
        torchs.param_groups.pop()
        after = engine.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        engine.zero_grad()
        one_step(engine, my_batch())
        torchs.param_groups.clear()
        with pytest.raises(RuntimeError, match=r"or left them, since"):
            one_step(engine, my_batch())
        engine.destroy()


def test_parameter_groups_that_came_or_left_since_the_engine_was_made_are_refused(tmp_path):
    run_ranks(2, other_groups_case, str(tmp_path))


class Hiding(Toy):
    """Keeps its norm from optimizers and engines, as some models do with a frozen part."""

    def named_parameters(self, *args, **kwargs):
        return ((name, p) for name, p in super().named_parameters(*args, **kwargs) if not name.startswith("norm."))


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_a_model_does_not_name_have_not_come_into_it(one_rank, stage):
    one_step(make_engine(Hiding(), stage), my_batch())


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_in_parameters_are_dropped_before_an_engine_and_refused_before_its_step(one_rank, stage):
    losses = []
    for has_gradients in (False, True):
        torch.manual_seed(0)
        model = Toy()
        if has_gradients:
            model(my_batch()).backward()
        engine = make_engine(model, stage, optimizer="sgd")
        one_step(engine, my_batch())
        losses.append(engine(my_batch(1)).item())
    assert losses[0] == losses[1]
    engine.backward(engine(my_batch()))
    weight = model.blocks[0].up.weight
    weight.grad = torch.zeros(weight.shape)  # as if it counted
    with pytest.raises(
        RuntimeError, match=r"'blocks\.0\.up\.weight' has a \.grad that engine\.step\(\) would not apply"
    ):
        engine.step()
    weight.grad = None
    engine.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_scripted_modules_train_or_are_refused_where_they_would_need_hooks(stage, one_rank):
    inside, block = Toy(block=lambda h: nn.Sequential(torch.jit.script(nn.Linear(h, h)), nn.Tanh())), Toy()
    block.blocks[1] = torch.jit.script(nn.Linear(5, 5))
    for model, name, lowest in ((inside, "blocks.0.0", 3), (block, "blocks.1", 2)):
        if stage >= lowest:
            with pytest.raises(ValueError, match=f"^{name} was made by torch.jit.script .*stage {stage} "):
                make_engine(model, stage)
        else:
            one_step(make_engine(model, stage), my_batch())


class Written(Toy):
    """Its forward writes into parameters, in one of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        if way == "renorm":
            self.embedding = nn.Embedding(11, 5, max_norm=0.1)

    def forward(self, tokens):
        with torch.no_grad():
            if self.way == "own":
                self.norm.weight.mul_(0.5)
            elif self.way == "other":
                target = self.blocks[1].norm.weight
                target.copy_(target * 0.5)
        return super().forward(tokens)


def written_case(way: str) -> None:
    mpu.initialize_model_parallel(1)
    engine = make_engine(Written(way), 3)
    with pytest.raises(RuntimeError, match=r"unit '(root|blocks.1)' was written to in place .* is lost"):
        engine.backward(engine(my_batch()))
    if way == "own":
        engine.module.way = "none"
        engine.zero_grad()
        one_step(engine, my_batch())


@pytest.mark.parametrize("way", ["own", "other", "renorm"])
def test_what_a_forward_writes_into_sharded_parameters_is_refused_instead_of_lost(way):
    run_ranks(2, written_case, way)


class GatheringBlock(Block):
    def forward(self, x):
        with zero.GatheredParameters(self.up.weight):
            scale = self.up.weight.detach().abs().max()
        return super().forward(x) / (1 + 0 * scale)


class BlockWithinGathered(Block):
    def forward(self, x):
        with zero.GatheredParameters(self.up.weight):
            return super().forward(x)


def nested_case() -> None:
    """A recomputation that has enough leaves the context by an exception."""
    mpu.initialize_model_parallel(1)
    want = run(Toy, 0)
    for block, how in itertools.product((GatheringBlock, BlockWithinGathered), ("plain", "nonreentrant")):
        got = run(lambda block=block, how=how: Toy(how, block=block), 3)
        assert all(torch.equal(got[key], value) for key, value in want.items()), (block, how)


def test_gathered_parameters_inside_of_a_units_forward():
    run_ranks(2, nested_case)


def autocast_case() -> None:
    """Two micro-batches in one autocast region share the cached cast of a weight, so gradients come after the unit is over."""
    mpu.initialize_model_parallel(1)
    states = []
    for stage in (0, 2, 3):
        engine = fresh(stage, gradient_accumulation_steps=2)
        batches = token_batches(1, 2, mpu.get_data_parallel_world_size())[0]
        with torch.autocast("cpu", torch.bfloat16):
            for batch in batches:
                one_step(engine, batch[mpu.get_data_parallel_rank()])
        states.append(engine.state_dict())
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=1e-4, atol=1e-5)


def test_autocast_over_several_micro_batches():
    run_ranks(2, autocast_case)


def test_a_checkpoint_loaded_in_mid_accumulation_starts_a_step_anew(one_rank, tmp_path):
    engine = fresh(2, gradient_accumulation_steps=2)
    for _ in range(2):
        one_step(engine, my_batch())
    engine.save_checkpoint(str(tmp_path))
    one_step(engine, my_batch(1))  # half a step
    engine.load_checkpoint(str(tmp_path))
    assert not engine.is_gradient_accumulation_boundary()
    for _ in range(2):
        engine.backward(engine(my_batch(2)))
        grad = full_grad(engine, "norm.weight") if engine.is_gradient_accumulation_boundary() else None
        engine.step()
    again = fresh(2, gradient_accumulation_steps=2)
    again.load_checkpoint(str(tmp_path))
    for _ in range(2):
        again.backward(again(my_batch(2)))
        want = full_grad(again, "norm.weight") if again.is_gradient_accumulation_boundary() else None
        again.step()
    assert torch.equal(grad, want)


class QuantizedBlock(Block):
    """Has frozen weights of 8 bits, a mask, and a number that no floating-point dtype holds."""

    def __init__(self, h: int = 5) -> None:
        super().__init__(h)
        self.codes = nn.Parameter(torch.randint(-128, 128, (h, h), dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(h) % 2 == 0, requires_grad=False)
        self.number = nn.Parameter(torch.tensor(2**40 + 1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.number.item() == 2**40 + 1
        return super().forward(x) + x @ (self.codes / 128).to(x.dtype) * self.mask


def quantized_case() -> None:
    mpu.initialize_model_parallel(1)
    states = []
    for stage in (0, 3):
        torch.manual_seed(0)
        model = Toy(block=QuantizedBlock)
        kept = {name: p.clone() for name, p in model.named_parameters() if not p.is_floating_point()}
        engine = make_engine(model, stage, dtype=torch.bfloat16)
        one_step(engine, my_batch())
        states.append(engine.state_dict())
        torch.testing.assert_close({name: states[-1][name] for name in kept}, kept, rtol=0, atol=0)
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_frozen_weights_that_are_no_floating_point_numbers_stay_as_they_are_beside_16_bits():
    run_ranks(2, quantized_case)


def test_dtypes_that_cannot_be_trained_are_refused_and_mixed_ones_keep_their_values(one_rank):
    for dtype in (torch.float64, torch.complex64):
        with pytest.raises(ValueError, match=f"trained parameters of {dtype}"):
            make_engine(nn.Linear(2, 2, dtype=dtype), 1)
    model = nn.Linear(2, 2)
    model.weight.data = model.weight.data.half()
    model.bias.data.fill_(100001.0)
    engine = make_engine(model, 1, dtype=torch.bfloat16)
    assert (utils.safe_get_full_fp32_param(model.bias) == 100001.0).all()
    with pytest.raises(ValueError, match="at least 1, got 0"):
        make_engine(nn.Linear(2, 2), 1, gradient_accumulation_steps=0)
    engine.destroy()


def retry_case(folder: str) -> None:
    mpu.initialize_model_parallel(1)
    cpu, nvme = ({"offload_optimizer": home, "offload_param": home, "nvme_path": folder} for home in ("cpu", "nvme"))
    for stage, homes in ((0, {}), (1, {}), (2, {}), (3, {}), (3, cpu), (3, nvme)):
        torch.manual_seed(0)
        model = Toy()
        want = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(ZeroDivisionError):
            make_engine(model, stage, dtype=torch.bfloat16, zero=homes, lr_scheduler=lambda _: 1 / 0)
        with zero.GatheredParameters(model.norm.weight, modifier_rank=0), torch.no_grad():
            want["norm.weight"] = model.norm.weight.fill_(2.5).float()
        engine = make_engine(model, stage, dtype=torch.bfloat16, zero=homes)
        for name, p in model.named_parameters():
            assert torch.equal(utils.safe_get_full_fp32_param(p), want[name])
            assert torch.equal(engine.state_dict()[name], want[name].bfloat16())
        engine.destroy()


def test_an_engine_after_one_that_failed_has_the_fp32_values_again(tmp_path):
    run_ranks(2, retry_case, str(tmp_path))


class Adapted(nn.Module):
    """Split layers, and beside the first an adapter: `down` is whole, `up` this rank's rows of one parameter, zero at first."""

    def __init__(self, declares: bool, copies: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = mpu.ColumnParallelLinear(6, 8, gather_output=False)
        self.narrow = mpu.RowParallelLinear(8, 3, input_is_parallel=True)
        cut = mpu.Partition(0, full_size=8)
        rows = torch.zeros(8 // mpu.get_model_parallel_world_size(), 2)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(rows)
        self.partitions = {"up": cut} if declares else {}
        self.enter = mpu.copy_to_model_parallel_region if copies else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x) + self.enter(x @ self.down.T) @ self.up.T)


def adapter_case(stage: int, declares: bool, copies: bool) -> list[float] | str:
    groups = mpu.initialize_model_parallel(min(2, torch.distributed.get_world_size()))
    model = Adapted(declares, copies)
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    engine = Engine(model, groups, sgd, *weight_decay_groups(model, 0.0), zero=ZeroConfig(stage=stage), clip_grad=0.5)
    x, losses = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), []
    try:
        for _ in range(3):
            losses.append(float(engine.backward(engine(x).square().mean())))
            engine.step()
    except ValueError as error:
        return str(error)
    return losses


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (3, 4)])
def test_what_tensor_parallel_ranks_would_train_apart_is_refused(stage, ranks):
    (alone,) = run_ranks(1, adapter_case, stage, True, True)
    for losses in run_ranks(ranks, adapter_case, stage, True, True):
        assert losses == pytest.approx(alone, rel=1e-5)
    for declares, copies, unlike in ((False, True, "up"), (True, False, "down")):
        for message in run_ranks(ranks, adapter_case, stage, declares, copies):
            assert message.startswith(f"{unlike}: not marked as parts of larger parameters, but their gradients")
            assert "mpu.copy_parameters_to_sequence_parallel_region" in message


class Slight(nn.Module):
    """Beside a parameter of nearly the same gradient on all ranks, one whose gradient is small, and differs."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.slight = (nn.Parameter(torch.ones(5)) for _ in range(2))

    def forward(self, rounding: float, size: float, scale: float) -> torch.Tensor:
        rank = torch.distributed.get_rank()
        return scale * ((1 + rounding * rank) * self.whole + size * (1 + rank) * self.slight).sum()


def slight_case(rounding: float, sizes: list[float], refused: int | None, growth: float) -> None:
    groups, model = mpu.initialize_model_parallel(2), Slight()
    engine = Engine(model, groups, torch.optim.SGD, *weight_decay_groups(model, 0.0), zero=ZeroConfig(stage=1))
    for update, size in enumerate(sizes, 1):
        engine.backward(engine(rounding, size, growth**update))
        with pytest.raises(ValueError, match="slight: not") if update == refused else nullcontext():
            engine.step()


@pytest.mark.parametrize(
    ("rounding", "sizes", "refused", "growth"),
    [
        (0, [3e-5], 1, 1),  # as of a temperature of attention, which is near uniform at first
        (0, [1e-6] * 11, None, 1),
        (0, [1e-6] * 3, None, 30),  # where the head is zero at first, and the learning rate warms up
        (0, [1e-6, 1e-6, 1e-4], 3, 1),
        (0, [1e-6, 1e-6, 1e-4], 3, 0.01),
        (3e-3, [3e-4] * 11, None, 1),
        (3e-3, [3e-4, 3e-4, 3e-3], 3, 1),
    ],
)
def test_a_difference_is_judged_once_it_is_no_rounding_error(rounding, sizes, refused, growth):
    run_ranks(2, slight_case, rounding, sizes, refused, growth)


class Uneven(nn.Module):
    """Sixty units, of which the first of two tensor-parallel ranks computes with forty."""

    def __init__(self, declares: bool, has_more: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        rows = slice(0, 60)
        if mpu.get_model_parallel_world_size() == 2:
            rows = (slice(0, 40), slice(40, 60))[mpu.get_model_parallel_rank()]
        self.rows = rows
        self.whole, self.part = nn.Parameter(torch.randn(60, 6)), nn.Parameter(torch.randn(60, 3)[rows].clone())
        self.partitions = {"part": mpu.Partition(0, full_size=60)} if declares else {}
        if has_more:
            self.more = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mpu.reduce_from_model_parallel_region(
            mpu.copy_to_model_parallel_region(x @ self.whole.T)[:, self.rows] @ self.part
        )


def uneven_case(stage: int) -> tuple[list[float], list[str]]:
    groups = mpu.initialize_model_parallel(min(2, torch.distributed.get_world_size()))
    sgd = lambda params: torch.optim.SGD(params, lr=0.001)  # noqa: E731

    def made(declares: bool, has_more: bool) -> Engine:
        model = Uneven(declares, has_more)
        settings = weight_decay_groups(model, 0.0)
        return Engine(model, groups, sgd, *settings, zero=ZeroConfig(stage=stage))

    refused = []
    for declares, has_more in ((False, False), (True, groups.model_parallel_rank == 0)):
        if groups.model_parallel_size > 1:
            with pytest.raises(ValueError, match="marked as parts") as error:
                made(declares, has_more)
            refused.append(str(error.value))
    engine, losses = made(True, False), []
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        losses.append(float(engine.backward(engine(x).square().mean())))
        engine.step()
    return losses, refused


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parts_of_other_sizes_on_tensor_parallel_ranks_are_trained_if_declared_and_otherwise_refused(stage):
    ((alone, _),) = run_ranks(1, uneven_case, stage)
    for losses, refused in run_ranks(4, uneven_case, stage):
        assert losses == pytest.approx(alone, rel=1e-5)
        of_part, of_more = refused
        assert of_part.startswith(
            "part: not marked as parts of larger parameters, but not of one shape on the 2 model-par"
        )
        assert of_more.startswith("more: not marked as parts")


def idle_case() -> None:
    groups = mpu.initialize_model_parallel(2)
    model = Adapted(declares=True, copies=True)
    model.idle = nn.Parameter(torch.ones(3))
    scaler, parameters = LossScaler(64.0), weight_decay_groups(model, 0.0)
    engine = Engine(model, groups, torch.optim.SGD, *parameters, zero=ZeroConfig(stage=2), loss_scaler=scaler)
    engine.backward(engine(torch.full((4, 6), math.inf)).square().mean())
    engine.step()  # an overflow says nothing
    assert engine.optimizer.overflow
    for step in range(11):
        engine.backward(engine(torch.ones(4, 6)).square().mean())
        engine.step()
        asked = engine._replicas._unseen
        assert asked == ({"idle", "down"} if step == 0 else {"idle"} if step < 9 else set()), step


def test_a_parameter_that_is_not_used_is_compared_a_few_times_only():
    run_ranks(2, idle_case)
