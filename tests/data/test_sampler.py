"""The sampler: one global order, whatever the ranks and micro-batches, and exact continuation."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megazero.data.sampler import DataParallelBatchSampler, until_exhausted

# Ways to make a global batch of 12: (micro-batch size, data-parallel size, accumulation steps).
SHAPES = [(1, 1, 12), (12, 1, 1), (3, 4, 1), (2, 3, 2), (1, 12, 1), (2, 2, 3), (6, 2, 1), (4, 1, 3)]


def global_batches(total, consumed, micro, size, steps):
    """What all ranks together see in each optimizer step, in rank order."""
    ranks = [list(DataParallelBatchSampler(total, consumed, micro, r, size, lambda _: steps)) for r in range(size)]
    assert all(len(batch) == micro for rank in ranks for batch in rank)
    assert len({len(rank) for rank in ranks}) == 1
    return [
        [i for rank in ranks for batch in rank[step * steps : (step + 1) * steps] for i in batch]
        for step in range(len(ranks[0]) // steps)
    ]


@settings(max_examples=100)
@given(
    total=st.integers(12, 200), before=st.sampled_from(SHAPES), after=st.sampled_from(SHAPES), done=st.integers(0, 5)
)
def test_order_does_not_depend_on_ranks_and_continues_exactly(total, before, after, done):
    whole = global_batches(total, 0, *before)
    assert whole == [list(range(k * 12, k * 12 + 12)) for k in range(total // 12)]
    if 12 * (done + 1) <= total:
        assert global_batches(total, 12 * done, *after) == whole[done:]


@pytest.mark.parametrize("size", [1, 2])
def test_batches_that_grow_are_cut_alike_for_any_number_of_ranks_and_go_on_in_the_middle(size):
    def ranks_from(consumed):
        def steps_after(samples):
            return (2 if samples < 4 else 4 if samples < 12 else 6) // size

        return [DataParallelBatchSampler(30, consumed, 1, rank, size, steps_after) for rank in range(size)]

    def together(consumed, sizes):
        parts = [iter(rank) for rank in ranks_from(consumed)]
        found = [[i for part in parts for _ in range(n // size) for i in next(part)] for n in sizes]
        assert all(next(part, None) is None for part in parts)
        return found

    sizes = [2, 2, 4, 4, 6, 6, 6]
    bounds = [0, 2, 4, 8, 12, 18, 24, 30]
    whole = [list(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    assert together(0, sizes) == whole and together(8, sizes[3:]) == whole[3:]
    assert len(ranks_from(0)[0]) == 30 // size


def test_continues_from_any_number_of_samples():
    # The global batch size was 5 before and is 4 now.
    assert global_batches(20, 5, 2, 2, 1) == [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]


def test_length_counts_the_batches_that_are_left():
    sampler = DataParallelBatchSampler(100, 30, 2, 1, 3, lambda _: 4)
    assert len(sampler) == len(list(sampler)) == 8
    assert list(sampler) == list(sampler), "each iteration starts where the run does"


def test_incomplete_last_batch_is_dropped():
    assert global_batches(11, 0, 2, 2, 1) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("total, consumed", [(11, 0), (24, 13), (24, 24), (24, 100)])
def test_nothing_left_shows_the_arithmetic(total, consumed):
    with pytest.raises(ValueError, match=f"{total} samples, {consumed} consumed, global batch size 2 x 3 x 2 = 12"):
        DataParallelBatchSampler(total, consumed, 2, 0, 2, lambda _: 3)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((10, 0, 0, 0, 1), "micro_batch_size=0"),
        ((10, 0, 1, 0, 0), "data_parallel_size=0"),
        ((10, 0, 1, 0, 1, lambda _: 0), "micro_batches_per_step=0"),
        ((10, -1, 1, 0, 1), "consumed_samples=-1"),
        ((10, 0, 1, 2, 2), r"data_parallel_rank=2 is not in \[0, 2\)"),
        ((10, 0, 1, -1, 2), r"data_parallel_rank=-1 is not in \[0, 2\)"),
    ],
)
def test_bad_sizes_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        DataParallelBatchSampler(*arguments)


def test_processes_that_read_ahead_without_shared_memory_are_told_with_the_flag_that_needs_none():
    class Full:
        def __iter__(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    def fills():
        yield 1
        raise RuntimeError("a traceback\nunable to allocate shared memory(shm) for file </torch_1>: No space left")

    with pytest.raises(
        OSError, match="read the training data ahead: No space left on device.*/dev/shm.*--num-workers 0"
    ):
        next(until_exhausted(Full(), "training"))
    batches = until_exhausted(fills(), "training")
    assert next(batches) == 1
    with pytest.raises(OSError, match=r"have failed: unable to allocate shared memory.*/dev/shm.*--num-workers 0"):
        next(batches)


@pytest.mark.parametrize(
    ("said", "is_limit"),
    [
        ("Too many open files. Communication with the workers", True),
        ("received 0 items of ancdata", True),
        ("an error of the dataset", False),
    ],
)
def test_too_many_open_files_are_told_as_a_limit_and_not_by_a_traceback(said, is_limit):
    def fills():
        yield 1
        raise RuntimeError(said)

    batches = until_exhausted(fills(), "training")
    assert next(batches) == 1
    told = rf"have failed: {said}.*`ulimit` \(-n, -u\).*--num-workers 0" if is_limit else f"^{said}$"
    with pytest.raises(OSError if is_limit else RuntimeError, match=told):
        next(batches)


def test_exhausted_data_is_an_error_only_when_asked_for():
    # The loader reads ahead: it must not raise before the last batch has been used.
    sampler = DataParallelBatchSampler(8, 0, 2, 0, 1)
    batches = until_exhausted(DataLoader(list(range(8)), batch_sampler=sampler, num_workers=1), "training")
    assert [next(batches).tolist() for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(RuntimeError, match="the training data is exhausted after 4 batches"):
        next(batches)
