"""Each rule for URLs, on URLs that just keep and just break it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_tools import blacklist_urls
from data_tools.blacklists import DOMAINS, EXTENSIONS
from data_tools.divided import divided
from data_tools.repeats import RECORD, repeats_in
from tests.data_tools.steps import dropped, run_step

pytest.importorskip("tldextract")

KEPT = [
    "http://example.com/a",
    "https://news.example.co.uk/story.html?picture=a.jpg",  # the ending is the path's
    "http://example.com/v1.2/",
    "http://youtube.com.example.org/a",  # the registered domain is example.org
    "http://notyoutube.com/a",
    "http://bücher.example/ü",
    "http://127.0.0.1:8080/page",
    "http://[2001:db8::1]/page",
    "http://example.com",
    "http://example.com/b#chapter.pdf",
    "HTTP://Example.com/A",
]
DROPPED = {
    "http://a": "short",
    "https://www.youtube.com/watch?v=1": "domain youtube.com",
    "http://M.YouTube.COM/watch": "domain youtube.com",
    "http://www.amazon.co.uk/thing": "domain amazon.co.uk",
    "http://example.com/picture.JPG?size=large": "extension .jpg",
    "http://example.com/archive.tar.gz#part": "extension .gz",
    "ftp://example.com/file": "malformed neither http nor https",
    "example.com/page": "malformed neither http nor https",
    "http:///no/host": "malformed no valid host",
    "http://localhost/page": "malformed no valid host",
    "http://exa mple.com/": "malformed a character that no URL has",
    "http://example.com:port/": "malformed",
    "http://-example.com/a": "malformed",
    "http://a..b.com/page": "malformed",
}


def test_every_rule(tmp_path):
    (tmp_path / "urls.txt").write_text("\n".join([*KEPT, "", *DROPPED, "  http://example.com/a  "]) + "\n", "utf-8")
    statistics = run_step("filter_urls", "--input", tmp_path / "urls.txt", "--output", tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text("utf-8").splitlines() == KEPT
    found = dropped(tmp_path / "out.txt")
    assert found.pop("http://example.com/a") == "repeat"
    assert found.keys() == DROPPED.keys()
    assert all(found[url].startswith(reason) for url, reason in DROPPED.items())
    assert statistics["dropped"] == {"domain": 3, "extension": 2, "malformed": 8, "repeat": 1, "short": 1}
    assert statistics["blank_lines"] == 1


def test_repeats_are_found_over_all_files_and_not_when_they_may_stay(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"http://example.com/1\nhttp://example.com/2\n\xff\xfe\xff\n\xff\xfe\xff\n")
    (tmp_path / "b.txt").write_bytes(b"http://example.com/3\r\nhttp://example.com/1\r\n")
    both = ("--input", tmp_path / "a.txt", tmp_path / "b.txt", "--output", tmp_path / "out")
    statistics = run_step("filter_urls", *both)
    assert (tmp_path / "out" / "b.txt").read_text() == "http://example.com/3\n"
    assert (statistics["dropped"], statistics["bad_lines"]) == ({"repeat": 1}, 2)
    assert run_step("filter_urls", *both)["shards_skipped"] == 2
    assert run_step("filter_urls", *both, "--keep-repeats")["kept"] == 4


def test_lists_of_ones_own(tmp_path):
    (tmp_path / "urls.txt").write_text("http://a.example.com/x.html\nhttp://youtube.com/y\n")
    (tmp_path / "domains").write_text("# mine\nExample.com\n")
    (tmp_path / "extensions").write_text(".HTML  # and no other\n")
    flags = ("--input", tmp_path / "urls.txt", "--output", tmp_path / "out.txt")
    run_step("filter_urls", *flags, "--domains", tmp_path / "domains")
    assert (tmp_path / "out.txt").read_text() == "http://youtube.com/y\n"
    run_step("filter_urls", *flags, "--extensions", tmp_path / "extensions")
    assert (tmp_path / "out.txt").read_text() == ""
    (tmp_path / "domains").write_text("127.0.0.1\nco.uk\nexample.com\nwww.example.com\n")
    with pytest.raises(
        ValueError, match="--domains .*domains: no URL is found by the entry www.example.com: write example.com"
    ):
        run_step("filter_urls", *flags, "--domains", tmp_path / "domains")
    for entry, valid in {"png": ".png", ".tar.gz": ".gz"}.items():
        (tmp_path / "extensions").write_text(f".html\n{entry}\n")
        with pytest.raises(ValueError, match=f"--extensions .*extensions: .* the entry {entry}: write {valid}$"):
            run_step("filter_urls", *flags, "--extensions", tmp_path / "extensions")
    (tmp_path / "urls.txt").write_text(
        "http://www.bücher.de/z\nhttp://www.xn--bcher-kva.de/z\n", "utf-8"
    )  # the same host
    (tmp_path / "domains").write_text("xn--bcher-kva.de\n")
    run_step("filter_urls", *flags, "--domains", tmp_path / "domains")
    assert (tmp_path / "out.txt").read_text() == ""
    (tmp_path / "domains").write_text("bücher.de\n", "utf-8")
    with pytest.raises(ValueError, match="no URL is found by the entry bücher.de: write xn--bcher-kva.de"):
        run_step("filter_urls", *flags, "--domains", tmp_path / "domains")
    (tmp_path / "domains").write_bytes(b"example.com\nb\xfccher.example\n")
    with pytest.raises(ValueError, match="--domains .*domains is not UTF-8 text, at byte 13"):
        run_step("filter_urls", *flags, "--domains", tmp_path / "domains")


def test_built_in_lists_are_well_formed():
    assert all(ending.startswith(".") and ending.count(".") == 1 for ending in EXTENSIONS)  # no comma was forgotten
    assert all("." in domain and "/" not in domain and domain == domain.lower() for domain in DOMAINS)


@pytest.mark.parametrize("files", [1, 5])
def test_repeats_are_exact_in_any_number_of_files(tmp_path, files):
    generator = np.random.default_rng(0)
    records = np.empty(5000, RECORD)
    values = generator.integers(0, 1500, 5000)
    records["high"] = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    records["low"], records["place"] = values % 7, np.arange(5000)
    parts = np.array_split(records[generator.permutation(5000)], 9)
    with divided(tmp_path / "digests", parts, "high", files) as paths:
        assert len(paths) == files
        found = np.sort(np.concatenate(list(map(repeats_in, paths))))
    assert np.array_equal(found, np.setdiff1d(np.arange(5000), np.unique(values, return_index=True)[1]))


def test_megatrons_name_runs_as_a_script_whose_work_another_process_finds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "urls.txt").write_text("http://example.com/a\n")
    flags = ["--input", "urls.txt", "--output", "out.txt", "--workers", "1"]
    script = Path(blacklist_urls.__file__)
    done = subprocess.run([sys.executable, script, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"kept": 1' in done.stdout and (tmp_path / "out.txt").exists()
    assert run_step("filter_urls", *flags)["shards_skipped"] == 1  # though sets are in another order here
