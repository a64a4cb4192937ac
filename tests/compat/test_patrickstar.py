"""PatrickStar's `initialize_engine` against plain torch, and its configuration key by key."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from megazero.compat import patrickstar
from megazero.compat.patrickstar import initialize_engine
from tests.ranks import run_ranks
from tests.zero.models import full_grad

PARAMS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}
# What its examples use, with every switch at a value that can be obeyed.
FULL = {
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 4,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "default_chunk_size": 64 * 1024 * 1024,
    "release_after_init": False,
    "use_fake_dist": False,
    "use_cpu_embedding": False,
    "client": {
        "mem_tracer": {
            "use_async_mem_monitor": True,
            "warmup_gpu_chunk_mem_ratio": 0.1,
            "overall_gpu_mem_ratio": 0.8,
            "overall_cpu_mem_ratio": 0.8,
            "margin_use_ratio": 0.8,
            "use_fake_dist": False,
            "with_static_partition": False,
        },
        "opts": {"with_mem_saving_comm": False, "with_mem_cache": False, "with_async_move": False},
    },
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x).float(), y)


def model_func() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batches(size: int) -> list[tuple[Tensor, Tensor]]:
    """One batch per step, of 2 samples for each rank."""
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2 * size, 5, generator=random), torch.randint(0, 3, (2 * size,), generator=random))
        for _ in range(4)
    ]


def plain(kind: str, size: int, clip: float) -> tuple[list[float], dict[str, Tensor]]:
    model = model_func()
    adam = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[kind](model.parameters(), **PARAMS)
    losses = []
    for x, y in batches(size):
        adam.zero_grad()
        loss = model(x, y)
        loss.backward()
        if clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        adam.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def train_case(kind: str, config: dict, tolerance: float) -> None:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = {"optimizer": {"type": kind, "params": {**PARAMS, "use_hybrid_adam": True}}, **config}
    model, optimizer = initialize_engine(model_func=model_func, local_rank=rank, config=config)
    losses = []
    for x, y in batches(size):
        optimizer.zero_grad()
        loss = model(x[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2])
        model.backward(loss)
        optimizer.step()
        mean = loss.detach() / size
        torch.distributed.all_reduce(mean)
        losses.append(float(mean))
    want, weights = plain(kind, size, config.get("gradient_clipping", -1))
    assert losses == pytest.approx(want, rel=tolerance)
    state = model.state_dict()
    torch.testing.assert_close(state, weights, rtol=tolerance, atol=tolerance, check_dtype=False)
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    assert all(torch.equal(value, state[name] + 1) for name, value in model.state_dict().items())
    engine = model.engine
    assert engine.zero.stage == 3 and engine.memory()["buffers"] == 0
    with pytest.raises(NotImplementedError, match="save_checkpoint"):
        optimizer.state_dict()
    engine.destroy()


def train_cases() -> None:
    train_case("Adam", {}, 1e-5)
    train_case("AdamW", {"gradient_clipping": 0.05, "release_after_init": True, "chunk_size": 4096}, 1e-5)
    train_case("Adam", {**FULL, "gradient_clipping": -1}, 3e-3)


def test_it_trains_as_plain_torch():
    run_ranks(2, train_cases)


def test_a_gradient_that_overflows_changes_the_scale_and_nothing_else(one_rank):
    model, optimizer = initialize_engine(model_func, 0, {"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 1}})
    x, y = batches(1)[0]
    before, scale = model.state_dict(), optimizer.loss_scale
    model.backward(model(x, y) * 1e30)
    optimizer.step()
    assert optimizer.loss_scale == scale / 2 == 2.0**15
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("count", "is_told"), [(1, False), (8, True)])
def test_a_rank_that_sees_its_own_gpu_alone_may_have_any_number(one_rank, monkeypatch, count, is_told):
    monkeypatch.setattr(patrickstar.comm, "local_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(
        ValueError, match="local_rank is 3, and this process computes on cuda:0" if is_told else "has no 'key'"
    ):
        initialize_engine(model_func, 3, {"fp16": {"key": 1}})


def test_a_batch_norm_computes_in_fp16(one_rank):
    model, _ = initialize_engine(lambda: nn.BatchNorm1d(5), 0, {"fp16": {"enabled": True}})
    assert model(torch.randn(4, 5)).dtype == model.module.running_mean.dtype == torch.float16


@pytest.mark.parametrize(
    ("config", "inits"),
    [
        ({}, [None]),
        ({"fp16": {"enabled": True}}, [torch.float16]),
        ({"fp16": {"loss_scale": 0}}, [None]),
        ({"release_after_init": True}, []),
    ],
    ids=str,
)
def test_a_model_is_sharded_while_it_is_built_unless_it_is_to_be_afterwards(one_rank, monkeypatch, config, inits):
    found = []
    monkeypatch.setattr(patrickstar.zero, "Init", lambda dtype: found.append(dtype) or nullcontext())
    model, _ = initialize_engine(lambda: model_func().eval(), 0, config)
    assert found == inits and model.training and model.module.training


def test_a_state_dict_goes_where_torch_asks_for_it_and_a_closure_is_refused(one_rank):
    model, optimizer = initialize_engine(model_func, 0)
    given = {"kept": 1}
    assert model.state_dict(destination=given, prefix="net.") is given
    assert set(given) == {"kept", *("net." + name for name in model.state_dict())}
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 1.0)


def test_a_backward_takes_the_place_of_the_one_before(one_rank):
    model, _ = initialize_engine(model_func, 0)
    x, y = batches(1)[0]
    grads = []
    for _ in range(2):
        model.backward(model(x, y))
        grads.append(full_grad(model.engine, "layers.0.weight"))
    assert torch.equal(*grads) and model.engine.get_lr() == [0.01]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"defualt_chunk_size": 1}, "Did you mean 'default_chunk_size'"),
        ({"use_cpu_embedding": True}, "use_cpu_embedding true cannot be obeyed"),
        ({"use_fake_dist": True}, "use_fake_dist true .* torchrun"),
        ({"client": {"opts": {"with_mem_saving_comm": True}}}, "client.opts.with_mem_saving_comm"),
        ({"client": {"opts": {"nothing": True}}}, "client.opts.nothing"),
        ({"client": {"optss": {}}}, "Did you mean 'opts'"),
        ({"client": None}, r"config\['client'\] must be a dict, got None"),
        ({"client": {"opts": None}}, r"config\['client'\]\['opts'\] must be a dict, got None"),
        ({"optimizer": None}, r"config\['optimizer'\] must be a dict, got None"),
        ({"optimizer": {"params": [1]}}, r"config\['optimizer'\]\['params'\] must be a dict, got \[1\]"),
        ({"fp16": True}, r"config\['fp16'\] must be a dict, got True"),
        ({"optimizer": {"type": "SGD"}}, "must be Adam or AdamW, got 'SGD'"),
        ({"optimizer": {"params": {"beta": 1}}}, "Did you mean 'betas'"),
        ({"fp16": {"enabled": True, "scale": 1}}, "has no 'scale'"),
        ({"default_chunk_size": -1}, "sub_group_size"),
        (
            {"client": {"mem_tracer": {"margin_use_ratio": 2}}},
            "client.mem_tracer.margin_use_ratio must lie between 0 and 1",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_obeyed_is_named_before_the_model_is_built(one_rank, config, message):
    with pytest.raises(ValueError, match=message):
        initialize_engine(lambda: pytest.fail("it was built"), 0, config)


@pytest.mark.parametrize(
    ("tracer", "placement"),
    [
        ({}, ("auto", 0.8)),
        ({"margin_use_ratio": 0.5}, ("auto", 0.5)),
        ({"with_static_partition": True}, ("static", 0.0)),
        ({"with_static_partition": True, "margin_use_ratio": 0.3}, ("static", 0.0)),
    ],
    ids=str,
)
def test_the_memory_tracers_settings_decide_the_placement(one_rank, tracer, placement, caplog):
    caplog.set_level(logging.INFO, logger="megazero")
    model, _ = initialize_engine(model_func, 0, {"client": {"mem_tracer": tracer}})
    section = model.engine.config.zero_optimization
    assert section.placement == placement[0]
    assert ("client.mem_tracer.margin_use_ratio (" in caplog.text) == (len(tracer) == 2)
    assert placement[0] == "static" or section.gpu_margin_mem_ratio == placement[1]
    assert section.offload_optimizer.device == section.offload_param.device == "cpu"


def test_a_model_and_a_client_are_refused(one_rank):
    with pytest.raises(TypeError, match="a function without arguments"):
        initialize_engine(Net(), 0)
    with pytest.raises(TypeError, match="no client"):
        initialize_engine(model_func, 0, None, object())
