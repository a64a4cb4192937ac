"""Which ranks the others wait for: the judgment, and a job whose log names one."""

from __future__ import annotations

import re

import pytest

from megazero.late_ranks import late_ranks
from tests.ranks import run_script
from tests.tiny import TINY_MODEL, make_corpus


@pytest.mark.parametrize(
    ("waits", "late", "longer"),
    [
        ([54, 1], [1], 53),
        ([50, 51, 2, 53, 52], [2], 49.5),
        ([1, 60, 2, 61, 60, 62], [0, 2], 59),  # of one host, or with layers in common
        ([30, 1, 60, 61], [0, 1], 45),  # the fastest wait for both
        ([1, 2, 60], [], 0),  # one that is early makes the others no exception
        ([24, 15], [], 0),  # too little
        ([20, 22, 21, 19], [], 0),  # late by turns
        ([5], [], 0),
    ],
)
def test_who_waits_notably_less_than_all_others_is_late(waits, late, longer):
    assert late_ranks(waits, notable_s=10) == (late, longer)


# The clock of a rank moves only while it waits for others: each time by 1000 s on the first rank, not at all on the second.
SCRIPT = """
import os
from types import SimpleNamespace

import pretrain_gpt2
from megazero import late_ranks, timers
from megazero.comm import lane
from megazero.entry import run_script

now, late_ranks.ENOUGH = 0, 3
wait = lane._Job.wait


def slow_wait(job):
    global now
    wait(job)
    now += 1000 * (os.environ["RANK"] == "0")


lane._Job.wait = slow_wait
timers.time = SimpleNamespace(perf_counter=lambda: now)
run_script(pretrain_gpt2.check, pretrain_gpt2.main)
"""


@pytest.mark.parametrize(("stage", "reductions", "gathers"), [(0, 2, 0), (1, 2, 2), (2, 2, 2), (3, 3, 4)])
def test_all_waits_for_other_ranks_are_phases_and_a_rank_that_waits_little_is_named(
    tmp_path, stage, reductions, gathers
):
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = f"--zero-stage {stage} --train-iters 7 --log-interval 1 --eval-interval 2 --eval-iters 2".split()
    done = run_script(2, str(tmp_path / "script.py"), [*TINY_MODEL, *make_corpus(tmp_path), *flags])
    assert done.returncode == 0, done.stdout
    for phase, waits in (("allreduce", reductions), ("allgather", gathers)):
        seconds = re.findall(rf"\| {phase}: (\d+)", done.stdout)
        assert seconds[-6:] == [str(waits * 1_000_000)] * (6 if waits else 0), done.stdout  # evaluations add nothing
    longer = f"the other ranks wait {reductions + gathers}000000.00 ms longer per iteration, for rank 1 on "
    assert done.stdout.count(longer) == 2 == done.stdout.count("the other ranks wait"), done.stdout
