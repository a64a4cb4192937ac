"""The training loop: steps, evaluations, saving in between, and the end. A script supplies the model and the loss."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megazero import comm
from megazero.backends import say_what_is_idle, set_up_backends
from megazero.checkpoint.folder import DirectoryInUseError
from megazero.config import Config
from megazero.data.build import NO_TRAINING_DATA
from megazero.data.tokenizer import Tokenizer
from megazero.job import (
    BeforeUpdate,
    CountTokens,
    ForwardStep,
    Job,
    MakeDatasets,
    MakeOptimizer,
    ModelProvider,
    build_job,
    setup_distributed,
    with_vocabulary,
)
from megazero.job_batches import batches, datasets, own_datasets, take_counted, token_weights
from megazero.job_checkpoints import (
    has_failed_to_save,
    has_something_to_load,
    load,
    refuse_to_replace,
    save,
    warn_of_other_data,
)
from megazero.late_ranks import LateRanks
from megazero.logging import some, told_if_slow
from megazero.metrics import MetricsWriter, perplexity
from megazero.model.modes import in_mode
from megazero.out_of_memory import tells_out_of_memory
from megazero.plan import refuse_what_cannot_fit
from megazero.reporting import (
    MemoryWatch,
    describe_hosts,
    describe_memory,
    describe_start,
    log_step,
    metrics_writer,
    progress_bar,
    step_profiler,
    summary,
)
from megazero.stop_signal import StopSignal
from megazero.throughput import keep_freed_memory, peak_memory_bytes, return_freed_memory
from megazero.timers import Timers

logger = logging.getLogger(__name__)


def pretrain(
    config: Config,
    tokenizer: Tokenizer,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    count_tokens: CountTokens | None = None,
    before_update: BeforeUpdate | None = None,
    make_optimizer: MakeOptimizer | None = None,
    allow_untested_optimizer: bool = False,
    make_datasets: MakeDatasets | None = None,
) -> Job:
    """Runs the job that `config` describes, from set-up to summary, and returns it.

    Args:
        tokenizer: the data's; its vocabulary size is the model's unless --vocab-size is larger.
        model_provider: makes the model from its configuration, the groups, device and dtype.
        forward_step: takes the job and an iterator of micro-batches (None on tensor-parallel ranks other than the first, which
            get theirs by `mpu.broadcast_data`), and returns the mean loss of the next micro-batch.
        count_tokens: takes the job and a micro-batch on the host, and returns how many tokens that mean is over: 0 if none
            counts, and the mean is 0. Called only with --calculate-per-token-loss, on first tensor-parallel ranks.
        before_update: takes the job, on every rank, when the gradients of a step are there and the weights are still those that
            they are of. It may communicate, set `job.own_scalars` and end the run by `job.stop.end_at`.
        make_optimizer: takes the configuration and the model, and returns the `optimizer_factory`, `group_of` and
            `group_settings` of an `Engine`, in place of the flags' optimizer. A group's `lr_mult` is a factor on its rate.
        allow_untested_optimizer: as for `Engine`.
        make_datasets: takes the job, and returns the samples to train on and, by the names of their sets ("" for a single one),
            those of validation, in place of the flags' data: anything with a length and, by index, dictionaries of tensors. They
            are repeated for as many epochs as the job takes, each in an order of its own.

    Raises:
        ValueError: --calculate-per-token-loss without `count_tokens`, or sizes, data and checkpoints that do not fit; or --save
            holds the checkpoints of another run.
        OtherRankError: the ranks of other nodes were signalled, and torchrun goes on without them.
    """
    started = time.monotonic()
    config = replace(config, checkpoint=config.checkpoint.resolved())  # where `load_config` has not made it
    set_up_backends(config)
    groups = setup_distributed(config)
    say_what_is_idle(config.precision.dtype, config.precision.tf32, comm.local_device())
    if config.swap_folders:
        return_freed_memory()
    elif comm.local_device().type == "cpu":
        keep_freed_memory()
    config = replace(config, model=with_vocabulary(config.model, tokenizer))
    flags = config.training
    # Hosts may differ in memory and disk.
    world, known_states = torch.distributed.get_world_size(), 2 if make_optimizer is None else 0
    comm.together(partial(refuse_what_cannot_fit, config, world, comm.local_device(), states_per_element=known_states))
    loads = has_something_to_load(config.checkpoint)
    work = "" if loads else "every rank draws the initial values of all "
    building = f"building the model takes a while: {work}{config.model.num_parameters():,} parameters"
    with tells_out_of_memory(config), told_if_slow(logger, building):
        job = build_job(
            config,
            groups,
            tokenizer,
            model_provider,
            forward_step,
            count_tokens,
            draws=not loads,
            make_optimizer=make_optimizer,
            allow_untested_optimizer=allow_untested_optimizer,
        )
    job.before_update = before_update
    if flags.exit_duration_in_mins is not None and torch.distributed.get_rank() == 0:  # one clock: the first rank's
        minutes = flags.exit_duration_in_mins
        job.stop.end_at(started + 60 * minutes, f"--exit-duration-in-mins {minutes:g}")
    if config.checkpoint.save:
        _claim(job)
    with (
        tells_out_of_memory(config, job, "while the checkpoint was being loaded"),
        told_if_slow(logger, "loading the checkpoint takes a while"),
    ):
        load(job, is_expected=loads)
    train, valid, test = datasets(job) if make_datasets is None else own_datasets(job, *make_datasets(job))
    metrics = comm.together(partial(metrics_writer, job))
    with _tidy_after_error(job, metrics):
        logger.info("%s", config.describe())
        logger.info("%s", describe_start(job))
        hosts = comm.all_gathered_objects(socket.gethostname())
        if len(set(hosts)) > 1:
            logger.info("%s", describe_hosts(hosts))
        if train is not None and make_datasets is None:
            warn_of_other_data(job, train.corpora, train.shuffled_epochs)
        if job.iteration < flags.train_iters:
            if train is None:
                raise ValueError(NO_TRAINING_DATA)
            job.stop.take_signals()  # not earlier: tokenizing the data may take hours
            with progress_bar(job) as bar, tells_out_of_memory(config, job):
                _train(job, metrics, train, valid, bar)
        else:
            logger.info(
                "nothing to train: iteration %d of --train-iters %d is reached. Raise it, or start another run in another --save",
                job.iteration,
                flags.train_iters,
            )
        if not job.is_cut and job.iteration >= flags.train_iters:
            parts = (("valid", valid), ("test", test))
            job.is_cut = any(evaluate_and_log(job, metrics, sets, part, "the end of training") for part, sets in parts)
        # Not after the first rank's summary, which may take long.
        is_signalled = comm.largest(job.stop.received is not None)
        _finish(job, metrics)
    # As late as possible: if a node joins, torchrun signals the ranks of all nodes, but not at the same moment.
    if job.is_cut and comm.is_left_by_nodes(job.stop.received is not None):
        comm.leave_distributed()  # together with the ranks that were signalled, and end without an error
        raise comm.OtherRankError(
            "ranks of another node were signalled, and all have saved. Those of this node end as failed, so that torchrun starts "
            "them again (--max-restarts). To end the job, signal the ranks of every node."
        )
    if not is_signalled:  # else this process is leaving, also where only another rank got the signal so far
        job.stop.give_signals_back()
    return job


@contextmanager
def _tidy_after_error(job: Job, metrics: MetricsWriter) -> Iterator[None]:
    """If the block fails, ends the logs and gives the signals back, as the process may go on with another job.

    Under torchrun the rank ends, and `megazero.entry` asks the signals' handler what has come.
    """
    try:
        yield
    except BaseException:
        if not torch.distributed.is_torchelastic_launched():
            job.stop.give_signals_back()
            metrics.close(has_failed=True)
        raise


def _train(job: Job, metrics: MetricsWriter, train: Any, valid: dict[str, Any], bar: tqdm) -> None:
    flags, config = job.config.training, job.config
    first = job.phase[1]
    iterator = batches(
        job,
        train,
        "training",
        flags.batch_size,
        job.consumed_in_phase,
        lambda read: job.accumulation_steps(first + read),
    )
    job.engine.train()
    interval: list[tuple[float, float]] = []
    logged_at, trained_since = job.consumed_samples, time.perf_counter()
    watch: MemoryWatch | None = MemoryWatch(job.engine, job.device.type)
    profiler, late = step_profiler(job), LateRanks()
    stop: str | None = None

    def log(until: float, late: LateRanks | None = None) -> None:
        """Logs the iterations since the last line, which have ended at `until`."""
        nonlocal interval, logged_at, trained_since
        if interval:
            log_step(job, metrics, late, interval, job.consumed_samples - logged_at, until - trained_since)
        interval, logged_at, trained_since = [], job.consumed_samples, time.perf_counter()

    while job.iteration < flags.train_iters and not stop:
        begun, before = time.perf_counter(), job.consumed_samples
        earlier = job.lr, job.grad_norms, job.own_scalars.copy()
        try:
            with profiler.step(job.iteration + 1), watch or nullcontext():
                loss, stop = train_step(job, iterator)
        except FloatingPointError:
            job.lr, job.grad_norms, job.own_scalars = earlier  # of the iterations that led to it
            log(begun)
            raise
        if loss is None:
            trained_since += time.perf_counter() - begun  # moved on: logged step times cover training alone
            logged_at += job.consumed_samples - before
        else:
            interval.append((loss, job.engine.get_global_grad_norm()))
            bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        bar.update()
        if watch is not None and loss is not None:
            logger.info("%s", describe_memory(job, "memory after the first step", watch.most))
            watch = None
        if interval and job.iteration % flags.log_interval == 0:
            log(time.perf_counter(), late)
        paused = time.perf_counter()
        if not stop and job.iteration % flags.eval_interval == 0 and job.iteration < flags.train_iters:
            stop = evaluate_and_log(job, metrics, valid, "valid", f"iteration {job.iteration}")
        if config.checkpoint.save and job.iteration % config.checkpoint.save_interval == 0:
            save(job)
            if not stop and _ask_to_stop(job).read():
                stop = _why_stop(job)
        trained_since += time.perf_counter() - paused
        exits = flags.exits_after(job.iteration) if job.iteration < flags.train_iters else None
        stop = exits or stop
        if stop:
            job.is_cut = exits is None
            logger.info("stopping after iteration %d: %s", job.iteration, stop)
    log(time.perf_counter())
    profiler.finish(job.iteration)
    if config.checkpoint.save and (has_failed_to_save(job) or job.iteration % config.checkpoint.save_interval):
        save(job, is_last=True)


def train_step(job: Job, iterator: Iterator | None) -> tuple[float | None, str | None]:
    """One optimizer step.

    Returns:
        The loss averaged over micro-batches and data-parallel ranks, or, with --calculate-per-token-loss, over the counted
        tokens of all of them; None if --iterations-to-skip leaves the step out. And a reason to stop now, if any rank has one.

    Raises:
        FloatingPointError: some rank's loss is not finite. Raised on every rank; the message names that rank and its samples.
        OtherRankError: torchrun was killed.
    """
    if (lost := job.stop.lost_launcher) is not None:  # and with it the store where ranks meet for a save
        raise lost
    engine, timers = job.engine, job.timers
    steps = job.accumulation_steps(job.consumed_samples)
    if job.config.training.skips(job.iteration + 1):
        return None, _skip_step(job, iterator, steps)
    if steps != engine.gradient_accumulation_steps():  # --rampup-batch-size
        engine.set_gradient_accumulation_steps(steps)
        logger.info("global batch size %d from iteration %d on", job.global_batch_size, job.iteration + 1)
    weights: Iterator[Tensor] | None = None
    if job.count_tokens is not None:
        with timers("forward"):
            iterator, counts = take_counted(job, iterator, steps)
            weights = token_weights(job, counts)
    total = torch.zeros((), device=job.device)
    for _ in range(steps):
        with timers("forward"):
            loss = job.forward_step(job, iterator)
            if weights is not None:
                loss = loss * next(weights)
        with timers("backward"):
            total += engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            if job.before_update is not None:
                job.before_update(job)
            job.lr = engine.get_lr()[0]  # after the update, the schedule has set the next one's
            job.grad_norms = engine.grad_norms() if job.config.training.logs_grad_norms_of(job.iteration + 1) else {}
            report = _tell_others(total, job.stop)
        with timers("optimizer"):
            engine.step()
    loss_sum, broken, stops = report.read().tolist()
    if broken:
        _raise_not_finite(job, total)
    job.iteration += 1
    job.consumed_samples += job.global_batch_size
    mean = loss_sum / torch.distributed.get_world_size()
    job.first_loss = mean if job.first_loss is None else job.first_loss
    return mean, _why_stop(job) if stops else None


def _skip_step(job: Job, iterator: Iterator | None, steps: int) -> str | None:
    """Reads a step's micro-batches, and counts the step without making it. Returns a reason to stop now, if any rank has one."""
    if iterator is not None:
        for _ in range(steps):
            next(iterator)
    job.engine.skip_step()
    job.iteration += 1
    job.consumed_samples += job.global_batch_size
    return _why_stop(job) if _ask_to_stop(job).read() else None


def _ask_to_stop(job: Job) -> comm.Readout:
    """How many ranks were asked to stop. Collective over the world; read late, it keeps the device busy meanwhile."""
    asked = torch.full((), float(job.stop.reason is not None), device=job.device)
    return comm.Readout(comm.all_reduced(asked, comm.world()))


def _why_stop(job: Job) -> str:
    """Why all ranks stop, where one of them was asked to. Collective over the world."""
    reasons = enumerate(comm.all_gathered_objects(job.stop.reason))
    rank, reason = next((rank, reason) for rank, reason in reasons if reason)
    return reason if rank == 0 else f"{reason}, on rank {rank}"


def _tell_others(loss: Tensor, stop: StopSignal) -> comm.Readout:
    """[sum of the losses, ranks whose loss is not finite, ranks that were asked to stop] over all ranks, in one collective.

    It comes before the update. The host waits for the update's gradient norm anyway, and the result is there by then. So the host
    need not wait for the update as well, and can give the device the next step's forward meanwhile.
    """
    asked = torch.full_like(loss, float(stop.reason is not None))
    report = torch.stack([loss, (~torch.isfinite(loss)).float(), asked])
    return comm.Readout(comm.all_reduced(report, comm.world()))


def _raise_not_finite(job: Job, total: Tensor) -> None:
    loss = float(total)
    rank, size = job.groups.data_parallel_rank, job.global_batch_size // job.groups.data_parallel_size
    first = job.consumed_in_phase + rank * size
    samples = f"samples {first} to {first + size - 1} of the shuffled training data"
    mine = f"rank {torch.distributed.get_rank()}: loss {loss}, {samples}"
    bad = [text for text in comm.all_gathered_objects(None if math.isfinite(loss) else mine) if text]
    # Gradients may be finite, as those of a loss to which infinity was added.
    updated = "were updated, by finite gradients" if job.engine.was_step_applied() else "were not updated"
    raise FloatingPointError(
        f"The loss is not finite at iteration {job.iteration + 1} ({some(bad, 8)}). The weights {updated}. "
        f"Lower --lr, lengthen its warm-up, or leave these samples out by --iterations-to-skip {job.iteration + 1}. Checkpoints "
        f"from before iteration {job.iteration} are good; one of that iteration has the weights of this loss."
    )


def evaluate(job: Job, dataset: Any) -> float | None:
    """The mean loss over --eval-iters batches, always the same first ones, so that evaluations are comparable.

    With --calculate-per-token-loss it is the mean over all their counted tokens. If a rank is asked to stop, all ranks leave
    after the same batch, and the result is None.
    """
    flags = job.config.training
    iterator = batches(job, dataset, "evaluation", job.config.eval_batch_size)
    # In fp64: a sum of 100,000 losses in fp32 is off in the fifth digit.
    total, tokens = torch.zeros((), dtype=torch.float64, device=job.device), 0
    with _evaluating(job):
        for _ in range(flags.eval_iters):
            asked = _ask_to_stop(job)
            if job.count_tokens is None:
                total += job.forward_step(job, iterator)
            else:
                batch, (count,) = take_counted(job, iterator, 1)
                total += job.forward_step(job, batch).double() * count
                tokens += count
            if asked.read():
                return None
    if job.count_tokens is not None:  # tensor-parallel ranks other than the first have counted nothing
        sums = torch.stack([total, torch.full_like(total, tokens)])
        loss, counted = comm.all_reduced(sums, comm.world()).tolist()
        return loss / max(counted, 1)
    return float(comm.all_reduced(total, job.groups.data)) / job.groups.data_parallel_size / flags.eval_iters


@contextmanager
def _evaluating(job: Job) -> Iterator[None]:
    """Without gradients, in evaluation mode, and with timers of its own: an evaluation's phases are not a training step's."""
    training_timers = job.timers
    job.timers = job.engine.channel.timers = Timers(job.device)
    try:
        with in_mode(job.engine.module, training=False), torch.no_grad():
            job.engine.eval()  # completes an update that goes on
            yield
    finally:
        job.timers = job.engine.channel.timers = training_timers


def evaluate_and_log(job: Job, metrics: MetricsWriter, sets: dict[str, Any], part: str, where: str) -> str | None:
    """Evaluates each set of a part ("valid", "test") and logs Megatron-LM's validation line, with the set's name if it has one.

    Returns:
        A reason to stop now, if any rank has one: then the evaluation was not finished.
    """
    for name, dataset in sets.items():
        with tells_out_of_memory(job.config, job, f"in the evaluation at {where}"):
            loss = evaluate(job, dataset)
        section, of_set = (f"{part}/{name}", f" of {name}") if name else (part, "")
        what = f"{'validation' if part == 'valid' else part} loss{of_set}"
        if loss is None:
            why = _why_stop(job)
            logger.info("no %s at %s: %s", what, where, why)
            return why
        line = f" {what} at {where} | LM loss: {loss:.6E} | LM PPL: {perplexity(loss):.6E}"
        logger.info("-" * len(line))
        logger.info(line)
        logger.info("-" * len(line))
        samples = {"consumed_samples": job.consumed_samples, "evaluated_samples": job.eval_samples}
        metrics.write(job.iteration, {"loss": loss, "perplexity": perplexity(loss), **samples}, section)
    return None


def _finish(job: Job, metrics: MetricsWriter) -> None:
    peaks = comm.all_gathered_objects(peak_memory_bytes(job.device))
    if torch.distributed.get_rank() == 0:
        logger.info("%s", summary(job, metrics, peaks))
    metrics.close()


def _claim(job: Job) -> None:
    """Makes --save this job's, unless it holds what this job would replace."""
    flags = job.config.checkpoint
    assert flags.save is not None
    try:
        job.engine.saver.claim(flags.save)
    except DirectoryInUseError:
        raise
    except OSError as error:
        raise OSError(f"--save {flags.save} cannot be written: {error}") from error
    # Nobody else can save there any more, and a script's own checks need not have asked.
    comm.together(partial(refuse_to_replace, flags) if torch.distributed.get_rank() == 0 else None)
