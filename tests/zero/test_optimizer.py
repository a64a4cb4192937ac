"""The optimizer over buckets: what it keeps through freezing and checkpoints, and how often it steps the torch optimizer."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from megazero import mpu, utils
from megazero.checkpoint.reader import Reader
from megazero.engine import Engine, weight_decay_groups
from megazero.ops.adam import FusedAdam
from megazero.optim.loss_scaler import LossScaler
from megazero.zero import GatheredParameters, background
from megazero.zero.config import ZeroConfig
from megazero.zero.home import MemoryHome
from megazero.zero.update import Update
from tests.ranks import run_ranks
from tests.zero.models import OPTIMIZERS, Toy, make_engine, token_batches


def toy() -> Toy:
    torch.manual_seed(0)
    model = Toy()
    model.unused.requires_grad_(False)
    return model


def batches(step: int) -> torch.Tensor:
    return token_batches(8, 1, mpu.get_data_parallel_world_size())[step, 0]


def one_step(engine: Engine, step: int) -> None:
    engine.backward(engine(batches(step)[mpu.get_data_parallel_rank()]))
    engine.step()


def engine_of(model: nn.Module, factory, stage: int = 1, **options) -> Engine:
    zero = ZeroConfig(stage=stage, **options.pop("zero", {}))
    return Engine(model, mpu.get_groups(), factory, *weight_decay_groups(model, 0.0), zero=zero, **options)


# ---- freezing


def set_trained(model: Toy, step: int) -> None:
    """The first block rests for one step, the last one for two; all rest for a forward without a step."""
    model.blocks[0].requires_grad_(step != 2)
    model.blocks[2].up.requires_grad_(step not in (2, 3))


def refreeze_case(stage: int, optimizer: str) -> None:
    mpu.initialize_model_parallel(1)
    model = toy()
    plain = copy.deepcopy(model)
    torch_optimizer = OPTIMIZERS[optimizer]([{"params": list(plain.parameters()), "weight_decay": 0.0}])
    engine = make_engine(model, stage, optimizer=optimizer, decay=0.0, clip_grad=0.0)
    for step in range(6):
        set_trained(plain, step)
        if step == 4:
            model.requires_grad_(False)
            engine(batches(0)[0])
            model.requires_grad_(True)
            model.unused.requires_grad_(False)
        set_trained(model, step)
        torch_optimizer.zero_grad()
        (sum(plain(x) for x in batches(step)) / len(batches(step))).backward()
        torch_optimizer.step()
        one_step(engine, step)
    torch.testing.assert_close(engine.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    assert len(engine.optimizer.slices) < 20, "parameters with equal counters are updated together"
    assert engine.optimizer.state.keys() <= {piece.master for piece in engine.optimizer.slices}, (
        "no state of earlier ones"
    )


@pytest.mark.parametrize(("stage", "optimizer"), [(0, "adamw, not fused"), (3, "adamw"), (2, "sgd")])
def test_a_frozen_parameter_keeps_its_state_as_in_torch(stage, optimizer):
    run_ranks(2, refreeze_case, stage, optimizer)


def test_what_was_frozen_from_the_start_is_saved_with_moments_of_zero(one_rank, monkeypatch, tmp_path):
    monkeypatch.setattr(MemoryHome, "empty", lambda _, numel, dtype: torch.full((numel,), torch.nan, dtype=dtype))
    engine = engine_of(toy(), OPTIMIZERS["adamw"])
    engine.module.blocks[0].up.weight.requires_grad_(False)  # in a bucket whose other parameters are trained
    one_step(engine, 0)
    engine.save_checkpoint(tmp_path)
    moments = {name: Reader(tmp_path).read(f"blocks.0.{name}.weight", "exp_avg") for name in ("up", "down")}
    assert not moments["up"].any() and moments["down"].any()


def test_a_state_that_a_script_drops_begins_anew(one_rank):
    engine = make_engine(toy(), 2, zero={"offload_optimizer": "cpu"}, dtype=torch.bfloat16)
    weight = engine.module.blocks[0].up.weight
    for step in range(2):
        engine.optimizer.state.clear()
        engine.backward(engine(batches(step)[0]))
        grad = utils.safe_get_full_grad(weight)
        engine.step()
        torch.testing.assert_close(utils.safe_get_full_optimizer_state(weight, "exp_avg"), 0.1 * grad)


def test_adagrad_trains_what_is_unfrozen_later(one_rank):
    model = toy()
    model.blocks[0].requires_grad_(False)
    engine = engine_of(model, lambda g: torch.optim.Adagrad(g, lr=0.1, initial_accumulator_value=0.5))
    one_step(engine, 0)
    model.blocks[0].requires_grad_(True)
    before = engine.state_dict()["blocks.0.up.weight"]
    one_step(engine, 1)
    assert not torch.equal(engine.state_dict()["blocks.0.up.weight"], before)
    assert engine.optimizer.counters()["blocks.0.up.weight"] == {"step": 1.0}
    total = utils.safe_get_full_optimizer_state(model.blocks[0].up.weight, "sum")
    assert (total >= 0.5).all(), "with the squares of its gradients added to what it starts from"


class LateTensor(torch.optim.Optimizer):
    """Keeps a number of a parameter in its first step, and a tensor of that name from the second on."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["last"] = p.grad.clone() if "last" in self.state[p] else 0.0


def test_a_number_stays_where_other_parameters_have_a_tensor_of_its_name(one_rank):
    model = toy()
    up, down = model.blocks[0].up, model.blocks[0].down
    engine = engine_of(model, LateTensor, allow_untested_optimizer=True)
    for step, is_trained in enumerate((False, True)):
        up.requires_grad_(is_trained)
        one_step(engine, step)
    down.requires_grad_(False)
    engine(batches(2)[0])  # new slices
    assert engine.optimizer.counters()["blocks.0.up.weight"] == {"last": 0.0}
    assert utils.safe_get_full_optimizer_state(down.weight, "last").any()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_embedding_with_sparse_gradients_trains_as_with_dense_ones(one_rank, stage):
    states = []
    for is_sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4, sparse=is_sparse), nn.Linear(4, 3))
        engine = engine_of(model, lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9), stage)
        for ids in ([1, 2, 2], [2, 5, 0]):
            for _ in range(2):  # the second adds to what is there
                engine.backward(engine(torch.tensor(ids)).square().mean())
            engine.step()
        states.append(engine.state_dict())
    assert all(torch.equal(value, states[0][name]) for name, value in states[1].items())


def test_unfreezing_what_no_group_has_is_told(one_rank, caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    groups = {"0.weight": 0, "0.bias": 0, "1.bias": 0}
    engine = Engine(model, mpu.get_groups(), lambda g: torch.optim.SGD(g, lr=0.1), groups, [{}])
    model.requires_grad_(True)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert [line.split(":")[0] for line in caplog.messages if "is not trained" in line] == ["1.weight"]


@pytest.mark.parametrize("stage", [1, 3])
def test_setting_what_has_just_been_unfrozen_asks_for_a_forward_before(one_rank, stage):
    model = toy()
    weight = model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    engine = engine_of(model, lambda g: torch.optim.SGD(g, lr=0.1), stage)
    with pytest.raises(ValueError, match="is not trained by an engine"):
        utils.safe_set_full_fp32_param(weight, torch.ones(15, 5))
    weight.requires_grad_(True)
    for setter in (utils.safe_set_full_fp32_param, utils.safe_set_local_fp32_param):
        with pytest.raises(ValueError, match=r"blocks\.0\.up\.weight has been unfrozen.*call engine\(\.\.\.\) before"):
            setter(weight, torch.ones(15, 5))
    engine(batches(0)[0])
    utils.safe_set_full_fp32_param(weight, torch.ones(15, 5))
    assert (engine.state_dict()["blocks.0.up.weight"] == 1).all()
    assert utils.safe_get_full_fp32_param(model.blocks[2].up.weight) is None, "it is still frozen"


# ---- checkpoints


def resume_case(folder: str, stage: int) -> None:
    """One block is unfrozen late and another frozen at the time of the save: both have counters of their own."""
    mpu.initialize_model_parallel(1)
    model = toy()
    model.blocks[0].requires_grad_(False)
    engine = make_engine(model, stage)
    one_step(engine, 0)
    one_step(engine, 1)
    model.blocks[0].requires_grad_(True)
    model.blocks[1].requires_grad_(False)
    one_step(engine, 2)
    engine.save_checkpoint(folder)
    resumed_model = toy()
    resumed = make_engine(resumed_model, 3 - stage)
    resumed_model.blocks[1].requires_grad_(False)
    resumed.load_checkpoint(folder)
    for m in (model, resumed_model):
        m.blocks[1].requires_grad_(True)
    for step in (3, 4):
        one_step(engine, step)
        one_step(resumed, step)
    torch.testing.assert_close(resumed.state_dict(), engine.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 2])
def test_step_counters_of_what_was_unfrozen_late_come_back(tmp_path, stage):
    run_ranks(2, resume_case, str(tmp_path), stage)


def test_learning_rate_comes_back_and_other_settings_are_the_new_runs(one_rank, tmp_path):
    engine = engine_of(toy(), lambda g: torch.optim.AdamW(g, lr=0.1, betas=(0.8, 0.9)))
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.01
    one_step(engine, 0)
    engine.save_checkpoint(str(tmp_path))
    for options, lr in (({}, 0.01), ({"load_optimizer_states": False}, 0.1), ({"load_module_only": True}, 0.1)):
        fresh = engine_of(toy(), lambda g: torch.optim.AdamW(g, lr=0.1, betas=(0.7, 0.9)))
        fresh.load_checkpoint(str(tmp_path), **options)
        assert [(group["lr"], group["betas"]) for group in fresh.optimizer.param_groups] == [(lr, (0.7, 0.9))] * 2
    rate = torch.tensor(0.1)
    fresh = engine_of(toy(), lambda g: torch.optim.AdamW(g, lr=rate))
    fresh.load_checkpoint(str(tmp_path))
    assert all(group["lr"] is rate for group in fresh.optimizer.param_groups) and rate == 0.01


# ---- the torch optimizer


class CountingSgd(torch.optim.Optimizer):
    """Counts its steps in the parameter group."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


class Adam(CountingSgd):
    """A user's own, of a known name."""


def test_an_optimizer_unknown_to_be_elementwise_is_stepped_once(one_rank):
    engine = engine_of(toy(), CountingSgd, allow_untested_optimizer=True)
    one_step(engine, 0)
    assert [group["k"] for group in engine.optimizer.param_groups] == [1, 1]


class FailingSgd(CountingSgd):
    """Has a fault."""

    def step(self) -> None:
        raise RuntimeError("no moment")


def test_an_error_of_the_only_rank_is_not_put_down_to_others(one_rank):
    engine = engine_of(toy(), FailingSgd, allow_untested_optimizer=True)
    with pytest.raises(RuntimeError, match="^no moment$"):
        one_step(engine, 0)


class BlockSgd(CountingSgd):
    """Keeps a number for each block of elements, as optimizers with 8-bit moments do, or matrices, as SOAP does."""

    kept: Any

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["kept"] = self.kept


@pytest.mark.parametrize(
    ("kept", "what"), [(torch.ones(3), r"\[3\]"), (torch.ones(3, 1), r"\[3, 1\]"), ([torch.ones(3, 3)], "list")]
)
def test_states_that_could_not_be_saved_are_refused_at_the_first_step(one_rank, monkeypatch, kept, what):
    monkeypatch.setattr(BlockSgd, "kept", kept, raising=False)
    engine = engine_of(toy(), BlockSgd, allow_untested_optimizer=True)
    with pytest.raises(ValueError, match=rf"BlockSgd keeps 'kept' \({what}\) for [1-9]\d+ elements"):
        one_step(engine, 0)


@pytest.mark.parametrize("delayed", [0, 1])
def test_after_an_update_that_failed_in_the_middle_only_a_checkpoint_goes_on(one_rank, tmp_path, monkeypatch, delayed):
    engine = make_engine(toy(), 2, zero={"offload_optimizer": "cpu", "delayed_param_update": delayed})
    one_step(engine, 0)
    engine.save_checkpoint(tmp_path)
    want, step_tiles, made = engine.state_dict(), Update._step_tiles, []

    def fail(update, tiles):
        if made:
            raise MemoryError
        made.append(step_tiles(update, tiles))

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(Update, "_step_tiles", fail)
        one_step(engine, 1)
        engine.optimizer.finish()
    for use in (lambda: one_step(engine, 2), lambda: engine.save_checkpoint(tmp_path, tag="torn")):
        with pytest.raises(RuntimeError, match="^The last update.*cut short by an error"):
            use()
    engine.load_checkpoint(tmp_path)
    assert all(torch.equal(value, want[name]) for name, value in engine.state_dict().items())
    one_step(engine, 1)


@pytest.mark.parametrize("delayed", [0, 1])
def test_after_an_update_whose_thread_did_not_start_only_a_checkpoint_goes_on(one_rank, tmp_path, monkeypatch, delayed):
    home = {"offload_optimizer": "nvme", "nvme_path": str(tmp_path), "delayed_param_update": delayed}
    engine = make_engine(toy(), 3, zero=home)
    one_step(engine, 0)
    engine.save_checkpoint(tmp_path)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start"):
        patched.setattr(background.threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        one_step(engine, 1)
    assert not any(bucket.is_delayed or bucket.is_updating for bucket in engine.buckets)
    with pytest.raises(RuntimeError, match="^The last update.*cut short by an error"):
        one_step(engine, 2)
    engine.load_checkpoint(tmp_path)
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        pass
    one_step(engine, 1)
    engine.destroy()


@pytest.mark.parametrize("more", [{"delayed_param_update": 1}, {"offload_optimizer": "nvme"}], ids=str)
def test_fused_adam_is_updated_in_every_way_as_torchs_own(one_rank, tmp_path, more):
    zero = {"offload_optimizer": "cpu", "nvme_path": str(tmp_path), "grad_dtype": "compute", **more}
    weights = []
    for make in (FusedAdam, partial(torch.optim.AdamW, fused=True)):
        model, config = toy(), ZeroConfig(stage=2, **zero)
        groups = weight_decay_groups(model, 0.1)
        engine = Engine(model, mpu.get_groups(), make, *groups, zero=config, dtype=torch.bfloat16)
        for step in range(3):
            one_step(engine, step)
        weights.append(engine.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_the_optimizer_of_a_destroyed_engine_trains_the_plain_model_as_a_new_one(one_rank):
    engine = engine_of(toy(), partial(torch.optim.AdamW, fused=True), 2, clip_grad=1e-3)
    one_step(engine, 0)
    given, model = engine.optimizer.torch_optimizer, engine.module
    engine.destroy()
    other = copy.deepcopy(model)
    new = torch.optim.AdamW(other.parameters(), weight_decay=0.0, fused=True)
    for module, optimizer in ((model, given), (other, new)):
        module(batches(1)[0]).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert {id(p) for group in given.param_groups for p in group["params"]} <= set(map(id, model.parameters()))


def test_step_hooks_fire_once(one_rank):
    engine = engine_of(toy(), lambda g: torch.optim.SGD(g, lr=0.1))
    fired = []
    engine.optimizer.torch_optimizer.register_step_post_hook(lambda *_: fired.append(1))
    one_step(engine, 0)
    assert len(fired) == 1


def not_finite_case() -> None:
    mpu.initialize_model_parallel(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine = make_engine(model, 2)
    engine.backward(engine(torch.ones(2, 8)).sum())
    # In the second rank's shard of the first bucket, and in the first's of the last.
    for parameter in (model[1].bias, model[0].weight):
        utils.safe_set_full_grad(parameter, torch.full_like(parameter, float("inf")))
    assert engine.optimizer._first_not_finite() == "1.bias (rank 1's part)"


def test_an_overflow_is_said_to_be_where_backward_came_first_whichever_rank_has_it():
    run_ranks(2, not_finite_case)


def test_a_class_of_a_known_name_is_not_known(one_rank):
    with pytest.raises(ValueError, match=r"test_optimizer\.Adam is not known to be elementwise"):
        engine_of(toy(), Adam)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw, not fused"])
def test_scaled_gradients_in_16_bits_do_not_underflow(one_rank, optimizer):
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    factory = lambda g: torch.optim.AdamW(g, lr=0.5, eps=1e-12, fused=optimizer == "adamw")  # noqa: E731
    engine = engine_of(
        model, factory, zero={"grad_dtype": "compute"}, dtype=torch.float16, loss_scaler=LossScaler(65536.0)
    )
    x = torch.full((1, 4), 1e-2, dtype=torch.float16)
    engine.backward((engine(x).float() * 1e-6).mean())  # a gradient of 1e-8, below what fp16 holds
    for grad in (utils.safe_get_full_grad(model.weight), utils.safe_get_local_grad(model.weight).view(1, 4)):
        torch.testing.assert_close(grad, torch.full((1, 4), 1e-8), rtol=1e-2, atol=0)
    engine.step()
    torch.testing.assert_close(engine.state_dict()["weight"].float(), torch.full((1, 4), 0.5), rtol=0, atol=1e-2)
