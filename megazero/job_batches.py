"""Where a job's batches come from, and how much each of them weighs under --calculate-per-token-loss."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import parent_process
from multiprocessing.connection import Listener
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megazero import comm
from megazero.children import blocked, end_with_parent
from megazero.data.build import build_datasets
from megazero.data.sampler import DataParallelBatchSampler, until_exhausted
from megazero.job import Job
from megazero.logging import some

# Seconds that ranks wait for the first one to tokenize and index the data, which takes hours for a large corpus.
MOST_TO_BUILD_S = 7 * 24 * 3600.0


def datasets(job: Job) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Training, validation and test data as `build_datasets` returns them, with as many samples as the job may read.

    Raises:
        ValueError: ranks have other documents under the names of the data, or as `build_datasets`.
        OtherRankError: another rank could not build them.
    """
    train, valid, test = build_datasets(
        job.config.data,
        job.tokenizer,
        (job.phase_samples, job.eval_samples, job.eval_samples),
        job.config.training.seed,
        rank=torch.distributed.get_rank(),
        meet=_meet,
        local_rank=comm.get_local_rank(),
    )
    sets = (train, *valid.values(), *test.values())
    # Of each SHA-256 twelve digits, as an error shows all of this.
    prints = "; ".join(", ".join(each[: each.rindex(" ") + 13] for each in data.corpora) for data in sets if data)
    comm.refuse_differences({"the fingerprint of the data": prints}, "Give every rank the same documents.")
    return train, valid, test


def own_datasets(job: Job, train: Any, valid: Mapping[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """What `datasets` returns, of the samples that a script's own `make_datasets` has made.

    Raises:
        ValueError: there are none, or ranks have other numbers of them.
    """
    seed = job.config.training.seed
    job.corpora = job.shuffled_epochs = None  # a checkpoint's, of another script
    named = {f"validation {name}".strip(): samples for name, samples in valid.items()}
    numbers = {name: len(samples) for name, samples in {"training": train, **named}.items()}
    comm.refuse_differences({"the samples of make_datasets": str(numbers)}, "Give every rank the same ones.")
    if missing := [name for name, number in numbers.items() if not number]:
        raise ValueError(f"make_datasets returned no sample: {some(missing)}. Give it data, or leave the set out.")
    sets = valid if job.eval_samples else {}
    evaluated = {name: Epochs(samples, job.eval_samples, seed) for name, samples in sets.items()}
    return Epochs(train, job.phase_samples, seed), evaluated, {}


class Epochs:
    """`number` samples of a map-style dataset: epoch after epoch, each in an order of its own that depends on `seed` alone."""

    def __init__(self, samples: Any, number: int, seed: int) -> None:
        self.samples, self.number, self.seed = samples, number, seed
        self._order = 0, self._order_of(0)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Any:
        epoch, place = divmod(index, len(self.samples))
        if self._order[0] != epoch:
            self._order = epoch, self._order_of(epoch)
        return self.samples[int(self._order[1][place])]

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.samples))


def _meet(what: str) -> None:
    try:
        comm.meet_world(what, MOST_TO_BUILD_S)
    except RuntimeError as error:
        raise comm.OtherRankError(f"another rank could not build its data: {error}") from error


def batches(
    job: Job,
    dataset: Any,
    name: str,
    batch_size: int,
    consumed: int = 0,
    batches_per_step: Callable[[int], int] = lambda _: 1,
) -> Iterator | None:
    """Micro-batches of this data-parallel rank; None on tensor-parallel ranks other than the first, which get a broadcast."""
    if job.groups.model_parallel_rank != 0:
        return None
    sampler = DataParallelBatchSampler(
        total_samples=len(dataset),
        consumed_samples=consumed,
        micro_batch_size=batch_size,
        data_parallel_rank=job.groups.data_parallel_rank,
        data_parallel_size=job.groups.data_parallel_size,
        micro_batches_per_step=batches_per_step,
    )
    workers = job.config.data.num_workers
    loader = _Loader(
        dataset,
        batch_sampler=sampler,
        num_workers=workers,
        # Also from Python 3.14 on, where a server would fork them: its death by the SIGTERM of a batch system would be theirs.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        pin_memory=job.device.type == "cuda",
        generator=torch.Generator(),  # otherwise every new iterator draws from dropout's generator
        worker_init_fn=_outlive_sigterm,
    )
    return until_exhausted(loader, name)


class _Loader(DataLoader):
    """Forks its workers with SIGTERM blocked, in all of their threads: one that comes early waits for `_outlive_sigterm`."""

    def __iter__(self) -> Any:
        if self.num_workers:
            Listener().close()  # a worker that cannot open one to pass on its files would be waited for without end
        if not hasattr(signal, "sigwaitinfo"):  # macOS
            return super().__iter__()
        with blocked(signal.SIGTERM):
            return super().__iter__()


def _outlive_sigterm(_: int) -> None:
    """Makes a data loader's worker end on SIGTERM only if its own rank sends it.

    It ends with its rank, too, however that ends: it has the rank's sockets, at whose port a restart would wait for seconds.

    Batch systems, `timeout` and `pkill -f` send SIGTERM to every process of a job. The rank then finishes its step and saves; a
    worker that had already ended would turn that into an error. This function is for forked workers, as on Linux. Other workers
    end with the process that started them.
    """
    rank = parent_process()
    if rank is None or not hasattr(signal, "sigwaitinfo"):  # macOS
        return
    end_with_parent(signal.SIGKILL, rank.pid)

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank.pid:
            pass
        os._exit(0)  # as torch's own handler does

    threading.Thread(target=wait, daemon=True).start()


def take_counted(job: Job, iterator: Iterator | None, count: int) -> tuple[Iterator | None, list[int]]:
    """The next `count` micro-batches of `iterator`, and how many tokens count in each; without an iterator, None and zeros."""
    if iterator is None:
        return None, [0] * count
    assert job.count_tokens is not None
    taken = []
    with job.timers("data loader"):
        for _ in range(count):
            # A tensor that a worker has shared keeps a file open, and a step may have more micro-batches than a process may have
            # open files.
            taken.append({name: x.clone() if x.is_shared() else x for name, x in next(iterator).items()})
    return iter(taken), [job.count_tokens(job, batch) for batch in taken]


def token_weights(job: Job, counts: list[int]) -> Iterator[Tensor]:
    """Factors for the mean loss of each micro-batch that give all counted tokens of the global batch the same weight.

    A factor is n M / N, with n counted tokens in the micro-batch and N in all M micro-batches of all ranks; the engine divides by
    M. The ranks' counts are exchanged while the first forward runs, and the host does not wait for the device to know them. A
    step in which no token counts has a loss and a gradient of 0.

    Args:
        counts: counted tokens in this rank's micro-batches; zeros on tensor-parallel ranks other than the first.
    """
    mine = torch.zeros(len(counts), dtype=torch.int64, device=job.device)
    for place, count in zip(mine, counts, strict=True):
        place.fill_(count)
    total = mine.sum()
    mine = comm.all_reduced(mine, job.groups.model)  # the first tensor-parallel rank's
    coming = comm.start_all_reduce(total, comm.world())

    def weights() -> Iterator[Tensor]:
        coming.wait()
        yield from mine * (len(counts) * job.groups.data_parallel_size) / total.clamp(min=1)

    return weights()
