"""The ordered map over processes: order, bounds, errors, and workers that never outlive their use."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from megazero.lines.outputs import FullDiskError
from megazero.lines.workers import ordered_map

ROOT = Path(__file__).resolve().parents[2]


def slow_if_even(number):
    time.sleep(0.03 if number % 2 == 0 else 0)
    return number * number


def first_is_slow(folder, number):
    """The first one is done a while after the sixth."""
    (folder / str(number)).touch()
    until = time.monotonic() + 60
    while number == 0 and not (folder / "5").exists() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.3 if number == 0 else 0)
    return number


def fails(number):
    return 1 // (number - 3)


def exits(number):
    sys.exit("no more")


def refuses(number):
    raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad") if number else FullDiskError(28, "no room")


class OfAFile:
    """As a tokenizer, which reads its vocabulary again in a worker."""

    def __reduce__(self):
        return open, ("vocab.json.gone",)


def dies(number):
    os._exit(9)


def children():
    return [p for p in multiprocessing.active_children() if p.name.startswith("ForkServerProcess")]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 25])
def test_results_come_in_order(workers, count):
    assert list(ordered_map(slow_if_even, range(count), workers)) == [(n, n * n) for n in range(count)]
    assert not children()


def test_items_are_not_taken_far_ahead_of_a_slow_one(tmp_path):
    taken = []
    numbers = (taken.append(n) or n for n in range(10**9))
    with closing(ordered_map(partial(first_is_slow, tmp_path), numbers, 2)) as results:
        assert next(results) == (0, 0)
        assert len(taken) == 6, "three for each worker"
    assert not children()


def test_large_items_and_results_do_not_block_each_other():
    items = [b"x" * 3_000_000 for _ in range(8)]
    for item, result in ordered_map(bytes, items, 2):
        assert result == item


def test_a_function_that_ends_its_process_is_named():
    with pytest.raises(RuntimeError, match="(?s)a worker process failed.*in exits.*SystemExit: no more"):
        list(ordered_map(exits, range(3), workers=2))


def test_error_in_a_worker_holds_its_traceback():
    with pytest.raises(RuntimeError, match="(?s)a worker process failed.*in fails.*ZeroDivisionError"):
        list(ordered_map(fails, range(9), 2))
    assert not children()


UNGUARDED = """
from megazero.lines.workers import ordered_map

print(list(ordered_map(abs, range(9), 2)))
"""


def test_a_script_without_a_guarded_main_is_told_so(tmp_path):
    (tmp_path / "script.py").write_text(UNGUARDED)
    command, environment = [sys.executable, str(tmp_path / "script.py")], {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and "memory" not in run.stderr
    assert run.stderr.splitlines()[-1].endswith("under if __name__ == '__main__'.")


def test_dead_worker_is_an_error_not_a_hang():
    with pytest.raises(RuntimeError, match="a worker process died.*fewer --workers"):
        list(ordered_map(dies, range(9), 2))
    assert not children()


INTERRUPTED = """
import sys, time
from megazero.lines.workers import ordered_map
def endless(n):
    time.sleep(0.01)
    return n
if __name__ == "__main__":
    for n, _ in ordered_map(endless, iter(int, 1), 2):
        print("at work", flush=True)
"""


def start(folder):
    """A run of the program above in a group of its own, at work."""
    (folder / "run.py").write_text(INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, str(folder / "run.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"at work\n"
    return process


@pytest.mark.parametrize("times", [1, 2, 3])
def test_control_c_pressed_any_number_of_times_ends_it(tmp_path, times):
    process = start(tmp_path)
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    try:
        _, errors = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0 and b"in _work" not in errors, "workers say nothing"


STARTING = """
import signal
from megazero.lines.workers import ordered_map
def is_held(_):
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
if __name__ == "__main__":
    print([held for _, held in ordered_map(is_held, range(3), 2)], is_held(0))
"""


def test_control_c_does_not_reach_workers_that_are_just_starting(tmp_path):
    (tmp_path / "run.py").write_text(STARTING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, tmp_path / "run.py"], env=environment, capture_output=True, check=True)
    assert done.stdout == b"[True, True, True] False\n"


def running(group):
    """Processes of a process group that have not ended (zombies, which nobody may reap in a container, have)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(pgrp) == group and state != "Z":
            found.append(stat.parent.name)
    return found


def test_workers_end_when_the_run_is_killed(tmp_path):
    process = start(tmp_path)
    assert len(running(process.pid)) > 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while (left := running(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert not left, "workers outlive the run"


def test_workers_that_cannot_be_started_are_told_with_what_they_need(tmp_path):
    script, temporary = tmp_path / "maps.py", tmp_path / ("x" * 100)
    temporary.mkdir()  # newer versions of Python put the server's socket elsewhere then
    script.write_text(
        "from megazero.lines.workers import ordered_map\n"
        "if __name__ == '__main__': print(list(ordered_map(abs, [1, 2], 2)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    said = "worker processes cannot be started: AF_UNIX path too long. They need files and processes within `ulimit`"
    assert done.returncode == 0 or said in done.stderr, done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_of_the_input_and_of_the_machine_come_as_they_are(workers):
    with pytest.raises(FullDiskError, match="no room"):
        list(ordered_map(refuses, [0], workers))
    with pytest.raises(UnicodeDecodeError, match="0xff"):
        list(ordered_map(refuses, [1], workers))
    assert not children()


def test_a_file_that_a_worker_cannot_read_before_its_first_item_is_named():
    with pytest.raises(FileNotFoundError, match=r"vocab\.json\.gone"):
        list(ordered_map(OfAFile(), range(9), 2))
    assert not children()
