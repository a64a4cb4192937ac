"""Broadcasting a batch within the model-parallel group."""

import pytest
import torch
import torch.distributed as dist

from megazero import comm, mpu
from tests.ranks import run_ranks

SHAPES = {
    "text": (3, 5),
    "scalar": (),
    "empty": (4, 0, 2),
    "vector": (7,),
    "deep": (1, 2, 1, 2, 1, 3),
    "deepest": (1,) * 63 + (2,),
}
DTYPES = (
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
)


def values(dtype, replica):
    generator = torch.Generator().manual_seed(replica)
    return {k: torch.randint(0, 100, shape, generator=generator).to(dtype) for k, shape in SHAPES.items()}


def broadcast_case(model_parallel_size):
    groups = mpu.initialize_model_parallel(model_parallel_size)
    is_first = groups.model_parallel_rank == 0
    for dtype in DTYPES:
        want = values(dtype, groups.data_parallel_rank)  # replicas read different data
        data = {**want, "ignored": torch.zeros(2, dtype=torch.complex64)} if is_first else None
        if is_first:
            data["text"] = data["text"].t().contiguous().t()  # not contiguous
        got = mpu.broadcast_data(list(SHAPES), data, dtype)
        assert list(got) == list(SHAPES)
        for key, value in got.items():
            assert value.dtype == dtype and value.shape == SHAPES[key] and value.device == comm.local_device()
            assert torch.equal(value, want[key]), key
            assert value.data_ptr() != want[key].data_ptr() or not value.numel()
    assert mpu.broadcast_data([], {}, torch.int64) == {}
    only_empty = mpu.broadcast_data(["x"], {"x": torch.zeros(0)} if is_first else {"x": "not looked at"}, torch.float32)
    assert only_empty["x"].shape == (0,)
    twice = mpu.broadcast_data(["x", "x"], {"x": torch.ones(2)}, torch.float32)
    assert twice["x"].tolist() == [1.0, 1.0]
    needs_grad = mpu.broadcast_data(["x"], {"x": torch.ones(2, requires_grad=True)}, torch.float32)
    assert not needs_grad["x"].requires_grad


@pytest.mark.parametrize(("world_size", "model_parallel_size"), [(1, 1), (2, 2), (3, 3), (4, 2)])
def test_every_rank_gets_the_first_ranks_tensors(world_size, model_parallel_size):
    run_ranks(world_size, broadcast_case, model_parallel_size)


def message_case():
    """One message for all shapes, one for all values; only the first rank's data count."""
    sent, real = [], comm.broadcast_
    comm.broadcast_ = lambda buffer, group: (sent.append(buffer.nbytes), real(buffer, group))
    data = {k: torch.zeros(shape) for k, shape in SHAPES.items()}
    mpu.broadcast_data(list(SHAPES), data, torch.float32, group=dist.group.WORLD)
    assert len(sent) == 2 and sent[1] == 4 * sum(x.numel() for x in data.values())


def test_two_messages_whatever_the_number_of_keys():
    run_ranks(2, message_case)


def other_device_case():
    """Messages are on the device that computes, which the backend is of, wherever the results are wanted."""
    sent, real = [], comm.broadcast_
    comm.broadcast_ = lambda buffer, group: (sent.append(buffer.device), real(buffer, group))
    got = mpu.broadcast_data(["x"], {"x": torch.ones(3)}, torch.float32, group=dist.group.WORLD, device="meta")
    assert sent == [comm.local_device()] * 2 and got["x"].device.type == "meta" and got["x"].shape == (3,)


def test_results_on_another_device_travel_on_the_one_that_computes():
    run_ranks(2, other_device_case)


def known_shapes_case():
    """One message, and the host reads nothing that other ranks have sent."""
    groups = mpu.initialize_model_parallel(2)
    is_first = groups.model_parallel_rank == 0
    sent, real = [], comm.broadcast_
    comm.broadcast_ = lambda buffer, group: (sent.append(buffer.nbytes), real(buffer, group))
    want = values(torch.int64, groups.data_parallel_rank)
    got = mpu.broadcast_data(list(SHAPES), want if is_first else None, torch.int64, shapes=SHAPES)
    assert sent == [8 * sum(x.numel() for x in want.values())]
    assert all(torch.equal(got[key], want[key]) for key in SHAPES)
    if is_first:
        wrong = {**want, "text": want["text"].t()}
        with pytest.raises(ValueError, match=r"'text' is of shape \(5, 3\), not \(3, 5\), on rank "):
            mpu.broadcast_data(list(SHAPES), wrong, torch.int64, shapes=SHAPES)
        with pytest.raises(ValueError, match="'deep' is not in the data"):
            mpu.broadcast_data(["deep"], {}, torch.int64, shapes=SHAPES)


def test_known_shapes_are_not_sent():
    run_ranks(4, known_shapes_case)


def error_case():
    """Every rank raises, names the key, and can go on: no rank is left in a collective."""
    groups = mpu.initialize_model_parallel(2)
    good = torch.zeros(2, dtype=torch.int64)
    cases = [
        ({"a": good}, "'b' is not in the data"),
        (None, "'a' is not in the data"),
        ({"a": good, "b": [1, 2]}, "'b' is not a tensor"),
        ({"a": good, "b": good.float()}, "'b' is of .*dtype"),
        ({"a": good, "b": good.view((1,) * 64 + (2,))}, "'b' has more than 64 dimensions"),
    ]
    for data, message in cases:
        source = dist.get_rank() // 2 * 2
        with pytest.raises(ValueError, match=f"{message}.* on rank {source}, .*torch.int64") as error:
            mpu.broadcast_data(["a", "b"], data if groups.model_parallel_rank == 0 else None, torch.int64)
        if "dtype" in message:
            assert "torch.float32" in str(error.value)
        dist.barrier()


def test_errors_name_the_key_on_every_rank():
    run_ranks(4, error_case)
