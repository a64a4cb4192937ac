"""What the control groups of a process leave it, read from files that a test has written. Memory: tests/plan/test_limits.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megazero.cgroups import available_cores
from megazero.launch import share_cores

CORES = 12


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A host on whose 12 cores this process may run."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)), raising=False)


def machine(root: Path, listing: str, files: dict[str, str]) -> Path:
    """A folder with /proc/self/cgroup and with files of /sys/fs/cgroup."""
    named = {
        root / "proc/self/cgroup": listing,
        **{root / "sys/fs/cgroup" / name: text for name, text in files.items()},
    }
    for path, text in named.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("listing", "files", "cores"),
    [
        ("0::/", {}, CORES),
        ("0::/job", {"job/cpu.max": "max 100000"}, CORES),
        ("0::/", {"cpu.max": "400000 100000"}, 4),  # in a container, the mount is its own group
        ("0::/docker/of/the/host", {"cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "1250000 100000"}, CORES),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000", "cpu.max": "800000 100000"}, 3),
        ("3:cpu,cpuacct:/a\n2:memory:/", {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "50000"}, 3),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, CORES),
    ],
)
def test_cores_are_those_to_run_on_and_no_more_than_the_smallest_quota_rounded_up(tmp_path, listing, files, cores):
    assert available_cores(machine(tmp_path, listing, files)) == cores


def test_without_proc_it_is_the_cores_to_run_on(tmp_path):
    assert available_cores(tmp_path) == CORES


def test_ranks_share_the_cores_that_a_quota_leaves(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("megazero.launch.available_cores", lambda: 5)
    share_cores(2)
    assert os.environ["OMP_NUM_THREADS"] == "2"
