"""Files that are whole or absent, one writer at a time, and fingerprints that notice changes."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import resource
import signal
import stat
from pathlib import Path

import pytest

from data_tools.done_marker import marked_outputs
from megazero.checkpoint.commands.verify import verify
from megazero.checkpoint.folder import CheckpointFolder
from megazero.checkpoint.importers.huggingface import read_huggingface
from megazero.data.sidecar import read_sidecar
from megazero.data.tokenizer import build_tokenizer
from megazero.files import (
    allow_many_files,
    append_suffix,
    file_named,
    fingerprint,
    locked,
    mapping,
    write_json,
    write_whole,
    written_aside,
)
from megazero.texts import read_text
from tests.bad_disks import failing, fails, largest_file


@pytest.mark.parametrize("hard", [resource.RLIM_INFINITY, 1 << 20, 5000])
@pytest.mark.parametrize("allowed, raised", [(1 << 20, 1 << 16), (61440, 1 << 15), (10240, 1 << 13), (200, 256)])
def test_open_files_are_raised_as_far_as_the_kernel_allows(hard, allowed, raised, monkeypatch):
    """macOS refuses more than its kern.maxfilesperproc, although the hard limit is "unlimited"."""
    limits = [(256, hard)]

    def set_limits(_, new):
        if new[0] > allowed:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(new)

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    allow_many_files()
    assert limits[-1] == (raised if hard == resource.RLIM_INFINITY else min(raised, hard), hard)


@pytest.mark.parametrize(
    "name, read",
    [
        ("c.json", lambda path: read_sidecar(path.with_suffix(""))),
        ("vocab.json", lambda path: build_tokenizer("GPT2BPETokenizer", path, path)),
        ("tokenizer.json", lambda path: build_tokenizer("HuggingFaceTokenizer", tokenizer_path=path)),
        ("o.done.json", lambda path: marked_outputs(path.with_name("o"))),
        ("valid.txt", lambda path: read_text(path, "--valid-data")),
        ("config.json", lambda path: read_huggingface(path.parent)),
        ("index.json", lambda path: verify(path.parent.parent, path.parent.name)),
    ],
)
def test_a_small_file_that_a_disk_does_not_give_is_told_with_its_name(tmp_path, unreadable, name, read):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / name).symlink_to(unreadable)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path / 't' / name}'"):
        read(tmp_path / "t" / name)


def test_suffix_is_added_not_replaced():
    assert str(append_suffix("a/corpus.v2", ".bin")) == "a/corpus.v2.bin"


def test_written_aside_is_whole_or_absent(tmp_path):
    path = tmp_path / "f"
    with written_aside(path) as file:
        file.write(b"old")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError):
        with written_aside(path) as file:
            file.write(b"new, half")
            raise ZeroDivisionError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]
    write_json(path, {"new": [1]})
    assert path.read_bytes() == b'{\n "new": [\n  1\n ]\n}\n' and os.listdir(tmp_path) == ["f"]


def test_processes_of_one_id_in_two_containers_write_aside_apart(tmp_path):
    path = tmp_path / "f"
    with written_aside(path) as one:  # the same process twice stands for two of one id
        one.write(b"one ")
        with written_aside(path) as other:
            other.write(b"other")
        assert path.read_bytes() == b"other"
        one.write(b"whole")
    assert path.read_bytes() == b"one whole" and os.listdir(tmp_path) == ["f"]


def test_where_folders_cannot_be_synced_files_are_written_all_the_same(tmp_path, monkeypatch):
    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    def lowest_free_descriptor():
        os.close(descriptor := os.dup(0))
        return descriptor

    monkeypatch.setattr(os, "fsync", fsync)
    free = lowest_free_descriptor()
    for number in (errno.EINVAL, errno.ENOTSUP):
        write_json(tmp_path / "f", number)
        assert (tmp_path / "f").read_text() == f"{number}\n"
    number = errno.EIO
    with pytest.raises(OSError, match=f"{os.strerror(errno.EIO)}: '{tmp_path}'"):
        write_json(tmp_path / "f", number)
    assert lowest_free_descriptor() == free, "no folder stays open"


def test_a_file_that_cannot_be_locked_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}/lock'"), locked(tmp_path / "lock"):
        pass


def test_a_file_that_cannot_be_written_or_synced_is_named(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: os.pwrite(-1, b"", 0))
        with pytest.raises(OSError, match=f"Bad file descriptor: '{tmp_path}/f'"):
            write_whole(tmp_path / "f", b"a")
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", fails)
        with pytest.raises(OSError, match="Input/output error"):
            write_whole(tmp_path / "f", b"a")
    for nbytes in (1 << 19, 1 << 10):  # in a call of its own, and from the file's buffer
        with largest_file(1 << 9), pytest.raises(OSError, match=f"File too large: '{tmp_path}/f'"):
            write_whole(tmp_path / "f", bytes(nbytes))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [OSError("CRC check failed"), FileNotFoundError(errno.ENOENT, "No such file", "other")]
)
@pytest.mark.parametrize("named", [file_named, mapping])
def test_an_error_that_has_no_number_or_names_a_file_already_is_told_as_it_is(tmp_path, error, named):
    told = str(error)
    with pytest.raises(type(error), match=f"^{re.escape(told)}$"), named(tmp_path / "f"):
        raise error


def add_one(folder, barrier):
    barrier.wait()
    for _ in range(20):
        with locked(folder / "lock"):
            count = int((folder / "count").read_text())
            (folder / "count").write_text(str(count + 1))


def hold_until_killed(folder, pipe):
    with locked(folder / "lock"):
        pipe.send("held")
        signal.pause()


def test_lock_lets_one_process_in_at_a_time(tmp_path):
    (tmp_path / "count").write_text("0")
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(5)
    processes = [context.Process(target=add_one, args=(tmp_path, barrier)) for _ in range(5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert (tmp_path / "count").read_text() == "100" and not (tmp_path / "lock").exists()


def test_killed_holder_lets_go(tmp_path):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=hold_until_killed, args=(tmp_path, there))
    process.start()
    assert here.recv() == "held"
    process.kill()
    process.join()
    with locked(tmp_path / "lock"):
        pass


def test_file_system_without_locks_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOSYS))
    with locked(tmp_path / "lock"):
        assert "has no locks" in caplog.text


@pytest.mark.parametrize("claims", [False, True])
def test_a_link_in_the_place_of_a_lock_is_refused_and_what_it_leads_to_left_alone(tmp_path, claims):
    (mine := tmp_path / "mine").write_text("text")
    (lock := tmp_path / ".lock").symlink_to(mine)
    with pytest.raises(OSError, match=f"{lock} is a link, which a lock must not be: remove it"):
        CheckpointFolder(tmp_path).claim() if claims else locked(lock).__enter__()
    assert mine.read_text() == "text"


def test_a_lock_that_cannot_be_opened_is_not_called_a_link(tmp_path):
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        locked(tmp_path).__enter__()


def test_lock_file_that_an_smb_share_keeps_while_it_is_open_is_locked_by_who_comes_next(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "unlink", failing(errno.EBUSY))
    for _ in range(2):
        with locked(tmp_path / "lock", wait=False):
            pass
    assert (tmp_path / "lock").exists()


def test_lock_is_held_where_a_file_has_another_inode_number_at_each_question(tmp_path, monkeypatch):
    questions = []

    def samestat(one, other):
        questions.append((one, other))
        assert len(questions) < 10, "for ever"
        return False

    monkeypatch.setattr(os.path, "samestat", samestat)
    with locked(tmp_path / "lock"), pytest.raises(BlockingIOError):
        with locked(tmp_path / "lock", wait=False):
            pass


@pytest.mark.parametrize("place", [0, 3_000_000, 5_999_999])
def test_fingerprint_notices_a_change_of_equal_size_and_time(tmp_path, place):
    path = tmp_path / "f"
    path.write_bytes(bytes(6_000_000))
    os.utime(path, ns=(1, 1))
    before = fingerprint(path)
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(b"x")
    os.utime(path, ns=(1, 1))
    after = fingerprint(path)
    assert before != after and before["bytes"] == after["bytes"] == 6_000_000
    os.utime(path, ns=(2, 2))
    assert fingerprint(path) != after
