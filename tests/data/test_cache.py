"""The cache of arrays: whole entries only, many writers at once, damage and unwritable folders are clear errors."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import multiprocessing
import os
import time

import numpy as np
import pytest

from megazero.data.cache import ArrayCache
from megazero.lines.contents import key_of
from tests.bad_disks import failing, largest_file

DESCRIPTION = {"kind": "k", "name": "n", "seed": 1}


def arrays():
    return {"a": np.arange(5, dtype=np.int32), "b": np.ones((2, 3)), "none": np.empty(0, np.uint32)}


def test_entry_is_stored_with_its_description(tmp_path):
    found = ArrayCache(tmp_path).load_or_build(DESCRIPTION, arrays)
    assert found["a"].tolist() == [0, 1, 2, 3, 4] and found["b"].shape == (2, 3) and not found["a"].flags.writeable
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len(names) == 4 and all(name.startswith("k-n-") for name in names), "nothing is left of writing aside"
    (record,) = tmp_path.glob("*.json")
    assert json.loads(record.read_text())["description"] == {**DESCRIPTION, "format": 3}


def test_built_once(tmp_path):
    cache = ArrayCache(tmp_path)
    cache.load_or_build(DESCRIPTION, arrays)
    cache.load_or_build(dict(reversed(DESCRIPTION.items())), lambda: pytest.fail("built again"))
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1}) != key_of({"a": 1, "b": 3})


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENODEV, r"No such device\. Its file system must"),
        (errno.EMFILE, r"Too many open files\. Raise the limits of open files"),
    ],
)
def test_an_array_that_cannot_be_mapped_is_named_with_what_helps(tmp_path, monkeypatch, code, said):
    monkeypatch.setattr(mmap, "mmap", failing(code))
    with pytest.raises(OSError, match=rf"could not map .*-a\.npy into memory: {said}"):
        ArrayCache(tmp_path).load_or_build(DESCRIPTION, arrays)


@pytest.mark.parametrize("gone", ["*.json", "*-a.npy"])
def test_an_entry_of_which_a_file_is_gone_is_built_again(tmp_path, gone):
    cache = ArrayCache(tmp_path)
    cache.load_or_build(DESCRIPTION, arrays)
    (path,) = tmp_path.glob(gone)  # as a purge of what has not been read for long removes it
    path.unlink()
    built = []
    found = cache.load_or_build(DESCRIPTION, lambda: built.append(1) or arrays())
    assert built and found["a"].tolist() == [0, 1, 2, 3, 4]
    cache.load_or_build(DESCRIPTION, lambda: pytest.fail("built again"))


def test_what_a_killed_process_has_written_aside_is_removed_when_the_entry_is_built(tmp_path):
    ArrayCache(tmp_path).load_or_build(DESCRIPTION, arrays)
    (record,) = tmp_path.glob("*.json")
    record.unlink()
    for leftover in (record.with_name(f"{record.name}.tmp0123abcd"), tmp_path / f"{record.stem}-a.npy.tmp0123abcd"):
        leftover.touch()
        os.utime(leftover, (0, 0))
    new = tmp_path / f"{record.stem}-a.npy.tmp4567abcd"  # of a host whose locks do not reach this one
    new.touch()
    ArrayCache(tmp_path).load_or_build(DESCRIPTION, arrays)
    assert len(list(tmp_path.iterdir())) == 5 and list(tmp_path.glob("*.tmp*")) == [new]


def build_slowly(folder, barrier, results):
    builds = []

    def build():
        builds.append(1)
        time.sleep(0.2)
        return {"a": np.arange(300_000)}

    barrier.wait()
    total = ArrayCache(folder).load_or_build(DESCRIPTION, build)["a"].sum()
    results.put((total, len(builds)))


def test_of_many_processes_at_once_one_builds(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(6), context.Queue()
    processes = [context.Process(target=build_slowly, args=(tmp_path / "new", barrier, results)) for _ in range(6)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    assert {total for total, _ in found} == {300_000 * 299_999 // 2}
    assert sum(builds for _, builds in found) == 1
    for process in processes:
        process.join()
    assert len(list((tmp_path / "new").iterdir())) == 2


@pytest.mark.parametrize("ending", ["*.json", "*-a.npy"])
@pytest.mark.parametrize("damage", ["cut", "pickle", "foreign", "a bit"])
def test_damaged_entry_says_what_to_delete(tmp_path, ending, damage):
    cache = ArrayCache(tmp_path)
    cache.load_or_build(DESCRIPTION, arrays)
    (path,) = tmp_path.glob(ending)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "pickle":
        np.save(path.with_suffix(""), np.array([{}], dtype=object), allow_pickle=True)
        path.with_suffix(".npy").replace(path)
    elif damage == "a bit":
        content = bytearray(path.read_bytes())
        content[-3 if ending == "*-a.npy" else content.index(b"crc32") + 20] ^= 1
        path.write_bytes(content)
    else:
        path.write_text(json.dumps({"description": {}, "crc32": {}}))
    with pytest.raises(ValueError, match="is damaged .*Delete .*k-n-"):
        cache.load_or_build(DESCRIPTION, arrays)


def test_no_bit_of_an_array_s_header_can_flip_unseen(tmp_path):
    """One turns little-endian into big-endian, of which the bytes are the same; some have numpy raise what is no ValueError."""
    cache = ArrayCache(tmp_path)
    want = cache.load_or_build(DESCRIPTION, arrays)["a"].copy()
    (path,) = tmp_path.glob("*-a.npy")
    content = path.read_bytes()
    for bit in range(8 * (len(content) - want.nbytes)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found = cache.load_or_build(DESCRIPTION, arrays)["a"]
        except ValueError as error:
            assert "is damaged" in str(error)
        else:  # of the white space
            assert found.dtype == want.dtype
            np.testing.assert_array_equal(found, want)


def test_unwritable_folder_names_the_flag(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write the index cache .*--data-cache-path"):
        ArrayCache(tmp_path / "file" / "cache").load_or_build(DESCRIPTION, arrays)


@pytest.mark.parametrize("numel", [1 << 16, (1 << 13) - 2])
def test_an_array_that_is_cut_off_somewhere_or_in_its_last_page_is_not_stored(tmp_path, numel):
    refused = pytest.raises(ValueError, match="cannot write the index cache .*: File too large.*--data-cache-path")
    with largest_file(1 << 16), refused:
        ArrayCache(tmp_path).load_or_build(DESCRIPTION, lambda: {"a": np.ones(numel)})
    assert not list(tmp_path.glob("*"))


def test_a_rank_that_misses_what_rank_0_stored_says_so_once(tmp_path, caplog):
    cache = ArrayCache(tmp_path, is_expected=True)
    with caplog.at_level(logging.WARNING, "megazero"):
        cache.load_or_build(DESCRIPTION, arrays)
        cache.load_or_build({**DESCRIPTION, "seed": 2}, arrays)
    assert caplog.text.count("is it not shared between the machines?") == 1
