"""The configuration of a training job: one dataclass per component, composed and checked as a whole."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from megazero.activation_checkpointing.options import CheckpointSettings
from megazero.checkpoint.config import CheckpointConfig
from megazero.data.build import DataConfig
from megazero.data.sampler import ramped_batch_size, samples_after
from megazero.json_config.sections import SchedulerSection
from megazero.logging import ALIKE, get_logger
from megazero.model.config import GPT2Config
from megazero.mpu.groups import check_model_parallel_size
from megazero.optim.loss_scaler import PrecisionConfig
from megazero.optim.lr_schedule import LRScheduleConfig
from megazero.optim.optimizers import OptimizerConfig
from megazero.option import as_given, check_options, iterations_named, option
from megazero.zero.config import ZeroConfig

logger = get_logger(__name__)


@dataclass(frozen=True)
class ParallelConfig:
    """How the world is divided, and how its ranks communicate."""

    model_parallel_size: int = option(
        1, "ranks that split each layer (tensor parallelism)", aliases=("--tensor-model-parallel-size",)
    )
    distributed_backend: str | None = option(
        None, "communication backend (default: nccl with CUDA, else gloo)", choices=("nccl", "gloo")
    )
    distributed_timeout_s: float = option(
        600.0,
        "seconds after which a collective raises an error because some rank never entered it",
        above=0,
        at_most=1_000_000_000,
    )
    local_rank: int | None = option(
        None,
        "set by old launchers; the environment variable LOCAL_RANK is what counts",
        flag="--local_rank",
        aliases=("--local-rank",),
        per_host=True,
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class DeepSpeedFlags:
    """A JSON file with DeepSpeed's keys, for settings not given as flags."""

    deepspeed: bool = option(False, "accepted; the engine is the same with and without it", aliases=("--deepscale",))
    deepspeed_config: str | None = option(
        None,
        "JSON file with DeepSpeed's keys (docs/configuration.md); flags on the command line override it",
        flag="--deepspeed_config",
        aliases=("--deepspeed-config", "--deepscale_config", "--deepscale-config"),
        per_host=True,
    )
    scheduler: SchedulerSection | None = None  # the file's learning-rate schedule, which replaces the flags'


@dataclass(frozen=True)
class TrainingConfig:
    """Batch sizes, lengths and intervals of the training loop."""

    batch_size: int = option(
        4,
        "sequences per micro-batch and data-parallel rank",
        at_least=1,
        at_most=10**9,
        aliases=("--micro-batch-size",),
    )
    global_batch_size: int | None = option(
        None, "sequences per optimizer step (default: micro-batch x data-parallel size)", at_least=1, at_most=10**9
    )
    rampup_batch_size: tuple[int, ...] | None = option(
        None,
        "START INCREMENT SAMPLES: over SAMPLES samples the global batch grows from START to full size in steps of INCREMENT",
    )
    train_iters: int = option(
        1_000_000, "total number of optimizer steps, over all resumed runs", at_least=1, at_most=10**9
    )
    iterations_to_skip: tuple[str, ...] | None = option(
        None, "A-B or A, one or several: read the batches of these iterations and do not train on them", unsaid=True
    )
    eval_iters: int = option(100, "batches per evaluation; 0: no evaluation", at_least=0, at_most=10**9)
    eval_interval: int = option(1000, "optimizer steps between evaluations on validation data", at_least=1, unsaid=True)
    eval_batch_size: int | None = option(
        None, "sequences per evaluation micro-batch (default: --batch-size)", at_least=1, at_most=10**9
    )
    log_interval: int = option(100, "optimizer steps between log lines", at_least=1, unsaid=True)
    log_grad_norms: bool = option(
        False, "record the norm of each parameter's gradient with every log line", unsaid=True
    )
    exit_interval: int | None = option(
        None, "save and exit when the iteration is a multiple of this", at_least=1, unsaid=True
    )
    phase_transition_iterations: tuple[int, ...] | None = option(
        None,
        "save and exit after these iterations; the run that continues there reads its data, or others, from the first sample on",
        unsaid=True,
    )
    exit_duration_in_mins: float | None = option(
        None,
        "save and exit after the step that is in progress this many minutes after the ranks started",
        above=0,
        unsaid=True,
    )
    seed: int = option(1234, "seed of weights, data order and dropout", at_least=0, at_most=2**32 - 1)
    deterministic_mode: bool = option(
        False,
        "use kernels and collectives whose results are reproducible bit for bit on GPUs too; slower (docs/training.md)",
    )
    eod_mask_loss: bool = option(True, "leave the token after each end-of-text token out of the loss")
    calculate_per_token_loss: bool = option(
        False, "give every counted token of the global batch the same weight, however it is split into micro-batches"
    )
    reset_position_ids: bool = option(False, "restart positions after each end-of-text token")
    reset_attention_mask: bool = option(False, "keep tokens from attending across end-of-text tokens")
    tensorboard_dir: str | None = option(
        None, "write TensorBoard scalars here (default: SAVE/tensorboard when --save is given)", per_host=True
    )
    no_tensorboard: bool = option(False, "write no TensorBoard scalars", unsaid=True)
    wandb_project: str | None = option(None, "record the same numbers in this project of Weights & Biases", unsaid=True)
    wandb_exp_name: str | None = option(
        None, "name of the run in --wandb-project (default: the last folder of --save)", unsaid=True
    )
    profile_steps: str | None = option(
        None,
        "A-B: trace these iterations of rank 0 with torch.profiler (in SAVE/profile, or --profile-dir)",
        unsaid=True,
    )
    profile_dir: str | None = option(
        None, "where --profile-steps writes its trace (default: SAVE/profile)", per_host=True
    )
    peak_tflops: float | None = option(
        None,
        "peak TFLOP/s of one device, for MFU (default: from its name, else measured with a matmul; on a CPU none, and no MFU)",
        above=0,
        per_host=True,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if (ramp := self.rampup_batch_size) is not None and (len(ramp) != 3 or min(ramp) < 1):
            raise ValueError(
                f"--rampup-batch-size {' '.join(map(str, ramp))}: give three numbers of at least 1, the first global batch size, "
                "the increment, and the samples over which it grows."
            )
        if min(self.phase_transition_iterations or (1,)) < 1:
            raise ValueError(
                f"--phase-transition-iterations {' '.join(map(str, self.phase_transition_iterations or ()))}: iterations count "
                "from 1."
            )
        if self.profile_steps is not None and self.profiled_steps is None:
            raise ValueError(
                f"--profile-steps {self.profile_steps}: give the first and the last iteration to trace, as in 100-102, or one."
            )
        if not all(self.skipped_iterations):
            raise ValueError(
                f"--iterations-to-skip {' '.join(self.iterations_to_skip or ())}: give the first and the last iteration to leave "
                "out, as in 510-620, or one; and more of them behind a space."
            )

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The first and the last iteration of --profile-steps; None if it names none."""
        steps = iterations_named(self.profile_steps or "")
        return (steps[0], steps[-1]) if steps else None

    @cached_property
    def skipped_iterations(self) -> tuple[range, ...]:
        """The iterations of --iterations-to-skip, in parts."""
        return tuple(map(iterations_named, self.iterations_to_skip or ()))

    def logs_grad_norms_of(self, iteration: int) -> bool:
        """Whether --log-grad-norms records those of this iteration: only that of a log line costs anything."""
        return self.log_grad_norms and iteration % self.log_interval == 0

    def phase_begun(self, iteration: int) -> int:
        """The last of --phase-transition-iterations up to this one; 0 if none is."""
        return max((each for each in self.phase_transition_iterations or () if each <= iteration), default=0)

    def phase_end(self, begun: int) -> int:
        """The last iteration of the phase that begins after this one."""
        return min((each for each in self.phase_transition_iterations or () if each > begun), default=self.train_iters)

    def exits_after(self, iteration: int) -> str | None:
        """The flag that ends a job after this iteration, which is not the run's last one."""
        if iteration in (self.phase_transition_iterations or ()):
            return f"--phase-transition-iterations {iteration}"
        if self.exit_interval and iteration % self.exit_interval == 0:
            return f"--exit-interval {self.exit_interval}"
        return None

    def skips(self, iteration: int) -> bool:
        """Whether --iterations-to-skip leaves out this iteration, counted as in the log."""
        return any(iteration in part for part in self.skipped_iterations)


@dataclass(frozen=True)
class Config:
    """The complete configuration of a job. `check_world` must pass before the first collective."""

    model: GPT2Config
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    schedule: LRScheduleConfig
    precision: PrecisionConfig
    checkpoint: CheckpointConfig
    parallel: ParallelConfig
    zero: ZeroConfig
    deepspeed: DeepSpeedFlags
    activations: CheckpointSettings

    def __post_init__(self) -> None:
        if self.data.seq_length > self.model.max_position_embeddings:
            raise ValueError(
                f"--seq-length {self.data.seq_length} is longer than --max-position-embeddings "
                f"{self.model.max_position_embeddings}: the last tokens would have no position. "
                f"Use --max-position-embeddings {self.data.seq_length}."
            )
        if self.training.profile_steps and not self.profile_dir:
            raise ValueError("--profile-steps has nowhere to write to: give --save, or --profile-dir.")
        steps = self.training.profiled_steps
        if steps is not None and steps[0] > self.training.train_iters:
            raise ValueError(
                f"--profile-steps {self.training.profile_steps} begins behind --train-iters {self.training.train_iters}. Trace "
                "earlier iterations."
            )
        if any(part[0] > self.training.train_iters for part in self.training.skipped_iterations):
            raise ValueError(
                f"--iterations-to-skip {' '.join(self.training.iterations_to_skip or ())} goes beyond --train-iters "
                f"{self.training.train_iters}, which count the iterations that are left out as well. Name earlier ones."
            )
        if self.training.profile_dir and steps is None:
            raise ValueError("--profile-dir is where --profile-steps writes to: give that too, or drop it.")
        if self.training.wandb_exp_name and not self.training.wandb_project:
            raise ValueError("--wandb-exp-name names a run in --wandb-project: give that too, or drop it.")
        self.schedule.check_length(self.training.train_iters)
        self.checkpoint_settings()  # refuses contradictory settings
        if self.optimizer.uses_muon:
            self._check_muon()

    def _check_muon(self) -> None:
        """Raises if --optimizer muon does not support the homes or dtypes chosen for the states."""
        zero = self.zero
        reasons = {
            "--offload-optimizer nvme, as it needs all states in memory at a time": zero.offload_optimizer == "nvme",
            "--delayed-param-update, as its step is collective": zero.delays_update,
            "--grad-dtype compute, as it writes fp32 directions where gradients were": zero.grad_dtype != "fp32",
        }
        for reason, is_asked_for in reasons.items():
            if is_asked_for:
                raise ValueError(f"--optimizer muon does not go with {reason}. Drop one of them.")

    def with_values(self, **values: Any) -> Config:
        """The same configuration with other values of some of its components' fields, by name.

        Raises:
            ValueError: a value is wrong, or does not go with the others.
        """
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        own = {name: {f.name: values[f.name] for f in fields(part) if f.name in values} for name, part in parts.items()}
        return replace(self, **{name: replace(parts[name], **changed) for name, changed in own.items() if changed})

    def warn_of_idle(self, given: Collection[str]) -> None:
        """Warns of settings that have no effect: of how activation checkpoints are kept, and of ZeRO's fields in `given`."""
        idle = [name for name, value in vars(self.checkpoint_settings()).items() if value]
        if self.model.recompute_mode == "none" and idle:
            logger.warning(
                "nothing is recomputed, so how activation checkpoints are kept (%s) has no effect; it needs "
                "--checkpoint-activations, or --recompute",
                ", ".join(idle),
                extra=ALIKE,
            )
        for field in fields(self.zero):
            if field.name in given and field.name in self.zero.idle:
                flag = as_given(field, getattr(self.zero, field.name))
                logger.warning("%s has no effect: %s", flag, self.zero.idle[field.name], extra=ALIKE)

    def checkpoint_settings(self) -> CheckpointSettings:
        """How activation checkpoints are kept; by default, contiguous storage has room for one micro-batch.

        Raises:
            ValueError: settings contradict each other or the model's, or --num-checkpoints is too small for the model's blocks.
        """
        activations, model = self.activations, self.model
        count, mode = activations.num_checkpoints, model.recompute_mode
        if activations.contiguous_checkpointing:
            if mode == "auto":
                raise ValueError(
                    "--recompute auto decides block by block what is kept, and --contiguous-checkpointing has room for all "
                    "blocks in every mode, which --recompute-budget-gb does not count. Drop one of them."
                )
            together = model.recomputed_together
            calls = -(-model.num_layers // together)
            count = calls if count is None else count
            if count < calls and mode in ("selective", "full"):
                raise ValueError(
                    f"--num-checkpoints {count} (activation_checkpointing.number_checkpoints) is too few: --num-layers "
                    f"{model.num_layers}, {together} in a call, make {calls} checkpointed calls before their backward, and "
                    "--contiguous-checkpointing lays all of them into one storage. Raise it, or drop it: the default fits."
                )
        return replace(activations, num_checkpoints=count)

    def check_world(self, world_size: int) -> None:
        """Checks what depends on the number of ranks.

        Raises:
            ValueError: a size does not divide; the message shows the arithmetic.
        """
        mp = self.parallel.model_parallel_size
        check_model_parallel_size(world_size, mp, self.model.parallel_sizes)
        self.model.check_parallel(mp)
        self.model.check_sequence(self.data.seq_length, mp)
        dp, micro = world_size // mp, self.training.batch_size
        self.zero.num_shards(dp)
        total = self.training.global_batch_size or micro * dp
        if total % (micro * dp):
            raise ValueError(
                f"--global-batch-size {total} is not a multiple of --batch-size {micro} x data-parallel size {dp} "
                f"(world size {world_size} / --model-parallel-size {mp}) = {micro * dp}. "
                f"Use --global-batch-size {max(1, round(total / (micro * dp))) * micro * dp}."
            )
        if self.training.rampup_batch_size is not None:
            self._check_ramp(self.training.rampup_batch_size, total, dp)

    def _check_ramp(self, ramp: tuple[int, ...], total: int, data_parallel_size: int) -> None:
        start, increment, _ = ramp
        unit = self.training.batch_size * data_parallel_size
        what = f"--rampup-batch-size {' '.join(map(str, ramp))}"
        if start >= total or (total - start) % increment:
            full = f"--global-batch-size {total}" + ("" if self.training.global_batch_size else " (the default)")
            raise ValueError(
                f"{what}: from {start} in increments of {increment} the batch does not grow to {full}. Take a start below "
                "that, or a larger --global-batch-size, and an increment that divides the difference."
            )
        for size in range(start, total, increment):
            if size % unit:
                raise ValueError(
                    f"{what}: a batch of {size} is not a multiple of --batch-size {self.training.batch_size} x data-parallel "
                    f"size {data_parallel_size} = {unit}. Take a start and an increment that are."
                )

    def global_batch_size(self, data_parallel_size: int, consumed_samples: int | None = None) -> int:
        """Sequences in the optimizer step that follows `consumed_samples`; by default in the run's last steps, which are full."""
        full = self.training.global_batch_size or self.training.batch_size * data_parallel_size
        if consumed_samples is None:
            return full
        return ramped_batch_size(full, self.training.rampup_batch_size, consumed_samples)

    def accumulation_steps(self, data_parallel_size: int, consumed_samples: int | None = None) -> int:
        """Micro-batches in that step on each data-parallel rank."""
        size = self.global_batch_size(data_parallel_size, consumed_samples)
        return size // (self.training.batch_size * data_parallel_size)

    def samples_after(self, iterations: int, data_parallel_size: int, consumed_samples: int) -> int:
        """Samples consumed in total after `iterations` further optimizer steps."""
        full = self.global_batch_size(data_parallel_size)
        return samples_after(full, self.training.rampup_batch_size, iterations, consumed_samples)

    @property
    def eval_batch_size(self) -> int:
        """Sequences per evaluation micro-batch and data-parallel rank."""
        return self.training.eval_batch_size or self.training.batch_size

    @property
    def swap_folders(self) -> list[str]:
        """Folders in which ranks create swap files, if any."""
        states = self.zero.nvme_path if "nvme" in (self.zero.offload_optimizer, self.zero.offload_param) else None
        return [folder for folder in (states, self.activations.checkpoint_nvme_path) if folder]

    @property
    def tensorboard_dir(self) -> str | None:
        """Folder for TensorBoard scalars, if any."""
        return None if self.training.no_tensorboard else self.training.tensorboard_dir or self._in_save("tensorboard")

    @property
    def profile_dir(self) -> str | None:
        """Folder for profiler traces, if any."""
        return self.training.profile_dir or self._in_save("profile")

    def _in_save(self, name: str) -> str | None:
        return os.path.join(self.checkpoint.save, name) if self.checkpoint.save else None

    def describe(self) -> str:
        """The effective configuration, one line per component."""
        lines = []
        for part in fields(self):
            component = getattr(self, part.name)
            values = ", ".join(f"{f.name}={getattr(component, f.name)!r}" for f in fields(component))
            lines.append(f"{part.name}: {values}")
        return "\n".join(lines)
