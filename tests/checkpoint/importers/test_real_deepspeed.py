"""What the installed DeepSpeed saves is read bit for bit: against its optimizer in memory, its script, and our made-up files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from megazero.checkpoint.importers.deepspeed import read_deepspeed
from megazero.checkpoint.importers.foreign import ForeignCheckpoint
from megazero.checkpoint.importers.torch_files import Record, load_torch_file
from tests.checkpoint.importers.deepspeed_checkpoints import make_universal, small_model, values, write_checkpoint
from tests.ranks import run_ranks


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen layer, buffers, a parameter of one element."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.hidden = nn.Linear(3, 7)
        self.out = nn.Linear(7, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("scale", torch.full((2,), 1 / 3))
        self.register_buffer("scratch", torch.ones(4), persistent=False)

    def forward(self, tokens):
        hidden = torch.tanh(self.hidden(self.frozen(self.embed(tokens))))
        return nn.functional.cross_entropy((self.head(self.out(hidden)) * self.gain).float(), tokens)


def train_in_deepspeed(folder: str, stage: int, dtype: str, zero: dict) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # it is slow on CPUs, but works
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    model = Net()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 0.01},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **{key: value for key, value in zero.items() if key != "data_types"}},
        "data_types": zero.get("data_types", {}),
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        dtype: {"enabled": dtype != "fp32"}
        | ({"initial_scale_power": 8, "loss_scale_window": 2} if dtype == "fp16" else {}),
    }
    if dtype == "fp32":
        del config["fp32"]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        tokens = torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(10 * step + engine.global_rank))
        engine.backward(engine(tokens))
        engine.step()
    engine.save_checkpoint(folder, client_state={"iteration": 3, "rng": np.random.RandomState(1).get_state()})
    if stage == 0:
        params = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        states = {n: engine.optimizer.state[p] for n, p in params.items()} if dtype == "fp32" else {}
        want = {
            n: {"master": p.detach().float(), **{s: v for s, v in states.get(n, {}).items() if v.dim()}}
            for n, p in params.items()
        }
        if engine.global_rank == 0:
            torch.save(want, Path(folder) / "want.pt")
        return
    if stage < 3 and hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # 0.19.8 finds only the first group's states, because it links them all after the first group's first step.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    want = {}
    for name, p in engine.module.named_parameters():
        if p.requires_grad:
            want[name] = {"master": safe_get_full_fp32_param(p).clone()}
            want[name] |= {s: safe_get_full_optimizer_state(p, s).clone() for s in ("exp_avg", "exp_avg_sq")}
    constants = {name: b for name, b in engine.module.named_buffers() if name != "scratch"}
    if stage < 3:
        constants |= {name: p.detach() for name, p in engine.module.named_parameters() if not p.requires_grad}
    if engine.global_rank == 0:
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        torch.save(
            [want, constants, engine.lr_scheduler.state_dict(), {} if scaler is None else vars(scaler)],
            Path(folder) / "want.pt",
        )


def entries(value, path="") -> dict[str, str]:
    """Where there is what in a file: the paths of keys -> types; of a list the first item counts, sizes do not."""
    value = vars(value) if isinstance(value, Record) else value
    items = list(enumerate(value))[:1] if type(value) is list else value.items() if isinstance(value, dict) else []
    found = {where: kind for key, item in items for where, kind in entries(item, f"{path}/{key}").items()}
    return found or {path: type(value).__name__}


REAL = [
    *((stage, dtype, {}) for stage in (1, 2, 3) for dtype in ("fp32", "bf16", "fp16")),
    # Without alignment safe_get_full_* of 0.19.8 give round-robin parameters each other's values; its files and script are right.
    *((stage, "fp32", {"round_robin_gradients": True, "parameter_alignment": True}) for stage in (1, 2)),
    (2, "fp32", {"elastic_checkpoint": True}),
    (3, "bf16", {"sub_group_size": 20}),
    *((stage, "fp32", {"offload_optimizer": {"device": "cpu"}}) for stage in (2, 3)),
    (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),  # another optimizer class, other keys
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("stage", "dtype", "zero"), REAL)
def test_real_checkpoints(tmp_path, stage, dtype, zero, world):
    pytest.importorskip("deepspeed")
    run_ranks(world, train_in_deepspeed, str(tmp_path), stage, dtype, zero, timeout_s=600)
    want, constants, schedule, scaler = torch.load(tmp_path / "want.pt", weights_only=False)
    checkpoint = read_deepspeed(tmp_path)
    found = values(checkpoint)
    assert_close({n: s for n, s in found.items() if checkpoint.tensors[n].kind == "trained"}, want, rtol=0, atol=0)
    assert_close({n: found[n]["constant"] for n in constants}, constants, rtol=0, atol=0)
    frozen = {"frozen.weight", "frozen.bias"}
    assert {name for name, tensor in checkpoint.tensors.items() if tensor.kind == "frozen"} == frozen
    assert {name for name, tensor in checkpoint.tensors.items() if tensor.kind == "buffer"} == {"count", "scale"}
    assert checkpoint.aliases == {"head.weight": "embed.weight"}
    if "data_types" not in zero:  # DeepSpeed's script refuses such files as "not a zero checkpoint"
        compare_with_script(tmp_path, checkpoint, frozen if stage == 1 else set())
    assert checkpoint.lr_scheduler == schedule and checkpoint.global_steps == 3
    assert list(checkpoint.client_state) == ["iteration", "rng"]
    if dtype == "fp16":
        assert checkpoint.loss_scaler["scale"] == scaler["cur_scale"]
    else:
        assert checkpoint.loss_scaler is None
    if not zero and dtype == "fp16":
        compare_structure(tmp_path, stage, world)
        compare_universal(tmp_path, stage)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_real_checkpoints_without_zero(tmp_path, dtype, caplog):
    pytest.importorskip("deepspeed")
    run_ranks(2, train_in_deepspeed, str(tmp_path), 0, dtype, {}, timeout_s=600)
    want = torch.load(tmp_path / "want.pt")
    checkpoint = read_deepspeed(tmp_path)
    found = values(checkpoint)
    for name, states in want.items():
        assert_close(found[name]["master"], states["master"], rtol=0, atol=0)
    assert checkpoint.aliases == {"head.weight": "embed.weight"} and checkpoint.global_steps == 3
    assert "state is left out" in caplog.text  # two groups and a frozen layer: whose state it is cannot be known


def compare_with_script(folder: Path, checkpoint: ForeignCheckpoint, missing: set[str]) -> None:
    """The checkpoint's own zero_to_fp32 gives the same, but for what it does not find."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    merged = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    named = {name: next(iter(states.values())) for name, states in values(checkpoint).items()}
    named |= {alias: named[name] for alias, name in checkpoint.aliases.items()}
    assert named.keys() - merged.keys() == missing and merged.keys() <= named.keys()
    assert_close({n: named[n].float() for n in merged}, {n: v.float() for n, v in merged.items()}, rtol=0, atol=0)


def compare_structure(folder: Path, stage: int, world: int) -> None:
    """The files that our tests write have the keys and types of the real ones."""
    client = {"iteration": 3, "rng": np.random.RandomState(1).get_state()}
    write_checkpoint(folder / "made", small_model(), stage, world, client=client)
    real, made = folder / "global_step3", folder / "made" / "global_step3"
    assert sorted(path.name for path in real.iterdir()) == sorted(path.name for path in made.iterdir())
    by_name = re.compile(
        "/(module|ds_config|frozen_param_[a-z]+|shared_params|param_shapes/0|.*/param_slice_mappings/0|lr_scheduler)/"
    )
    for path in real.iterdir():
        there, here = (
            {k: v for k, v in entries(load_torch_file(p)).items() if not by_name.match(k)}
            for p in (path, made / path.name)
        )
        assert here.items() <= there.items(), dict(here.items() - there.items())
        assert all("/param_groups/0/" in name for name in there.keys() - here.keys()), there.keys() - here.keys()


def compare_universal(folder: Path, stage: int) -> None:
    """What ds_to_universal makes of the checkpoint is read as the checkpoint; our made-up files have its keys and types."""
    made = folder / "made"
    make_universal(made, small_model(), stage)
    options = [
        "--inject_missing_state",
        "--input_folder",
        folder / "global_step3",
        "--output_folder",
        folder / "universal",
    ]
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *options], check=True)
    original, found = read_deepspeed(folder), read_deepspeed(folder, "universal")
    assert_close(values(found), values(original), rtol=0, atol=0)
    assert replace(found, tensors={}, client_state={}) == replace(original, tensors={}, client_state={})
    for path in (made / "global_step3" / "zero").glob("**/*.pt"):
        there, here = (
            entries(load_torch_file(at / path.relative_to(made / "global_step3")))
            for at in (folder / "universal", made / "global_step3")
        )
        assert here.items() <= there.items(), (path, dict(here.items() - there.items()))
