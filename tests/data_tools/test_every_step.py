"""What holds for every step: faults are counted and listed, finished work is found, a full disk and a kill cost nothing."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from data_tools import registry
from data_tools.inputs import OUTPUT_FORMATS, URL_FORMATS, list_inputs
from tests.bad_disks import largest_file
from tests.data_tools.every_step import STEPS, TEXT_STEPS, lines_of, prepare
from tests.data_tools.memory import descendants, peak_bytes
from tests.data_tools.steps import run_step
from tests.lines.test_contents import change_a_byte
from tests.vocabularies import make_gpt2_vocabulary

pytest.importorskip("tldextract")

ROOT = Path(__file__).resolve().parents[2]
BAD_LINES = {
    b'{"text": "\xff\xfe"}': "invalid UTF-8",
    b'{"text": "cut off': "bad JSON",
    b'{"body": "no text"}': "no key 'text'",
    b'{"text": 5}': "not a string but int",
    b"[1, 2]": "not a JSON object",
    b'{"text": "", "deep": ' + b"[" * 500 + b"]" * 500 + b"}": "more than 500 lists and objects inside of each other",
    b'{"text": "' + b"x" * 60_000 + b'"}': "a line of 60013 bytes, more than",
}
BAD_URLS = {
    b"http://example.org/\xff": "invalid UTF-8",
    b"http://example.org/" + b"x" * 60_000: "a line of 60020 bytes",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outputs_of(case):
    return [Path(name).read_bytes() for name in case.outputs]


def without_outputs(case):
    return not any(Path(name).exists() for name in case.outputs)


def test_every_step_is_here_but_those_that_make_no_files_of_an_input():
    unlike = STEPS.keys() ^ registry.STEPS.keys() ^ {"inspect", "sample_corpus", "run"}
    assert not unlike, "tests/data_tools/every_step.py has a case of each step of data_tools/registry.py"


@pytest.mark.parametrize("step", TEXT_STEPS)
def test_each_bad_line_is_counted_listed_and_fatal_with_strict(folder, step):
    bad = BAD_URLS if step == "filter_urls" else BAD_LINES
    good = lines_of(step, 100)
    case = prepare(step, folder, [good[0], *(line for fault in bad for line in (fault, b"")), *good[1:]])
    argv = case.argv("--max-line-mb", 0.05)
    place = f"{case.source}:{2}: {next(iter(bad.values()))}"
    with pytest.raises(ValueError, match=f"^{place}"):
        run_step(step, *argv, "--strict")
    assert without_outputs(case)
    statistics = run_step(step, *argv)
    json.dumps(statistics)
    statistics |= statistics["outputs"][0] if step == "tokenize" else {}
    assert (statistics["step"], statistics["bad_lines"]) == (step, len(bad)) and "seconds" in statistics
    for number, (error, reason) in enumerate(zip(statistics["first_errors"], bad.values(), strict=True)):
        assert error.startswith(f"{case.source}:{2 * number + 2}: ") and reason in error
    lists = [Path(f"{case.record}.dropped.jsonl")] if case.record else Path().glob("*.dedup/*.dropped.jsonl")
    records = [json.loads(line) for path in lists for line in path.read_bytes().splitlines()]
    records = [record for record in records if record["reason"] == "bad line"]
    assert [(r["file"], r["line"], r["id"]) for r in records] == [
        (case.source, 2 * number + 2, None) for number in range(len(bad))
    ]
    assert all(reason in record["detail"] for record, reason in zip(records, bad.values(), strict=True))
    assert not all(path.stat().st_size == 0 for path in map(Path, case.outputs)) or step in (
        "quality",
        "find_duplicates",
    )


@pytest.mark.parametrize("step", STEPS)
def test_finished_work_is_found_until_a_byte_of_the_input_changes(folder, step):
    case = prepare(step, folder)
    run_step(step, *case.argv())
    assert not list(Path().rglob("*.partial*")), "a folder with such a file counts as one whose step has not finished"
    paths = list(map(Path, case.outputs))
    before, times = outputs_of(case), [path.stat().st_mtime_ns for path in paths]
    source = Path(case.source)
    os.utime(source)  # the same content at another time is the same input
    again = run_step(step, *case.argv())
    assert again.get("skipped") or again.get("shards_skipped") or step == "tokenize"
    assert (outputs_of(case), [path.stat().st_mtime_ns for path in paths]) == (before, times)
    change_a_byte(source)
    statistics = run_step(step, *case.argv())
    assert not (statistics.get("skipped") or statistics.get("shards_skipped"))
    assert [path.stat().st_mtime_ns for path in paths] != times


OTHER_FLAGS = {
    "filter_urls": ("--keep-repeats", "--domains list", "--extensions list", "--block-kb 9", "--max-line-mb 9"),
    "clean": ("--min-tokens 1", "--min-score 0.5", "--json-key url", "--block-kb 9", "--max-line-mb 9"),
    "quality": ("--rules fineweb gopher_quality", "--threshold fineweb_short_line=9", "--json-key url"),
    "dedup": ("--similarity 0.8", "--bands 7", "--rows 4", "--json-key url"),
    "decontaminate": ("--ngram 5", "--min-matches 2", "--evaluation list.txt", "--json-key url --evaluation-key text"),
    "merge": ("--id-key url", "--json-key url"),
    "shuffle": ("--seed 5", "--json-key url"),
    "split": ("--seed 5", "--parts a=0.4 b=0.6", "--json-key url"),
    "train_tokenizer": ("--vocab-size 390", "--sample-mb 0.01"),
    "find_duplicates": ("--similarity 0.8", "--bands 7", "--rows 4", "--json-key url", "--id-keys text"),
    "remove_group_duplicates": ("--groups other.jsonl", "--json-key url", "--id-keys text"),
}


@pytest.mark.parametrize("step, flags", [(step, flags) for step, several in OTHER_FLAGS.items() for flags in several])
def test_what_was_made_with_other_flags_is_made_anew(folder, step, flags):
    case = prepare(step, folder)
    Path("list").write_text("")
    Path("list.txt").write_text("words " * 20)
    Path("other.jsonl").write_text('{"0": ["u7", "u3"]}\n')
    make_gpt2_vocabulary(folder / "data" / "gpt2_bpe")
    for argv in (case.argv(), case.argv(*flags.split())):
        for is_found in (False, True):
            statistics = run_step(step, *argv)
            assert bool(statistics.get("skipped") or statistics.get("shards_skipped")) == is_found


@pytest.mark.parametrize("step", STEPS)
def test_what_no_step_has_made_is_not_overwritten(folder, step):
    case = prepare(step, folder)
    path = Path(case.outputs[0])
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"precious")
    with pytest.raises(ValueError, match=f"{path} exists"):
        run_step(step, *case.argv())
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize("step", STEPS)
def test_a_full_disk_is_one_line_and_costs_nothing(folder, step):
    case = prepare(step, folder)
    full = pytest.raises(OSError, match="File too large while writing .*: make room and start again")
    with largest_file(3000), full as error:
        run_step(step, *case.argv())
    assert "\n" not in str(error.value) and str(error.value).count("make room") == 1
    assert without_outputs(case) and not list(Path().rglob("out*.done.json"))
    run_step(step, *case.argv())
    after = outputs_of(case)
    (folder / "new").mkdir()
    os.chdir(folder / "new")
    prepare(step, folder / "new")
    run_step(step, *case.argv())
    assert outputs_of(case) == after


@pytest.mark.parametrize("step", TEXT_STEPS)
def test_empty_input_is_no_fault_but_where_nothing_can_be_made_of_it(folder, step):
    case = prepare(step, folder, [])
    if step in ("tokenize", "train_tokenizer"):
        with pytest.raises(ValueError, match="no line of in.jsonl holds a text"):
            run_step(step, *case.argv())
        assert without_outputs(case)
    else:
        statistics = run_step(step, *case.argv())
        assert statistics["documents"] == 0 and not any(outputs_of(case))


@pytest.mark.parametrize("line", [b'{"content": "a text"}', b'[\n{\n"text": "a"\n}\n]', b'{"text": "cut'])
@pytest.mark.parametrize("step", [name for name in TEXT_STEPS if name != "filter_urls"])
def test_a_source_without_a_document_is_refused_at_once(folder, step, line):
    case = prepare(step, folder, lines_of(step, 100))
    Path("bad.jsonl").write_bytes(b"\n" + line + b"\n\n")
    for inputs in (["bad.jsonl"], ["in.jsonl", "bad.jsonl"]):
        message = (
            "^no line of bad.jsonl holds a text under the key 'text': .* bad, 0 without text; the first: bad.jsonl:2: "
        )
        with pytest.raises(ValueError, match=message):
            run_step(step, *case.argv("--input", *inputs))
        assert without_outputs(case) and not list(folder.rglob("*.partial*"))


@pytest.mark.parametrize("step", [name for name in STEPS if name not in ("train_tokenizer", "group_duplicates")])
def test_progress_says_how_fast_and_how_long(folder, step, caplog, monkeypatch):
    import megazero.lines.progress as progress

    case = prepare(step, folder)
    caplog.set_level(logging.INFO)
    original = progress.Progress.__init__

    def by_time(self, name, total_bytes, *_, **__):
        original(self, name, total_bytes)

    monkeypatch.setattr(progress, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(progress.Progress, "__init__", by_time)
    run_step(step, *case.argv())
    assert any("documents/s" in r.message and "MB/s, " in r.message and "ETA" in r.message for r in caplog.records)


PARALLEL = [step for step in TEXT_STEPS if step != "train_tokenizer"]


@pytest.mark.parametrize("step", PARALLEL)
def test_a_small_input_is_done_before_a_worker_would_have_started(folder, step, monkeypatch):
    monkeypatch.setattr("megazero.lines.workers._Pool", None)
    case = prepare(step, folder)
    run_step(step, *case.argv("--workers", 8, "--memory", "4G"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "run"])
@pytest.mark.parametrize("step", PARALLEL)
def test_a_kill_costs_nothing(folder, step, victim):
    lines = lines_of(step, 400_000 if step in ("filter_urls", "merge") else 60_000)
    case = prepare(step, folder, lines)
    work = ["--max-line-mb", 1] if step == "tokenize" else ["--max-line-mb", 1, "--block-kb", 64]
    command = [sys.executable, "-m", "data_tools", step, *case.argv(*work, "--workers", 2)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (workers := [pid for pid, depth in descendants(process.pid) if depth == 2]):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    late = time.monotonic() + 0.3
    while time.monotonic() < late and not any(path.stat().st_size for path in Path().rglob("*.partial*")):
        time.sleep(0.01)
    os.kill(workers[0] if victim == "worker" else process.pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == (1 if victim == "worker" else -signal.SIGKILL), errors
    if victim == "worker":
        assert "error: a worker process died, perhaps for want of memory. Start again" in errors
    assert without_outputs(case)
    subprocess.run(command, env=environment, check=True, capture_output=True)
    resumed = outputs_of(case)
    (folder / "new").mkdir()
    os.chdir(folder / "new")
    run_step(step, *prepare(step, folder / "new", lines).argv(*work))
    assert outputs_of(case) == resumed


MEMORY = 400 << 20


@pytest.mark.slow
@pytest.mark.parametrize("step", TEXT_STEPS)
def test_memory_is_what_was_granted(folder, step):
    """Documents or URLs of which the step would hold far more than it may, if it held what it has to know of each."""
    count = 1_200_000 if step in ("filter_urls", "merge") else 100_000
    long = 40 if step in ("merge", "filter_urls") else 400
    text = b"the cat sat on a mat " * (long // 20)
    if step == "filter_urls":
        lines = [b"http://example%d.org/a-page" % (number % 700_000) for number in range(count)]
    elif step == "train_tokenizer":
        lines = lines_of(step, 40_000, longest=200)
    else:
        lines = [b'{"id": %d, "text": "%s%d", "url": "u%d"}' % (n, text, n, n) for n in range(count)]
    case = prepare(step, folder, lines)
    work = ["--memory", MEMORY, "--max-line-mb", 1]
    if step == "train_tokenizer":
        work += ["--sample-mb", 4]
    else:
        work += ["--workers", 2]
    command = [sys.executable, "-m", "data_tools", step, *case.argv(*work)]
    peak, processes = peak_bytes(command, {**os.environ, "PYTHONPATH": str(ROOT)})
    assert peak < MEMORY and (processes > 2 or step == "train_tokenizer"), f"{peak >> 20} MB in {processes} processes"


@pytest.mark.slow
@pytest.mark.parametrize("step", TEXT_STEPS)
def test_a_line_of_a_gigabyte_is_never_held(folder, step):
    good = lines_of(step, 300)
    case = prepare(step, folder, good)
    with open(case.source, "ab") as file:
        file.write(b'{"text": "')
        for _ in range(1 << 10):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n' + good[0] + b"\n")
    work = ["--memory", MEMORY, "--workers", 2]
    if step == "train_tokenizer":  # for the sample to be drawn from all lines, it must be as large as the file
        work = ["--memory", 40 << 30, "--sample-mb", 1200]
    command = [sys.executable, "-m", "data_tools", step, *case.argv(*work)]
    peak, _ = peak_bytes(command, {**os.environ, "PYTHONPATH": str(ROOT)})
    Path(case.source).unlink()
    assert peak < MEMORY, f"{peak >> 20} MB"
    lists = [Path(f"{case.record}.dropped.jsonl")] if case.record else Path().glob("*.dedup/*.dropped.jsonl")
    assert any(b"a line of 1073741" in path.read_bytes() for path in lists)


@pytest.mark.parametrize("output", [">&- 2>&-", "| cat"], ids=["closed", "ascii"])
def test_what_standard_output_cannot_take_ends_no_step(tmp_path, output):
    line = '{"text": "some words"}\n'
    (tmp_path / "größe.jsonl").write_text(line)
    command = [sys.executable, "-m", "data_tools", "dedup", "--input", "größe.jsonl", "--output", "größe2.jsonl"]
    shell = ["bash", "-c", f'set -o pipefail; "$@" {output}', "bash", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    subprocess.run(shell, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "größe2.jsonl").read_text() == line


OTHER_SETTINGS = {
    **dict.fromkeys(
        ("merge", "filter_urls", "clean", "quality", "apply", "remove_group_duplicates"), ("--max-line-mb", 3)
    ),
    **dict.fromkeys(("shuffle", "split"), ("--seed", 7)),
    **dict.fromkeys(("dedup", "find_duplicates"), ("--similarity", 0.95)),
    "decontaminate": ("--ngram", 5),
    "tokenize": ("--append-eod",),
    "import_tokens": ("--delimiter", 9),
    "train_tokenizer": ("--vocab-size", 390),
}


def dies_after(changes: int, step: str, argv: list[str]) -> bool:
    """Whether a run dies that is killed once it has made so many changes to files, because it makes that many."""
    child = os.fork()
    if not child:
        left = changes

        def counted(change):
            def wrapper(*args, **kwargs):
                nonlocal left
                result = change(*args, **kwargs)
                left -= 1
                if not left:
                    os._exit(9)
                return result

            return wrapper

        for name in ("replace", "fsync", "unlink", "rmdir", "ftruncate"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            run_step(step, *argv)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.slow
@pytest.mark.parametrize("step", OTHER_SETTINGS)
def test_a_run_with_other_settings_that_dies_after_any_change_of_files_spoils_neither_result(folder, step):
    case = prepare(step, folder)
    both = case.argv(), case.argv(*OTHER_SETTINGS[step])
    formats = URL_FORMATS if step == "filter_urls" else OUTPUT_FORMATS
    (folder / "more.jsonl").touch()  # what import_tokens reads is no input of another step
    wanted = []
    for argv in both:
        run_step(step, *argv)
        wanted.append(outputs_of(case))
    for changes in count(1):
        run_step(step, *both[0])
        died = dies_after(changes, step, both[1])
        for argv, outputs in zip(both, wanted, strict=True):
            run_step(step, *argv)
            assert outputs_of(case) == outputs, f"after {changes} changes"
            list_inputs([folder], formats)  # raises where a step that will not go on has left something unfinished
        if not died:
            break
    assert changes > 3
