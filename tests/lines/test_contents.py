"""The hash of a file's content: every byte counts, times and threads do not."""

from __future__ import annotations

import hashlib
import os

import pytest

from megazero.lines import contents
from megazero.lines.contents import check_unchanged, describe_files
from megazero.lines.jsonl import Block, read_blocks


def change_a_byte(path):
    """Changes one byte in the middle of a file, and sets its times as they were."""
    stat = path.stat()
    with open(path, "r+b") as file:
        file.seek(stat.st_size // 2)
        byte = file.read(1)
        file.seek(stat.st_size // 2)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)


def test_a_byte_in_the_middle_of_a_large_old_file_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "_TICK_NS", 0)  # the file is old enough for its hash to be remembered
    path = tmp_path / "a.jsonl"
    path.write_bytes(bytes(1 << 20))
    (before,) = describe_files([path])
    with monkeypatch.context() as patch:
        patch.setattr(contents, "Progress", None)  # nothing is read, and no bar drawn
        (again,) = describe_files([path])
        check_unchanged([path], [before])
    assert before == again == {"name": "a.jsonl", "bytes": 1 << 20, "pieces_sha256": before["pieces_sha256"]}
    change_a_byte(path)
    assert describe_files([path])[0]["pieces_sha256"] != before["pieces_sha256"]
    with pytest.raises(ValueError, match="a.jsonl was changed while it was read"):
        check_unchanged([path], [before])


@pytest.mark.parametrize("threads", [1, 3])
def test_times_and_threads_do_not_count(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(contents, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(contents, "_READ_BYTES", 300)
    files = {"a": b"x" * 2500, "b": b"x" * 2500, "empty": b"", "c": b"x" * 1000, "d": b"x" * 1001}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    os.utime(tmp_path / "b", ns=(0, 0))
    found = describe_files([tmp_path / name for name in files], threads)
    for entry, content in zip(found, files.values(), strict=True):
        pieces = [content[start : start + 1000] for start in range(0, len(content), 1000)]
        whole = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
        assert entry["pieces_sha256"] == hashlib.sha256(whole).hexdigest()


def test_a_file_that_grows_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\n")
    hash_piece = contents._hash_piece

    def grow(piece):
        with open(path, "ab") as file:
            file.write(b"two\n")
        return hash_piece(piece)

    monkeypatch.setattr(contents, "_hash_piece", grow)
    with pytest.raises(ValueError, match="a.jsonl was changed while it was read"):
        describe_files([path])


@pytest.mark.parametrize("field", ["nbytes", "modified_ns", "changed_ns"])
def test_a_file_of_another_size_or_time_after_it_was_read_is_an_error(tmp_path, monkeypatch, field):
    path, identity, numbers = tmp_path / "a.jsonl", contents._identity, iter(range(9))
    path.write_bytes(b"one\n")
    monkeypatch.setattr(contents, "_identity", lambda path: identity(path)._replace(**{field: next(numbers)}))
    with pytest.raises(ValueError, match="a.jsonl was changed while it was read"):
        describe_files([path])


def test_a_file_that_a_file_system_numbers_anew_has_not_changed(tmp_path, monkeypatch):
    path, identity, numbers = tmp_path / "a.jsonl", contents._identity, iter(range(9))
    path.write_bytes(b"one\n")
    (before,) = describe_files([path])
    monkeypatch.setattr(contents, "_identity", lambda path: identity(path)._replace(inode=next(numbers)))
    assert describe_files([path]) == [before]
    check_unchanged([path], [before])


@pytest.mark.parametrize(
    "read",
    [
        lambda path: contents._hash_piece((str(path), 0)),
        lambda path: Block(path, 0, 0, 10).read(),
        lambda path: list(read_blocks(path, 10)),
    ],
    ids=["hash", "block", "ends of blocks"],
)
def test_an_input_that_a_disk_does_not_give_is_named(read, unreadable):
    with pytest.raises(OSError, match=f"Input/output error: '{unreadable}'"):
        read(unreadable)
