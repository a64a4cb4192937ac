"""A plan as text tables for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from megazero.logging import counted, table
from megazero.optim.loss_scaler import DTYPES
from megazero.plan.fit import check_fits, largest_batch, largest_model, unchecked, what_to_change
from megazero.plan.job_plan import JobPlan, activation_modes
from megazero.plan.limits import Limits
from megazero.zero.memory import size

HOME_NAMES = {"accelerator": "device", "cpu": "host", "nvme": "nvme"}


def as_json(plan: JobPlan, limits: Limits) -> dict[str, Any]:
    """Everything in the plan, bytes and counts, for programs."""
    setup, shape, states = plan.setup, plan.setup.shape, plan.states
    batch, layers = _largest(plan, limits)
    return {
        "ranks": setup.world_size,
        "ranks_per_node": setup.ranks_per_node,
        "model_parallel_size": shape.model_parallel_size,
        "data_parallel_size": setup.data_parallel_size,
        "batch_size": shape.batch_size,
        "micro_batches": setup.states.micro_batches,
        "seq_length": shape.seq_length,
        "precision": _precision(shape.dtype),
        "parameters": setup.model.num_parameters(),
        "states": {**asdict(states), "resident": states.resident, "at_rest": states.at_rest, "peak": states.peak},
        "activations": asdict(plan.activations),
        "activation_modes": {name: asdict(work) for name, work in activation_modes(setup).items()},
        "moments": plan.moments,
        "device": plan.device,
        "runtime": plan.runtime,
        "host_per_rank": plan.host,
        "host_per_node": plan.per_node(plan.host),
        "disk_per_node": plan.per_node(plan.disk),
        "traffic": asdict(plan.traffic),
        "limits": asdict(limits),
        "problems": [{**asdict(problem), "text": str(problem)} for problem in check_fits(plan, limits)],
        "what_to_change": [change.flags for change in what_to_change(setup, limits)],
        "largest_batch_size": batch,
        "largest_num_layers": layers,
    }


def as_text(plan: JobPlan, limits: Limits) -> str:
    """The tables that `python -m megazero.plan` prints."""
    parts = [_job(plan), _states(plan), _modes(plan), _moments(plan)]
    parts += [_node(plan)] if plan.host or plan.disk else []
    parts += [_traffic(plan)] if any(vars(plan.traffic).values()) else []
    return "\n\n".join([*parts, _verdict(plan, limits)])


def _job(plan: JobPlan) -> str:
    setup, shape = plan.setup, plan.setup.shape
    model = setup.model
    width = f"{counted(model.num_layers, 'layer')} x {model.hidden_size}, vocabulary {model.require_vocab_size():,}"
    ranks = (
        f"{setup.world_size} = {shape.model_parallel_size} tensor-parallel x {setup.data_parallel_size} data-parallel"
    )
    shards = f" over {setup.states.num_shards} ranks each" if setup.states.zero.shard_size else ""
    batch = (
        f"{counted(shape.batch_size, 'sequence')} x {shape.seq_length} tokens, {setup.states.micro_batches} per step"
    )
    rows = [
        ("parameters", f"{model.num_parameters():,} ({width})"),
        ("ranks", f"{ranks}, {setup.ranks_per_node} on a node"),
        ("micro-batch", batch),
        (
            "ZeRO",
            f"stage {setup.states.zero.stage}{shards}, {_precision(shape.dtype)}, gradients in {setup.states.zero.grad_dtype}",
        ),
    ]
    return table("job", rows)


def _precision(dtype: torch.dtype) -> str:
    return next(name for name, each in DTYPES.items() if each == dtype)


def _states(plan: JobPlan) -> str:
    states, work = plan.states, plan.activations
    optimizer = HOME_NAMES[states.optimizer_home]
    rows = [
        ("parameters (P)", states.parameters, HOME_NAMES[states.param_home]),
        ("gradients (G)", states.gradients, "device"),
        ("gradients, reduced", states.reduced, optimizer),
        ("master weights (O)", states.master, optimizer),
        ("moments (O)", states.moments, optimizer),
        ("of O, not offloaded", states.kept, "device"),
        ("gathered parameters", states.gathered, "device, for a while"),
        ("gradients under way", states.reducing, "device, for a while"),
        ("activations", work.saved, "device, from forward to backward"),
        ("activation checkpoints", work.kept_on_host, "host"),
        ("activation checkpoints", work.kept_on_disk, "nvme"),
        ("checkpoint being written", plan.being_saved, "host, for a while"),
        ("recomputed activations", work.recomputed, "device, for a while"),
        ("loss, working memory", work.loss_working, "device, for a while"),
        ("CUDA, NCCL", plan.runtime, "device"),
    ]
    return _bytes_table("bytes per rank", [row for row in rows if row[1]])


def _bytes_table(title: str, rows: Iterable[tuple[str, int, str]]) -> str:
    """A table of (name, bytes, remark)."""
    return table(title, [(name, f"{size(nbytes):>10}  {rest}".rstrip()) for name, nbytes, rest in rows])


def _modes(plan: JobPlan) -> str:
    rows = []
    for name, work in activation_modes(plan.setup).items():
        host = f"  and {size(work.kept_on_host)} on the host" if work.kept_on_host else ""
        rows.append((name, work.saved, f"{size(work.recomputed):>10} recomputed at a time{host}"))
    return _bytes_table("activations, by what is recomputed", rows)


def _moments(plan: JobPlan) -> str:
    moments = {name: value + plan.runtime for name, value in plan.moments.items()} | {"most": plan.device}
    return _bytes_table("device memory per rank at", [(name, value, "") for name, value in moments.items()])


def _node(plan: JobPlan) -> str:
    rows = [("host memory", plan.per_node(plan.host), ""), ("disk", plan.per_node(plan.disk), "")]
    return _bytes_table(f"offloaded, on a node of {counted(plan.setup.ranks_per_node, 'rank')}", rows)


def _traffic(plan: JobPlan) -> str:
    moved = plan.traffic
    rows = [
        ("between data-parallel ranks", moved.data_parallel, f"{moved.data_parallel_elements:,} elements"),
        ("- of it between their sets", moved.between_sets, ""),
        ("between tensor-parallel ranks", moved.model_parallel, ""),
        ("device to host", moved.to_host, ""),
        ("host to device", moved.from_host, ""),
        ("read from disk", moved.disk_read, ""),
        ("written to disk", moved.disk_written, ""),
    ]
    return _bytes_table("moved per rank and step", [row for row in rows if row[1]])


def _verdict(plan: JobPlan, limits: Limits) -> str:
    setup = plan.setup
    known = {"device memory": limits.device, "host memory": limits.host, "disk": limits.disk}
    rows = [(name, size(value)) for name, value in known.items() if value is not None]
    if not rows:
        return table("fit", [("limits", "none known: give --gpu-memory, --host-memory and --nvme")])
    problems = check_fits(plan, limits)
    rows += [("does not fit" if problem.is_certain else "too much", str(problem)) for problem in problems]
    if not problems:
        rows.append(("fits", "yes"))
    rows += [
        ("not checked", f"{name}, of which the job needs {size(nbytes)}: give {flag}")
        for name, nbytes, flag in unchecked(plan, limits)
    ]
    ways = what_to_change(setup, limits)
    rows += [("fits with", change.flags) for change in ways]
    if problems and not ways and any(problem.resource != "locked memory per rank" for problem in problems):
        rows.append(("fits with", "more ranks, or a smaller model"))
    batch, layers = _largest(plan, limits)
    if batch is not None:
        rows.append(("largest batch", f"--batch-size {batch}" if batch else "none"))
        rows.append(("largest model", f"--num-layers {layers}" if layers else "none of this width"))
    return table("fit", rows)


def _largest(plan: JobPlan, limits: Limits) -> tuple[int | None, int | None]:
    """The largest batch size and number of layers; None if the size of the memory that the ranks compute in is unknown."""
    memory = limits.device if plan.setup.shape.device_type == "cuda" else limits.host
    return (None, None) if memory is None else (largest_batch(plan.setup, limits), largest_model(plan.setup, limits))
