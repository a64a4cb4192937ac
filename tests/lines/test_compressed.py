"""Compressed files: read as the bytes that were compressed, or reported as damaged."""

from __future__ import annotations

import gzip
import lzma
import os
import sys
from functools import partial

import pytest

from megazero.lines.compressed import DAMAGE, open_bytes
from tests.traced import traced_peak


def test_compressed_files_are_read_as_text(tmp_path):
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


def test_xz_of_many_streams_is_read_whole_and_damage_behind_the_first_is_an_error(tmp_path):
    parts = [bytes(range(256)) * 900, b"", b"two\n", os.urandom(70_000)]
    streams = [lzma.compress(part) for part in parts]
    path = tmp_path / "a.xz"
    for padding in (b"", bytes(4), bytes(200_000)):
        path.write_bytes(padding.join([*streams, b""]))
        with open_bytes(path) as file:
            assert file.read() == b"".join(parts)
    second = bytearray(streams[3])
    second[3] ^= 1  # of the header, without which it is no stream
    for rest in (bytes(second), streams[3][:-1], streams[3][:5], b"noise", bytes(4) + b"noise"):
        path.write_bytes(streams[0] + rest)
        with open_bytes(path) as file, pytest.raises(DAMAGE):
            file.read()
    path.write_bytes(b"")
    with open_bytes(path) as file, pytest.raises(DAMAGE, match="the file ends before"):
        file.read()


@pytest.mark.parametrize(("ending", "most"), [("xz", 1 << 24), ("zst", 1 << 26)])
def test_what_decompresses_to_far_more_is_read_in_pieces(tmp_path, ending, most):
    compress = partial(lzma.compress, preset=0) if ending == "xz" else pytest.importorskip("zstandard").compress
    path = tmp_path / f"a.{ending}"
    path.write_bytes(compress(bytes(2 * most)))
    with traced_peak() as peak, open_bytes(path) as file:
        assert sum(map(len, iter(lambda: file.read(1 << 16), b""))) == 2 * most
        assert peak() < most
