"""The checker of races itself: each planted race is reported, and the same program without it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megazero.comm import lane
from megazero.nvme import PAGE
from tests.happens_before import Access, Agent, Block
from tests.plan.fake_world import ACCELERATOR, fake_world
from tests.pretended_cuda import PretendedCuda, Stream

Program = Callable[[PretendedCuda, bool], None]  # does it right, or (False) forgets something
PROGRAMS: dict[str, tuple[Program, str]] = {}  # and what the report of the wrong one says


def planted(report: str) -> Callable[[Program], Program]:
    def keep(program: Program) -> Program:
        PROGRAMS[program.__name__] = program, report
        return program

    return keep


def there(numel: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(numel, dtype=dtype, device=ACCELERATOR)


def here(numel: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(numel, dtype=dtype)


def side(cuda: PretendedCuda, waits: bool = True) -> Stream:
    """A stream that waits for what is computed."""
    stream = cuda.new_stream("side")
    if waits:
        stream.wait_stream(cuda.compute)
    return stream


@planted("mul_ writes bytes 0 to 32")
def a_side_stream_reads_what_was_computed(cuda, is_right):
    x = there()
    torch.cuda.synchronize()
    x.mul_(2)
    with torch.cuda.stream(side(cuda, waits=is_right)):
        x.sum()
    torch.cuda.synchronize()


@planted("side, step 1: add_ writes bytes 0 to 32")
def a_kernel_reads_what_a_side_stream_writes(cuda, is_right):
    x, stream = there(), side(cuda)
    with torch.cuda.stream(stream):
        x.add_(1)
    event = stream.record_event()
    if is_right:
        torch.cuda.current_stream().wait_event(event)
    x.sum()
    torch.cuda.synchronize()


@planted("side, step 1: copy_ writes bytes 0 to 32")
def the_host_reads_what_is_copied_to_it(cuda, is_right):
    x, y, stream = here(), there(), side(cuda)
    with torch.cuda.stream(stream):
        x.copy_(y, non_blocking=True)
    event = torch.cuda.Event(blocking=True)
    stream.record_event(event)
    if is_right:
        event.synchronize()
    x.sum()
    torch.cuda.synchronize()


@planted("compute, step 2: copy_ reads bytes 0 to 32")
def the_host_writes_to_what_is_copied_from_it(cuda, is_right):
    x, y = here(), there()
    y.copy_(x, non_blocking=not is_right)  # else the host waits for it
    x.zero_()


@planted("copy_ (casts) reads bytes 0 to 32")
def a_copy_that_is_waited_for_casts_on_the_host_what_is_not_there_yet(cuda, is_right):
    x, y, stream = here(), there(), side(cuda)
    with torch.cuda.stream(stream):
        x.copy_(y.add_(1), non_blocking=True)
        if is_right:
            stream.synchronize()
        y.to(torch.bfloat16).copy_(x)  # behind it in its stream, which does not help
    torch.cuda.synchronize()


@planted("compute, step 2: copy_ reads bytes 0 to 32")
def the_host_writes_to_what_the_device_casts(cuda, is_right):
    x, y = here(), there(dtype=torch.bfloat16)
    y.copy_(x, non_blocking=not is_right)
    x.zero_()


@planted("compute, step 2: copy_ writes bytes 0 to 16")
def the_host_reads_what_the_device_casts_for_it(cuda, is_right):
    x, y = here(dtype=torch.bfloat16), there()
    x.copy_(y, non_blocking=not is_right)
    x.sum()


@planted("goes back to compute")
def memory_goes_back_while_a_side_stream_reads_it(cuda, is_right):
    x, y, stream = there(), torch.empty(8), side(cuda)
    with torch.cuda.stream(stream):
        y.copy_(x, non_blocking=True)
    if is_right:
        torch.cuda.current_stream().wait_stream(stream)
    del x
    torch.cuda.synchronize()


@planted("goes back to compute")
def memory_goes_back_that_a_side_stream_was_announced_for(cuda, is_right):
    x, y, stream = there(), torch.empty(8), side(cuda)
    with torch.cuda.stream(stream):
        y.copy_(x, non_blocking=True)
    if is_right:
        x.record_stream(stream)
    del x


@planted("goes back to side")
def memory_of_a_side_stream_goes_back_while_it_is_computed_with(cuda, is_right):
    stream = side(cuda)
    with torch.cuda.stream(stream):
        x = there()
    torch.cuda.current_stream().wait_stream(stream)
    x.sum()
    if is_right:
        stream.wait_stream(torch.cuda.current_stream())
    del x


@planted("goes back to compute")
def a_storage_is_emptied_while_a_copy_fills_it(cuda, is_right):
    x, y, stream = there(), here(), side(cuda)
    with torch.cuda.stream(stream):
        x.copy_(y, non_blocking=True)
    if is_right:
        stream.synchronize()
    x.untyped_storage().resize_(0)
    torch.cuda.synchronize()


@planted("took memory that writes")
def new_memory_is_written_beside_whoever_had_it_before(cuda, is_right):
    stream = side(cuda)
    there()  # computed, and its memory goes back
    x = torch.empty(8, device=ACCELERATOR)
    if is_right:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.zero_()
    torch.cuda.synchronize()


@planted("goes back at")
def pages_of_ours_go_back_while_a_copy_fills_them(cuda, is_right):
    pages, x, stream = cuda.aligned_empty(32, pin=True), there(), side(cuda)
    with torch.cuda.stream(stream):
        pages.view(torch.float32).copy_(x, non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)  # which the host does not wait for
    if is_right:
        torch.cuda.synchronize()
    del pages


@planted("NCCL")
def what_is_being_reduced_is_written_to(cuda, is_right):
    x = there()
    work = dist.all_reduce(x, async_op=True)
    if is_right:
        work.wait()
    x.add_(1)
    torch.cuda.synchronize()


@planted("NCCL")
def the_host_takes_what_is_still_being_reduced(cuda, is_right):
    x = there()
    work = dist.all_reduce(x, async_op=True)
    if is_right:
        work.wait()
    float(x.sum())


@planted("goes back to compute")
def the_work_is_waited_for_by_another_stream_than_its_memorys(cuda, is_right):
    x, stream = there(), side(cuda)
    with torch.cuda.stream(stream):
        dist.all_reduce(x, async_op=True).wait()
    if is_right:
        torch.cuda.current_stream().wait_stream(stream)
    del x


@planted("goes back to side")
def what_was_reduced_goes_back_behind_another_stream_that_was_announced(cuda, is_right):
    with torch.cuda.stream(side(cuda)):
        x = there()
        work = dist.all_reduce(x, async_op=True)
    if is_right:
        work.wait()
    x.record_stream(torch.cuda.current_stream())
    work._tensors = []  # as torch does when it sees that the collective is over
    del x


@planted("reduce_scatter writes bytes 0 to 32")
def a_part_of_what_is_being_scattered_is_read(cuda, is_right):
    x = there()
    work = lane._reduce_scatter(x[:4], x, async_op=True)
    if is_right:
        work.wait()
    x[6:].sum()
    torch.cuda.synchronize()


@planted("add_ writes bytes 12 to 32")
def two_streams_write_to_parts_of_one_memory(cuda, is_right):
    x, stream = there(), side(cuda)
    with torch.cuda.stream(stream):
        x[:4].add_(1)
    x[4 if is_right else 3 :].add_(1)
    torch.cuda.synchronize()


@planted("another thread, step 1: add_ writes")
def a_thread_is_not_joined(cuda, is_right):
    x = here()
    thread = cuda.thread(lambda: x.add_(1), name="another thread")
    thread.start()
    if is_right:
        thread.join()
    x.sum()


@planted("another thread, step 1: add reads")
def a_thread_reads_what_the_main_one_goes_on_to_write(cuda, is_right):
    x = here()
    thread = cuda.thread(lambda: x.add(1), name="another thread")
    thread.start()
    if is_right:
        thread.join()
    x.zero_()


@planted("write of the swap file reads bytes 0 to")
def what_is_being_written_to_a_file_is_changed(cuda, is_right):
    swap = cuda.swap_file("", 0)
    region, x = swap.allocate(PAGE), torch.zeros(PAGE, dtype=torch.uint8)
    write = swap.write(region, x)
    if is_right:
        write.wait()
    x.add_(1)
    write.wait()


@planted("the file writes")
def a_file_is_read_before_it_is_written(cuda, is_right):
    swap = cuda.swap_file("", 0)
    region, x, y = swap.allocate(PAGE), *(torch.zeros(PAGE, dtype=torch.uint8) for _ in range(2))
    write = swap.write(region, x)
    read = swap.read(region, y, after=write if is_right else None)
    write.wait()
    read.wait()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_race_is_reported_and_the_same_without_it_is_not(name):
    program, report = PROGRAMS[name]
    for is_right in (True, False):
        cuda = PretendedCuda()
        with cuda.installed(), fake_world(2, held=cuda):
            program(cuda, is_right)
        assert bool(cuda.races) is not is_right, "\n".join(cuda.races)
    assert report in cuda.races[0] and "tests/test_pretended_cuda.py:" in cuda.races[0], cuda.races[0]


@pytest.mark.parametrize("kind", ["torch's pinned memory", "pages that are not pinned"])
def test_host_memory_that_waits_for_copies_by_itself_may_go_back(kind):
    cuda = PretendedCuda()
    with cuda.installed(), FakeTensorMode(), cuda:
        x = torch.empty(8, pin_memory=True) if kind.startswith("torch") else cuda.aligned_empty(32).view(torch.float32)
        x.copy_(there(), non_blocking=True)
        del x
    assert not cuda.races


def test_what_one_agent_has_seen_it_passes_on():
    first, second, third = (Agent(name) for name in ("first", "second", "third"))
    block = Block("memory")

    def writes(agent: Agent) -> list[Access]:
        return block.access(Access(0, 1, agent, agent.step(), True, "it", ()))

    assert not writes(first)
    second.see(first.place())
    third.see(second.place())
    assert not writes(third) and not writes(third)
    assert [access.agent for access in writes(second)] == [third]
    assert [access.agent for access in writes(first)] == [third, second]


def test_a_report_names_both_accesses_and_where_they_come_from():
    cuda = PretendedCuda()
    with cuda.installed(), FakeTensorMode(), cuda:
        x = there()
        with torch.cuda.stream(side(cuda, waits=False)):
            x.add_(1)
            x.add_(1)  # the same again, and reported once for a place
    first, *rest = cuda.races
    assert [line.strip().partition(":")[0] for line in first.splitlines() if "step" in line] == [
        "compute, step 1",
        "side, step 1",
    ]
    assert first.count("tests/test_pretended_cuda.py:") >= 2 and len(rest) <= 2
