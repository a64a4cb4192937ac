"""A training run in progress, and how it is set up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from megazero import activation_checkpointing, comm, mpu
from megazero.checkpoint.own_model import name_of
from megazero.config import Config
from megazero.data.tokenizer import Tokenizer
from megazero.engine import Engine
from megazero.logging import ALIKE, get_logger
from megazero.model.block import Transformer
from megazero.model.config import SIZES, GPT2Config
from megazero.model.documents import document_mask
from megazero.model.gpt2 import GPT2Model
from megazero.model.init import NoDraws
from megazero.model.recompute import decide_recompute
from megazero.mpu.groups import ParallelGroups, groups_of_size
from megazero.mpu.partition import partitions
from megazero.optim.loss_scaler import LossScaler
from megazero.optim.lr_schedule import AnnealingLR
from megazero.optim.optimizers import OptimizerFactory
from megazero.optim.schedules import scheduler_by_name
from megazero.option import as_given, own_flag
from megazero.stop_signal import StopSignal
from megazero.throughput import cpu_slowdown, peak_tflops
from megazero.timers import Timers
from megazero.zero import Init
from megazero.zero.param_groups import warn_of_left_out, weight_decay_groups
from megazero.zero.registry import bucket_of

logger = get_logger(__name__)

# Sizes describe any model, also to the checks; other flags are what a `GPT2Model` and its forward_step carry out.
_SIZES = {*SIZES, "num_attention_heads"}
_FORWARD = {"reset_position_ids", "reset_attention_mask"}

SLOW_PRODUCTS = 3.0  # times as long as in fp32, from where on the user is told

ModelProvider = Callable[[GPT2Config, ParallelGroups, torch.device, torch.dtype], nn.Module]
ForwardStep = Callable[["Job", "Iterator[dict[str, Tensor]] | None"], Tensor]
CountTokens = Callable[["Job", dict[str, Tensor]], int]
BeforeUpdate = Callable[["Job"], None]
MakeDatasets = Callable[["Job"], tuple[Any, Mapping[str, Any]]]
MakeOptimizer = Callable[[Config, nn.Module], tuple[OptimizerFactory, dict[str, int], list[dict[str, Any]]]]


@dataclass
class Job:
    """A training run in progress: its fixed parts, and its progress."""

    config: Config
    groups: ParallelGroups
    device: torch.device
    tokenizer: Tokenizer
    engine: Engine
    forward_step: ForwardStep
    timers: Timers
    peak_tflops: float | None  # of this rank's device, if known
    iteration: int = 0
    consumed_samples: int = 0
    phase: tuple[int, int] = (0, 0)  # iteration, and consumed samples, after which the present phase of the data begins
    first_loss: float | None = None
    lr: float = 0.0  # of the last update, in the first parameter group
    corpora: list[str] | None = None  # fingerprints of the training data; initially the checkpoint's
    shuffled_epochs: list[list[int]] | None = None  # of each corpus, as its dataset says; initially the checkpoint's
    is_cut: bool = False  # by a signal or a time limit, as all ranks agree: something is left to do
    stop: StopSignal = field(default_factory=StopSignal)  # this rank's own reasons to stop
    count_tokens: CountTokens | None = None  # with --calculate-per-token-loss: tokens that count in a micro-batch
    before_update: BeforeUpdate | None = None  # called on every rank when a step's gradients are there
    has_own_optimizer: bool = False  # the script's, not that of the flags
    made_by: str = ""  # the function that made the model
    grad_norms: dict[str, float] = field(default_factory=dict)  # by parameter, of a step that --log-grad-norms logs
    own_scalars: dict[str, SupportsFloat] = field(default_factory=dict)  # a script's own, in every log line

    @property
    def global_batch_size(self) -> int:
        """Sequences in the next optimizer step."""
        return self.config.global_batch_size(self.groups.data_parallel_size, self.consumed_samples)

    @property
    def micro_batch_size(self) -> int:
        """Sequences in a micro-batch of the current phase: training or evaluation."""
        return self.config.training.batch_size if self.engine.module.training else self.config.eval_batch_size

    @property
    def eval_samples(self) -> int:
        """Samples that an evaluation reads of each set, on all ranks together."""
        return self.config.training.eval_iters * self.config.eval_batch_size * self.groups.data_parallel_size

    @property
    def train_samples(self) -> int:
        """Training samples of the whole run: those consumed so far, and those that the remaining iterations will consume."""
        return self._samples_at(self.config.training.train_iters)

    @property
    def phase_samples(self) -> int:
        """Those of the present phase of the data: of the whole run, without --phase-transition-iterations."""
        return self._samples_at(self.config.training.phase_end(self.phase[0])) - self.phase[1]

    @property
    def consumed_in_phase(self) -> int:
        """Those of the present phase that have been consumed."""
        return self.consumed_samples - self.phase[1]

    def _samples_at(self, iteration: int) -> int:
        left = max(0, iteration - self.iteration)
        return self.config.samples_after(left, self.groups.data_parallel_size, self.consumed_samples)

    def accumulation_steps(self, consumed_samples: int) -> int:
        """Micro-batches per data-parallel rank in the optimizer step that follows `consumed_samples`."""
        return self.config.accumulation_steps(self.groups.data_parallel_size, consumed_samples)


def setup_distributed(config: Config) -> ParallelGroups:
    """Joins the world and divides it into groups, or takes those that are there, if they are of the same size.

    Raises:
        ValueError: ranks have different settings, or as `comm.init_distributed`.
        RuntimeError: there are groups of another size.
    """
    flags = config.parallel
    comm.init_distributed(flags.distributed_backend, timeout=timedelta(seconds=flags.distributed_timeout_s))
    settings = {}
    for component in vars(config).values():
        for each in fields(component):
            value = getattr(component, each.name)
            name = own_flag(each) if "flag" in each.metadata else each.name
            settings[name] = value is not None if each.metadata.get("per_host") else value
    advice = "Start every rank with the same flags, variables and JSON file, where --load has the same checkpoints."
    comm.refuse_differences(settings, advice)
    return groups_of_size(flags.model_parallel_size, timeout_s=flags.distributed_timeout_s)


def with_vocabulary(model: GPT2Config, tokenizer: Tokenizer) -> GPT2Config:
    """The model's configuration with the tokenizer's vocabulary size.

    Raises:
        ValueError: --vocab-size is smaller than the tokenizer's.
    """
    if model.vocab_size is not None and model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size {model.vocab_size} is smaller than the tokenizer's vocabulary of {tokenizer.vocab_size}: some tokens "
            "would have no embedding. Drop --vocab-size; it follows from the tokenizer."
        )
    return replace(model, vocab_size=model.vocab_size or tokenizer.vocab_size)


def build_job(
    config: Config,
    groups: ParallelGroups,
    tokenizer: Tokenizer,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    count_tokens: CountTokens | None = None,
    draws: bool = True,
    make_optimizer: MakeOptimizer | None = None,
    allow_untested_optimizer: bool = False,
) -> Job:
    """The job with its model, its engine and everything else that the loop needs, before anything is loaded.

    Args:
        draws: draw the model's initial values; False if a checkpoint is loaded next.

    Raises:
        ValueError: --calculate-per-token-loss without `count_tokens`; what `model_provider` returns is no model on the job's
            device; or the optimizer is not known to be elementwise, or has rates that the schedule would not heed.
    """
    weighs_tokens = config.training.calculate_per_token_loss
    if weighs_tokens and count_tokens is None:
        raise ValueError(
            "--calculate-per-token-loss weighs the mean loss of a micro-batch by its number of tokens, and this script does not "
            "say how many of them count: give pretrain(..., count_tokens=), as pretrain_gpt2.py does, or drop the flag."
        )
    device, dtype = comm.local_device(), config.precision.dtype
    warn_if_slow(device, dtype)
    peak = _peak_tflops(config, device)
    timers = Timers(device)
    activation_checkpointing.configure(None, **asdict(config.checkpoint_settings()), timers=timers)
    torch.manual_seed(config.training.seed)  # weights are drawn on the CPU, whatever the device, equal on all ranks
    with nullcontext() if draws else NoDraws(), _init_context(config, groups):
        model = model_provider(config.model, groups, device, dtype)
    _refuse_unfit(model, device)
    _warn_of_own_model(model, config)
    factory, group_of, group_settings = (make_optimizer or _optimizer_of_flags)(config, model)
    if make_optimizer is not None:
        _check_own_optimizer(group_settings, config)
        warn_of_left_out(model, group_of)
    engine = Engine(
        model,
        groups,
        factory,
        group_of,
        group_settings,
        zero=config.zero,
        loss_scaler=LossScaler.from_config(config.precision),
        clip_grad=config.optimizer.clip_grad,
        gradient_accumulation_steps=config.accumulation_steps(groups.data_parallel_size),
        lr_scheduler=lambda optimizer: build_schedule(config, optimizer.torch_optimizer),
        dtype=dtype,  # a model of the script's own may have another
        allow_untested_optimizer=allow_untested_optimizer,
    )
    engine.channel.timers = timers
    counts = count_tokens if weighs_tokens else None
    job = Job(config, groups, device, tokenizer, engine, forward_step, timers, peak, count_tokens=counts)
    job.has_own_optimizer = make_optimizer is not None
    job.made_by = name_of(model_provider)
    seed_dropout(job)
    if config.model.recompute == "auto":
        _decide_recompute(job)
    return job


def _peak_tflops(config: Config, device: torch.device) -> float | None:
    """The peak that MFU refers to. By default None on a CPU, where a measurement varies with whatever else runs there.

    Call it before the job holds anything on a GPU: it restarts the count of peak memory, to leave out what the measurement used.
    """
    given = config.training.peak_tflops
    if given is None and device.type == "cpu":
        return None
    if given is None:
        peak, source = peak_tflops(device, config.precision.dtype)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        peak, source = given, "--peak-tflops"
    logger.info("peak of a rank's device: %.3f TFLOP/s (%s)", peak, source)
    return peak


def warn_if_slow(device: torch.device, dtype: torch.dtype) -> None:
    """Warns of a CPU that computes in 16 bits far slower than in fp32, which looks like a hang."""
    if device.type == "cpu" and dtype != torch.float32 and (slowdown := cpu_slowdown(dtype)) > SLOW_PRODUCTS:
        logger.warning(
            "a matrix product in %s takes %.0f times as long as in fp32: this CPU has no fast instructions for it. Leave out "
            '--bf16 or --fp16 (in a JSON file: "enabled": false) to train faster here.',
            str(dtype).removeprefix("torch."),
            slowdown,
            extra=ALIKE,
        )


def _init_context(config: Config, groups: ParallelGroups) -> Init:
    """The context in which to build the model.

    Under stage 3 the model is never whole on a rank, and its shards rest where --offload-param specifies.
    """
    home = "cpu" if config.zero.placement == "auto" else config.zero.offload_param
    return Init(
        data_parallel_group=groups.data,
        config={
            "zero_optimization": {
                "mics_shard_size": config.zero.shard_size,
                "offload_param": {"device": home, "nvme_path": config.zero.nvme_path},
            }
        },
        dtype=config.precision.dtype,
        enabled=config.zero.stage == 3,
    )


def _refuse_unfit(model: nn.Module, device: torch.device) -> None:
    """Raises if a script's `make_model` has returned no module, or one whose values are elsewhere than on the job's device."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"make_model, which makes the model for `pretrain`, returned {type(model).__name__}. It must return one nn.Module."
        )
    for name, parameter in model.named_parameters():
        if bucket_of(parameter) is None and parameter.device.type != device.type:  # else sharded, wherever it rests
            raise ValueError(
                f"make_model returned a model whose parameter {name!r} is on {parameter.device}, and the job's device is "
                f"{device}: make it there, or move it there. What is on meta has no values."
            )


def _warn_of_own_model(model: nn.Module, config: Config) -> None:
    """Warns of flags that `GPT2Model` carries out, and any other model only if the script sees to it."""
    if any(isinstance(module, GPT2Model) for module in model.modules()):
        return
    owners = (
        (config.model, {each.name for each in fields(config.model)} - _SIZES),
        (config.activations, {each.name for each in fields(config.activations)}),
        (config.training, _FORWARD),
        (config.parallel, set() if partitions(model) else {"model_parallel_size"}),
    )
    given = [flag for component, names in owners for flag in _given(component, names)]
    if given:
        logger.warning(
            "make_model returned a %s, without the GPT2Model that carries out %s: these flags do only what make_model and "
            "forward_step see to themselves",
            type(model).__name__,
            ", ".join(given),
            extra=ALIKE,
        )


def _given(component: Any, names: Collection[str]) -> list[str]:
    """The flags of these fields of a component of the configuration, as given, where they differ from the defaults."""
    values = [(each, getattr(component, each.name)) for each in fields(component) if each.name in names]
    return [as_given(each, value) for each, value in values if value != each.default]


def _optimizer_of_flags(
    config: Config, model: nn.Module
) -> tuple[OptimizerFactory, dict[str, int], list[dict[str, Any]]]:
    """What `make_optimizer` returns, for the flags' optimizer."""
    flags = config.optimizer
    return flags.factory(), *weight_decay_groups(model, flags.weight_decay, flags.uses_muon)


def _check_own_optimizer(group_settings: Sequence[Mapping[str, Any]], config: Config) -> None:
    """Warns of flags that describe an optimizer where the script makes its own, and refuses rates that no schedule would heed."""
    unheeded = {"lr"} if config.deepspeed.scheduler is None else {"lr", "lr_mult"}
    if found := sorted(unheeded & {key for settings in group_settings for key in settings}):
        raise ValueError(
            f"make_optimizer returned parameter groups with {' and '.join(found)}, and the job's schedule sets the rates of all "
            "groups. Under the schedule of the flags, lr_mult is a factor on a group's rate; under one of a --deepspeed_config "
            "file, all have the same."
        )
    names = {each.name for each in fields(config.optimizer)} - {"clip_grad"}
    if given := _given(config.optimizer, names):
        flags = ", ".join(given)
        logger.warning("make_optimizer makes the optimizer: %s do only what it sees to itself", flags, extra=ALIKE)


def _decide_recompute(job: Job) -> None:
    """Makes the model's blocks recompute as much as --recompute-budget-gb requires.

    Raises:
        ValueError: nothing fits the budget, or the model is not made of this library's blocks.
    """
    transformer, config = getattr(job.engine.module, "transformer", None), job.config
    if not isinstance(transformer, Transformer):
        raise ValueError(
            "--recompute auto measures the blocks of a megazero.model.block.Transformer, and the model has none as its "
            "`transformer`. Give --recompute none, selective or full."
        )
    budget, batch, length = config.model.recompute_budget_gb, config.training.batch_size, config.data.seq_length
    assert budget is not None  # the configuration was checked
    one_document = torch.zeros(batch, length, dtype=torch.int64, device=job.device)
    plan = decide_recompute(
        transformer,
        seq_length=length,
        micro_batch_size=batch,
        budget_bytes=int(budget * 1e9),
        mask=document_mask(one_document, config.precision.dtype) if config.training.reset_attention_mask else None,
    )
    logger.info("%s", plan)


def build_schedule(config: Config, optimizer: torch.optim.Optimizer) -> Any:
    """The learning-rate schedule: the flags', or that of the --deepspeed_config file, with --lr as the optimizer's own rate."""
    section = config.deepspeed.scheduler
    if section is None:
        return AnnealingLR(optimizer, config.schedule, config.training.train_iters)
    for group in optimizer.param_groups:
        group["lr"] = config.schedule.lr
    return scheduler_by_name(section.type, section.params)(optimizer)


def seed_dropout(job: Job) -> None:
    """Seeds training's random streams: differently for each data-parallel rank, and for each iteration that a run starts from."""
    seed = job.config.training.seed + 100_003 * job.groups.data_parallel_rank + 1_000_003 * job.iteration
    mpu.model_parallel_cuda_manual_seed(seed)
