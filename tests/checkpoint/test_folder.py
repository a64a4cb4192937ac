"""The directory that a job saves in: one job at a time, nothing whole is lost, and what is superfluous goes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from megazero import mpu
from megazero.checkpoint import folder, standalone
from megazero.checkpoint.standalone import SCRIPT, place_script, script_text
from megazero.checkpoint.tags import latest_tag, list_tags, tags_to_go_back_to
from tests.bad_disks import failing
from tests.checkpoint.engines import make_engine, train, write_one


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
        engine.saver._thread.join()
    assert latest_tag(tmp_path) == "global_step2" and list_tags(tmp_path) == ["global_step2"]
    assert leftovers(tmp_path) == [".global_step1.partial", ".global_step2.replaced"]
    go_on.set()
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path), in_background=in_background)
    assert sorted(deleted) == [".global_step1.partial", ".global_step2.replaced"]
    engine.wait_for_checkpoint()
    assert not leftovers(tmp_path) and list_tags(tmp_path) == ["global_step2", "global_step3"]


def test_who_closes_a_folder_has_waited_until_what_is_superfluous_is_deleted(world, tmp_path, monkeypatch):
    engine, delete = make_engine(1), folder.CheckpointFolder._delete
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path))
    monkeypatch.setattr(folder.CheckpointFolder, "_delete", lambda *args: (time.sleep(0.3), delete(*args)))
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path), keep_last=1)
    engine.saver._folders[tmp_path].release()
    assert visible(tmp_path) == ["global_step2", "latest", "zero_to_fp32.py"] and not leftovers(tmp_path)


def test_a_process_that_ends_deletes_first_and_one_that_dies_leaves_it_to_who_claims_next(world, tmp_path):
    code = (
        "import os, sys, time; from pathlib import Path; from megazero.checkpoint import folder\n"
        "remove = folder._remove\n"
        "folder._remove = lambda path: (time.sleep(0.3), os._exit(9) if sys.argv[2] == 'dies' else remove(path))\n"
        "mine = folder.CheckpointFolder(sys.argv[1]); mine.claim(); mine.prepare('global_step1'); "
        "mine.publish('global_step1', {}, True, folder.Keep())"
    )
    engine = write_one(tmp_path)
    engine.saver.close()  # lets the others save here
    for end, status in (("dies", 9), ("ends", 0)):
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path), end]).returncode == status
        assert leftovers(tmp_path) == ([".global_step1.replaced"] if end == "dies" else [])
        assert latest_tag(tmp_path) == "global_step1"
        engine.saver.claim(str(tmp_path))
        assert not leftovers(tmp_path)
        engine.saver.close()


def claimed_by_another(directory: Path) -> subprocess.Popen:
    """A process that has claimed the directory, and ends with its input."""
    code = (
        "import sys; from megazero.checkpoint.folder import CheckpointFolder; folder = CheckpointFolder(sys.argv[1]); "
        "folder.claim(); print(flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code, str(directory)], **pipes)
    assert process.stdout.readline()
    return process


def test_two_jobs_on_one_directory_are_detected(world, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE_S", 0.3)
    claimed = claimed_by_another(tmp_path)
    engine = make_engine(1)
    with pytest.raises(folder.DirectoryInUseError, match=rf"another job \(process {claimed.pid} on .*another --save"):
        engine.saver.claim(str(tmp_path))
    claimed.kill()
    claimed.wait()
    engine.save_checkpoint(str(tmp_path))


def test_a_job_that_is_started_while_the_last_one_dies_waits_for_its_end(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", logger="megazero")
    dying = claimed_by_another(tmp_path)

    def sleep(seconds: float) -> None:  # it dies when it is waited for
        dying.stdin.close()
        time.sleep(seconds)

    monkeypatch.setattr(folder, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    claimed = folder.CheckpointFolder(tmp_path)
    assert claimed.claim() and dying.wait() == 0
    assert f"another job (process {dying.pid} on " in caplog.text and "waiting in case it is ending" in caplog.text
    claimed.release()


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


def test_a_copy_of_the_directory_gives_up_its_lock_only_until_the_next_save(tmp_path):
    """Whoever in a process reads a file and closes it gives up all locks that the process has on it (fcntl)."""
    ours = folder.CheckpointFolder(tmp_path / "a")
    ours.claim()
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert not is_locked(tmp_path / "a")
    assert not ours.claim() and is_locked(tmp_path / "a")
    ours.release()


@pytest.mark.parametrize("may_read", [True, False], ids=["", "on an SMB share, which keeps others from reading it"])
def test_a_lock_that_is_refused_as_some_systems_say_it_is_another_jobs(tmp_path, monkeypatch, may_read):
    monkeypatch.setattr(folder.fcntl, "lockf", failing(errno.EACCES))
    if not may_read:
        monkeypatch.setattr(os, "pread", failing(errno.EACCES))
    monkeypatch.setattr(folder, "PATIENCE_S", 0.3)
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(folder.DirectoryInUseError, match="another job"):
        folder.CheckpointFolder(tmp_path).claim()
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize(("number", "is_refused"), [(errno.EIO, True), (errno.ESTALE, True), (errno.ENOSYS, False)])
def test_a_lock_that_fails_is_an_error_unless_the_file_system_has_none(
    tmp_path, monkeypatch, caplog, number, is_refused
):
    monkeypatch.setattr(folder.fcntl, "lockf", failing(number))
    claimed = folder.CheckpointFolder(tmp_path)
    said = rf"could not lock .*\.lock: {os.strerror(number)}"
    with pytest.raises(OSError, match=said) if is_refused else nullcontext():
        claimed.claim()
    assert ("this file system has no locks" in caplog.text) != is_refused
    claimed.release()


@pytest.mark.parametrize("umask, mode", [(0o022, 0o755), (0o077, 0o700)])
def test_the_script_is_executable_before_it_is_there_for_those_who_may_read_it(tmp_path, monkeypatch, umask, mode):
    modes, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (modes.append(os.stat(old).st_mode & 0o777), replace(old, new)))
    before = os.umask(umask)
    place_script(tmp_path)
    os.umask(before)
    assert modes == [mode]


def test_the_script_is_there_also_on_a_share_that_keeps_no_rights(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fchmod", failing(errno.EPERM))
    place_script(tmp_path)
    assert (tmp_path / SCRIPT).read_text() == script_text()


def test_the_script_is_placed_also_where_the_library_has_moved_since_the_directory_was_claimed(tmp_path, monkeypatch):
    script_text.cache_clear()
    mine = folder.CheckpointFolder(tmp_path)
    mine.claim()
    monkeypatch.setattr(standalone, "__file__", str(tmp_path / "gone" / "standalone.py"))
    place_script(tmp_path)
    mine.release()


@pytest.mark.parametrize(
    ("call", "number"), [("rename", errno.ENOSYS), ("rename", errno.EMFILE), ("replace", errno.EPERM)]
)
def test_a_file_system_that_could_not_publish_a_save_is_refused_before_the_first(tmp_path, monkeypatch, call, number):
    """Mounts of object stores: mountpoint-s3 renames nothing, gcsfuse no folder with something in it."""
    monkeypatch.setattr(os, call, failing(number))
    claimed = folder.CheckpointFolder(tmp_path)
    with pytest.raises(OSError, match=f"replacing a file and renaming a folder in .*: {os.strerror(number)}"):
        claimed.claim()
    assert os.listdir(tmp_path) == [".lock"]
    claimed.release()


@pytest.mark.parametrize("in_background", [False, True], ids=["saved at once", "saved in the background"])
@pytest.mark.parametrize(
    "tag", ["../up", ".hidden", "a/b", "", "a\0b", "latest", "zero_to_fp32.py", "a ", "é" * 101, "\udcff"]
)
def test_tag_that_leads_elsewhere_is_refused(world, tmp_path, tag, in_background):
    engine = make_engine(1)
    with pytest.raises(ValueError, match="becomes the name of its directory"):
        engine.save_checkpoint(str(tmp_path / "save"), tag=tag, in_background=in_background)
    with pytest.raises(ValueError, match="becomes the name of its directory"):
        engine.load_checkpoint(str(tmp_path / "save"), tag=tag)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_keep_last_deletes_only_older_checkpoints(world, tmp_path):
    engine = make_engine(1)
    for _ in range(3):
        train(engine, 1)
        engine.save_checkpoint(str(tmp_path), keep_last=2)
    assert list_tags(tmp_path) == ["global_step2", "global_step3"]


def test_keep_every_keeps_what_keep_last_would_delete(world, tmp_path):
    engine = make_engine(1)
    for step in range(1, 8):
        train(engine, 1)
        tag = "mine" if step == 1 else None
        engine.save_checkpoint(str(tmp_path), tag, keep_last=2, keep_every=3)
    assert list_tags(tmp_path) == ["mine", *(f"global_step{step}" for step in (3, 6, 7))]
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path), keep_last=1, keep_every=4)
    assert list_tags(tmp_path) == ["mine", "global_step8"]


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


def test_a_save_is_made_where_what_is_not_to_be_kept_cannot_be_looked_for(world, tmp_path, monkeypatch, caplog):
    engine = make_engine(1)
    for looks in (list_tags, failing(errno.EIO), list_tags):
        monkeypatch.setattr(folder, "list_tags", looks)
        train(engine, 1)
        engine.save_checkpoint(str(tmp_path), keep_last=1)
        assert latest_tag(tmp_path) == f"global_step{engine.global_steps}"
    assert caplog.text.count("could not look for what is not to be kept beside") == 1
    engine.saver.close()
    assert list_tags(tmp_path) == ["global_step3"]


def test_what_is_not_to_be_kept_is_deleted_where_no_thread_can_be_started(world, tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    engine = make_engine(1)
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path))
    train(engine, 1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    engine.save_checkpoint(str(tmp_path), keep_last=1)
    assert visible(tmp_path) == ["global_step2", "latest", "zero_to_fp32.py"] and not leftovers(tmp_path)
    engine.saver.close()  # waits for no thread


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


def test_a_deletion_that_died_leaves_nothing_that_is_taken_for_whole(world, tmp_path, monkeypatch):
    write_one(tmp_path)
    (tmp_path / "global_step1").rename(tmp_path / ".global_step1.replaced")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            folder._remove(tmp_path / ".global_step1.replaced")
    assert list_tags(tmp_path) == []
    folder.CheckpointFolder(tmp_path)._clear()  # gives it its name back
    assert list_tags(tmp_path) == []


def test_a_tag_like_the_name_of_a_file_that_was_being_written_is_no_obstacle(world, tmp_path):
    engine = make_engine(1)
    engine.save_checkpoint(str(tmp_path), tag="latest.tmp0123abcd")
    (tmp_path / "latest.tmp4567abcd").write_text("global")
    (tmp_path / "latest.tmp_mine").write_text("a user's")
    engine.save_checkpoint(str(tmp_path))
    kept = ["latest.tmp0123abcd", "latest.tmp_mine"]
    assert visible(tmp_path) == ["global_step0", "latest", *kept, "zero_to_fp32.py"]


def test_saving_a_step_again_replaces_it(world, tmp_path):
    engine = write_one(tmp_path)
    engine.save_checkpoint(str(tmp_path), client_state={"second": True})
    assert engine.load_checkpoint(str(tmp_path))[1] == {"second": True}
    assert visible(tmp_path) == ["global_step1", "latest", "zero_to_fp32.py"]


def test_what_lies_in_the_image_of_a_container_is_replaced_and_kept_as_elsewhere(world, tmp_path, monkeypatch):
    engine, rename = make_engine(1), os.rename
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    # Open, so that no new folder gets their inodes.
    in_image = [os.open(tmp_path / name, os.O_RDONLY) for name in ("global_step1", "mine")]

    def overlayfs(path, to):
        if any(os.path.samestat(os.stat(path), os.fstat(open_one)) for open_one in in_image):
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(path), None, str(to))
        rename(path, to)

    monkeypatch.setattr(os, "rename", overlayfs)
    engine.save_checkpoint(str(tmp_path), client_state={"second": True})
    engine.save_checkpoint(str(tmp_path), tag="mine")
    assert engine.load_checkpoint(str(tmp_path), tag="global_step1")[1] == {"second": True}
    assert (tmp_path / "mine.other" / "notes").read_text() == "mine"
    engine.wait_for_checkpoint()
    assert not leftovers(tmp_path)
    for open_one in in_image:
        os.close(open_one)


def test_nothing_is_copied_where_a_folder_may_not_be_renamed(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(os, "rename", failing(errno.EACCES))
    with pytest.raises(PermissionError):
        folder._move(tmp_path / "mine", tmp_path / "mine.other")
    assert os.listdir(tmp_path) == ["mine"]


@pytest.mark.parametrize("dies_in", ["copytree", "rmtree"])
def test_a_save_that_dies_while_it_copies_a_checkpoint_out_of_an_image_leaves_it_whole(
    world, tmp_path, monkeypatch, dies_in
):
    engine, rename = make_engine(1), os.rename
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path))
    final = tmp_path / "global_step1"
    saved = {file.name: file.read_bytes() for file in final.iterdir()}

    def overlayfs(path, to):
        if path == final:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(path), None, str(to))
        rename(path, to)

    def die(path, to=None, **_):
        if to is not None:  # copytree
            to.mkdir()
            shutil.copy(path / "index.json", to)
        for file in () if to is not None else sorted(path.glob("rank_*"))[:1]:
            file.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", overlayfs)
        patch.setattr(shutil, dies_in, die)
        with pytest.raises(KeyboardInterrupt):
            folder._move(final, folder.replaced_path(tmp_path, "global_step1"))
    engine.load_checkpoint(str(tmp_path))
    folder.CheckpointFolder(tmp_path)._clear()
    assert {file.name: file.read_bytes() for file in final.iterdir()} == saved and not leftovers(tmp_path)


def test_what_has_a_checkpoints_name_and_is_none_is_kept(world, tmp_path, caplog):
    theirs = tmp_path / "global_step1" / "mp_rank_00_model_states.pt"
    theirs.parent.mkdir()
    theirs.write_bytes(b"weights")
    (tmp_path / ".global_step1.replaced").mkdir()  # of a save that died since
    (tmp_path / "rank_notes").write_text("a file")
    (tmp_path / "rank_notes.other").write_text("an older one")
    (tmp_path / "made").mkdir()  # as scripts do before they save
    (tmp_path / "moved").symlink_to(tmp_path / "to a disk that is not there now")
    engine = write_one(tmp_path)
    assert f"{tmp_path}/global_step1.other from now on" in caplog.text
    for tag in ("rank_notes", "made", "moved"):
        engine.save_checkpoint(str(tmp_path), tag=tag)
    (tmp_path / "global_step1" / "index.json").unlink()  # one of ours all the same
    engine.save_checkpoint(str(tmp_path), keep_last=1)
    engine.wait_for_checkpoint()
    assert (tmp_path / "global_step1.other" / theirs.name).read_bytes() == b"weights"
    assert (tmp_path / "rank_notes.other").read_text() == "an older one"
    assert (tmp_path / "rank_notes.other.other").read_text() == "a file"
    assert visible(tmp_path) == [
        *("global_step1", "global_step1.other", "latest", "made", "moved", "moved.other"),
        *("rank_notes", "rank_notes.other", "rank_notes.other.other", "zero_to_fp32.py"),
    ]


def test_a_directory_that_was_deleted_between_two_saves_is_made_again(world, tmp_path):
    engine = write_one(tmp_path / "save")
    shutil.rmtree(tmp_path / "save")
    engine.save_checkpoint(str(tmp_path / "save"))
    assert latest_tag(tmp_path / "save") == "global_step1" and (tmp_path / "save" / ".lock").exists()


def test_keep_last_never_deletes_what_latest_names_and_counts_the_jobs_own_tags_only(world, tmp_path):
    engine = write_one(tmp_path)
    for options in ({"tag": "best"}, {}):
        train(engine, 1)
        engine.save_checkpoint(str(tmp_path), save_latest=False, keep_last=1, **options)
    assert list_tags(tmp_path) == ["global_step1", "best", "global_step3"]
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path), keep_last=1)
    assert list_tags(tmp_path) == ["best", "global_step4"]


def test_a_negative_keep_last_or_a_string_is_refused_and_deletes_nothing(world, tmp_path):
    engine = make_engine(1)
    for tag in ("global_step1", "global_step2"):
        engine.save_checkpoint(str(tmp_path), tag=tag)
    for wrong, given in (
        ({"keep_last": -1}, "keep_last=-1, keep_every=0"),
        ({"keep_every": -2}, "keep_last=0, keep_every=-2"),
    ):
        with pytest.raises(ValueError, match=rf"save_checkpoint\({given}\): .* 0 keeps all"):
            engine.save_checkpoint(str(tmp_path), tag="global_step3", **wrong)
    with pytest.raises(ValueError, match=r"save_checkpoint's keep_last must be an integer, got '2'"):
        engine.save_checkpoint(str(tmp_path), tag="global_step3", keep_last="2")
    assert list_tags(tmp_path) == ["global_step1", "global_step2"]


def test_what_stands_in_for_a_checkpoint_goes_by_steps_and_the_users_own_tags_by_time(tmp_path):
    tags = (".mine.replaced", "global_step30", "best", "global_step5", "global_step20", "mine", "global_step100")
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
    engine.wait_for_checkpoint()
    assert latest_tag(tmp_path / "save") == "global_step3" and not list((tmp_path / "save").glob(".*.partial"))


def test_what_cannot_be_deleted_is_no_obstacle(world, tmp_path, monkeypatch, caplog):
    engine = write_one(tmp_path)
    (tmp_path / ".global_step1.partial").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", failing(errno.ENOTEMPTY))
        for number in range(3):
            engine.save_checkpoint(str(tmp_path), client_state={"number": number})
        engine.wait_for_checkpoint()
    assert engine.load_checkpoint(str(tmp_path))[1] == {"number": 2} and "could not delete" in caplog.text
    engine.save_checkpoint(str(tmp_path))
    engine.wait_for_checkpoint()
    assert not list(tmp_path.glob(".*.partial"))


def leftovers(directory) -> list[str]:
    return sorted(p.name for p in directory.glob(".global*"))


def visible(directory) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if not p.name.startswith("."))
