"""The delayed parameter update equals a hand-written loop that applies each gradient one step late."""

from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest
import torch

import megazero
from megazero import mpu, zero
from megazero.engine import Engine, weight_decay_groups
from megazero.utils import safe_get_full_fp32_param
from megazero.zero.bucket import Bucket
from megazero.zero.config import ZeroConfig
from megazero.zero.home import MemoryHome
from tests.model.plain_gpt2 import decay_groups
from tests.ranks import run_ranks
from tests.zero.models import Wide, make_engine, one_step, token_batches

STEPS, WARMUP = 6, 2


def by_hand(batches: torch.Tensor, dtype: torch.dtype) -> tuple[list[float], dict]:
    """Losses and master weights on one process: gradients of the whole batch; from WARMUP on an update is one step late."""
    torch.manual_seed(0)
    model = Wide()
    masters = copy.deepcopy(model)
    model.to(dtype)
    adam = torch.optim.AdamW(decay_groups(masters, 0.1), lr=1e-2, eps=1e-3, fused=True)
    losses, pending = [], None

    def apply(gradients: list[torch.Tensor]) -> None:
        for master, gradient in zip(masters.parameters(), gradients, strict=True):
            master.grad = gradient
        adam.step()
        model.load_state_dict(masters.state_dict())

    for index, batch in enumerate(batches):
        gradients, each = [torch.zeros_like(master) for master in masters.parameters()], []
        for ids in batch[0]:
            model.zero_grad()
            loss = model(ids)
            loss.backward()
            each.append(loss.item())
            for gradient, parameter in zip(gradients, model.parameters(), strict=True):
                gradient += parameter.grad.float() / len(batch[0])
        losses.append(sum(each) / len(each))
        if pending is not None:
            apply(pending)
        if index < WARMUP:
            apply(gradients)
        else:
            pending = gradients
    apply(pending)
    return losses, masters.state_dict()


def delayed_case(path: str, stage: int, home: str, dtype: torch.dtype) -> None:
    mpu.initialize_model_parallel(1)
    world, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    batches = token_batches(STEPS, 1, world)
    torch.manual_seed(0)
    options = {"offload_optimizer": home, "nvme_path": path, "delayed_param_update": WARMUP, "sub_group_size": 4096}
    engine = make_engine(Wide(), stage, zero=options, dtype=dtype)
    losses = [mpu_mean(one_step(engine, batch[0][rank])) for batch in batches]
    assert engine.buckets[0].is_delayed
    with pytest.raises(RuntimeError, match=r"delayed update of unit .* engine.optimizer.finish"):
        zero.GatheredParameters(engine.module.blocks[0][0].weight, modifier_rank=0).__enter__()
    got = engine.state_dict()
    assert not engine.buckets[0].is_delayed
    want_losses, want = by_hand(batches, dtype)
    torch.testing.assert_close(losses, want_losses, rtol=1e-5, atol=1e-6)
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        torch.testing.assert_close(master, want[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(got[name], master.to(dtype)), name
    if dtype is torch.float32:
        weight = engine.module.blocks[0][0].weight
        one_step(engine, batches[0][0][rank])
        master = safe_get_full_fp32_param(weight)
        assert not engine.buckets[0].is_delayed and torch.equal(master, engine.state_dict()["blocks.0.0.weight"])
    engine.destroy()


def initialize_case() -> None:
    torch.manual_seed(0)
    model = Wide()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "delayed_param_update": WARMUP,
            "sub_group_size": 4096,
        },
    }
    engine = megazero.initialize(model=model, model_parameters=decay_groups(model, 0.1), config=config)[0]
    batches = token_batches(STEPS, 1, 2)
    for batch in batches:
        one_step(engine, batch[0][torch.distributed.get_rank()])
    assert engine.buckets[0].is_delayed
    torch.testing.assert_close(engine.state_dict(), by_hand(batches, torch.float32)[1], rtol=1e-5, atol=1e-6)


def mpu_mean(loss: torch.Tensor) -> float:
    total = loss.detach().double()
    torch.distributed.all_reduce(total)
    return float(total) / torch.distributed.get_world_size()


@pytest.mark.parametrize(("stage", "home"), [(1, "cpu"), (2, "cpu"), (3, "cpu"), (3, "nvme")])
def test_a_delayed_update_equals_a_loop_that_applies_each_gradient_one_step_late(stage, home, tmp_path):
    run_ranks(2, delayed_case, str(tmp_path), stage, home, torch.float32)


def test_the_key_of_the_json_delays_the_update_too():
    run_ranks(2, initialize_case)


def test_a_delayed_update_in_16_bits(tmp_path):
    run_ranks(2, delayed_case, str(tmp_path), 2, "cpu", torch.bfloat16)


def resume_case(path: str) -> None:
    mpu.initialize_model_parallel(1)
    batches = token_batches(STEPS, 1, 1)

    def engine():
        torch.manual_seed(0)
        return make_engine(Wide(), 2, zero={"offload_optimizer": "cpu", "delayed_param_update": 1})

    def run(one, part):
        for batch in part:
            one_step(one, batch[0][0])
        return one.state_dict()

    first = engine()
    run(first, batches[:3])
    first.save_checkpoint(path)
    want = run(first, batches[3:])
    second = engine()
    second.load_checkpoint(path)
    got = run(second, batches[3:])
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_a_save_waits_for_the_update_and_a_resumed_run_is_the_same_bit_for_bit(tmp_path):
    run_ranks(1, resume_case, str(tmp_path))


def test_a_write_beside_a_delayed_update_is_refused_instead_of_lost(one_rank):
    engine = make_engine(Wide(), 2, zero={"offload_optimizer": "cpu", "delayed_param_update": 1})
    for ids in token_batches(2, 1, 1)[:, 0, 0]:
        one_step(engine, ids)
    with torch.no_grad():
        engine.module.embedding.weight.zero_()
    with pytest.raises(RuntimeError, match="unit 'root' was written to while a delayed update of it went on"):
        engine.optimizer.finish()


@pytest.mark.parametrize("steps", [0, 1])
def test_what_is_frozen_while_updates_are_delayed_keeps_its_value(one_rank, monkeypatch, steps):
    """With `steps` before it is frozen, it has a state."""
    monkeypatch.setattr(MemoryHome, "empty", lambda _, numel, dtype: torch.full((numel,), torch.nan, dtype=dtype))
    engine = make_engine(Wide(), 2, zero={"offload_optimizer": "cpu", "delayed_param_update": 1}, dtype=torch.bfloat16)
    frozen, trained = engine.module.blocks[0][0].weight, engine.module.blocks[0][2].weight
    for step, ids in enumerate(token_batches(3 + steps, 1, 1)[:, 0, 0]):
        if step == steps:
            engine.optimizer.finish()
            frozen.requires_grad_(False)
            before = frozen.clone(), trained.clone()
        one_step(engine, ids)
    engine.optimizer.finish()
    assert torch.equal(frozen, before[0]) and not torch.equal(trained, before[1])


@pytest.mark.parametrize(
    "change", [Engine.eval, Engine.skip_step, lambda engine: engine.module.embedding.requires_grad_(False)]
)
def test_evaluation_a_step_left_out_and_other_trained_parameters_come_after_the_update(one_rank, change):
    engine = make_engine(Wide(), 2, zero={"offload_optimizer": "cpu", "delayed_param_update": 1})
    ids = token_batches(2, 1, 1)[:, 0, 0]
    for each in ids:
        one_step(engine, each)
    assert engine.train().buckets[0].is_delayed
    change(engine)
    engine(ids[0])
    assert not engine.buckets[0].is_delayed


def test_after_an_interrupt_amid_new_weights_only_a_checkpoint_goes_on(one_rank, monkeypatch):
    engine = make_engine(Wide(), 2, zero={"offload_optimizer": "cpu", "delayed_param_update": 1})
    for ids in token_batches(2, 1, 1)[:, 0, 0]:
        one_step(engine, ids)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Bucket, "publish", Mock(side_effect=[None, KeyboardInterrupt]))
        engine.optimizer.finish()
    with pytest.raises(RuntimeError, match="cut short by an error"):
        engine.save_checkpoint("unused")


def hooked_adamw(groups) -> torch.optim.Optimizer:
    adamw = torch.optim.AdamW(groups, fused=True)
    adamw.register_step_post_hook(lambda *_: None)
    return adamw


def refused_case(path: str) -> None:
    mpu.initialize_model_parallel(1)
    model, ids = Wide(), token_batches(2, 1, 1)
    cpu, nvme = ({"offload_optimizer": home, "nvme_path": path} for home in ("cpu", "nvme"))
    with pytest.raises(ValueError, match="--delayed-param-update needs Adam or AdamW .* got SGD"):
        make_engine(model, 2, optimizer="sgd", zero={**cpu, "delayed_param_update": 1})
    with pytest.raises(ValueError, match="AdamW with states on NVMe would need all of them in memory"):
        Engine(
            model, mpu.get_groups(), hooked_adamw, *weight_decay_groups(model, 0.1), zero=ZeroConfig(stage=2, **nvme)
        )
    engine = make_engine(model, 2, zero={**cpu, "delayed_param_update": 1})  # the model can be given to another one
    one_step(engine, ids[0, 0, 0])
    engine.optimizer.torch_optimizer.register_step_post_hook(lambda *_: None)
    engine.backward(engine(ids[1, 0, 0]))
    with pytest.raises(ValueError, match="--delayed-param-update needs .* without hooks"):
        engine.step()


def test_other_optimizers_are_refused(tmp_path):
    run_ranks(1, refused_case, str(tmp_path))
    with pytest.raises(ValueError, match="needs --offload-optimizer cpu or nvme"):
        ZeroConfig(stage=2, delayed_param_update=5)
    for partly in ({"placement": "auto"}, {"offload_optimizer_ratio": 0.5}):
        with pytest.raises(ValueError, match="--delayed-param-update 5 needs all of the update on the host"):
            ZeroConfig(stage=3, offload_optimizer="cpu", delayed_param_update=5, **partly)
