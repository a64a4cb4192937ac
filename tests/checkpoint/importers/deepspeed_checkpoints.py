"""Writes checkpoints as DeepSpeed 0.19.8 does, without DeepSpeed: the same keys, classes, cuts and paddings.

`test_real_deepspeed` compares these files with those of the real one where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.importers.foreign import ForeignCheckpoint
from megazero.checkpoint.importers.torch_files import load_torch_file

States = dict[str, Tensor]  # "master", "exp_avg", "exp_avg_sq"


@dataclass
class Saved:
    """What a checkpoint holds; parameters have the same name everywhere."""

    groups: list[dict[str, States]]
    frozen: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    steps: int = 3

    @property
    def trained(self) -> dict[str, States]:
        return {name: states for group in self.groups for name, states in group.items()}


def states_of(*shape: int) -> States:
    return {name: torch.rand(shape) for name in ("master", "exp_avg", "exp_avg_sq")}


def small_model() -> Saved:
    """Two groups of odd sizes, one of a single element, a tied and a frozen parameter, a buffer."""
    torch.manual_seed(0)
    return Saved(
        groups=[
            {"embed.weight": states_of(11, 5), "hidden.weight": states_of(7, 5), "gain": states_of(1)},
            {"hidden.bias": states_of(7), "out.bias": states_of(3)},
        ],
        frozen={"frozen.weight": torch.rand(5, 3).bfloat16(), "frozen.bias": torch.rand(5).bfloat16()},
        buffers={"count": torch.arange(3)},
        shared={"head.weight": "embed.weight"},
    )


def values(checkpoint: ForeignCheckpoint) -> dict[str, States]:
    """Everything that was read: of frozen parameters and buffers the only state is "constant"."""
    return {name: {s: read() for s, read in tensor.states.items()} for name, tensor in checkpoint.tensors.items()}


@contextlib.contextmanager
def fake_deepspeed():
    """Modules of DeepSpeed's names with the classes that its checkpoints contain; yields them in one namespace."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    classes: dict[str, type] = {
        "runtime.fp16.loss_scaler": type("LossScaler", (), {}),
        "runtime.fp16.loss_scaler.": type("DynamicLossScaler", (), {}),
        "runtime.zero.config": enum.IntEnum("ZeroStageEnum", {"optimizer_states": 1, "gradients": 2, "weights": 3}),
        "utils.tensor_fragment": type("fragment_address", (), {}),
    }
    for name in before:
        del sys.modules[name]
    for name, cls in classes.items():
        cls.__module__ = f"deepspeed.{name.rstrip('.')}"
        parts = cls.__module__.split(".")
        for count in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:count]), types.ModuleType(".".join(parts[:count])))
        setattr(sys.modules[cls.__module__], cls.__name__, cls)
    try:
        yield types.SimpleNamespace(**{cls.__name__: cls for cls in classes.values()})
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            del sys.modules[name]
        sys.modules.update(before)


def with_attributes(cls: type, **attributes: Any) -> Any:
    made = cls()
    vars(made).update(attributes)
    return made


def client_state() -> dict[str, Any]:
    return {
        "iteration": 30,
        "args": argparse.Namespace(lr=0.1, folder=Path("data/text"), dtype=torch.float16, sizes=[1, 2]),
        "numpy_rng": np.random.RandomState(1).get_state(),
        "best": np.float64(0.5),
        "torch_rng": torch.get_rng_state(),
    }


def write_checkpoint(
    folder: Path,
    saved: Saved,
    stage: int,
    world: int,
    *,
    tag: str = "global_step3",
    prefix: str = "",
    elastic: bool = False,
    gaps: bool = False,
    dynamic: bool = True,
    mp_rank: int = 0,
    mp_world: int = 1,
    client: dict[str, Any] | None = None,
) -> None:
    """Writes DIR/latest and the files of one model-parallel rank.

    Args:
        prefix: of the optimizer's files, "bf16_".
        elastic: the optimizer's state as a list, without paddings (stages 1 and 2).
        gaps: parameters begin at multiples of 8 elements (`parameter_alignment`, stages 1 and 2).
        dynamic: a dynamic loss scale.
    """
    (folder / tag).mkdir(parents=True, exist_ok=True)
    (folder / "latest").write_text(tag)
    with fake_deepspeed() as names:
        for rank in range(world):
            model = _model_file(saved, stage, world, rank, mp_rank, mp_world) | (
                client_state() if client is None else client
            )
            if stage == 3:
                torch.save(model, folder / tag / f"zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_model_states.pt")
            elif rank == 0:
                torch.save(model, folder / tag / f"mp_rank_{mp_rank:02d}_model_states.pt")
            scaler = with_attributes(names.LossScaler, cur_scale=1.0, dynamic=False)
            if dynamic:
                counters = {
                    "cur_iter": 9,
                    "last_overflow_iter": 4,
                    "scale_factor": 2.0,
                    "scale_window": 1000,
                    "min_scale": 1,
                }
                hysteresis = {
                    "delayed_shift": 2,
                    "cur_hysteresis": 1,
                    "consecutive_hysteresis": False,
                    "raise_error_at_min_scale": True,
                }
                scaler = with_attributes(
                    names.DynamicLossScaler, cur_scale=4096.0, dynamic=True, dtype=torch.half, **counters, **hysteresis
                )
            state = {
                "loss_scaler": scaler,
                "dynamic_loss_scale": dynamic,
                "overflow": False,
                "zero_stage": names.ZeroStageEnum(stage),
            }
            state |= _shares(saved, world, rank) if stage == 3 else _split(saved, world, rank, elastic, gaps, names)
            content = {"optimizer_state_dict": state, "ds_config": _config(stage), "ds_version": "0.19.8"}
            torch.save(content, folder / tag / f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def _config(stage: int) -> dict[str, Any]:
    adam = {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.95]}}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": adam, "zero_optimization": {"stage": stage}}


def _model_file(saved: Saved, stage: int, world: int, rank: int, mp_rank: int, mp_world: int) -> dict[str, Any]:
    module = OrderedDict()
    for name, states in saved.trained.items():
        module[name] = states["master"].bfloat16() if stage < 3 else torch.empty(0)
    for name, value in saved.frozen.items():
        module[name] = value if stage < 3 else torch.empty(0)
    module |= {alias: module[name] for alias, name in saved.shared.items()} | saved.buffers
    frozen_shapes = OrderedDict((name, value.shape) for name, value in saved.frozen.items())
    fragments = {n: v if stage < 3 else _padded(v, world).view(world, -1)[rank] for n, v in saved.frozen.items()}
    return {
        "module": module,
        "buffer_names": list(saved.buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict((n, s["master"].shape) for n, s in group.items()) for group in saved.groups],
        "frozen_param_shapes": frozen_shapes if stage > 1 else None,
        "shared_params": saved.shared
        if rank == 0 and mp_rank == 0
        else {},  # only the first of all ranks looks for them
        "frozen_param_fragments": OrderedDict(fragments) if stage > 1 else None,
        "lr_scheduler": {"last_batch_iteration": 3},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 1,
        "global_steps": 4,
        "global_samples": 8,
        "dp_world_size": world,
        "mp_world_size": mp_world,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": mp_world},
        "ds_config": _config(stage),
        "ds_version": "0.19.8",
    }


def _padded(value: Tensor, multiple: int) -> Tensor:
    flat = value.flatten()
    return torch.cat([flat, flat.new_zeros(-flat.numel() % multiple)])


def _adam(states: list[dict[str, Tensor]], steps: int) -> dict[str, Any]:
    """torch.optim.Adam's state dict over flat vectors."""
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    return {
        "state": {i: {"step": torch.tensor(float(steps)), **state} for i, state in enumerate(states)},
        "param_groups": [{**settings, "params": [i]} for i in range(len(states))],
    }


def _split(
    saved: Saved, world: int, rank: int, elastic: bool, gaps: bool, names: types.SimpleNamespace
) -> dict[str, Any]:
    """Stages 1 and 2."""
    whole, lean, paddings, behind = [], [], [], []
    for group in saved.groups:
        sizes = [states["master"].numel() for states in group.values()]
        behind.append([-size % 8 if gaps and i < len(sizes) - 1 else 0 for i, size in enumerate(sizes)])
        used = sum(sizes) + sum(behind[-1])
        size = (used + -used % (2 * world)) // world
        filled = min(max(used - rank * size, 0), size)
        paddings.append(size - filled)
        parts = {}
        for state in ("master", "exp_avg", "exp_avg_sq"):
            pieces = zip(group.values(), behind[-1], strict=True)
            flat = torch.cat([torch.cat([s[state].flatten(), torch.zeros(gap)]) for s, gap in pieces])
            parts[state] = _padded(flat, 2 * world).chunk(world)[rank].clone()
        whole.append(parts)
        lean.append({state: part[:filled].clone() for state, part in parts.items()})
    moments = [{k: v for k, v in (lean if elastic else whole)[i].items() if k != "master"} for i in range(len(whole))]
    adam: Any = _adam(moments, saved.steps)
    state: dict[str, Any] = {
        "clip_grad": 0.0,
        "base_optimizer_state": [{**m, "step": saved.steps} for m in moments] if elastic else adam,
        "single_partition_of_fp32_groups": [parts["master"] for parts in lean],
        "group_paddings": paddings,
        "partition_count": [world] * len(saved.groups),
        "ds_version": "0.19.8",
        "param_slice_mappings": [
            OrderedDict((name, with_attributes(names.fragment_address, numel=1, start=0)) for name in group)
            for group in saved.groups
        ],
        "param_alignment_paddings": behind,
    }
    return state


def _shares(saved: Saved, world: int, rank: int) -> dict[str, Any]:
    """Stage 3, one sub-group for each group."""
    flat = []
    for group in saved.groups:
        flat.append(
            {
                state: torch.cat([_padded(s[state], world).view(world, -1)[rank] for s in group.values()])
                for state in ("master", "exp_avg", "exp_avg_sq")
            }
        )
    moments = [{state: part for state, part in parts.items() if state != "master"} for parts in flat]
    return {
        "partition_count": world,
        "optimizer_state_dict": _adam(moments, saved.steps),
        "fp32_flat_groups": [parts["master"] for parts in flat],
    }


def make_universal(folder: Path, saved: Saved, stage: int, *, tag: str = "global_step3") -> None:
    """What ds_to_universal makes of a checkpoint: its optimizer's files become one for each state of a parameter."""
    files = sorted((folder / tag).glob("*_optim_states.pt"))
    content = load_torch_file(files[0])["optimizer_state_dict"]
    base = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    cut = {} if stage == 3 else dict.fromkeys((base, "param_slice_mappings", "single_partition_of_fp32_groups"))
    zero = folder / tag / "zero"
    zero.mkdir()
    common = {key: value for key, value in content.items() if key not in cut}
    with fake_deepspeed() as names:
        common |= {"loss_scaler": with_attributes(names.DynamicLossScaler, **vars(content["loss_scaler"]))}
        torch.save(common | {"param_groups": content[base]["param_groups"]}, zero / "optimizer_state.pt")
    for path in files:
        path.unlink()
    for name, states in saved.trained.items():
        (zero / name).mkdir()
        for state, value in states.items():
            what = value.flatten() if stage == 3 else {"cat_dim": 0, "param": value}
            torch.save(what, zero / name / ("fp32.pt" if state == "master" else f"{state}.pt"))
        if stage < 3:
            torch.save(torch.tensor(float(saved.steps)), zero / name / "step.pt")
    if stage < 3:  # everything in the model file
        constants = (
            saved.frozen | saved.buffers | {alias: saved.trained[n]["master"] for alias, n in saved.shared.items()}
        )
        for name, value in constants.items():
            (zero / name).mkdir()
            torch.save({"param": value.float()}, zero / name / "fp32.pt")
    (folder / "latest").rename(folder / "latest_universal")
