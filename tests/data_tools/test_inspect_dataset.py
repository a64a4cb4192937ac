"""Looking into a tokenized corpus: the documents as they were, numbers that can be counted by hand, a picture."""

from __future__ import annotations

import json

import numpy as np
import pytest

from data_tools import inspect_statistics
from data_tools.__main__ import main
from data_tools.inspect_dataset import choose_documents, document_tokens
from data_tools.inspect_statistics import PERCENTILES, count_tokens, describe, document_lengths
from megazero.data import mmidx
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megazero.data.mmidx import write_index
from megazero.data.preprocess import tokenize_json
from megazero.data.tokenizer import build_tokenizer
from megazero.lines.resumable import WorkOptions
from tests.traced import traced_peak
from tests.vocabularies import make_gpt2_vocabulary, make_texts, write_jsonl

EOD = 0


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_gpt2_vocabulary(tmp_path / "v")
    texts = ["a \x1b[31mred\x1b[0m text\n\tof two lines \u202e\u4e2d", *make_texts(20)]
    tokenize_json(
        [write_jsonl(tmp_path / "in.jsonl", texts)],
        "c",
        build_tokenizer("GPT2BPETokenizer", tokenizer_path="v"),
        options=WorkOptions(1),
    )
    return texts


def write(prefix, documents, dtype=np.uint16):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    return IndexedDataset(prefix)


def inspect(capsys, *flags):
    main(["inspect", *flags])
    *shown, result = capsys.readouterr().out.splitlines()
    return "\n".join(shown), json.loads(result)


def test_documents_are_shown_as_they_were(corpus, capsys):
    flags = ("--documents", "1", "-1", "--max-tokens", "1000")
    shown, result = inspect(capsys, "c", "--tokenizer-path", "v", *flags)
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path="v")
    headings = [f"--- document {i}: {len(tokenizer.encode(corpus[i])) + 1} tokens\n" for i in (1, 20)]
    assert shown == "\n".join(f"{h}{corpus[i]}<|endoftext|>" for h, i in zip(headings, (1, 20), strict=True))
    assert (result["step"], result["documents"], result["tokenizer"]["sha256"]) == ("inspect", 21, tokenizer.sha256)


def test_text_on_a_terminal_cannot_command_it(corpus, capsys):
    shown, _ = inspect(capsys, "c.idx", "--tokenizer-path", "v", "--documents", "0")
    assert "\x1b" not in shown and "a \\x1b[31mred\\x1b[0m text\n\tof two lines" in shown
    shown, _ = inspect(capsys, "c", "--tokenizer-path", "v", "--documents", "0", "--max-tokens", "3")
    assert shown.startswith("--- document 0: ") and ", the first 3\n" in shown


def test_without_a_tokenizer_ids_are_shown(corpus, capsys):
    shown, result = inspect(capsys, "c", "--documents", "0", "--max-tokens", "4")
    ids = IndexedDataset("c").get(0)[:4].tolist()
    assert shown.endswith("\n" + " ".join(map(str, ids))) and result["tokenizer"]["type"] == "GPT2BPETokenizer"


def test_statistics_that_can_be_counted_by_hand(tmp_path):
    documents = [[[5, 6], [7, EOD]], [], [[EOD]], [[9, EOD, 9]], [[8, 8, 8, 8, 8, EOD]]]
    data = write(tmp_path / "c", documents)
    assert describe(data, document_lengths(data), vocab_size=9, eod=EOD) == {
        "documents": 5,
        "sequences": 5,
        "tokens": 14,
        "dtype": "uint16",
        "bytes": 28 + 34 + 5 * 12 + 6 * 8,
        "empty_documents": 1,
        "length": {"min": 0, "p5": 0, "p25": 1, "p50": 3, "p75": 4, "p95": 4, "p99": 4, "max": 6, "mean": 2.8},
        "smallest_id": 0,
        "largest_id": 9,
        "distinct_ids": 6,
        "unknown_ids": 2,
        "documents_ending_in_eod": 3,
        "eod_inside_documents": 1,
    }


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_counts_do_not_depend_on_chunks(tmp_path, monkeypatch, chunk):
    generator = np.random.default_rng(0)
    documents = [[generator.integers(0, 9, generator.integers(0, 5))] for _ in range(50)]
    data = write(tmp_path / "c", documents, np.int32)
    monkeypatch.setattr(inspect_statistics, "_CHUNK", chunk)
    tokens = np.concatenate([d[0] for d in documents])
    found = count_tokens(data, EOD)
    assert found.counts.tolist() == np.bincount(tokens).tolist()
    assert found.ending_in_eod == sum(len(d[0]) > 0 and d[0][-1] == EOD for d in documents)
    sizes, lengths = [len(d[0]) for d in documents], document_lengths(data)
    assert np.repeat(lengths.values, lengths.counts).tolist() == sorted(sizes)
    assert [lengths.percentile(p) for p in PERCENTILES] == np.percentile(sizes, PERCENTILES, method="lower").tolist()


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path, monkeypatch):
    """Less than a byte for each document is held at any time."""
    count = 2_000_000
    np.zeros(count, "<u2").tofile(tmp_path / "c.bin")
    with open(tmp_path / "c.idx", "wb") as file:
        write_index(file, np.dtype("<u2"), [(np.ones(count, np.int32), None)])
    for module in (inspect_statistics, mmidx):
        monkeypatch.setattr(module, "_CHUNK", 1 << 14)
    with traced_peak() as peak:
        data = IndexedDataset(tmp_path / "c")
        result = describe(data, document_lengths(data), eod=EOD)
        assert result["documents_ending_in_eod"] == count > peak()


def test_absurd_ids_are_reported_not_counted(tmp_path):
    data = write(tmp_path / "c", [[[-1, 2**31 - 1]]], np.int32)
    result = describe(data, document_lengths(data), vocab_size=9, eod=EOD)
    assert (result["smallest_id"], result["largest_id"]) == (-1, 2**31 - 1) and "distinct_ids" not in result


def test_documents_of_several_sequences(tmp_path):
    data = write(tmp_path / "c", [[[1, 2], [3]], [], [[4]]])
    assert [document_tokens(data, i, 9)[0].tolist() for i in range(3)] == [[1, 2, 3], [], [4]]
    assert (document_tokens(data, 0, 1)[0].tolist(), document_tokens(data, 0, 1)[1]) == ([1], 3)


def test_a_sample_is_the_same_for_the_same_seed():
    assert choose_documents(1000, [-1, 3], 5, 7) == choose_documents(1000, [-1, 3], 5, 7)
    assert choose_documents(1000, [-1, 3], 5, 7)[:2] == [999, 3] and len(set(choose_documents(10, [], 99, 0))) == 10
    assert sorted(choose_documents(10, [-1, 3], 8, 0)) == list(range(10)), "others than those that were asked for"


def test_histogram(corpus, capsys):
    _, result = inspect(capsys, "c", "--histogram", "new/h.png")
    from matplotlib import image

    picture = image.imread("new/h.png")
    assert result["histogram"] == "new/h.png" and picture.shape == (450, 800, 4) and picture[..., :3].std() > 0.1


def test_an_empty_corpus(tmp_path, capsys):
    write(tmp_path / "e", [])
    _, result = inspect(capsys, str(tmp_path / "e"))
    assert (result["documents"], result["tokens"], result["largest_id"]) == (0, 0, -1) and "length" not in result


@pytest.mark.parametrize(
    "flags, message",
    [
        (["absent"], "error: inspect absent: found no absent.idx"),
        (["in.jsonl"], "error: inspect in.jsonl stands for text, not tokens"),
        (["c", "--documents", "21"], "error: --documents 21: the corpus has 21 documents, 0 to 20"),
        (["c", "--max-tokens", "0"], "error: --max-tokens 0"),
        (["c", "--tokenizer-path", "w"], "error: c was tokenized with GPT2BPETokenizer"),
        (["e", "--histogram", "h.png"], "error: --histogram h.png: e has no tokens to draw"),
    ],
)
def test_errors_are_one_line(corpus, tmp_path, flags, message):
    make_gpt2_vocabulary(tmp_path / "w", 300)
    write("e", [])
    with pytest.raises(SystemExit) as error:
        main(["inspect", *flags])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
