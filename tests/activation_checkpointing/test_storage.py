"""Where the inputs of checkpointed calls rest: the same bits in every mode, how much of them, and when they travel."""

import gc
import tempfile
import time
from math import ceil

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megazero import activation_checkpointing, comm, mpu
from megazero.activation_checkpointing import ActivationCheckpointer, CheckpointSettings
from megazero.activation_checkpointing.storage import BUFFERS
from megazero.nvme import PAGE, FileTransport, SwapFile
from tests.activation_checkpointing.blocks import Block, assert_same, plainly, run
from tests.ranks import run_ranks

CONTIGUOUS = {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 3}
MODES = {
    "plain": {},
    "partitioned": {"partition_activations": True},
    "contiguous": CONTIGUOUS,
    "in cpu": {"checkpoint_in_cpu": True},
    "partitioned in cpu": {"partition_activations": True, "checkpoint_in_cpu": True},
    "contiguous in cpu": {**CONTIGUOUS, "checkpoint_in_cpu": True},
    "on nvme": {"checkpoint_nvme_path": tempfile.gettempdir()},
    "partitioned on nvme": {"partition_activations": True, "checkpoint_nvme_path": tempfile.gettempdir()},
    "watched": {"synchronize": True, "profile": True},
}


def checkpointer(mode):
    return ActivationCheckpointer(CheckpointSettings(**MODES[mode]))


def gathers_of(ours):
    return 0 if ours._channel is None else ours._channel.traffic["all_gather"].collectives


def calls_of(y):
    """The checkpointed calls that `y` comes from, last first."""
    found, nodes = [], [y.grad_fn]
    while nodes:
        node = nodes.pop()
        found += [node.call] if hasattr(node, "call") else []
        nodes += [next_node for next_node, _ in node.next_functions if next_node is not None]
    return found


def kept_bytes(ranks, *numels, itemsize=4):
    """Bytes that a rank keeps of tensors: its part, at multiples of 256 bytes."""
    return sum(256 * ceil(ceil(numel / ranks) * itemsize / 256) for numel in numels)


def modes_case(modes):
    """Bit-equal in every mode, for sizes that divide and do not; one gather a block; nothing stays."""
    t = dist.get_world_size()
    mpu.initialize_model_parallel(t)
    torch.manual_seed(0)
    mpu.model_parallel_cuda_manual_seed(5)
    blocks = nn.ModuleList(Block(5) for _ in range(3))
    for mode in modes:
        ours = checkpointer(mode)
        is_cut = ours.settings.partition_activations and t > 1
        for call in (ours.checkpoint, ours.non_reentrant_checkpoint):
            # 5, 15, 20 elements: odd sizes are filled up
            for rows, mask in ((1, None), (3, torch.rand(5)), (4, torch.arange(5) > 2)):
                x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows)).requires_grad_()
                want = run(blocks, x, mask, plainly)
                before = gathers_of(ours)
                assert_same(run(blocks, x, mask, call), want)
                assert gathers_of(ours) - before == (3 if is_cut else 0)
                assert ours.storage.kept_bytes == 0 and not ours.storage._arenas, (mode, "is kept after backward")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_mode_is_bit_equal_with_dropout_and_keeps_nothing_after_backward(world_size):
    run_ranks(world_size, modes_case, list(MODES))


def kept_case():
    """What is kept of a call: 1/t of each floating-point input but the mask, whatever its size, shape and dtype."""
    t = dist.get_world_size()
    mpu.initialize_model_parallel(t)
    ours = checkpointer("partitioned")
    x, residual = torch.randn(77, 3, requires_grad=True), torch.randn(300)
    ids, mask, low = torch.arange(6), torch.rand(77, 3), torch.randn(511).bfloat16()
    y = ours.checkpoint(lambda *a, bias: a[0] * 1, x, [residual], ids, low, torch.zeros(0, 3), mask, bias=mask)
    assert ours.storage.kept_bytes == (kept_bytes(t, 231, 300) + kept_bytes(t, 511, itemsize=2) if t > 1 else 0)
    del y
    assert ours.storage.kept_bytes == 0, "a graph that is dropped gives up what it kept"
    y = ours.checkpoint(torch.sin, mask), ours.checkpoint(torch.add, mask, x), ours.checkpoint(torch.mul, mask, 2)
    assert ours.storage.kept_bytes == (kept_bytes(t, 231, 231, 231, 231) if t > 1 else 0), "these are no masks"
    del y
    ours.checkpoint(torch.sin, torch.zeros(0, 3, requires_grad=True)).sum().backward()  # nothing to keep
    # The group is looked up in every call.
    mpu.destroy_model_parallel()
    y = ours.checkpoint(torch.sin, x)
    mpu.initialize_model_parallel(1)
    y = y + ours.checkpoint(torch.sin, x)
    assert ours.storage.kept_bytes == 0
    y.sum().backward()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_rank_keeps_its_part_of_every_input(world_size):
    run_ranks(world_size, kept_case)


def other_groups_case():
    """First all ranks make a group, which has one input, and then each pair, with an input of its own."""
    ours = checkpointer("partitioned")
    for size in (4, 2):
        mpu.initialize_model_parallel(size)
        x = torch.full((5,), 1.0 + mpu.get_data_parallel_rank(), requires_grad=True)
        ours.checkpoint(torch.square, x).sum().backward()
        assert torch.equal(x.grad, 2 * x), size
        mpu.destroy_model_parallel()


def test_inputs_are_cut_over_the_groups_of_now():
    run_ranks(4, other_groups_case)


def function_of_many(x, pair, *, z):
    return torch.cat([(x @ x).reshape(-1), pair[0].float().cumsum(0), (pair[1]["y"] * z).flatten()])


def layouts_case():
    """Several inputs of several dtypes and layouts come back as they were, strides and all."""
    mpu.initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(1)
    seen = []
    inputs = [
        torch.randn(5, 5).t(),
        torch.randn(7).bfloat16(),
        torch.randn(3, 1, 2).permute(2, 0, 1),
        torch.randn(1).expand(2, 3, 1),
    ]
    for mode in MODES:
        ours, found = checkpointer(mode), []
        for call in (plainly, ours.checkpoint, ours.non_reentrant_checkpoint):
            x, h, y, z = (x.detach().requires_grad_() for x in inputs)

            def function(*args, **kwargs):
                seen.append(args[0].stride())
                return function_of_many(*args, **kwargs)

            out = call(function, x, [h, {"y": y}], z=z)
            out.square().sum().backward()
            found.append([out.detach(), x.grad, h.grad, y.grad, z.grad])
        assert_same(found[1], found[0])
        assert_same(found[2], found[0])
    assert set(seen) == {(1, 5)}


@pytest.mark.parametrize("world_size", [1, 3])
def test_several_inputs_of_any_dtype_and_layout(world_size):
    run_ranks(world_size, layouts_case)


def order_case():
    """The next block's gather is on its way before the present one runs again."""
    t = dist.get_world_size()
    mpu.initialize_model_parallel(t)
    events, real = [], comm.Channel.all_gather_

    def all_gather_(channel, buffer, name=""):
        events.append(buffer.numel())
        return real(channel, buffer, name)

    comm.Channel.all_gather_ = all_gather_
    for mode, between in (("partitioned", 0), ("contiguous in cpu", 7)):
        ours, x = checkpointer(mode), torch.ones(5, requires_grad=True)
        events.clear()
        y = x
        for i in range(3):
            y = ours.checkpoint(lambda x, i=i: (events.append(f"run {i}"), x.sin())[1], y)
            for _ in range(between):
                y = y + y  # many ways through the graph, and few nodes
        size = t * kept_bytes(t, 5)
        y.sum().backward()
        assert events == ["run 0", "run 1", "run 2", size, size, "run 2", size, "run 1", "run 0"]
        assert gathers_of(ours) == 3


def test_the_gather_of_the_next_block_starts_before_the_recomputation():
    run_ranks(2, order_case)


def test_the_next_block_is_read_from_a_drive_once_and_before_the_recomputation(one_rank, monkeypatch):
    events, real = [], SwapFile.read
    monkeypatch.setattr(SwapFile, "read", lambda *args, **kwargs: (events.append("read"), real(*args, **kwargs))[1])
    ours, y = checkpointer("on nvme"), torch.ones(5, requires_grad=True)
    for i in range(3):
        y = ours.checkpoint(lambda x, i=i: (events.append(f"run {i}"), x.sin())[1], y)
    y.sum().backward()
    assert events == ["run 0", "run 1", "run 2", "read", "read", "run 2", "read", "run 1", "run 0"]


def test_few_of_the_inputs_are_in_host_memory_however_slow_the_drive_is(one_rank, monkeypatch):
    buffers, write, slowly = {}, SwapFile.write, FileTransport.write

    def note(file, region, buffer, *args, **kwargs):
        buffers.setdefault(buffer.nbytes, set()).add(buffer.data_ptr())
        return write(file, region, buffer, *args, **kwargs)

    monkeypatch.setattr(SwapFile, "write", note)
    monkeypatch.setattr(FileTransport, "write", lambda *args: (time.sleep(0.01), slowly(*args))[1])
    ours = checkpointer("on nvme")
    for numel in (5, 3 * PAGE, 5):  # inputs of one page, of more, and of one page in buffers of more
        y = x = torch.rand(numel, requires_grad=True)
        for _ in range(12):
            y = ours.checkpoint(torch.sin, y)
        y.sum().backward()
        y = want = x.detach().requires_grad_()
        for _ in range(12):
            y = y.sin()
        y.sum().backward()
        assert torch.equal(x.grad, want.grad)
    assert len(buffers[PAGE]) <= 2 * BUFFERS and len(buffers[12 * PAGE]) <= BUFFERS


def test_contiguous_checkpoints_lie_in_one_storage_that_is_used_again(one_rank):
    ours, x = checkpointer("contiguous"), torch.ones(5, requires_grad=True)
    for _ in range(2):
        y = x
        for _ in range(3):
            y = ours.checkpoint(torch.sin, y)
        buffers = [call.kept._rest.resident for call in calls_of(y)]
        (arena,) = ours.storage._arenas.values()
        assert {b.untyped_storage().data_ptr() for b in buffers} == {arena.memory.data_ptr()}
        assert [b.storage_offset() for b in buffers] == [512, 256, 0] and arena.memory.numel() == 3 * 256
        assert ours.storage.kept_bytes == 3 * 256
        with pytest.raises(RuntimeError, match="num_checkpoints=3 .* 256 bytes.*reset"):
            ours.checkpoint(torch.sin, y)
        y.sum().backward()
        assert ours.storage.kept_bytes == 0
        del buffers, arena
    assert not ours.storage._arenas, "the storage goes with the last of what lies in it, though y keeps the graph"


def test_places_on_a_drive_are_used_again(one_rank):
    ours, x, files = checkpointer("on nvme"), torch.ones(5, requires_grad=True), set()
    for _ in range(5):
        ours.checkpoint(torch.sin, x).sum().backward()
        files.add(ours.storage._swap)
    assert len(files) == 1 and files.pop().nbytes < 5 * PAGE


def test_reset_makes_room_for_a_forward_after_one_without_backward(one_rank):
    ours, x = checkpointer("contiguous"), torch.ones(5, requires_grad=True)
    left = [ours.checkpoint(torch.sin, x) for _ in range(3)]
    ours.reset()
    again = [ours.checkpoint(torch.sin, x) for _ in range(3)]
    sum(left + again).sum().backward()
    torch.testing.assert_close(x.grad, 6 * torch.cos(x.detach()))
    assert ours.storage.kept_bytes == 0


@pytest.mark.parametrize("mode", MODES)
def test_two_models_in_one_process_do_not_collide(one_rank, mode):
    """Forwards and backwards in turns: of one checkpointer with two sizes, and of two with one size."""
    one, other = checkpointer(mode), checkpointer(mode)
    for first, second, size in ((one, one, 70), (one, other, 5)):
        x, y = torch.randn(5, requires_grad=True), torch.randn(size, requires_grad=True)
        a, b = x, y
        for _ in range(3):
            a, b = first.checkpoint(torch.sin, a), second.checkpoint(torch.cos, b)
        a.sum().backward()
        b.sum().backward()
        want_a, want_b = x.detach().requires_grad_(), y.detach().requires_grad_()
        want_a.sin().sin().sin().sum().backward()
        want_b.cos().cos().cos().sum().backward()
        assert_same([x.grad, y.grad], [want_a.grad, want_b.grad])


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_leaves_nothing_behind(one_rank, mode):
    ours, x = checkpointer(mode), torch.ones(5, requires_grad=True)

    def fail(x):
        raise KeyError("on purpose")

    errors = []
    for call in (ours.checkpoint, ours.non_reentrant_checkpoint):
        for _ in range(4):  # more than there are slots
            with pytest.raises(KeyError) as info:
                call(fail, x)
            errors.append(info)  # and with it the frames of the call
    assert ours.storage.kept_bytes == 0
    ours.checkpoint(torch.sin, x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.parametrize("mode", MODES)
def test_a_retained_graph_keeps_its_inputs_and_another_does_not(one_rank, mode):
    ours, x = checkpointer(mode), torch.randn(5, requires_grad=True)
    for call in (ours.checkpoint, ours.non_reentrant_checkpoint):
        x.grad = None
        y = call(torch.sin, call(lambda x: x.sin().sin(), x))
        y.sum().backward(retain_graph=True)
        once = x.grad.clone()
        y.sum().backward()
        assert torch.equal(x.grad, 2 * once)
        assert ours.storage.kept_bytes == 0
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()


@pytest.mark.parametrize("mode", ["contiguous", "on nvme"])
def test_a_function_may_change_an_argument_of_which_a_copy_is_kept(one_rank, mode):
    ours, x = checkpointer(mode), torch.randn(5, requires_grad=True)
    for call in (ours.checkpoint, ours.non_reentrant_checkpoint):
        x.grad = None
        counter = torch.ones(5)
        call(lambda x, counter, _: x.sin() * counter.add_(1), x, counter, None).sum().backward()
        assert_same([x.grad, counter], [2 * x.detach().cos(), torch.full((5,), 2.0)])


def test_a_graph_that_is_kept_holds_no_inputs_after_backward(one_rank):
    """A loss in a list of losses must not hold on to the activations of its step."""
    ours, x = checkpointer("contiguous"), torch.ones(5, requires_grad=True)
    losses = []
    for _ in range(5):
        losses.append(ours.checkpoint(torch.sin, ours.checkpoint(torch.sin, x)).sum())
        losses[-1].backward()
    gc.collect()
    assert ours.storage.kept_bytes == 0 and not ours.storage._arenas


def test_cpu_without_a_device_copies_nothing(one_rank):
    if torch.cuda.is_available():
        pytest.skip("here it copies")
    ours, seen = checkpointer("in cpu"), []
    x = torch.ones(5, requires_grad=True)
    ours.checkpoint(lambda x: (seen.append(x.data_ptr()), x.sin())[1], x).sum().backward()
    assert seen == [x.data_ptr()] * 2 and ours.storage.link is None


def test_profile_sums_the_calls_in_forward_and_backward(one_rank):
    ours, x = checkpointer("watched"), torch.ones(5, requires_grad=True)
    for call in (ours.checkpoint, ours.non_reentrant_checkpoint):
        call(lambda x: x.sin().sin(), x).sum().backward()
        times = ours.timers.read_and_reset()
        assert list(times) == ["checkpoint forward", "checkpoint backward"] and min(times.values()) > 0
        assert not ours.timers.read_and_reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
def test_on_a_device_every_mode_is_bit_equal_and_cpu_is_pinned(one_rank, mode):
    mpu.model_parallel_cuda_manual_seed(5)
    blocks = nn.ModuleList(Block(257) for _ in range(3)).cuda()
    x = torch.randn(65, 257, device="cuda", requires_grad=True)
    want, ours = run(blocks, x, None, plainly), checkpointer(mode)
    for call in (ours.checkpoint, ours.non_reentrant_checkpoint):
        for _ in range(3):
            assert_same(run(blocks, x, None, call), want)
    y = ours.checkpoint(blocks[0], x)
    if "cpu" in mode:
        assert calls_of(y)[0].kept._rest.resident.is_pinned() and ours.storage.link is not None
    y.sum().backward()
    assert ours.storage.kept_bytes == 0


def test_the_default_checkpointer_is_told_by_megatrons_function(one_rank):
    activation_checkpointing.partition_activations_in_checkpoint(True)
    assert activation_checkpointing.default.settings.partition_activations is True
    activation_checkpointing.partition_activations_in_checkpoint(False)
    assert activation_checkpointing.default.settings.partition_activations is False
