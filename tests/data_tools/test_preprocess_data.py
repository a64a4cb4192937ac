"""The command line of tokenizing: Megatron's bytes, GPT-2's ids, and every line accounted for."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from data_tools import preprocess_data
from data_tools.__main__ import main
from data_tools.inputs import list_inputs
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.tokenizer import build_tokenizer
from tests.vocabularies import make_gpt2_vocabulary, make_sentencepiece, make_texts, shared_data, write_jsonl

zstandard = pytest.importorskip("zstandard")

SCRIPT = Path(preprocess_data.__file__)

# Text that tokenizers trip over, with the ids that GPT-2's own vocabulary gives it.
HARD_TEXTS = {
    "\U0001f44b\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e8\U0001f1ed \u2764\ufe0f": (
        "41840 233 8582 237 121 50169 101 447 235 41840 102 447 235 41840 100 12520 229 101 8582 229 255 43074 97 37929"
    ),
    "\u4e2d\u6587\u5b57\u7b26\uff0c\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3002\ud55c\uad6d\uc5b4": (
        "40792 23877 229 27764 245 163 105 99 171 120 234 33768 98 17312 105 45739 252 5641 24336 25084 43302 16764 "
        "47991 250 166 113 255 168 244 112"
    ),
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd! \u0645\u0631\u062d\u0628\u0627 \u202babc\u202c": (
        "50227 40010 27072 147 251 14360 95 27072 40010 147 251 0 47048 26897 148 255 39848 12919 564 104 39305 447 105"
    ),
    "zero\u200bwidth\u200d\ufeff joiner\xad \u2060": "22570 9525 10394 447 235 171 119 123 4654 263 3907 2343 223 254",
    "one\r\ntwo\r\n\r\n three\rfour": "505 201 198 11545 201 198 201 198 1115 201 14337",
    "e\u0301 \xc5ngstr\xf6m A\u030angstro\u0308m \u0928\u092e\u0938\u094d\u0924\u0947": (
        "68 136 223 6184 227 782 2536 9101 76 317 136 232 782 20661 136 230 76 28225 101 11976 106 11976 116 24231 235 "
        "11976 97 24231 229"
    ),
    "  a   b \t\tc\xa0\u3000d \n \n\n  ": "220 257 220 220 275 220 197 197 66 1849 5099 222 67 220 198 220 628 220 220",
    "I'll don't we\u2019ve 'S 'LL it's": "40 1183 836 470 356 447 247 303 705 50 705 3069 340 338",
    "3.14159 1,000,000 \xbd \xb2 \u2167 \u0663\u0664": (
        "18 13 1415 19707 352 11 830 11 830 25208 1587 110 2343 227 100 18923 96 149 97"
    ),
    "\x00\x01\x7f\x85 end": "188 189 221 126 227 886",
    "a<|endoftext|>b <|endoftext|>": "64 27 91 437 1659 5239 91 29 65 1279 91 437 1659 5239 91 29",
    "\U0010fffd\U0001d54f": "176 237 4204 47728 243 237",
    "half \ud83d a pair": "13959 20543 257 5166",  # an unpaired surrogate: U+FFFD
}


def megatron_files(documents, code, letter):
    """The .bin and .idx that the format's description gives for documents of one sequence each, written field by field."""
    sizes = [len(document) for document in documents]
    width = struct.calcsize(letter)
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(sizes) + 1)
    index += b"".join(struct.pack("<i", size) for size in sizes)
    index += b"".join(struct.pack("<q", width * sum(sizes[:i])) for i in range(len(sizes)))
    index += b"".join(struct.pack("<q", i) for i in range(len(sizes) + 1))
    return b"".join(struct.pack(f"<{letter}", token) for document in documents for token in document), index


def files_of(prefix):
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_gpt2_vocabulary(tmp_path / "v")
    write_jsonl(tmp_path / "in.jsonl", make_texts(30))
    return tmp_path


def run(capsys, *flags):
    main(["tokenize", *flags])
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_files_and_statistics_of_each_key(folder, capsys):
    flags = "--input in.jsonl --json-keys text url --output-prefix out/c --append-eod --workers 1 --dataset-impl mmap"
    result = run(capsys, *flags.split(), "--vocab-file", "v/vocab.json", "--merge-file", "v/merges.txt")
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path="v")
    results = result["outputs"]
    assert (result["documents"], result["step"], result["tokenizer_sha256"]) == (60, "tokenize", tokenizer.sha256)
    assert [r["prefix"] for r in results] == ["out/c_text_document", "out/c_url_document"]
    assert sorted(os.listdir("out")) == [
        f"c_{key}_document.{end}" for key in ("text", "url") for end in ("bin", "idx", "json")
    ]
    for result, texts in zip(results, (make_texts(30), [f"u{i}" for i in range(30)]), strict=True):
        data = IndexedDataset(result["prefix"])
        assert [data.get(i).tolist() for i in range(30)] == [[*tokenizer.encode(text), tokenizer.eod] for text in texts]
        counted = {name: result[name] for name in ("documents", "tokens", "lines", "bad_lines")}
        assert counted == {"documents": 30, "tokens": data.num_tokens, "lines": 30, "bad_lines": 0}


def test_without_append_eod_documents_end_with_their_text(folder, capsys):
    run(capsys, "--input", "in.jsonl", "--output-prefix", "c", "--tokenizer-path", "v", "--workers", "1")
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path="v")
    assert IndexedDataset("c_text_document").get(0).tolist() == tokenizer.encode(make_texts(30)[0])


def test_other_tokenizers(folder, capsys):
    make_sentencepiece(folder / "s.model")
    for name, kind, path in (("s", "SentencePiece", "s.model"), ("h", "HuggingFace", "v"), ("g", "GPT2BPE", "v")):
        flags = f"--input in.jsonl --workers 1 --output-prefix {name} --tokenizer-type {kind}Tokenizer --tokenizer-path"
        run(capsys, *flags.split(), path)
    s, h, g = (IndexedDataset(f"{name}_text_document").get(3).tolist() for name in "shg")
    assert h == g != s


@pytest.mark.parametrize(
    "flags, message",
    [
        ("absent.jsonl --tokenizer-path v", "error: --input absent.jsonl: there is no such file or folder"),
        ("in.jsonl", "error: GPT2BPETokenizer needs --vocab-file"),
        ("in.jsonl --tokenizer-path v --workers 0", "error: --workers must be at least 1"),
        ("in.jsonl --max-line-mb inf", "error: argument --max-line-mb: inf is not a finite number"),
        ("in.jsonl --tokenizer-path v --memory 1M", "error: --memory 1M is too little for one process"),
        ("in.jsonl --tokenizer-path v --json-keys body", "error: no line of in.jsonl holds a text"),
        ("bad.jsonl --tokenizer-path v --strict", "error: bad.jsonl:2: bad JSON"),
        (
            "array.json --tokenizer-path v",
            "error: no line of array.json holds a text under the key 'text': 1 lines, 1 bad, 0 without text; the first: "
            "array.json:1: not a JSON object but list. Each line must be one JSON object, in UTF-8",
        ),
    ],
)
def test_errors_are_one_line(folder, flags, message):
    (folder / "array.json").write_text('[{"text": "a"}, {"text": "b"}]\n')
    (folder / "bad.jsonl").write_text('{"text": "a"}\n{\n')
    with pytest.raises(SystemExit) as error:
        main(["tokenize", "--output-prefix", "c", "--input", *flags.split()])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_an_error_of_many_files_names_some(folder):
    names = [f"{number}.jsonl" for number in range(9)]
    for name in names:
        (folder / name).write_text("\n")
    with pytest.raises(SystemExit, match="^error: no line of 0.jsonl, 1.jsonl, 2.jsonl and 6 more holds a text"):
        main(["tokenize", "--output-prefix", "c", "--tokenizer-path", "v", "--input", *names])


def test_script_runs_by_itself_and_keeps_standard_output_for_the_result(folder):
    flags = ["--input", "in.jsonl", "--output-prefix", "c", "--tokenizer-path", "v", "--log-interval", "10"]
    done = subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["documents"] == 30 and "tokens/s" in done.stderr


def ids_of(text):
    return [int(i) for i in HARD_TEXTS[text].split()]


@pytest.fixture(scope="module")
def gpt2():
    """GPT-2's own vocabulary, ours and as the package tokenizers reads it."""
    folder = shared_data()
    if folder is None:
        pytest.skip("GPT-2's vocabulary is not on this machine")
    files = (str(folder / "gpt2_bpe" / name) for name in ("encoder.json", "vocab.bpe"))
    return build_tokenizer("GPT2BPETokenizer", tokenizer_path=folder / "gpt2_bpe"), tokenizers.ByteLevelBPETokenizer(
        *files
    )


@pytest.mark.parametrize("text", HARD_TEXTS, ids=ascii)
def test_hard_text_has_gpt2s_ids(gpt2, text):
    ours, reference = gpt2
    assert ours.encode(text) == ids_of(text)
    assert reference.encode(text.replace("\ud83d", "\ufffd")).ids == ids_of(text)


def test_hard_text_through_the_files(folder, capsys):
    """JSON in both spellings, and the ids of the package tokenizers with the same vocabulary."""
    texts = [text for text in HARD_TEXTS if "\ud83d" not in text]
    lines = [json.dumps({"text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts * 2 + texts[:1])]
    (folder / "hard.jsonl").write_bytes("\n".join(lines).encode())
    run(capsys, "--input", "hard.jsonl", "--output-prefix", "h", "--tokenizer-path", "v")
    data, reference = IndexedDataset("h_text_document"), tokenizers.Tokenizer.from_file("v/tokenizer.json")
    reference.encode_special_tokens = True
    assert [data.get(i).tolist() for i in range(len(data))] == [
        reference.encode(json.loads(line)["text"]).ids for line in lines
    ]


@pytest.mark.parametrize("code, letter, largest", [(8, "H", 65_498), (4, "i", 65_499)])
def test_files_are_megatrons_byte_for_byte(folder, capsys, code, letter, largest):
    vocabulary = json.loads(Path("v/vocab.json").read_text())
    vocabulary["<|endoftext|>"] = largest  # a vocabulary of 65,500 entries needs 32 bits in Megatron-LM
    Path("v/vocab.json").write_text(json.dumps(vocabulary))
    run(
        capsys, "--input", "in.jsonl", "--output-prefix", "c", "--tokenizer-path", "v", "--append-eod", "--workers", "2"
    )
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path="v")
    documents = [[*tokenizer.encode(text), largest] for text in make_texts(30)]
    assert files_of("c_text_document") == megatron_files(documents, code, letter)


def test_shards_of_all_kinds_are_one_corpus(folder, capsys):
    """A folder and a file; .gz of two members, .zst of two frames, .parquet and plain lines."""
    import pyarrow
    import pyarrow.parquet

    texts = make_texts(50)
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    parts = [b"".join(lines[i : i + 5]) for i in range(0, 50, 5)]
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl.gz").write_bytes(gzip.compress(parts[0]) + gzip.compress(parts[1]))
    (folder / "in" / "b.jsonl.zst").write_bytes(zstandard.compress(parts[2]) + zstandard.compress(parts[3]))
    (folder / "in" / "c.jsonl").write_bytes(parts[4] + parts[5])
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[30:40]}), folder / "in" / "d.parquet")
    (folder / "last.json").write_bytes(b"\xef\xbb\xbf" + parts[8] + parts[9])
    for workers in ("1", "2"):
        flags = ("--output-prefix", workers, "--tokenizer-path", "v", "--workers", workers)
        assert run(capsys, "--input", "in", "last.json", *flags)["documents"] == 50
    write_jsonl(folder / "all.jsonl", texts)
    run(capsys, "--input", "all.jsonl", "--output-prefix", "all", "--tokenizer-path", "v")
    assert files_of("1_text_document") == files_of("2_text_document") == files_of("all_text_document")


LONG = b'{"text": "the ranks"}\n' * 40_000  # so that the look at a file's first documents does not see its end


def test_a_file_that_is_cut_off_is_an_error_and_makes_nothing_that_looks_whole(folder):
    (folder / "cut.jsonl.zst").write_bytes(zstandard.compress(LONG)[:-20])
    with pytest.raises(SystemExit, match="error: cut.jsonl.zst: damaged or cut off"):
        main(["tokenize", "--input", "cut.jsonl.zst", "--output-prefix", "c", "--tokenizer-path", "v"])
    made = {path.name.removeprefix("c_text_document") for path in folder.glob("c_*")}
    assert made == {".partial.json", ".partial.0", ".partial.1", ".dropped.partial"}


def test_what_a_run_writes_into_the_folder_of_its_input_is_no_input(folder, capsys, caplog):
    (folder / "in").mkdir()
    write_jsonl(folder / "in" / "a.jsonl", make_texts(5))
    (folder / "in" / "b.jsonl.zst").write_bytes(zstandard.compress(LONG)[:-1])
    flags = ("--input", "in", "--output-prefix", "in/c", "--tokenizer-path", "v")
    before = list_inputs(["in"])
    with pytest.raises(SystemExit, match="cut off"):
        main(["tokenize", *flags])
    assert (folder / "in" / "c_text_document.partial.json").exists() and list_inputs(["in"]) == before
    assert "of other kinds" not in caplog.text
    (folder / "in" / "b.jsonl.zst").unlink()
    run(capsys, *flags)
    (folder / "in" / "manifest.json").write_text("{}")  # of a pipeline
    assert (folder / "in" / "c_text_document.json").exists() and list_inputs(["in"]) == before[:1]


SURROGATES = b"""{"text": "half \\ud83d a pair", "id": "a"}
{"text": "a whole \\ud83d\\ude00 pair", "id": "b"}
{"text": "plain", "id": "c"}
"""


def test_unpaired_surrogates_are_replaced_and_counted_or_left_out_and_listed(folder, capsys):
    (folder / "s.jsonl").write_bytes(SURROGATES)
    flags = ("--input", "s.jsonl", "--tokenizer-path", "v")
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path="v")
    replaced = run(capsys, *flags, "--output-prefix", "r")["outputs"][0]
    data = IndexedDataset("r_text_document")
    assert [tokenizer.decode(data.get(i)) for i in range(3)] == [
        "half \ufffd a pair",
        "a whole \U0001f600 pair",
        "plain",
    ]
    assert (replaced["surrogates_replaced"], replaced["bad_lines"]) == (1, 0) and "dropped_list" not in replaced
    rejected = run(capsys, *flags, "--output-prefix", "x", "--surrogates", "reject")["outputs"][0]
    assert (rejected["surrogates_replaced"], rejected["bad_lines"], rejected["documents"]) == (0, 1, 2)
    assert json.loads(Path(rejected["dropped_list"]).read_text()) == {
        "file": "s.jsonl",
        "line": 1,
        "id": "a",
        "reason": "bad line",
        "detail": "an unpaired surrogate at character 5 of the text",
    }


def test_every_line_left_out_is_listed_and_strict_remembers(folder, capsys):
    good = b'{"text": "good"}\n'
    (folder / "bad.jsonl").write_bytes(
        good
        + b'{"id": 7, "text": ""}\n\n{"x": 1}\n'
        + b'{"text": "'
        + b"y" * 2_000_000
        + b'"}\n'
        + good
        + b"\xff\n"
        + good
    )
    flags = ["--input", "bad.jsonl", "--output-prefix", "c", "--tokenizer-path", "v", "--max-line-mb", "1"]
    result = run(capsys, *flags)["outputs"][0]
    assert (result["documents"], result["bad_lines"], result["empty_documents"], result["lines"]) == (3, 3, 1, 8)
    records = [json.loads(line) for line in Path(result["dropped_list"]).read_text().splitlines()]
    assert [(r["file"], r["line"], r["id"], r["reason"]) for r in records] == [
        ("bad.jsonl", 2, "7", "no text"),
        ("bad.jsonl", 4, None, "bad line"),
        ("bad.jsonl", 5, None, "bad line"),
        ("bad.jsonl", 7, None, "bad line"),
    ]
    assert "a line of 2000013 bytes, more than the 1048576 allowed" in records[2]["detail"]
    with pytest.raises(SystemExit, match="error: bad.jsonl:4: no key 'text'.*found when c_text_document was made"):
        main(["tokenize", *flags, "--strict"])
    (folder / "bad.jsonl").write_bytes(good)
    assert run(capsys, *flags)["documents"] == 1
    assert not Path(result["dropped_list"]).exists(), "the list of another run is not left beside the new files"
