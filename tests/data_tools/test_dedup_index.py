"""Which signatures belong together: as comparing all with all says, for any memory, any division into files, any workers."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest

from data_tools import dedup_index as index
from data_tools.dedup_signatures import SignatureFiles, ids_path, row_type, same_content, similarity
from data_tools.divided import divided
from data_tools.group_duplicates import named_groups
from data_tools.options import open_files
from tests.lines_run import lines_run

BANDS, ROWS = 4, 3
PERMUTATIONS = BANDS * ROWS
LEAST = 0.7
MB = 1 << 20


def make_rows(count, seed=0):
    """Rows in families: of equal content, of signatures that differ in a few places, and strangers."""
    rng = np.random.default_rng(seed)
    rows = np.zeros(count, dtype=row_type(PERMUTATIONS))
    rows["content"] = rng.integers(0, 1 << 63, size=(count, 2))
    rows["minima"] = rng.integers(0, 1 << 16, size=(count, PERMUTATIONS))
    for place in range(1, count):
        other = int(rng.integers(place))
        match rng.integers(4):
            case 0:
                rows[place] = rows[other]
            case 1:
                changed = rng.choice(PERMUTATIONS, rng.integers(1, 6), replace=False)
                rows["minima"][place] = rows["minima"][other]
                rows["minima"][place, changed] += 1
    return rows


def write(folder, rows, parts):
    """The rows in several files, of which some may be empty."""
    paths = []
    for number, part in enumerate(np.split(rows, np.sort(np.random.default_rng(1).integers(0, len(rows), parts - 1)))):
        paths.append(folder / f"{number}.signatures")
        paths[-1].write_bytes(part.tobytes())
        ids_path(paths[-1]).write_bytes(b"")
    return SignatureFiles(paths, PERMUTATIONS)


def groups_the_slow_way(rows):
    """All with all: equal content, or a common band among the first of each content and enough places in common."""
    first = list(range(len(rows)))

    def join(a, b):
        old, new = max(first[a], first[b]), min(first[a], first[b])
        first[:] = [new if f == old else f for f in first]

    for i in range(len(rows)):
        same = np.flatnonzero(same_content(rows[:i], rows[i : i + 1]))
        if len(same):
            join(int(same[0]), i)
    lone = [i for i in range(len(rows)) if first[i] == i]
    for place, i in enumerate(lone):
        for j in lone[:place]:
            bands = (rows["minima"][i] == rows["minima"][j]).reshape(BANDS, ROWS).all(axis=1)
            if bands.any() and similarity(rows[i : i + 1], rows[j : j + 1])[0] >= LEAST:
                join(j, i)
    return first


@pytest.fixture(scope="module")
def rows_and_groups():
    rows = make_rows(700)
    return rows, groups_the_slow_way(rows)


@pytest.mark.parametrize("parts, workers, memory", [(1, 1, 2048 * MB), (7, 1, 101 * MB), (3, 2, 400 * MB)])
def test_groups_are_those_of_comparing_all_with_all(tmp_path, monkeypatch, rows_and_groups, parts, workers, memory):
    monkeypatch.setattr(index, "CHUNK", 100)  # several chunks
    if memory < 400 * MB:
        monkeypatch.setattr(index, "_BYTES_PER_RECORD", 1 << 16)  # several files of keys
    rows, groups = rows_and_groups
    search = index.Search(BANDS, LEAST, memory, workers, tmp_path / "keys")
    found = index.find_copies(write(tmp_path, rows, parts), search)
    assert found.first.tolist() == groups
    assert found.uncompared == 0 and 0 < found.compared < 5 * len(rows)
    assert not (tmp_path / "keys").exists()


def test_too_little_memory_is_an_error_that_says_how_much_is_needed(tmp_path):
    files = write(tmp_path, make_rows(10), 1)
    with pytest.raises(ValueError, match=r"--memory 150M is too little .* give at least 301M"):
        index.find_copies(files, index.Search(BANDS, LEAST, 150 * MB, 2, tmp_path / "keys"))


def test_keys_are_divided_by_their_highest_bits(tmp_path):
    keys = np.array([0, 1 << 62, (1 << 62) - 1, (1 << 64) - 1, 1 << 62], dtype=np.uint64)
    parts = [index._records(keys, np.arange(5)), index._records(keys[:2], np.arange(5, 7))]
    with divided(tmp_path / "k", parts, "key", 4) as paths:
        records = [np.fromfile(path, dtype=index._RECORD) for path in paths]
        assert [part["document"].tolist() for part in records] == [[0, 2, 5], [1, 4, 6], [3]]
    assert not (tmp_path / "k").exists()


def test_documents_of_one_key_come_apart_into_those_that_agree(tmp_path):
    rows = make_rows(6)
    rows["minima"][:] = np.arange(6)[:, None] % 2  # 0 2 4 and 1 3 5
    rows["content"] = np.arange(12).reshape(6, 2)
    records = np.array([(7, d) for d in range(6)] + [(8, 0), (9, 1), (9, 2)], dtype=index._RECORD)
    records.tofile(tmp_path / "keys")
    agree = lambda a, b: similarity(a, b) >= LEAST  # noqa: E731
    pairs, compared, uncompared = index.pairs_of(write(tmp_path, rows, 2), agree, tmp_path / "keys")
    assert sorted(map(tuple, pairs.tolist())) == [(0, 2), (0, 4), (1, 3), (1, 5)]
    assert (compared, uncompared) == (5 + 3 + 3 + 2 + 1, 0)


def test_n_copies_take_n_comparisons(tmp_path):
    rows = np.repeat(make_rows(1), 300)
    np.array([(7, d) for d in range(300)], dtype=index._RECORD).tofile(tmp_path / "keys")
    pairs, compared, uncompared = index.pairs_of(write(tmp_path, rows, 2), same_content, tmp_path / "keys")
    assert len(pairs) == compared == 299 and uncompared == 0
    search = index.Search(BANDS, LEAST, 2048 * MB, 1, tmp_path / "temporary")
    found = index.find_copies(write(tmp_path, rows, 2), search)
    assert not found.first.any() and found.compared == 299, "exact copies take no part in the bands"


def test_documents_that_agree_with_the_middle_one_alone_are_connected(tmp_path):
    rows = make_rows(3)
    rows["content"] = np.arange(6).reshape(3, 2)
    rows["minima"][:] = rows["minima"][0]
    rows["minima"][1, :2] += 1  # 10 of 12 places like the others
    rows["minima"][2, :4] += 1
    np.array([(7, d) for d in (0, 2, 1)], dtype=index._RECORD).tofile(tmp_path / "keys")
    agree = lambda a, b: similarity(a, b) >= 0.8  # noqa: E731
    pairs, _, _ = index.pairs_of(write(tmp_path, rows, 1), agree, tmp_path / "keys")
    assert sorted(sorted(pair) for pair in pairs.tolist()) == [[0, 1], [1, 2]]


def test_comparing_ends_where_nothing_agrees(tmp_path):
    files = write(tmp_path, make_rows(400), 1)
    np.array([(7, d) for d in range(400)], dtype=index._RECORD).tofile(tmp_path / "keys")
    pairs, _, uncompared = index.pairs_of(files, lambda a, b: np.zeros(len(a), dtype=bool), tmp_path / "keys")
    assert len(pairs) == 0 and uncompared == 400 - index._MOST_TURNS


@pytest.mark.parametrize("count, pairs", [(1, 0), (50, 20), (1000, 700), (1000, 3000)])
def test_groups_are_connected_components_with_their_first_document(count, pairs):
    rng = np.random.default_rng(count + pairs)
    links = rng.integers(0, count, size=(pairs, 2))
    groups = index.Groups(count)
    for part in np.array_split(links, 5):
        groups.join(part)
    want = list(range(count))
    for a, b in links.tolist():
        old, new = max(want[a], want[b]), min(want[a], want[b])
        want = [new if w == old else w for w in want]
    assert groups.finish().tolist() == want


def test_a_chain_of_any_order_is_one_group():
    groups = index.Groups(10_000)
    chain = np.stack([np.arange(9999), np.arange(1, 10_000)], axis=1)
    groups.join(np.random.default_rng(0).permutation(chain))
    assert not groups.finish().any()


def test_keys_go_to_no_more_files_than_may_be_open(tmp_path, monkeypatch):
    search = index.Search(BANDS, LEAST, 120 * MB, 1, tmp_path)
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1024))
    assert index._file_count(search, 100 * MB // 64 // 4, 16) == 24
    monkeypatch.setattr("resource.getrlimit", lambda _: (33, 33))
    with pytest.raises(ValueError, match="--memory 120M is too little"):
        index._file_count(search, 100 * MB // 64 // 4, 16)
    monkeypatch.setattr("resource.getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert index._file_count(search, 100 * MB // 64 // 4, 16) == 24 and open_files(32) == 32


@pytest.mark.parametrize("second", ["the next one", "the last one"])
def test_a_group_is_joined_in_few_passes_over_it(second):
    count = 30_000
    groups, first = index.Groups(count), np.arange(count - 1)
    links = np.stack([first, first + 1 if second == "the next one" else np.full(count - 1, count - 1)], axis=1)
    firsts, lines = lines_run(lambda: groups.join(links) or groups.finish())
    assert not firsts.any() and lines < 1000


def test_rows_and_ids_are_read_in_any_order(tmp_path):
    rows = make_rows(100)
    names = [f"id-{'é' * (i % 5)}{i}" for i in range(100)]
    files = write(tmp_path, rows, 4)
    for number, path in enumerate(files.paths):
        first, stop = files.firsts[number : number + 2]
        part = rows[first:stop]
        encoded = [name.encode() for name in names[first:stop]]
        part["id_bytes"] = [len(name) for name in encoded]
        part["id_start"] = np.cumsum(part["id_bytes"]) - part["id_bytes"]
        path.write_bytes(part.tobytes())
        ids_path(path).write_bytes(b"".join(encoded))
    documents = np.array([99, 0, 5, 5, 64, 98, 1])
    read = files.read(documents)
    assert (read == rows[documents]).all()
    assert files.ids(documents, read) == [names[d] for d in documents]
    assert sum(len(chunk) for _, chunk in files.chunks(7, "reading")) == len(files) == 100
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match=f"{path} has become shorter while it was read"):
        files.read(documents)
    ids_path(path).rename(path)
    with pytest.raises(ValueError, match=r"is damaged \([0-9]+ bytes behind its [0-9]+ rows\)"):
        SignatureFiles([path], PERMUTATIONS)


def test_a_file_that_a_disk_does_not_give_is_named(tmp_path, unreadable):
    rows = make_rows(1)
    rows["id_bytes"] = 4
    files = write(tmp_path, rows, 1)
    for path in (files.paths[0], ids_path(files.paths[0])):
        path.unlink()
        path.symlink_to(unreadable)
    for path, read in (
        (files.paths[0], lambda: files.read(np.array([0]))),
        (ids_path(files.paths[0]), lambda: files.ids(np.array([0]), rows)),
        (unreadable, lambda: list(named_groups(unreadable, str))),
    ):
        with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
            read()


def test_finding_the_files_of_a_few_documents_does_not_pass_over_all_files(tmp_path):
    files = write(tmp_path, make_rows(10), 3)
    files.firsts = np.arange(3_000_001)
    found, lines = lines_run(lambda: list(files._by_file(np.array([5, 7, 7, 2_999_999]))))
    assert found == [(5, 0, 1), (7, 1, 3), (2_999_999, 3, 4)] and lines < 100
