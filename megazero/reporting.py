"""What a job reports: at its start, at every log interval, and at its end."""

from __future__ import annotations

import logging
import math
import os
import shlex
import shutil
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime
from itertools import groupby
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from megazero.checkpoint.tags import list_tags, tag_of
from megazero.engine import Engine
from megazero.files import nearest_there
from megazero.job import Job
from megazero.late_ranks import LateRanks
from megazero.logging import ALIKE, counted, get_logger, some, table
from megazero.metrics import MetricsWriter, StepReport, by_section, plot_losses
from megazero.model.gpt2 import GPT2Model
from megazero.mpu.partition import partitions
from megazero.profiling import StepProfiler
from megazero.throughput import memory_bytes, peak_memory_bytes
from megazero.wandb_log import WandbLog
from megazero.zero.bucket_bytes import StateSettings
from megazero.zero.config import ZeroConfig
from megazero.zero.memory import memory_of_buckets, memory_rows, size
from megazero.zero.units import find_units, shape_of

logger = get_logger(__name__)

SHARDED = (
    "nothing is",
    "optimizer states are",
    "optimizer states and gradients are",
    "all model states are",
)  # by stage
MAX_RANKS_LISTED = 16  # in one line of the summary
MAX_HOSTS_LISTED = 64  # in the line that says which ranks they run


def metrics_writer(job: Job) -> MetricsWriter:
    """The writer that records this rank's numbers; on rank 0, in files as well."""
    if torch.distributed.get_rank() != 0:
        return MetricsWriter(None, None, job.iteration, keeps_lines=False)  # rank 0 makes the summary
    save, flags, wandb = job.config.checkpoint.save, job.config.training, None
    if flags.wandb_project:
        name = flags.wandb_exp_name or (Path(save).absolute().name if save else None)
        wandb = WandbLog(flags.wandb_project, name, save, job.iteration, asdict(job.config))
    return MetricsWriter(save, job.config.tensorboard_dir, job.iteration, wandb=wandb)


def step_profiler(job: Job) -> StepProfiler:
    """The profiler that traces the steps of --profile-steps on rank 0, if they are still to come."""
    steps = job.config.training.profiled_steps if torch.distributed.get_rank() == 0 else None
    if steps is not None and steps[0] <= job.iteration:
        logger.warning(
            "--profile-steps %s: iteration %d is over, and nothing is traced",
            job.config.training.profile_steps,
            steps[0],
        )
        steps = None
    return StepProfiler(steps, Path(job.config.profile_dir or ""))


def describe_start(job: Job) -> str:
    """Two tables: what is about to run, and the memory that it takes, as planned and as held before the first step."""
    model, groups, training = job.config.model, job.groups, job.config.training
    mp, dp, steps = groups.model_parallel_size, groups.data_parallel_size, job.engine.gradient_accumulation_steps()
    width = f"{counted(model.num_layers, 'layer')} x {model.hidden_size}, vocabulary {model.vocab_size:,}"
    numels, of_flags = _numels(job.engine.module), f"{model.num_parameters():,} ({width})"
    count = sum(numels.values())
    own = f"{count:,} of {type(job.engine.module).__name__}; TFLOP/s is a GPT-2's of the flags' size, {of_flags}"
    kind, zero = type(job.engine.optimizer.torch_optimizer).__name__, job.engine.zero
    own_optimizer = f"{kind} of make_optimizer; the plan counts its states once it has made them"
    batch = f"{counted(job.config.global_batch_size(dp), 'sequence')} x {job.config.data.seq_length} tokens"
    tokens = job.train_samples * job.config.data.seq_length
    flop = tokens * model.flops_per_token(job.config.data.seq_length)
    micro = f"{counted(steps, 'micro-batch')} of {counted(training.batch_size, 'sequence')}"
    rows = [
        ("parameters", of_flags if count == model.num_parameters() else own),
        ("ranks", f"{mp * dp} = {mp} tensor-parallel x {dp} data-parallel"),
        ("batch", f"{batch}: {micro} on each of {counted(dp, 'data-parallel rank')}"),
        ("run", f"{training.train_iters:,} iterations in all, {tokens:,} tokens, {flop:.3g} FLOP"),
        *_left_out(training.skipped_iterations, job.iteration),
        ("device", f"{job.device}, parameters in {str(job.config.precision.dtype).removeprefix('torch.')}"),
        *([("optimizer", own_optimizer)] if job.has_own_optimizer else []),
        ("ZeRO", f"stage {zero.stage}: {SHARDED[zero.stage]} sharded over {_shards(zero, dp)}{_homes(zero)}"),
        *_space(job, numels),
        ("started", f"{datetime.now():%Y-%m-%d %H:%M:%S}"),
    ]
    memory = job.engine.memory()
    del memory["buffers"]  # nothing needs any yet
    return f"{table('job', rows)}\n{describe_memory(job, 'memory', memory)}"


def _space(job: Job, numels: dict[str, int]) -> list[tuple[str, str]]:
    """A row with what a checkpoint takes, and what --save has, if both are known. Warns if one more does not fit."""
    save = job.config.checkpoint.save
    if not save or job.has_own_optimizer:
        return []
    needed = 4 * sum(numels.values())  # fp32 weights
    for plan in (bucket.plan for bucket in job.engine.buckets if not job.config.checkpoint.no_save_optim):
        if plan.is_trainable:  # Muon has one moment, Adam two
            needed += 4 * sum(numels[name] for name in plan.parameters) * (1 if plan.has_matrices else 2)
    free = shutil.disk_usage(nearest_there(save)).free
    if free < needed:
        what = "--save %s has %s of free space, and a checkpoint takes about %s: make room before the first save"
        logger.warning(what, save, size(free), size(needed), extra=ALIKE)
    return [("checkpoint", f"about {size(needed)}; --save has {size(free)} of free space")]


def describe_hosts(hosts: Sequence[str]) -> str:
    """Which ranks run where, given the host of each: "ranks 0-7 on a, 8-15 on b"."""
    runs = [(host, [rank for rank, _ in own]) for host, own in groupby(enumerate(hosts), key=lambda each: each[1])]
    named = [f"{ranks[0]}-{ranks[-1]} on {host}" if ranks[1:] else f"{ranks[0]} on {host}" for host, ranks in runs]
    return f"ranks {some(named, MAX_HOSTS_LISTED)}"


def _left_out(parts: Sequence[range], iteration: int) -> list[tuple[str, str]]:
    """A row that names the iterations that are left out after this one, if any."""
    ahead = [range(max(part[0], iteration + 1), part[-1] + 1) for part in parts]
    named = [str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in ahead if part]
    return [("left out", f"iterations {', '.join(named)}")] if named else []


def _numels(model: nn.Module) -> dict[str, int]:
    """Of logical parameters, by name: whole where tensor-parallel ranks hold parts, without padding, shared ones counted once."""
    cuts, shapes = partitions(model), {name: shape_of(p) for name, p in model.named_parameters()}
    return {name: math.prod(cuts[name].full_shape(shape) if name in cuts else shape) for name, shape in shapes.items()}


def _shards(zero: ZeroConfig, data_parallel_size: int) -> str:
    shards = zero.num_shards(data_parallel_size)
    sets = f", in {data_parallel_size // shards} sets that hold copies" if shards < data_parallel_size else ""
    return f"{counted(shards, 'data-parallel rank')}{sets}"


def _homes(zero: ZeroConfig) -> str:
    """The homes of states that are not on the accelerator, as the end of a sentence."""
    places = {"cpu": "in host memory", "nvme": f"in {zero.nvme_path}"}
    share = "" if zero.offload_optimizer_ratio == 1 else f"{zero.offload_optimizer_ratio:.0%} of the "
    homes = ((f"{share}optimizer states", zero.offload_optimizer), ("parameters", zero.offload_param))
    return "".join(f"; {what} rest {places[home]}" for what, home in homes if home != "none")


def describe_memory(job: Job, title: str, measured: dict[str, int]) -> str:
    """A table of the bytes that this rank holds, planned next to measured.

    Args:
        measured: as for `memory_rows`.
    """
    settings = StateSettings(
        job.engine.zero,
        job.groups.data_parallel_size,
        job.device.type,
        # Besides the master weights; of an optimizer of the script's own, what it has made by now.
        max(len(bucket.states) for bucket in job.engine.buckets) - 1 if job.has_own_optimizer else 2,
        recomputed_together=job.config.model.recomputed_together,
        micro_batches=job.engine.gradient_accumulation_steps(),
    )
    plan = memory_of_buckets([bucket.plan for bucket in job.engine.buckets], settings)
    return table(title, memory_rows(plan, measured))


class MemoryWatch:
    """Measures what a `with` block does, such as one step: in `most`, the most memory held of each kind, and in all.

    Hooks take measurements before every unit's forward, after every parameter's gradient and around every update; another one is
    taken at the end. A block that fails is left without hooks, too.

    Args:
        device_type: as in `StateSettings`, which the plan beside it is made with.
    """

    def __init__(self, engine: Engine, device_type: str = "cuda") -> None:
        self.engine, self._is_host = engine, device_type == "cpu"
        self.most: dict[str, int] = {}  # what `describe_memory` shows

    def __enter__(self) -> MemoryWatch:
        units = [unit.register_forward_pre_hook(self._look) for unit in find_units(self.engine.module)]
        trained = [p for p in self.engine.module.parameters() if p.requires_grad]
        # These hooks are on all optimizers, because one with hooks of its own is not stepped bucket by bucket.
        updates = [register_optimizer_step_pre_hook(self._look), register_optimizer_step_post_hook(self._look)]
        self._handles = [*units, *updates, *(p.register_post_accumulate_grad_hook(self._look) for p in trained)]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is None:  # Adam on the host is not a step of the torch optimizer, so the hooks do not see its moments
            self._look()

    def _look(self, *_: object) -> None:
        held = self.engine.memory()
        states = held["P"] + held["G"] + held["O"]
        away = 0 if self._is_host else held["offloaded"]  # host memory that is not the device has rows of its own
        held["peak"] = states + held["buffers"] - away
        self.most = {key: max(self.most.get(key, 0), value) for key, value in held.items()}


@contextmanager
def progress_bar(job: Job) -> Iterator[tqdm]:
    """A progress bar of the run's iterations below the log lines. It is drawn only on rank 0, and only on a terminal."""
    is_shown = torch.distributed.get_rank() == 0 and sys.stdout.isatty()
    # tqdm's own lock is one between processes, for which Python starts another process from 3.14 on.
    tqdm.set_lock(threading.RLock())
    with tqdm(
        total=job.config.training.train_iters,
        initial=job.iteration,
        unit="step",
        file=sys.stdout,
        leave=False,
        dynamic_ncols=True,
        disable=not is_shown,
    ) as bar:
        with logging_redirect_tqdm([logging.getLogger("megazero")]) if is_shown else nullcontext():
            yield bar


def log_step(
    job: Job,
    metrics: MetricsWriter,
    late: LateRanks | None,
    interval: list[tuple[float, float]],
    samples: int,
    seconds: float,
) -> None:
    """Logs and records the averages of the iterations since the last log line. Every rank calls it.

    Args:
        late: notes who is late, and tells the other ranks now and then; None where they may not come.
        interval: of each iteration the loss and the gradients' norm.
        samples: consumed by all of these iterations, on all ranks.
        seconds: the time that they took.
    """
    flags, engine, steps = job.config.training, job.engine, len(interval)
    losses, norms = zip(*interval, strict=True)
    step_s = seconds / steps
    tokens = samples / steps * job.config.data.seq_length
    flops = tokens * job.config.model.flops_per_token(job.config.data.seq_length) / torch.distributed.get_world_size()
    tflops = flops / step_s / 1e12
    report = StepReport(
        iteration=job.iteration,
        train_iters=flags.train_iters,
        step_s=step_s,
        lr=job.lr,
        loss=sum(losses) / steps,
        loss_max=max(losses),
        loss_scale=engine.loss_scale(),
        grad_norm=norms[-1],
        grad_norm_max=max(filter(math.isfinite, norms), default=math.nan),
        skipped=engine.skipped_steps,
        tokens_per_s=tokens / step_s,
        tflops=tflops,
        mfu=None if job.peak_tflops is None else tflops / job.peak_tflops,
        phases_s={name: s / steps for name, s in job.timers.read_and_reset().items()},
    )
    logger.info(report.line())
    logger.info(report.phases_line())
    seconds_waited = steps * sum(report.phases_s.get(phase, 0.0) for phase in ("allreduce", "allgather"))
    if job.iteration - metrics.start_iteration <= flags.log_interval:  # the first line of this run
        held, peak = (measure(job.device) / 2**20 for measure in (memory_bytes, peak_memory_bytes))
        logger.info(
            "after %s memory (MB) | allocated: %.1f | max allocated: %.1f",
            counted(job.iteration, "iteration"),
            held,
            peak,
        )
    # Else, as the first iterations compile and warm up.
    elif late is not None and (line := late.line(steps, seconds, seconds_waited)):
        logger.info("%s", line)
    more = {
        "consumed_samples": job.consumed_samples,
        "world_size": torch.distributed.get_world_size(),
        "peak_memory_mb": peak_memory_bytes(job.device) / 2**20,
    }
    of_parameters = {f"grad_norm/{name}": norm for name, norm in job.grad_norms.items()}
    own = {name: float(number) for name, number in job.own_scalars.items()}  # of whatever kind: tensors, numpy's
    metrics.write(job.iteration, {**of_parameters, **own, **report.scalars(), **more}, "train")


def summary(job: Job, metrics: MetricsWriter, peaks: list[int]) -> str:
    """The table that a run ends with.

    Args:
        peaks: peak memory of every rank, bytes.
    """
    lines, config = metrics.lines, job.config
    train = [line for line in lines if line["section"] == "train"]
    rows = [("iterations", f"{job.iteration} of {config.training.train_iters}")]
    if job.first_loss is not None and train:
        rows.append(
            ("training loss", f"{job.first_loss:.4f} at the first step -> {train[-1]['loss']:.4f} at the last log line")
        )
    for section, (*_, last) in by_section(lines, "valid").items():
        of_set = section.removeprefix("valid").replace("/", " of ")
        when = "" if last["iteration"] == job.iteration else f", at iteration {last['iteration']}"
        rows.append((f"validation perplexity{of_set}", f"{last['perplexity']:.2f} (loss {last['loss']:.4f}{when})"))
    own = [line for line in train if line["iteration"] > metrics.start_iteration]  # earlier lines may be of other ranks
    if own:
        median = sorted(own, key=lambda line: line["tokens_per_s"])[len(own) // 2]
        rows.append(("tokens/s", f"{median['tokens_per_s']:.0f} (median log line)"))
        share = f"{100 * median['mfu']:.1f}% of the device's peak, " if "mfu" in median else ""
        rows.append(("model TFLOP/s per rank", f"{median['tflops']:.3f} ({share}in the same line)"))
    rows.append(("peak memory per rank (MB)", _of_ranks([peak / 2**20 for peak in peaks])))
    if metrics.wandb is not None:
        rows.append(("Weights & Biases", metrics.wandb.place))
    save = config.checkpoint.save
    if save:
        if config.tensorboard_dir:
            rows.append(("TensorBoard log", config.tensorboard_dir))
        plot = Path(save) / "loss.png"
        if plot_losses(lines, plot):
            rows.append(("loss plot", str(plot)))
        # Not what `latest` names, if anything: --load-fallback may have taken another one.
        if (tag := tag_of(job.iteration)) in list_tags(save):
            rows.append(("checkpoint", os.path.join(save, tag)))
            script = Path(__file__).parents[1] / "scripts" / "generate_text.sh"
            if script.exists() and isinstance(job.engine.module, GPT2Model):  # a wheel has no scripts
                rows.append(("generate text", f"LOAD={shlex.quote(save)} bash {shlex.quote(os.path.relpath(script))}"))
    return table("summary", rows)


def _of_ranks(values: list[float]) -> str:
    """Every rank's value, or where that would be a long line, how they spread and which rank has the most."""
    if len(values) <= MAX_RANKS_LISTED:
        return ", ".join(f"{value:.0f}" for value in values)
    most = max(range(len(values)), key=values.__getitem__)
    return f"{min(values):.0f} to {values[most]:.0f} (rank {most}), median {statistics.median(values):.0f}"
