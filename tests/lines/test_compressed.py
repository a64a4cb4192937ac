"""Compressed files: read as the bytes that were compressed, or reported as damaged."""

from __future__ import annotations

import gzip
import lzma
import os
import sys

import pytest

from megazero.lines.compressed import DAMAGE, open_bytes


def test_compressed_files_are_read_as_text(tmp_path, monkeypatch):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    (tmp_path / "a.xz").write_bytes(lzma.compress(b"one\ntwo\n"))
    (tmp_path / "a.json").write_bytes(b"one\ntwo\n")
    for name in ("a.gz", "a.xz", "a.json"):
        with open_bytes(tmp_path / name) as file:
            assert file.readline() == b"one\n" and file.read() == b"two\n"


def test_zst_needs_its_package_and_says_so(tmp_path, monkeypatch):
    (tmp_path / "a.zst").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)  # as if not installed
    with pytest.raises(ValueError, match="pip install zstandard"):
        open_bytes(tmp_path / "a.zst")


def test_zst_of_many_frames_is_read_whole_and_a_cut_one_is_an_error(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    parts = [bytes(range(256)) * 900, b"", b"two\n", os.urandom(70_000)]
    data = b"".join(zstandard.ZstdCompressor().compress(part) for part in parts)
    (tmp_path / "a.zst").write_bytes(data)
    with open_bytes(tmp_path / "a.zst") as file:
        assert file.read() == b"".join(parts)
    (tmp_path / "a.zst").write_bytes(data[:-100])
    with open_bytes(tmp_path / "a.zst") as file, pytest.raises(DAMAGE, match="inside of a compressed frame"):
        file.read()
    (tmp_path / "a.zst").write_bytes(data[: len(data) // 2] + b"noise")
    with open_bytes(tmp_path / "a.zst") as file, pytest.raises(DAMAGE):
        file.read()
