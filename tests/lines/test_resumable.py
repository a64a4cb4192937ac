"""Work on shards: what a worker is given, whose results they are, and partial files that cannot be opened or read."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import resource
from functools import partial
from types import SimpleNamespace

import pytest

from megazero.lines import partial_shard
from megazero.lines.partial_shard import PartialShard, Shard
from megazero.lines.progress import Progress
from megazero.lines.results import BlockResult, Counts
from megazero.lines.resumable import WorkOptions, fill, useful_workers
from tests.bad_disks import fails, full, largest_file


def copied(item):
    """The block as it is."""
    data = item[1].read()
    return BlockResult([data], Counts(lines=data.count(b"\n"), text_bytes_in=len(data)))


def weighed(sizes, item):
    sizes.append(len(pickle.dumps(item)))
    return copied(item)


def shards_of(folder, *contents):
    """A shard of each list of texts, which become a file each."""
    for number, texts in enumerate(contents):
        inputs = [folder / f"{number}-{i:03}.txt" for i in range(len(texts))]
        for path, text in zip(inputs, texts, strict=True):
            path.write_text(text)
        yield Shard(tuple(inputs), (folder / f"{number}.out",), folder / f"{number}.out")


def filled(shards, work, workers=1, block_bytes=4):
    """The bytes of the output of each shard."""
    partials = (PartialShard(shard, "key") for shard in shards)
    made = []
    for each in fill(partials, work, WorkOptions(workers, block_bytes=block_bytes), Progress("test", 1)):
        made.append(each.paths[0].read_bytes())
        each.remove()
    return made


def test_what_a_worker_is_given_does_not_grow_with_the_inputs(tmp_path):
    weights = []
    for count in (1, 200):
        sizes = []
        assert filled(shards_of(tmp_path, ["line\n"] * count), partial(weighed, sizes)) == [b"line\n" * count]
        assert len(sizes) == count
        weights.append(max(sizes))
    assert weights[1] < weights[0] + 20


@pytest.mark.parametrize("workers", [1, 2])
def test_results_go_to_their_own_shards_and_empty_ones_are_made_too(tmp_path, workers):
    contents = [[], ["a\nb\n" * 9, "c\n"], [""], ["d\n"], ["e\n" * 20, "", "f\n"], [], [""]]
    shards = shards_of(tmp_path, *contents)
    assert filled(shards, copied, workers) == ["".join(texts).encode() for texts in contents]
    assert not list(tmp_path.glob("*.out*"))


def test_more_empty_shards_in_a_row_than_a_process_may_have_open_by_default(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 60, hard))
    try:
        assert filled(shards_of(tmp_path, *[[""]] * 60, ["a\n"]), copied) == [*[b""] * 60, b"a\n"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("sizes, workers", [([], 1), ([0], 1), ([8], 2), ([5, 4], 3), ([80], 9)], ids=str)
def test_there_are_no_more_workers_than_blocks(tmp_path, sizes, workers):
    (shard,) = shards_of(tmp_path, ["a" * size for size in sizes])
    assert useful_workers(shard.inputs, block_bytes=4, most=9) == workers


@pytest.mark.parametrize("name", ["_cut", "write_whole"])
def test_a_full_disk_at_the_start_does_not_keep_the_lock(tmp_path, monkeypatch, name):
    (shard,) = shards_of(tmp_path, ["a\n"])
    with monkeypatch.context() as patch:
        patch.setattr(partial_shard, name, full)
        with pytest.raises(OSError) as error:
            PartialShard(shard, "key")
    assert filled([shard], copied) == [b"a\n"]
    assert error.value.errno == errno.ENOSPC  # whose traceback has kept the shard alive until here


def test_an_output_that_cannot_be_written_or_synced_is_named(tmp_path, monkeypatch):
    (shard,) = shards_of(tmp_path, ["a\n"])
    stopped = PartialShard(shard, "key")
    with largest_file(1 << 16), pytest.raises(OSError, match=f"File too large: '{stopped.paths[1]}'"):
        stopped.append(b"a\n", bytes(1 << 19))
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=f"Input/output error: '{stopped.paths[0]}'"):
        stopped.commit()
    stopped.close()


def test_a_commit_is_made_when_the_one_before_is_old_enough(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0, monotonic=lambda: clock.now)
    monkeypatch.setattr(partial_shard, "time", clock)
    (shard,) = shards_of(tmp_path, ["a\n"])
    running, committed = PartialShard(shard, "key"), []
    for clock.now in range(1, 5):
        running.append(b"a", b"")
        running.commit(interval_s=2)
        committed.append(json.loads((tmp_path / "0.out.partial.json").read_bytes())["sizes"][0])
    running.close()
    assert committed == [0, 2, 2, 4]


@pytest.mark.parametrize("part", ["position", "counts"])
def test_a_journal_with_other_fields_is_started_over(tmp_path, caplog, part):
    (shard,) = shards_of(tmp_path, ["a\nb\n"])
    stopped = PartialShard(shard, "key")
    stopped.append(b"a\n", b"")
    stopped.commit()
    stopped.close()
    journal = tmp_path / "0.out.partial.json"
    content = json.loads(journal.read_bytes())
    content["state"][part]["unheard_of"] = 1
    journal.write_text(json.dumps(content))
    assert filled([shard], copied) == [b"a\nb\n"]
    assert "0.out.partial.json is damaged" in caplog.text and "starting over" in caplog.text


def test_the_name_of_a_bar_does_not_command_the_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("reading a\x1b[2J.jsonl", 10) as progress:
        progress.update(1, 10, 10)
    assert "reading a\\x1b[2J.jsonl: 100%" in terminal.getvalue() and "\x1b[2J" not in terminal.getvalue()
