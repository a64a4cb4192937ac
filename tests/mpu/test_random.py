"""Random streams: equal or different between ranks as asked, and never disturbed by each other."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megazero import comm, mpu
from megazero.mpu.random import RngState, RngTracker
from tests.ranks import run_ranks


def draw():
    return torch.rand(3).tolist()


def stream(seed, count=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(3, generator=generator).tolist() for _ in range(count)]


def seed_case():
    mpu.initialize_model_parallel(2)
    mpu.model_parallel_cuda_manual_seed(7)
    tracker = mpu.get_cuda_rng_tracker()
    rank = dist.get_rank()
    outer, inner = stream(7, 3), stream(7 + 2718 + rank % 2, 2)
    assert draw() == outer[0], "the default stream is that of the seed on every rank"
    with tracker.fork():
        assert draw() == inner[0]
    assert draw() == outer[1], "the fork did not move the default stream"
    with tracker.fork("model-parallel-rng"):
        assert draw() == inner[1], "the stream goes on where it was left"
    assert draw() == outer[2]
    mpu.model_parallel_cuda_manual_seed(np.int64(7))  # again, from the start
    with tracker.fork():
        return draw()


def test_default_stream_is_shared_and_forked_stream_is_per_model_parallel_rank():
    a, b, c, d = run_ranks(4, seed_case)
    assert a == c != b == d


@pytest.fixture
def generator_of_device(monkeypatch):
    """This process computes on a CUDA device, whose generator this is."""
    generator = torch.Generator()
    monkeypatch.setattr(comm, "local_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_rng_state", generator.get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", generator.set_state)
    monkeypatch.setattr(torch.cuda, "manual_seed", generator.manual_seed)
    return generator


def test_streams_of_a_device_are_those_of_its_generator_and_the_hosts_stays_where_it_is(generator_of_device):
    def draw():
        return torch.rand(3, generator=generator_of_device).tolist()

    host, tracker = torch.get_rng_state(), mpu.get_cuda_rng_tracker()
    outer, inner = stream(7, 2), stream(7 + 2718 + 1, 2)
    mpu.model_parallel_cuda_manual_seed(7, model_parallel_rank=1)
    with tracker.fork():
        assert draw() == inner[0]
    assert draw() == outer[0]
    state = RngState.capture()
    for _ in range(2):
        with tracker.fork():
            assert draw() == inner[1]
        assert draw() == outer[1]
        assert torch.equal(torch.get_rng_state(), host)
        state.restore()


@pytest.fixture
def tracker():
    tracker = RngTracker()
    torch.manual_seed(1)
    tracker.add("a", 10)
    tracker.add("b", 20)
    return tracker


def test_adding_streams_leaves_the_default_stream_alone(tracker):
    assert draw() == stream(1)[0]


def test_used_names_and_seeds_are_refused_and_reset_frees_them(tracker):
    with pytest.raises(ValueError, match="'a' exists already"):
        tracker.add("a", 30)
    with pytest.raises(ValueError, match="seed 20 .* belongs to another stream"):
        tracker.add("c", 20)
    with pytest.raises(ValueError, match=r"no random stream 'c' \(known: 'a', 'b'\)"):
        with tracker.fork("c"):
            pass
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.add("a", 20)
    with pytest.raises(ValueError, match="model_parallel_cuda_manual_seed"):
        with tracker.fork():
            pass


def test_forks_nest_and_every_stream_goes_on_where_it_was(tracker):
    a, b, outer = stream(10, 5), stream(20, 2), stream(1, 2)
    assert draw() == outer[0]
    with tracker.fork("a"):
        assert draw() == a[0]
        with tracker.fork("b"):
            assert draw() == b[0]
            with tracker.fork("a"):
                assert draw() == a[1]
            assert draw() == b[1]
        assert draw() == a[2]
        with tracker.fork("a"):
            assert draw() == a[3]
        assert draw() == a[4]
    assert draw() == outer[1]


def test_an_exception_inside_a_fork_restores_the_outer_stream(tracker):
    with pytest.raises(KeyError):
        with tracker.fork("a"):
            draw()
            raise KeyError
    assert draw() == stream(1)[0]
    with tracker.fork("a"):
        assert draw() == stream(10, 2)[1]


def test_states_are_copies_both_ways(tracker):
    states = tracker.get_states()
    saved = {name: state.clone() for name, state in states.items()}
    tracker.set_states(states)
    with tracker.fork("a"):
        draw()
    assert all(torch.equal(states[name], saved[name]) for name in saved), "drawing changed the caller's snapshot"
    states["b"].zero_()
    tracker.get_states()["b"].zero_()
    with tracker.fork("b"):
        assert draw() == stream(20)[0], "the caller's change reached the tracker"
    tracker.set_states(saved)
    with tracker.fork("a"):
        assert draw() == stream(10)[0]
        moved = tracker.get_states()["a"]
        assert not torch.equal(moved, saved["a"]), "a state that is in use is the current one"
    tracker.set_states({"a": moved})
    with tracker.fork("a"):
        assert draw() == stream(10, 2)[1]
    assert list(tracker.get_states()) == ["a"]


def test_reset_inside_a_fork_does_not_bring_the_stream_back(tracker):
    with tracker.fork("a"):
        tracker.reset()
    assert tracker.get_states() == {} and draw() == stream(1)[0]
    tracker.add("a", 10)
    tracker.add("b", 20)
    with tracker.fork("a"), tracker.fork("b"):
        tracker.reset()
    assert draw() == stream(1, 2)[1]


def test_rng_state_restores_every_stream(one_rank):
    torch.manual_seed(3)
    mpu.model_parallel_cuda_manual_seed(4)

    def both():
        with mpu.get_cuda_rng_tracker().fork():
            inner = draw()
        return draw(), inner

    state = RngState.capture()
    first = both()
    assert both() != first
    state.restore()
    assert both() == first
    state.restore()
    assert both() == first, "a state can be restored twice"


def test_seeding_needs_the_groups():
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        mpu.model_parallel_cuda_manual_seed(1)
