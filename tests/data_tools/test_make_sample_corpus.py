"""The sample corpus: prose alone, each passage once, the same for one environment."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_tools import make_sample_corpus as corpus
from data_tools.sample_corpus_passages import Source, is_prose, read_passages
from megazero.files import append_suffix, locked

ROOT = str(Path(corpus.__file__).parents[1])
IMPORT = f"import sys; sys.path.insert(0, {ROOT!r}); from data_tools import make_sample_corpus as corpus"

SOURCE = '''#!/usr/bin/env python
# -*- coding: utf-8 -*-
# The first comment says something about the whole file,
# and goes on for a second line.
"""Module docstring, long enough to count as a passage of prose.

    Indented continuation.
"""

LABEL = "not documentation, because it is one line long, however long it may be"
HELP = """
Long documentation in a string that is no docstring:
# this is not a comment, it is inside of a string that spans lines
it counts because it has several lines of its own.
"""


class Thing:
    """A class that is documented with one sentence of its own."""

    def method(self):
        "Short."
        # noqa: this comment is for a tool and not for a reader at all, however long it is
        x = 1  # a comment behind code is not taken, because it explains that line alone
        return x


def undocumented():
    "1234567890 1234567890 1234567890 1234567890 - = + - = + - = +"
'''


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Every ninth file of the corpus (all of it takes long), made twice with different numbers of workers."""
    folder = tmp_path_factory.mktemp("c")
    results = []
    (folder / "run.py").write_text(f"""{IMPORT}
corpus.PACKAGES = ("numpy",)
all_sources = corpus.find_sources
corpus.find_sources = lambda: (all_sources()[0][::9], all_sources()[1])
if __name__ == "__main__":
    from data_tools.__main__ import main
    main(["sample_corpus", *sys.argv[1:]])
""")
    for name, workers in (("a", "1"), ("b", "2")):
        flags = ["--output", str(folder / f"{name}.jsonl"), "--max-mb", "0.8", "--workers", workers]
        done = subprocess.run(
            [sys.executable, str(folder / "run.py"), *flags], capture_output=True, text=True, check=True
        )
        results.append(json.loads(done.stdout))
    return folder, results


def test_two_runs_are_byte_identical(two_runs):
    folder, (one, other) = two_runs
    assert (folder / "a.jsonl").read_bytes() == (folder / "b.jsonl").read_bytes() and one["sha256"] == other["sha256"]
    records = [json.loads((folder / f"{name}.jsonl.done.json").read_bytes()) for name in "ab"]
    assert records[0].pop("outputs") != records[1].pop("outputs") and records[0] == records[1]
    assert sorted(p.suffix for p in folder.iterdir()) == [".json", ".json", ".jsonl", ".jsonl", ".py"], (
        "nothing is left over"
    )


def test_the_record_describes_the_file(two_runs):
    folder, (result, _) = two_runs
    content = (folder / "a.jsonl").read_bytes()
    record = json.loads((folder / "a.jsonl.done.json").read_text())
    assert record["sha256"] == hashlib.sha256(content).hexdigest() and record["bytes"] == len(content)
    assert set(record["versions"]) == {"python", "numpy"}
    assert record["documents"] == content.count(b"\n") == result["documents"]


def test_documents_are_distinct_prose_without_paths_of_this_machine(two_runs):
    folder, _ = two_runs
    documents = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    size = sum(len(d["text"].encode()) for d in documents)
    assert 0.64e6 < size < 0.96e6, "--max-mb is kept to, roughly, by whole documents"
    assert all(set(d) == {"text", "url"} and len(d["text"]) >= corpus.MIN_DOCUMENT for d in documents)
    assert len({d["url"] for d in documents}) == len(documents)
    assert len({d["text"] for d in documents}) == len(documents)
    assert all(d["url"].split("-")[0] in ("python", "numpy") and "/test" not in d["url"] for d in documents)
    letters = sum(c.isalpha() or c.isspace() for d in documents for c in d["text"])
    assert letters > 0.8 * sum(len(d["text"]) for d in documents)
    assert sum(" the " in d["text"] for d in documents) > 0.8 * len(documents)


def test_passages_of_a_source_file(tmp_path):
    path = tmp_path / "s.py"
    path.write_text(SOURCE)
    assert read_passages(Source(path, "u")) == [
        "The first comment says something about the whole file,\nand goes on for a second line.",
        "Module docstring, long enough to count as a passage of prose.\n\nIndented continuation.",
        "Long documentation in a string that is no docstring:\n"
        "# this is not a comment, it is inside of a string that spans lines\n"
        "it counts because it has several lines of its own.",
        "A class that is documented with one sentence of its own.",
    ]


def test_files_that_cannot_be_read_are_left_out(tmp_path):
    for name, content in (("a.py", b"def ("), ("b.py", b"# \xff"), ("c.txt", b"control \x00 characters")):
        (tmp_path / name).write_bytes(content)
        assert read_passages(Source(tmp_path / name, "u")) == []
    assert read_passages(Source(tmp_path / "absent.py", "u")) == []


@pytest.mark.parametrize(
    "passage, expected",
    [
        ("A sentence of some length that tells the reader something.", True),
        ("Too short to say much.", False),
        ("=====  ======  ========  =======  ==== ====== === ==== ===", False),
        ("averyveryveryveryveryveryveryveryverylongwordwithoutanyspaces", False),
        ("A sentence of some length with a control \x01 character in it.", False),
        ("A sentence of some length with half a \ud800 character in it.", False),
    ],
)
def test_prose(passage, expected):
    assert is_prose(passage) == expected


def test_what_is_there_is_not_made_again(tmp_path, monkeypatch):
    args = argparse.Namespace(output=tmp_path / "new" / "c.jsonl", max_mb=1.0, workers=1, faults=False)
    documents = [{"text": "x" * 300, "url": "u"}]
    monkeypatch.setattr(corpus, "find_sources", lambda: ([], {"python": "3.14"}))

    def build(*_):
        with pytest.raises(BlockingIOError), locked(append_suffix(args.output, ".lock"), wait=False):
            pass  # no second run can make it at the same time
        return documents, {}

    monkeypatch.setattr(corpus, "build_documents", build)
    first = corpus.run(args)
    again = corpus.run(args)
    assert (first["skipped"], again["skipped"], again["sha256"]) == (False, True, first["sha256"])
    args.max_mb = 2.0
    assert not corpus.run(args)["skipped"]
    args.faults = True
    assert corpus.run(args)["planted"]["no_object"] == 1
    args.output.write_bytes(b"cut")
    assert not corpus.run(args)["skipped"]
    monkeypatch.setattr(corpus, "find_sources", lambda: ([], {"python": "2.7"}))
    assert not corpus.run(args)["skipped"]
    args.max_mb = 1e-6
    with pytest.raises(ValueError, match="--max-mb 1e-06 is less than any of the 1 documents"):
        corpus.run(args)
    args.output = tmp_path / "precious.jsonl"
    args.output.write_bytes(b"mine")
    with pytest.raises(ValueError, match="--output .*precious.jsonl exists and was not made by this tool"):
        corpus.run(args)
    assert args.output.read_bytes() == b"mine" and not list(tmp_path.rglob("*.lock"))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.31, 0.01])
def test_selection_is_spread_evenly(share):
    documents = [{"text": "x" * 1000, "url": str(i)} for i in range(1000)]
    chosen = [int(d["url"]) for d in corpus.select(documents, int(share * 1e6))]
    assert abs(len(chosen) - share * 1000) <= 1 and chosen == sorted(set(chosen))
    gaps = [b - a for a, b in zip(chosen, chosen[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_modules_are_not_imported():
    code = f"{IMPORT}\ncorpus.find_sources()\nassert not {{'torch', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
