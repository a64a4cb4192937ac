"""What a machine and its control groups leave a process, read from files that a test has written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megazero.cgroups import available_cores, available_host_memory
from megazero.launch import share_cores
from megazero.runner import bind

CORES, GIB = 12, 2**30


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A host on whose 12 cores this process may run."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)), raising=False)


def machine(root: Path, files: dict[str, str]) -> Path:
    """A folder with the files of /proc and /sys."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
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
    groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    assert available_cores(machine(tmp_path, {"proc/self/cgroup": listing, **groups})) == cores


def test_without_proc_it_is_the_cores_to_run_on(tmp_path):
    assert available_cores(tmp_path) == CORES


def test_ranks_share_the_cores_that_a_quota_leaves(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("megazero.launch.available_cores", lambda: 5)
    share_cores(2)
    assert os.environ["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(("quota", "threads"), [(5, "2"), (1, "1"), (CORES, "6")])
def test_ranks_that_are_bound_to_cores_have_no_more_threads_than_a_quota_leaves(monkeypatch, quota, threads):
    bound, started = [], []
    monkeypatch.setattr(sys, "argv", ["bind", "", "python", "x.py"])
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.extend(cores), raising=False)
    monkeypatch.setattr(os, "execvp", lambda _, command: started.append((command, os.environ["OMP_NUM_THREADS"])))
    monkeypatch.setattr(bind, "available_cores", lambda: quota)
    bind.main()
    assert bound == [6, 7, 8, 9, 10, 11] and started == [(["python", "x.py"], threads)]


MEMINFO = f"MemTotal:       {64 * GIB // 1024} kB\nMemFree:  1000 kB\nMemAvailable:   {40 * GIB // 1024} kB\n"


def test_without_a_cgroup_the_kernels_estimate_counts(tmp_path):
    assert available_host_memory(machine(tmp_path, {"proc/meminfo": MEMINFO})) == 40 * GIB


def test_without_proc_nothing_is_known(tmp_path):
    assert available_host_memory(tmp_path) is None


def test_a_cgroup_of_version_2_and_those_around_it_limit_what_is_left_and_cache_counts_as_free(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": str(GIB),
        "sys/fs/cgroup/job/memory.max": str(8 * GIB),
        "sys/fs/cgroup/job/memory.current": str(3 * GIB),
        "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    assert available_host_memory(machine(tmp_path, files)) == 6 * GIB


def test_in_a_container_the_mount_is_the_containers_own_group(tmp_path):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": str(5 * GIB),
        "sys/fs/cgroup/memory.current": str(2 * GIB),
    }
    assert available_host_memory(machine(tmp_path, files)) == 3 * GIB
    files["proc/self/cgroup"] = "0::/docker/of/the/host\n"  # is not there inside
    assert available_host_memory(machine(tmp_path, files)) == 3 * GIB


def test_a_cgroup_of_version_1(tmp_path):
    files = {
        "proc/self/cgroup": "9:cpu:/x\n5:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    assert available_host_memory(machine(tmp_path, files)) == 3.5 * GIB


def test_more_than_the_limit_in_use_leaves_nothing(tmp_path):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000",
        "sys/fs/cgroup/memory.current": "2000",
    }
    assert available_host_memory(machine(tmp_path, files)) == 0
