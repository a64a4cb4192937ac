"""Checkpoints: everything that was saved comes back, or an error says what is wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import runpy
import sys
import zlib
from collections import Counter
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.optim import lr_scheduler

from megazero import comm, mpu
from megazero.checkpoint import capture, loader, tensor_file
from megazero.checkpoint import format as checkpoint_format
from megazero.checkpoint.format import CheckpointError
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.tags import latest_tag
from megazero.checkpoint.tensor_file import CheckedFile, naming
from megazero.engine import Engine
from megazero.nvme import FileTransport
from megazero.ops.adam import CPUAdam, FusedAdam, HybridAdam
from megazero.optim.loss_scaler import LossScaler
from megazero.optim.lr_schedule import AnnealingLR, LRScheduleConfig
from megazero.zero import ZeroConfig
from megazero.zero.bucket import Bucket
from megazero.zero.sliced import SlicedOptimizer
from tests.bad_disks import fails
from tests.checkpoint.checkpoints import flip, make, tensors
from tests.checkpoint.engines import Net, engine_of, make_engine, train, write_one
from tests.ranks import run_ranks

GPU = torch.device("cuda")


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


def test_a_load_reads_a_block_once_for_each_state_in_it(world, tmp_path, monkeypatch):
    """A parameter's weights and moments are read in turns, and those of small parameters share blocks."""
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 256)
    engine, reads, read_block = write_one(tmp_path), Counter(), CheckedFile._read_block

    def counted(file, block, *rest):
        reads[block] += 1
        return read_block(file, block, *rest)

    monkeypatch.setattr(CheckedFile, "_read_block", counted)
    engine.load_checkpoint(str(tmp_path))
    assert len(reads) > 50 and reads.total() <= len(reads) + 3, "where the next state begins, or what is no parameter's"


class FailingDisk:
    def seek(self, position):
        return position

    def readinto(self, out):
        raise OSError(5, "Input/output error")

    def close(self):
        pass


def test_a_disk_that_cannot_be_read_is_told_with_the_file(tmp_path):
    path = tmp_path / "rank_00000.safetensors"
    file = CheckedFile(path, 4, [0], 4, opened={path: FailingDisk()})
    with pytest.raises(OSError, match=r"Input/output error: '.*rank_00000.safetensors'"):
        file.read_into(np.empty(4, dtype=np.uint8), 0, "master of x")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(5, "Input/output error"), "[Errno 5] could not write name: Input/output error"),
        (OSError(5, "Input/output error", "name"), "[Errno 5] could not write name: Input/output error"),
        (OSError(5, "Input/output error", "other"), "[Errno 5] Input/output error: 'other'"),
        (OSError("what another library says"), "what another library says"),
    ],
)
def test_a_write_that_fails_is_told_with_the_one_file_that_it_was(error, told):
    with pytest.raises(OSError) as found, naming(Path("name")):
        raise error
    assert str(found.value) == told


def test_a_folder_in_the_place_of_a_file_is_a_missing_file_and_so_is_one_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "name", tmp_path / "name"):
        with pytest.raises(CheckpointError, match="has no bytes where the index says 4"):
            CheckedFile(path, 4, [0], 4, opened={}).check_size()


@pytest.mark.parametrize("name", ["latest", "global_step1/index.json"])
def test_a_small_file_that_a_disk_does_not_give_is_told_with_its_name(world, tmp_path, unreadable, name):
    write_one(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(unreadable)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path / name}'"):
        Reader(tmp_path)


def test_what_need_not_be_damage_ends_a_load_with_fallback(one_rank, tmp_path, monkeypatch):
    """Going back would lose what was trained since, and the next saves would delete it."""
    engine, errors = saved_at_each_step(tmp_path), []
    read_block = CheckedFile._read_block

    def fail_once(file, *args):
        if errors:
            raise OSError(errors.pop(), "it failed", str(file.path))
        return read_block(file, *args)

    monkeypatch.setattr(CheckedFile, "_read_block", fail_once)
    for number in (errno.ESTALE, errno.EMFILE, errno.EACCES):
        errors.append(number)
        with pytest.raises(OSError, match=r"it failed: '.*rank_00000.safetensors'. This need not be damage"):
            engine.load_checkpoint(str(tmp_path), fallback=True)
    errors.append(errno.EACCES)
    with pytest.raises(OSError, match=r"it failed: '[^']*rank_00000.safetensors'$"):
        engine.load_checkpoint(str(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("megazero.checkpoint.reader.Pieces", Mock(side_effect=MemoryError))
        engine.load_checkpoint(str(tmp_path), fallback=True)
    errors.append(errno.EIO)
    assert engine.load_checkpoint(str(tmp_path), fallback=True)[0].name == "global_step1"


def test_from_a_checkpoint_that_is_named_no_load_goes_to_a_newer_one(one_rank, tmp_path):
    engine = saved_at_each_step(tmp_path, 4)
    for step in (1, 2):
        flip(tmp_path / f"global_step{step}" / "rank_00000.safetensors", -1)
    with pytest.raises(CheckpointError, match="No other checkpoint in .* to go back to is whole either"):
        engine.load_checkpoint(str(tmp_path), tag="global_step2", fallback=True)
    (tmp_path / "latest").write_text("global_step2")  # of a run that went back: what lies beyond is older
    assert engine.load_checkpoint(str(tmp_path), tag="global_step2", fallback=True)[0].name == "global_step4"


class UnlikeOthers(Exception):
    """Is not made of its text alone."""

    def __init__(self, place, text):
        super().__init__(f"{text} at {place}")


class Unsendable(Exception):
    """Can be told to nobody."""

    def __reduce__(self):
        raise TypeError("it has a lock")


def first_rank_case() -> list[tuple[str, str]]:
    """The class and text of what each of some errors of the first rank is on this one."""
    told = []
    for error in (UnlikeOthers(1, "wrong"), Unsendable("wrong"), CheckpointError("wrong"), OSError(13, "no", "file")):
        with pytest.raises(Exception) as caught:
            loader._of_first_rank(Mock(side_effect=error))
        told.append((caught.typename, str(caught.value)))
    return told


def test_any_error_of_the_first_rank_is_told_to_the_others():
    first, second = run_ranks(2, first_rank_case, timeout_s=60)
    assert [text for _, text in first] == [text for _, text in second]
    kinds = ["OtherRankError", "OtherRankError", "CheckpointError", "OtherRankError"]
    assert [kind for kind, _ in second] == kinds
    assert [kind for kind, _ in first] == ["UnlikeOthers", "Unsendable", "CheckpointError", "PermissionError"]


def test_a_swap_file_whose_disk_fails_is_not_taken_for_a_damaged_checkpoint(world, tmp_path, monkeypatch):
    zero = ZeroConfig(1, offload_optimizer="nvme", nvme_path=str(tmp_path))
    mpu.initialize_model_parallel(1)
    engine = engine_of(Net(), torch.optim.AdamW, zero=zero)
    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint(str(tmp_path))
    monkeypatch.setattr(FileTransport, "write", fails)
    with pytest.raises(OSError, match=r"Input/output error.* This need not be damage"):
        engine.load_checkpoint(str(tmp_path), fallback=True)


def test_a_rank_that_cannot_bring_loaded_weights_to_the_model_tells_the_others(tmp_path):
    run_ranks(2, unpublished_case, str(tmp_path))


def unpublished_case(directory: str) -> None:
    mpu.initialize_model_parallel(1)
    engine, is_second = engine_of(Net(), dtype=torch.bfloat16), dist.get_rank() == 1
    engine.save_checkpoint(directory)
    with pytest.MonkeyPatch.context() as patched:
        if is_second:
            patched.setattr(Bucket, "write_back", fails)
        with pytest.raises(OSError if is_second else CheckpointError, match="Input/output error"):
            engine.load_checkpoint(directory)
    assert engine.optimizer.is_torn, "on both"
    engine.load_checkpoint(directory)
    assert not engine.optimizer.is_torn


@pytest.mark.parametrize("name", ["latest", "index.json", "rank_00000.safetensors"])
def test_what_cannot_be_looked_at_now_is_not_taken_for_missing(one_rank, tmp_path, make_stale, name):
    engine = saved_at_each_step(tmp_path)
    make_stale(name)
    with pytest.raises(OSError, match=f"Stale file handle: '.*{name}'"):
        engine.load_checkpoint(str(tmp_path), fallback=True)


def test_a_checkpoint_that_cannot_be_looked_at_now_is_not_passed_over(one_rank, tmp_path, make_stale):
    engine = saved_at_each_step(tmp_path, 3)
    flip(tmp_path / "global_step3" / "rank_00000.safetensors", -1)
    make_stale("global_step2/index.json")
    with pytest.raises(OSError, match="Stale file handle: '.*global_step2/index.json'"):
        engine.load_checkpoint(str(tmp_path), fallback=True)


def test_where_there_is_a_folder_or_a_file_above_there_is_no_newest_checkpoint(tmp_path):
    (tmp_path / "latest").mkdir()
    (tmp_path / "file").touch()
    assert [latest_tag(tmp_path / name) for name in ("", "file", "missing")] == [None, None, None]


def test_few_files_are_open_at_a_time_whatever_the_number_of_ranks_that_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "MOST_OPEN", 3)
    reader, before = make(tmp_path, 2, 5), len(os.listdir("/dev/fd"))
    for name, states in tensors().items():
        for state, value in states.items():
            assert torch.equal(reader.read(name, state), value)
    assert len(os.listdir("/dev/fd")) == before + 3
    reader.close()
    assert len(os.listdir("/dev/fd")) == before


def test_missing_checkpoint_is_named(world, tmp_path):
    with pytest.raises(FileNotFoundError, match="global_step7"):
        make_engine(1).load_checkpoint(str(tmp_path), tag="global_step7")


def test_model_of_another_shape_or_with_other_parameters_is_refused_naming_them(world, tmp_path, caplog):
    saved = write_one(tmp_path)

    def engine_with(norm: nn.Module) -> Engine:
        model = Net()
        model.norm = norm
        return engine_of(model, torch.optim.AdamW)

    with pytest.raises(ValueError, match=r"of another shape: 2 .*norm.weight: saved \[12\], model \[3, 4\]"):
        engine_with(nn.LayerNorm((3, 4))).load_checkpoint(str(tmp_path), strict=False)
    other = engine_with(nn.ModuleDict({"bias": nn.Linear(5, 5)}))
    told = "the checkpoint has no norm.bias.weight, norm.bias.bias; the model has no norm.weight, norm.bias"
    with pytest.raises(ValueError, match=f"not of this model: {told}. .* strict=False"):
        other.load_checkpoint(str(tmp_path))
    own = other.module.norm["bias"].weight.detach().clone()
    other.load_checkpoint(str(tmp_path), strict=False)
    assert torch.equal(other.module.up.weight, saved.module.up.weight)
    assert torch.equal(other.module.norm["bias"].weight, own) and caplog.text.count(f"in part: {told}") == 1


def test_what_is_tied_is_loaded_by_whichever_name_it_was_saved(one_rank, tmp_path):
    def build(first: str, second: str, seed: int) -> Engine:
        torch.manual_seed(seed)
        model = nn.ModuleDict({first: nn.BatchNorm1d(3)})
        model[second] = model[first]
        return engine_of(model, torch.optim.AdamW)

    saved, other = build("a", "b", 0), build("b", "a", 1)
    with torch.no_grad():
        saved.module["a"].weight.copy_(torch.arange(3.0))
        saved.module["a"].running_mean.fill_(7.0)
    saved.save_checkpoint(str(tmp_path))
    assert "b.weight" not in Reader(tmp_path).tensors
    other.load_checkpoint(str(tmp_path))
    torch.testing.assert_close(other.module.state_dict(), saved.module.state_dict(), rtol=0, atol=0)


def test_module_only_leaves_counters_and_optimizer(world, tmp_path):
    engine = write_one(tmp_path, steps=2)
    mpu.destroy_model_parallel()
    fresh = make_engine(1, seed=5)
    fresh.load_checkpoint(str(tmp_path), load_module_only=True)
    assert fresh.global_steps == 0 and not fresh.optimizer.counters()
    torch.testing.assert_close(fresh.module.state_dict(), engine.module.state_dict(), rtol=0, atol=0)


def test_state_of_another_optimizer_is_refused(world, tmp_path):
    write_one(tmp_path)
    amsgrad = partial(torch.optim.AdamW, amsgrad=True)
    for make_optimizer, who in ((torch.optim.SGD, "SGD"), (amsgrad, "AdamW with amsgrad")):
        engine = engine_of(Net(), make_optimizer)
        with pytest.raises(ValueError, match=f"state of AdamW, and this run uses {who}\\."):
            engine.load_checkpoint(str(tmp_path))
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path), tag="amsgrad")
    engine.load_checkpoint(str(tmp_path), tag="amsgrad")
    mpu.destroy_model_parallel()
    with pytest.raises(ValueError, match="state of AdamW with amsgrad, and this run uses AdamW\\."):
        make_engine(1).load_checkpoint(str(tmp_path), tag="amsgrad")


def test_adams_take_each_others_state(world, tmp_path):
    """As a run does that leaves the host, or one that goes on from another library's checkpoint."""
    write_one(tmp_path, steps=2)

    def saved(directory):
        reader = Reader(directory, "global_step2")
        return {(name, key): reader.read(name, key) for name, entry in reader.tensors.items() for key in entry.states}

    want = saved(tmp_path)
    for make_optimizer in (CPUAdam, FusedAdam, HybridAdam, torch.optim.Adam):
        engine = engine_of(Net(), make_optimizer)
        engine.load_checkpoint(str(tmp_path))
        engine.save_checkpoint(str(tmp_path / make_optimizer.__name__))
        got = saved(tmp_path / make_optimizer.__name__)
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_frozen_parameters_and_buffers_are_kept(one_rank, tmp_path):
    def build(seed: int) -> Engine:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[0].requires_grad_(False)
        return engine_of(model)

    first, second = build(0), build(1)
    first.backward(first(torch.randn(4, 3)).square().sum())
    first.step()
    first.save_checkpoint(str(tmp_path))
    second.load_checkpoint(str(tmp_path))
    torch.testing.assert_close(second.module.state_dict(), first.module.state_dict(), rtol=0, atol=0)


class Holding(nn.Module):
    """A linear layer, and `codes` as one of what a module can hold."""

    def __init__(self, kind: str, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        codes = torch.full((3,), value)
        if kind == "parameter":
            self.codes = nn.Parameter(codes)
        else:  # a Parameter in a buffer's place is what vector quantizers of some libraries keep
            self.register_buffer("codes", nn.Parameter(codes, requires_grad=False) if "Parameter" in kind else codes)

    def forward(self, x):
        return (self.linear(x) * self.codes).sum()


@pytest.mark.parametrize("loaded", ["buffer", "buffer that is a Parameter", "parameter"])
@pytest.mark.parametrize("saved", ["buffer", "buffer that is a Parameter", "parameter"])
def test_a_buffer_comes_back_of_whatever_class_it_is_and_whether_it_was_trained(one_rank, tmp_path, saved, loaded):
    engine_of(Holding(saved, 42.0)).save_checkpoint(str(tmp_path))
    other = engine_of(Holding(loaded, 7.0))
    other.load_checkpoint(str(tmp_path))
    assert other.state_dict()["codes"].tolist() == [42.0] * 3


class Observer(nn.Linear):
    """A layer that makes what it puts into its state dictionary, as quantized layers do."""

    elements = 1

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.full([self.elements], 3.0)


def test_what_a_module_makes_for_its_state_dictionary_is_refused_because_a_load_could_not_give_it_back(
    one_rank, tmp_path
):
    model = nn.Sequential(Observer(3, 3))
    engine = engine_of(model)
    with pytest.raises(TypeError, match="^0.scale: neither a parameter nor a buffer.* client_state"):
        engine.save_checkpoint(str(tmp_path))
    model[0].elements = 0  # says nothing, as the extra state of Transformer Engine's layers without FP8
    engine.save_checkpoint(str(tmp_path))
    engine.load_checkpoint(str(tmp_path))


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
    (tile,) = bucket.tiles
    with engine.optimizer.state_at_hand(tile, ["exp_avg"]) as states:
        parts = [view for view, _ in engine.optimizer.parts_of(states, tile, "exp_avg", segment)]
        assert torch.equal(moments, torch.cat(parts))


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


def test_schedules_may_hold_tensors_and_buffers_need_not_be_contiguous_or_have_a_dimension(one_rank, tmp_path):
    def build() -> Engine:
        model = nn.Linear(3, 3)
        model.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        model.register_buffer("number", torch.tensor(0))
        model.register_buffer("empty", torch.empty(0, 2))
        model.register_buffer("again", model.turned)
        return engine_of(model, lr_scheduler=Scheduler)

    engine = build()
    engine.module.turned.mul_(2)
    engine.module.number.fill_(7)
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    engine.save_checkpoint(str(tmp_path), client_state={"tensor": torch.ones(1)})
    saved = list(Reader(str(tmp_path)).tensors)
    assert saved == ["weight", "bias", "turned", "number", "empty"], "each once, and all of them"
    other = build()
    _, client = other.load_checkpoint(str(tmp_path))
    assert torch.equal(other.module.turned, torch.arange(6.0).view(2, 3).t() * 2) and int(other.module.number) == 7
    assert other.lr_scheduler.value.tolist() == [1.0, 1.0] and client["tensor"].tolist() == [1.0]


def simple_engine(dtype=None, scaler=None, optimizer=None, frozen: bool = False) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(not frozen)
    group_of = {name: 0 for name, _ in model.named_parameters()}
    factory = optimizer or (lambda g: torch.optim.AdamW(g, lr=0.1))
    options = {"dtype": dtype, "loss_scaler": scaler, "allow_untested_optimizer": True}
    return Engine(model, mpu.get_groups(), factory, group_of, [{}], **options)


def one_step(engine: Engine) -> None:
    x = torch.ones(1, 3, dtype=next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().square().sum())
    engine.step()


def saved_at_each_step(directory: Path, steps: int = 2) -> Engine:
    engine = simple_engine()
    for _ in range(steps):
        one_step(engine)
        engine.save_checkpoint(str(directory))
    return engine


def test_an_optimizer_whose_state_is_not_loaded_starts_anew(one_rank, tmp_path):
    """What it has from before does not belong to the weights, nor does what it has from a checkpoint that is damaged."""
    engine = simple_engine()
    one_step(engine)
    engine.save_checkpoint(str(tmp_path), save_optimizer=False)
    one_step(engine)
    engine.save_checkpoint(str(tmp_path))
    want = simple_engine()
    want.load_checkpoint(str(tmp_path), "global_step1")
    one_step(want)
    flip(tmp_path / "global_step2" / "rank_00000.safetensors", -100)
    for options in ({"fallback": True}, {"tag": "global_step1", "load_optimizer_states": False}):
        engine.load_checkpoint(str(tmp_path), **options)
        assert not engine.optimizer.counters()
        one_step(engine)
        assert torch.equal(engine.module[0].weight, want.module[0].weight)


def test_after_a_load_that_failed_in_the_middle_only_a_checkpoint_goes_on(one_rank, tmp_path):
    engine = saved_at_each_step(tmp_path)
    with pytest.raises(FileNotFoundError):
        engine.load_checkpoint(str(tmp_path), "global_step7")
    one_step(engine)  # as nothing has been overwritten
    flip(tmp_path / "global_step2" / "rank_00000.safetensors", -100)
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(str(tmp_path))
    for load in (lambda: None, lambda: engine.load_checkpoint(str(tmp_path), "global_step1", load_module_only=True)):
        load()  # of weights alone leaves the moments as they are
        for use in (lambda: one_step(engine), lambda: engine.save_checkpoint(str(tmp_path), tag="torn")):
            with pytest.raises(RuntimeError, match="load of a checkpoint, was cut short by an error"):
                use()
    engine.load_checkpoint(str(tmp_path), "global_step1")
    one_step(engine)
    engine.save_checkpoint(str(tmp_path), tag="whole")


def test_after_a_load_that_ran_out_of_memory_another_may_succeed(one_rank, tmp_path, monkeypatch):
    engine = saved_at_each_step(tmp_path)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(SlicedOptimizer, "_vector", Mock(side_effect=MemoryError))
        engine.load_checkpoint(str(tmp_path))
    engine.load_checkpoint(str(tmp_path), "global_step1")
    one_step(engine)


def test_an_engine_without_an_optimizer_goes_on_after_a_load_that_succeeds(one_rank, tmp_path):
    """There are no moments that could still be those of the failure."""
    engine = saved_at_each_step(tmp_path)
    flip(tmp_path / "global_step2" / "rank_00000.safetensors", -100)
    model = nn.Sequential(*engine.module)
    engine.destroy()
    reader = Engine(model, mpu.get_groups(), None, {}, [])
    with pytest.raises(CheckpointError):
        reader.load_checkpoint(str(tmp_path))
    with pytest.raises(RuntimeError, match="cut short by an error"):
        reader.save_checkpoint(str(tmp_path / "copy"))
    reader.load_checkpoint(str(tmp_path), "global_step1")
    reader.save_checkpoint(str(tmp_path / "copy"))


@pytest.mark.parametrize("module_only", [False, True])
def test_a_load_amid_an_accumulation_starts_it_anew(one_rank, tmp_path, module_only):
    model = nn.Linear(1, 1, bias=False)
    engine = engine_of(model, lr=1.0, gradient_accumulation_steps=4)
    engine.save_checkpoint(str(tmp_path))
    before = model.weight.item()
    for micro in range(3 + 4):
        if micro == 3:
            if not module_only:
                engine.set_gradient_accumulation_boundary(False)  # up to the load, which counts anew
            engine.load_checkpoint(str(tmp_path), load_module_only=module_only)
            assert engine.micro_steps == (3 if module_only else 0)
        assert model.weight.item() == before
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
    assert model.weight.item() == pytest.approx(before - 1)


def failing_rank_case(directory: str) -> None:
    engine, rank = make_engine(1), torch.distributed.get_rank()
    train(engine, 1)
    engine.save_checkpoint(directory)

    def refuse(reader: Reader) -> None:
        if rank == 1:
            raise ValueError("not this one")

    with pytest.raises((ValueError, comm.OtherRankError), match="not this one"):
        engine.load_checkpoint(directory, prepare=refuse)
    with pytest.raises(RuntimeError, match="cut short by an error"):  # on both: one alone would wait for the other
        train(engine, 1)
    with pytest.raises(
        (OSError, comm.OtherRankError), match=r"rank 1 does not see .*global_step1, .* the same directory"
    ):
        engine.load_checkpoint(directory if rank == 0 else f"{directory}/of_another_node", "global_step1")


def test_a_rank_that_fails_to_load_stops_all_and_says_so_where_it_sees_another_directory(tmp_path):
    run_ranks(2, failing_rank_case, str(tmp_path))


def test_an_fp32_checkpoint_leaves_the_loss_scale_of_an_fp16_run(one_rank, tmp_path):
    saved_at_each_step(tmp_path, 1)
    half = simple_engine(torch.float16, LossScaler(scale=65536.0, dynamic=True))
    half.load_checkpoint(str(tmp_path))
    assert half.loss_scale() == 65536.0 and half.global_steps == half.optimizer.loss_scale_config.cur_iter == 1


def test_what_was_unfrozen_before_the_load_gets_its_moments(one_rank, tmp_path):
    engine = saved_at_each_step(tmp_path, 1)
    other = simple_engine(frozen=True)
    other.module[0].requires_grad_(True)
    other.load_checkpoint(str(tmp_path))
    one_step(engine)
    one_step(other)
    torch.testing.assert_close(other.module_state_dict(), engine.module_state_dict(), rtol=0, atol=0)


def test_moments_of_what_is_frozen_at_the_load_are_missed_aloud(one_rank, tmp_path, caplog):
    saved_at_each_step(tmp_path, 1)
    engine = simple_engine(frozen=True)
    engine.load_checkpoint(str(tmp_path), load_module_only=True)
    assert not caplog.messages
    engine.load_checkpoint(str(tmp_path))
    assert ["states of 0.weight, 0.bias, which" in message for message in caplog.messages] == [True]


def test_weights_that_were_written_in_place_are_saved(one_rank, tmp_path):
    engine = simple_engine(torch.bfloat16)
    with torch.no_grad():
        engine.module[0].weight.fill_(3.0)
    engine.save_checkpoint(str(tmp_path))
    assert (Reader(tmp_path).read_weight("0.weight") == 3.0).all()


def test_parameters_that_the_state_dictionary_leaves_out_are_saved_in_one_order(world, tmp_path, monkeypatch):
    """Whatever the process hashes strings to: equal states are equal files."""
    engine = make_engine(1)
    monkeypatch.setattr(Net, "state_dict", lambda self, **_: {})
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


def test_states_of_16_bits_and_settings_that_json_has_not(one_rank, tmp_path):
    engine = simple_engine(optimizer=BrainFloatMomentum)
    one_step(engine)
    engine.save_checkpoint(str(tmp_path))
    (bucket,) = [bucket for bucket in engine.buckets if "0.weight" in bucket.parameters]
    segment = bucket.segment_of(engine.module[0].weight)
    (tile,) = bucket.tiles
    with engine.optimizer.state_at_hand(tile, ["momentum"]) as states:
        (part,) = [view for view, _ in engine.optimizer.parts_of(states, tile, "momentum", segment)]
        assert torch.equal(Reader(tmp_path).read("0.weight", "momentum").view(-1), part.float())


class Adam(torch.optim.Optimizer):
    """Of a library that counts in an int; and with a tensor of one number."""

    shape = ()

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                for key in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(key, torch.zeros_like(p))
                state["step"] = state.get("step", 0) + 1
                state["weight"] = 0.999 * state.get("weight", torch.zeros(self.shape)) + 1
                p.sub_(p.grad, alpha=0.1 * (1 - 0.999 ** state["step"]))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_count_that_is_an_int_stays_one(one_rank, monkeypatch, tmp_path, shape):
    monkeypatch.setattr(Adam, "shape", shape)
    engine = simple_engine(optimizer=Adam)
    for _ in range(3):
        one_step(engine)
    engine.save_checkpoint(str(tmp_path))
    loaded = simple_engine(optimizer=Adam)
    loaded.load_checkpoint(str(tmp_path))
    for each in (engine, loaded):
        each.module[0].requires_grad_(False)  # the states move to other slices
        one_step(each)
        assert {type(state["step"]) for state in each.optimizer.state.values()} == {int}
        assert {(state["weight"].dtype, state["weight"].numel()) for state in each.optimizer.state.values()} == {
            (torch.float32, 1)
        }
    assert loaded.optimizer.counters() == engine.optimizer.counters()
    assert torch.equal(loaded.module[1].weight, engine.module[1].weight)
    other = simple_engine()  # torch's AdamW counts in a tensor
    other.load_checkpoint(str(tmp_path))
    one_step(other)
    assert all(torch.equal(state["step"], torch.tensor(4.0)) for state in other.optimizer.state.values())


@pytest.mark.parametrize("is_part", [False, True])
def test_cycled_momentum_continues(one_rank, tmp_path, is_part):
    def build() -> Engine:
        engine = simple_engine()
        optimizer = engine.optimizer.torch_optimizer
        cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        parts = [cycle, lr_scheduler.ConstantLR(optimizer)]
        engine.lr_scheduler = lr_scheduler.SequentialLR(optimizer, parts, [9]) if is_part else cycle
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


def test_momenta_that_the_schedule_does_not_drive_are_those_of_this_run(one_rank, tmp_path):
    def build(betas: tuple[float, float]) -> Engine:
        schedule = partial(AnnealingLR, config=LRScheduleConfig(lr=0.1, warmup=0), train_iters=10)
        return engine_of(nn.Linear(3, 3), partial(torch.optim.Adam, betas=betas), lr_scheduler=schedule)

    engine = build((0.9, 0.999))
    one_step(engine)
    engine.save_checkpoint(str(tmp_path))
    other = build((0.8, 0.95))
    other.load_checkpoint(str(tmp_path))
    assert {group["betas"] for group in other.optimizer.param_groups} == {(0.8, 0.95)}
    assert other.get_lr() == engine.get_lr() != [0.1]


def scheduled(schedule) -> Engine:
    return engine_of(nn.Linear(3, 3), lr_scheduler=schedule)


def test_a_schedule_of_another_kind_is_refused_by_torchs_too(one_rank, tmp_path):
    """`load_state_dict` of torch's takes whatever it gets, and would begin anew."""
    engine = scheduled(partial(AnnealingLR, config=LRScheduleConfig(lr=0.1), train_iters=10))
    one_step(engine)
    engine.save_checkpoint(str(tmp_path))
    other = scheduled(lambda optimizer: lr_scheduler.StepLR(optimizer.torch_optimizer, 10))
    with pytest.raises(
        ValueError, match="(?s)by this run's StepLR: .* has num_steps. Use .*load_lr_scheduler_states=F"
    ):
        other.load_checkpoint(str(tmp_path))
    other.load_checkpoint(str(tmp_path), load_lr_scheduler_states=False)


def test_a_schedule_on_one_side_only_is_told(one_rank, tmp_path, caplog):
    for tag, schedule in (("without", None), ("with", Scheduler)):
        engine = scheduled(schedule)
        one_step(engine)
        engine.save_checkpoint(str(tmp_path), tag=tag)
        scheduled(schedule).load_checkpoint(str(tmp_path))
    scheduled(Scheduler).load_checkpoint(str(tmp_path), "without", load_lr_scheduler_states=False)
    assert "schedule" not in caplog.text
    scheduled(Scheduler).load_checkpoint(str(tmp_path), "without")
    scheduled(None).load_checkpoint(str(tmp_path), "with")
    assert caplog.messages == [
        f"the learning-rate schedule starts anew: {tmp_path}/without was saved without one",
        f"the learning-rate schedule is not continued, as this run has none: {tmp_path}/with was saved with one",
    ]


def test_rates_of_other_parameter_groups_are_left_and_told(one_rank, tmp_path, caplog):
    saved_at_each_step(tmp_path, 1)
    other = engine_of(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.optim.AdamW, lr=0.3, decay=0.1)
    other.load_checkpoint(str(tmp_path))
    assert other.get_lr() == [0.3, 0.3]
    (told,) = caplog.messages
    assert "for its 2 parameter groups: " in told and told.endswith("global_step1 holds those of 1 parameter groups")


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
