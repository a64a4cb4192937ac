"""A bar plot of what a rank holds at each stage, like figure 1 of the ZeRO paper (arXiv:1910.02054)."""

from __future__ import annotations

from pathlib import Path

from megazero.logging import counted
from megazero.plan.change import changes
from megazero.plan.job_plan import JobPlan, plan_job
from megazero.plan.limits import Limits

COLORS = {
    "parameters": "tab:blue",
    "gradients": "tab:orange",
    "optimizer": "tab:green",
    "buffers": "tab:gray",
    "activations": "tab:purple",
}


def bars(plan: JobPlan) -> dict[str, JobPlan]:
    """The plans to show next to each other, by label: all stages with all states on the device; then this job's own homes."""
    setup = plan.setup
    here = {
        "placement": "static",
        "offload_param": "none",
        "offload_optimizer": "none",
        "offload_optimizer_ratio": 1.0,
        "delayed_param_update": 0,
    }
    none = setup.changed(stage=0, shard_size=0, **here)
    stages = [none, *(setup.changed(stage=stage, **here) for stage in (1, 2, 3))]
    shown = {f"stage {stage}": plan_job(one) for stage, one in enumerate(stages)}
    homes = (("O", setup.states.optimizer_home), ("P", setup.states.param_home))
    if away := ", ".join(f"{what} on {home}" for what, home in homes if home != "accelerator"):
        shown[f"stage {setup.states.zero.stage}, {away}"] = plan
    elif setup.states.zero.stage and (offloads := [c for c in changes(setup) if "--offload" in c.flags]):
        shown[f"stage {setup.states.zero.stage}, O on cpu"] = plan_job(offloads[0].setup)
    return shown


def parts(plan: JobPlan) -> dict[str, int]:
    """The most that a device holds, as the stack of one bar; activations are the remainder at that moment."""
    states = plan.states
    shown = {
        "parameters": states.parameters if states.param_home == "accelerator" else 0,
        "gradients": states.gradients,
        "optimizer": states.optimizer if states.optimizer_home == "accelerator" else states.kept,
    }
    rest = plan.device - plan.runtime - sum(shown.values())
    buffers = min(rest, states.transient)
    return {**shown, "buffers": buffers + plan.runtime, "activations": rest - buffers}


def write_plot(plan: JobPlan, limits: Limits, path: Path) -> None:
    """Writes the plot, in the format of the path's extension.

    Raises:
        ValueError: matplotlib is not installed, or cannot write there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"--plot {path} needs matplotlib ({error}): pip install matplotlib, or drop --plot."
        ) from error
    shown = bars(plan)
    figure = Figure(figsize=(9, 1.2 + 0.6 * len(shown)), layout="constrained")
    axes = figure.subplots()
    labels = list(shown)[::-1]
    left = dict.fromkeys(labels, 0.0)
    for name, color in COLORS.items():
        widths = [parts(shown[label])[name] / 1e9 for label in labels]
        axes.barh(labels, widths, left=[left[label] for label in labels], label=name, color=color)
        left = {label: left[label] + width for label, width in zip(labels, widths, strict=True)}
    for row, label in enumerate(labels):
        number = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # readable on the dashed line
        axes.text(left[label], row, f" {left[label]:.4g} GB", va="center", bbox=number)
    if limits.device is not None and plan.setup.shape.device_type == "cuda":
        axes.axvline(limits.device / 1e9, color="black", linestyle="--", label="device memory")
    model = plan.setup.model.num_parameters()
    axes.set_title(f"{model / 1e9:.3g} billion parameters, {counted(plan.setup.world_size, 'rank')}")
    axes.set_xlabel("GB on each rank's device")
    axes.margins(x=0.15)
    figure.legend(loc="outside lower center", ncols=6, fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except (ValueError, OSError) as error:  # an unknown format, or a folder that does not exist
        raise ValueError(f"--plot {path}: {error}") from error
