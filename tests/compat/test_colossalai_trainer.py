"""Colossal-AI's `launch_from_torch`, `initialize` and `Trainer` against a plain torch loop."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megazero.compat import colossalai
from megazero.compat.colossalai import BaseHook, HybridAdam, TensorShardStrategy, ZeroInitContext, gpc, hooks
from tests.ranks import run_ranks

SCALE = 2.0**6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def zero_config(**model_config) -> dict:
    model_config = {"shard_strategy": TensorShardStrategy(), "tensor_placement_policy": "cpu", **model_config}
    return {"model_config": model_config, "optimizer_config": {"gpu_margin_mem_ratio": 0.0, "initial_scale": SCALE}}


def data(rank: int) -> TensorDataset:
    """8 samples of this rank."""
    random = torch.Generator().manual_seed(rank)
    return TensorDataset(torch.randn(8, 6, generator=random), torch.randint(0, 3, (8,), generator=random))


def plain(world_size: int, steps: int, accumulation: int, clip: float) -> tuple[dict[str, Tensor], Net]:
    torch.manual_seed(1)
    model = Net().half()
    masters = [p.detach().float() for p in model.parameters()]
    adam = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.0)
    loaders = [iter(list(DataLoader(data(rank), 2)) * 9) for rank in range(world_size)]
    for _ in range(steps):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for _ in range(accumulation):
            for loader in loaders:
                x, y = next(loader)
                (nn.functional.cross_entropy(model(x.half()), y) * SCALE / accumulation).backward()
                for master, p in zip(masters, model.parameters(), strict=True):
                    master.grad += p.grad.float() / SCALE / world_size
                    p.grad = None
        if clip:
            nn.utils.clip_grad_norm_(masters, clip)
        adam.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    return model.state_dict(), model


class Recorder(BaseHook):
    def __init__(self) -> None:
        super().__init__(priority=5)
        self.points: list[str] = []

    def __getattribute__(self, name: str):
        if name.startswith(("before_", "after_")):
            self.points.append(name)
        return super().__getattribute__(name)


def fit_case(accumulation: int, clip: float) -> None:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    zero = zero_config(fp32_reduce_scatter=True)
    config = {"zero": zero, "gradient_accumulation": accumulation, "clip_grad_norm": clip, "BATCH_SIZE": 2}
    colossalai.launch_from_torch(config, seed=1)
    assert gpc.config.BATCH_SIZE == 2
    with ZeroInitContext(colossalai.get_current_device(), TensorShardStrategy(), shard_param=True):
        model = Net()
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    engine, train, test, _ = colossalai.initialize(
        model, optimizer, nn.CrossEntropyLoss(), DataLoader(data(rank), 2), DataLoader(data(7), 4)
    )
    trainer, recorder, losses = colossalai.Trainer(engine), Recorder(), hooks.LossHook()
    lines = SimpleNamespace(said=[], info=lambda text, ranks: lines.said.append(text))
    log = hooks.LogMetricByEpochHook(lines)
    trainer.fit(train, epochs=3, max_steps=6, test_dataloader=test, test_interval=2, hooks=[log, losses, recorder])
    assert [line.split(" = ")[0] for line in lines.said] == [
        "[Epoch 0 / Train]: Loss",
        "[Epoch 0 / Test]: Loss",
        "[Epoch 1 / Train]: Loss",
    ]
    weights, reference = plain(size, 6 // accumulation, accumulation, clip)
    torch.testing.assert_close(engine.model.state_dict(), weights, rtol=1e-3, atol=1e-4)
    assert trainer.cur_step == 6 and trainer.cur_epoch == 2
    assert recorder.points.count("after_train_iter") == 6 and recorder.points.count("after_test_iter") == 2
    assert set(trainer.states["metrics"]) == {"train", "test"}
    trainer.evaluate(test, hooks=[losses])
    x, y = data(7).tensors
    want = reference(x.half())
    assert trainer.states["metrics"]["test"] == pytest.approx(float(nn.functional.cross_entropy(want, y)), rel=2e-2)
    output = trainer.predict(x)
    torch.testing.assert_close(output, want.detach(), rtol=1e-2, atol=1e-2)
    assert not output.requires_grad and engine.model.engine.memory()["buffers"] == 0
    engine.model.engine.destroy()


def fit_cases() -> None:
    fit_case(1, 0.0)
    fit_case(3, 0.05)


def test_fit_evaluate_and_predict_follow_plain_torch():
    run_ranks(2, fit_cases)


def test_a_python_file_is_a_configuration(one_rank, tmp_path: Path):
    (tmp_path / "config.py").write_text(
        "from megazero.compat.colossalai import TensorShardStrategy\n"
        "BATCH_SIZE = 4\n"
        "zero = dict(model_config=dict(shard_strategy=TensorShardStrategy()), optimizer_config=dict(initial_scale=2**5))\n"
        "parallel = dict(pipeline=1, tensor=dict(size=1, mode=None))\n"
    )
    colossalai.launch_from_torch(tmp_path / "config.py")
    assert isinstance(gpc.config.zero.model_config.shard_strategy, TensorShardStrategy)
    engine, *rest = colossalai.initialize(
        Net, lambda parameters: HybridAdam(parameters, lr=1e-3), nn.CrossEntropyLoss()
    )
    assert rest == [None, None, None] and engine.optimizer.loss_scale == 32 and gpc.config.BATCH_SIZE == 4
    engine.train()
    engine.zero_grad()
    loss = engine.criterion(engine(torch.ones(2, 6)), torch.tensor([0, 1]))
    engine.backward(loss)
    engine.step()
    assert engine.model.engine.global_steps == 1


def test_the_engine_sets_the_mode_and_discards_gradients_but_of_an_update_that_accumulates(one_rank, caplog):
    caplog.set_level(logging.INFO, logger="megazero")
    colossalai.launch_from_torch({"zero": zero_config(), "gradient_accumulation": 2}, verbose=False)
    assert not caplog.messages
    gpc.config.more = {"inner": 1}
    assert gpc.config.more.inner == 1
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss())
    for is_set in (engine.eval, engine.train):
        is_set()
        assert {part.training for part in model.modules()} == {is_set == engine.train}

    def changes(*gradients: bool) -> bool:
        """Whether the weights change in an update whose batches have such gradients, after others that are discarded."""
        before = model.layers[0].bias.clone()
        engine.backward(engine(torch.ones(2, 6)).float().sum())
        for has_gradients in gradients:
            engine.zero_grad()
            engine.backward(engine(torch.ones(2, 6)).float().sum() * has_gradients)
            engine.step()
        return not torch.equal(before, model.layers[0].bias)

    assert changes(True, False) and not changes(False, False)


@pytest.mark.parametrize(
    ("batch", "options", "found"),
    [
        (([1.0], 2.0), {}, (2.0, 2.0, 4.0, True)),
        (([1.0], 2.0), {"forward_only": True}, (2.0, 2.0, 4.0, False)),
        (([1.0], 2.0), {"return_loss": False}, (2.0, 2.0, None, True)),
        (([1.0], 2.0), {"forward_only": True, "return_loss": False}, (2.0, 2.0, None, False)),
        (([1.0], 2.0), {"return_output_label": False}, (None, None, 4.0, True)),
        ({"x": 1.0}, {}, (2.0, None, 2.0, True)),
        ([1.0, 5.0, 7.0], {}, (14.0, None, 14.0, True)),
    ],
)
def test_a_batch_of_any_form_gives_what_is_asked_for(one_rank, batch, options, found):
    backwards, weight = [], torch.tensor(1.0, requires_grad=True)

    def model(x, *more):
        return (x + 1 + sum(more)) * weight

    def criterion(output, label=1.0):
        return output * label

    engine = colossalai.Engine(model, SimpleNamespace(backward=backwards.append), criterion)
    output, label, loss = engine.execute_schedule(iter([batch]), **options)
    assert (output, label, loss, bool(backwards)) == found
    assert loss is None or not loss.requires_grad


def test_what_cannot_be_obeyed_is_named(one_rank):
    for config, message in [
        ({}, "needs zero = dict"),
        ({"zero": {"model_confg": {}}}, "Did you mean 'model_config'"),
        ({"zero": zero_config(), "parallel": {"tensor": {"size": 2}}}, "parallel .* tensor parallelism"),
        ({"zero": zero_config(), "fp16": {"mode": "naive"}}, "fp16 .* model_config"),
        ({"zero": zero_config(reuse_fp16_shard=True), "gradient_accumulation": 2}, "reuse_fp16_shard=False"),
    ]:
        colossalai.launch_from_torch(config)
        with pytest.raises(ValueError, match=message):
            colossalai.initialize(Net, HybridAdam)
    colossalai.launch_from_torch({"zero": zero_config(no_such_setting=1)})
    with pytest.raises(TypeError, match="no_such_setting"):
        colossalai.initialize(Net, HybridAdam)
    with pytest.raises(AttributeError, match="EPOCHS"):
        _ = gpc.config.EPOCHS


class Noted:
    """An engine and a logger that note what is called."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __getattr__(self, name: str):
        def call(*texts, **_) -> tuple:
            self.calls.append(texts[0] if name == "info" else name)
            return None, None, torch.tensor(1.0)

        return call


def test_a_trainer_calls_engine_and_hooks_in_this_order(one_rank):
    recorder = Recorder()
    engine = Noted(recorder.points)
    trainer = colossalai.Trainer(engine, logger=engine)
    begin, one_batch = ["after_hook_is_attached"], ["before_train_iter", "zero_grad", "execute_schedule", "step"]
    evaluation = ["eval", "before_test", "before_test_epoch"]
    evaluation += ["before_test_iter", "execute_schedule", "after_test_iter"] * 3
    evaluation += ["after_test_epoch", "after_test"]

    def epoch(batches: int) -> list[str]:
        of_batches = [*one_batch, "after_train_iter"] * batches
        return ["train", "before_train_epoch", *of_batches, "after_train_epoch"]

    trainer.fit(range(4), epochs=2, test_dataloader=range(3), test_interval=2, hooks=[recorder])
    assert recorder.points == [*begin, "before_train", *epoch(4), *evaluation, *epoch(4), "after_train"]
    recorder.points.clear()
    trainer.states["of"] = "the call before"
    trainer.fit(range(4), epochs=9, max_steps=10, hooks=[recorder])
    told = "max_steps 10 is reached, training ends"
    assert recorder.points == [*begin, "before_train", *epoch(2), told, "after_train"] and not trainer.states
    recorder.points.clear()
    trainer.evaluate(range(3), hooks=[recorder])
    assert recorder.points == [*begin, *evaluation]
    recorder.points.clear()
    trainer.predict(torch.ones(1))
    assert recorder.points == ["eval", "execute_schedule"]
    with pytest.raises(ValueError, match="timer=.* cannot be obeyed"):
        colossalai.Trainer(engine, timer=engine)


class WithLoss(Net):
    """As Hugging Face's models: keywords in, an object with the loss out."""

    def forward(self, x, labels):
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.layers(x), labels), logits=None)


def test_a_model_that_has_its_own_loss_needs_no_criterion(one_rank):
    colossalai.launch_from_torch({"zero": zero_config()})
    engine, train, _, _ = colossalai.initialize(
        WithLoss(), HybridAdam, train_dataloader=[{"x": torch.ones(2, 6), "labels": torch.tensor([0, 1])}] * 5
    )
    losses = colossalai.LossHook()
    trainer = colossalai.Trainer(engine)
    trainer.fit(train, epochs=1, hooks=[losses])
    first = trainer.states["metrics"]["train"]
    trainer.fit(train, epochs=20, max_steps=50, hooks=[losses])
    assert trainer.states["metrics"]["train"] < first and trainer.cur_step == 50
    trainer.evaluate([], hooks=[losses])
    assert math.isnan(trainer.states["metrics"]["test"]), "a small test set with drop_last has no batches"
    with pytest.raises(ValueError, match="with a length"):
        trainer.fit(iter(train), epochs=100)


def test_the_loss_hook_keeps_no_loss_of_an_epoch_that_may_be_long():
    hook, trainer, given = colossalai.LossHook(), SimpleNamespace(states={}), []
    hook.before_train_epoch(trainer)
    for i in range(300):
        loss = torch.tensor(float(i), dtype=torch.bfloat16 if i < 256 else torch.float32)  # both have it exactly
        hook.after_train_iter(trainer, None, None, loss)
        given.append(ref(loss))
    del loss
    assert not any(loss() is not None for loss in given)
    hook.after_train_epoch(trainer)
    assert trainer.states["metrics"]["train"] == 149.5


def test_the_schedule_hook_steps_by_batch_or_by_epoch(one_rank):
    for by_epoch, rate in [(True, 0.5**2), (False, 0.5**8)]:
        colossalai.launch_from_torch({"zero": zero_config()})
        model = Net()
        optimizer = HybridAdam(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        engine, *_ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), lr_scheduler=schedule)
        colossalai.Trainer(engine).fit(
            DataLoader(data(0), 2), epochs=2, hooks=[colossalai.LRSchedulerHook(schedule, by_epoch)]
        )
        assert engine.model.engine.get_lr() == [rate]
