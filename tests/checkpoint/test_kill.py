"""Jobs whose ranks are killed at any instant, and disks that fill up: what is saved stays whole, and training goes on from it."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megazero import comm, mpu
from megazero.checkpoint.commands.verify import verify
from megazero.checkpoint.tags import latest_tag, list_tags
from megazero.checkpoint.tensor_file import ChecksummedStream
from megazero.engine import Engine
from megazero.zero import ZeroConfig
from tests.checkpoint.engines import engine_of
from tests.ranks import _context, run_ranks
from tests.test_training import start_job
from tests.tiny import TINY_MODEL, make_corpus, run_job
from tests.zero.models import one_step

STEPS, EVERY = 12, 2
GRACE_S = 15.0


class Net(nn.Module):
    """Cut in both directions, and not at all; large enough for a file to be written in several pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = mpu.VocabParallelEmbedding(16, 48, padded_num_embeddings=16)
        self.up = mpu.ColumnParallelLinear(48, 96, gather_output=False)
        self.down = mpu.RowParallelLinear(96, 48, input_is_parallel=True)
        self.norm = nn.LayerNorm(48)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.down(torch.tanh(self.up(self.embedding(tokens))))).square().mean()


@dataclass(frozen=True)
class Layout:
    """How the two ranks train and save."""

    model_parallel_size: int = 1
    stage: int = 1
    in_background: bool = False


@dataclass(frozen=True)
class Kill:
    """Which rank dies, and when: at the `number`-th call of something in its life, or `delay_s` seconds after its start."""

    rank: int
    what: str
    number: int = 0
    delay_s: float = 0.0


def make_engine(layout: Layout) -> Engine:
    mpu.initialize_model_parallel(layout.model_parallel_size)
    mpu.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    return engine_of(Net(), torch.optim.AdamW, lr=0.02, decay=0.1, zero=ZeroConfig(stage=layout.stage))


def train(engine: Engine, layout: Layout, directory: str, die: Any) -> None:
    """Trains on random data to the end, from where the latest checkpoint is, and saves in between."""
    engine.saver.claim(directory)
    losses: list[float] = []
    if latest_tag(directory) is not None:
        comm.barrier()
        losses = engine.load_checkpoint(directory)[1]["losses"]
    while engine.global_steps < STEPS:
        die("step")
        tokens = (torch.randint(0, 16, (2, 8)) + engine.groups.data_parallel_rank) % 16
        losses = [*losses, float(one_step(engine, tokens))]
        if engine.global_steps % EVERY == 0:
            client = {"losses": losses}
            engine.save_checkpoint(directory, client_state=client, keep_last=2, in_background=layout.in_background)
    engine.wait_for_checkpoint()


POINTS = {
    # What of a save can be the last thing that a rank does: owner and name of a function, on the ranks that call it.
    "write": (ChecksummedStream, "write"),
    "fsync": (os, "fsync"),
    "rename": (os, "rename"),
    "replace": (os, "replace"),
    "mkdir": (os, "mkdir"),
    "rmtree": (shutil, "rmtree"),
    "unlink": (os, "unlink"),
}
OF_THE_FIRST_RANK = ("rename", "replace", "mkdir", "rmtree", "unlink")


def dying(kill: Kill | None, rank: int) -> Any:
    """A function that kills this process when it is called as often as `kill` says; it is put before and after real ones."""
    calls = 0

    def count(what: str) -> None:
        nonlocal calls
        if kill is not None and kill.rank == rank and kill.what == what:
            calls += 1
            if calls == kill.number:
                os.kill(os.getpid(), signal.SIGKILL)

    for what, (owner, name) in POINTS.items():
        original = getattr(owner, name)

        def counted(*args: Any, _original: Any = original, _what: str = what, **options: Any) -> Any:
            count(_what)
            result = _original(*args, **options)
            count(_what)  # "after" is another instant than "before"
            return result

        setattr(owner, name, counted)
    return count


def rank_main(rank: int, store: str, directory: str, layout: Layout, kill: Kill | None, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    stacks = open(f"{store}.stack{rank}", "w")  # noqa: SIM115 (for as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    engine = make_engine(layout)
    die = dying(kill, rank)
    comm.barrier()
    pipe.send("ready")
    try:
        train(engine, layout, directory, die)
        pipe.send("done")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        os._exit(1)  # as after an error under a launcher; nothing is waited for
    os._exit(0)


@dataclass
class Life:
    """How both ranks have ended.

    Attributes:
        codes, words: exit status and last message of each rank.
        seconds: from when both were ready to the end.
        stack: where a rank still waited GRACE_S after the other had ended; launchers kill such a rank, and so did we.
    """

    codes: list[int]
    words: list[str]
    seconds: float
    stack: str = ""


def run_life(directory: Path, layout: Layout, kill: Kill | None) -> Life:
    """Starts both ranks, kills as asked, and waits for both."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(2):
            reader, writer = _context.Pipe(duplex=False)
            arguments = (rank, f"{folder}/store", str(directory), layout, kill, writer)
            process = _context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            writer.close()
            pipes.append(reader)
            ranks.append(process)
        try:
            for reader in pipes:
                assert reader.poll(60) and reader.recv() == "ready"
            start = time.perf_counter()
            if kill is not None and kill.what == "time":
                time.sleep(kill.delay_s)
                with suppress(ProcessLookupError):
                    os.kill(ranks[kill.rank].pid, signal.SIGKILL)
            wait([process.sentinel for process in ranks], timeout=120)
            seconds, stack = 0.0, ""
            for rank, process in enumerate(ranks):
                process.join(timeout=GRACE_S)
                seconds = max(seconds, time.perf_counter() - start)
                if process.exitcode is None:
                    os.kill(process.pid, signal.SIGUSR1)
                    time.sleep(0.5)
                    stack = Path(f"{folder}/store.stack{rank}").read_text()
                    process.kill()
                    process.join()
            return Life([process.exitcode for process in ranks], [_last_word(r) for r in pipes], seconds, stack)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()


def _last_word(reader: Any) -> str:
    word = ""
    with suppress(EOFError):
        while wait([reader], timeout=0):
            word = reader.recv()
    return word


def check_whole(directory: Path) -> None:
    """What `latest` names is whole, and so is every other checkpoint that can be seen."""
    tags, latest = list_tags(directory), latest_tag(directory)
    assert latest is None or latest in tags, f"latest names {latest}, there are {tags}"
    for tag in tags:
        assert not verify(directory, tag).problems, tag


def final_state(directory: Path) -> tuple[dict[str, bytes], Any]:
    """The ranks' files at the end, byte for byte: weights, moments and generators. And the client state."""
    path = directory / f"global_step{STEPS}"
    index = json.loads((path / "index.json").read_bytes())
    return {file.name: file.read_bytes() for file in sorted(path.glob("rank_*"))}, index["client_state"]


@dataclass
class Tally:
    """What has happened in all lives of a chain of jobs."""

    kills: Counter = field(default_factory=Counter)  # by instant
    resumes: int = 0
    from_scratch: int = 0
    chains: int = 0
    slowest_end_s: float = 0.0  # of the rank that was left
    stacks: list[str] = field(default_factory=list)  # of those that did not end by themselves


def random_kill(rng: random.Random, life_s: float, layout: Layout) -> Kill:
    """Any rank, at any instant of a whole life, in training or while saving."""
    if rng.random() < 0.4:
        return Kill(rng.randrange(2), "time", delay_s=rng.uniform(0, life_s))
    what = rng.choice(["step", *POINTS])
    rank = 0 if what in OF_THE_FIRST_RANK else rng.randrange(2)
    # How often each is called, and counted before and after, in a save; roughly, and several saves follow each other.
    per_save = {
        "step": EVERY,
        "write": 40,
        "fsync": 8 if rank == 0 else 2,
        "rename": 4,
        "replace": 3,
        "mkdir": 2,
        "rmtree": 4,
    }
    return Kill(rank, what, number=rng.randint(1, 3 * per_save.get(what, 6)))


def chain(
    directory: Path, layout: Layout, wanted: Any, rng: random.Random, life_s: float, kills: int, tally: Tally
) -> None:
    """One job that is killed `kills` times and started again each time, until it is done; compares with the uninterrupted one."""
    tally.chains += 1
    while True:
        started_at = latest_tag(directory) if directory.exists() else None
        if started_at is not None:
            tally.resumes += 1
        else:
            tally.from_scratch += 1
        kill = random_kill(rng, life_s, layout) if kills > 0 else None
        life = run_life(directory, layout, kill)
        check_whole(directory)
        if life.codes == [0, 0]:  # also where the instant never came
            break
        assert kill is not None, f"failed without having been killed: {life.words}"
        assert life.codes[kill.rank] == -signal.SIGKILL, (kill, life)
        kills -= 1
        tally.kills[f"{kill.what}, rank {kill.rank}"] += 1
        tally.slowest_end_s = max(tally.slowest_end_s, life.seconds - kill.delay_s)
        # torch notices a rank that has died everywhere but in its store, where new groups of processes are made and where
        # the ranks of a host meet before they share memory: there they wait for the timeout, or the launcher.
        assert not life.stack or "new_group" in life.stack or "meeting.py" in life.stack, life.stack
        tally.stacks += [life.stack] if life.stack else []
    assert final_state(directory) == wanted
    tags, last = list_tags(directory), f"global_step{STEPS}"
    assert tags[-2:] == [f"global_step{STEPS - EVERY}", last]
    # Killed between the last checkpoint and the deletion of older ones, a job has nothing left to save, and so to delete.
    assert len(tags) == 2 or started_at == last, tags
    left = {path.name for path in directory.iterdir()}
    assert left == {".lock", "latest", "zero_to_fp32.py", *list_tags(directory)}, left


def killed_jobs(tmp_path: Path, layout: Layout, kills: int, seed: int) -> Tally:
    """Chains of at most 4 kills each, until there were as many as asked."""
    rng, tally = random.Random(seed), Tally()
    whole = run_life(tmp_path / "whole", layout, None)
    assert whole.codes == [0, 0], whole
    wanted = final_state(tmp_path / "whole")
    while tally.kills.total() < kills:
        number = min(4, kills - tally.kills.total())
        chain(tmp_path / f"chain{tally.chains}", layout, wanted, rng, whole.seconds, number, tally)
    return tally


@pytest.mark.parametrize("in_background", [False, True], ids=["saved at once", "saved in the background"])
def test_training_that_is_killed_and_resumed_equals_the_whole_run_bit_for_bit(tmp_path, in_background):
    killed_jobs(tmp_path, Layout(in_background=in_background), 2, seed=int(in_background))


LAYOUTS = [Layout(), Layout(in_background=True), Layout(2, 0), Layout(1, 3), Layout(1, 3, True)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills_at_random_instants(tmp_path):
    start = time.perf_counter()
    total = Tally()
    for number, layout in enumerate(LAYOUTS):
        tally = killed_jobs(tmp_path / str(number), layout, 10, seed=100 + number)
        total.kills += tally.kills
        total.resumes += tally.resumes
        total.from_scratch += tally.from_scratch
        total.chains += tally.chains
        total.stacks += tally.stacks
        total.slowest_end_s = max(total.slowest_end_s, tally.slowest_end_s)
    print(f"\n{total.kills.total()} kills in {time.perf_counter() - start:.0f} s: {total}", *total.stacks)
    assert total.kills.total() == 50


# ---- the real job


def descendants(pid: int) -> list[int]:
    """Processes that `pid` has started, and those that they have."""
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        children += [int(child) for child in task.read_text().split()]
    return [*children, *(deeper for child in children for deeper in descendants(child))]


def rank_processes(launcher: int) -> list[int]:
    found = []
    for pid in descendants(launcher):
        with suppress(OSError):
            if b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("more", [(), ("--async-save",)], ids=["", "async"])
def test_job_of_which_a_rank_is_killed_again_and_again_equals_the_whole_run(tmp_path, more):
    flags = [
        *TINY_MODEL,
        *make_corpus(tmp_path / "corpus"),
        "--train-iters",
        "60",
        "--save-interval",
        "3",
        "--keep-last",
        "2",
    ]
    flags += ["--hidden-dropout", "0.1", *more]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_job([*flags, "--save", str(whole)], 2).returncode == 0
    rng, kills = random.Random(2), 0
    while kills < 5:
        before = latest_tag(cut) if cut.exists() else None
        process = start_job([*flags, "--save", str(cut), "--load", str(cut)], 2)
        end = time.time() + 100
        while time.time() < end and process.poll() is None and (not cut.exists() or latest_tag(cut) == before):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        ranks = rank_processes(process.pid)
        if not ranks:
            break  # it has come to its end before
        os.kill(rng.choice(ranks), signal.SIGKILL)
        kills += 1
        process.communicate(timeout=100)
        check_whole(cut)
    assert kills, "the job was never killed"
    done = run_job([*flags, "--save", str(cut), "--load", str(cut)], 2)
    assert done.returncode == 0 and "continuing after iteration" in done.stdout, done.stdout
    files = [{p.name: p.read_bytes() for p in (save / "global_step60").glob("rank_*")} for save in (whole, cut)]
    assert files[0] == files[1] and files[0]


# ---- disks that fill up


class SmallDisk:
    """A file system of its own, of which all but some pages can be filled."""

    def __init__(self, path: Path) -> None:
        self.path, self.ballast = path, path / "ballast"

    def leave(self, nbytes: int) -> None:
        """Leaves `nbytes` free, or whatever there is."""
        self.ballast.unlink(missing_ok=True)
        room = shutil.disk_usage(self.path).free - nbytes
        if room > 0:
            self.ballast.write_bytes(bytes(room))


def full_disk_case(path: str, in_background: bool) -> list[str]:
    """Saves with ever more room on the disk, until it is enough; what each rank was told every time."""
    disk, directory = SmallDisk(Path(path)), f"{path}/save"
    is_first, told = dist.get_rank() == 0, []
    engine = make_engine(Layout())
    room = 0
    while True:
        one_step(engine, torch.randint(0, 16, (2, 8)))
        if engine.global_steps == 1:
            engine.save_checkpoint(directory)
            continue
        comm.barrier()
        if is_first:
            disk.leave(room)
        comm.barrier()
        try:
            client = {
                "text": "of more than a page, so that the index can be too large where the ranks' files are not " * 200
            }
            engine.save_checkpoint(directory, client_state=client, in_background=in_background)
            engine.wait_for_checkpoint()
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
            comm.barrier()
            # The checkpoint is whole and only `latest` could not be moved, or it has gone without a trace.
            tags = [tag for tag in list_tags(directory) if tag != f"global_step{engine.global_steps}"]
            assert latest_tag(directory) == "global_step1" and "global_step1" in tags, tags
            assert not list(Path(directory).glob(".*.partial")) and not list(Path(directory).glob("*.tmp*"))
            check_whole(Path(directory))
        else:
            assert latest_tag(directory) == f"global_step{engine.global_steps}"
            engine.load_checkpoint(directory, tag="global_step1")  # the old one is as good as before
            assert engine.global_steps == 1
            return told
        comm.barrier()
        if is_first:
            disk.leave(10**9)
            for tag in list_tags(directory):
                if tag != "global_step1":
                    shutil.rmtree(Path(directory) / tag)
        comm.barrier()
        room += 4096


@pytest.fixture
def small_disk(tmp_path):
    """The path of an empty file system of 2 MiB."""
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("in_background", [False, True], ids=["saved at once", "saved in the background"])
def test_disk_that_is_full_at_any_moment_of_a_save_is_told_to_all_ranks_and_does_no_harm(small_disk, in_background):
    by_rank = run_ranks(2, full_disk_case, str(small_disk), in_background)
    assert len(by_rank[0]) == len(by_rank[1]) > 10
    for messages in by_rank:
        for message in messages:
            assert "No space left on device" in message, message
            assert "could not write" in message and str(small_disk) in message, message
    written = {Path(re.search(r"could not write (\S+):", message)[1]).name for message in by_rank[0]}
    assert {"rank_00000.safetensors", "index.json", "latest"} <= written


def limited_case(directory: str) -> list[str]:
    """On the second rank alone, files cannot grow beyond 8 KiB, as under a quota."""
    engine = make_engine(Layout())
    told = []
    for limit in (8192, resource.RLIM_INFINITY):
        one_step(engine, torch.randint(0, 16, (2, 8)))
        if engine.global_steps == 1:
            engine.save_checkpoint(directory)
        if dist.get_rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            engine.save_checkpoint(directory, tag=f"limit{limit}")
            told.append("saved")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
            assert latest_tag(directory) == "global_step1" and list_tags(directory) == ["global_step1"]
    assert not list(Path(directory).glob(".*.partial"))
    return told


def test_files_of_one_rank_that_cannot_grow_are_told_to_all_and_the_job_goes_on(tmp_path):
    first, second = run_ranks(2, limited_case, str(tmp_path))
    assert re.search(
        r"^OSError: .* was not saved: rank 1 .*could not write .*rank_00001.safetensors: File too large", first[0]
    )
    assert re.search(r"^OSError: .*could not write .*rank_00001.safetensors: File too large", second[0])
    assert first[1] == second[1] == "saved" and latest_tag(tmp_path) == f"limit{resource.RLIM_INFINITY}"
