"""Which samples a data-parallel rank sees, in an order that depends neither on the number of ranks nor on micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from megazero.children import WORKERS_NEED
from megazero.logging import counted

T = TypeVar("T")


class DataParallelBatchSampler:
    """Yields lists of sample indices, one per micro-batch, for one data-parallel rank.

    A global batch of B samples is [consumed, consumed + B), and the next one begins where it ends. Rank r takes the r-th
    contiguous slice of it, cut into micro-batches. So a run that continues after `consumed_samples` sees the same global batches
    under any other data-parallel size and micro-batch size that make the same B.

    A last global batch of less than B samples is not yielded: datasets are built for the samples that a run needs. Iteration
    then just ends, because a data loader reads ahead of what training uses; see `until_exhausted`.

    Args:
        total_samples: length of the dataset.
        consumed_samples: samples that all ranks together have used before.
        micro_batch_size: samples per yielded list.
        data_parallel_rank, data_parallel_size: which slice of how many.
        micro_batches_per_step: lists per global batch on each rank (gradient accumulation steps) after so many consumed samples,
            of which B is a function.

    Raises:
        ValueError: a size is not positive, the rank is outside, or no complete global batch is left.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        micro_batches_per_step: Callable[[int], int] = lambda _: 1,
    ) -> None:
        self._steps_after, steps = micro_batches_per_step, micro_batches_per_step(consumed_samples)
        if min(micro_batch_size, data_parallel_size, steps) < 1 or consumed_samples < 0:
            raise ValueError(
                f"micro_batch_size={micro_batch_size}, data_parallel_size={data_parallel_size} and micro_batches_per_step="
                f"{steps} must be at least 1, consumed_samples={consumed_samples} at least 0"
            )
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(f"data_parallel_rank={data_parallel_rank} is not in [0, {data_parallel_size})")
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.micro_batch_size = micro_batch_size
        self.rank, self.size = data_parallel_rank, data_parallel_size
        if next(self._parts(), None) is None:
            raise ValueError(
                f"no complete global batch is left: {counted(total_samples, 'sample')}, {consumed_samples} consumed, global "
                f"batch size {micro_batch_size} x {steps} x {data_parallel_size} = "
                f"{micro_batch_size * steps * data_parallel_size}. Lower the batch size, or give more data."
            )

    def _parts(self) -> Iterator[range]:
        """This rank's samples of each complete global batch that is left."""
        start = self.consumed_samples
        while True:
            count = self.micro_batch_size * self._steps_after(start)
            if start + count * self.size > self.total_samples:
                return
            yield range(start + self.rank * count, start + (self.rank + 1) * count)
            start += count * self.size

    def __len__(self) -> int:
        return sum(len(part) // self.micro_batch_size for part in self._parts())

    def __iter__(self) -> Iterator[list[int]]:
        for part in self._parts():
            for micro in range(part.start, part.stop, self.micro_batch_size):
                yield list(range(micro, micro + self.micro_batch_size))


def ramped_batch_size(full: int, rampup: Sequence[int] | None, consumed_samples: int) -> int:
    """Samples in the global batch that follows `consumed_samples`, on the way to `full` that --rampup-batch-size describes."""
    if rampup is None:
        return full
    start, increment, samples = rampup
    return min(full, start + consumed_samples * ((full - start) // increment) // samples * increment)


def samples_after(full: int, rampup: Sequence[int] | None, iterations: int, consumed_samples: int) -> int:
    """Samples consumed in total after `iterations` further global batches."""
    while iterations and (size := ramped_batch_size(full, rampup, consumed_samples)) < full:
        iterations, consumed_samples = iterations - 1, consumed_samples + size
    return consumed_samples + iterations * full


def until_exhausted(loader: Iterable[T], name: str) -> Iterator[T]:
    """The items of `loader`, then a clear error where a bare iterator would raise StopIteration.

    Raises:
        RuntimeError: one more item was asked for than there are.
        OSError: processes that read ahead cannot be started, or find no room for what they read.
    """
    ways = (
        f"They need shared memory, /dev/shm (docker run --shm-size=1g), {WORKERS_NEED}. With --num-workers 0 the ranks read "
        "themselves."
    )
    count = 0
    try:
        items = iter(loader)
    except OSError as error:  # Python names neither the place nor the limit
        raise OSError(
            f"no processes can be started that read the {name} data ahead: {error.strerror or error}. {ways}"
        ) from error
    try:
        for item in items:
            yield item
            count += 1
    except RuntimeError as error:
        # The last two: a limit on open files, as torch says it and, in another moment, as Python does.
        if not any(text in str(error) for text in ("shared memory", "Too many open files", "ancdata")):
            raise
        why = str(error).splitlines()[-1]  # above it a worker's traceback
        raise OSError(f"the processes that read the {name} data ahead have failed: {why}. {ways}") from error
    raise RuntimeError(
        f"the {name} data is exhausted after {count} batches of this run: it was built for fewer samples than are asked for. "
        "Build it for all iterations (--train-iters x --global-batch-size), which repeats it for as many epochs as that takes."
    )
