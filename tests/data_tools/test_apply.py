"""A function of one's own: what it may return, what becomes of it, and what is said where it is wrong."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from data_tools.__main__ import main
from tests.data_tools.steps import dropped, read_documents, run_step, write_documents

OWN = """
from dataclasses import dataclass

@dataclass
class Label:
    source: "str"  # is looked for in sys.modules

text = "no function"

def own(document):
    if document["n"] % 5 == 0:
        return "five"
    if document["n"] % 2:
        document["text"] = document["text"].upper()
        document["meta"].update(vars(Label("own")))
    return document

def body(document: dict):
    return {"text": document["content"]}
assert body.__annotations__ == {"document": dict}, "the file is not taken for a part of the step's"

def fails(document):
    return {**document, "n": 1 // (document["n"] - 70)}

def forgets(document):
    document["n"] += 1

def odd(document):
    return {**document, "seen": {1, 2}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)
    write_documents(Path("in.jsonl"), [{"text": f"text {n}", "id": n, "n": n, "meta": {}} for n in range(100)])
    return tmp_path


def apply(name, *flags, source="in.jsonl", output="out.jsonl"):
    return run_step("apply", "--input", source, "--output", output, "--function", f"mine.py:{name}", *flags)


@pytest.mark.parametrize("workers", [1, 2])
def test_documents_are_kept_changed_in_place_and_dropped_by_reason(workers):
    Path("in.jsonl").write_bytes(Path("in.jsonl").read_bytes().replace(b'"id": 4,', b'"id":  4,'))
    statistics = apply("own", "--workers", workers, "--block-kb", 1)
    assert statistics["dropped"] == {"five": 20} and (statistics["kept"], statistics["changed"]) == (80, 40)
    assert dropped("out.jsonl") == {str(n): "five" for n in range(0, 100, 5)}
    expected = [
        {"text": f"TEXT {n}", "id": n, "n": n, "meta": {"source": "own"}}
        if n % 2
        else {"text": f"text {n}", "id": n, "n": n, "meta": {}}
        for n in range(100)
        if n % 5
    ]
    assert read_documents(Path("out.jsonl")) == expected
    assert b'"id":  4,' in Path("out.jsonl").read_bytes(), "what stays keeps its bytes"


def test_it_is_applied_again_if_the_file_has_changed_and_not_if_it_was_moved():
    assert apply("own")["shards_skipped"] == 0
    os.utime("mine.py")
    assert apply("own")["shards_skipped"] == 1
    Path("sub").mkdir()
    Path("mine.py").rename("sub/mine.py")
    flags = ("--input", "in.jsonl", "--output", "out.jsonl", "--function", "sub/mine.py:own")
    assert run_step("apply", *flags)["shards_skipped"] == 1
    Path("sub/mine.py").write_text(OWN.replace("% 5", "% 4"))
    assert run_step("apply", *flags)["dropped"] == {"five": 25}


def test_a_pipeline_applies_it_to_documents_with_another_key():
    write_documents(Path("stack.jsonl"), [{"content": "code"}] * 3)
    step = "{step: apply, input: stack.jsonl, output: own, function: mine.py:body, json-key: content}"
    Path("p.yaml").write_text(f"folder: out\nsteps:\n- {step}\n- {{step: merge, output: all.jsonl}}\n")
    assert [step["kept"] for step in run_step("run", "p.yaml")["steps"]] == [3, 3]
    assert read_documents(Path("out/all.jsonl")) == [{"text": "code"}] * 3


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_a_fault_of_the_function_names_file_line_document_and_its_own_lines(workers, ending):
    documents = read_documents(Path("in.jsonl"))
    if ending == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(
            pyarrow.table({name: [d[name] for d in documents] for name in ("id", "n", "text")}), "a.parquet"
        )
        line = 71
    else:
        data = b'bad\n{"text": "' + b"x" * 40_000 + b'"}\n\n' + Path("in.jsonl").read_bytes()
        Path(f"a.{ending}").write_bytes(gzip.compress(data) if ending == "jsonl.gz" else data)
        line = 74
    flags = ("--block-kb", 1, "--max-line-mb", 0.02, "--workers", workers)
    with pytest.raises(ValueError) as error:
        apply("fails", *flags, source=f"a.{ending}")
    start, *trace = str(error.value).splitlines()
    assert start == f"a.{ending}:{line}: document 70: mine.py:fails failed:"
    assert (
        trace[0].startswith("Traceback")
        and 'File "mine.py", line 23, in fails' in trace[1]
        and "ZeroDivision" in trace[-1]
    )
    assert not Path("out.jsonl").exists()


def test_the_file_of_the_function_is_not_overwritten():
    Path("mine.jsonl").write_text(OWN)
    with pytest.raises(ValueError, match=r"--output mine.jsonl is an input too"):
        run_step("apply", "--input", "in.jsonl", "--output", "mine.jsonl", "--function", "mine.jsonl:own")
    assert Path("mine.jsonl").read_text() == OWN


@pytest.mark.parametrize(
    "name, message",
    [
        ("forgets", "in.jsonl:1: document 0: mine.py:forgets returned NoneType, not the document, or a string, which"),
        ("odd", "in.jsonl:1: document 0: mine.py:odd returned what JSON cannot hold: Object of type set is"),
        ("gone", "--function mine.py:gone: no such name"),
        ("text", "--function mine.py:text: it is no function but str"),
        ("", "--function mine.py:: expected FILE.py:NAME"),
    ],
)
def test_what_is_no_function_of_documents_is_told(name, message):
    with pytest.raises(SystemExit) as error:
        main(["apply", "--input", "in.jsonl", "--output", "out.jsonl", "--function", f"mine.py:{name}"])
    assert str(error.value).startswith(f"error: {message}")


@pytest.mark.parametrize(
    "flag, message",
    [
        ("mine.py", "--function mine.py: expected FILE.py:NAME"),
        ("none.py:own", "--function none.py:own: there is no file none.py"),
        ("wrong.py:own", "--function: wrong.py does not run:\nTraceback.*No module named 'nothing'$"),
        ("bad.py:own", r"--function: bad.py does not run:\n.*File \"bad.py\", line 2\n.*SyntaxError"),
    ],
)
def test_a_file_that_gives_no_function_is_told(flag, message):
    Path("wrong.py").write_text("import nothing\n")
    Path("bad.py").write_text("\nimport =\n")
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s)^{message}"):
        run_step("apply", "--input", "in.jsonl", "--output", "out.jsonl", "--function", flag)
