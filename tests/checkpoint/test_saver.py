"""Saves by all ranks together, at once and in the background; a save that fails does so on all of them."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from megazero import comm, mpu
from megazero.checkpoint import capture, saver, tensor_file, writer
from megazero.checkpoint.folder import CheckpointFolder
from megazero.checkpoint.tags import latest_tag, list_tags
from megazero.engine import Engine, weight_decay_groups
from megazero.zero import ZeroConfig
from tests.bad_disks import full, largest_file
from tests.checkpoint.engines import Net, make_engine, train, write_one
from tests.ranks import run_ranks


def test_state_that_every_rank_has_is_not_gathered(world, tmp_path, monkeypatch):
    engine, gather, gathered = make_engine(1), comm.all_gathered_objects, []
    train(engine, 2)
    monkeypatch.setattr(
        comm, "all_gathered_objects", lambda value, *group: gathered.append(value) or gather(value, *group)
    )
    path = engine.save_checkpoint(str(tmp_path))
    assert gathered and "norm.weight" not in str(gathered)
    assert json.loads((path / "index.json").read_text())["optimizer"]["counters"] == {"step": 2.0}
    assert sorted(os.listdir(path)) == ["index.json", "rank_00000.safetensors"], "ranks' notes are gone"


def sharded_state_case(folder: str) -> tuple[str, dict]:
    mpu.initialize_model_parallel(1)
    model, gather, gathered = Net(), comm.all_gathered_objects, []
    adam = partial(torch.optim.Adam, lr=0.05)
    engine = Engine(model, mpu.get_groups(), adam, *weight_decay_groups(model, 0.1), zero=ZeroConfig(stage=2))
    train(engine, 2)
    comm.all_gathered_objects = lambda value, *group: gathered.append(value) or gather(value, *group)
    path = engine.save_checkpoint(folder)
    optimizer = json.loads((path / "index.json").read_text())["optimizer"]
    return str(gathered), {key: optimizer[key] for key in ("counters", "counters_of")}


def test_ranks_tell_each_other_the_values_of_scalar_state_and_not_the_parameters_that_have_them(tmp_path):
    for told, saved in run_ranks(3, sharded_state_case, str(tmp_path)):
        assert "exp_avg" in told and '{"step": 2.0}' in told and not re.search("norm|weight|bias", told)
        assert saved == {"counters": {"step": 2.0}, "counters_of": {}}


def test_failed_save_leaves_the_previous_checkpoint(world, tmp_path, monkeypatch):
    engine = write_one(tmp_path)

    def full_disk(path, tensors):
        path.write_bytes(b"half")
        full()

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
    with largest_file(4096), pytest.raises(OSError, match=r"could not write .*rank_00000.safetensors: File too large"):
        engine.save_checkpoint(str(tmp_path))
    assert latest_tag(tmp_path) == "global_step1"


def test_all_of_a_file_is_written_when_it_is_synced(tmp_path, monkeypatch):
    sizes, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (sizes.append(os.fstat(file).st_size), fsync(file)))
    written = tensor_file.write_tensors(tmp_path / "file", {"x": torch.ones(3)})
    assert sizes == [written.nbytes]


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


def test_a_script_that_destroys_the_world_before_the_save_is_done_is_told_to_wait(world, tmp_path, monkeypatch):
    engine, meeting, write = make_engine(1), threading.Barrier(2, timeout=20), writer.write_tensors

    def interrupted(path, tensors):
        meeting.wait()
        meeting.wait()
        return write(path, tensors)

    monkeypatch.setattr(writer, "write_tensors", interrupted)
    engine.save_checkpoint(str(tmp_path), in_background=True)
    meeting.wait()
    torch.distributed.destroy_process_group()
    meeting.wait()
    with pytest.raises(OSError, match=r"process group was destroyed meanwhile. Call wait_for_checkpoint\(\) before"):
        engine.wait_for_checkpoint()
    assert not list(tmp_path.glob(".*.partial"))
    comm.init_distributed("gloo")  # for the fixture


def test_a_load_waits_for_the_save_in_the_background(world, tmp_path, monkeypatch):
    engine, write = make_engine(1), writer.write_tensors

    def slow(path, tensors):
        time.sleep(0.5)
        return write(path, tensors)

    monkeypatch.setattr(writer, "write_tensors", slow)
    train(engine, 1)
    want = engine.save_checkpoint(str(tmp_path), in_background=True)
    assert engine.load_checkpoint(str(tmp_path))[0] == want


def test_failure_in_the_background_is_raised_by_the_next_call(world, tmp_path, monkeypatch):
    engine = make_engine(1)
    monkeypatch.setattr(writer, "write_tensors", full)
    engine.save_checkpoint(str(tmp_path), in_background=True)
    with pytest.raises(OSError, match=r"global_step0 was not saved: OSError: .*No space left"):
        engine.save_checkpoint(str(tmp_path))
    monkeypatch.undo()
    engine.save_checkpoint(str(tmp_path))
    assert latest_tag(tmp_path) == "global_step0"


def test_failure_in_the_background_frees_the_copy_of_what_was_to_be_saved(world, tmp_path, monkeypatch):
    engine, copies, staged = make_engine(1), [], writer.Snapshot.staged

    def noted(snapshot):
        copies.append(weakref.ref(copy := staged(snapshot)))
        copies.extend(weakref.ref(value) for states in copy.pieces.values() for value in states.values())
        return copy

    monkeypatch.setattr(writer.Snapshot, "staged", noted)
    monkeypatch.setattr(tensor_file.ChecksummedStream, "write", full)
    gc.disable()
    try:
        engine.save_checkpoint(str(tmp_path), in_background=True)
        engine.saver._thread.join()
        assert len(copies) > 2 and not any(copy() is not None for copy in copies)
    finally:
        gc.enable()
    with pytest.raises(OSError, match="No space left"):
        engine.wait_for_checkpoint()


def test_what_one_rank_cannot_write_or_copy_raises_on_all(tmp_path):
    run_ranks(2, _one_rank_fails, str(tmp_path))


def _one_rank_fails(directory: str) -> None:
    engine, is_second = make_engine(1), torch.distributed.get_rank() == 1
    if is_second:
        writer.write_tensors = full
    for in_background in (False, True):
        with pytest.raises(OSError, match="No space left"):
            engine.save_checkpoint(directory, in_background=in_background)
            engine.wait_for_checkpoint()
    if is_second:
        writer.Snapshot.staged = _no_memory
    with pytest.raises(MemoryError if is_second else OSError, match="no host memory"):
        engine.save_checkpoint(directory, in_background=True)
    if is_second:
        capture._pieces = _no_memory
    with pytest.raises(MemoryError if is_second else comm.OtherRankError, match="no host memory"):
        engine.save_checkpoint(directory)
    engine.optimizer.is_torn = is_second  # as after a step whose last write has failed
    with pytest.raises(RuntimeError, match="cut short by an error"):
        engine.save_checkpoint(directory)
    assert latest_tag(directory) is None


def test_nodes_that_do_not_share_the_directory_are_told_so(tmp_path):
    run_ranks(2, _apart, str(tmp_path))


def _apart(parent: str) -> None:
    rank, engine = torch.distributed.get_rank(), make_engine(1)
    saver.SEEN_WITHIN_S = 0.3
    mine = Path(parent) / f"node{rank}"
    mine.mkdir()
    host = re.escape(socket.gethostname())
    for tries in (engine.saver.claim, engine.save_checkpoint):  # a caller that goes on all the same
        with pytest.raises(
            OSError,
            match=rf"^rank 1 on {host} does not see in .*/node1 what rank 0 on {host} has just put into .*/node0\. ",
        ):
            tries(str(mine))
        assert os.listdir(mine) == [".lock"] * (rank == 0)
    assert not list_tags(mine) and not (mine / "latest").exists()
    engine.save_checkpoint(parent)  # and what they share takes it


def test_a_directory_that_a_network_file_system_shows_late_is_waited_for(tmp_path):
    run_ranks(2, _late, str(tmp_path / "new"))


def _late(directory: str) -> None:
    engine, exists, looks = make_engine(1), os.path.exists, []
    if torch.distributed.get_rank() == 1:
        os.path.exists = lambda path: (looks.append(path), len(looks) > 2 and exists(path))[1]
    engine.saver.claim(directory)
    os.path.exists = exists
    assert len(looks) == (3 if torch.distributed.get_rank() == 1 else 0)
    comm.barrier()
    assert os.listdir(directory) == [".lock"]


def _no_memory(*_):
    raise MemoryError("no host memory")


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


def test_engines_that_come_and_go_save_over_one_group(tmp_path):
    run_ranks(2, _one_after_the_other, str(tmp_path))


def _one_after_the_other(directory: str) -> None:
    groups, held = torch.distributed.distributed_c10d._world.pg_names, []
    for number in range(3):
        engine = make_engine(1)
        engine.save_checkpoint(directory, tag=f"{number}", in_background=number == 1)
        engine.destroy()
        mpu.destroy_model_parallel()
        held.append(len(groups))
    assert held == held[:1] * 3, "a group has threads and sockets, and stays as long as the world"


def test_saves_of_two_engines_in_the_background_take_turns(tmp_path):
    run_ranks(2, _two_in_the_background, str(tmp_path))


def _two_in_the_background(directory: str) -> None:
    first, write, begun = make_engine(1), writer.write_tensors, []
    mpu.destroy_model_parallel()
    second = make_engine(1)

    def slow(path, tensors):
        begun.append(path.parent.name)
        time.sleep(0.2 * (1 + torch.distributed.get_rank()))  # each rank has another pace
        return write(path, tensors)

    writer.write_tensors = slow
    for number in range(2):
        first.save_checkpoint(directory, tag=f"first{number}", in_background=True)
        second.save_checkpoint(directory, tag=f"second{number}", in_background=True)
    first.wait_for_checkpoint()
    second.wait_for_checkpoint()
    assert begun == [".first0.partial", ".second0.partial", ".first1.partial", ".second1.partial"]
    assert set(list_tags(directory)) == {"first0", "second0", "first1", "second1"}


def test_directories_that_are_saved_in_once_are_given_back(world, tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "MOST_CLAIMED", 2)
    engine, locks = make_engine(1), lambda: [folder.path.name for folder in engine.saver._folders.values()]
    engine.saver.claim(str(tmp_path / "last"))
    users = CheckpointFolder._users  # of each lock, which is closed with the last one
    before = sum(users.values())
    for number in range(4):
        engine.save_checkpoint(str(tmp_path / f"{number}"))
        engine.save_checkpoint(str(tmp_path / "last"))
    assert sum(users.values()) - before == 1 and locks() == ["3", "last"]
    engine.save_checkpoint(str(tmp_path / "0"))  # it is taken again
    assert latest_tag(tmp_path / "0") == "global_step0" and locks() == ["last", "0"]
    engine.destroy()


def test_a_rank_that_can_start_no_thread_saves_at_once(tmp_path):
    run_ranks(2, _without_a_thread, str(tmp_path))


def _without_a_thread(directory: str) -> None:
    engine = make_engine(1)
    if torch.distributed.get_rank() == 1:
        saver.threading = Mock(**{"Thread.return_value.start.side_effect": RuntimeError("can't start new thread")})
    engine.save_checkpoint(directory, in_background=True)
    engine.wait_for_checkpoint()
    assert latest_tag(directory) == "global_step0"


def test_a_directory_is_given_back_though_the_last_save_has_failed(world, tmp_path, monkeypatch):
    engine, before = make_engine(1), sum(CheckpointFolder._users.values())
    monkeypatch.setattr(writer, "write_tensors", full)
    engine.save_checkpoint(str(tmp_path), in_background=True)
    with pytest.raises(OSError, match="No space left"):
        engine.saver.close()
    assert sum(CheckpointFolder._users.values()) == before


def test_a_background_save_follows_no_change_of_the_working_directory(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = make_engine(1)
    engine.save_checkpoint("relative", in_background=True)
    monkeypatch.chdir("/")
    engine.wait_for_checkpoint()
    assert latest_tag(tmp_path / "relative") == "global_step0"
    engine.destroy()


OUTLIVES = """
import sys, time
from megazero import comm
from megazero.checkpoint import saver
from tests.checkpoint.engines import make_engine

write = saver._write_part
saver._write_part = lambda *args: time.sleep(1) or write(*args)
comm.init_distributed()
make_engine(1).save_checkpoint(sys.argv[1], in_background=True)
"""


def test_a_background_save_outlives_the_script(tmp_path):
    done = subprocess.run([sys.executable, "-c", OUTLIVES, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert latest_tag(tmp_path) == "global_step0"
