"""Checkpoints: exact state back, any model-parallel size, and no half-written or damaged one is ever taken for whole."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from megazero import comm, mpu
from megazero.checkpoint import capture, folder, saver, writer
from megazero.checkpoint import format as checkpoint_format
from megazero.checkpoint.format import CheckpointError
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.standalone import place_script
from megazero.checkpoint.tags import latest_tag, list_tags, tags_to_go_back_to
from megazero.checkpoint.tensor_file import CheckedFile
from megazero.engine import Engine, weight_decay_groups
from megazero.optim.loss_scaler import LossScaler
from tests.ranks import run_ranks

GPU = torch.device("cuda")


class Net(nn.Module):
    """Column- and row-parallel layers, an embedding with a padded vocabulary, and replicated parameters."""

    def __init__(self):
        super().__init__()
        self.embedding = mpu.VocabParallelEmbedding(13, 12, padded_num_embeddings=24)
        self.up = mpu.ColumnParallelLinear(12, 36, gather_output=False, stride=3)
        self.down = mpu.RowParallelLinear(36, 12, input_is_parallel=True, stride=3)
        self.norm = nn.LayerNorm(12)

    def forward(self, tokens):
        return self.norm(self.down(torch.tanh(self.up(self.embedding(tokens))))).square().mean()


def make_engine(size: int, seed: int = 0) -> Engine:
    groups = mpu.initialize_model_parallel(size)
    mpu.model_parallel_cuda_manual_seed(seed)
    model = Net()
    return Engine(model, groups, lambda g: torch.optim.AdamW(g, lr=0.05), *weight_decay_groups(model, 0.1))


def train(engine: Engine, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = engine(torch.arange(10).view(2, 5))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def save_case(size: int, directory: str) -> list[float]:
    engine = make_engine(size)
    train(engine, 3)
    engine.save_checkpoint(directory, client_state={"epoch": 7})
    return train(engine, 3)


def load_case(size: int, directory: str) -> list[float]:
    engine = make_engine(size, seed=99)  # other weights, so that what is not loaded shows
    path, client = engine.load_checkpoint(directory)
    assert path.name == "global_step3" and client == {"epoch": 7} and engine.global_steps == 3
    return train(engine, 3)


def test_training_continues_bit_for_bit_under_the_same_layout(tmp_path):
    """Under others: test_any_to_any."""
    want = run_ranks(4, save_case, 2, str(tmp_path))
    assert run_ranks(4, load_case, 2, str(tmp_path)) == want


def write_one(tmp_path, steps: int = 1) -> Engine:
    engine = make_engine(1)
    train(engine, steps)
    engine.save_checkpoint(str(tmp_path))
    return engine


@pytest.fixture
def world():
    comm.init_distributed("gloo")
    yield
    mpu.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def test_random_generators_continue(world, tmp_path):
    engine = make_engine(1)
    engine.save_checkpoint(str(tmp_path))
    want = torch.rand(3)
    with mpu.get_cuda_rng_tracker().fork():
        want_tracked = torch.rand(3)
    torch.manual_seed(1)
    engine.load_checkpoint(str(tmp_path))
    assert torch.equal(torch.rand(3), want)
    with mpu.get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(3), want_tracked)


def test_generators_of_another_kind_of_device_are_seeded_anew(world, tmp_path, monkeypatch, caplog):
    """A GPU's state has another length: it would be found out by the first dropout that draws from it."""
    engine, of_gpu = make_engine(1), torch.zeros(16, dtype=torch.uint8)
    states = {"cpu": torch.get_rng_state(), "cuda": of_gpu, "tracker/model-parallel-rng": of_gpu}
    with monkeypatch.context() as patch:
        patch.setattr(capture, "rng_states", lambda: states)
        patch.setattr(comm, "local_device", lambda: GPU)
        engine.save_checkpoint(str(tmp_path))
    want = mpu.get_cuda_rng_tracker().get_states()
    caplog.set_level("INFO")
    engine.load_checkpoint(str(tmp_path))
    assert "no states for these ranks and devices" in caplog.text
    assert all(torch.equal(want[name], state) for name, state in mpu.get_cuda_rng_tracker().get_states().items())
    with mpu.get_cuda_rng_tracker().fork():
        torch.rand(3)


def test_failed_save_leaves_the_previous_checkpoint(world, tmp_path, monkeypatch):
    engine = write_one(tmp_path)

    def full_disk(path, tensors):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(writer, "write_tensors", full_disk)
    train(engine, 1)
    with pytest.raises(OSError, match="No space left"):
        engine.save_checkpoint(str(tmp_path))
    assert latest_tag(tmp_path) == "global_step1" and list_tags(tmp_path) == ["global_step1"]
    assert not list(tmp_path.glob(".*.partial")), "a full disk needs the room"
    engine.load_checkpoint(str(tmp_path))
    monkeypatch.undo()
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path))
    assert latest_tag(tmp_path) == "global_step2"


def test_file_size_limit_in_the_middle_of_a_file_is_an_os_error_that_names_the_file(world, tmp_path):
    engine = write_one(tmp_path)
    train(engine, 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError, match=r"could not write .*rank_00000.safetensors: File too large"):
            engine.save_checkpoint(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert latest_tag(tmp_path) == "global_step1"


def test_truncated_file_is_named(world, tmp_path):
    engine = write_one(tmp_path)
    path = tmp_path / "global_step1" / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"rank_00000.safetensors has \d+ bytes where the index says"):
        engine.load_checkpoint(str(tmp_path))


def test_flipped_bit_is_found_and_the_file_and_parameter_are_named(world, tmp_path):
    engine = write_one(tmp_path)
    path = tmp_path / "global_step1" / "rank_00000.safetensors"
    flip(path, -100)
    with pytest.raises(
        CheckpointError, match=r"rank_00000.safetensors is damaged: bytes 0 to \d+ .* \(read for \w+ of [\w.]+\)"
    ):
        engine.load_checkpoint(str(tmp_path))


def flip(path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def test_save_in_the_background_writes_what_was_there_when_it_was_called(world, tmp_path, monkeypatch):
    engine = make_engine(1)
    train(engine, 1)
    go_on, write = threading.Event(), writer.write_tensors

    def slow(path, tensors):
        assert go_on.wait(20)
        return write(path, tensors)

    monkeypatch.setattr(writer, "write_tensors", slow)
    engine.save_checkpoint(str(tmp_path), in_background=True)
    assert latest_tag(tmp_path) is None
    want = train(engine, 2)
    go_on.set()
    engine.wait_for_checkpoint()
    assert latest_tag(tmp_path) == "global_step1"
    engine.load_checkpoint(str(tmp_path))
    assert train(engine, 2) == want


def test_failure_in_the_background_is_raised_by_the_next_call(world, tmp_path, monkeypatch):
    engine = make_engine(1)
    monkeypatch.setattr(writer, "write_tensors", _no_space)
    engine.save_checkpoint(str(tmp_path), in_background=True)
    with pytest.raises(OSError, match=r"global_step0 was not saved: OSError: .*No space left"):
        engine.save_checkpoint(str(tmp_path))
    monkeypatch.undo()
    engine.save_checkpoint(str(tmp_path))
    assert latest_tag(tmp_path) == "global_step0"


@pytest.mark.parametrize("in_background", [False, True], ids=["saved at once", "saved in the background"])
def test_what_a_save_makes_superfluous_is_deleted_after_it_and_before_the_next(
    world, tmp_path, monkeypatch, in_background
):
    engine, go_on, remove, deleted = make_engine(1), threading.Event(), folder._remove, []

    def slow(path):
        if path.exists():
            assert go_on.wait(20)
            deleted.append(path.name)
        remove(path)

    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint(str(tmp_path))
    monkeypatch.setattr(folder, "_remove", slow)
    engine.save_checkpoint(str(tmp_path), client_state={"second": True}, keep_last=1, in_background=in_background)
    if in_background:
        engine._saver._thread.join()
    assert latest_tag(tmp_path) == "global_step2" and list_tags(tmp_path) == ["global_step2"]
    assert leftovers(tmp_path) == [".global_step1.partial", ".global_step2.replaced"]
    go_on.set()
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path), in_background=in_background)
    assert sorted(deleted) == [".global_step1.partial", ".global_step2.replaced"]
    engine.wait_for_checkpoint()
    assert not leftovers(tmp_path) and list_tags(tmp_path) == ["global_step2", "global_step3"]


def test_a_process_that_ends_deletes_first_and_one_that_dies_leaves_it_to_who_claims_next(world, tmp_path):
    code = (
        "import os, sys, time; from pathlib import Path; from megazero.checkpoint import folder\n"
        "remove = folder._remove\n"
        "folder._remove = lambda path: (time.sleep(0.3), os._exit(9) if sys.argv[2] == 'dies' else remove(path))\n"
        "mine = folder.CheckpointFolder(sys.argv[1]); mine.prepare('global_step1'); "
        "mine.publish('global_step1', {}, True, 0)"
    )
    engine = write_one(tmp_path)
    engine._saver.close()  # lets the others save here
    for end, status in (("dies", 9), ("ends", 0)):
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path), end]).returncode == status
        assert leftovers(tmp_path) == ([".global_step1.replaced"] if end == "dies" else [])
        assert latest_tag(tmp_path) == "global_step1"
        engine.claim_checkpoints(str(tmp_path))
        assert not leftovers(tmp_path)
        engine._saver.close()


def test_two_jobs_on_one_directory_are_detected(world, tmp_path):
    code = (
        "import sys; from megazero.checkpoint.folder import CheckpointFolder; folder = CheckpointFolder(sys.argv[1]); "
        "folder.claim(); print(flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    claimed = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes)
    assert claimed.stdout.readline()
    engine = make_engine(1)
    with pytest.raises(folder.DirectoryInUseError, match=rf"another job \(process {claimed.pid} on .*another --save"):
        engine.claim_checkpoints(str(tmp_path))
    claimed.kill()
    claimed.wait()
    engine.save_checkpoint(str(tmp_path))


def is_locked(directory) -> bool:
    """Whether another process finds the directory's lock taken."""
    child = os.fork()
    if child == 0:
        try:
            with open(directory / ".lock", "r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os._exit(0)
        except BlockingIOError:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_the_lock_is_held_until_the_last_engine_of_the_process_lets_go(tmp_path):
    first, second, other = (folder.CheckpointFolder(tmp_path / name) for name in ("a", "a", "b"))
    for each in (first, second, other):
        each.claim()
    first.release()
    assert is_locked(tmp_path / "a")
    second.release()
    assert not is_locked(tmp_path / "a") and is_locked(tmp_path / "b")
    first.claim()
    assert is_locked(tmp_path / "a")
    first.release(), other.release()


def test_a_lock_that_is_refused_as_some_systems_say_it_is_another_jobs(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder.fcntl, "lockf", refused)
    with pytest.raises(folder.DirectoryInUseError, match="another job"):
        folder.CheckpointFolder(tmp_path).claim()


def test_the_script_is_executable_before_it_is_there(tmp_path, monkeypatch):
    modes, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (modes.append(os.stat(old).st_mode & 0o777), replace(old, new)))
    place_script(tmp_path)
    assert modes == [0o755]


class FailingDisk:
    def seek(self, position):
        return position

    def readinto(self, out):
        raise OSError(5, "Input/output error")

    def close(self):
        pass


def test_a_disk_that_cannot_be_read_is_told_with_the_file(tmp_path):
    file = CheckedFile(tmp_path / "rank_00000.safetensors", 4, [0], 4)
    file._file = FailingDisk()
    with pytest.raises(OSError, match=r"Input/output error: '.*rank_00000.safetensors'"):
        file.read_into(np.empty(4, dtype=np.uint8), 0, "master of x")


@pytest.mark.parametrize("tag", ["../up", ".hidden", "a/b", "", "a\0b", "latest", "zero_to_fp32.py", "a ", "é" * 101])
def test_tag_that_leads_elsewhere_is_refused(world, tmp_path, tag):
    with pytest.raises(ValueError, match="becomes the name of its directory"):
        make_engine(1).save_checkpoint(str(tmp_path / "save"), tag=tag)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_missing_checkpoint_is_named(world, tmp_path):
    with pytest.raises(FileNotFoundError, match="global_step7"):
        make_engine(1).load_checkpoint(str(tmp_path), tag="global_step7")


def test_model_of_another_shape_is_refused_naming_the_parameter(world, tmp_path):
    write_one(tmp_path)
    model = Net()
    model.norm = nn.LayerNorm(12, bias=False)
    engine = Engine(model, mpu.get_groups(), lambda g: torch.optim.AdamW(g, lr=0.1), *weight_decay_groups(model, 0.1))
    with pytest.raises(ValueError, match=r"norm.bias: saved \[12\], model nothing"):
        engine.load_checkpoint(str(tmp_path))


def test_module_only_leaves_counters_and_optimizer(world, tmp_path):
    engine = write_one(tmp_path, steps=2)
    mpu.destroy_model_parallel()
    fresh = make_engine(1, seed=5)
    fresh.load_checkpoint(str(tmp_path), load_module_only=True)
    assert fresh.global_steps == 0 and not fresh.optimizer.counters()
    for (_, name), (_, want) in zip(fresh.module.named_parameters(), engine.module.named_parameters(), strict=True):
        assert torch.equal(name, want)


def test_keep_last_deletes_only_older_checkpoints(world, tmp_path):
    engine = make_engine(1)
    for _ in range(3):
        train(engine, 1)
        engine.save_checkpoint(str(tmp_path), keep_last=2)
    assert list_tags(tmp_path) == ["global_step2", "global_step3"]


def test_keep_last_keeps_the_newest_written_whatever_its_step_and_copies_of_the_users(world, tmp_path):
    for step in (360, 450):
        engine = write_one(tmp_path)
        (tmp_path / "global_step1").rename(tmp_path / f"global_step{step}")
        mpu.destroy_model_parallel()
    shutil.copytree(tmp_path / "global_step450", tmp_path / "global_step450_best")
    engine = make_engine(1)
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path), keep_last=2)
    assert latest_tag(tmp_path) == "global_step1"
    assert visible(tmp_path) == ["global_step1", "global_step450", "global_step450_best", "latest", "zero_to_fp32.py"]


def test_keep_last_goes_by_steps_and_not_by_times_which_a_copy_or_another_clock_may_change(world, tmp_path):
    engine = make_engine(1)
    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint(str(tmp_path))
    os.utime(tmp_path / "global_step2" / "index.json", ns=(1, 1))
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path), keep_last=2)
    assert list_tags(tmp_path) == ["global_step2", "global_step3"]


def test_save_that_died_while_replacing_is_recovered(world, tmp_path):
    engine = write_one(tmp_path)
    (tmp_path / "global_step1").rename(tmp_path / ".global_step1.replaced")  # died between its two renames
    (tmp_path / ".global_step9.partial").mkdir()
    engine.load_checkpoint(str(tmp_path))
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path))
    assert visible(tmp_path) == ["global_step1", "global_step2", "latest", "zero_to_fp32.py"]
    assert not list(tmp_path.glob(".global*"))


def test_state_of_another_optimizer_is_refused(world, tmp_path):
    write_one(tmp_path)
    model = Net()
    engine = Engine(model, mpu.get_groups(), lambda g: torch.optim.SGD(g, lr=0.1), *weight_decay_groups(model, 0.1))
    with pytest.raises(ValueError, match="state of AdamW, and this run uses SGD"):
        engine.load_checkpoint(str(tmp_path))


def test_frozen_parameters_and_buffers_are_kept(world, tmp_path):
    groups = mpu.initialize_model_parallel(1)

    def build(seed: int) -> Engine:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[0].requires_grad_(False)
        return Engine(model, groups, lambda g: torch.optim.SGD(g, lr=0.1), *weight_decay_groups(model, 0.0))

    first, second = build(0), build(1)
    first.backward(first(torch.randn(4, 3)).square().sum())
    first.step()
    first.save_checkpoint(str(tmp_path))
    second.load_checkpoint(str(tmp_path))
    for name, value in first.module.state_dict().items():
        assert torch.equal(second.module.state_dict()[name], value), name


def test_saving_a_step_again_replaces_it(world, tmp_path):
    engine = write_one(tmp_path)
    engine.save_checkpoint(str(tmp_path), client_state={"second": True})
    assert engine.load_checkpoint(str(tmp_path))[1] == {"second": True}
    assert visible(tmp_path) == ["global_step1", "latest", "zero_to_fp32.py"]


def test_what_one_rank_cannot_write_or_copy_raises_on_all(tmp_path):
    run_ranks(2, _one_rank_fails, str(tmp_path))


def _one_rank_fails(directory: str) -> None:
    engine, is_second = make_engine(1), torch.distributed.get_rank() == 1
    if is_second:
        writer.write_tensors = _no_space
    with pytest.raises((OSError, RuntimeError), match="No space left"):
        engine.save_checkpoint(directory)
    if is_second:
        writer.Snapshot.staged = _no_memory
    with pytest.raises(MemoryError if is_second else OSError, match="no host memory"):
        engine.save_checkpoint(directory, in_background=True)
    assert latest_tag(directory) is None


def test_nodes_that_do_not_share_the_directory_are_told_so(tmp_path):
    run_ranks(2, _apart, str(tmp_path))


def _apart(parent: str) -> None:
    rank, engine = torch.distributed.get_rank(), make_engine(1)
    saver.SEEN_WITHIN_S = 0.3
    mine = Path(parent) / f"node{rank}"
    mine.mkdir()
    host = re.escape(socket.gethostname())
    with pytest.raises(
        OSError,
        match=rf"^rank 1 on {host} does not see in .*/node1 what rank 0 on {host} has just put into .*/node0\. ",
    ):
        engine.claim_checkpoints(str(mine))
    assert os.listdir(mine) == [".lock"] * (rank == 0)
    with pytest.raises(  # a caller that goes on all the same
        OSError, match=r"rank 1 has written its part .*rank_00001\.json is not there: every node must see --save"
    ):
        engine.save_checkpoint(str(mine))
    assert not list_tags(mine) and not (mine / "latest").exists()
    engine.save_checkpoint(parent)  # and what they share takes it


def test_a_directory_that_a_network_file_system_shows_late_is_waited_for(tmp_path):
    run_ranks(2, _late, str(tmp_path / "new"))


def _late(directory: str) -> None:
    engine, exists, looks = make_engine(1), os.path.exists, []
    if torch.distributed.get_rank() == 1:
        os.path.exists = lambda path: (looks.append(path), len(looks) > 2 and exists(path))[1]
    engine.claim_checkpoints(directory)
    os.path.exists = exists
    assert len(looks) == (3 if torch.distributed.get_rank() == 1 else 0)
    comm.barrier()
    assert os.listdir(directory) == [".lock"]


def _no_memory(snapshot):
    raise MemoryError("no host memory")


def _no_space(path, tensors):
    raise OSError(28, "No space left on device", str(path))


def test_index_is_plain_json_and_safetensors_opens_the_files(world, tmp_path):
    engine = write_one(tmp_path)
    index = json.loads((tmp_path / "global_step1" / "index.json").read_text())
    entry = index["tensors"]["up.weight"]
    assert entry["shape"] == [36, 12] and entry["cut"] == {"dim": 0, "stride": 3, "padded": 36}
    assert index["tensors"]["embedding.weight"]["shape"] == [13, 12], "without the padding of the vocabulary"
    assert {p.suffix for p in (tmp_path / "global_step1").iterdir()} == {".json", ".safetensors"}
    with safe_open(tmp_path / "global_step1" / "rank_00000.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("master/up.weight"), engine.module.up.weight.detach().view(-1))
    # The index alone leads to the same bytes.
    (rank, start, stop, number, offsets) = entry["pieces"][0]
    name = list(index["files"])[number]
    at = offsets[list(entry["states"]).index("exp_avg")]
    content = (tmp_path / "global_step1" / name).read_bytes()[at : at + 4 * (stop - start)]
    (bucket,) = [bucket for bucket in engine.buckets if "up.weight" in bucket.parameters]
    assert "exp_avg" in engine.optimizer.state_keys(bucket) and (rank, start, stop) == (0, 0, 36 * 12)
    moments = torch.frombuffer(bytearray(content), dtype=torch.float32)
    segment = bucket.segment_of(engine.module.up.weight)
    with engine.optimizer.state_at_hand(bucket, ["exp_avg"]) as states:
        parts = [view for view, _ in engine.optimizer.parts_of(states, bucket, "exp_avg", segment)]
        assert torch.equal(moments, torch.cat(parts))


def test_a_directory_that_was_deleted_between_two_saves_is_made_again(world, tmp_path):
    engine = write_one(tmp_path / "save")
    shutil.rmtree(tmp_path / "save")
    engine.save_checkpoint(str(tmp_path / "save"))
    assert latest_tag(tmp_path / "save") == "global_step1" and (tmp_path / "save" / ".lock").exists()


class Scheduler:
    """A schedule whose state holds a tensor, a tuple and an infinity."""

    def __init__(self, optimizer):
        self.value = torch.zeros(2, dtype=torch.float64)

    def step(self):
        self.value += 1

    def state_dict(self):
        return {"value": self.value, "range": (0, float("inf"))}

    def load_state_dict(self, state):
        assert state["range"] == (0, float("inf"))
        self.value = state["value"]


def test_schedules_may_hold_tensors_and_buffers_need_not_be_contiguous_or_have_a_dimension(world, tmp_path):
    def build() -> Engine:
        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
        groups = mpu.initialize_model_parallel(1)
        model = nn.Linear(3, 3)
        model.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        model.register_buffer("number", torch.tensor(0))
        model.register_buffer("empty", torch.empty(0, 2))
        settings = weight_decay_groups(model, 0.0)
        return Engine(model, groups, lambda g: torch.optim.SGD(g, lr=0.1), *settings, lr_scheduler=Scheduler)

    engine = build()
    engine.module.turned.mul_(2)
    engine.module.number.fill_(7)
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    engine.save_checkpoint(str(tmp_path), client_state={"tensor": torch.ones(1)})
    other = build()
    _, client = other.load_checkpoint(str(tmp_path))
    assert torch.equal(other.module.turned, torch.arange(6.0).view(2, 3).t() * 2) and int(other.module.number) == 7
    assert other.lr_scheduler.value.tolist() == [1.0, 1.0] and client["tensor"].tolist() == [1.0]


def test_keep_last_never_deletes_what_latest_names_and_counts_the_jobs_own_tags_only(world, tmp_path):
    engine = write_one(tmp_path)
    engine.save_checkpoint(str(tmp_path), tag="best", save_latest=False, keep_last=1)
    assert list_tags(tmp_path) == ["global_step1", "best"]
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path), keep_last=1)
    assert list_tags(tmp_path) == ["best", "global_step2"]


def test_what_stands_in_for_a_checkpoint_goes_by_steps_and_the_users_own_tags_by_time(tmp_path):
    tags = ("global_step30", "best", "global_step5", "global_step20", "mine", "global_step100")
    for time_ns, tag in enumerate(tags):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "index.json").touch()
        os.utime(tmp_path / tag / "index.json", ns=(time_ns, time_ns))
    went_back = ["global_step5", "global_step100", "global_step30", "mine", "best"]
    assert tags_to_go_back_to(tmp_path, "global_step20") == went_back
    by_steps = ["global_step100", "global_step30", "global_step20", "global_step5", "mine", "best"]
    assert tags_to_go_back_to(tmp_path) == by_steps


def test_leftovers_that_are_no_directories_are_no_obstacle(world, tmp_path):
    engine = write_one(tmp_path / "save")
    (tmp_path / "save" / "global_step1").rename(tmp_path / "elsewhere")
    (tmp_path / "save" / "global_step1").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "save" / ".a.partial").write_text("")
    (tmp_path / "save" / ".b.partial").symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint(str(tmp_path / "save"), keep_last=1)
    assert (tmp_path / "elsewhere" / "index.json").exists(), "what the user has put elsewhere is the user's"
    assert latest_tag(tmp_path / "save") == "global_step3"


def test_two_engines_of_one_process_save_into_one_directory(world, tmp_path, monkeypatch):
    first, second = make_engine(1), None
    go_on, write = threading.Event(), writer.write_tensors
    monkeypatch.setattr(writer, "write_tensors", lambda *a: (go_on.wait(20), write(*a))[1])
    first.save_checkpoint(str(tmp_path), tag="A", in_background=True)
    mpu.destroy_model_parallel()
    second = make_engine(1)
    go_on.set()
    monkeypatch.setattr(writer, "write_tensors", write)
    second.save_checkpoint(str(tmp_path), tag="B")
    first.wait_for_checkpoint()
    assert set(list_tags(tmp_path)) == {"A", "B"}


def test_a_background_save_follows_no_change_of_the_working_directory(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = make_engine(1)
    engine.save_checkpoint("relative", in_background=True)
    monkeypatch.chdir("/")
    engine.wait_for_checkpoint()
    assert latest_tag(tmp_path / "relative") == "global_step0"
    engine.destroy()


def simple_engine(dtype=None, scaler=None, optimizer=None, frozen: bool = False) -> Engine:
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    groups = mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(not frozen)
    group_of = {name: 0 for name, _ in model.named_parameters()}
    factory = optimizer or (lambda g: torch.optim.AdamW(g, lr=0.1))
    return Engine(
        model, groups, factory, group_of, [{}], dtype=dtype, loss_scaler=scaler, allow_untested_optimizer=True
    )


def one_step(engine: Engine) -> None:
    x = torch.ones(1, 3, dtype=next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().square().sum())
    engine.step()


def test_an_fp32_checkpoint_leaves_the_loss_scale_of_an_fp16_run(world, tmp_path):
    engine = simple_engine()
    one_step(engine)
    engine.save_checkpoint(str(tmp_path))
    half = simple_engine(torch.float16, LossScaler(scale=65536.0, dynamic=True))
    half.load_checkpoint(str(tmp_path))
    assert half.loss_scale() == 65536.0 and half.global_steps == 1


def test_what_was_unfrozen_before_the_load_gets_its_moments(world, tmp_path):
    engine = simple_engine()
    one_step(engine)
    engine.save_checkpoint(str(tmp_path))
    other = simple_engine(frozen=True)
    other.module[0].requires_grad_(True)
    other.load_checkpoint(str(tmp_path))
    one_step(engine)
    one_step(other)
    for name, value in engine.module_state_dict().items():
        assert torch.equal(other.module_state_dict()[name], value), name


def test_weights_that_were_written_in_place_are_saved(world, tmp_path):
    engine = simple_engine(torch.bfloat16)
    with torch.no_grad():
        engine.module[0].weight.fill_(3.0)
    engine.save_checkpoint(str(tmp_path))
    assert (Reader(tmp_path).read_weight("0.weight") == 3.0).all()


def test_parameters_that_the_state_dictionary_leaves_out_are_saved_in_one_order(world, tmp_path):
    """Whatever the process hashes strings to: equal states are equal files."""
    engine = make_engine(1)
    engine.module.state_dict = lambda **_: {}
    engine.save_checkpoint(str(tmp_path))
    names = [segment.name for bucket in engine.buckets for segment in bucket.layout.segments]
    assert len(names) == 7 and list(Reader(tmp_path).tensors) == names


class BrainFloatMomentum(torch.optim.Optimizer):
    """Keeps its state in 16 bits."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "max_norm": float("inf")})

    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["momentum"] = p.grad.bfloat16()
                p.data -= 0.1 * p.grad


def test_states_of_16_bits_and_settings_that_json_has_not(world, tmp_path):
    engine = simple_engine(optimizer=BrainFloatMomentum)
    one_step(engine)
    engine.save_checkpoint(str(tmp_path))
    (bucket,) = [bucket for bucket in engine.buckets if "0.weight" in bucket.parameters]
    segment = bucket.segment_of(engine.module[0].weight)
    with engine.optimizer.state_at_hand(bucket, ["momentum"]) as states:
        (part,) = [view for view, _ in engine.optimizer.parts_of(states, bucket, "momentum", segment)]
        assert torch.equal(Reader(tmp_path).read("0.weight", "momentum").view(-1), part.float())


def test_cycled_momentum_continues(world, tmp_path):
    def build() -> Engine:
        engine = simple_engine()
        engine.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
            engine.optimizer.torch_optimizer, max_lr=0.1, total_steps=10
        )
        engine._checkpointed.lr_scheduler = engine.lr_scheduler
        return engine

    engine = build()
    for _ in range(3):
        one_step(engine)
    engine.save_checkpoint(str(tmp_path))
    other = build()
    other.load_checkpoint(str(tmp_path))
    assert other.optimizer.param_groups[0]["betas"] == engine.optimizer.param_groups[0]["betas"] != (0.95, 0.999)
    one_step(engine)
    one_step(other)
    assert torch.equal(other.module[0].weight, engine.module[0].weight)


def load_once_case(directory: str) -> tuple[list[str], list[str]]:
    engine, asked, errors = make_engine(1), [], []
    check_size = CheckedFile.check_size
    CheckedFile.check_size = lambda file: (asked.append(file.path.name), check_size(file))[1]
    if torch.distributed.get_rank():
        Path.read_bytes = None  # the index comes from the first rank
    train(engine, 1)
    engine.save_checkpoint(directory)
    engine.load_checkpoint(directory)
    comm.barrier()
    for damage, fallback in (("rank_00001.safetensors", False), ("index.json", False), ("index.json", True)):
        if torch.distributed.get_rank() == 1:
            (Path(directory) / "global_step1" / damage).unlink(missing_ok=True)
        comm.barrier()
        with pytest.raises((CheckpointError, FileNotFoundError)) as caught:
            engine.load_checkpoint(directory, fallback=fallback)
        errors.append(f"{caught.type.__name__}: {caught.value}")
    return asked[:2], errors


def test_the_first_rank_reads_the_index_for_all_and_its_errors_reach_them(tmp_path):
    (first, first_errors), (second, errors) = run_ranks(2, load_once_case, str(tmp_path))
    assert first == ["rank_00000.safetensors", "rank_00001.safetensors"]
    assert len(second) <= 2 and errors == first_errors
    assert errors[0].startswith("CheckpointError: ") and "has no bytes where the index says" in errors[0]
    assert errors[1].startswith("FileNotFoundError: No checkpoint at")
    assert errors[2] == errors[1], "nothing is damaged where nothing is there"


def alone_case(directory: str) -> None:
    engine = make_engine(2)
    engine.channel.timeout_s = 1.0
    if torch.distributed.get_rank() == 0:
        for method in (engine.save_checkpoint, engine.load_checkpoint):
            message = rf"{method.__name__} was called on rank 0, but within 1 s not on ranks \[1\] of \[0, 1\]"
            with pytest.raises(RuntimeError, match=message):
                method(directory)


def test_one_tensor_parallel_rank_that_saves_or_loads_alone_is_told_so(tmp_path):
    run_ranks(2, alone_case, str(tmp_path))


def test_checksums_are_zlibs_whoever_computes_them(monkeypatch):
    content = random.Random(0).randbytes(100_001)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)  # as if it was not installed
    for crc32 in (checkpoint_format.crc32, runpy.run_path(checkpoint_format.__file__)["crc32"]):
        for start, stop in ((0, 0), (3, 4), (1, 100_001)):
            part = memoryview(content)[start:stop]
            assert crc32(part) == zlib.crc32(part) and crc32(part, 2**32 - 2) == zlib.crc32(part, 2**32 - 2)


def leftovers(directory) -> list[str]:
    return sorted(p.name for p in directory.glob(".global*"))


def visible(directory) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if not p.name.startswith("."))
