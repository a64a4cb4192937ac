"""Every elementwise optimizer of torch over flat shards, with a weight decay per parameter group, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megazero import mpu
from megazero.engine import Engine, weight_decay_groups
from megazero.optim.optimizers import TORCH_ELEMENTWISE
from megazero.zero.config import ZeroConfig
from megazero.zero.optimizer import refuse_untested
from tests.model.plain_gpt2 import decay_groups
from tests.ranks import run_ranks

OPTIMIZERS = {
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "Adadelta": {"lr": 1.0},
    "Adagrad": {"lr": 0.05},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.05, "t0": 2},
}
KINDS = {kind.__name__: kind for kind in TORCH_ELEMENTWISE}
DECAY = 0.1


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 3))


def batches(size: int) -> torch.Tensor:
    """[steps, ranks, 4, 7]"""
    return torch.randn(4, size, 4, 7, generator=torch.Generator().manual_seed(1))


def plain(name: str, size: int) -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = KINDS[name](decay_groups(model, DECAY), **OPTIMIZERS[name])
    for batch in batches(size):
        optimizer.zero_grad()
        (sum(model(x).square().mean() for x in batch) / size).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def optimizer_case(names: list[str]) -> None:
    groups = mpu.initialize_model_parallel(1)
    for name in names:
        want = plain(name, groups.data_parallel_size)
        for stage in (0, 2, 3):
            model = make_model()
            engine = Engine(
                model,
                groups,
                lambda g, name=name: KINDS[name](g, **OPTIMIZERS[name]),
                *weight_decay_groups(model, DECAY),
                zero=ZeroConfig(stage=stage),
            )
            for batch in batches(groups.data_parallel_size):
                engine.backward(engine(batch[groups.data_parallel_rank]).square().mean())
                engine.step()
            got, what = engine.state_dict(), f"{name}, stage {stage}"
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6, msg=lambda m, what=what: f"{what}: {m}")
            engine.destroy()


def test_elementwise_optimizers_over_flat_shards_equal_torch():
    run_ranks(3, optimizer_case, list(OPTIMIZERS))


def test_this_list_is_the_engines():
    unlike = KINDS.keys() ^ OPTIMIZERS.keys()
    assert not unlike, "OPTIMIZERS above has settings for each of TORCH_ELEMENTWISE, and for no other"


class FusedAdam(torch.optim.Optimizer):
    """As apex's: it counts steps in its groups, and its state has moments only."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 0.001)
                root = (state["exp_avg_sq"] / (1 - 0.999**step)).sqrt().add_(1e-8)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - 0.9**step))


FusedAdam.__module__ = "apex.optimizers.fused_adam"


def apex_case(directory: str) -> None:
    groups = mpu.initialize_model_parallel(1)
    want, steps = plain("AdamW", groups.data_parallel_size), batches(groups.data_parallel_size)
    for stage in (0, 2, 3):
        for first in (0, 2):
            model = make_model()
            zero = ZeroConfig(stage=stage)
            engine = Engine(model, groups, FusedAdam, *weight_decay_groups(model, DECAY), zero=zero)
            if first:
                engine.load_checkpoint(f"{directory}/{stage}")
            for batch in steps[first : first + 2]:
                engine.backward(engine(batch[groups.data_parallel_rank]).square().mean())
                engine.step()
            engine.save_checkpoint(f"{directory}/{stage}")
            got = engine.state_dict()
            if first:
                engine.load_checkpoint(f"{directory}/{stage}", load_optimizer_states=False)
                assert not any("step" in group for group in engine.optimizer.param_groups)
            engine.destroy()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_apexs_adam_continues_its_count_of_steps_from_a_checkpoint(tmp_path):
    run_ranks(2, apex_case, str(tmp_path))


def test_another_class_with_the_name_of_apexs_adam_is_refused():
    kind = type("FusedAdam", (torch.optim.SGD,), {"__module__": "elsewhere"})
    with pytest.raises(ValueError, match=r"elsewhere\.FusedAdam is not known to be elementwise"):
        refuse_untested(kind([torch.zeros(1, requires_grad=True)]))
